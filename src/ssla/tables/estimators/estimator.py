"""Shared code of both estimators: validation of settings, rows as tensors, the fitted ensemble."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
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

from ssla._checks import all_in_plain_torch, one_of, warn
from ssla.curvature import resolve as resolve_structure
from ssla.diagnostics import sensitivity
from ssla.diagnostics.sensitivities import Sensitivity
from ssla.fitting.asked import checked_weights
from ssla.predictive import Predictive
from ssla.refit import resolve
from ssla.tables.columns import Encoded, Plan, Table
from ssla.tables.columns.frames import table_of
from ssla.tables.estimators import row_weights
from ssla.tables.estimators.epochs_bar import epochs_bar
from ssla.tables.estimators.inputs import (
    Rows,
    column_names,
    of_tables,
    plan_of,
    read_inputs,
    warn_of_unused,
)
from ssla.tables.estimators.related import Related
from ssla.tables.estimators.row_weights import MEANINGS
from ssla.tables.estimators.saving import save
from ssla.tables.networks import Ensemble, Settings, fit_ensemble, predict_with_gaps, updated
from ssla.tables.networks.count_targets import POISSON
from ssla.tables.networks.ensemble import CLASSES, VARYING
from ssla.tables.networks.threads import one_thread_if
from ssla.tables.networks.training import ACTIVATIONS, Schedule
from ssla.tables.trees.growing import grow

AUTO = "auto"
SMALL_TABLE, LARGE_TABLE = 300, 100_000
ROWS_VISITED = 4_000_000
AUTO_TREES = dict.fromkeys((CLASSES, *VARYING), 50)  # for each network
MANY_CLASSES, FEWEST_FOR_TREES = 50, 30
PRECISIONS = (0.01, 100.0)  # a range of prior precisions
OnEpoch = Callable[[int], None]  # is called with the number of each finished epoch
ONE_THREAD = 10_000  # rows: with fewer, two threads save a fifth of the time at most


@all_in_plain_torch
class TableEstimator(BaseEstimator):  # type: ignore[misc]
    """Abstract: settings -> ensemble. The two estimators define y."""

    ensemble_: Ensemble
    plan_: Plan
    n_iter_: int
    weight_factor_: float

    def _settings(self, likelihood: str, rows: int) -> Settings:
        """The parameters, validated at fit and not in __init__, as scikit-learn requires."""
        self._check_parameters()
        # Pieces of each input's range are for noise that depends on x, and for counts: see the
        # defaults in docs/tables-how.md.
        piecewise = self.activation == AUTO and likelihood in (*VARYING, POISSON)
        automatic = "relu" if piecewise else "silu"
        early_stopping = flag(self, "early_stopping")
        return Settings(
            likelihood=likelihood,
            hidden=hidden_widths(self.hidden),
            activation=automatic if self.activation == AUTO else self.activation,
            piecewise=piecewise,
            members=self._whole_number("members", auto_members, rows),
            weights=self.weights,
            structure=self.structure,
            tune=flag(self, "tune"),
            validation_fraction=float(self.validation_fraction) if early_stopping else 0.0,
            schedule=self._schedule(rows),
            trees=self._trees(likelihood, rows),
            seed=int(check_random_state(self.random_state).randint(2**31 - 1)),
        )

    def _check_parameters(self) -> None:
        """ValueError for a parameter that is out of range, or of an unknown name."""
        for name in ("learning_rate", "prior_precision", "validation_fraction"):
            whole_or_real(self, name, float, 0, strict=True)
        if not self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction must be between 0 and 1, but is {self.validation_fraction!r}."
            )
        whole_or_real(self, "verbose", int, 0, allow_bool=True)
        one_of("row_weights", self.row_weights, MEANINGS)
        one_of("activation", self.activation, (AUTO, *ACTIVATIONS))
        resolve(self.refit)
        checked_weights(self.weights)
        resolve_structure(self.structure)

    def _schedule(self, rows: int) -> Schedule:
        """Epochs, batches, step size, patience and weight decay of the training."""
        epochs = self._whole_number("max_epochs", auto_epochs, rows)
        # "auto" gives few epochs to large tables: patience is at most a fifth of them.
        longest_wait = max(epochs // 5, 2) if is_auto(self, "max_epochs") else epochs
        patience = min(whole_or_real(self, "patience", int, 1), longest_wait)
        batch_size = (
            None if self.batch_size is None else self._whole_number("batch_size", auto_batch, rows)
        )
        return Schedule(
            epochs, batch_size, float(self.learning_rate), patience, float(self.prior_precision)
        )

    def _whole_number(self, name: str, automatic: Callable[[int], int], rows: int) -> int:
        """A parameter of at least one; "auto" depends on the number of rows."""
        return automatic(rows) if is_auto(self, name) else int(whole_or_real(self, name, int, 1))

    def _trees(self, likelihood: str, rows: int) -> int:
        """The trees of each network; none where the likelihood has no trees."""
        usual = AUTO_TREES.get(likelihood, 0)
        if not is_auto(self, "trees"):
            asked = int(whole_or_real(self, "trees", int, 0))
            return asked if usual else 0
        few_rows = rows < FEWEST_FOR_TREES
        many_classes = len(getattr(self, "classes_", ())) > MANY_CLASSES
        return 0 if few_rows or many_classes else usual

    def _read(self, X: Any, y: Any, **checks: Any) -> tuple[Rows, np.ndarray]:
        """The rows of a fit after their first reading, and y."""
        given = read_inputs(self, X, reset=True, least=2)
        if y is None:
            raise ValueError(
                f"This {type(self).__name__} estimator requires y to be passed, but the target y "
                "is None."
            )
        target: np.ndarray = _check_y(y, estimator=self, **checks)
        check_consistent_length(X, target)
        return given, target

    def _encode(self, given: Rows, kept: np.ndarray) -> np.ndarray | Encoded:
        """Make the plan from the kept rows (n,) bool, and encode all rows by it. Rows that are
        encoded have their plan.
        """
        if isinstance(given, Encoded):
            self.plan_ = given.plan
            return given
        self.plan_ = plan_of(self, given, kept, codes=True)
        warn_of_unused(self.plan_)
        return given if isinstance(given, np.ndarray) else self.plan_.encode(given)

    def as_table(self, X: Any) -> Table:
        """Later rows as a table with the names of the training columns."""
        given = read_inputs(self, X, reset=False)
        if isinstance(given, Encoded):
            raise TypeError("X has encoded rows, which are no table. Give the rows as they were.")
        return given if isinstance(given, Table) else table_of(given, column_names(self))

    def encode(self, X: Any) -> Encoded:
        """Later rows as numbers, by the plan of the fit, with notes on missing and unknown inputs.

        Every method that takes X also takes these rows, so that they are encoded once.
        """
        check_is_fitted(self, "ensemble_")
        rows = self._rows_of(X)
        if isinstance(rows, Encoded):
            return rows
        return self.plan_.encode(table_of(rows, column_names(self)))

    def _rows_of(self, X: Any) -> np.ndarray | Encoded:
        """Later rows by the plan of the fit; numbers without gaps as they are where the fit had
        only such.
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
        return given if self.plan_.plain else self.plan_.encode(table_of(given, column_names(self)))

    def _complete_rows(self, X: Any, instead: str) -> torch.Tensor:
        """The rows of a `predictive_set`, none of which may be a mixture over unknown inputs."""
        check_is_fitted(self, "ensemble_")
        rows = self._rows_of(X)
        gaps = 0 if isinstance(rows, np.ndarray) else int(rows.mixed.sum())
        if gaps:
            raise ValueError(
                f"predictive_set needs complete rows, but {gaps} of {len(numbers(rows))} have "
                f"missing or unknown inputs. Leave them out, or use {instead}."
            )
        return torch.from_numpy(numbers(rows).copy())

    def _predict_rows(self, rows: np.ndarray | Encoded) -> Predictive:
        """The predictive; for rows with inputs that training did not teach a mixture over
        values of the training table.
        """
        if isinstance(rows, np.ndarray):
            return self._predict_numbers(rows)
        if not rows.mixed.any():
            return self._predict_numbers(rows.values)
        return predict_with_gaps(
            self._predict_numbers, rows.values, rows.mixed, rows.copies(), rows.shares
        )

    def _predict_numbers(self, X: np.ndarray) -> Predictive:
        return self.ensemble_.predict(torch.from_numpy(X.copy()), self.refit)

    def _present(self, rows: int, sample_weight: Any) -> tuple[np.ndarray, np.ndarray]:
        """Which rows have a positive weight (n,) bool, and all weights. Other rows are ignored."""
        weights = row_weights.checked_weights(sample_weight, rows)
        present = self._enough(weights)
        self.weight_factor_ = row_weights.factor_of(weights, self.row_weights)
        return present, weights * self.weight_factor_

    def _enough(self, weights: np.ndarray) -> np.ndarray:
        """Which rows have a positive weight (n,) bool; ValueError for fewer than two."""
        present = weights > 0
        if int(present.sum()) < 2:
            raise ValueError(
                "Fitting needs at least two rows with a positive weight, but "
                f"n_samples={int(present.sum())}."
            )
        return present

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
        """The networks, their posteriors and trees, of rows as numbers.

        seed: in place of random_state, for a second fit that holds out the same rows.
        """
        x, target, w = (torch.from_numpy(part.copy()) for part in (X, y, weights))
        settings = self._settings(likelihood, len(x))
        if seed is not None:
            settings = replace(settings, seed=seed)
        with (
            row_weights.decided(),
            one_thread_if(len(x) <= ONE_THREAD),
            epochs_bar(self.verbose, settings.schedule.max_epochs) as advance,
        ):
            forests = partial(grow, settings.trees, classes) if settings.trees else None
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
                self.plan_.levels,
            )

    def _more_rows(self, X: Any, sample_weight: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows of a `partial_fit` as numbers (n, d), which of them have a weight (n,) bool,
        and all weights.
        """
        rows = self._rows_of(X)
        unlearned = 0 if isinstance(rows, np.ndarray) else int(rows.unlearned.any(1).sum())
        if unlearned:
            warn(
                f"{unlearned} new rows have gaps or categories that the fit did not learn. They "
                "enter the update with the mean in place of a gap, and without a category. Leave "
                "them out, or fit again on all rows."
            )
        values = numbers(rows)
        weights = row_weights.checked_weights(sample_weight, len(values))
        weights = weights * row_weights.factor_of(weights, self.row_weights)
        return values, weights > 0, weights

    def _update(self, X: np.ndarray, y: np.ndarray, weights: np.ndarray) -> None:
        """Add rows to the last layers."""
        if len(X):
            self.ensemble_ = updated(
                self.ensemble_, *(torch.from_numpy(part.copy()) for part in (X, y, weights))
            )

    def predict_dist(self, X: Any) -> Predictive:
        """The predictive distribution of y at X (see `ssla.Predictive`): mean, variance, cdf,
        hdr, mass, sample, …

        X may also be rows that `plan_` has encoded.
        """
        check_is_fitted(self, "ensemble_")
        return self._predict_rows(self._rows_of(X))

    def sensitivity(
        self, X: Any, precisions: tuple[float, float] = PRECISIONS
    ) -> dict[int, Sensitivity]:
        """For each member, predictives of its standardised target under weaker and stronger priors
        (see `ssla.sensitivity`), by its main posterior.

        precisions: the range of precisions of the Gaussian prior. A missing value is replaced by
        the mean, and not by a mixture over training values.
        """
        check_is_fitted(self, "ensemble_")
        z = self.ensemble_.inputs(torch.from_numpy(numbers(self._rows_of(X)).copy()))
        largest = max(component.weight for component in self.ensemble_.components)
        return {
            component.member: sensitivity(component.posterior, z, precisions)
            for component in self.ensemble_.components
            if component.weight == largest
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write to a directory of tensors and JSON; `ssla.sklearn.load(path)` loads it; no
        other code is needed.
        """
        check_is_fitted(self, "ensemble_")
        return save(self, path)

    def __sklearn_tags__(self) -> Any:
        return of_tables(super().__sklearn_tags__())


def numbers(rows: np.ndarray | Encoded) -> np.ndarray:
    """The numbers (n, d) of rows, encoded or not."""
    return rows if isinstance(rows, np.ndarray) else rows.values


def auto_batch(rows: int) -> int:
    """batch_size="auto": a sixteenth of the rows, between 16 and 256; a 256th of more than
    65,536 rows, at most 4,096.
    """
    return min(4096, max(16, min(256, rows // 16), rows // 256))


def auto_members(rows: int) -> int:
    """members="auto": five; ten for small tables, two for large ones."""
    return 10 if rows <= SMALL_TABLE else 5 if rows <= LARGE_TABLE else 2


def auto_epochs(rows: int) -> int:
    """max_epochs="auto": 200 epochs, or as many as visit four million rows, but at least eight."""
    return min(200, max(8, ROWS_VISITED // rows))


def is_auto(estimator: Any, name: str) -> bool:
    """Whether a parameter is "auto". A comparison with an array would be an array."""
    value = getattr(estimator, name)
    return isinstance(value, str) and value == AUTO


def flag(estimator: Any, name: str) -> bool:
    """A parameter that is true or false; ValueError for anything else, such as a text, which
    would count as true.
    """
    value = getattr(estimator, name)
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, but is {value!r}.")
    return bool(value)


def hidden_widths(hidden: Any) -> tuple[int, ...]:
    """The widths of the hidden layers: several, or one number; ValueError for anything else."""
    widths = (hidden,) if isinstance(hidden, Integral) else hidden
    several = isinstance(widths, tuple | list | np.ndarray)
    if not several or any(
        isinstance(w, bool) or not isinstance(w, Integral) or w < 1 for w in widths
    ):
        raise ValueError(f"hidden must be positive widths such as (50, 50), but is {hidden!r}.")
    return tuple(int(width) for width in widths)


def whole_or_real(
    estimator: Any,
    name: str,
    kind: type,
    least: float,
    strict: bool = False,
    allow_bool: bool = False,
) -> Any:
    """A parameter as a finite number of that kind, of at least (strict: above) a bound;
    ValueError for anything else.
    """
    value: Any = getattr(estimator, name)
    whole = isinstance(value, Integral)
    right = (
        (whole if kind is int else isinstance(value, Real))
        and (allow_bool or not isinstance(value, bool))
        and math.isfinite(value)
        and (value > least if strict else value >= least)
    )
    if not right:
        bound = f"above {least:g}" if strict else f"of at least {least:g}"
        raise ValueError(
            f"{name} must be {'a whole number' if kind is int else 'a number'} {bound}, but is "
            f"{value!r}."
        )
    return kind(value)
