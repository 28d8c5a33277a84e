"""Saved models that give columns: tables of `ssla train`, estimators, posteriors, trees with a last
layer.

Rows are predicted in blocks of fixed size from the first row on. So memory does not grow with the
rows, and a file that is read in parts of whole blocks gives the same bits as the table at once.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ssla._checks import finite, warn
from ssla.files import FileError
from ssla.predictive import Predictive
from ssla.tables.columns import Encoded, Plan, Table
from ssla.tables.estimators.inputs import column_names
from ssla.tables.estimators.loading import load_with_extra
from ssla.tables.networks import LIKELIHOODS, predict_with_gaps
from ssla.tables.scoring.answer_columns import Columns, columns_of

BLOCK = 1 << 14  # rows


@dataclass
class Counts:
    """What was unusual in the rows of one or several tables."""

    rows: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    marked: int = 0  # rows with a missing or unknown input
    mixed: int = 0  # of these: mixed over training values
    unlearned: int = 0  # of these: should be mixed
    flagged: int = 0  # the quadrature or an ascent did not reach its tolerance

    def add(self, other: Counts) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def check(self) -> None:
        if self.unlearned > self.mixed:
            warn(
                f"{self.unlearned} rows have missing or unknown inputs, but the model is of an "
                "earlier version and has no training values to mix over: their intervals are too "
                "narrow. Train it again."
            )


def counts_of(encoded: Encoded) -> Counts:
    mixed, unlearned = int(encoded.mixed.sum()), int(encoded.unlearned.any(1).sum())
    return Counts(
        len(encoded),
        Counter(encoded.missing),
        Counter(encoded.unknown),
        encoded.marked,
        mixed,
        unlearned,
    )


@dataclass(frozen=True, eq=False)
class TableModel:
    """A model of `ssla train`, or an estimator: it reads columns by their names.

    columns_in: those of an estimator in their order, by which an array is read; none for a model of
    `ssla train`. named: whether the file has their names.
    """

    estimator: Any
    plan: Plan
    extra: dict[str, Any]
    columns_in: tuple[str, ...] = ()
    named: bool = True

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(feature.name for feature in self.plan.features)

    @property
    def names(self) -> tuple[str, ...] | None:
        """As in `MatrixModel`."""
        return self.inputs if self.named else None

    @property
    def width(self) -> int:
        return len(self.columns_in)

    def with_refit(self, refit: Any) -> TableModel:
        return replace(self, estimator=replace_refit(self.estimator, refit))

    def score(self, table: Table, levels: Sequence[float]) -> tuple[Columns, Counts]:
        encoded = self.plan.encode(table)
        counts = counts_of(encoded)

        def block(rows: slice) -> Columns:
            part = encoded[rows]
            p: Any = predictive_at(self.estimator, part)
            counts.flagged += flagged(p)
            return self.columns(p, levels) | _rung(p, self.estimator.refit) | {"notes": part.notes}

        return in_blocks(block, len(encoded)), counts

    def columns(self, p: Predictive, levels: Sequence[float]) -> Columns:
        return estimator_columns(self.estimator, p, levels)


@dataclass(frozen=True, eq=False)
class MatrixModel:
    """A posterior, or an estimator without a plan: it reads an array, the rows first.

    predict: array -> predictive.  columns: predictive, levels -> columns.  names: the names of the
    inputs, if the file has them. width: the number of inputs; None if they may have any shape.
    """

    predict: Callable[[np.ndarray], Any]
    columns: Callable[[Any, Sequence[float]], Columns]
    refit: Any
    names: tuple[str, ...] | None = None
    width: int | None = None

    def score(self, x: np.ndarray, levels: Sequence[float]) -> Columns:
        if self.width is not None and x.shape[1:] != (self.width,):
            raise ValueError(
                f"The model has {self.width} inputs, but the array has shape {x.shape}. Give "
                f"(rows, {self.width})."
            )
        finite(
            "the inputs",
            torch.from_numpy(x),
            "Fill or leave out such rows first; estimators and models of `ssla train` accept gaps.",
        )

        def block(rows: slice) -> Columns:
            p = self.predict(x[rows])
            return self.columns(p, levels) | _rung(p, self.refit)

        return in_blocks(block, len(x))


@dataclass(frozen=True, eq=False)
class WrappedModel:
    """A `PredictiveRegressor` or `PredictiveClassifier`: its models read a data frame as it is,
    or an array.
    """

    estimator: Any

    @property
    def names(self) -> tuple[str, ...] | None:
        """As in `MatrixModel`."""
        names = getattr(self.estimator, "feature_names_in_", None)
        return None if names is None else tuple(names.tolist())

    @property
    def width(self) -> int:
        return int(self.estimator.n_features_in_)

    def score(self, x: Any, levels: Sequence[float]) -> Columns:
        """x: the rows (N, d)."""

        def block(rows: slice) -> Columns:
            p = (
                self.estimator.predict_dist(x.iloc[rows] if hasattr(x, "iloc") else x[rows])
                if len(x)
                else self._of_no_rows()
            )
            return estimator_columns(self.estimator, p, levels) | _rung(p, self.estimator.refit)

        return in_blocks(block, len(x))

    def _of_no_rows(self) -> Predictive:
        classes = getattr(self.estimator, "classes_", None)
        shapes = [(0,), (0,)] if classes is None else [(0, len(classes))]
        predictive: Predictive = self.estimator.ensemble_.predict(
            *(torch.empty(shape, dtype=torch.float64) for shape in shapes), self.estimator.refit
        )
        return predictive


def estimator_model(estimator: Any) -> TableModel | MatrixModel:
    """An estimator that was saved from Python.

    One of an earlier version has no plan and reads numbers only.
    """
    names, plan = getattr(estimator, "feature_names_in_", None), getattr(estimator, "plan_", None)
    if plan is not None:
        return TableModel(
            encoded_estimator(estimator),
            plan,
            {},
            tuple(column_names(estimator)),
            names is not None,
        )
    return MatrixModel(
        lambda x: estimator.ensemble_.predict(
            torch.from_numpy(x.astype(np.float64)), estimator.refit
        ),
        lambda p, levels: estimator_columns(estimator, p, levels),
        estimator.refit,
        None if names is None else tuple(names.tolist()),
        estimator.n_features_in_,
    )


def encoded_estimator(estimator: Any) -> Any:
    """The same fitted estimator without its plan: it reads encoded rows, like that of a model
    of `ssla train`.
    """
    other = copy.copy(estimator)
    other.n_features_in_, other.plan_ = estimator.plan_.width, None
    vars(other).pop("feature_names_in_", None)
    return other


def estimator_columns(estimator: Any, p: Predictive, levels: Sequence[float]) -> Columns:
    return columns_of(
        p, levels, getattr(estimator, "classes_", None), getattr(estimator, "interval_of", None)
    )


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
    return int((p.diagnostics.inaccurate | p.diagnostics.unconverged).sum())


def predictive_at(estimator: Any, rows: np.ndarray | Encoded) -> Predictive:
    """The predictive of rows; for rows with unknown inputs a mixture over values of the
    training table.
    """
    if isinstance(rows, Encoded) and rows.mixed.any():
        return predict_with_gaps(
            estimator.predict_dist, rows.values, rows.mixed, rows.copies(), rows.shares
        )
    x = rows.values if isinstance(rows, Encoded) else rows
    predictive: Predictive = (
        estimator.predict_dist(x)
        if len(x)
        else estimator.ensemble_.predict(torch.from_numpy(x), estimator.refit)
    )
    return predictive


def replace_refit(estimator: Any, refit: Any) -> Any:
    """The same fitted estimator with another refit."""
    other = copy.copy(estimator)
    other.refit = refit
    return other


def open_table_model(path: Path) -> TableModel:
    """A model of `ssla train`; FileError for another."""
    estimator, extra = load_with_extra(path)
    if "plan" not in extra:
        raise FileError(
            f"{path} was saved from Python without a table's columns. Only models of `ssla train` "
            "read tables."
        )
    return table_model(estimator, extra, path)


def table_model(estimator: Any, extra: dict[str, Any], path: Path) -> TableModel:
    try:
        plan = Plan.from_json(extra["plan"])
        if not isinstance(extra["target"], str) or extra["facts"]["likelihood"] not in LIKELIHOODS:
            raise ValueError("the target has no name or no likelihood")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"{path} does not contain a usable plan of columns ({error}).") from error
    if (
        plan.width != estimator.n_features_in_
        or plan.levels != estimator.ensemble_.architecture.levels
    ):
        raise FileError(f"The columns of {path} do not fit its network.")
    return TableModel(estimator, plan, extra)
