"""Chooses the rows that each member holds out for early stopping, noise and prior.

These are random rows, whole groups, or the latest rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

ONE_GROUP = (
    "groups has one group only, so no whole group can be held out. Leave it out, or give several "
    "groups."
)


def hold_out_rows(
    rows: int,
    members: int,
    fraction: float,
    generator: torch.Generator,
    strata: Tensor | None = None,
    groups: Tensor | None = None,
    time: Tensor | None = None,
) -> Tensor:
    """Return which of the n rows each of M members holds out, bool (M, n).

    The rows of different members are disjoint if there are enough. None are held out if the
    fraction is 0, or if there are fewer than two rows. Raises ValueError if all rows have one group
    or one time.

    rows, members: n and M.  fraction: the share of the rows that a member holds out, at least one
    row if the share is positive.
    generator: draws the random orders of rows and groups.
    strata (n,): the class of each row. Each member holds out about the same proportions of classes.
    groups (n,): the number of the group of each row. Whole groups are held out, and strata are
    ignored.
    time (n,): the time of each row. Every member holds out the same latest rows, and strata and
    groups are ignored.
    """
    held = torch.zeros(members, rows, dtype=torch.bool)
    count = min(max(round(fraction * rows), 1), rows - 1) if fraction > 0 else 0
    if count == 0 or rows < 2:
        return held

    # All members hold out the same latest rows, because they will predict later rows.
    if time is not None:
        return find_latest_rows(time, count).expand(members, -1).clone()
    if groups is not None:
        return _hold_out_groups(groups, members, count, generator)
    order = torch.randperm(rows, generator=generator)
    if strata is not None:
        order = _interleave_classes(order, strata, generator)

    # Each member takes the next rows of one order, which begins again at its end.
    for m in range(members):
        positions = torch.arange(m * count, (m + 1) * count) % rows
        held[m, order[positions]] = True

    return held


def _interleave_classes(order: Tensor, strata: Tensor, generator: torch.Generator) -> Tensor:
    """Return an order (n,) of the rows with all classes evenly spread over it.

    So any section of the order has about the same proportions of classes.

    order (n,): a random order, which is kept within each class.  strata (n,): the class of each
    row.  generator: draws an offset for each class.
    """
    # Rows are sorted by their relative rank within their class.
    rank = torch.zeros(len(order), dtype=torch.float32)
    for label in strata.unique():
        positions = (strata[order] == label).nonzero().flatten()
        # The j-th of k rows has the rank (j + u)/k, with one uniform u for the class.
        offset = torch.rand(1, generator=generator, dtype=torch.float32)
        rank[positions] = (torch.arange(len(positions)) + offset) / len(positions)
    return order[rank.argsort(stable=True)]


def find_latest_rows(time: Tensor, count: int) -> Tensor:
    """Return which rows are the latest by time (n,), bool (n,): `count` of them or more.

    Rows of one time stay together. There are fewer than `count` if otherwise no row of the earliest
    time would be left for the training. Raises ValueError if all rows have one time.
    """
    if bool((time == time[0]).all()):
        raise ValueError(
            "time has one value only, so no rows are later than others. Leave it out, or give "
            "times."
        )
    # All rows of the time at the border are held out, so these may be more than `count`.
    held = time >= time.sort().values[len(time) - count]
    return time > time.min() if bool(held.all()) else held


def _hold_out_groups(
    groups: Tensor, members: int, count: int, generator: torch.Generator
) -> Tensor:
    """Return which rows each of M members holds out, bool (M, n): those of whole groups.

    Groups are in a random order. Each member takes the next groups, cyclically, until it has at
    least `count` rows or all groups but one. Raises ValueError if there is only one group.

    groups (n,): the number of the group of each row.  members: M.  generator: draws the order of
    the groups.
    """
    labels, codes, sizes = groups.unique(return_inverse=True, return_counts=True)
    if len(labels) < 2:
        raise ValueError(ONE_GROUP)
    order = torch.randperm(len(labels), generator=generator).tolist()
    held = torch.zeros(members, len(groups), dtype=torch.bool)
    position = 0  # in the order, of the next group to take
    for m in range(members):
        taken_groups: list[int] = []
        while len(taken_groups) < len(labels) - 1 and (
            not taken_groups or int(sizes[taken_groups].sum()) < count
        ):
            taken_groups.append(order[position % len(order)])
            position += 1
        held[m] = torch.isin(codes, torch.tensor(taken_groups))

    return held
