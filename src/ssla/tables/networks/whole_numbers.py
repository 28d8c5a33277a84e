"""Targets that are whole numbers: laws of numbers are compared by probabilities there, not by
densities.

A density at values that many rows share has no bound: a law that is narrow around them scores
better and better, and predicts other rows worse. The probability of what rounds to y has no such
gain:

    P(y − ½ < Y < y + ½)        (y = 0: P(Y < ½))
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssla.likelihoods import Likelihood
from ssla.predictive.positive import log_between
from ssla.predictive.transformed import Transform
from ssla.tables.networks.scaling import Scaling

LARGEST_SPREAD = 5.0  # standard deviation of counts for which it matters that they are discrete


def small_counts(y: Tensor, weights: Tensor) -> bool:
    """Whether targets (n,) are whole numbers from zero with a small spread, and not only 0 and
    1.
    """
    if y.dim() != 1 or bool((y < 0).any()) or bool((y != y.round()).any()) or bool((y <= 1).all()):
        return False
    mean = weights @ y / weights.sum()
    return float(weights @ (y - mean) ** 2 / weights.sum()) <= LARGEST_SPREAD**2


def moments(likelihood: Likelihood, f: Tensor, unit: Scaling) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (n,) of a Gaussian for outputs f (n, C), on the scale of the
    target.
    """
    shift, scale = unit.shift[0], unit.scale[0]
    mean, variance = (part.reshape(len(f)) for part in (likelihood.mean(f), likelihood.variance(f)))
    return shift + scale * mean, scale * variance.sqrt()


def log_probs(
    likelihood: Likelihood, f: Tensor, unit: Scaling, scale: Transform | None, y: Tensor
) -> Tensor:
    """log P (n,) of what rounds to counts y (n,), by a network with outputs f (n, C)."""
    ends = torch.stack([y - 0.5, y + 0.5], 1)
    mean, sd = moments(likelihood, f, unit)
    t = ((ends if scale is None else scale.into(ends)) - mean[:, None]) / sd[:, None]
    return log_between(torch.where(y == 0, -torch.inf, t[:, 0]), t[:, 1])
