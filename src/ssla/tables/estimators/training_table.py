"""What `ssla train` stores beside an estimator: its target column, and how the table was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ssla.tables.columns import Style, Table, TableError, read_later_labels, read_later_numbers


@dataclass(frozen=True, eq=False)
class TrainingTable:
    """The part of a file that only the command has. The columns of the inputs are the estimator's
    `plan_`.

    target, target_style: the name of the target column, and the format of its numbers.
    decimal, thousands: the marks of numbers that the command was given, None if it detected them.
    facts: what `ssla report` prints: rows, columns, scores of held-out rows.
    """

    target: str
    target_style: Style = field(default_factory=Style)
    decimal: str | None = None
    thousands: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def observed(self, table: Table, classes: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the target (k,) of the rows of a later table that have one, and which rows these
        are (n,) bool.

        classes: the labels of the estimator, if it has any. Raises TableError if no row has a
        target.
        """
        if classes is None:
            y, given = read_later_numbers(table, self.target, self.target_style)
        else:
            y, given = read_later_labels(table, self.target, classes.tolist())
        if not given.any():
            raise TableError(f"No row of {table.path} has a value in the target {self.target!r}.")
        return y, given

    def as_json(self) -> dict[str, Any]:
        """Return plain values for a file."""
        return {name: value for name, value in vars(self).items() if name != "target_style"} | {
            "target_style": asdict(self.target_style)
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> TrainingTable:
        """Return the values of a file; raise ValueError for other types than `as_json` writes."""
        style = {str(name): str(mark) for name, mark in content["target_style"].items()}
        marks = (content["decimal"], content["thousands"])
        if not isinstance(content["target"], str) or not isinstance(content["facts"], dict):
            raise ValueError("the target has no name, or the training no facts")
        if not all(mark is None or isinstance(mark, str) for mark in marks):
            raise ValueError("the marks of numbers are not texts")
        return TrainingTable(content["target"], Style(**style), *marks, content["facts"])
