"""Reads targets, and refuses those that no estimator can take."""

from __future__ import annotations

from datetime import date, time, timedelta
from typing import Any

import numpy as np
from sklearn.utils import assert_all_finite, check_array
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from ssla._checks import refuse_masked
from ssla.tables.columns.frames import is_gap

SMALLEST_TARGET, LARGEST_TARGET = 1e-150, 1e150  # their squares are normal numbers
# The dates of pandas are subclasses of these, except its periods.
DATES = (date, time, timedelta, np.datetime64, np.timedelta64)


def refuse_masked_target(y: Any) -> None:
    """Raise ValueError for targets with masked values."""
    refuse_masked("The target y", y)


def refuse_masked_or_dates(y: Any) -> None:
    """Raise ValueError for targets with masked values, and TypeError for dates and durations.

    Dates, times and durations would be read as whole numbers in a unit that depends on the library,
    such as nanoseconds since 1970. Strings are accepted here, because scikit-learn refuses them.
    """
    refuse_masked_target(y)
    values = np.asarray(y)
    type_of_dates: Any = values.dtype if values.dtype.kind in "mM" else None

    # The cells of an array of objects are examined up to the first date.
    if values.dtype == object:
        names = (type(cell).__name__ for cell in values.ravel() if _is_date(cell))
        type_of_dates = next(names, None)
    if type_of_dates is not None:
        raise TypeError(
            f"The target y must be numbers, but holds dates, times or durations ({type_of_dates}). "
            "Give a number in a unit of your choice, for example the days since a date: "
            "(y - y.min()) / np.timedelta64(1, 'D')."
        )


def _is_date(cell: Any) -> bool:
    """Return whether a cell is a date, a time or a duration of Python, NumPy or pandas."""
    return isinstance(cell, DATES) or type(cell).__name__ == "Period"


def check_target_size(y: np.ndarray) -> None:
    """Raise ValueError for targets (n,) or (n, D) that are too large or too small.

    In double precision their variance would be infinite or zero.
    """
    largest = np.atleast_1d(np.abs(y).max(0))
    wrong = largest[(largest > LARGEST_TARGET) | (largest < SMALLEST_TARGET)]
    if wrong.size:
        raise ValueError(
            f"The target y must have values between {SMALLEST_TARGET:g} and {LARGEST_TARGET:g} in "
            f"size, but its largest is {wrong.flat[0]:.3g}: its variance would be zero or infinite "
            "in double precision. Give y in another unit."
        )


def check_labels_known(y: Any) -> None:
    """Raise ValueError where labels (n,) are missing, with their number and the first row.

    Estimators call it before scikit-learn's checks, which compare the labels and would fail with
    another error. A y that is None is accepted, because these checks refuse it.
    """
    if y is None:
        return
    labels = np.atleast_1d(np.asarray(y))
    if labels.dtype != object:
        return
    missing = np.flatnonzero([is_gap(label) for label in labels.ravel()])
    if len(missing):
        raise ValueError(
            f"{len(missing)} labels of y are missing (first: row {missing[0]}). Leave out these "
            "rows."
        )


def read_numeric_target(y: Any) -> np.ndarray:
    """Return one target of numbers (n,) in float64.

    Raises ValueError for a target that is missing, masked, not finite or of several columns, and
    TypeError for dates.
    """
    _check_target_given(y)
    refuse_masked_or_dates(y)
    y = check_array(y, ensure_2d=False, dtype=None, input_name="y", ensure_min_samples=2)
    if y.ndim == 2 and y.shape[1] > 1:
        raise ValueError(
            f"y must be one target, but has {y.shape[1]} columns. Fit one estimator for each."
        )
    return np.array(column_or_1d(y, warn=True), dtype=np.float64)


def read_labels(y: Any) -> np.ndarray:
    """Return the labels of classes (n,), of any type.

    Raises ValueError for labels that are None, NaN or masked, for fractional numbers, and for
    several columns.
    """
    _check_target_given(y)
    refuse_masked_target(y)
    check_labels_known(y)
    assert_all_finite(y, input_name="y")
    check_classification_targets(y)
    labels: np.ndarray = column_or_1d(y, warn=True)
    return labels


def _check_target_given(y: Any) -> None:
    """Raise ValueError where y is None, with the text of scikit-learn's own error."""
    if y is None:
        raise ValueError("This estimator requires y to be passed, but the target y is None.")
