"""Weighted order statistics that leave room for one more row: the quantiles of conformal
prediction.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDING = 1e-12  # (n + 1)·level may be a whole number up to rounding


def conformal_quantile(values: Tensor, weights: Tensor, level: float) -> Tensor:
    """The smallest value at which the weights of the values up to it sum to (W + 1)·level: infinite
    if none does.

    W is the sum of all weights and the 1 is the new row. With weights of one it is the k-th
    smallest, k = ⌈(n + 1)·level⌉. values (..., n), weights (n,) or (..., n) -> (...).
    """
    ordered, order = values.sort(-1)
    sums = weights.expand_as(values).gather(-1, order).cumsum(-1)
    reached = sums >= (sums[..., -1:] + 1) * level * (1 - ROUNDING)
    found = ordered.gather(-1, reached.long().argmax(-1, keepdim=True)).squeeze(-1)
    return torch.where(reached[..., -1], found, torch.inf)


def shortage(weights: Tensor, level: float, rows: str) -> str | None:
    """How many rows a quantile of that level needs, in words; None if there are enough.

    weights (n,); rows: what they are called.
    """
    total, least = float(weights.sum()), math.ceil(level / (1 - level) * (1 - ROUNDING))
    if total >= (total + 1) * level * (1 - ROUNDING):
        return None
    weighted = "" if math.isclose(total, len(weights)) else f" with a total weight of {total:g}"
    return f"needs at least {least} {rows}, but there are {len(weights)}{weighted}"
