"""Intervals and regions of a set of predictives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssla.predictive import Predictive

FIRST_POINTS, ZOOM_POINTS, ZOOMS = 200, 41, 5
BISECTIONS = 60
MOST_COUNTS = 4096
FAR = 1e-9


class Merged(NamedTuple):
    """Disjoint intervals, one row each: lower and upper ends (N, R), padded with NaN."""

    lower: Tensor
    upper: Tensor


def smallest_interval(predictives: Sequence[Predictive], level: float) -> Tensor:
    """[a, b] of least length with min_m P_m([a, b]) ≥ level (N, 2).

    For each a the least b follows by bisection, because the least probability grows with b; a is
    sought on a grid that is then narrowed around its best point.
    """
    if any(p.kind == "class" for p in predictives):
        raise TypeError("Classes have no intervals. Ask for probability([…]).")
    members: Sequence[Any] = predictives
    if predictives[0].kind == "count":
        return _smallest_counts(members, level)
    share = torch.linspace(1e-6, 1 - 1e-6, FIRST_POINTS, dtype=torch.float64) * (1 - level)
    a = torch.stack([p.icdf(share).double() for p in members]).amin(
        0
    )  # (N, k): no member has more than 1 − level below it
    far = torch.stack([p.icdf(1 - FAR).double() for p in members]).amax(0)
    b = _upper_ends(members, a, far, level)
    for _ in range(ZOOMS):
        best = (b - a).argmin(1, keepdim=True)
        left, right = (
            a.gather(1, (best - 1).clamp_min(0)),
            a.gather(1, (best + 1).clamp_max(a.shape[1] - 1)),
        )
        a = left + (right - left) * torch.linspace(0, 1, ZOOM_POINTS, dtype=torch.float64)
        b = _upper_ends(members, a, far, level)
    best = (b - a).argmin(1, keepdim=True)
    return torch.cat([a.gather(1, best), b.gather(1, best)], 1)


def content(predictive: Any, ends: Tensor) -> Tensor:
    """P(a ≤ Y ≤ b) for ends (N, 2): (N,)."""
    before = ends - torch.tensor([float(predictive.kind == "count"), 0.0])
    between: Tensor = predictive.cdf(before).double().diff(dim=1).squeeze(1)
    return between


def _upper_ends(members: Sequence[Any], a: Tensor, far: Tensor, level: float) -> Tensor:
    """The least b with min_m P_m([a, b]) ≥ level, for a (N, k); infinite where none up to `far`
    reaches it.
    """
    below = [p.cdf(a).double() for p in members]
    low, high = a.clone(), far[:, None].expand_as(a).clone()

    def reached(b: Tensor) -> Tensor:
        return (
            torch.stack(
                [p.cdf(b).double() - start for p, start in zip(members, below, strict=True)]
            ).amin(0)
            >= level
        )

    possible = reached(high)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        enough = reached(middle)
        high, low = torch.where(enough, middle, high), torch.where(enough, low, middle)
    return torch.where(possible, high, torch.inf)


def _smallest_counts(members: Sequence[Any], level: float) -> Tensor:
    """The same over whole numbers: P_m(a ≤ Y ≤ b) = F_m(b) − F_m(a − 1)."""
    first = torch.stack([p.icdf(FAR).double() for p in members]).amin(0)
    last = torch.stack([p.icdf(1 - level).double() for p in members]).amin(0)
    far = torch.stack([p.icdf(1 - FAR).double() for p in members]).amax(0)
    count = int((last - first).max()) + 1
    if count > MOST_COUNTS:
        raise ValueError(
            f"The smallest interval of counts would be sought over {count} starts; use "
            "quantile([…]) bounds instead."
        )
    a = torch.minimum(first[:, None] + torch.arange(count, dtype=torch.float64), last[:, None])
    below = [p.cdf(a - 1).double() for p in members]
    low, high = a - 1, far[:, None].expand_as(a).clone()  # low fails, high holds
    while bool((high - low > 1).any()):
        middle = torch.floor((low + high) / 2)
        enough = (
            torch.stack(
                [p.cdf(middle).double() - start for p, start in zip(members, below, strict=True)]
            ).amin(0)
            >= level
        )
        high, low = torch.where(enough, middle, high), torch.where(enough, low, middle)
    best = (high - a).argmin(1, keepdim=True)
    return torch.cat([a.gather(1, best), high.gather(1, best)], 1)


def union(regions: Sequence[Any]) -> Merged:
    """Unions of intervals, each (N, R) padded with NaN -> their union."""
    if not hasattr(regions[0], "lower"):
        raise TypeError("The union of regions is for one ordered continuous target.")
    lower = torch.cat([torch.nan_to_num(r.lower.double(), nan=torch.inf) for r in regions], 1)
    upper = torch.cat([torch.nan_to_num(r.upper.double(), nan=-torch.inf) for r in regions], 1)
    order = lower.argsort(1)
    lower, reach = lower.gather(1, order), upper.gather(1, order).cummax(1).values
    fresh = torch.ones_like(lower, dtype=torch.bool)
    fresh[:, 1:] = lower[:, 1:] > reach[:, :-1]
    fresh &= torch.isfinite(lower)
    group = fresh.long().cumsum(1) - 1
    most = int(group.max()) + 1
    start = torch.full((len(lower), most), torch.inf, dtype=torch.float64)
    stop = torch.full((len(lower), most), -torch.inf, dtype=torch.float64)
    finite = torch.isfinite(lower)
    index = group.clamp_min(0)
    start = start.scatter_reduce(1, index, torch.where(finite, lower, torch.inf), "amin")
    stop = stop.scatter_reduce(1, index, torch.where(finite, reach, -torch.inf), "amax")
    empty = ~torch.isfinite(start)
    return Merged(start.masked_fill(empty, torch.nan), stop.masked_fill(empty, torch.nan))
