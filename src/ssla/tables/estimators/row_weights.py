"""Reads row weights, and gives them a scale by what they mean: frequencies or relative weights.

A row whose frequency is 2 equals that row twice, so frequencies sum to the number of observations.
Of relative weights only the ratios count. Weights that sum to less than half of the rows cannot be
frequencies: 1/n for each row would stand for a single observation. Rows of weight 0 do not count as
rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from sklearn.utils.validation import _check_sample_weight

from ssla._checks import check_name, refuse_masked, warn
from ssla.fitting.watching import LEAST_SHARE

AUTO, FREQUENCIES, RELATIVE = "auto", "frequencies", "relative"
MEANINGS = (AUTO, FREQUENCIES, RELATIVE)


def read_row_weights(sample_weight: Any, rows: int) -> np.ndarray:
    """Return the weights of n rows (n,) in float64: ones if sample_weight is None.

    One number is the weight of every row. Raises ValueError for other shapes than () and (n,), and
    for weights that are masked, negative or no finite numbers.
    """
    refuse_masked("sample_weight", sample_weight)
    array = np.asarray(1.0 if sample_weight is None else sample_weight)
    if array.shape not in ((), (rows,)):
        raise ValueError(
            f"sample_weight must have shape ({rows},), one weight for each row, but has "
            f"{array.shape}."
        )

    # Booleans, integers, floats, and objects, which scikit-learn checks.
    if array.dtype.kind not in "biufO":
        raise ValueError(
            f"sample_weight must be numbers, one for each row, but holds {array.dtype}."
        )

    # scikit-learn takes only the number of rows from the array in the second place.
    weights: np.ndarray = _check_sample_weight(
        sample_weight, np.empty((rows, 1)), dtype=np.float64, ensure_non_negative=True
    )
    return weights


def find_weighted_rows(weights: np.ndarray) -> np.ndarray:
    """Return which of n rows with weights (n,) have a positive weight (n,) bool.

    Raises ValueError for fewer than two such rows.
    """
    present = weights > 0
    if int(present.sum()) < 2:
        raise ValueError(
            "Fitting needs at least two rows with a positive weight, but "
            f"n_samples={int(present.sum())}."
        )
    return present


def choose_weight_factor(
    weights: np.ndarray, meaning: str, subject: str = "sample_weight"
) -> float:
    """Return the factor that gives row weights (n,) their scale.

    The factor is 1 for frequencies, and one over the mean of the positive weights for relative
    weights. Raises ValueError for an unknown meaning.

    meaning: one of MEANINGS. "auto" means relative weights, with a warning, if they cannot be
    frequencies, and otherwise frequencies.  subject: what the warning calls the weights.
    """
    check_name("row_weights", meaning, MEANINGS)
    total = float(weights.sum())
    rows = int((weights > 0).sum())
    if meaning == FREQUENCIES or not rows:
        return 1.0
    if meaning == AUTO:
        if total >= LEAST_SHARE * rows:
            return 1.0
        warn(
            f"{subject} sums to {total:.4g}, less than half of the {rows:,} rows with a positive "
            "weight, so these are not frequencies (a weight of 2 is a row twice). The weights "
            f"were multiplied by {rows / total:.4g}, to a mean of one. Choose by "
            "row_weights='relative' or row_weights='frequencies'."
        )

    return rows / total


@contextmanager
def without_weight_warning() -> Iterator[None]:
    """Suppress the warning of `ssla.fit` about small row weights while the block runs.

    The estimator has warned of them itself, where this is needed.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Row weights sum to", UserWarning)
        yield
