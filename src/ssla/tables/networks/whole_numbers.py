"""Targets that are whole numbers: continuous distributions are compared by probabilities there, not
by densities.

A density at values that many rows share has no bound: a distribution that is narrow around them
scores better and better, and predicts other rows worse. The probability of what rounds to y has no
such gain:

    P(y − ½ < Y < y + ½)        (y = 0: P(Y < ½))
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssla.likelihoods import Likelihood
from ssla.predictive.positive import log_normal_probability
from ssla.predictive.transformed import Transform
from ssla.tables.networks.scaling import Scaling

LARGEST_SPREAD = (
    5.0  # standard deviation of counts for which it matters that they are discrete: a guess
)


def are_small_counts(y: Tensor, weights: Tensor) -> bool:
    """Check whether targets y (n,) are whole numbers from zero with a small spread.

    Targets that are only 0 and 1 are not. weights (n,) are row weights.
    """
    if y.dim() != 1 or bool((y < 0).any()) or bool((y != y.round()).any()) or bool((y <= 1).all()):
        return False
    mean = weights @ y / weights.sum()
    return float(weights @ (y - mean) ** 2 / weights.sum()) <= LARGEST_SPREAD**2


def moments(likelihood: Likelihood, f: Tensor, unit: Scaling) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (n,) of a Gaussian for outputs f (n, C).

    They are on the scale of the target, whose unit is `unit`.
    """
    shift = unit.shift[0]
    scale = unit.scale[0]
    mean = likelihood.mean(f).reshape(len(f))
    variance = likelihood.variance(f).reshape(len(f))
    return shift + scale * mean, scale * variance.sqrt()


def log_probs(
    likelihood: Likelihood, f: Tensor, unit: Scaling, scale: Transform | None, y: Tensor
) -> Tensor:
    """Return log P (n,) of what rounds to counts y (n,), by a network with outputs f (n, C)."""
    ends = torch.stack([y - 0.5, y + 0.5], 1)
    mean, sd = moments(likelihood, f, unit)
    t = ((ends if scale is None else scale.to_z(ends)) - mean[:, None]) / sd[:, None]
    return log_normal_probability(torch.where(y == 0, -torch.inf, t[:, 0]), t[:, 1])
