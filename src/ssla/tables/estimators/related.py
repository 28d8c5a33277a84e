"""Rows that belong together or follow one another: groups and times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.model_selection import GroupShuffleSplit
from torch import Tensor

from ssla._checks import refuse_masked
from ssla.tables.networks.folds import latest


@dataclass(frozen=True, eq=False)
class Related:
    """groups: the number of each row's group; time: the rank of its time.

    (n,) or None, at most one of them.
    """

    groups: np.ndarray | None = None
    time: np.ndarray | None = None

    @staticmethod
    def of(groups: Any, time: Any, rows: int) -> Related:
        if groups is not None and time is not None:
            raise ValueError(
                "Give groups or time, but not both: whole groups or the latest rows are held out."
            )
        return Related(_ranks("groups", groups, rows), _ranks("time", time, rows))

    @property
    def given(self) -> bool:
        return self.groups is not None or self.time is not None

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        groups, time = (
            None if part is None else torch.from_numpy(part.copy())
            for part in (self.groups, self.time)
        )
        return groups, time

    def __getitem__(self, rows: np.ndarray) -> Related:
        return Related(*(None if part is None else part[rows] for part in (self.groups, self.time)))

    def aside(self, fraction: float, seed: int) -> np.ndarray:
        """Whole groups, or the latest rows, of about that fraction (n,) bool."""
        if self.time is not None:
            return latest(
                torch.from_numpy(self.time.copy()), max(round(fraction * len(self.time)), 1)
            ).numpy()
        assert self.groups is not None
        if len(np.unique(self.groups)) < 2:
            raise ValueError(
                "groups has one group only, so no whole group can be held out. Leave it out, or "
                "give several groups."
            )
        split = GroupShuffleSplit(1, test_size=fraction, random_state=seed)
        chosen = np.zeros(len(self.groups), dtype=bool)
        chosen[next(split.split(self.groups, groups=self.groups))[1]] = True
        return chosen


def _ranks(name: str, values: Any, rows: int) -> np.ndarray | None:
    """The rank of each value among the different ones (n,); equal values are equal."""
    if values is None:
        return None
    refuse_masked(name, values)
    given = np.asarray(values)
    if given.shape != (rows,):
        raise ValueError(
            f"{name} must have shape ({rows},), one value for each row, but has {given.shape}."
        )
    if any(value is None or value != value for value in given.tolist()) or (
        given.dtype.kind in "mM" and np.isnat(given).any()
    ):
        raise ValueError(f"{name} has missing values. Leave out these rows, or give each a value.")
    ranks: np.ndarray = np.unique(given, return_inverse=True)[1]
    return ranks.astype(np.int64)
