"""A predictive as the columns of an output table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

QUANTILES = (0.025, 0.05, 0.25, 0.5, 0.75, 0.95, 0.975)
SEPARATORS = "|;,/&+~^"  # of the labels in a set: the first that occurs in no label
LAST_SEPARATOR = "\x1f"  # the "unit separator" of ASCII

Columns = dict[str, np.ndarray]


def columns_of(
    p: Any,
    levels: Sequence[float],
    classes: np.ndarray | None = None,
    interval: Callable[[Any, float], np.ndarray] | None = None,
) -> Columns:
    """Return the columns of a predictive: for each name an array (N,).

    D targets: the name of a column of target d ends in _d, from 0.

    classes: the labels of the classes (C,); 0 … C − 1 if not given.  interval: other intervals than
    those of the predictive, for example conformal ones.
    """
    if p.kind == "class":
        columns = _class_columns(p, levels, classes)
    else:
        columns = _number_columns(
            p, levels, interval or (lambda p, level: _to_array(p.interval(level)))
        )
    columns["mass"] = _to_array(p.mass)
    return columns


def _class_columns(p: Any, levels: Sequence[float], classes: np.ndarray | None) -> Columns:
    """Return label, probabilities, and a set for each level. classes: labels (C,)."""
    probs = _to_array(p.probs)
    labels = np.arange(probs.shape[1]) if classes is None else classes
    texts = [str(label) for label in labels]
    columns = {"label": labels[p.mode.cpu().numpy()]} | {
        f"p({text})": probs[:, i] for i, text in enumerate(texts)
    }
    separator = choose_separator(texts)
    for level in levels:
        # Few different sets occur, so each text is joined once.
        is_member = p.interval(level).cpu().numpy()
        different, index = np.unique(is_member, axis=0, return_inverse=True)
        sets = [
            separator.join(text for text, inside in zip(texts, row, strict=True) if inside)
            for row in different
        ]
        columns[f"set_{format_percent(level)}"] = np.array(sets, dtype=object)[index.reshape(-1)]
    return columns


def _number_columns(
    p: Any, levels: Sequence[float], interval: Callable[[Any, float], np.ndarray]
) -> Columns:
    """Return moments, intervals and quantiles of one or several targets.

    interval: predictive and level -> ends (N, 2) or (N, D, 2).
    """
    columns = {"mean": _to_array(p.mean), "sd": _to_array(p.stddev)}
    for level in levels:
        ends = interval(p, level)
        columns[f"lower_{format_percent(level)}"] = ends[..., 0]
        columns[f"upper_{format_percent(level)}"] = ends[..., 1]
    quantiles = _to_array(p.icdf(list(QUANTILES)))
    columns |= {f"q{q:g}": quantiles[..., i] for i, q in enumerate(QUANTILES)}
    columns["epistemic"] = np.sqrt(_to_array(p.epistemic))
    if p.kind != "vector":
        return columns
    return {
        f"{name}_{d}": column
        for name, values in columns.items()
        for d, column in enumerate(values.T)
    }


def choose_separator(texts: Sequence[str]) -> str:
    """Return the text between the labels of a set: the first that occurs in no label."""
    return next(
        (mark for mark in SEPARATORS if not any(mark in text for text in texts)), LAST_SEPARATOR
    )


def format_percent(level: float) -> str:
    """Return a level in per cent: 0.95 as 95, 0.975 as 97.5."""
    return f"{100 * level:.12g}"


def _to_array(values: Any) -> np.ndarray:
    """Return a tensor of any shape as a float64 array."""
    array: np.ndarray = values.double().cpu().numpy()
    return array
