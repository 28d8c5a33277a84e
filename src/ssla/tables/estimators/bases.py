"""Functions that check, fit and call models of other libraries, for `wrapped`.

A *base* is the model that the user gives, with the interface of scikit-learn. It is never changed:
clones of it are fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import check_is_fitted, has_fit_parameter

from ssla.tables.networks.scaling import Scaling


def is_fitted(base: Any) -> bool:
    """Return whether a model of any library is fitted.

    The answer is False for an object that is not an estimator of scikit-learn's interface.
    """
    # CatBoost has a method for it, and not the attributes that scikit-learn looks for.
    if callable(getattr(base, "is_fitted", None)):
        return bool(base.is_fitted())
    try:
        check_is_fitted(base)
    except (NotFittedError, TypeError):
        return False
    return True


def check_methods(name: str, base: Any, methods: Sequence[str]) -> None:
    """Raise TypeError for a base that lacks any of these methods.

    name: the argument that held the base, for the error.
    """
    missing = [method for method in methods if not hasattr(base, method)]
    if missing:
        raise TypeError(
            f"{name} must have the methods {' and '.join(methods)}, but {type(base).__name__} has "
            f"no {missing[0]}."
        )


def fit_clone(
    base: Any, X: Any, y: np.ndarray, weights: np.ndarray | None, rows: Any, seeds: Any
) -> Any:
    """Return a clone of the base, fitted on some rows of X (n, d) and y (n,).

    weights (n,): row weights; None: the base is fitted without any.  rows (m,): the positions of
    the rows to fit on; None: all rows.  seeds: a NumPy RandomState that draws every random_state of
    the base that is None. Raises ValueError for weights that the base does not take.
    """
    model = clone(base)

    # The parts of a pipeline have parameters of their own, such as "forest__random_state".
    names = [
        name
        for name, value in model.get_params().items()
        if name.split("__")[-1] == "random_state" and value is None
    ]

    # In the order of their names, so that the same seeds give the same model.
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
        X = _safe_indexing(X, rows)
        y = y[rows]

    return model.fit(X, y, **options)


def predict_numbers(model: Any, X: Any) -> np.ndarray:
    """Return the predictions of a regressor at X (N, d): (N,), or (N, D) for several targets."""
    predictions = np.asarray(model.predict(X), dtype=np.float64)
    one_column = predictions.ndim == 2 and predictions.shape[1] == 1
    return predictions.reshape(-1) if one_column else predictions


def fit_column_scaling(X: Any, weights: np.ndarray) -> Scaling | None:
    """Return the weighted mean and standard deviation of each column of X (n, d) as a scaling.

    weights (n,) are row weights. Gaps are ignored. A constant column has the scale 1, and a column
    of gaps alone has mean 0 and scale 1. The result is None for a table with other columns than
    numbers.
    """
    try:
        table = np.ma.masked_invalid(np.asarray(X, dtype=np.float64))
    except (TypeError, ValueError):
        return None

    mean = np.ma.average(table, axis=0, weights=weights)
    spread = np.ma.sqrt(np.ma.average((table - mean) ** 2, axis=0, weights=weights))

    # The moments of a column without any value are masked, and become 0.
    shift, scale = (
        torch.from_numpy(np.ma.filled(moment, 0.0).astype(np.float64)) for moment in (mean, spread)
    )
    return Scaling(shift, torch.where(scale > 0, scale, torch.ones_like(scale)))
