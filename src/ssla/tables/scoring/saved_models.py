"""Saved models that give columns.

These are estimators (of Python or of `ssla train`), posteriors, and trees with a last layer. All do
the same with a batch: rows -> numbers -> predictive -> columns. Rows are predicted in blocks of
fixed size from the first row on. So memory does not grow with the rows, and a file that is read in
parts of whole blocks gives the same bits as the table at once.
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
from ssla.tables.estimators.inputs import list_column_names
from ssla.tables.estimators.loading import load_trained
from ssla.tables.estimators.training_table import TrainingTable
from ssla.tables.scoring.answer_columns import Columns, make_predictive_columns
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
        """The names of the inputs in their order; None if the file has none."""

    @property
    def width(self) -> int | None:
        """The number of the inputs; None if they may have any shape."""

    @property
    def numbers_only(self) -> bool:
        """Whether cells that are not numbers are refused."""

    def predict_columns(
        self, batch: Batch, inputs: tuple[str, ...] | None, levels: Sequence[float]
    ) -> Columns:
        """Return the output columns (N,) of a batch of N rows, by their names.

        inputs: the names of its columns in the order of the model's inputs; None: they have the
        names of these.  levels: probabilities of the intervals or sets. Raises ValueError or
        TypeError if the batch does not match the model.
        """


@dataclass
class Counts:
    """What was unusual in the rows of one or several tables."""

    rows: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    rows_noted: int = 0  # with a missing or unknown input
    rows_mixed: int = 0  # of these: predicted by a mixture over training values
    rows_flagged: int = 0  # where the quadrature or an ascent did not reach its tolerance

    def add_counts(self, counts: Counts) -> None:
        """Add the counts of other rows to these, in place.

        A prediction in parts adds up the counts of the parts in this way.
        """
        # Every field is a number or a Counter, and both can be added.
        for name, value in vars(counts).items():
            setattr(self, name, getattr(self, name) + value)


def count_unusual_rows(encoded: Encoded) -> Counts:
    """Return the counts of what is unusual in the inputs of encoded rows.

    No row is flagged yet, because that follows from its prediction.
    """
    return Counts(
        len(encoded),
        Counter(encoded.missing),
        Counter(encoded.unknown),
        rows_noted=encoded.noted_row_count,
        rows_mixed=int(encoded.mixed_rows.sum()),
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
        """The names of the columns that are read, in the order of the plan."""
        return tuple(feature.name for feature in self.plan.features)

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the inputs; None for an estimator that was fitted to an array."""
        return self.inputs if hasattr(self.estimator, "feature_names_in_") else None

    @property
    def width(self) -> int:
        """The number of inputs."""
        return int(self.estimator.n_features_in_)

    def with_refit(self, refit: Any) -> TableModel:
        """Return the model with another refit, given by its name or as an object."""
        return replace(self, estimator=replace_refit(self.estimator, refit))

    def predict_columns(
        self, batch: Batch, inputs: tuple[str, ...] | None, levels: Sequence[float]
    ) -> Columns:
        """Return the output columns of a batch; arguments and errors as in `SavedModel`."""
        columns, _ = self.predict_table(self._read_table(batch, inputs), levels)
        return columns

    def predict_table(self, table: Table, levels: Sequence[float]) -> tuple[Columns, Counts]:
        """Return the output columns (n,) of a table of n rows, and the counts of unusual rows.

        levels: probabilities of the intervals or sets. Raises TableError for a missing column, or a
        cell of another kind than at training.
        """
        encoded = self.plan.encode(table)
        counts = count_unusual_rows(encoded)

        def predict_block(rows: slice) -> Columns:
            """Return the columns of some rows, and add those with a flag to `counts`."""
            block = encoded[rows]
            predictive: Any = self.estimator.predict_dist(block)
            counts.rows_flagged += count_flagged(predictive)
            return _make_estimator_columns(self.estimator, predictive, levels) | {
                "notes": block.notes
            }

        return predict_in_blocks(predict_block, len(encoded)), counts

    def _read_table(self, batch: Batch, inputs: tuple[str, ...] | None) -> Table:
        """Return the inputs of a batch as a table with the names of the plan.

        A model of `ssla train` reads cells, as those of a file. An estimator reads the types of a
        frame, as at its fit, or an array by the order of columns.

        inputs: as in `SavedModel`; not used by a model of `ssla train`. Raises TypeError for an
        array where columns are read by name, and ValueError for columns that are missing or have no
        names.
        """
        if self.training is not None:
            if batch.form == ARRAY:
                ending = ", …" if len(self.inputs) > SHOWN_NAMES else ""
                raise TypeError(
                    f"{self.source} reads columns by name "
                    f"({', '.join(self.inputs[:SHOWN_NAMES])}{ending}), but the batch is an array. "
                    "Give a data frame, or a mapping of names to arrays."
                )
            return batch.to_table(self.inputs)

        if batch.form == ARRAY or inputs is not None:
            return batch.to_renamed_table(inputs or (), list_column_names(self.estimator))
        if self.names is None:
            raise make_no_names_error(self.source, batch)
        return batch.to_renamed_table(self.names, self.names)


@dataclass(frozen=True, eq=False)
class MatrixModel:
    """A posterior, which reads an array (N, …) of any shape.

    predict: a function of an array that returns its predictive. refit: the refit of `predict`, by
    its name or as an object, for the column of refits.
    """

    predict: Callable[[np.ndarray], Any]
    refit: Any
    source: Path
    names: tuple[str, ...] | None = None
    width: int | None = None
    numbers_only: bool = True

    def predict_columns(
        self, batch: Batch, inputs: tuple[str, ...] | None, levels: Sequence[float]
    ) -> Columns:
        """Return the output columns of a batch; arguments and errors as in `SavedModel`.

        Raises ValueError also for missing or infinite values.
        """
        x = _read_array(batch, inputs, self.source)
        check_finite(
            "the inputs",
            torch.from_numpy(x),
            "Fill or leave out such rows first; estimators and models of `ssla train` accept gaps.",
        )

        def predict_block(rows: slice) -> Columns:
            """Return the columns of some rows."""
            predictive = self.predict(x[rows])
            return make_predictive_columns(predictive, levels) | _make_refit_column(
                predictive, self.refit
            )

        return predict_in_blocks(predict_block, len(x))


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
        """The names of the inputs; None for an estimator that was fitted to an array."""
        names = getattr(self.estimator, "feature_names_in_", None)
        return None if names is None else tuple(names.tolist())

    @property
    def width(self) -> int:
        """The number of inputs."""
        return int(self.estimator.n_features_in_)

    def predict_columns(
        self, batch: Batch, inputs: tuple[str, ...] | None, levels: Sequence[float]
    ) -> Columns:
        """Return the output columns of a batch; arguments and errors as in `SavedModel`.

        inputs: used only if the model has no names.
        """
        if self.names is None:
            x = _read_array(batch, inputs, self.source)
        else:
            x = batch.to_frame(self.names)

        def predict_block(rows: slice) -> Columns:
            """Return the columns of some rows."""
            # Models of other libraries refuse a table without rows.
            if not len(x):
                predictive = self._predict_no_rows()
            else:
                chosen = x.iloc[rows] if hasattr(x, "iloc") else x[rows]
                predictive = self.estimator.predict_dist(chosen)
            return _make_estimator_columns(self.estimator, predictive, levels)

        return predict_in_blocks(predict_block, len(x))

    def _predict_no_rows(self) -> Predictive:
        """Return the predictive of no rows, from empty outputs of the models."""
        classes = getattr(self.estimator, "classes_", None)
        # The models give mean and log squared error (N,) of numbers, or probabilities (N, C).
        shapes = [(0,), (0,)] if classes is None else [(0, len(classes))]
        predictive: Predictive = self.estimator.ensemble_.predict(
            *(torch.empty(shape, dtype=torch.float64) for shape in shapes), self.estimator.refit
        )
        return predictive


def _read_array(batch: Batch, inputs: tuple[str, ...] | None, source: Path) -> np.ndarray:
    """Return the batch as an array (N, …): its own array, or the columns that `inputs` names.

    source: the file of the model, for messages. Raises ValueError if the batch has columns but
    inputs is None, or if it does not hold numbers.
    """
    if batch.form == ARRAY:
        return batch.to_array()
    if inputs is None:
        raise make_no_names_error(source, batch)
    return batch.to_matrix(inputs)


def make_no_names_error(source: Path, batch: Batch) -> ValueError:
    """Return the error for a batch with columns where the model's inputs have no names.

    source: the file of the model.
    """
    return ValueError(
        f"{source} has no names of inputs, but the batch has columns. Name the inputs in "
        f"their order: Scorer(path, inputs=[{', '.join(map(repr, batch.names[:3]))}, …])."
    )


def _make_estimator_columns(estimator: Any, predictive: Any, levels: Sequence[float]) -> Columns:
    """Return the output columns (N,) of an estimator's predictive.

    The labels of classes and the intervals are those of the estimator, if it has its own.

    levels: probabilities of the intervals or sets.
    """
    classes = getattr(estimator, "classes_", None)
    interval = getattr(estimator, "interval_of", None)
    columns = make_predictive_columns(predictive, levels, classes, interval)
    return columns | _make_refit_column(predictive, estimator.refit)


def predict_in_blocks(predict_block: Callable[[slice], Columns], rows: int) -> Columns:
    """Return the columns (rows,) of all rows, which `predict_block` predicts BLOCK rows at a time.

    Without rows, `predict_block` is called with an empty slice, and the columns have no entries.
    """
    starts = range(0, max(rows, 1), BLOCK)
    blocks = [predict_block(slice(start, start + BLOCK)) for start in starts]
    if len(blocks) == 1:
        return blocks[0]
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _make_refit_column(predictive: Any, refit: Any) -> Columns:
    """Return the column "rung" (N,) with the name of the refit that was used for each row.

    refit: the refit that was requested, by its name or as an object. It was used for all rows
    unless the diagnostics have a refit for each row.
    """
    rungs = predictive.diagnostics.rung
    if rungs is not None:
        return {"rung": np.array(rungs, dtype=object)}
    name = refit if isinstance(refit, str) else refit.name
    return {"rung": np.full(len(predictive.diagnostics.fallback), name, dtype=object)}


def count_flagged(predictive: Any) -> int:
    """Return the number of rows where the quadrature or an ascent did not reach its tolerance."""
    return int((predictive.diagnostics.inaccurate | predictive.diagnostics.unconverged).sum())


def replace_refit(estimator: Any, refit: Any) -> Any:
    """Return a shallow copy of a fitted estimator with another refit; it is not fitted again."""
    copied = copy.copy(estimator)
    copied.refit = refit
    return copied


def open_trained(path: Path) -> tuple[TableModel, TrainingTable]:
    """Open a model of `ssla train`, and return it with the facts that the command stored.

    Raises FileError for a model that was saved from Python, or a file that is not a model.
    """
    estimator, training = load_trained(path)
    if training is None:
        raise FileError(
            f"{path} was saved from Python without the name of its target. Only models of "
            "`ssla train` read tables."
        )
    return TableModel(estimator, training, path), training
