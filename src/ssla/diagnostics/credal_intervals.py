"""Intervals and regions of a set of predictives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssla.predictive import Predictive

# The numbers of this module are guesses. 60 bisections halve an interval to double precision; five
# zooms with 41 points each narrow the first grid by 20⁵.
FIRST_POINTS, ZOOM_POINTS, ZOOMS = 200, 41, 5
BISECTIONS = 60
MOST_COUNTS = 4096  # starts of an interval of counts
FAR = 1e-9  # tail probability at which the search for an upper end stops


class Merged(NamedTuple):
    """Disjoint intervals, one row each: lower and upper ends (N, R), padded with NaN."""

    lower: Tensor
    upper: Tensor


def smallest_interval(predictives: Sequence[Predictive], level: float) -> Tensor:
    """Compute [a, b] of least length with min_m P_m([a, b]) ≥ level, for each row (N, 2).

    For each a the least b follows by bisection, because the least probability grows with b; a is
    sought on a grid that is then narrowed around its best point. Raises TypeError for classes, and
    ValueError for counts with too many possible starts.
    """
    if any(p.kind == "class" for p in predictives):
        raise TypeError("Classes have no intervals. Ask for probability([…]).")
    members: Sequence[Any] = predictives
    if predictives[0].kind == "count":
        return _smallest_interval_of_counts(members, level)
    # (N, k): no member has more than 1 − level below its a.
    share = torch.linspace(1e-6, 1 - 1e-6, FIRST_POINTS, dtype=torch.float64) * (1 - level)
    a = torch.stack([p.icdf(share).double() for p in members]).amin(0)
    far = torch.stack([p.icdf(1 - FAR).double() for p in members]).amax(0)
    b = _least_upper_ends(members, a, far, level)
    grid = torch.linspace(0, 1, ZOOM_POINTS, dtype=torch.float64)
    for _ in range(ZOOMS):
        # The next grid spans the neighbours of the best point.
        best = (b - a).argmin(1, keepdim=True)
        left = a.gather(1, (best - 1).clamp_min(0))
        right = a.gather(1, (best + 1).clamp_max(a.shape[1] - 1))
        a = left + (right - left) * grid
        b = _least_upper_ends(members, a, far, level)
    return _select_shortest(a, b)


def probability_between(predictive: Any, ends: Tensor) -> Tensor:
    """Compute P(a ≤ Y ≤ b) for ends (N, 2): (N,)."""
    # P(a ≤ Y) of a count is 1 − P(Y ≤ a − 1).
    before = ends - torch.tensor([float(predictive.kind == "count"), 0.0])
    between: Tensor = predictive.cdf(before).double().diff(dim=1).squeeze(1)
    return between


def _least_probability(members: Sequence[Any], below: list[Tensor], b: Tensor) -> Tensor:
    """Compute min_m (F_m(b) − below_m), with b and each below_m (N, k)."""
    gaps = [p.cdf(b).double() - start for p, start in zip(members, below, strict=True)]
    return torch.stack(gaps).amin(0)


def _least_upper_ends(members: Sequence[Any], a: Tensor, far: Tensor, level: float) -> Tensor:
    """Find the least b with min_m P_m([a, b]) ≥ level, for a (N, k) and far (N,).

    Returns (N, k); infinite where no b up to `far` has that probability.
    """
    below = [p.cdf(a).double() for p in members]
    low, high = a.clone(), far[:, None].expand_as(a).clone()
    # [a, low] has less than the level, [a, high] enough, where any end has.
    possible = _least_probability(members, below, high) >= level
    for _ in range(BISECTIONS):
        centre = (low + high) / 2
        enough = _least_probability(members, below, centre) >= level
        high = torch.where(enough, centre, high)
        low = torch.where(enough, low, centre)
    return torch.where(possible, high, torch.inf)


def _smallest_interval_of_counts(members: Sequence[Any], level: float) -> Tensor:
    """Compute the smallest interval over whole numbers (N, 2).

    P_m(a ≤ Y ≤ b) is F_m(b) − F_m(a − 1). Every start a is tried, with a bisection for b. Raises
    ValueError for too many starts.
    """
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
    # [a, low] has less than the level, [a, high] enough.
    low, high = a - 1, far[:, None].expand_as(a).clone()
    while bool((high - low > 1).any()):
        centre = torch.floor((low + high) / 2)
        enough = _least_probability(members, below, centre) >= level
        high = torch.where(enough, centre, high)
        low = torch.where(enough, low, centre)
    return _select_shortest(a, high)


def _select_shortest(a: Tensor, b: Tensor) -> Tensor:
    """Select the shortest of the intervals [a, b] in each row: (N, k) each -> (N, 2)."""
    best = (b - a).argmin(1, keepdim=True)
    return torch.cat([a.gather(1, best), b.gather(1, best)], 1)


def merge_regions(regions: Sequence[Any]) -> Merged:
    """Compute the unions of regions, each of which has ends `lower` and `upper` (N, R) padded with
    NaN.

    Raises TypeError for regions that are not intervals.
    """
    if not hasattr(regions[0], "lower"):
        raise TypeError("The union of regions is for one ordered continuous target.")
    # In this order padding comes last, and its ends change no other interval.
    lower = torch.cat([torch.nan_to_num(r.lower.double(), nan=torch.inf) for r in regions], 1)
    upper = torch.cat([torch.nan_to_num(r.upper.double(), nan=-torch.inf) for r in regions], 1)
    order = lower.argsort(1)
    lower, reach = lower.gather(1, order), upper.gather(1, order).cummax(1).values
    # An interval opens a new group if it begins after the end of all before it; padding does not.
    finite = torch.isfinite(lower)
    opens = torch.ones_like(lower, dtype=torch.bool)
    opens[:, 1:] = lower[:, 1:] > reach[:, :-1]
    opens &= finite
    group = opens.long().cumsum(1) - 1
    shape = (len(lower), int(group.max()) + 1)
    index = group.clamp_min(0)
    start = torch.full(shape, torch.inf, dtype=torch.float64)
    start = start.scatter_reduce(1, index, torch.where(finite, lower, torch.inf), "amin")
    stop = torch.full(shape, -torch.inf, dtype=torch.float64)
    stop = stop.scatter_reduce(1, index, torch.where(finite, reach, -torch.inf), "amax")
    empty = ~torch.isfinite(start)
    return Merged(start.masked_fill(empty, torch.nan), stop.masked_fill(empty, torch.nan))
