"""Total-variation distances between predictives, and the largest one in a set of them.

The distance of P and Q is TV = sup_A |P(A) − Q(A)| = ½ ∫ |p − q|: the largest difference that any
event can show. It is 0 for equal distributions, 1 where no y is possible under both, and it does
not change when y is measured in another unit or classes get other names.

For classes it is a sum. Otherwise the line is cut into cells, and TV = ½ Σ_cells |P(cell) −
Q(cell)|, with both probabilities from distribution functions. This is exact if p − q has one sign
in each cell, and too small otherwise, so that only the cuts near the crossings of p and q matter.
They are found from log p − log q at quantiles of both, by two secant steps. Two Gaussians of equal
variance cross once and have a linear log ratio, so that the first step is exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ssla.diagnostics.predictive_sets import Members
from ssla.predictive import Law, Predictive

# Quantiles at which densities are compared: z-scores from −REACH to REACH. Beyond are 1e-9 of the
# probability on either side. With steps of 0.25 standard deviations, the errors of four pairs of
# Gaussians were at most 4e-9 (tests/diagnostics/test_total_variation.py).
REACH, SCORES = 6.0, 49
MOST_SINGLE_COUNTS = 1024  # counts up to which each is a cell of its own; a guess
MOST_PAIRED = 16  # members of a family of which all pairs are compared; a guess
SEARCHES = 1  # through a family, each from another member; a guess
ROUNDS = 3  # searches for the member that is farthest from the last one found; a guess
GAIN = 1e-4  # of the distance, below which they end; a guess


class TotalVariation(NamedTuple):
    """The uncertainty of a set of distributions of y, in total-variation distances; (N,) each."""

    total: Tensor  # aleatoric + epistemic
    aleatoric: Tensor  # the least distance of a member from certainty
    epistemic: Tensor  # the largest distance between two members


def compute_distance(first: Predictive, second: Predictive) -> Tensor:
    """Compute the total-variation distance of two predictives of the same N rows (N,), from 0 to 1.

    Raises TypeError for targets that are neither classes nor one number or count.
    """
    if first.kind == "class":
        difference: Tensor = first.law.probs.double() - second.law.probs.double()
        return difference.abs().sum(1) / 2
    if first.kind not in ("scalar", "count"):
        raise TypeError(
            "Total-variation distances are for classes, counts and one number, but the target is "
            f"of kind {first.kind!r}. Ask for the bounds of the mean."
        )

    p, q = first.law, second.law
    points = _place_cuts(p, q, is_count=first.kind == "count")

    # P(Y ≤ y) − Q(Y ≤ y) is zero at both ends of the line.
    difference = pad(p.cdf(points) - q.cdf(points), (1, 1))
    return (difference.diff(dim=1).abs().sum(1) / 2).clamp_max(1.0)


def find_largest_distance(members: Members) -> Tensor:
    """Find the largest total-variation distance between two members of a set (N,).

    For a finite set it is the largest of all pairs. In a family, the member that is farthest from
    one of the best pair is searched for, then the member farthest from that one, until the distance
    grows no more, or ROUNDS times. The result belongs to a pair of members, so that it is at most
    the true value.
    """
    listed = members.list_members()
    if not members.is_family:
        largest_distance, _ = _compare_pairs(listed)
        return largest_distance
    listed = listed[:MOST_PAIRED]
    largest_distance, first_member = _compare_pairs(listed)

    # Each row has its own best pair, but a search starts from one member for all rows. So there is
    # one from each of the members that are in the best pairs of the most rows.
    pair_counts = first_member.bincount()
    starts = pair_counts.topk(min(SEARCHES, len(pair_counts))).indices
    for start in starts.tolist():
        largest_distance = torch.maximum(largest_distance, _search_from(members, listed[start]))
    return largest_distance


def _compare_pairs(predictives: Sequence[Predictive]) -> tuple[Tensor, Tensor]:
    """Return the largest distance of a pair (N,), and the number of the pair's first member (N,).

    Both are zero where there is one predictive.
    """
    largest_distance = torch.zeros(predictives[0].law.rows, dtype=torch.float64)
    first_member = torch.zeros(len(largest_distance), dtype=torch.long)
    for i, j in itertools.combinations(range(len(predictives)), 2):
        distance = compute_distance(predictives[i], predictives[j])
        # NaN, of a member that has failed, is kept: it is not a small distance.
        better = (distance > largest_distance) | distance.isnan()
        largest_distance = torch.where(better, distance, largest_distance)
        first_member = torch.where(better, i, first_member)
    return largest_distance, first_member


def _search_from(members: Members, start: Predictive) -> Tensor:
    """Return the largest distance (N,) that a search from one member finds.

    start: the first member. Each round searches for the member that is farthest from the latest
    one.
    """
    largest_distance = torch.zeros(start.law.rows, dtype=torch.float64)
    latest_member = start
    for _ in range(ROUNDS):
        fixed = latest_member

        def negate_distance(predictive: Predictive, fixed: Predictive = fixed) -> Tensor:
            """Return minus the distance of a member from the latest one (N,)."""
            return -compute_distance(predictive, fixed)

        farthest = members.find_worst(negate_distance)
        gained = -farthest.value > largest_distance * (1 + GAIN)
        largest_distance = torch.maximum(largest_distance, -farthest.value)
        if not bool(gained.any()):
            break
        latest_member = farthest.predictive

    return largest_distance


def _place_cuts(p: Law, q: Law, is_count: bool) -> Tensor:
    """Return the points (N, k) between the cells of the line for two laws, in increasing order.

    is_count: whether y is a count. Cuts of counts are whole numbers.
    """
    scores = torch.linspace(-REACH, REACH, SCORES, dtype=torch.float64)
    levels = torch.special.erfc(-scores / math.sqrt(2)) / 2
    nodes = torch.cat([p.icdf(levels), q.icdf(levels)], 1).sort(1).values
    if not is_count:
        return _add_crossings(p, q, nodes, is_count)
    lowest = nodes[:, :1]
    reach = (nodes[:, -1:] - lowest).amax() if len(nodes) else torch.zeros(())
    if float(reach) <= MOST_SINGLE_COUNTS:
        return lowest + torch.arange(int(reach) + 1, dtype=torch.float64)

    # A count of its own cell needs a cut below it.
    nodes = torch.cat([nodes, (nodes - 1).clamp_min(0)], 1).sort(1).values
    return _add_crossings(p, q, nodes, is_count)


def _add_crossings(p: Law, q: Law, nodes: Tensor, is_count: bool) -> Tensor:
    """Return the nodes (N, k) and, between neighbours, two points near which p and q cross.

    The points are the results of two secant steps for log p − log q = 0, so the result is (N, 3k −
    2). Where the difference has one sign at both neighbours there is no crossing, and a point there
    changes nothing. is_count: whether y is a count;
    points are then rounded down.
    """
    low, high = nodes[:, :-1], nodes[:, 1:]
    ratio = p.log_prob(nodes) - q.log_prob(nodes)
    at_low, at_high = ratio[:, :-1], ratio[:, 1:]
    first = _find_secant_zero(low, high, at_low, at_high, is_count)
    at_first = p.log_prob(first) - q.log_prob(first)

    # The second step is in the part in which the sign changes.
    is_left = (at_first >= 0) != (at_low >= 0)
    second = _find_secant_zero(
        torch.where(is_left, low, first),
        torch.where(is_left, first, high),
        torch.where(is_left, at_low, at_first),
        torch.where(is_left, at_first, at_high),
        is_count,
    )
    return torch.cat([nodes, first, second], 1).sort(1).values


def _find_secant_zero(
    low: Tensor, high: Tensor, at_low: Tensor, at_high: Tensor, is_count: bool
) -> Tensor:
    """Return the zero of the line through (low, at_low) and (high, at_high), elementwise.

    It is the middle of low and high where the line has no zero between them, or where a value is
    not finite. For counts it is rounded down.
    """
    share = at_low / (at_low - at_high)
    inside = (share >= 0) & (share <= 1)  # False for NaN
    point = low + torch.where(inside, share, 0.5) * (high - low)
    return point.floor() if is_count else point
