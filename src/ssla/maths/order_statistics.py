"""Weighted order statistics of rows that count one more row, whose value is not known.

Such statistics are the quantiles of conformal prediction: if a new row is exchangeable with the
others, and all weights are one, its value is at most the quantile with a probability of at least
the level.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDING = 1e-12  # relative: (n + 1)·level may be a whole number up to rounding


def conformal_quantile(values: Tensor, weights: Tensor, level: float) -> Tensor:
    """Return the smallest value up to which the weights sum to at least (W + 1)·level.

    values (..., n), weights (n,) or (..., n) -> (...). W is the sum of all weights, and the 1 is
    the weight of the new row. With weights of one it is the k-th smallest value, k = ⌈(n +
    1)·level⌉. It is infinite if all weights sum to less.
    """
    ordered, order = values.sort(-1)
    sums = weights.expand_as(values).gather(-1, order).cumsum(-1)
    enough = sums >= (sums[..., -1:] + 1) * level * (1 - ROUNDING)
    first = enough.long().argmax(-1, keepdim=True)  # argmax gives the first of equal entries
    return torch.where(enough[..., -1], ordered.gather(-1, first).squeeze(-1), torch.inf)


def describe_row_shortage(weights: Tensor, level: float, rows: str) -> str | None:
    """Return a clause that says how many rows a quantile needs; None if there are enough.

    weights (n,): those of the rows. rows: the noun for them, such as "rows". level: of the
    quantile, between 0 and 1.
    """
    total = float(weights.sum())
    # This is the condition of `conformal_quantile`, so a finite quantile is never refused.
    if total >= (total + 1) * level * (1 - ROUNDING):
        return None
    # n ≥ (n + 1)·level  <=>  n ≥ level / (1 − level)
    least = math.ceil(level / (1 - level) * (1 - ROUNDING))
    weighted = "" if math.isclose(total, len(weights)) else f" with a total weight of {total:g}"
    return f"needs at least {least} {rows}, but there are {len(weights)}{weighted}"
