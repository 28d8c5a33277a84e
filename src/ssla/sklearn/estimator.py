"""Shared code of both estimators: validation of settings, rows as tensors, the fitted ensemble."""

from __future__ import annotations

import numbers
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from ssla._checks import one_of
from ssla.predictive import Predictive
from ssla.refit import resolve
from ssla.sklearn.saving import save
from ssla.tabular import Ensemble, Settings, fit_ensemble
from ssla.tabular.training import ACTIVATIONS, Schedule

AUTO = "auto"


class TableEstimator(BaseEstimator):  # type: ignore[misc]
    """Abstract: settings -> ensemble. The two estimators define y."""

    ensemble_: Ensemble

    def _settings(self, likelihood: str, rows: int) -> Settings:
        """The parameters, validated at fit and not in __init__, as scikit-learn requires."""
        for name in ("members", "max_epochs", "patience"):
            _number(self, name, int, 1)
        for name in ("learning_rate", "prior_precision"):
            _number(self, name, float, 0, strict=True)
        _number(self, "validation_fraction", float, 0, strict=True)
        if not self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must be between 0 and 1, but is {self.validation_fraction!r}.")
        one_of("activation", self.activation, ACTIVATIONS)
        resolve(self.refit)
        hidden = (self.hidden,) if isinstance(self.hidden, numbers.Integral) else tuple(self.hidden)
        if any(not isinstance(width, numbers.Integral) or width < 1 for width in hidden):
            raise ValueError(f"hidden must be positive widths such as (50, 50), but is {self.hidden!r}.")
        batch: int | None
        if self.batch_size is None:
            batch = None
        elif self.batch_size == AUTO:
            batch = auto_batch(rows)
        else:
            batch = _number(self, "batch_size", int, 1)
        return Settings(
            likelihood=likelihood,
            hidden=tuple(int(width) for width in hidden),
            activation=self.activation,
            members=self.members,
            weights=self.weights,
            structure=self.structure,
            tune=bool(self.tune),
            validation_fraction=float(self.validation_fraction) if self.early_stopping else 0.0,
            schedule=Schedule(self.max_epochs, batch, float(self.learning_rate), self.patience, float(self.prior_precision)),
            seed=int(check_random_state(self.random_state).randint(2**31 - 1)),
        )

    def _present(self, X: np.ndarray, sample_weight: Any) -> tuple[np.ndarray, np.ndarray]:
        """Which rows have a positive weight (n,) bool, and the weights of these. Other rows are ignored."""
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        present = weights > 0
        if int(present.sum()) < 2:
            raise ValueError(f"Fitting needs at least two rows with a positive weight, but n_samples={int(present.sum())}.")
        return present, weights[present]

    def _fit_rows(self, X: np.ndarray, y: np.ndarray, weights: np.ndarray, likelihood: str, classes: int = 0) -> Ensemble:
        x, target, w = (torch.from_numpy(part.copy()) for part in (X, y, weights))
        settings = self._settings(likelihood, len(x))
        return fit_ensemble(x, target, w, settings, classes, self._on_epoch(settings))

    def _on_epoch(self, settings: Settings) -> Any:
        """Progress callback, called with the number of each finished epoch."""
        return getattr(self, "on_epoch", None)

    def predict_dist(self, X: Any) -> Predictive:
        """The predictive distribution of y at X (see `ssla.Predictive`): mean, variance, cdf, hdr, mass, sample, …"""
        check_is_fitted(self, "ensemble_")
        X = validate_data(self, X, reset=False, dtype=np.float64, order="C")
        return self.ensemble_.predict(torch.from_numpy(X.copy()), self.refit)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write to a directory of tensors and JSON; `ssla.sklearn.load(path)` loads it; no other code is needed."""
        check_is_fitted(self, "ensemble_")
        return save(self, path)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = False
        return tags


def auto_batch(rows: int) -> int:
    """batch_size="auto": a sixteenth of the rows, between 16 and 256."""
    return min(256, max(16, rows // 16))


def _number(estimator: Any, name: str, kind: type, least: float, strict: bool = False) -> Any:
    value: Any = getattr(estimator, name)
    whole = isinstance(value, numbers.Integral)
    right = (
        (whole if kind is int else isinstance(value, numbers.Real))
        and not isinstance(value, bool)
        and (value > least if strict else value >= least)
    )
    if not right:
        bound = f"above {least:g}" if strict else f"of at least {least:g}"
        raise ValueError(f"{name} must be {'a whole number' if kind is int else 'a number'} {bound}, but is {value!r}.")
    return kind(value)
