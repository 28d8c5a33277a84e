"""Models of other libraries, and their rows and targets, as `wrapped` needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils import _safe_indexing, assert_all_finite, check_array
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, has_fit_parameter

from ssla.tables.estimators.targets import check_given, check_numeric
from ssla.tables.networks.scaling import Scaling


def is_fitted(base: Any) -> bool:
    """Whether a model of any library is fitted. CatBoost has a method of its own for it."""
    if callable(getattr(base, "is_fitted", None)):
        return bool(base.is_fitted())
    try:
        check_is_fitted(base)
    except (NotFittedError, TypeError):
        return False
    return True


def check_methods(name: str, base: Any, methods: Sequence[str]) -> None:
    """Raise TypeError for a base that lacks one of these methods."""
    missing = [method for method in methods if not hasattr(base, method)]
    if missing:
        raise TypeError(
            f"{name} must have the methods {' and '.join(methods)}, but {type(base).__name__} has "
            f"no {missing[0]}."
        )


def fitted(
    base: Any, X: Any, y: np.ndarray, weights: np.ndarray | None, rows: Any, seeds: Any
) -> Any:
    """A clone of the base, fitted on some rows (None: all)."""
    model = clone(base)
    names = [
        name
        for name, value in model.get_params().items()
        if name.split("__")[-1] == "random_state" and value is None
    ]
    if names:
        model.set_params(**{name: seeds.randint(2**31 - 1) for name in sorted(names)})
    options = {}
    if weights is not None:
        if not has_fit_parameter(model, "sample_weight"):
            raise ValueError(
                f"sample_weight was given, but {type(base).__name__}.fit does not take it. Fit "
                "without weights."
            )
        options["sample_weight"] = weights if rows is None else weights[rows]
    if rows is not None:
        X, y = _safe_indexing(X, rows), y[rows]
    return model.fit(X, y, **options)


def predicted(model: Any, X: Any) -> np.ndarray:
    found = np.asarray(model.predict(X), dtype=np.float64)
    return found.reshape(-1) if found.ndim == 2 and found.shape[1] == 1 else found


def numbers_of(y: Any) -> np.ndarray:
    """One target (n,) in float64."""
    if y is None:
        raise ValueError("This estimator requires y to be passed, but the target y is None.")
    check_numeric(y)
    y = check_array(y, ensure_2d=False, dtype=None, input_name="y", ensure_min_samples=2)
    if y.ndim == 2 and y.shape[1] > 1:
        raise ValueError(
            f"y must be one target, but has {y.shape[1]} columns. Fit one estimator for each."
        )
    return np.array(column_or_1d(y, warn=True), dtype=np.float64)


def labels_of(y: Any) -> np.ndarray:
    if y is None:
        raise ValueError("This estimator requires y to be passed, but the target y is None.")
    check_given(y)
    assert_all_finite(y, input_name="y")
    check_classification_targets(y)
    labels: np.ndarray = column_or_1d(y, warn=True)
    return labels


def column_scaling(X: Any, weights: np.ndarray) -> Scaling | None:
    """Means and standard deviations of the columns, without gaps; None for a table with other
    columns than numbers.
    """
    try:
        table = np.ma.masked_invalid(np.asarray(X, dtype=np.float64))
    except (TypeError, ValueError):
        return None
    mean = np.ma.average(table, axis=0, weights=weights)
    spread = np.ma.sqrt(np.ma.average((table - mean) ** 2, axis=0, weights=weights))
    shift, scale = (
        torch.from_numpy(np.ma.filled(part, 0.0).astype(np.float64)) for part in (mean, spread)
    )
    return Scaling(shift, torch.where(scale > 0, scale, torch.ones_like(scale)))
