"""Split conformal prediction by MAPIE around any point prediction: intervals only, no density."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin

from ssla_paper.peers import library

INSTALL = "mapie"


class _Fitted(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Wraps a function of rows as a fitted estimator."""

    def __init__(self, function: Callable[[np.ndarray], np.ndarray]) -> None:
        self.function = function

    def fit(self, X: Any, y: Any = None) -> _Fitted:
        return self

    def predict(self, X: Any) -> np.ndarray:
        return np.asarray(self.function(np.asarray(X)), dtype=np.float64)

    def __sklearn_is_fitted__(self) -> bool:
        return True


def split_conformal(
    function: Callable[[np.ndarray], np.ndarray],
    x: np.ndarray,
    y: np.ndarray,
    new: np.ndarray,
    levels: Sequence[float] = (0.95, 0.75, 0.5),
) -> dict[float, np.ndarray]:
    """Intervals f(new) ± q by level, each (N, 2), infinite if there are too few rows; x, y must not
    be training rows.

    q is the ⌈(n + 1)·level⌉-th smallest |y − f(x)|, so a row exchangeable with these is covered
    with at least that probability.
    """
    peer = library("mapie.regression", INSTALL)
    enough = [level for level in levels if math.ceil((len(y) + 1) * level - 1e-9) <= len(y)]
    found = {level: np.tile([-np.inf, np.inf], (len(new), 1)) for level in levels}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peer.SplitConformalRegressor(
            _Fitted(function), confidence_level=enough or [0.5], prefit=True
        )
        if enough:
            wrapped.conformalize(np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64))
            _, ends = wrapped.predict_interval(np.asarray(new, dtype=np.float64))
            found |= {level: ends[:, :, i] for i, level in enumerate(enough)}
    return found


def interval_scores(intervals: dict[float, np.ndarray], y: np.ndarray) -> dict[str, float]:
    """Coverage in per cent and mean width by level."""
    found = {}
    for level, ends in intervals.items():
        name = round(100 * level)
        found[f"cover{name}"] = 100 * float(np.mean((y >= ends[:, 0]) & (y <= ends[:, 1])))
        found[f"width{name}"] = float(np.mean(ends[:, 1] - ends[:, 0]))
    return found
