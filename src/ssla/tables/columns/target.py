"""The target: a column of numbers, or class labels.

Labels are returned exactly as they were written.
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
    SHOWN_LENGTH,
    TEXT,
    Style,
    TableError,
    convert_to_text,
    is_missing,
    parse_boolean_word,
)
from ssla.tables.columns.reading import Table

# These limits are guesses: no benchmark compares them with others.
MOST_CLASSES = 100  # unless classes were requested
FEW_CLASSES = 10  # always allowed; more classes need ROWS_A_CLASS rows each on average
ROWS_A_CLASS = 5


@dataclass(frozen=True, eq=False)
class Target:
    """The target of the k rows that have one, among the n rows of a table."""

    y: np.ndarray  # (k,): floats, or labels as texts
    given: np.ndarray  # (n,) bool: which rows have a target
    classes: bool  # whether y are labels
    style: Style  # the format of numbers in the table; PLAIN for labels
    interpretation: str  # how the column was read, if that is not obvious
    zero_one: bool = False  # whether y are numbers, but only 0 and 1


def read_target(table: Table, name: str, classes: bool | None) -> Target:
    """Return the target column of a training table.

    Raises TableError for a missing column, for dates, for texts where numbers were requested, and
    for labels that cannot be classes.

    name: the column.  classes: whether classes were requested (True) or numbers (False); None: the
    kind of the column decides.
    """
    cells = table.get_cells(name)
    column = (
        table.read_column_as_kind(name, TEXT, PLAIN) if classes else table.interpret_column(name)
    )
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
        example = convert_to_text(cells[row])[:SHOWN_LENGTH]
        raise TableError(
            f"The target {name!r} holds {'true or false' if column.kind == BOOLEAN else 'texts'} "
            f"(row {row + 1} is {example!r}), but this likelihood needs "
            "numbers. Use --likelihood classes."
        )

    labels = [convert_to_text(cell) for cell, keep in zip(cells, given, strict=True) if keep]
    _check_classes(name, labels, requested=bool(classes))
    return Target(
        np.array(labels, dtype=str),
        given,
        classes=True,
        style=PLAIN,
        interpretation=f"{len(set(labels))} classes",
    )


def read_later_numbers(table: Table, name: str, style: Style) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers in the target column of a table that is not the training table.

    The results are y (k,) of the k rows that have a target, and which rows these are (n,) bool.
    Raises TableError for a missing column, or a cell that is not a number.

    name: the column.  style: the format of its numbers at training.
    """
    column = table.read_column_as_kind(name, NUMBER, style)
    return column.values[~column.missing].astype(float), ~column.missing


def read_later_labels(
    table: Table, name: str, classes: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels in the target column of a table that is not the training table.

    The results are texts (k,) of the k rows that have a label, and which rows these are (n,) bool.
    A text that is one of `classes` is that class. Otherwise, if all classes are numbers or
    booleans, the class of the same value is taken. A text that is not a class is returned
    unchanged. Raises TableError for a missing column.

    name: the column.  classes: the labels of the training table, each once.
    """
    cells = table.get_cells(name)
    given = np.array([not is_missing(cell) for cell in cells], dtype=bool)
    class_texts = set(classes)
    class_of_value = {_parse_label(text): text for text in classes}

    # Values are compared only if each class has a value of its own, which is not just a text.
    if len(class_of_value) < len(classes) or any(isinstance(v, str) for v in class_of_value):
        class_of_value = {}

    texts = [convert_to_text(cell) for cell in cells if not is_missing(cell)]
    labels = [
        text if text in class_texts else class_of_value.get(_parse_label(text), text)
        for text in texts
    ]
    return np.array(labels, dtype=str), given


def _check_classes(name: str, labels: list[str], requested: bool) -> None:
    """Raise TableError for labels (k) that cannot be classes.

    This is so if all are the same, too many are different, or one class is written in two ways.

    name: the target column.  requested: whether the user asked for classes.
    """
    distinct = list(dict.fromkeys(labels))
    if len(distinct) == 1:
        raise TableError(
            f"The target {name!r} has one class only ({distinct[0]}), so there is nothing to "
            "predict."
        )

    examples = ", ".join(repr(label[:SHOWN_LENGTH]) for label in distinct[:3])
    if len(distinct) > max(FEW_CLASSES, len(labels) / ROWS_A_CLASS):
        raise TableError(
            f"The target {name!r} has {len(distinct):,} different values ({examples}, …) in "
            f"{len(labels):,} rows, too many for classes. If they are numbers, write them as "
            "numbers (see --decimal and --thousands); if they are classes, group the rare ones."
        )

    if len(distinct) > MOST_CLASSES and not requested:
        raise TableError(
            f"The target {name!r} has {len(distinct):,} different texts ({examples}, …). If they "
            "are numbers, write them as numbers (see --decimal and --thousands); if they are "
            "classes, group the rare ones, or give --likelihood classes."
        )

    values = [_parse_label(label) for label in distinct]
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


def _parse_label(text: str) -> Decimal | tuple[str, float] | str:
    """Return the value of a text, to compare it with others.

    The value is a Decimal for a number, a pair for a boolean, and the text itself if it is neither.
    Numbers are exact: 1 and 1.0 are equal, and long integers are not rounded.
    """
    truth = parse_boolean_word(text)
    if truth is not None:
        return BOOLEAN, truth  # as a pair, true is not equal to the number 1

    # `Decimal` would read 1_000 as a thousand.
    if "_" in text:
        return text
    try:
        return Decimal(text)
    except InvalidOperation:
        return text
