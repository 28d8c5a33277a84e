"""Frozen values that packages hand to each other: sums over the data, Gaussians of θ and of f.

θ (P,) are the free parameters of the network, f (C,) its outputs at an input, and J (C, P) the
Jacobian of f in θ. g and Λ are the gradient and minus the second derivative (or the Fisher
information) of the log likelihood of a row in f, and ℓ_D is the log likelihood of all rows. H is
the curvature of data and prior, and T that of the prior.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ssla.curvature import Operator, Structure
from ssla.likelihoods import Likelihood
from ssla.likelihoods.likelihood import LOG_2PI
from ssla.priors import BoundPrior

# Standard deviations of y: a dtype with larger steps is too coarse for answers. The rounding error
# is half a step, a twentieth of a standard deviation. A guess.
COARSE = 0.1


class Marginal(NamedTuple):
    """The outputs at x as a Gaussian: mean f̂ (N, C), covariance K (N, C, C)."""

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sums over the data at one θ, which the sums do not hold: callers keep it beside them."""

    n: int  # rows seen
    weight: float  # sum of the row weights (= n without weights)
    log_likelihood: float  # ℓ_D
    gradient: Tensor  # ∇ℓ_D (P,)
    curvature: Structure  # Σ JᵀΛJ

    def merge(self, other: Statistics) -> Statistics:
        """Return the sums over both data sets, which must be taken at the same θ (not checked)."""
        return Statistics(
            self.n + other.n,
            self.weight + other.weight,
            self.log_likelihood + other.log_likelihood,
            self.gradient + other.gradient,
            self.curvature.merge(other.curvature),
        )

    def with_theta_moved(self, step: Tensor, curvature: Structure | None = None) -> Statistics:
        """Return the sums at θ + step, for a step (P,), without a pass over the data.

        curvature: S, by which ℓ_D changes; None: that of the sums. For a step δ, ℓ_D changes by
        ∇ℓ_Dᵀδ − ½ δᵀSδ, and its gradient by −Sδ. This is exact where ℓ_D is a quadratic with the
        curvature S. The curvature of the result is that of these sums.
        """
        push = (curvature or self.curvature).push(step)
        gain = float(step @ self.gradient) - 0.5 * float(step @ push)
        return replace(
            self, log_likelihood=self.log_likelihood + gain, gradient=self.gradient - push
        )

    def with_noise_scaled(self, noise: float | Tensor, log_likelihood: float) -> Statistics:
        """Return the sums of a Gaussian likelihood at `noise` times its noise.

        noise: one factor, or one for each parameter (P,). log_likelihood: ℓ_D at that noise, which
        these sums alone do not determine.
        """
        # The gradient and curvature of a Gaussian have the factor 1/σ², which is 1/σ on both sides
        # of the curvature.
        return replace(
            self,
            log_likelihood=log_likelihood,
            gradient=self.gradient / noise**2,
            curvature=self.curvature.scale_both_sides(torch.ones_like(self.gradient) / noise),
        )

    def move_to_mode(self, prior: BoundPrior, theta: Tensor) -> tuple[Tensor, Statistics]:
        """Move θ (P,) by one Newton step; return the new θ and the sums there.

        The new θ is the mode where ℓ_D + log π is quadratic. Raises ValueError where the curvature
        is not positive definite.
        """
        operator = self.curvature.with_prior(prior.precision(theta))
        step = operator.solve(self.gradient + prior.gradient(theta))
        return theta + step, self.with_theta_moved(step)


@dataclass(frozen=True, eq=False)
class Variational:
    """N(m, S), the Gaussian nearest to the posterior.

    S⁻¹ is the statistics' curvature plus the prior's. The statistics are averages over the
    Gaussian's own uncertainty: Σ E log p, Σ JᵀE[g], Σ JᵀE[Λ]J, with J at θ̂.
    """

    mean: Tensor  # m (P,)
    statistics: Statistics
    # whether the averaged gradient at θ̂ is subtracted from the objective, so that m is θ̂
    tilted: bool


def evidence_bound(
    prior: BoundPrior, mean: Tensor, covariance: Operator, log_likelihood: float
) -> float:
    """Compute the evidence bound E ℓ_D + E log π + entropy of a Gaussian N(mean, covariance) of θ.

    mean: (P,). log_likelihood: E ℓ_D, the log likelihood averaged over that Gaussian.
    """
    # E log π to second order around the mean: log π(m) − ½ tr(T S), with T = −∇² log π.
    trace = float(compute_prior_share(covariance, prior.precision(mean)).sum())
    expected = float(prior.log_prob(mean)) - 0.5 * trace
    entropy = 0.5 * (len(mean) * (1 + math.log(2 * math.pi)) - covariance.logdet())
    return log_likelihood + expected + entropy


def compute_prior_share(operator: Operator, precision: Tensor) -> Tensor:
    """Compute diag(T H⁻¹) (P,): the share of each parameter that the prior determines.

    operator: H⁻¹. precision: the prior's T (P,) or (P, P).
    """
    if precision.dim() == 1:
        return precision * operator.variances()
    return torch.stack([operator.solve(row) for row in precision]).diagonal()


def compute_residual_squares(statistics: Statistics, likelihood: Likelihood, outputs: int) -> float:
    """Compute Σ w rᵀΣ⁻¹r, the whitened squared residuals of a Gaussian likelihood with C outputs.

    The squares follow from ℓ_D = −½ Σ w (rᵀΣ⁻¹r + log|Σ| + C log 2π), without a pass. statistics:
    sums with the noise of `likelihood`. Raises no error for another likelihood: the caller must
    have Gaussian noise.
    """
    sigma = likelihood.covariance_for(torch.zeros(outputs, dtype=torch.float64))
    logdet = 2 * float(torch.linalg.cholesky(sigma).diagonal().log().sum())
    constants = statistics.weight * (outputs * LOG_2PI + logdet)
    return max(-2 * statistics.log_likelihood - constants, 0.0)


def join_chunks(outputs: int, chunks: list[tuple[Tensor, Tensor]]) -> Marginal:
    """Join means (B, C) and covariances (B, C, C) of chunks into those of all rows, in float64.

    Without chunks the result has no rows.
    """
    if not chunks:
        return Marginal(
            torch.empty(0, outputs, dtype=torch.float64),
            torch.empty(0, outputs, outputs, dtype=torch.float64),
        )
    means, covariances = zip(*chunks, strict=True)
    return Marginal(torch.cat(means).double(), torch.cat(covariances).double())
