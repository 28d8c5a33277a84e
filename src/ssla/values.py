"""Frozen values that packages hand to each other: sums over the data, Gaussians of θ and of f."""

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

# Standard deviations: a dtype whose steps are larger cannot hold the answers.
COARSE = 0.1


class Marginal(NamedTuple):
    """The outputs at x as a Gaussian: mean f̂ (N, C), covariance K (N, C, C)."""

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sums over the data at one θ. `merge` adds them."""

    n: int  # rows seen
    weight: float  # sum of the row weights (= n without weights)
    log_likelihood: float
    gradient: Tensor  # ∇ℓ_D (P,)
    curvature: Structure  # Σ JᵀΛJ

    def merge(self, other: Statistics) -> Statistics:
        """Return the sums over both data sets, at the same θ."""
        return Statistics(
            self.n + other.n,
            self.weight + other.weight,
            self.log_likelihood + other.log_likelihood,
            self.gradient + other.gradient,
            self.curvature.merge(other.curvature),
        )

    def moved(self, step: Tensor, curvature: Structure | None = None) -> Statistics:
        """Return the sums at θ + step (P,) where ℓ_D is quadratic with exactly this curvature (by
        default the one of the sums).
        """
        push = (curvature or self.curvature).push(step)
        gain = float(step @ self.gradient) - 0.5 * float(step @ push)
        return replace(
            self, log_likelihood=self.log_likelihood + gain, gradient=self.gradient - push
        )

    def at_noise(self, noise: float | Tensor, log_likelihood: float) -> Statistics:
        """Return the sums of a Gaussian at `noise` times the noise, with its log likelihood there.

        noise: one factor, or one for each parameter (P,).
        """
        return replace(
            self,
            log_likelihood=log_likelihood,
            gradient=self.gradient / noise**2,
            curvature=self.curvature.scale_both_sides(torch.ones_like(self.gradient) / noise),
        )

    def at_mode(self, prior: BoundPrior, theta: Tensor) -> tuple[Tensor, Statistics]:
        """Return θ (P,) and the sums after one Newton step, which is exact where ℓ_D + log π is
        quadratic.

        Raises ValueError where the curvature is not positive definite.
        """
        operator = self.curvature.with_prior(prior.precision(theta))
        step = operator.solve(self.gradient + prior.gradient(theta))
        return theta + step, self.moved(step)


@dataclass(frozen=True, eq=False)
class Variational:
    """N(m, S), the Gaussian nearest to the posterior: S⁻¹ is the statistics' curvature plus the
    prior's.

    The statistics are averages over the Gaussian's own uncertainty: Σ E log p, Σ JᵀE[g], Σ JᵀE[Λ]J,
    with J at θ̂.
    """

    mean: Tensor  # m (P,)
    statistics: Statistics
    # whether the averaged gradient at θ̂ is subtracted from the objective, so that m is θ̂
    tilted: bool


def evidence_bound(
    prior: BoundPrior, mean: Tensor, covariance: Operator, log_likelihood: float
) -> float:
    """Compute the evidence bound of N(mean, covariance) of θ under a prior.

    mean: (P,). log_likelihood: its average over that Gaussian.
    """
    # E log π to second order around the mean.
    spread = float(prior_share(covariance, prior.precision(mean)).sum())
    expected = float(prior.log_prob(mean)) - 0.5 * spread
    entropy = 0.5 * (len(mean) * (1 + math.log(2 * math.pi)) - covariance.logdet())
    return log_likelihood + expected + entropy


def prior_share(operator: Operator, precision: Tensor) -> Tensor:
    """Compute diag(T H⁻¹) (P,): how much of each parameter the prior decides.

    precision: T (P,) or (P, P).
    """
    if precision.dim() == 1:
        return precision * operator.variances()
    return torch.stack([operator.solve(row) for row in precision]).diagonal()


def residual_squares(statistics: Statistics, likelihood: Likelihood, outputs: int) -> float:
    """Compute Σ w rᵀΣ⁻¹r from ℓ: a Gaussian's log likelihood is −½ of it plus constants."""
    sigma = likelihood.covariance_for(torch.zeros(outputs, dtype=torch.float64))
    logdet = 2 * float(torch.linalg.cholesky(sigma).diagonal().log().sum())
    constants = statistics.weight * (outputs * LOG_2PI + logdet)
    return max(-2 * statistics.log_likelihood - constants, 0.0)


def join_chunks(outputs: int, chunks: list[tuple[Tensor, Tensor]]) -> Marginal:
    """Join means (B, C) and covariances (B, C, C) of chunks into those of all rows, in float64; no
    chunk gives no rows.
    """
    if not chunks:
        return Marginal(
            torch.empty(0, outputs, dtype=torch.float64),
            torch.empty(0, outputs, outputs, dtype=torch.float64),
        )
    means, covariances = zip(*chunks, strict=True)
    return Marginal(torch.cat(means).double(), torch.cat(covariances).double())
