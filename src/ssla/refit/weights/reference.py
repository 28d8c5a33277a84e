"""SSLA for one (x, y), as the paper writes it: slow, obvious, and the oracle of the fast engines.

Read it before `last_layer`, `last_layer_products` and `all_weights`, which compute the same numbers
for thousands of (x, y) at once. [2] is section 2 of method.md; docs/mathematics.md derives (1):

    log p(y|x,D) ≈ [ℓ_D(θ̃) − ℓ_D(θ̂) + log p(y|x,θ̃)]        likelihood
                 + [log π(θ̃) − log π(θ̂)]                    prior
                 − ½ [log|H̃(θ̃)| − log|H(θ̂)|]                curvature        (1)

Everything is a sum over observations; a tilde marks the sum with (x, y) in it. H is formed in full,
so K = J H⁻¹ Jᵀ is not needed, and this is for few weights and rows. RuntimeError where Newton finds
no maximum from θ̂, as at a saddle, or H or H̃ is indefinite. Of several modes it takes the one that
it reaches from θ̂; an engine may take another. Layers that `torch.func` cannot map fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, jacrev

from ssla.data import Batch, Inputs, as_inputs, check_batch, map_inputs
from ssla.likelihoods import Likelihood
from ssla.network import AnyParameters
from ssla.refit.increments import FISHER, OBSERVED
from ssla.refit.weights.refit_rows import as_matrix, training_data
from ssla.refit.weights.solved import HESSIAN
from ssla.report import AS_IS

if TYPE_CHECKING:
    from ssla.posterior import Posterior

TOLERANCE = 1e-10  # on √(gᵀH̃⁻¹g), the distance from the mode in posterior standard deviations
MOST_STEPS = 200
DAMPING = 1e-3  # a guess: the first λ, times the largest diagonal entry of H̃
ROUNDING = 1e-12  # a guess: of the objective's sum; a step may lower it by so much


class Observations(NamedTuple):
    """Some rows with one likelihood: a batch of D, or the new (x, y)."""

    f: Callable[[Tensor], Tensor]  # θ (P,) -> f_θ at these rows (b, C)
    y: Tensor  # (b, …)
    weights: Tensor  # (b,)
    likelihood: Likelihood

    def log_prob(self, theta: Tensor) -> Tensor:
        """Return ℓ(θ) = Σ_i w_i log p(y_i|f_i), for θ (P,)."""
        return (self.weights * self.likelihood.log_prob(self.y, self.f(theta))).sum()

    def change(self, theta: Tensor, start: Tensor) -> Tensor:
        """Return ℓ(θ) − ℓ(θ̂), row by row: two large sums are never subtracted [5]."""
        rows = self.likelihood.log_prob_difference(self.y, self.f(theta), self.f(start))
        return (self.weights * rows).sum()

    def curvature(self, kind: str, theta: Tensor) -> Tensor:
        """Return −∇²ℓ(θ), or Σ_i w_i J_iᵀ Λ_i J_i of the observed or expected Λ [1, 3] (P, P)."""
        if kind == HESSIAN:
            return -jacrev(grad(self.log_prob))(theta)  # type: ignore[no-any-return]
        f, J = self.f(theta), jacrev(self.f)(theta)
        if kind == FISHER:
            Lambda = self.likelihood.fisher(f)
        else:
            Lambda = self.likelihood.precision(self.y, f)
        return torch.einsum("bcp,b,bcd,bdq->pq", J, self.weights, Lambda.expand(*f.shape, -1), J)


class ReferenceRefit(NamedTuple):
    """The three increments of (1), with the mode and how it was reached."""

    likelihood: Tensor
    prior: Tensor
    curvature: Tensor
    theta: Tensor  # θ̃ (P,)
    steps: int  # Newton steps that were tried
    kind: str  # of both determinants: as asked for, or "fisher" where that is indefinite


def refit_one(
    posterior: Posterior, x: Inputs, y: Tensor, kind: str = OBSERVED, data: Any = None
) -> ReferenceRefit:
    """Compute (1) for one input x (1, …) and one y.

    kind: the curvature of both determinants, "observed", "fisher" or "hessian". data: the training
    data, where the posterior does not hold them. RuntimeError where Newton's method finds no
    maximum, or no curvature is positive definite.
    """
    prior, start = posterior.bound_prior, posterior.theta  # π, θ̂
    D = [
        open_observations(posterior, batch, posterior.likelihood)
        for batch in training_data(posterior, data)
    ]
    new_batch = Batch(as_inputs(x), y.unsqueeze(0), None)
    new = open_observations(posterior, new_batch, posterior.likelihood.predictive)
    augmented = [*D, new]

    def gradient(rows: list[Observations], theta: Tensor) -> Tensor:
        """Return ∇(ℓ + log π) at θ (P,)."""
        return torch.stack([grad(r.log_prob)(theta) for r in rows]).sum(0) + prior.gradient(theta)

    def H(kind: str, rows: list[Observations], theta: Tensor) -> Tensor:
        """Return −∇²(ℓ + log π) at θ, of one kind [1]: (P, P)."""
        total = torch.stack([r.curvature(kind, theta) for r in rows]).sum(0)
        return total + as_matrix(prior.precision(theta))

    # g₀ makes θ̂ the mode of the objective without (x, y) [4]; "as_is" takes it for one.
    g0 = torch.zeros_like(start) if posterior.mode == AS_IS else gradient(D, start)

    def likelihood(theta: Tensor) -> Tensor:
        """Return the first bracket of (1), tilted by g₀."""
        change = torch.stack([rows.change(theta, start) for rows in D]).sum()
        return change + new.log_prob(theta) - g0 @ (theta - start)

    def objective(theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the augmented log posterior, its gradient (P,) and its −∇² (P, P)."""
        value = likelihood(theta) + prior.log_prob(theta)
        return value, gradient(augmented, theta) - g0, H(HESSIAN, augmented, theta)

    theta, steps = maximise(objective, start)  # θ̃: the mode of the augmented log posterior [2]
    prior_increment = prior.log_prob(theta) - prior.log_prob(start)  # the second bracket of (1)
    for used in (kind, FISHER):  # [3]: the Fisher where the kind asked for is indefinite
        # [5] forbids to subtract two determinants; few weights in float64 allow it.
        curvature = half_logdet(H(used, D, start)) - half_logdet(H(used, augmented, theta))
        if not curvature.isnan():
            return ReferenceRefit(likelihood(theta), prior_increment, curvature, theta, steps, used)
    raise RuntimeError("H(θ̂) or H̃(θ̃) is not positive definite. Give a stronger prior.")


def open_observations(posterior: Posterior, batch: Batch, likelihood: Likelihood) -> Observations:
    """Check the rows of a batch, and return them with f as a function of θ in float64."""
    network, start = posterior.network, posterior.theta
    x, y, weights = check_batch(batch, likelihood.support_for(network.outputs), network.outputs)
    if isinstance(network, AnyParameters):
        double = lambda part: part.double() if part.is_floating_point() else part  # noqa: E731
        network_64 = replace(network, fixed_tensors=map_inputs(double, network.fixed_tensors))
        x_64 = map_inputs(double, network.cast(x))
        f = lambda theta: network_64.compute_outputs(network_64.layout.unpack(theta), x_64)  # noqa: E731
    else:  # a last layer: f = f̂ + J(θ − θ̂)
        f_hat, J = network.linearise(network.cast(x), start)
        f = lambda theta: f_hat + J.double().dense().values @ (theta - start)  # noqa: E731
    if weights is None:
        weights = torch.ones(len(y)).double()
    return Observations(f, y, weights, likelihood)


def maximise(objective: Callable[[Tensor], Any], theta: Tensor) -> tuple[Tensor, int]:
    """Return the maximum θ̃ that Newton's method reaches from θ (P,), and the number of steps.

    A step is (H + λI)⁻¹g with the least λ that goes uphill. objective: θ -> value, gradient (P,)
    and −∇² (P, P). RuntimeError where no maximum is reached.
    """
    damping = 0.0
    value, g, H = objective(theta)
    for step in range(MOST_STEPS):
        ridge = damping * H.diagonal().abs().max() * torch.eye(len(H), dtype=H.dtype)
        factor, info = torch.linalg.cholesky_ex(H + ridge)
        move = torch.cholesky_solve(g.unsqueeze(-1), factor).squeeze(-1)
        if not info and not damping and g @ move <= TOLERANCE**2:
            return theta, step
        trial = objective(theta + move)
        if not info and trial[0] >= value - ROUNDING:  # false where it is NaN
            theta = theta + move
            value, g, H = trial
            damping = damping / 10 if damping > DAMPING else 0.0
        else:
            damping = max(10 * damping, DAMPING)
    raise RuntimeError(f"No maximum was reached from θ̂ in {MOST_STEPS} steps: is θ̂ a saddle?")


def half_logdet(H: Tensor) -> Tensor:
    """Return ½ log|H| of H (P, P) by a Cholesky factor; NaN where H is not positive definite."""
    factor, info = torch.linalg.cholesky_ex(H)
    return factor.diagonal().log().sum() if not info else torch.tensor(torch.nan)
