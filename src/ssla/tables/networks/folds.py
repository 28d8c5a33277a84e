"""Which rows each member holds out for early stopping, noise and prior: at random, by whole
groups, or the latest.
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
    """Return which rows each member holds out, bool (M, n).

    They are disjoint parts of one random order if there are enough rows. Raises ValueError if all
    rows have one group or one time.

    strata (n,): classes; each part has the same class proportions.
    groups (n,): numbers of groups, of which whole ones are held out (strata are then not used).
    time (n,): the latest rows, the same for every member.
    """
    held = torch.zeros(members, rows, dtype=torch.bool)
    count = min(max(round(fraction * rows), 1), rows - 1) if fraction > 0 else 0
    if count == 0 or rows < 2:
        return held
    # All members hold out the same latest rows: the future is what they are to predict.
    if time is not None:
        return latest_rows(time, count).expand(members, -1).clone()
    if groups is not None:
        return _hold_out_groups(groups, members, count, generator)
    order = torch.randperm(rows, generator=generator)
    if strata is not None:
        order = _interleave_classes(order, strata, generator)
    for m in range(members):
        positions = torch.arange(m * count, (m + 1) * count) % rows
        held[m, order[positions]] = True
    return held


def _interleave_classes(order: Tensor, strata: Tensor, generator: torch.Generator) -> Tensor:
    """Return the order (n,) of rows in which any consecutive part has the class proportions.

    order (n,): a random order, which is kept within each class.  strata (n,): the classes of rows.
    """
    rank = torch.zeros(len(order), dtype=torch.float32)
    for label in strata.unique():
        positions = (strata[order] == label).nonzero().flatten()
        # The j-th of k rows has the rank (j + u)/k, with one uniform u for the class.
        offset = torch.rand(1, generator=generator, dtype=torch.float32)
        rank[positions] = (torch.arange(len(positions)) + offset) / len(positions)
    return order[rank.argsort(stable=True)]


def latest_rows(time: Tensor, count: int) -> Tensor:
    """Return which are the last `count` rows by time (n,), bool (n,).

    Rows of one time are not divided: all of them are held out, or none. Raises ValueError if all
    rows have one time.
    """
    if bool((time == time[0]).all()):
        raise ValueError(
            "time has one value only, so no rows are later than others. Leave it out, or give "
            "times."
        )
    # Rows of the time at the border are held out too, so these may be more than `count`.
    held = time >= time.sort().values[len(time) - count]
    # At least the rows of the earliest time are left for the training.
    return held if not bool(held.all()) else time > time.min()


def _hold_out_groups(
    groups: Tensor, members: int, count: int, generator: torch.Generator
) -> Tensor:
    """Return which rows each member holds out, bool (M, n): whole groups.

    Groups are in a random order, and each member takes the next ones, cyclically, until it has
    `count` rows, but never all groups. groups (n,): numbers of groups. Raises ValueError if there
    is only one.
    """
    labels, codes, sizes = groups.unique(return_inverse=True, return_counts=True)
    if len(labels) < 2:
        raise ValueError(ONE_GROUP)
    order = torch.randperm(len(labels), generator=generator).tolist()
    held = torch.zeros(members, len(groups), dtype=torch.bool)
    position = 0
    for m in range(members):
        taken: list[int] = []
        while len(taken) < len(labels) - 1 and (not taken or int(sizes[taken].sum()) < count):
            taken.append(order[position % len(order)])
            position += 1
        held[m] = torch.isin(codes, torch.tensor(taken))
    return held
