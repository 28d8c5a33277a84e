"""Shared code of the regressor and the classifier, from parameters and rows to an ensemble.

A table takes two steps to numbers. `inputs.read_inputs` returns `Rows`: numbers without gaps, a
`Table`, or rows that a plan has encoded. The estimator's plan then encodes a `Table` as `Encoded`
rows. Networks see `as_numbers` of them.
"""

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
from ssla.tables.columns.frames import make_table
from ssla.tables.estimators import row_weights
from ssla.tables.estimators.epochs_bar import show_epochs
from ssla.tables.estimators.inputs import (
    Rows,
    add_table_tags,
    list_column_names,
    plan_inputs,
    read_inputs,
    warn_of_unused_columns,
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
MEMBERS_OF_SMALL, MEMBERS, MEMBERS_OF_LARGE = 10, 5, 2  # networks, by the size
SMALLEST_BATCH, COMMON_BATCH, LARGEST_BATCH = 16, 256, 4096  # rows
FEW_BATCHES, MANY_BATCHES = 16, 256  # of an epoch, for small and for large tables
FEWEST_EPOCHS, MOST_EPOCHS = 8, 200
ROWS_VISITED = 4_000_000  # in all epochs together
AUTO_TREES = dict.fromkeys((CLASSES, *VARYING), 50)  # for each network
MANY_CLASSES = 50  # more have no trees
FEWEST_FOR_TREES = 30  # rows; fewer have no trees
PRECISIONS = (0.01, 100.0)  # the range of prior precisions of `sensitivity`; a guess
OnEpoch = Callable[[int], None]  # is called with the number of each finished epoch
ONE_THREAD = 10_000  # rows up to which one thread is used; docs/tables-how.md has the reason


@all_in_plain_torch
class TableEstimator(BaseEstimator):  # type: ignore[misc]
    """The abstract base of both estimators, which define how y is read and fitted.

    The base turns parameters and rows into an ensemble, and predicts with it. The estimators define
    `__init__` with the parameters and `fit`, which sets the attributes below.
    """

    ensemble_: Ensemble
    plan_: Plan
    n_iter_: int
    weight_factor_: float

    def _make_settings(self, likelihood: str, rows: int) -> Settings:
        """Return the settings of a fit of n rows with this likelihood.

        Raises ValueError for a parameter that is out of range. A random_state that is an object is
        advanced by one draw.  rows: n, which decides what "auto" means.
        """
        # Parameters are checked at the fit and not in __init__, as scikit-learn requires.
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
            members=self._read_count_or_auto("members", choose_member_count, rows),
            weights=self.weights,
            structure=self.structure,
            tune=read_flag(self, "tune"),
            validation_fraction=float(self.validation_fraction) if early_stopping else 0.0,
            schedule=self._make_schedule(rows),
            trees=self._count_trees(likelihood, rows),
            seed=int(check_random_state(self.random_state).randint(2**31 - 1)),
        )

    def _check_parameters(self) -> None:
        """Raise ValueError for a parameter that is out of range, or an unknown name.

        Counts, flags and widths are checked where `_make_settings` reads them.
        """
        for name in ("learning_rate", "prior_precision", "validation_fraction"):
            read_number(self, name, float, 0, strict=True)
        if not self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction must be between 0 and 1, but is {self.validation_fraction!r}."
            )

        read_number(self, "verbose", int, 0, allow_bool=True)  # True is 1
        check_name("row_weights", self.row_weights, MEANINGS)
        check_name("activation", self.activation, (AUTO, *ACTIVATIONS))
        resolve(self.refit)
        checked_weights(self.weights)
        resolve_structure(self.structure)

    def _make_schedule(self, rows: int) -> Schedule:
        """Return epochs, batches, learning rate, patience and weight decay for n rows.

        Raises ValueError for a count that is not a whole number of at least one.
        """
        epochs = self._read_count_or_auto("max_epochs", choose_epoch_count, rows)

        # "auto" gives few epochs to large tables, so patience is at most a fifth of them (a guess).
        longest_wait = max(epochs // 5, 2) if is_auto(self, "max_epochs") else epochs
        patience = min(read_number(self, "patience", int, 1), longest_wait)
        batch_size = None
        if self.batch_size is not None:
            batch_size = self._read_count_or_auto("batch_size", choose_batch_size, rows)
        return Schedule(
            max_epochs=epochs,
            batch_size=batch_size,
            learning_rate=float(self.learning_rate),
            patience=patience,
            precision=float(self.prior_precision),
        )

    def _read_count_or_auto(self, name: str, automatic: Callable[[int], int], rows: int) -> int:
        """Return the parameter `name`, which is a count or "auto".

        automatic: returns the count that "auto" means for n rows.  rows: n. Raises ValueError for a
        count that is not a whole number of at least one.
        """
        return automatic(rows) if is_auto(self, name) else int(read_number(self, name, int, 1))

    def _count_trees(self, likelihood: str, rows: int) -> int:
        """Return the number of trees beside each network, for a fit of n rows.

        The number is 0 where the likelihood has no trees. "auto" is also 0 for few rows or many
        classes. Raises ValueError for a number that is not a whole one of at least zero.
        """
        automatic = AUTO_TREES.get(likelihood, 0)
        if not is_auto(self, "trees"):
            number = int(read_number(self, "trees", int, 0))
            return number if automatic else 0
        few_rows = rows < FEWEST_FOR_TREES
        many_classes = len(getattr(self, "classes_", ())) > MANY_CLASSES
        return 0 if few_rows or many_classes else automatic

    def _read_training_rows(self, X: Any, y: Any, **checks: Any) -> tuple[Rows, np.ndarray]:
        """Return the rows of a fit after their first reading, and y (n,) or (n, D).

        The names and the number of the columns are stored. Raises ValueError for rows or targets
        that cannot be used.

        X: as in `fit`.  checks: options of scikit-learn's check of y.
        """
        inputs = read_inputs(self, X, reset=True, least=2)
        if y is None:
            raise ValueError(
                f"This {type(self).__name__} estimator requires y to be passed, but the target y "
                "is None."
            )
        target: np.ndarray = _check_y(y, estimator=self, **checks)
        check_consistent_length(X, target)
        return inputs, target

    def _make_plan(self, inputs: Rows, kept: np.ndarray) -> np.ndarray | Encoded:
        """Set `plan_` by the kept rows (n,) bool, and return all rows encoded by it.

        Numbers without gaps are returned as they are. Rows that are encoded already are returned
        too, and their plan is taken over. Warns of columns that are not used. Raises TableError if
        no column is usable.

        inputs: the rows after their first reading.
        """
        if isinstance(inputs, Encoded):
            self.plan_ = inputs.plan
            return inputs
        self.plan_ = plan_inputs(self, inputs, kept, codes=True)
        warn_of_unused_columns(self.plan_)
        return inputs if isinstance(inputs, np.ndarray) else self.plan_.encode(inputs)

    def as_table(self, X: Any) -> Table:
        """Return later rows as a table with the names of the training columns.

        Raises TypeError for encoded rows, and ValueError for other columns than those of the fit.
        """
        inputs = read_inputs(self, X, reset=False)
        if isinstance(inputs, Encoded):
            raise TypeError("X has encoded rows, which are no table. Give the rows as they were.")
        return inputs if isinstance(inputs, Table) else make_table(inputs, list_column_names(self))

    def encode(self, X: Any) -> Encoded:
        """Return later rows as numbers by the plan of the fit, with notes on unknown inputs.

        Every method that takes X also takes these rows, so that they are encoded once. Raises
        ValueError for rows that cannot be used, and NotFittedError before `fit`.
        """
        check_is_fitted(self, "ensemble_")
        rows = self._encode_if_needed(X)
        if isinstance(rows, Encoded):
            return rows
        return self.plan_.encode(make_table(rows, list_column_names(self)))

    def _encode_if_needed(self, X: Any) -> np.ndarray | Encoded:
        """Return later rows encoded by the plan of the fit.

        Numbers without gaps (n, d) are returned as they are if the fit had no other inputs. Raises
        ValueError for rows that another plan has encoded, and for rows that cannot be used.
        """
        inputs = read_inputs(self, X, reset=False)
        if isinstance(inputs, Encoded):
            # The comparison of objects is faster than that of values, and suffices for rows that
            # this estimator has encoded.
            if inputs.plan is not self.plan_ and inputs.plan != self.plan_:
                raise ValueError(
                    "X was encoded by the plan of another table. Encode it with this model's "
                    "encode(X), or give X itself."
                )
            return inputs

        if isinstance(inputs, Table):
            return self.plan_.encode(inputs)
        if self.plan_.is_identity:
            return inputs
        return self.plan_.encode(make_table(inputs, list_column_names(self)))

    def _read_complete_rows(self, X: Any, instead: str) -> torch.Tensor:
        """Return the rows X as numbers (N, d) for `predictive_set`, which needs complete rows.

        Raises ValueError for a row with missing or unknown inputs.  instead: the method that the
        error suggests.
        """
        check_is_fitted(self, "ensemble_")
        rows = self._encode_if_needed(X)
        gaps = 0 if isinstance(rows, np.ndarray) else int(rows.mixed_rows.sum())
        if gaps:
            raise ValueError(
                f"predictive_set needs complete rows, but {gaps} of {len(as_numbers(rows))} have "
                f"missing or unknown inputs. Leave them out, or use {instead}."
            )
        return torch.from_numpy(as_numbers(rows).copy())

    def _predict_rows(self, rows: np.ndarray | Encoded) -> Predictive:
        """Return the predictive at N rows, as `_encode_if_needed` returns them.

        A row with missing or unknown inputs whose effect the training table did not show has a
        mixture over values of that table.
        """
        if isinstance(rows, np.ndarray) or not rows.mixed_rows.any():
            return self._predict_complete_rows(as_numbers(rows))
        return predict_with_gaps(
            self._predict_complete_rows,
            rows.values,
            rows.mixed_rows,
            rows.make_filled_copies(),
            rows.copy_weights,
        )

    def _predict_complete_rows(self, X: np.ndarray) -> Predictive:
        """Return the predictive of the ensemble at complete rows X (N, d)."""
        x = torch.from_numpy(X.copy())  # a copy, because X may be read-only
        return self.ensemble_.predict(x, self.refit)

    def _read_weights(self, sample_weight: Any, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which of the n rows have a positive weight (n,) bool, and all weights (n,).

        The weights are scaled by the factor that the parameter `row_weights` asks for, which is
        stored in `weight_factor_`. Raises ValueError for wrong weights, and for fewer than two
        positive weights.
        """
        weights = row_weights.read_row_weights(sample_weight, rows)
        present = row_weights.find_weighted_rows(weights)
        self.weight_factor_ = row_weights.choose_weight_factor(weights, self.row_weights)
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
        """Fit the networks, their posteriors and trees to rows of numbers, and return the ensemble.

        Raises ValueError for a parameter that is out of range, and the errors of `fit_ensemble`.

        X (n, d), y (n,) or (n, D), weights (n,).  likelihood: its name.  related: the groups or
        times of the rows.  classes: the number of classes; 0 for other targets.  rival: see
        `fit_ensemble`.  seed: replaces random_state in a second fit that must hold out the same
        rows.  on_epoch: replaces the bar of `verbose`.
        """
        x, target, weights_tensor = copy_to_tensors(X, y, weights)
        settings = self._make_settings(likelihood, len(x))
        if seed is not None:
            settings = replace(settings, seed=seed)
        with (
            row_weights.without_weight_warning(),
            limit_threads(small=len(x) <= ONE_THREAD),
            show_epochs(self.verbose, settings.schedule.max_epochs) as advance,
        ):
            groups, time = related.tensors
            return fit_ensemble(
                x,
                target,
                weights_tensor,
                settings,
                classes=classes,
                on_epoch=advance if on_epoch is None else on_epoch,
                groups=groups,
                time=time,
                grow=partial(grow_forest, settings.trees, classes) if settings.trees else None,
                rival=rival,
                levels=self.plan_.level_counts,
            )

    def _read_more_rows(
        self, X: Any, sample_weight: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the rows of a `partial_fit` as numbers (n, d).

        Also returns which rows have a positive weight (n,) bool, and all scaled weights (n,). Warns
        of rows with missing or unknown inputs that were not in the training table. Raises
        ValueError for rows or weights that cannot be used.
        """
        rows = self._encode_if_needed(X)
        unlearned = 0 if isinstance(rows, np.ndarray) else int(rows.mixed_rows.sum())
        if unlearned:
            warn(
                f"{unlearned} new rows have gaps or categories that the fit did not learn. They "
                "enter the update with the mean in place of a gap, and without a category. Leave "
                "them out, or fit again on all rows."
            )

        values = as_numbers(rows)
        weights = row_weights.read_row_weights(sample_weight, len(values))
        weights = weights * row_weights.choose_weight_factor(weights, self.row_weights)
        return values, weights > 0, weights

    def _update_last_layers(self, X: np.ndarray, y: np.ndarray, weights: np.ndarray) -> None:
        """Add rows X (n, d) with targets y (n,) or (n, D) and weights (n,) to the last layers.

        `ensemble_` is replaced; nothing is done if there are no rows. Raises ValueError where the
        posteriors cannot follow the rows.
        """
        if len(X):
            self.ensemble_ = update_ensemble(self.ensemble_, *copy_to_tensors(X, y, weights))

    def predict_dist(self, X: Any) -> Predictive:
        """Return the predictive distribution of y at X, a `ssla.Predictive`.

        X: rows (n, d) with the columns of `fit`, or rows that `encode` returned. The result has n
        rows; `ssla.Predictive` lists its answers. Raises ValueError for rows that cannot be used,
        and NotFittedError before `fit`.
        """
        check_is_fitted(self, "ensemble_")
        return self._predict_rows(self._encode_if_needed(X))

    def sensitivity(
        self, X: Any, precisions: tuple[float, float] = PRECISIONS
    ) -> dict[int, Sensitivity]:
        """Return how the predictives at X change under weaker and stronger priors, by member.

        The keys are the indices of the networks, and the values are those of `ssla.sensitivity`,
        for the standardised target.  precisions: the range of precisions of the Gaussian prior. A
        missing value is replaced by the mean, and not by a mixture over training values. Raises
        NotFittedError before `fit`.
        """
        check_is_fitted(self, "ensemble_")
        (x,) = copy_to_tensors(as_numbers(self._encode_if_needed(X)))
        z = self.ensemble_.inputs(x)  # standardised (N, d)

        # A member may have several posteriors, of which the main one has the largest weight.
        largest = max(component.weight for component in self.ensemble_.components)
        return {
            component.member: sensitivity(component.posterior, z, precisions)
            for component in self.ensemble_.components
            if component.weight == largest
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the estimator to a directory of tensors and JSON, and return its path.

        `ssla.sklearn.load(path)` loads it. Raises FileError for classes or parameters that a file
        cannot hold, and NotFittedError before `fit`.
        """
        check_is_fitted(self, "ensemble_")
        return save(self, path)

    def __sklearn_tags__(self) -> Any:
        """Return the tags of an estimator that reads tables."""
        return add_table_tags(super().__sklearn_tags__())


def as_numbers(rows: np.ndarray | Encoded) -> np.ndarray:
    """Return rows as numbers (n, d): those of encoded rows, and others as they are."""
    return rows if isinstance(rows, np.ndarray) else rows.values


def copy_to_tensors(*arrays: np.ndarray) -> Iterator[torch.Tensor]:
    """Yield a copy of each array as a tensor, which does not share the caller's memory."""
    return (torch.from_numpy(array.copy()) for array in arrays)


def choose_batch_size(rows: int) -> int:
    """Return the rows of a batch that batch_size="auto" means for n rows.

    The number is a sixteenth of the rows, between 16 and 256. For more than 65,536 rows it is a
    256th, but at most 4,096.  rows: n.
    """
    size_of_small = min(COMMON_BATCH, rows // FEW_BATCHES)
    return min(LARGEST_BATCH, max(SMALLEST_BATCH, size_of_small, rows // MANY_BATCHES))


def choose_member_count(rows: int) -> int:
    """Return the number of networks that members="auto" means: more for small tables."""
    if rows <= SMALL_TABLE:
        return MEMBERS_OF_SMALL
    return MEMBERS if rows <= LARGE_TABLE else MEMBERS_OF_LARGE


def choose_epoch_count(rows: int) -> int:
    """Return the number of epochs that max_epochs="auto" means for n rows.

    The number is 200, or as many as visit ROWS_VISITED rows if these are fewer, but at least eight.
    """
    return min(MOST_EPOCHS, max(FEWEST_EPOCHS, ROWS_VISITED // rows))


def is_auto(estimator: Any, name: str) -> bool:
    """Return whether a parameter is "auto".

    estimator: has the parameter as an attribute of this name.
    """
    value = getattr(estimator, name)
    # Only texts are compared, because the comparison of an array would be an array.
    return isinstance(value, str) and value == AUTO


def read_flag(estimator: Any, name: str) -> bool:
    """Return a parameter that is True or False.

    Raises ValueError for anything else, such as a text, which would count as True.

    estimator: has the parameter as an attribute of this name.
    """
    value = getattr(estimator, name)
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, but is {value!r}.")
    return bool(value)


def read_hidden_widths(hidden: Any) -> tuple[int, ...]:
    """Return the widths of the hidden layers, given as a sequence or as one number.

    Raises ValueError for anything but positive whole numbers.
    """
    widths = (hidden,) if isinstance(hidden, Integral) else hidden
    is_sequence = isinstance(widths, tuple | list | np.ndarray)
    if not is_sequence or any(
        isinstance(width, bool) or not isinstance(width, Integral) or width < 1 for width in widths
    ):
        raise ValueError(f"hidden must be positive widths such as (50, 50), but is {hidden!r}.")
    return tuple(int(width) for width in widths)


def read_number(
    estimator: Any,
    name: str,
    number_type: type,
    least: float,
    strict: bool = False,
    allow_bool: bool = False,
) -> Any:
    """Return the parameter `name` as a finite number of at least a bound.

    estimator: has the parameter as an attribute.  number_type: int for whole numbers, or float.
    strict: the number must be above the bound, and not equal to it.  allow_bool: whether True and
    False count as numbers. Raises ValueError for anything else.
    """
    value: Any = getattr(estimator, name)
    has_type = isinstance(value, Integral if number_type is int else Real)
    is_valid = (
        has_type
        and (allow_bool or not isinstance(value, bool))
        and math.isfinite(value)
        and (value > least if strict else value >= least)
    )
    if not is_valid:
        bound = f"above {least:g}" if strict else f"of at least {least:g}"
        noun = "a whole number" if number_type is int else "a number"
        raise ValueError(f"{name} must be {noun} {bound}, but is {value!r}.")

    return number_type(value)
