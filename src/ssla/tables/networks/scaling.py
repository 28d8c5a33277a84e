"""Standardises columns to mean 0 and standard deviation 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_EXPONENT, LARGEST_EXPONENT = -1022, 1023  # of powers of two in double precision
# A column whose standard deviation is at most this share of its mean counts as constant, because
# rounding errors alone can be as large.
CONSTANT_SPREAD = 1e-12


@dataclass(frozen=True, eq=False)
class Scaling:
    """The map z = (x − shift) / scale of d columns."""

    shift: Tensor  # (d,)
    scale: Tensor  # (d,)

    def __call__(self, x: Tensor) -> Tensor:
        """Return z (…, d) for x (…, d)."""
        return (x - self.shift) / self.scale


def find_column_units(x: Tensor) -> Tensor:
    """Return the power of two at or below the largest |x| of each column (n, d) -> (d,).

    Division by a power of two is exact. A column of zeros has the unit ½; any would do.
    """
    # |x| = m 2ᵉ with m in [½, 1), so the power of two below |x| has the exponent e − 1.
    exponents = torch.frexp(x.abs().amax(0)).exponent.clamp(
        SMALLEST_EXPONENT + 1, LARGEST_EXPONENT + 1
    )
    return torch.tensor([math.ldexp(1.0, e - 1) for e in exponents.tolist()], dtype=x.dtype)


def fit_scaling(x: Tensor, weights: Tensor, levels: Sequence[int] = ()) -> Scaling:
    """Return the scaling of each column of x (n, d) to weighted mean 0 and standard deviation 1.

    weights (n,): row weights.  levels: for each column the number of levels if it holds codes, 0 if
    it holds numbers; () if all hold numbers. Codes stay as they are, and constant columns get the
    scale 1.
    """
    total = weights.sum()
    unit = find_column_units(x)
    relative = x / unit  # of a size whose squares neither overflow nor vanish
    relative_mean = (weights[:, None] * relative).sum(0) / total
    variance = (weights[:, None] * (relative - relative_mean) ** 2).sum(0) / total
    spread = unit * variance.sqrt()
    mean = unit * relative_mean

    # The smallest bound is positive, so that a column of zeros is constant too.
    constant = spread <= CONSTANT_SPREAD * mean.abs().clamp_min(1e-300)
    scale = torch.where(constant, torch.ones_like(spread), spread)
    for i, count in enumerate(levels):
        if count:
            mean[i] = 0.0
            scale[i] = 1.0

    return Scaling(mean, scale)
