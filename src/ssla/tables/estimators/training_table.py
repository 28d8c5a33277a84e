"""What `ssla train` stores beside an estimator: its target column, and how the table was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ssla.tables.columns import Style, Table, TableError, read_later_labels, read_later_numbers


@dataclass(frozen=True, eq=False)
class TrainingTable:
    """The part of a file that only the command writes.

    The columns of the inputs are in the estimator's `plan_`.
    """

    target: str  # the name of the target column
    target_style: Style = field(default_factory=Style)  # the format of its numbers
    decimal: str | None = None  # the mark that the command was given; None: it was detected
    thousands: str | None = None  # the same for groups of digits
    # what `ssla report` prints: rows, columns, scores of held-out rows
    facts: Mapping[str, Any] = field(default_factory=dict)

    def read_targets(
        self, table: Table, classes: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the targets (k,) that the rows of a later table have, and which rows these are.

        The second result is (n,) bool.  classes: the labels of a classifier (C,); None for numbers.
        Raises TableError if no row has a target, or if a cell cannot be read.
        """
        if classes is None:
            y, has_target = read_later_numbers(table, self.target, self.target_style)
        else:
            y, has_target = read_later_labels(table, self.target, classes.tolist())
        if not has_target.any():
            raise TableError(f"No row of {table.path} has a value in the target {self.target!r}.")
        return y, has_target

    def as_json(self) -> dict[str, Any]:
        """Return the values of all fields as a file can hold them."""
        plain = {name: value for name, value in vars(self).items() if name != "target_style"}
        return plain | {"target_style": asdict(self.target_style)}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> TrainingTable:
        """Return the object that `as_json` wrote; raise ValueError for values of other types."""
        style = {str(name): str(mark) for name, mark in content["target_style"].items()}
        marks = (content["decimal"], content["thousands"])
        if not isinstance(content["target"], str) or not isinstance(content["facts"], dict):
            raise ValueError("the target has no name, or the training no facts")
        if not all(mark is None or isinstance(mark, str) for mark in marks):
            raise ValueError("the marks of numbers are not texts")
        return TrainingTable(
            target=content["target"],
            target_style=Style(**style),
            decimal=content["decimal"],
            thousands=content["thousands"],
            facts=content["facts"],
        )
