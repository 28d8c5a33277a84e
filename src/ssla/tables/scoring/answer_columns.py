"""A predictive as columns: what every row of an output table says."""

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
    """One array (N,) for each column.

    D targets: the name of a column of target d ends in _d, from 0.

    classes: the labels of the classes (C,); 0 … C − 1 if not given.  interval: other intervals than
    those of the predictive, for example conformal ones.
    """
    if p.kind == "class":
        columns = _classes(p, levels, classes)
    else:
        columns = _numbers(p, levels, interval or (lambda p, level: _array(p.interval(level))))
    columns["mass"] = _array(p.mass)
    return columns


def _classes(p: Any, levels: Sequence[float], classes: np.ndarray | None) -> Columns:
    probs = _array(p.probs)
    labels = np.arange(probs.shape[1]) if classes is None else classes
    texts = [str(label) for label in labels]
    columns = {"label": labels[p.mode.cpu().numpy()]} | {
        f"p({text})": probs[:, i] for i, text in enumerate(texts)
    }
    between = separator(texts)
    for level in levels:
        chosen, which = np.unique(p.interval(level).cpu().numpy(), axis=0, return_inverse=True)
        sets = [
            between.join(text for text, inside in zip(texts, row, strict=True) if inside)
            for row in chosen
        ]
        columns[f"set_{percent(level)}"] = np.array(sets, dtype=object)[which.reshape(-1)]
    return columns


def _numbers(
    p: Any, levels: Sequence[float], interval: Callable[[Any, float], np.ndarray]
) -> Columns:
    found = {"mean": _array(p.mean), "sd": _array(p.stddev)}
    for level in levels:
        ends = interval(p, level)
        found |= {f"lower_{percent(level)}": ends[..., 0], f"upper_{percent(level)}": ends[..., 1]}
    quantiles = _array(p.icdf(list(QUANTILES)))
    found |= {f"q{q:g}": quantiles[..., i] for i, q in enumerate(QUANTILES)}
    found["epistemic"] = np.sqrt(_array(p.epistemic))
    if p.kind != "vector":
        return found
    return {
        f"{name}_{d}": column for name, values in found.items() for d, column in enumerate(values.T)
    }


def separator(texts: Sequence[str]) -> str:
    """Of the labels in a set."""
    return next(
        (mark for mark in SEPARATORS if not any(mark in text for text in texts)), LAST_SEPARATOR
    )


def percent(level: float) -> str:
    """0.95 -> 95, 0.975 -> 97.5."""
    return f"{100 * level:.12g}"


def _array(values: Any) -> np.ndarray:
    array: np.ndarray = values.double().cpu().numpy()
    return array
