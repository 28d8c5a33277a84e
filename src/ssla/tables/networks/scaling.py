"""Columns to mean 0 and standard deviation 1, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_EXPONENT, LARGEST_EXPONENT = -1022, 1023  # of powers of two in double precision


@dataclass(frozen=True, eq=False)
class Scaling:
    """The map z = (x − shift) / scale of columns, with shift and scale (d,)."""

    shift: Tensor
    scale: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Scale x (…, d) -> (…, d)."""
        return (x - self.shift) / self.scale


def column_units(x: Tensor) -> Tensor:
    """Return the power of two at or below the largest |x| of each column (n, d) -> (d,).

    Division by it is exact.
    """
    exponents = torch.frexp(x.abs().amax(0)).exponent.clamp(
        SMALLEST_EXPONENT + 1, LARGEST_EXPONENT + 1
    )
    return torch.tensor([math.ldexp(1.0, e - 1) for e in exponents.tolist()], dtype=x.dtype)


def fit_scaling(x: Tensor, weights: Tensor, levels: Sequence[int] = ()) -> Scaling:
    """Return the scaling to weighted mean 0 and standard deviation 1 of each column of x (n, d).

    weights (n,) are row weights. Constant columns keep their unit. Codes of levels, where `levels`
    has their number for a column, stay as they are.
    """
    total = weights.sum()
    unit = column_units(x)
    relative = x / unit  # its squares neither overflow nor vanish
    relative_mean = (weights[:, None] * relative).sum(0) / total
    variance = (weights[:, None] * (relative - relative_mean) ** 2).sum(0) / total
    spread = unit * variance.sqrt()
    mean = unit * relative_mean
    # A column that differs by rounding only counts as constant.
    constant = spread <= 1e-12 * mean.abs().clamp_min(1e-300)
    scale = torch.where(constant, torch.ones_like(spread), spread)
    for i, count in enumerate(levels):
        if count:
            mean[i] = 0.0
            scale[i] = 1.0
    return Scaling(mean, scale)
