"""Estimates the noise and its standard error from held-out rows.

Training residuals of a network can be arbitrarily small. On held-out rows r² has mean σ² + K, with
K the variance of the outputs. K is nearly proportional to σ², so

    σ̂² = mean of s_i,   s_i = r_i² / (1 + K_i/σ₀²)          (σ₀: a first guess)

With one network σ̂² is at least the mean of r² over its training rows, because early stopping
selected the best epoch on the held-out rows. With several networks the disagreement V of their
posteriors is part of the error of each. The mixture averages this error away, and adds V to its
spread. So 2V is subtracted from σ̂², but the result is not below the mean of r² over the training
rows.

From n such rows log σ̂ has the standard error √((κ − 1)/4n), with κ the kurtosis of the residuals
(3 for Gaussian residuals). The predictive integrates over it, σ = σ̂ e^(t·se) with t ~ N(0, 1) at
three Gauss–Hermite nodes. Its tails are those of a t distribution, and not of a Gaussian with known
σ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssla.fitting.noise import scale_noise
from ssla.likelihoods import Gaussian
from ssla.posterior import Posterior

# t and weight of each Gauss–Hermite node. The central node is first.
NODES = ((0.0, 2 / 3), (-math.sqrt(3), 1 / 6), (math.sqrt(3), 1 / 6))
SMALLEST = 1e-6  # noise in units of the target's spread: a guess
GAUSSIAN_KURTOSIS = 3.0
LARGEST_ERROR = 1.0  # of log σ̂; a guess


@dataclass(frozen=True, eq=False)
class Noise:
    """The noise of D targets, and the standard error of its logarithm."""

    scale: Tensor  # σ̂ (D,)
    error: float  # se, common to all targets

    def make_likelihood(self, t: float) -> Gaussian:
        """Return the Gaussian likelihood with noise σ̂ e^(t·se)."""
        scale = self.scale * math.exp(t * self.error)
        return Gaussian(noise=scale if len(scale) > 1 else float(scale))


def estimate_held_out_noise(
    squares: Tensor, weights: Tensor, training_square: Tensor, disagreement: Tensor | None = None
) -> Noise:
    """Estimate the noise from the squares s (n, D) of held-out rows, with their weights (n,).

    training_square (D,): the mean of r² over the training rows.  disagreement: V (D,); None: there
    is only one network.  See the module's docstring for the formulas.
    """
    total = weights.sum()
    variance = (weights[:, None] * squares).sum(0) / total
    fourth_moment = (weights[:, None] * squares**2).sum(0) / total

    # A kurtosis below that of a Gaussian is taken as chance. No division by zero for zero squares.
    kurtosis = (fourth_moment / variance.clamp_min(1e-300) ** 2).clamp_min(GAUSSIAN_KURTOSIS).mean()
    error = math.sqrt((float(kurtosis) - 1) / (4 * float(total)))
    if disagreement is None:
        variance = torch.maximum(variance, training_square)
    else:
        reduced = torch.maximum(variance - 2 * disagreement, training_square)
        # The training residuals may be larger, but they do not raise the estimate.
        variance = torch.minimum(variance, reduced)

    return Noise(variance.sqrt().clamp_min(SMALLEST), min(error, LARGEST_ERROR))


def change_noise(posterior: Posterior, likelihood: Gaussian) -> Posterior:
    """Return the posterior under another noise, at its new mode, without a pass over the rows.

    The result is exact if the posterior is quadratic (`Posterior.quadratic`), as the caller must
    check.  likelihood: holds the new noise, which must be the same multiple of the old one for all
    targets.
    """
    assert isinstance(posterior.likelihood, Gaussian)

    # The ratio of the first target is that of all.
    old, new = (
        torch.as_tensor(gaussian.noise, dtype=torch.float64).reshape(-1)[0]
        for gaussian in (posterior.likelihood, likelihood)
    )
    scaled = replace(scale_noise(posterior, float(new / old)), likelihood=likelihood)
    theta, statistics = scaled.statistics.move_to_mode(scaled.bound_prior, scaled.theta)
    report = replace(scaled.report, likelihood=repr(likelihood))
    return replace(scaled, theta=theta, statistics=statistics, report=report)
