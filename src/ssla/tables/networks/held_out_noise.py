"""The noise and its standard error, from held-out rows.

Training residuals of a network can be arbitrarily small. On held-out rows r² has mean σ² + K, and K
is nearly proportional to σ², so

    σ̂² = mean of s_i,   s_i = r_i² / (1 + K_i/σ₀²)          (σ₀: a first guess)

One network: at least the mean of r² over its training rows, because early stopping selected the
best epoch on the held-out rows. Several networks: the disagreement V of their posteriors is part of
the error of each, but not of the mixture, which adds it to its spread; so 2V is subtracted, down to
the training residuals at most.

From n such rows log σ̂ has the standard error √((κ − 1)/4n), with κ the kurtosis of the residuals
(3 for Gaussian ones). The predictive integrates over it, σ = σ̂ e^(t·se) with t ~ N(0, 1) at three
Gauss–Hermite nodes: its tails are those of a t distribution and not of a Gaussian with known σ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssla.fitting.noise import scale_noise
from ssla.likelihoods import Gaussian
from ssla.posterior import Posterior

# t and weight of each Gauss–Hermite node; the central one is first
NODES = ((0.0, 2 / 3), (-math.sqrt(3), 1 / 6), (math.sqrt(3), 1 / 6))
SMALLEST = 1e-6  # noise in units of the target's spread: a guess
GAUSSIAN_KURTOSIS = 3.0


@dataclass(frozen=True, eq=False)
class Noise:
    """The noise σ̂ (D,), and the standard error of its logarithm."""

    scale: Tensor
    error: float

    def at(self, t: float) -> Gaussian:
        """Return the likelihood with noise σ̂ e^(t·se)."""
        scale = self.scale * math.exp(t * self.error)
        return Gaussian(noise=scale if len(scale) > 1 else float(scale))


def held_out_noise(
    squares: Tensor, weights: Tensor, training_square: Tensor, disagreement: Tensor | None = None
) -> Noise:
    """Return the noise from squares s (n, D) of held-out rows, with their weights (n,).

    training_square (D,): mean square of the training residuals.  disagreement V (D,) of several
    members; None: there is only one.
    """
    total = weights.sum()
    variance = (weights[:, None] * squares).sum(0) / total
    fourth = (weights[:, None] * squares**2).sum(0) / total
    kurtosis = (fourth / variance.clamp_min(1e-300) ** 2).clamp_min(GAUSSIAN_KURTOSIS).mean()
    error = math.sqrt((float(kurtosis) - 1) / (4 * float(total)))
    if disagreement is None:
        variance = torch.maximum(variance, training_square)
    else:
        reduced = torch.maximum(variance - 2 * disagreement, training_square)
        variance = torch.minimum(variance, reduced)
    return Noise(variance.sqrt().clamp_min(SMALLEST), min(error, 1.0))


def change_noise(posterior: Posterior, likelihood: Gaussian) -> Posterior:
    """Return the posterior with all noise scaled by one factor, at its new mode, without a pass.

    The posterior must be quadratic (`Posterior.quadratic`). likelihood: has the new noise, which is
    the same multiple of the old one for all targets.
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
