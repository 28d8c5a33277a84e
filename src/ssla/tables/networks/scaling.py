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
    """z = (x − shift) / scale; shift and scale (d,)."""

    shift: Tensor
    scale: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.shift) / self.scale


def units_of(x: Tensor) -> Tensor:
    """The power of two at or below the largest |x| of each column (n, d) -> (d,); division by
    it is exact.
    """
    exponents = torch.frexp(x.abs().amax(0)).exponent.clamp(
        SMALLEST_EXPONENT + 1, LARGEST_EXPONENT + 1
    )
    return torch.tensor([math.ldexp(1.0, e - 1) for e in exponents.tolist()], dtype=x.dtype)


def scaling_of(x: Tensor, weights: Tensor, levels: Sequence[int] = ()) -> Scaling:
    """Weighted mean and standard deviation of each column (n, d); constant columns keep their unit.
    Codes of levels, where `levels` has their number for a column, stay as they are.
    """
    total, unit = weights.sum(), units_of(x)
    part = x / unit  # its squares neither overflow nor vanish
    middle = (weights[:, None] * part).sum(0) / total
    spread = unit * ((weights[:, None] * (part - middle) ** 2).sum(0) / total).sqrt()
    mean = unit * middle
    flat = spread <= 1e-12 * mean.abs().clamp_min(1e-300)
    scale = torch.where(flat, torch.ones_like(spread), spread)
    for i, count in enumerate(levels):
        if count:
            mean[i], scale[i] = 0.0, 1.0
    return Scaling(mean, scale)
