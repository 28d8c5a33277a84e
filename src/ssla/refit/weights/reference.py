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
from ssla.priors import BoundPrior
from ssla.refit.increments import FISHER, OBSERVED
from ssla.refit.weights.refit_rows import as_matrix, open_training_data
from ssla.refit.weights.solved import HESSIAN
from ssla.report import AS_IS

if TYPE_CHECKING:
    from ssla.posterior import Posterior

# A guess: the largest √(gᵀH̃⁻¹g) at the end, the distance from the mode in posterior standard
# deviations.
TOLERANCE = 1e-10
MOST_STEPS = 200  # a guess
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

    def compute_log_prob_change(self, theta: Tensor, start: Tensor) -> Tensor:
        """Return ℓ(θ) − ℓ(start) as a sum of differences row by row, for θ and start (P,).

        Two large sums are never subtracted [5].
        """
        rows = self.likelihood.log_prob_difference(self.y, self.f(theta), self.f(start))
        return (self.weights * rows).sum()

    def curvature(self, curvature_kind: str, theta: Tensor) -> Tensor:
        """Return −∇²ℓ(θ) of one kind (P, P), for θ (P,).

        curvature_kind: "hessian" for the exact −∇²ℓ; "fisher" or "observed" for Σ_i w_i J_iᵀ Λ_i
        J_i with the expected or the observed Λ [1, 3].
        """
        if curvature_kind == HESSIAN:
            return -jacrev(grad(self.log_prob))(theta)  # type: ignore[no-any-return]
        f, J = self.f(theta), jacrev(self.f)(theta)
        if curvature_kind == FISHER:
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
    # of both determinants: as asked for, or "fisher" where that is indefinite
    curvature_kind: str


def refit_one(
    posterior: Posterior,
    x: Inputs,
    y: Tensor,
    curvature_kind: str = OBSERVED,
    data: Any = None,
    refit_y: Tensor | None = None,
) -> ReferenceRefit:
    """Compute (1) for one input x (1, …) and one y.

    curvature_kind: the curvature of both determinants, "observed", "fisher" or "hessian". data: the
    training data; None: those of the posterior. refit_y: the y at whose mode (1) is evaluated, as
    in `at_prediction`; None: y itself. RuntimeError where Newton's method finds no
    maximum, or no curvature is positive definite. ValueError where the data cannot be read again.
    """
    prior, start = posterior.bound_prior, posterior.theta  # π, θ̂
    # The conventions "paper" and "additive" leave π out of H, and "additive" out of the objective.
    objective_prior, determinant_prior = posterior.objective_prior, posterior.determinant_prior
    D = [
        open_observations(posterior, batch, posterior.likelihood)
        for batch in open_training_data(posterior, data)
    ]

    def open_new(target: Tensor) -> Observations:
        """Return (x, target) as observations."""
        batch = Batch(as_inputs(x), target.unsqueeze(0), None)
        return open_observations(posterior, batch, posterior.likelihood.predictive)

    new = open_new(y)
    refitted = new if refit_y is None else open_new(refit_y)

    def gradient(rows: list[Observations], theta: Tensor) -> Tensor:
        """Return ∇(ℓ + log π) at θ (P,)."""
        data_gradient = torch.stack([grad(part.log_prob)(theta) for part in rows]).sum(0)
        return data_gradient + objective_prior.gradient(theta)

    def H(
        curvature_kind: str, rows: list[Observations], theta: Tensor, bound: BoundPrior
    ) -> Tensor:
        """Return −∇²(ℓ + log prior) at θ (P,), of one kind [1]: (P, P)."""
        total = torch.stack([part.curvature(curvature_kind, theta) for part in rows]).sum(0)
        return total + as_matrix(bound.precision(theta))

    # g₀ makes θ̂ the mode of the objective without (x, y) [4]. mode="as_is" leaves it out.
    g0 = torch.zeros_like(start) if posterior.mode == AS_IS else gradient(D, start)

    def likelihood(theta: Tensor, added: Observations) -> Tensor:
        """Return the first bracket of (1) at θ (P,), with the tilt −g₀ᵀ(θ − θ̂)."""
        log_prob_change = torch.stack(
            [rows.compute_log_prob_change(theta, start) for rows in D]
        ).sum()
        return log_prob_change + added.log_prob(theta) - g0 @ (theta - start)

    def objective(theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the augmented log posterior, its gradient (P,) and its −∇² (P, P)."""
        value = likelihood(theta, refitted) + objective_prior.log_prob(theta)
        augmented = [*D, refitted]
        curvature = H(HESSIAN, augmented, theta, objective_prior)
        return value, gradient(augmented, theta) - g0, curvature

    # θ̃: the mode of the augmented log posterior [2].
    theta, steps = maximise_by_newton(objective, start)
    prior_increment = prior.log_prob(theta) - prior.log_prob(start)  # the second bracket of (1)
    # The Fisher information where the kind asked for is indefinite [3].
    for used_kind in (curvature_kind, FISHER):
        # [5] forbids to subtract two determinants; few weights in float64 allow it.
        curvature = compute_half_logdet(
            H(used_kind, D, start, determinant_prior)
        ) - compute_half_logdet(H(used_kind, [*D, new], theta, determinant_prior))
        if not curvature.isnan():
            return ReferenceRefit(
                likelihood(theta, new), prior_increment, curvature, theta, steps, used_kind
            )
    raise RuntimeError("H(θ̂) or H̃(θ̃) is not positive definite. Give a stronger prior.")


def open_observations(posterior: Posterior, batch: Batch, likelihood: Likelihood) -> Observations:
    """Check the rows of a batch, and return them with f as a function of θ in float64.

    ValueError where a target is not in the support of the likelihood. Rows without weights have
    weight one.
    """
    network = posterior.network
    x, y, weights = check_batch(batch, likelihood.support_for(network.outputs), network.outputs)
    if weights is None:
        weights = torch.ones(len(y)).double()
    return Observations(open_outputs(posterior, x), y, weights, likelihood)


def open_outputs(posterior: Posterior, x: Inputs) -> Callable[[Tensor], Tensor]:
    """Return the function θ (P,) -> f_θ(x) (b, C) in float64.

    A last layer is linear: f = f̂ + J(θ − θ̂).
    """
    network, start = posterior.network, posterior.theta
    if not isinstance(network, AnyParameters):
        f_hat, J = network.linearise(network.cast(x), start)
        return lambda theta: f_hat + J.double().to_dense().values @ (theta - start)
    network_64 = replace(network, fixed_tensors=map_inputs(_to_double, network.fixed_tensors))
    x_64 = map_inputs(_to_double, network.cast(x))
    return lambda theta: network_64.compute_outputs(network_64.layout.unpack(theta), x_64)


def _to_double(part: Tensor) -> Tensor:
    """Return a tensor in float64; whole numbers, as of embeddings, keep their dtype."""
    return part.double() if part.is_floating_point() else part


def maximise_by_newton(objective: Callable[[Tensor], Any], theta: Tensor) -> tuple[Tensor, int]:
    """Return the maximum θ̃ that Newton's method reaches from θ (P,), and the number of steps.

    A step is (H + λI)⁻¹g. λ starts at zero, grows tenfold after a step that is not uphill, and
    shrinks again after one that is. objective: θ -> value, gradient (P,) and −∇² (P, P).
    RuntimeError where no maximum is reached in MOST_STEPS.
    """
    damping = 0.0
    value, g, H = objective(theta)
    for step in range(MOST_STEPS):
        ridge = damping * H.diagonal().abs().max() * torch.eye(len(H), dtype=H.dtype)
        factor, info = torch.linalg.cholesky_ex(H + ridge)
        move = torch.cholesky_solve(g.unsqueeze(-1), factor).squeeze(-1)
        # `info` is not zero where H + λI is not positive definite: `move` has no meaning then.
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


def compute_half_logdet(H: Tensor) -> Tensor:
    """Return ½ log|H| of H (P, P) by a Cholesky factor; NaN where H is not positive definite."""
    factor, info = torch.linalg.cholesky_ex(H)
    return factor.diagonal().log().sum() if not info else torch.tensor(torch.nan)
