"""SSLA for one (x, y), as the paper writes it: slow, obvious, and the oracle of the fast engines.

Read it before `last_layer`, `last_layer_products` and `all_weights`, which compute the same numbers
for thousands of (x, y) at once. docs/mathematics.md derives (1), and docs/design.md explains the
tilt g₀, docs/priors.md the conventions. Symbols are those of `ssla.refit.weights`.

    log p(y|x,D) ≈ [ℓ_D(θ̃) − ℓ_D(θ̂) + log p(y|x,θ̃)]        likelihood
                 + [log π(θ̃) − log π(θ̂)]                    prior
                 − ½ [log|H̃(θ̃)| − log|H(θ̂)|]                curvature        (1)

Everything is a sum over observations; a tilde marks the sum with (x, y) in it. H is formed in full,
so K = J H⁻¹ Jᵀ is not needed, and this is for few weights and rows. A RuntimeError is raised if
Newton finds no maximum from θ̂, as at a saddle, or if H or H̃ is indefinite. Of several modes it
takes the one that it reaches from θ̂; an engine may take another. Layers that `torch.func` cannot
map fail.
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
GROWTH = 10  # a guess: the factor by which λ grows and shrinks
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
        """Compute ℓ(θ) − ℓ(start) as a sum of differences row by row, for θ and start (P,).

        Two large sums are never subtracted.
        """
        differences = self.likelihood.log_prob_difference(self.y, self.f(theta), self.f(start))
        return (self.weights * differences).sum()

    def curvature(self, curvature_kind: str, theta: Tensor) -> Tensor:
        """Compute −∇²ℓ(θ) of one kind (P, P), for θ (P,).

        curvature_kind: "hessian" for the exact −∇²ℓ; "fisher" or "observed" for Σ_i w_i J_iᵀ Λ_i
        J_i with the expected or the observed Λ.
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


class AugmentedPosterior(NamedTuple):
    """The log posterior with a row added: ℓ_D(θ) + log p(y|x,θ) + log π(θ) − g₀ᵀ(θ − θ̂)."""

    data: list[Observations]  # D
    start: Tensor  # θ̂ (P,)
    g0: Tensor  # makes θ̂ the mode without the new row (P,)
    prior: BoundPrior  # π, or none under the additive convention

    def compute_likelihood(self, theta: Tensor, added: Observations) -> Tensor:
        """Compute the first bracket of (1) at θ (P,), with the tilt −g₀ᵀ(θ − θ̂).

        added: the new row.
        """
        changes = [batch.compute_log_prob_change(theta, self.start) for batch in self.data]
        log_prob_change = torch.stack(changes).sum()
        return log_prob_change + added.log_prob(theta) - self.g0 @ (theta - self.start)

    def evaluate(self, theta: Tensor, added: Observations) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the value, the gradient (P,) and −∇² (P, P) at θ (P,).

        The value is up to a constant. added: the new row.
        """
        value = self.compute_likelihood(theta, added) + self.prior.log_prob(theta)
        rows = [*self.data, added]
        curvature = sum_curvature(HESSIAN, rows, theta, self.prior)
        return value, sum_gradient(rows, theta, self.prior) - self.g0, curvature


def sum_gradient(rows: list[Observations], theta: Tensor, prior: BoundPrior) -> Tensor:
    """Compute ∇(ℓ + log prior) of all rows at θ (P,)."""
    data_gradient = torch.stack([grad(batch.log_prob)(theta) for batch in rows]).sum(0)
    return data_gradient + prior.gradient(theta)


def sum_curvature(
    curvature_kind: str, rows: list[Observations], theta: Tensor, prior: BoundPrior
) -> Tensor:
    """Compute H = −∇²(ℓ + log prior) of all rows at θ (P,): (P, P).

    curvature_kind: see `Observations.curvature`.
    """
    total = torch.stack([batch.curvature(curvature_kind, theta) for batch in rows]).sum(0)
    return total + as_matrix(prior.precision(theta))


def refit_one(
    posterior: Posterior,
    x: Inputs,
    y: Tensor,
    curvature_kind: str = OBSERVED,
    data: Any = None,
    refit_y: Tensor | None = None,
) -> ReferenceRefit:
    """Compute (1) for one input x (1, …) and one target y, a tensor without a dimension for rows.

    curvature_kind: the curvature of both determinants, "observed", "fisher" or "hessian". data: the
    training data; None: those of the posterior. refit_y: the y at whose mode (1) is evaluated, as
    in `at_prediction`; None: y itself. Raises RuntimeError if Newton's method finds no maximum, or
    if no curvature is positive definite, and ValueError if the data cannot be read again.
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

    # g₀ makes θ̂ the mode of the objective without (x, y). mode="as_is" leaves it out.
    is_tilted = posterior.mode != AS_IS
    g0 = sum_gradient(D, start, objective_prior) if is_tilted else torch.zeros_like(start)
    augmented = AugmentedPosterior(D, start, g0, objective_prior)

    # θ̃: the mode of the augmented log posterior.
    theta, steps = maximise_by_newton(lambda theta: augmented.evaluate(theta, refitted), start)
    prior_increment = prior.log_prob(theta) - prior.log_prob(start)  # the second bracket of (1)

    # The third bracket, with the Fisher information where the kind asked for is indefinite. The
    # engines never subtract two large determinants; few weights in float64 allow it.
    for used_kind in (curvature_kind, FISHER):
        before = compute_half_logdet(sum_curvature(used_kind, D, start, determinant_prior))
        after = compute_half_logdet(sum_curvature(used_kind, [*D, new], theta, determinant_prior))
        curvature = before - after
        if not curvature.isnan():
            likelihood = augmented.compute_likelihood(theta, new)
            return ReferenceRefit(likelihood, prior_increment, curvature, theta, steps, used_kind)
    raise RuntimeError("H(θ̂) or H̃(θ̃) is not positive definite. Give a stronger prior.")


def open_observations(posterior: Posterior, batch: Batch, likelihood: Likelihood) -> Observations:
    """Check the rows of a batch, and return them with f as a function of θ in float64.

    Rows without weights have weight one. Raises ValueError if a target is not in the support of the
    likelihood.
    """
    network = posterior.network
    x, y, weights = check_batch(batch, likelihood.support_for(network.outputs), network.outputs)
    if weights is None:
        weights = torch.ones(len(y)).double()
    return Observations(open_outputs(posterior, x), y, weights, likelihood)


def open_outputs(posterior: Posterior, x: Inputs) -> Callable[[Tensor], Tensor]:
    """Return the function that maps θ (P,) to f_θ(x) (b, C) in float64, for x (b, …).

    A last layer is linear: f = f̂ + J(θ − θ̂).
    """
    network, start = posterior.network, posterior.theta
    if not isinstance(network, AnyParameters):
        f_hat, J = network.linearise(network.cast(x), start)
        return lambda theta: f_hat + J.double().to_dense().values @ (theta - start)
    network_64 = replace(network, fixed_tensors=map_inputs(_to_double, network.fixed_tensors))
    x_64 = map_inputs(_to_double, network.cast(x))
    return lambda theta: network_64.compute_outputs(network_64.layout.unpack(theta), x_64)


def _to_double(tensor: Tensor) -> Tensor:
    """Return a tensor in float64; whole numbers, as of embeddings, keep their dtype."""
    return tensor.double() if tensor.is_floating_point() else tensor


def maximise_by_newton(objective: Callable[[Tensor], Any], theta: Tensor) -> tuple[Tensor, int]:
    """Return the maximum θ̃ that Newton's method reaches from θ (P,), and the number of steps.

    A step is (H + λI)⁻¹g. The damping λ starts at zero, grows by GROWTH after a step that is not
    uphill, and shrinks again after one that is. objective: a function from θ to its value, gradient
    g (P,) and H = −∇² (P, P). Raises RuntimeError if no maximum is reached in MOST_STEPS.
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
            damping = damping / GROWTH if damping > DAMPING else 0.0
        else:
            damping = max(GROWTH * damping, DAMPING)
    raise RuntimeError(f"No maximum was reached from θ̂ in {MOST_STEPS} steps: is θ̂ a saddle?")


def compute_half_logdet(H: Tensor) -> Tensor:
    """Compute ½ log|H| of H (P, P) by a Cholesky factor; NaN if H is not positive definite."""
    factor, info = torch.linalg.cholesky_ex(H)
    return factor.diagonal().log().sum() if not info else torch.tensor(torch.nan)
