"""Saved models that give columns: estimators (of Python or of `ssla train`), posteriors, and trees
with a last layer.

The way of a batch is the same for all: rows -> numbers -> predictive -> columns. Rows are predicted
in blocks of fixed size from the first row on. So memory does not grow with the rows, and a file
that is read in parts of whole blocks gives the same bits as the table at once.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ssla._checks import finite
from ssla.files import FileError
from ssla.predictive import Predictive
from ssla.tables.columns import Encoded, Plan, Table
from ssla.tables.estimators.inputs import column_names
from ssla.tables.estimators.loading import load_trained
from ssla.tables.estimators.training_table import TrainingTable
from ssla.tables.scoring.answer_columns import Columns, columns_of
from ssla.tables.scoring.batches import ARRAY, Batch

BLOCK = 1 << 14  # rows
SHOWN_NAMES = 12  # of inputs, in an error


class SavedModel(Protocol):
    """What a scorer and MLflow ask.

    names: of the inputs, None if the file has none.  width: their number, None if they may have
    any shape.  numbers_only: whether cells that are not numbers are refused.
    """

    @property
    def names(self) -> tuple[str, ...] | None: ...
    @property
    def width(self) -> int | None: ...
    @property
    def numbers_only(self) -> bool: ...
    def answer(
        self, rows: Batch, inputs: tuple[str, ...] | None, levels: Sequence[float]
    ) -> Columns:
        """The columns of a batch. inputs: names of its columns in the order of the model's."""


@dataclass
class Counts:
    """What was unusual in the rows of one or several tables."""

    rows: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    marked: int = 0  # rows with a missing or unknown input
    mixed: int = 0  # of these: mixed over training values
    flagged: int = 0  # the quadrature or an ascent did not reach its tolerance

    def add(self, other: Counts) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def counts_of(encoded: Encoded) -> Counts:
    """What was unusual in encoded rows."""
    return Counts(
        len(encoded),
        Counter(encoded.missing),
        Counter(encoded.unknown),
        encoded.marked,
        int(encoded.mixed.sum()),
    )


@dataclass(frozen=True, eq=False)
class TableModel:
    """An estimator with networks of its own: it reads columns by their names.

    training: what `ssla train` stored beside it; None if it was saved from Python.
    """

    estimator: Any
    training: TrainingTable | None
    source: Path
    numbers_only: bool = False

    @property
    def plan(self) -> Plan:
        plan: Plan = self.estimator.plan_
        return plan

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns that are read."""
        return tuple(feature.name for feature in self.plan.features)

    @property
    def names(self) -> tuple[str, ...] | None:
        """As in `SavedModel`: an estimator that was fitted to an array has none."""
        return self.inputs if hasattr(self.estimator, "feature_names_in_") else None

    @property
    def width(self) -> int:
        return int(self.estimator.n_features_in_)

    def with_refit(self, refit: Any) -> TableModel:
        return replace(self, estimator=replace_refit(self.estimator, refit))

    def answer(
        self, rows: Batch, inputs: tuple[str, ...] | None, levels: Sequence[float]
    ) -> Columns:
        return self.score(self._table(rows, inputs), levels)[0]

    def score(self, table: Table, levels: Sequence[float]) -> tuple[Columns, Counts]:
        """The columns of a table, and what was unusual in it."""
        encoded = self.plan.encode(table)
        counts = counts_of(encoded)

        def block(rows: slice) -> Columns:
            part = encoded[rows]
            predictive: Any = self.estimator.predict_dist(part)
            counts.flagged += flagged(predictive)
            return _answered(self.estimator, predictive, levels) | {"notes": part.notes}

        return in_blocks(block, len(encoded)), counts

    def _table(self, rows: Batch, inputs: tuple[str, ...] | None) -> Table:
        """The columns of the plan. A model of `ssla train` reads cells, as those of a file; an
        estimator reads the types of a frame, as at its fit, or an array by the order of columns.
        """
        if self.training is not None:
            if rows.kind == ARRAY:
                more = ", …" * (len(self.inputs) > SHOWN_NAMES)
                raise TypeError(
                    f"{self.source} reads columns by name "
                    f"({', '.join(self.inputs[:SHOWN_NAMES])}{more}), but the batch is an array. "
                    "Give a data frame, or a mapping of names to arrays."
                )
            return rows.table(self.inputs)
        if rows.kind == ARRAY or inputs is not None:
            return rows.selected(inputs or (), column_names(self.estimator))
        if self.names is None:
            raise nameless(self.source, rows)
        return rows.selected(self.names, self.names)


@dataclass(frozen=True, eq=False)
class MatrixModel:
    """A posterior: it reads an array, the rows first, of any shape.

    predict: array -> predictive.
    """

    predict: Callable[[np.ndarray], Any]
    refit: Any
    source: Path
    names: tuple[str, ...] | None = None
    width: int | None = None
    numbers_only: bool = True

    def answer(
        self, rows: Batch, inputs: tuple[str, ...] | None, levels: Sequence[float]
    ) -> Columns:
        x = _matrix(rows, inputs, self.source)
        finite(
            "the inputs",
            torch.from_numpy(x),
            "Fill or leave out such rows first; estimators and models of `ssla train` accept gaps.",
        )

        def block(part: slice) -> Columns:
            predictive = self.predict(x[part])
            return columns_of(predictive, levels) | _rung(predictive, self.refit)

        return in_blocks(block, len(x))


@dataclass(frozen=True, eq=False)
class WrappedModel:
    """A `PredictiveRegressor` or `PredictiveClassifier`: its models read a data frame as it is,
    or an array.
    """

    estimator: Any
    source: Path
    numbers_only: bool = True

    @property
    def names(self) -> tuple[str, ...] | None:
        """As in `SavedModel`."""
        names = getattr(self.estimator, "feature_names_in_", None)
        return None if names is None else tuple(names.tolist())

    @property
    def width(self) -> int:
        return int(self.estimator.n_features_in_)

    def answer(
        self, rows: Batch, inputs: tuple[str, ...] | None, levels: Sequence[float]
    ) -> Columns:
        named = self.names is not None
        x = rows.frame(self.names or ()) if named else _matrix(rows, inputs, self.source)

        def block(part: slice) -> Columns:
            predictive = (
                self.estimator.predict_dist(x.iloc[part] if hasattr(x, "iloc") else x[part])
                if len(x)
                else self._of_no_rows()
            )
            return _answered(self.estimator, predictive, levels)

        return in_blocks(block, len(x))

    def _of_no_rows(self) -> Predictive:
        classes = getattr(self.estimator, "classes_", None)
        shapes = [(0,), (0,)] if classes is None else [(0, len(classes))]
        predictive: Predictive = self.estimator.ensemble_.predict(
            *(torch.empty(shape, dtype=torch.float64) for shape in shapes), self.estimator.refit
        )
        return predictive


def _matrix(rows: Batch, inputs: tuple[str, ...] | None, source: Path) -> np.ndarray:
    """The batch as an array: itself, or the named columns."""
    if rows.kind == ARRAY:
        return rows.array()
    if inputs is None:
        raise nameless(source, rows)
    return rows.matrix(inputs)


def nameless(source: Path, rows: Batch) -> ValueError:
    """The error of columns for a model whose inputs have no names."""
    return ValueError(
        f"{source} has no names of inputs, but the batch has columns. Name the inputs in "
        f"their order: Scorer(path, inputs=[{', '.join(map(repr, rows.names[:3]))}, …])."
    )


def _answered(estimator: Any, predictive: Any, levels: Sequence[float]) -> Columns:
    """The columns of an estimator's predictive."""
    classes = getattr(estimator, "classes_", None)
    interval = getattr(estimator, "interval_of", None)
    return columns_of(predictive, levels, classes, interval) | _rung(predictive, estimator.refit)


def in_blocks(block: Callable[[slice], Columns], rows: int) -> Columns:
    """The columns of all rows. No rows: columns without entries."""
    parts = [block(slice(start, start + BLOCK)) for start in range(0, max(rows, 1), BLOCK)]
    return (
        parts[0]
        if len(parts) == 1
        else {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    )


def _rung(p: Any, refit: Any) -> Columns:
    """The refit that answered, for each row."""
    rows, found = len(p.diagnostics.fallback), p.diagnostics.rung
    name = refit if isinstance(refit, str) else refit.name
    return {
        "rung": np.full(rows, name, dtype=object)
        if found is None
        else np.array(found, dtype=object)
    }


def flagged(p: Any) -> int:
    """How many rows did not reach a tolerance."""
    return int((p.diagnostics.inaccurate | p.diagnostics.unconverged).sum())


def replace_refit(estimator: Any, refit: Any) -> Any:
    """The same fitted estimator with another refit."""
    other = copy.copy(estimator)
    other.refit = refit
    return other


def open_trained(path: Path) -> tuple[TableModel, TrainingTable]:
    """A model of `ssla train`; FileError for another."""
    estimator, training = load_trained(path)
    if training is None:
        raise FileError(
            f"{path} was saved from Python without the name of its target. Only models of "
            "`ssla train` read tables."
        )
    return TableModel(estimator, training, path), training
