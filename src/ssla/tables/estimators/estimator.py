"""Shared code of both estimators: validation of settings, rows as tensors, the fitted ensemble."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_y, check_consistent_length, check_is_fitted

from ssla._checks import all_in_plain_torch, check_name, warn
from ssla.curvature import resolve_structure
from ssla.diagnostics import sensitivity
from ssla.diagnostics.sensitivities import Sensitivity
from ssla.fitting.arguments import checked_weights
from ssla.predictive import Predictive
from ssla.refit import resolve
from ssla.tables.columns import Encoded, Plan, Table
from ssla.tables.columns.frames import table_of
from ssla.tables.estimators import row_weights
from ssla.tables.estimators.epochs_bar import show_epochs
from ssla.tables.estimators.inputs import (
    Rows,
    add_table_tags,
    column_names,
    plan_inputs,
    read_inputs,
    warn_of_unused,
)
from ssla.tables.estimators.related import Related
from ssla.tables.estimators.row_weights import MEANINGS
from ssla.tables.estimators.saving import save
from ssla.tables.networks import (
    Ensemble,
    Settings,
    fit_ensemble,
    predict_with_gaps,
    update_ensemble,
)
from ssla.tables.networks.count_targets import POISSON
from ssla.tables.networks.ensemble import CLASSES, VARYING
from ssla.tables.networks.threads import limit_threads
from ssla.tables.networks.training import ACTIVATIONS, Schedule
from ssla.tables.trees.growing import grow_forest

AUTO = "auto"
# The defaults that "auto" chooses; docs/tables-how.md gives their reasons and measurements.
SMALL_TABLE, LARGE_TABLE = 300, 100_000  # rows
ROWS_VISITED = 4_000_000  # in all epochs together
AUTO_TREES = dict.fromkeys((CLASSES, *VARYING), 50)  # for each network
MANY_CLASSES = 50  # more have no trees
FEWEST_FOR_TREES = 30  # rows; fewer have no trees
PRECISIONS = (0.01, 100.0)  # the range of prior precisions of `sensitivity`; a guess
OnEpoch = Callable[[int], None]  # is called with the number of each finished epoch
ONE_THREAD = 10_000  # rows: with fewer, two threads save a fifth of the time at most


@all_in_plain_torch
class TableEstimator(BaseEstimator):  # type: ignore[misc]
    """Abstract: from settings and rows to an ensemble. The two estimators define y."""

    ensemble_: Ensemble
    plan_: Plan
    n_iter_: int
    weight_factor_: float

    def _make_settings(self, likelihood: str, rows: int) -> Settings:
        """Return the settings of the networks, for so many rows; raise ValueError for a parameter
        that is out of range.

        Parameters are checked at the fit and not in __init__, as scikit-learn requires. A random
        state that is an object is advanced.
        """
        self._check_parameters()
        # Pieces of each input's range are for noise that depends on x, and for counts: see the
        # defaults in docs/tables-how.md.
        piecewise = self.activation == AUTO and likelihood in (*VARYING, POISSON)
        automatic = "relu" if piecewise else "silu"
        early_stopping = read_flag(self, "early_stopping")
        return Settings(
            likelihood=likelihood,
            hidden=read_hidden_widths(self.hidden),
            activation=automatic if self.activation == AUTO else self.activation,
            piecewise=piecewise,
            members=self._count_or_auto("members", auto_members, rows),
            weights=self.weights,
            structure=self.structure,
            tune=read_flag(self, "tune"),
            validation_fraction=float(self.validation_fraction) if early_stopping else 0.0,
            schedule=self._make_schedule(rows),
            trees=self._count_trees(likelihood, rows),
            seed=int(check_random_state(self.random_state).randint(2**31 - 1)),
        )

    def _check_parameters(self) -> None:
        """Raise ValueError for a parameter that is out of range, or an unknown name."""
        for name in ("learning_rate", "prior_precision", "validation_fraction"):
            read_number(self, name, float, 0, strict=True)
        if not self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction must be between 0 and 1, but is {self.validation_fraction!r}."
            )
        read_number(self, "verbose", int, 0, allow_bool=True)
        check_name("row_weights", self.row_weights, MEANINGS)
        check_name("activation", self.activation, (AUTO, *ACTIVATIONS))
        resolve(self.refit)
        checked_weights(self.weights)
        resolve_structure(self.structure)

    def _make_schedule(self, rows: int) -> Schedule:
        """Return epochs, batches, step size, patience and weight decay of the training."""
        epochs = self._count_or_auto("max_epochs", auto_epochs, rows)
        # "auto" gives few epochs to large tables: patience is at most a fifth of them.
        longest_wait = max(epochs // 5, 2) if is_auto(self, "max_epochs") else epochs
        patience = min(read_number(self, "patience", int, 1), longest_wait)
        all_at_once = self.batch_size is None
        batch_size = None if all_at_once else self._count_or_auto("batch_size", auto_batch, rows)
        return Schedule(
            epochs, batch_size, float(self.learning_rate), patience, float(self.prior_precision)
        )

    def _count_or_auto(self, name: str, automatic: Callable[[int], int], rows: int) -> int:
        """Return a parameter that is a count of at least one; "auto" depends on the number of
        rows.
        """
        return automatic(rows) if is_auto(self, name) else int(read_number(self, name, int, 1))

    def _count_trees(self, likelihood: str, rows: int) -> int:
        """Return the number of trees of each network; 0 where the likelihood has no trees."""
        usual = AUTO_TREES.get(likelihood, 0)
        if not is_auto(self, "trees"):
            asked = int(read_number(self, "trees", int, 0))
            return asked if usual else 0
        few_rows = rows < FEWEST_FOR_TREES
        many_classes = len(getattr(self, "classes_", ())) > MANY_CLASSES
        return 0 if few_rows or many_classes else usual

    def _read_training_rows(self, X: Any, y: Any, **checks: Any) -> tuple[Rows, np.ndarray]:
        """Return the rows of a fit after their first reading, and y (n,) or (n, D).

        checks: options of scikit-learn's check of y. Raises ValueError for rows or targets that
        cannot be used.
        """
        given = read_inputs(self, X, reset=True, least=2)
        if y is None:
            raise ValueError(
                f"This {type(self).__name__} estimator requires y to be passed, but the target y "
                "is None."
            )
        target: np.ndarray = _check_y(y, estimator=self, **checks)
        check_consistent_length(X, target)
        return given, target

    def _make_plan(self, given: Rows, kept: np.ndarray) -> np.ndarray | Encoded:
        """Make the plan from the kept rows (n,) bool, and return all rows encoded by it.

        Rows that are encoded have their plan.
        """
        if isinstance(given, Encoded):
            self.plan_ = given.plan
            return given
        self.plan_ = plan_inputs(self, given, kept, codes=True)
        warn_of_unused(self.plan_)
        return given if isinstance(given, np.ndarray) else self.plan_.encode(given)

    def as_table(self, X: Any) -> Table:
        """Return later rows as a table with the names of the training columns.

        Raises TypeError for encoded rows.
        """
        given = read_inputs(self, X, reset=False)
        if isinstance(given, Encoded):
            raise TypeError("X has encoded rows, which are no table. Give the rows as they were.")
        return given if isinstance(given, Table) else table_of(given, column_names(self))

    def encode(self, X: Any) -> Encoded:
        """Return later rows as numbers, by the plan of the fit, with notes on missing and unknown
        inputs.

        Every method that takes X also takes these rows, so that they are encoded once.
        """
        check_is_fitted(self, "ensemble_")
        rows = self._encode_if_needed(X)
        if isinstance(rows, Encoded):
            return rows
        return self.plan_.encode(table_of(rows, column_names(self)))

    def _encode_if_needed(self, X: Any) -> np.ndarray | Encoded:
        """Return later rows encoded by the plan of the fit; numbers without gaps (n, d) as they are
        where the fit had only such.

        Raises ValueError for rows that another plan has encoded.
        """
        given = read_inputs(self, X, reset=False)
        if isinstance(given, Encoded):
            if given.plan is not self.plan_ and given.plan != self.plan_:
                raise ValueError(
                    "X was encoded by the plan of another table. Encode it with this model's "
                    "encode(X), or give X itself."
                )
            return given
        if isinstance(given, Table):
            return self.plan_.encode(given)
        return (
            given
            if self.plan_.is_identity
            else self.plan_.encode(table_of(given, column_names(self)))
        )

    def _complete_rows(self, X: Any, instead: str) -> torch.Tensor:
        """Return the rows (N, d) of a `predictive_set`.

        Raises ValueError for a row that needs a mixture over unknown inputs. instead: the method
        that the error names.
        """
        check_is_fitted(self, "ensemble_")
        rows = self._encode_if_needed(X)
        gaps = 0 if isinstance(rows, np.ndarray) else int(rows.mixed_rows.sum())
        if gaps:
            raise ValueError(
                f"predictive_set needs complete rows, but {gaps} of {len(numbers_of(rows))} have "
                f"missing or unknown inputs. Leave them out, or use {instead}."
            )
        return torch.from_numpy(numbers_of(rows).copy())

    def _predict_rows(self, rows: np.ndarray | Encoded) -> Predictive:
        """Return the predictive; for rows with inputs that training did not teach a mixture over
        values of the training table.
        """
        if isinstance(rows, np.ndarray) or not rows.mixed_rows.any():
            return self._predict_complete_rows(numbers_of(rows))
        return predict_with_gaps(
            self._predict_complete_rows,
            rows.values,
            rows.mixed_rows,
            rows.filled_copies(),
            rows.copy_weights,
        )

    def _predict_complete_rows(self, X: np.ndarray) -> Predictive:
        """Return the predictive of the ensemble at complete rows X (N, d)."""
        return self.ensemble_.predict(torch.from_numpy(X.copy()), self.refit)  # X may be read-only

    def _read_weights(self, sample_weight: Any, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which rows have a positive weight (n,) bool, and all weights (n,), scaled as
        `row_weights` says. Other rows are ignored.

        Raises ValueError for wrong weights, and for fewer than two positive ones.
        """
        weights = row_weights.checked_weights(sample_weight, rows)
        present = row_weights.rows_with_weight(weights)
        self.weight_factor_ = row_weights.factor_of(weights, self.row_weights)
        return present, weights * self.weight_factor_

    def _fit_rows(
        self,
        X: np.ndarray,
        y: np.ndarray,
        weights: np.ndarray,
        likelihood: str,
        related: Related,
        classes: int = 0,
        rival: str | None = None,
        seed: int | None = None,
        on_epoch: OnEpoch | None = None,
    ) -> Ensemble:
        """Fit the networks, their posteriors and trees to rows that are numbers.

        X (n, d), y (n,) or (n, D), weights (n,). classes: their number, 0 for other targets. rival:
        a likelihood that is fitted beside the first, of which the better one is kept. seed: in
        place of random_state, for a second fit that holds out the same rows.
        """
        x, target, w = tensors_of(X, y, weights)
        settings = self._make_settings(likelihood, len(x))
        if seed is not None:
            settings = replace(settings, seed=seed)
        with (
            row_weights.without_weight_warning(),
            limit_threads(len(x) <= ONE_THREAD),
            show_epochs(self.verbose, settings.schedule.max_epochs) as advance,
        ):
            forests = partial(grow_forest, settings.trees, classes) if settings.trees else None
            return fit_ensemble(
                x,
                target,
                w,
                settings,
                classes,
                advance if on_epoch is None else on_epoch,
                *related.tensors,
                forests,
                rival,
                self.plan_.level_counts,
            )

    def _read_more_rows(
        self, X: Any, sample_weight: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the rows of a `partial_fit` as numbers (n, d), which of them have a weight (n,)
        bool, and all weights (n,). Warns of rows with inputs that training did not teach.
        """
        rows = self._encode_if_needed(X)
        unlearned = 0 if isinstance(rows, np.ndarray) else int(rows.mixed_rows.sum())
        if unlearned:
            warn(
                f"{unlearned} new rows have gaps or categories that the fit did not learn. They "
                "enter the update with the mean in place of a gap, and without a category. Leave "
                "them out, or fit again on all rows."
            )
        values = numbers_of(rows)
        weights = row_weights.checked_weights(sample_weight, len(values))
        weights = weights * row_weights.factor_of(weights, self.row_weights)
        return values, weights > 0, weights

    def _update_last_layers(self, X: np.ndarray, y: np.ndarray, weights: np.ndarray) -> None:
        """Add rows X (n, d) with targets y and weights (n,) to the last layers."""
        if len(X):
            self.ensemble_ = update_ensemble(self.ensemble_, *tensors_of(X, y, weights))

    def predict_dist(self, X: Any) -> Predictive:
        """Return the predictive distribution of y at X (see `ssla.Predictive`): mean, variance,
        cdf, hdr, mass, sample, …

        X may also be rows that `plan_` has encoded.
        """
        check_is_fitted(self, "ensemble_")
        return self._predict_rows(self._encode_if_needed(X))

    def sensitivity(
        self, X: Any, precisions: tuple[float, float] = PRECISIONS
    ) -> dict[int, Sensitivity]:
        """Return, by the number of each member, the predictives of its standardised target under
        weaker and stronger priors (see `ssla.sensitivity`).

        precisions: the range of precisions of the Gaussian prior. A missing value is replaced by
        the mean, and not by a mixture over training values.
        """
        check_is_fitted(self, "ensemble_")
        (x,) = tensors_of(numbers_of(self._encode_if_needed(X)))
        z = self.ensemble_.inputs(x)  # standardised (N, d)
        # A member may have several posteriors: the main ones have the largest weight.
        largest = max(component.weight for component in self.ensemble_.components)
        return {
            component.member: sensitivity(component.posterior, z, precisions)
            for component in self.ensemble_.components
            if component.weight == largest
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the estimator to a directory of tensors and JSON, and return its path.

        `ssla.sklearn.load(path)` loads it; no other code is needed. Raises FileError for classes
        or parameters that a file cannot hold.
        """
        check_is_fitted(self, "ensemble_")
        return save(self, path)

    def __sklearn_tags__(self) -> Any:
        """The tags of an estimator that reads tables."""
        return add_table_tags(super().__sklearn_tags__())


def numbers_of(rows: np.ndarray | Encoded) -> np.ndarray:
    """Return the numbers (n, d) of rows, encoded or not."""
    return rows if isinstance(rows, np.ndarray) else rows.values


def tensors_of(*arrays: np.ndarray) -> Iterator[torch.Tensor]:
    """Yield copies of the arrays as tensors: the caller's memory is not shared."""
    return (torch.from_numpy(array.copy()) for array in arrays)


def auto_batch(rows: int) -> int:
    """Return the rows of a batch for batch_size="auto": a sixteenth of the rows, between 16 and
    256; a 256th of more than 65,536 rows, at most 4,096.
    """
    return min(4096, max(16, min(256, rows // 16), rows // 256))


def auto_members(rows: int) -> int:
    """Return the networks for members="auto": five; ten for small tables, two for large ones."""
    return 10 if rows <= SMALL_TABLE else 5 if rows <= LARGE_TABLE else 2


def auto_epochs(rows: int) -> int:
    """Return the epochs for max_epochs="auto": 200, or as many as visit four million rows, but at
    least eight.
    """
    return min(200, max(8, ROWS_VISITED // rows))


def is_auto(estimator: Any, name: str) -> bool:
    """Return whether a parameter is "auto"."""
    value = getattr(estimator, name)
    return isinstance(value, str) and value == AUTO  # a comparison with an array is an array


def read_flag(estimator: Any, name: str) -> bool:
    """Return a parameter that is true or false.

    Raises ValueError for anything else, such as a text, which would count as true.
    """
    value = getattr(estimator, name)
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, but is {value!r}.")
    return bool(value)


def read_hidden_widths(hidden: Any) -> tuple[int, ...]:
    """Return the widths of the hidden layers, given as several or as one number.

    Raises ValueError for anything else.
    """
    widths = (hidden,) if isinstance(hidden, Integral) else hidden
    several = isinstance(widths, tuple | list | np.ndarray)
    if not several or any(
        isinstance(width, bool) or not isinstance(width, Integral) or width < 1 for width in widths
    ):
        raise ValueError(f"hidden must be positive widths such as (50, 50), but is {hidden!r}.")
    return tuple(int(width) for width in widths)


def read_number(
    estimator: Any,
    name: str,
    kind: type,
    least: float,
    strict: bool = False,
    allow_bool: bool = False,
) -> Any:
    """Return a parameter as a finite number of that kind (int or float), of at least (strict:
    above) a bound.

    Raises ValueError for anything else. allow_bool: whether True and False are numbers.
    """
    value: Any = getattr(estimator, name)
    is_whole = isinstance(value, Integral)
    valid = (
        (is_whole if kind is int else isinstance(value, Real))
        and (allow_bool or not isinstance(value, bool))
        and math.isfinite(value)
        and (value > least if strict else value >= least)
    )
    if not valid:
        bound = f"above {least:g}" if strict else f"of at least {least:g}"
        raise ValueError(
            f"{name} must be {'a whole number' if kind is int else 'a number'} {bound}, but is "
            f"{value!r}."
        )
    return kind(value)
