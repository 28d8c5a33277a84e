"""Saved models that give columns: estimators (of Python or of `ssla train`), posteriors, and trees
with a last layer.

All do the same with a batch: rows -> numbers -> predictive -> columns. Rows are predicted
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

from ssla._checks import check_finite
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
    """What a scorer and MLflow need of a model.

    names: of the inputs, None if the file has none.  width: their number, None if they may have
    any shape.  numbers_only: whether cells that are not numbers are refused.
    """

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the inputs."""

    @property
    def width(self) -> int | None:
        """The number of the inputs."""

    @property
    def numbers_only(self) -> bool:
        """Return whether cells that are not numbers are refused."""

    def answer(
        self, rows: Batch, inputs: tuple[str, ...] | None, levels: Sequence[float]
    ) -> Columns:
        """Return the output columns of a batch.

        inputs: the names of its columns in the order of the model's; None: those of the model.
        levels: of intervals or sets. Raises ValueError or TypeError if the batch does not match.
        """


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
        """Add the counts of other rows, in place."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def count_unusual(encoded: Encoded) -> Counts:
    """Return what was unusual in encoded rows, before their prediction."""
    return Counts(
        len(encoded),
        Counter(encoded.missing),
        Counter(encoded.unknown),
        encoded.marked,
        int(encoded.mixed_rows.sum()),
    )


@dataclass(frozen=True, eq=False)
class TableModel:
    """An estimator with networks of its own, which reads columns by their names.

    training: what `ssla train` stored beside it; None if it was saved from Python.
    """

    estimator: Any
    training: TrainingTable | None
    source: Path
    numbers_only: bool = False

    @property
    def plan(self) -> Plan:
        """The plan by which the estimator encodes a table."""
        plan: Plan = self.estimator.plan_
        return plan

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the columns that are read."""
        return tuple(feature.name for feature in self.plan.features)

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names as in `SavedModel`: an estimator that was fitted to an array has none."""
        return self.inputs if hasattr(self.estimator, "feature_names_in_") else None

    @property
    def width(self) -> int:
        """The number of inputs."""
        return int(self.estimator.n_features_in_)

    def with_refit(self, refit: Any) -> TableModel:
        """Return the model with another refit."""
        return replace(self, estimator=replace_refit(self.estimator, refit))

    def answer(
        self, rows: Batch, inputs: tuple[str, ...] | None, levels: Sequence[float]
    ) -> Columns:
        """Return the columns of a batch, as in `SavedModel`."""
        return self.score(self._read_table(rows, inputs), levels)[0]

    def score(self, table: Table, levels: Sequence[float]) -> tuple[Columns, Counts]:
        """Return the output columns of a table, and what was unusual in it."""
        encoded = self.plan.encode(table)
        counts = count_unusual(encoded)

        def score_block(rows: slice) -> Columns:
            """Return the columns of some rows, and count those with a flag."""
            block = encoded[rows]
            predictive: Any = self.estimator.predict_dist(block)
            counts.flagged += count_flagged(predictive)
            return _estimator_columns(self.estimator, predictive, levels) | {"notes": block.notes}

        return join_blocks(score_block, len(encoded)), counts

    def _read_table(self, rows: Batch, inputs: tuple[str, ...] | None) -> Table:
        """Return the columns of the plan as a table.

        A model of `ssla train` reads cells, as those of a file. An estimator reads the types of a
        frame, as at its fit, or an array by the order of columns. Raises TypeError for an array
        without names for the columns, and ValueError for columns that are missing or have no names.
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
            return rows.renamed_table(inputs or (), column_names(self.estimator))
        if self.names is None:
            raise no_names_error(self.source, rows)
        return rows.renamed_table(self.names, self.names)


@dataclass(frozen=True, eq=False)
class MatrixModel:
    """A posterior, which reads an array (N, …) of any shape.

    predict: array -> predictive.  refit: a name or an object, for the column of refits.
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
        """Return the columns of a batch, as in `SavedModel`; ValueError for missing values."""
        x = _read_array(rows, inputs, self.source)
        check_finite(
            "the inputs",
            torch.from_numpy(x),
            "Fill or leave out such rows first; estimators and models of `ssla train` accept gaps.",
        )

        def score_block(block: slice) -> Columns:
            """Return the columns of some rows."""
            predictive = self.predict(x[block])
            return columns_of(predictive, levels) | _refit_column(predictive, self.refit)

        return join_blocks(score_block, len(x))


@dataclass(frozen=True, eq=False)
class WrappedModel:
    """A `PredictiveRegressor` or `PredictiveClassifier`.

    Its models read a data frame as it is, or an array.
    """

    estimator: Any
    source: Path
    numbers_only: bool = True

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names as in `SavedModel`."""
        names = getattr(self.estimator, "feature_names_in_", None)
        return None if names is None else tuple(names.tolist())

    @property
    def width(self) -> int:
        """The number of inputs."""
        return int(self.estimator.n_features_in_)

    def answer(
        self, rows: Batch, inputs: tuple[str, ...] | None, levels: Sequence[float]
    ) -> Columns:
        """Return the columns of a batch, as in `SavedModel`."""
        if self.names is None:
            x = _read_array(rows, inputs, self.source)
        else:
            x = rows.frame(self.names)

        def score_block(block: slice) -> Columns:
            """Return the columns of some rows."""
            # Models of other libraries refuse a table without rows.
            if not len(x):
                predictive = self._predict_no_rows()
            else:
                chosen = x.iloc[block] if hasattr(x, "iloc") else x[block]
                predictive = self.estimator.predict_dist(chosen)
            return _estimator_columns(self.estimator, predictive, levels)

        return join_blocks(score_block, len(x))

    def _predict_no_rows(self) -> Predictive:
        """Return the predictive of no rows, from empty outputs of the models."""
        classes = getattr(self.estimator, "classes_", None)
        shapes = [(0,), (0,)] if classes is None else [(0, len(classes))]
        predictive: Predictive = self.estimator.ensemble_.predict(
            *(torch.empty(shape, dtype=torch.float64) for shape in shapes), self.estimator.refit
        )
        return predictive


def _read_array(rows: Batch, inputs: tuple[str, ...] | None, source: Path) -> np.ndarray:
    """Return the batch as an array (N, …): itself, or the named columns.

    Raises ValueError if it has columns but no names are given, or if they are no numbers.
    """
    if rows.kind == ARRAY:
        return rows.array()
    if inputs is None:
        raise no_names_error(source, rows)
    return rows.matrix(inputs)


def no_names_error(source: Path, rows: Batch) -> ValueError:
    """Return the error of a batch with columns for a model whose inputs have no names."""
    return ValueError(
        f"{source} has no names of inputs, but the batch has columns. Name the inputs in "
        f"their order: Scorer(path, inputs=[{', '.join(map(repr, rows.names[:3]))}, …])."
    )


def _estimator_columns(estimator: Any, predictive: Any, levels: Sequence[float]) -> Columns:
    """Return the columns of an estimator's predictive, with its own classes and intervals."""
    classes = getattr(estimator, "classes_", None)
    interval = getattr(estimator, "interval_of", None)
    columns = columns_of(predictive, levels, classes, interval)
    return columns | _refit_column(predictive, estimator.refit)


def join_blocks(score_block: Callable[[slice], Columns], rows: int) -> Columns:
    """Return the columns of all rows, scored in blocks. No rows: columns without entries."""
    blocks = [score_block(slice(start, start + BLOCK)) for start in range(0, max(rows, 1), BLOCK)]
    if len(blocks) == 1:
        return blocks[0]
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _refit_column(predictive: Any, refit: Any) -> Columns:
    """Return the name of the refit that answered each row (N,), as the column "rung".

    refit: the one that was asked for, which answered all rows unless the diagnostics have others.
    """
    rungs = predictive.diagnostics.rung
    if rungs is not None:
        return {"rung": np.array(rungs, dtype=object)}
    name = refit if isinstance(refit, str) else refit.name
    return {"rung": np.full(len(predictive.diagnostics.fallback), name, dtype=object)}


def count_flagged(predictive: Any) -> int:
    """Return how many rows did not reach a tolerance."""
    return int((predictive.diagnostics.inaccurate | predictive.diagnostics.unconverged).sum())


def replace_refit(estimator: Any, refit: Any) -> Any:
    """Return the same fitted estimator with another refit."""
    other = copy.copy(estimator)
    other.refit = refit
    return other


def open_trained(path: Path) -> tuple[TableModel, TrainingTable]:
    """Open a model of `ssla train`; return it with what the training command stored.

    Raises FileError for another model.
    """
    estimator, training = load_trained(path)
    if training is None:
        raise FileError(
            f"{path} was saved from Python without the name of its target. Only models of "
            "`ssla train` read tables."
        )
    return TableModel(estimator, training, path), training
