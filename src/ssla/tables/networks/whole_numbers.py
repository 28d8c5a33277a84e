"""Probabilities of whole numbers under a continuous distribution, in place of its densities.

Many rows may share a whole number, and a density there has no bound: the narrower a distribution is
around such values, the better is its score, although it predicts other rows worse. The probability
of what rounds to y is bounded:

    P(y − ½ < Y < y + ½)        (y = 0: P(Y < ½))
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssla.likelihoods import Likelihood
from ssla.predictive.positive import log_normal_probability
from ssla.predictive.transformed import Transform
from ssla.tables.networks.scaling import Scaling

# Counts with a larger standard deviation are treated as continuous; a guess.
LARGEST_SPREAD = 5.0


def are_small_counts(y: Tensor, weights: Tensor) -> bool:
    """Return whether targets y (n,) are whole numbers of at least zero with a small spread.

    The answer is False for several targets (n, D), and for targets that are only 0 and 1.
    weights (n,) are row weights.
    """
    if y.dim() != 1 or bool((y < 0).any()) or bool((y != y.round()).any()) or bool((y <= 1).all()):
        return False
    mean = weights @ y / weights.sum()
    return float(weights @ (y - mean) ** 2 / weights.sum()) <= LARGEST_SPREAD**2


def compute_gaussian_moments(
    likelihood: Likelihood, f: Tensor, unit: Scaling
) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (n,) of one Gaussian target for outputs f (n, C).

    f predicts the standardised target; the moments are in the unit before it was standardised.
    """
    shift = unit.shift[0]
    scale = unit.scale[0]
    mean = likelihood.mean(f).reshape(len(f))
    variance = likelihood.variance(f).reshape(len(f))
    return shift + scale * mean, scale * variance.sqrt()


def compute_rounded_log_probs(
    likelihood: Likelihood, f: Tensor, unit: Scaling, scale: Transform | None, y: Tensor
) -> Tensor:
    """Return log P (n,) of what rounds to counts y (n,), by a network with outputs f (n, C).

    likelihood: a Gaussian likelihood.  unit, scale: those of the target; scale None is that of y
    itself.
    """
    ends = torch.stack([y - 0.5, y + 0.5], 1)
    if scale is not None:
        ends = scale.to_z(ends)
    mean, sd = compute_gaussian_moments(likelihood, f, unit)
    t = (ends - mean[:, None]) / sd[:, None]
    # Everything below ½ counts as zero.
    lower = torch.where(y == 0, -torch.inf, t[:, 0])
    return log_normal_probability(lower, t[:, 1])
