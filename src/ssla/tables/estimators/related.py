"""Rows that belong together or follow one another: groups and times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.model_selection import GroupShuffleSplit
from torch import Tensor

from ssla._checks import refuse_masked
from ssla.tables.networks.folds import latest_rows


@dataclass(frozen=True, eq=False)
class Related:
    """groups: the number of each row's group; time: the rank of its time.

    (n,) or None, at most one of them.
    """

    groups: np.ndarray | None = None
    time: np.ndarray | None = None

    @staticmethod
    def from_arguments(groups: Any, time: Any, rows: int) -> Related:
        """Return the groups or times that were given to `fit`, for so many rows.

        Raises ValueError if both are given, and for wrong shapes or missing values.
        """
        if groups is not None and time is not None:
            raise ValueError(
                "Give groups or time, but not both: whole groups or the latest rows are held out."
            )
        return Related(_rank_values("groups", groups, rows), _rank_values("time", time, rows))

    @property
    def given(self) -> bool:
        """Return whether there are groups or times."""
        return self.groups is not None or self.time is not None

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        """Groups and time as tensors (n,), None where they are not given."""
        groups, time = (
            None if values is None else torch.from_numpy(values.copy())
            for values in (self.groups, self.time)
        )
        return groups, time

    def __getitem__(self, rows: np.ndarray) -> Related:
        """Return the groups or times of some rows."""
        return Related(
            *(None if values is None else values[rows] for values in (self.groups, self.time))
        )

    def choose_held_out(self, fraction: float, seed: int) -> np.ndarray:
        """Choose whole groups, or the latest rows, of about that fraction: (n,) bool.

        Raises ValueError for a single group.
        """
        if self.time is not None:
            count = max(round(fraction * len(self.time)), 1)
            return latest_rows(torch.from_numpy(self.time.copy()), count).numpy()
        assert self.groups is not None
        if len(np.unique(self.groups)) < 2:
            raise ValueError(
                "groups has one group only, so no whole group can be held out. Leave it out, or "
                "give several groups."
            )
        split = GroupShuffleSplit(1, test_size=fraction, random_state=seed)
        _, held_out = next(split.split(self.groups, groups=self.groups))
        chosen = np.zeros(len(self.groups), dtype=bool)
        chosen[held_out] = True
        return chosen


def _rank_values(name: str, values: Any, rows: int) -> np.ndarray | None:
    """Return the rank of each value among the different ones (n,), None for no values.

    Equal values have equal ranks. name: what errors call the values. Raises ValueError for a wrong
    shape, and for masked or missing values.
    """
    if values is None:
        return None
    refuse_masked(name, values)
    given = np.asarray(values)
    if given.shape != (rows,):
        raise ValueError(
            f"{name} must have shape ({rows},), one value for each row, but has {given.shape}."
        )
    # NaN differs from itself. NaT of NumPy becomes None, or an integer for nanoseconds.
    if any(value is None or value != value for value in given.tolist()) or (
        given.dtype.kind in "mM" and np.isnat(given).any()
    ):
        raise ValueError(f"{name} has missing values. Leave out these rows, or give each a value.")
    ranks: np.ndarray = np.unique(given, return_inverse=True)[1]
    return ranks.astype(np.int64)
