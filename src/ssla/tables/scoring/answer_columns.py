"""A predictive as the columns of an output table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

QUANTILES = (0.025, 0.05, 0.25, 0.5, 0.75, 0.95, 0.975)
SEPARATORS = "|;,/&+~^"  # of the labels in a set: the first that occurs in no label
LAST_SEPARATOR = "\x1f"  # the "unit separator" of ASCII

Columns = dict[str, np.ndarray]


def make_predictive_columns(
    predictive: Any,
    levels: Sequence[float],
    classes: np.ndarray | None = None,
    interval: Callable[[Any, float], np.ndarray] | None = None,
) -> Columns:
    """Return the columns of the predictive of N rows: for each name an array (N,).

    If there are D targets, the name of a column of target d = 0 … D − 1 ends in _d.

    levels: probabilities of the intervals, or of the sets of classes.  classes: the labels of the
    classes (C,); None: 0 … C − 1.  interval: a function of predictive and level that returns ends
    (N, 2) or (N, D, 2), for example of conformal intervals; None: the predictive's own intervals.
    """
    if predictive.kind == "class":
        columns = _make_class_columns(predictive, levels, classes)
    else:
        columns = _make_number_columns(predictive, levels, interval or _compute_interval)
    columns["mass"] = _to_array(predictive.mass)
    return columns


def _compute_interval(predictive: Any, level: float) -> np.ndarray:
    """Return the predictive's own intervals (N, 2), or (N, D, 2) for D targets."""
    return _to_array(predictive.interval(level))


def _make_class_columns(
    predictive: Any, levels: Sequence[float], classes: np.ndarray | None
) -> Columns:
    """Return the most probable label, the probability of each class, and a set for each level.

    Each column is (N,).  classes: as in `make_predictive_columns`.
    """
    probs = _to_array(predictive.probs)
    labels = np.arange(probs.shape[1]) if classes is None else classes
    texts = [str(label) for label in labels]
    columns = {"label": labels[predictive.mode.cpu().numpy()]} | {
        f"p({text})": probs[:, i] for i, text in enumerate(texts)
    }
    separator = choose_separator(texts)
    for level in levels:
        # Few different sets occur, so each text is joined once.
        is_member = predictive.interval(level).cpu().numpy()
        different, set_of_row = np.unique(is_member, axis=0, return_inverse=True)
        sets = [
            separator.join(text for text, keep in zip(texts, row, strict=True) if keep)
            for row in different
        ]
        set_of_row = set_of_row.reshape(-1)  # its shape depends on the version of NumPy
        columns[f"set_{format_percent(level)}"] = np.array(sets, dtype=object)[set_of_row]

    return columns


def _make_number_columns(
    predictive: Any, levels: Sequence[float], interval: Callable[[Any, float], np.ndarray]
) -> Columns:
    """Return moments, intervals and quantiles of one or several targets, as columns (N,).

    interval: a function of predictive and level that returns ends (N, 2) or (N, D, 2).
    """
    columns = {"mean": _to_array(predictive.mean), "sd": _to_array(predictive.stddev)}
    for level in levels:
        ends = interval(predictive, level)
        columns[f"lower_{format_percent(level)}"] = ends[..., 0]
        columns[f"upper_{format_percent(level)}"] = ends[..., 1]

    quantiles = _to_array(predictive.icdf(list(QUANTILES)))
    columns |= {f"q{q:g}": quantiles[..., i] for i, q in enumerate(QUANTILES)}
    columns["epistemic"] = np.sqrt(_to_array(predictive.epistemic))
    if predictive.kind != "vector":
        return columns

    # Of several targets, the arrays are (N, D) until here.
    split: Columns = {}
    for name, values in columns.items():
        for d, column in enumerate(values.T):
            split[f"{name}_{d}"] = column

    return split


def choose_separator(texts: Sequence[str]) -> str:
    """Return the text to write between the labels of a set.

    It is the first of SEPARATORS that occurs in no label, or LAST_SEPARATOR if all occur.

    texts: the labels of all classes.
    """
    return next(
        (mark for mark in SEPARATORS if not any(mark in text for text in texts)), LAST_SEPARATOR
    )


def format_percent(level: float) -> str:
    """Return a level in per cent as text: 0.95 as 95, 0.975 as 97.5."""
    # Twelve digits, because 100 · 0.29 is not exactly 29.
    return f"{100 * level:.12g}"


def _to_array(values: Any) -> np.ndarray:
    """Return a tensor of any shape as a float64 array of the same shape."""
    array: np.ndarray = values.double().cpu().numpy()
    return array
