"""Targets that no estimator can take: masked values, and dates in place of numbers."""

from __future__ import annotations

from datetime import date, time, timedelta
from typing import Any

import numpy as np

from ssla._checks import refuse_masked

DATES = (
    date,
    time,
    timedelta,
    np.datetime64,
    np.timedelta64,
)  # those of pandas are subclasses, but for its periods


def check_given(y: Any) -> None:
    """Raise ValueError for targets with masked values."""
    refuse_masked("The target y", y)


def check_numeric(y: Any) -> None:
    """Raise ValueError for targets with masked values, and TypeError for dates, times and
    durations.

    They would be read as whole numbers in a unit that depends on the library, such as nanoseconds
    since 1970.
    """
    check_given(y)
    values = np.asarray(y)
    found: Any = values.dtype if values.dtype.kind in "mM" else None
    if values.dtype == object:
        found = next((type(cell).__name__ for cell in values.ravel() if _is_date(cell)), None)
    if found is not None:
        raise TypeError(
            f"The target y must be numbers, but holds dates, times or durations ({found}). Give a "
            "number in a unit of your choice, for example the days since a date: (y - y.min()) / "
            "np.timedelta64(1, 'D')."
        )


def _is_date(cell: Any) -> bool:
    return isinstance(cell, DATES) or type(cell).__name__ == "Period"
