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


def folds(
    rows: int,
    members: int,
    fraction: float,
    generator: torch.Generator,
    strata: Tensor | None = None,
    groups: Tensor | None = None,
    time: Tensor | None = None,
) -> Tensor:
    """The held-out rows of each member: disjoint parts of one random order if there are enough
    rows.  -> bool (M, n).

    strata (n,): classes; each part has the same class proportions.
    groups (n,): numbers of groups, of which whole ones are held out (strata are then not used).
    time (n,): the latest rows, the same for every member.
    """
    held = torch.zeros(members, rows, dtype=torch.bool)
    count = min(max(round(fraction * rows), 1), rows - 1) if fraction > 0 else 0
    if count == 0 or rows < 2:
        return held
    if time is not None:
        return latest(time, count).expand(members, -1).clone()
    if groups is not None:
        return _whole_groups(groups, members, count, generator)
    order = torch.randperm(rows, generator=generator)
    if strata is not None:  # classes interleaved: any consecutive part has their proportions
        rank = torch.zeros(rows, dtype=torch.float32)
        for label in strata.unique():
            where = (strata[order] == label).nonzero().flatten()
            rank[where] = (
                torch.arange(len(where)) + torch.rand(1, generator=generator, dtype=torch.float32)
            ) / len(where)
        order = order[rank.argsort(stable=True)]
    for m in range(members):
        part = torch.arange(m * count, (m + 1) * count) % rows
        held[m, order[part]] = True
    return held


def latest(time: Tensor, count: int) -> Tensor:
    """The last `count` rows (n,) bool; rows of one time are not divided, so that all of them
    are held out, or none.
    """
    if bool((time == time[0]).all()):
        raise ValueError(
            "time has one value only, so no rows are later than others. Leave it out, or give "
            "times."
        )
    held = time >= time.sort().values[len(time) - count]
    return held if not bool(held.all()) else time > time.min()


def _whole_groups(groups: Tensor, members: int, count: int, generator: torch.Generator) -> Tensor:
    """Groups in a random order, cyclically: each member takes the next ones until it has
    `count` rows, but never all groups.
    """
    labels, codes, sizes = groups.unique(return_inverse=True, return_counts=True)
    if len(labels) < 2:
        raise ValueError(ONE_GROUP)
    order = torch.randperm(len(labels), generator=generator).tolist()
    held = torch.zeros(members, len(groups), dtype=torch.bool)
    place = 0
    for m in range(members):
        taken: list[int] = []
        while len(taken) < len(labels) - 1 and (not taken or int(sizes[taken].sum()) < count):
            taken.append(order[place % len(order)])
            place += 1
        held[m] = torch.isin(codes, torch.tensor(taken))
    return held
