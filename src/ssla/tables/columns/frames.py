"""Data frames of pandas and polars, and arrays, as tables.

Neither library is imported here: a frame is recognised by its class.

A column with a type keeps it: numbers, booleans, dates and times, durations (as days), categories
(as texts). Columns of texts or of objects are interpreted like those of a CSV file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from ssla.tables.columns.kinds import (
    BOOLEAN,
    DATE,
    NUMBER,
    SECONDS,
    TEXT,
    Column,
    TableError,
    is_missing,
    text_of_cell,
)
from ssla.tables.columns.reading import Table

MICROSECONDS = SECONDS * 1_000_000  # of a day
PANDAS_GAPS = ("NAType", "NaTType")  # the classes of pandas.NA and pandas.NaT
SOURCE = Path("X")  # what errors call the table


def is_gap(cell: Any) -> bool:
    """Return whether a value is None, NaN, pandas.NA or pandas.NaT. A text such as "NA" is not a
    gap here, but a label.
    """
    return cell is None or type(cell).__name__ in PANDAS_GAPS or bool(cell != cell)


def replace_masked(values: Any) -> Any:
    """Return a masked array with gaps (NaN, NaT or None) in place of its masked cells; anything
    else as it is.
    """
    if not isinstance(values, np.ma.MaskedArray):
        return values
    mask = np.ma.getmaskarray(values)
    data = np.ma.getdata(values)
    if not mask.any():
        return data
    if data.dtype.kind in "biuf":
        return np.where(mask, np.nan, data.astype(np.float64))
    if data.dtype.kind in "mM":
        return np.where(mask, np.array("NaT", dtype=data.dtype), data)
    cells = np.array(data, dtype=object)
    cells[mask] = None
    return cells


def is_frame(X: Any) -> bool:
    """Return whether X is a data frame of pandas or polars."""
    return _is_frame_of("pandas", X) or _is_frame_of("polars", X)


def has_only_numbers(frame: Any) -> bool:
    """Return whether all columns of a data frame are numbers or booleans by their type. They may
    be NaN.
    """
    if _is_frame_of("pandas", frame):
        return all(getattr(dtype, "kind", "O") in "biufc" for dtype in frame.dtypes)
    return all(dtype.is_numeric() or str(dtype) == "Boolean" for dtype in frame.dtypes)


def table_of(X: Any, names: Sequence[str]) -> Table:
    """Return the table of a data frame, or of an array (n, d). names: of the d columns, in their
    order.

    Raises TableError for a name that occurs twice, and TypeError for cells that are lists, dicts or
    other objects.
    """
    # The count of each name is quadratic in the columns, so it is taken only where one is repeated.
    if len(set(names)) < len(names):
        first = min(name for name in names if list(names).count(name) > 1)
        raise TableError(f"X has several columns named {first!r}. Rename or remove all but one.")
    if _is_frame_of("pandas", X):
        columns: Iterable[Any] = (_read_pandas(name, X.iloc[:, i]) for i, name in enumerate(names))
    elif _is_frame_of("polars", X):
        columns = (_read_polars(name, X.to_series(i)) for i, name in enumerate(names))
    else:
        columns = (_read_array(name, X[:, i]) for i, name in enumerate(names))
    return Table(SOURCE, dict(zip(names, columns, strict=True)), len(X), indexed=False)


def _is_frame_of(library: str, X: Any) -> bool:
    """Return whether X is a data frame of this library, which need not be installed."""
    module = sys.modules.get(library)
    return module is not None and isinstance(X, getattr(module, "DataFrame", ()))


def _read_pandas(name: str, series: Any) -> Column | list[Any]:
    """Return the column of a pandas series, or its cells (n) where their type does not decide the
    kind.
    """
    kind = getattr(series.dtype, "kind", "O")
    if hasattr(series.dtype, "categories"):
        categories = series.dtype.categories.tolist()
        return _read_categories(name, categories, series.cat.codes.to_numpy())
    if kind in "biuf":
        numbers = series.to_numpy(dtype=np.float64, na_value=np.nan)
        return Column(name, BOOLEAN if kind == "b" else NUMBER, numbers)
    if kind in "mM":
        # Moments with a time zone are converted to UTC.
        has_zone = kind == "M" and getattr(series.dt, "tz", None) is not None
        moments = series.dt.tz_convert(None) if has_zone else series
        unit = "datetime64[us]" if kind == "M" else "timedelta64[us]"
        return _read_moments(name, moments.to_numpy(dtype=unit))
    cells = series.to_numpy(dtype=object).tolist()
    return _read_objects(
        name, [None if gap else cell for cell, gap in zip(cells, series.isna(), strict=True)]
    )


def _read_polars(name: str, series: Any) -> Column | list[Any]:
    """Return the column of a polars series, or its cells (n) where their type does not decide the
    kind.
    """
    dtype = str(series.dtype).partition("(")[0]
    if dtype == "Boolean" or series.dtype.is_numeric():
        kind = BOOLEAN if dtype == "Boolean" else NUMBER
        return Column(name, kind, _floats_of(series.cast(sys.modules["polars"].Float64)))
    if dtype in ("Date", "Datetime"):
        return Column(name, DATE, _floats_of(series.dt.epoch("us")) / MICROSECONDS)
    if dtype == "Duration":
        return Column(name, NUMBER, _floats_of(series.dt.total_microseconds()) / MICROSECONDS)
    if dtype in ("Categorical", "Enum"):
        return _read_categories(name, series.to_list(), np.arange(len(series)))
    return _read_objects(name, series.to_list())


def _read_array(name: str, values: np.ndarray) -> Column | list[Any]:
    """Return the column of an array (n,), or its cells (n) where their type does not decide the
    kind.
    """
    kind = values.dtype.kind
    if kind in "biuf":
        return Column(name, BOOLEAN if kind == "b" else NUMBER, values.astype(np.float64))
    if kind in "mM":
        return _read_moments(name, values.astype(f"{kind}8[us]"))
    return _read_objects(name, values.tolist())


def _floats_of(series: Any) -> np.ndarray:
    """Return a polars series as floats (n,), NaN where it is null."""
    return np.asarray(series.to_numpy(), dtype=np.float64)


def _read_moments(name: str, moments: np.ndarray) -> Column:
    """Return the column of dates (as days since 1970) or durations (as days), given in microseconds
    (n,). NaT is a gap.
    """
    days = np.where(np.isnat(moments), np.nan, moments.astype(np.int64) / MICROSECONDS)
    return Column(name, DATE if moments.dtype.kind == "M" else NUMBER, days)


def _read_categories(name: str, levels: Sequence[Any], codes: np.ndarray) -> Column:
    """Return the column of texts of the levels. codes (n,): the level of each row, −1 for a gap.

    A number is written in one way: 1.0 as 1.
    """
    cells = [_python_value(level) for level in levels]
    texts = [None if is_missing(cell) else text_of_cell(cell) for cell in cells]
    return Column(name, TEXT, np.array([*texts, None], dtype=object)[codes])


def _read_objects(name: str, cells: list[Any]) -> list[Any]:
    """Return the cells (n) as `interpret_cells` reads them.

    Raises TypeError for lists, dicts and other objects.
    """
    values = [_python_value(cell) for cell in cells]
    for row, value in enumerate(values):
        if value is not None and not isinstance(value, str | int | float | Decimal | date):
            raise TypeError(
                "A cell of the argument must be a string, a number, a boolean, a date or missing, "
                f"but row {row + 1} of column {name!r} is a {type(value).__name__}. Turn it into "
                "one of these, or leave the column out."
            )
    return values


def _python_value(cell: Any) -> Any:
    """Return a cell as a Python object: a whole number as int, None for a gap of pandas."""
    if isinstance(cell, np.generic):
        # Dates in nanoseconds would become integers.
        moment = cell.dtype.kind in "mM"
        cell = (cell.astype(f"{cell.dtype.kind}8[us]") if moment else cell).item()
    if type(cell).__name__ in PANDAS_GAPS:
        return None
    if isinstance(cell, bytes):
        return cell.decode("utf-8", "replace")
    return int(cell) if isinstance(cell, float) and cell.is_integer() else cell
