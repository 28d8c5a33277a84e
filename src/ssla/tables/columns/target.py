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
    PLAIN,
    TEXT,
    Style,
    TableError,
    is_missing,
    parse_truth,
    text_of_cell,
)
from ssla.tables.columns.reading import Table

# These limits are guesses: no benchmark compares them with others.
MOST_CLASSES = 100  # unless classes were requested
FEW_CLASSES = 10  # always allowed; more classes need ROWS_A_CLASS rows each on average
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
    """Return the target column of a training table.

    classes: whether classes were requested; None: decided by the column. Raises TableError for
    dates, for texts where numbers were requested, and for labels that cannot be classes.
    """
    cells = table.cells_of(name)
    column = table.column_of_kind(name, TEXT, PLAIN) if classes else table.column(name)
    given = ~column.missing
    if column.kind == DATE:
        raise TableError(
            f"The target {name!r} holds dates, which cannot be predicted. Give a column of "
            "numbers, or of classes."
        )
    if column.kind == NUMBER:
        y = column.values[given].astype(float)
        return Target(
            y,
            given,
            classes=False,
            style=column.style,
            interpretation=column.style.describe(cells),
            zero_one=set(y.tolist()) == {0.0, 1.0},
        )
    if classes is False:
        row = int(given.argmax())
        raise TableError(
            f"The target {name!r} holds {'true or false' if column.kind == BOOLEAN else 'texts'} "
            f"(row {row + 1} is {text_of_cell(cells[row])[:30]!r}), but this likelihood needs "
            "numbers. Use --likelihood classes."
        )
    labels = [text_of_cell(cell) for cell, known in zip(cells, given, strict=True) if known]
    _check_classes(name, labels, bool(classes))
    return Target(
        np.array(labels, dtype=str),
        given,
        classes=True,
        style=PLAIN,
        interpretation=f"{len(set(labels))} classes",
    )


def read_later_numbers(table: Table, name: str, style: Style) -> tuple[np.ndarray, np.ndarray]:
    """Return the target of a later table, read as at training: y (k,) of the rows that have one,
    and a mask of these rows (n,) bool.

    Raises TableError for a missing column, or a cell that is not a number.
    """
    column = table.column_of_kind(name, NUMBER, style)
    return column.values[~column.missing].astype(float), ~column.missing


def read_later_labels(
    table: Table, name: str, classes: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels of a later table: texts (k,) of the rows that have one, and a mask of these
    rows (n,) bool.

    A label is the class of the same text; otherwise, if all classes are numbers or all are true or
    false, the class of the same value. Raises TableError for a missing column.
    """
    cells = table.cells_of(name)
    given = np.array([not is_missing(cell) for cell in cells], dtype=bool)
    known = set(classes)
    class_of_value = {_value_of_text(text): text for text in classes}
    if len(class_of_value) < len(classes) or any(isinstance(v, str) for v in class_of_value):
        class_of_value = {}
    texts = [text_of_cell(cell) for cell in cells if not is_missing(cell)]
    labels = [
        text if text in known else class_of_value.get(_value_of_text(text)) or text
        for text in texts
    ]
    return np.array(labels, dtype=str), given


def _check_classes(name: str, labels: list[str], requested: bool) -> None:
    """Raise TableError for labels that cannot be classes: a single one, too many, or one class that
    is written in two ways. requested: whether the user asked for classes.
    """
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
    if len(distinct) > MOST_CLASSES and not requested:
        raise TableError(
            f"The target {name!r} has {len(distinct):,} different texts ({some}, …). If they are "
            "numbers, write them as numbers (see --decimal and --thousands); if they are classes, "
            "group the rare ones, or give --likelihood classes."
        )
    values = [_value_of_text(label) for label in distinct]
    if any(isinstance(value, str) for value in values):
        return  # texts that look like numbers may be different classes, as 1 and 1.0
    label_of_value: dict[Any, str] = {}
    for value, label in zip(values, distinct, strict=True):
        first = label_of_value.setdefault(value, label)
        if first != label:
            raise TableError(
                f"The target {name!r} writes one class in two ways: {first!r} and {label!r}. "
                "Write each class in one way."
            )


def _value_of_text(text: str) -> Decimal | tuple[str, float] | str:
    """Return the number or the boolean that a text means; the text itself if it is neither.

    The value is exact: 1 and 1.0 are the same, and long integers are not rounded.
    """
    truth = parse_truth(text)
    if truth is not None:
        return BOOLEAN, truth  # not equal to a number
    try:
        return Decimal(text) if "_" not in text else text
    except InvalidOperation:
        return text
