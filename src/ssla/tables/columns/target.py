"""The target: a column of numbers, or class labels, which are returned exactly as they were
written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

from ssla.tables.columns.kinds import (
    BOOLEAN,
    DATE,
    NUMBER,
    TEXT,
    Style,
    TableError,
    is_missing,
    text_of,
    truth,
)
from ssla.tables.columns.reading import Table

MOST_CLASSES = 100  # unless classes were requested
FEW_CLASSES = 10  # always allowed; more classes need five rows each on average
ROWS_A_CLASS = 5


@dataclass(frozen=True, eq=False)
class Target:
    """y of the rows with a target: floats, or labels as texts."""

    y: np.ndarray
    given: np.ndarray  # (n,) bool: rows of the table
    classes: bool
    style: Style
    interpretation: str  # how it was interpreted, if that is not obvious
    zero_one: bool = False  # numbers, but only 0 and 1


def read_target(table: Table, name: str, classes: bool | None) -> Target:
    """classes: whether classes were requested; None: decided by the column."""
    cells = table.cells_of(name)
    column = table.column_as(name, TEXT, Style()) if classes else table.column(name)
    given = ~column.missing
    if column.kind == DATE:
        raise TableError(
            f"The target {name!r} holds dates, which cannot be predicted. Give a column of "
            "numbers, or of classes."
        )
    if column.kind == NUMBER:
        values = column.values[given].astype(float)
        return Target(
            values,
            given,
            False,
            column.style,
            column.style.words(cells),
            set(values.tolist()) == {0.0, 1.0},
        )
    if classes is False:
        raise TableError(
            f"The target {name!r} holds {'true or false' if column.kind == BOOLEAN else 'texts'} "
            f"(row {given.argmax() + 1} is {text_of(cells[int(given.argmax())])[:30]!r}), but this "
            "likelihood needs numbers. Use --likelihood classes."
        )
    labels = [text_of(cell) for cell, there in zip(cells, given, strict=True) if there]
    _check_labels(name, labels, bool(classes))
    return Target(np.array(labels, dtype=str), given, True, Style(), f"{len(set(labels))} classes")


def later_numbers(table: Table, name: str, style: Style) -> tuple[np.ndarray, np.ndarray]:
    """The target of a later table, read as at training: y of the rows that have one, and a mask
    of these rows (n,) bool.
    """
    column = table.column_as(name, NUMBER, style)
    return column.values[~column.missing].astype(float), ~column.missing


def later_labels(table: Table, name: str, classes: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The same for classes. A label is the class of the same text; else, if all classes are numbers
    or all are true or false, the one of the same value.
    """
    cells = table.cells_of(name)
    given = np.array([not is_missing(cell) for cell in cells], dtype=bool)
    same = {text: text for text in classes}
    values = {_value(text): text for text in classes}
    by_value = (
        values
        if len(values) == len(classes) and all(not isinstance(value, str) for value in values)
        else {}
    )

    texts = [text_of(cell) for cell in cells if not is_missing(cell)]
    labels = [same.get(text) or by_value.get(_value(text)) or text for text in texts]
    return np.array(labels, dtype=str), given


def _check_labels(name: str, labels: list[str], asked: bool) -> None:
    distinct = list(dict.fromkeys(labels))
    if len(distinct) == 1:
        raise TableError(
            f"The target {name!r} has one class only ({distinct[0]}), so there is nothing to "
            "predict."
        )
    some = ", ".join(repr(label[:30]) for label in distinct[:3])
    if len(distinct) > max(FEW_CLASSES, len(labels) / ROWS_A_CLASS):
        raise TableError(
            f"The target {name!r} has {len(distinct):,} different values ({some}, …) in "
            f"{len(labels):,} rows, too many for classes. If they are numbers, write them as "
            "numbers (see --decimal and --thousands); if they are classes, group the rare ones."
        )
    if len(distinct) > MOST_CLASSES and not asked:
        raise TableError(
            f"The target {name!r} has {len(distinct):,} different texts ({some}, …). If they are "
            "numbers, write them as numbers (see --decimal and --thousands); if they are classes, "
            "group the rare ones, or give --likelihood classes."
        )
    written: dict[Any, str] = {}
    if all(not isinstance(_value(label), str) for label in distinct):
        for label in distinct:
            other = written.setdefault(_value(label), label)
            if other != label:
                raise TableError(
                    f"The target {name!r} writes one class in two ways: {other!r} and {label!r}. "
                    "Write each class in one way."
                )


def _value(text: str) -> Decimal | tuple[str, float] | str:
    """A number or a boolean; the text itself if it is neither.

    Exact: 1 and 1.0 are the same, long integers are not rounded.
    """
    flag = truth(text)
    if flag is not None:
        return BOOLEAN, flag  # not equal to a number
    try:
        return Decimal(text) if "_" not in text else text
    except InvalidOperation:
        return text
