"""Columns to mean 0 and standard deviation 1, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Scaling:
    """z = (x − shift) / scale; shift and scale (d,)."""

    shift: Tensor
    scale: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.shift) / self.scale


def scaling_of(x: Tensor, weights: Tensor, levels: Sequence[int] = ()) -> Scaling:
    """Weighted mean and standard deviation of each column (n, d); constant columns keep their unit. Codes of levels, where
    `levels` has their number for a column, stay as they are."""
    total = weights.sum()
    mean = (weights[:, None] * x).sum(0) / total
    spread = ((weights[:, None] * (x - mean) ** 2).sum(0) / total).sqrt()
    flat = spread <= 1e-12 * mean.abs().clamp_min(1e-300)
    scale = torch.where(flat, torch.ones_like(spread), spread)
    for i, count in enumerate(levels):
        if count:
            mean[i], scale[i] = 0.0, 1.0
    return Scaling(mean, scale)
