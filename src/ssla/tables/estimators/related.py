"""Groups and times of rows, which decide which rows are held out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.model_selection import GroupShuffleSplit
from torch import Tensor

from ssla._checks import refuse_masked
from ssla.tables.networks.folds import find_latest_rows


@dataclass(frozen=True, eq=False)
class Related:
    """The groups or the times of n rows, or neither."""

    groups: np.ndarray | None = None  # the number of each row's group (n,)
    time: np.ndarray | None = None  # the rank of each row's time (n,)

    @staticmethod
    def from_arguments(groups: Any, time: Any, rows: int) -> Related:
        """Return the groups or times that were given to `fit`, as numbers.

        Raises ValueError if both are given, and for wrong shapes or missing values.

        groups, time: (n,) values that can be sorted, or None.  rows: n.
        """
        if groups is not None and time is not None:
            raise ValueError(
                "Give groups or time, but not both: whole groups or the latest rows are held out."
            )
        return Related(_rank_values("groups", groups, rows), _rank_values("time", time, rows))

    @property
    def has_values(self) -> bool:
        """Whether there are groups or times."""
        return self.groups is not None or self.time is not None

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        """Copies of groups and time as tensors (n,); None where they are not given."""
        groups, time = (
            None if values is None else torch.from_numpy(values.copy())
            for values in (self.groups, self.time)
        )
        return groups, time

    def __getitem__(self, rows: np.ndarray) -> Related:
        """Return the groups or times of some rows.

        rows: the positions of the rows (k,), or a mask (n,) bool.
        """
        return Related(
            *(None if values is None else values[rows] for values in (self.groups, self.time))
        )

    def choose_held_out_rows(self, fraction: float, seed: int) -> np.ndarray:
        """Choose about that fraction of the rows (n,) bool: the latest rows, or whole groups.

        There must be groups or times.  seed: draws the groups. Raises ValueError for a single group
        or a single time.
        """
        if self.time is not None:
            count = max(round(fraction * len(self.time)), 1)
            return find_latest_rows(torch.from_numpy(self.time.copy()), count).numpy()

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
    """Return the rank of each value among the different ones (n,); None if values is None.

    Equal values have equal ranks, from 0.  name: the argument, for errors.  rows: n. Raises
    ValueError for a wrong shape, and for masked or missing values.
    """
    if values is None:
        return None
    refuse_masked(name, values)
    array = np.asarray(values)
    if array.shape != (rows,):
        raise ValueError(
            f"{name} must have shape ({rows},), one value for each row, but has {array.shape}."
        )

    # NaN differs from itself. `tolist` turns NumPy's NaT into None, or into an integer if its unit
    # is nanoseconds, so `isnat` is called too.
    if any(value is None or value != value for value in array.tolist()) or (
        array.dtype.kind in "mM" and np.isnat(array).any()
    ):
        raise ValueError(f"{name} has missing values. Leave out these rows, or give each a value.")

    ranks: np.ndarray = np.unique(array, return_inverse=True)[1]
    return ranks.astype(np.int64)
