"""The smallest interval and the union of regions of a set of predictives.

The predictives of a set are its members m. All have the same N rows, and P_m and F_m are the
probability and the distribution function of y under member m, row by row.

The argument `members` has the type Any where attributes are used that only some kinds of targets
have.
"""

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


def find_smallest_interval(predictives: Sequence[Predictive], level: float) -> Tensor:
    """Compute for each row the shortest interval [a, b] with min_m P_m([a, b]) ≥ level: (N, 2).

    predictives: at least one. level: between 0 and 1. For each a the least b is found by bisection,
    because the least probability min_m P_m([a, b]) grows with b. a is searched for on a grid, which
    is then narrowed around its best point. Raises TypeError for classes, and ValueError for counts
    with too many possible a.
    """
    if any(p.kind == "class" for p in predictives):
        raise TypeError("Classes have no intervals. Ask for probability([…]).")
    members: Sequence[Any] = predictives
    if predictives[0].kind == "count":
        return _find_smallest_interval_of_counts(members, level)

    # The first grid (N, k): the least quantiles of the members at probabilities up to 1 − level,
    # because no member may have more below a.
    share = torch.linspace(1e-6, 1 - 1e-6, FIRST_POINTS, dtype=torch.float64) * (1 - level)
    a = torch.stack([p.icdf(share).double() for p in members]).amin(0)
    far = torch.stack([p.icdf(1 - FAR).double() for p in members]).amax(0)
    b = _find_least_upper_ends(members, a, far, level)
    grid = torch.linspace(0, 1, ZOOM_POINTS, dtype=torch.float64)
    for _ in range(ZOOMS):
        # The next grid lies between the neighbours of the best point.
        best = (b - a).argmin(1, keepdim=True)
        a_before = a.gather(1, (best - 1).clamp_min(0))
        a_after = a.gather(1, (best + 1).clamp_max(a.shape[1] - 1))
        a = a_before + (a_after - a_before) * grid
        b = _find_least_upper_ends(members, a, far, level)

    return _select_shortest(a, b)


def compute_probability_between(predictive: Any, ends: Tensor) -> Tensor:
    """Compute P(a ≤ Y ≤ b) of each row (N,), for ends a, b (N, 2).

    The predictive must be of numbers or counts.
    """
    # For a count, P(a ≤ Y ≤ b) is P(Y ≤ b) − P(Y ≤ a − 1).
    before = ends - torch.tensor([float(predictive.kind == "count"), 0.0])
    between: Tensor = predictive.cdf(before).double().diff(dim=1).squeeze(1)
    return between


def _compute_least_probability(members: Sequence[Any], below: list[Tensor], b: Tensor) -> Tensor:
    """Compute the least probability of the members between a and b: min_m (F_m(b) − below_m).

    below: for each member its probability below a (N, k). b (N, k) -> (N, k).
    """
    probabilities = [
        member.cdf(b).double() - member_below
        for member, member_below in zip(members, below, strict=True)
    ]
    return torch.stack(probabilities).amin(0)


def _find_least_upper_ends(members: Sequence[Any], a: Tensor, far: Tensor, level: float) -> Tensor:
    """Find the least b with min_m P_m([a, b]) ≥ level, for lower ends a (N, k).

    far (N,): the largest b that is tried. Returns b (N, k), infinite where no b up to `far` has
    that probability. Targets are continuous.
    """
    below = [p.cdf(a).double() for p in members]
    low, high = a.clone(), far[:, None].expand_as(a).clone()

    # [a, low] has less than the level, and [a, high] has enough where it is possible at all.
    possible = _compute_least_probability(members, below, high) >= level
    for _ in range(BISECTIONS):
        centre = (low + high) / 2
        enough = _compute_least_probability(members, below, centre) >= level
        high = torch.where(enough, centre, high)
        low = torch.where(enough, low, centre)

    return torch.where(possible, high, torch.inf)


def _find_smallest_interval_of_counts(members: Sequence[Any], level: float) -> Tensor:
    """Compute for each row the shortest interval of counts [a, b] with min_m P_m([a, b]) ≥ level:
    (N, 2).

    P_m(a ≤ Y ≤ b) is F_m(b) − F_m(a − 1). Every possible a is tried, with a bisection for b. Raises
    ValueError where there are more than MOST_COUNTS of them.
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

    # [a, low] has less than the level, and [a, high] has enough.
    low, high = a - 1, far[:, None].expand_as(a).clone()
    while bool((high - low > 1).any()):
        centre = torch.floor((low + high) / 2)
        enough = _compute_least_probability(members, below, centre) >= level
        high = torch.where(enough, centre, high)
        low = torch.where(enough, low, centre)

    return _select_shortest(a, high)


def _select_shortest(a: Tensor, b: Tensor) -> Tensor:
    """Select the shortest of the k intervals [a, b] in each row: (N, k) each -> (N, 2)."""
    best = (b - a).argmin(1, keepdim=True)
    return torch.cat([a.gather(1, best), b.gather(1, best)], 1)


def merge_regions(regions: Sequence[Any]) -> Merged:
    """Compute for each row the union of the regions of several predictives, as disjoint intervals.

    A region has ends `lower` and `upper` (N, R), padded with NaN; R may differ between regions.
    Raises TypeError for regions that are not unions of intervals.
    """
    if not hasattr(regions[0], "lower"):
        raise TypeError("The union of regions is for one ordered continuous target.")

    # All intervals of a row in the order of their lower ends. Padding becomes [∞, −∞], which comes
    # last and changes no other interval.
    lower = torch.cat([torch.nan_to_num(r.lower.double(), nan=torch.inf) for r in regions], 1)
    upper = torch.cat([torch.nan_to_num(r.upper.double(), nan=-torch.inf) for r in regions], 1)
    order = lower.argsort(1)
    lower = lower.gather(1, order)
    greatest_upper = upper.gather(1, order).cummax(1).values

    # Intervals that overlap form a group. An interval opens a new group if it begins after the
    # upper ends of all intervals before it. Padding opens none.
    finite = torch.isfinite(lower)
    opens = torch.ones_like(lower, dtype=torch.bool)
    opens[:, 1:] = lower[:, 1:] > greatest_upper[:, :-1]
    opens &= finite
    group = opens.long().cumsum(1) - 1

    # The union of a group runs from its least lower end to its greatest upper end.
    shape = (len(lower), int(group.max()) + 1)
    index = group.clamp_min(0)
    start = torch.full(shape, torch.inf, dtype=torch.float64)
    start = start.scatter_reduce(1, index, torch.where(finite, lower, torch.inf), "amin")
    stop = torch.full(shape, -torch.inf, dtype=torch.float64)
    stop = stop.scatter_reduce(1, index, torch.where(finite, greatest_upper, -torch.inf), "amax")
    empty = ~torch.isfinite(start)
    return Merged(start.masked_fill(empty, torch.nan), stop.masked_fill(empty, torch.nan))
