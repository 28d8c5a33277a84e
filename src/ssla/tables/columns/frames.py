"""Data frames of pandas and polars, and arrays, as tables.

Neither library is imported here: a frame is recognised by its class.

A column with a type keeps it: numbers, booleans, dates and times, durations (as days), categories
(as texts). Columns of texts or of objects are interpreted like those of a CSV file.

`dtype.kind` is NumPy's letter for a type: b booleans, i and u integers, f floats, c complex
numbers, m durations, M moments, O objects.
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
    convert_to_text,
    is_missing,
)
from ssla.tables.columns.reading import Table

MICROSECONDS = SECONDS * 1_000_000  # of a day
PANDAS_GAPS = ("NAType", "NaTType")  # the classes of pandas.NA and pandas.NaT
SOURCE = Path("X")  # what errors call the table


def is_gap(cell: Any) -> bool:
    """Return whether a value is None, NaN, pandas.NA or pandas.NaT.

    A text such as "NA" is not a gap here, but a label.
    """
    # Only NaN differs from itself.
    return cell is None or type(cell).__name__ in PANDAS_GAPS or bool(cell != cell)


def replace_masked(values: Any) -> Any:
    """Return a masked array as a plain array with gaps in place of its masked cells.

    The gaps are NaN for numbers and booleans, NaT for moments and durations, and None for other
    cells. A value that is not a masked array is returned unchanged.
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
    """Return whether the types of all columns of a data frame are numbers or booleans.

    The cells may be NaN.  frame: one of pandas or polars.
    """
    if _is_frame_of("pandas", frame):
        return all(getattr(dtype, "kind", "O") in "biufc" for dtype in frame.dtypes)
    return all(dtype.is_numeric() or str(dtype) == "Boolean" for dtype in frame.dtypes)


def make_table(X: Any, names: Sequence[str]) -> Table:
    """Return the table of a data frame of pandas or polars, or of an array (n, d).

    Raises TableError for a name that occurs twice, and TypeError for cells that are lists, dicts or
    other objects.

    names: the names of the d columns, in their order.
    """
    # The count of each name is quadratic in the columns, so it is taken only for a repeated name.
    if len(set(names)) < len(names):
        repeated = min(name for name in names if list(names).count(name) > 1)
        raise TableError(f"X has several columns named {repeated!r}. Rename or remove all but one.")
    if _is_frame_of("pandas", X):
        columns: Iterable[Any] = (_read_pandas(name, X.iloc[:, i]) for i, name in enumerate(names))
    elif _is_frame_of("polars", X):
        columns = (_read_polars(name, X.to_series(i)) for i, name in enumerate(names))
    else:
        columns = (_read_array(name, X[:, i]) for i, name in enumerate(names))

    # A frame holds its index apart from its columns, so no column of it is an index.
    return Table(SOURCE, dict(zip(names, columns, strict=True)), len(X), indexed=False)


def _is_frame_of(library: str, X: Any) -> bool:
    """Return whether X is a data frame of this library, which need not be installed."""
    module = sys.modules.get(library)
    return module is not None and isinstance(X, getattr(module, "DataFrame", ()))


def _read_pandas(name: str, series: Any) -> Column | list[Any]:
    """Return the column of a pandas series.

    Where the type of the cells does not decide the kind, the result is the list of the n cells.
    Raises TypeError for cells that are lists, dicts or other objects.
    """
    type_letter = getattr(series.dtype, "kind", "O")
    if hasattr(series.dtype, "categories"):
        categories = series.dtype.categories.tolist()
        return _read_categories(name, categories, series.cat.codes.to_numpy())
    if type_letter in "biuf":
        numbers = series.to_numpy(dtype=np.float64, na_value=np.nan)
        return Column(name, BOOLEAN if type_letter == "b" else NUMBER, numbers)
    if type_letter in "mM":
        # Moments with a time zone are converted to UTC.
        has_zone = type_letter == "M" and getattr(series.dt, "tz", None) is not None
        moments = series.dt.tz_convert(None) if has_zone else series
        unit = "datetime64[us]" if type_letter == "M" else "timedelta64[us]"
        return _read_moments(name, moments.to_numpy(dtype=unit))

    cells = series.to_numpy(dtype=object).tolist()
    cells = [None if gap else cell for cell, gap in zip(cells, series.isna(), strict=True)]
    return _read_objects(name, cells)


def _read_polars(name: str, series: Any) -> Column | list[Any]:
    """Return the column of a polars series.

    Where the type of the cells does not decide the kind, the result is the list of the n cells.
    Raises TypeError for cells that are lists, dicts or other objects.
    """
    # A type is written with its parameters, for example Datetime(time_unit='us').
    type_name = str(series.dtype).partition("(")[0]
    if type_name == "Boolean" or series.dtype.is_numeric():
        column_kind = BOOLEAN if type_name == "Boolean" else NUMBER
        return Column(name, column_kind, _to_floats(series.cast(sys.modules["polars"].Float64)))
    if type_name in ("Date", "Datetime"):
        return Column(name, DATE, _to_floats(series.dt.epoch("us")) / MICROSECONDS)
    if type_name == "Duration":
        return Column(name, NUMBER, _to_floats(series.dt.total_microseconds()) / MICROSECONDS)
    if type_name in ("Categorical", "Enum"):
        # The text of each row is a level, so row i has the level i.
        return _read_categories(name, series.to_list(), np.arange(len(series)))

    return _read_objects(name, series.to_list())


def _read_array(name: str, values: np.ndarray) -> Column | list[Any]:
    """Return the column of an array (n,).

    Where the type of the cells does not decide the kind, the result is the list of the n cells.
    Raises TypeError for cells that are lists, dicts or other objects.
    """
    type_letter = values.dtype.kind
    if type_letter in "biuf":
        column_kind = BOOLEAN if type_letter == "b" else NUMBER
        return Column(name, column_kind, values.astype(np.float64))
    if type_letter in "mM":
        # The types M8 and m8 are datetime64 and timedelta64; [us] means microseconds.
        return _read_moments(name, values.astype(f"{type_letter}8[us]"))
    return _read_objects(name, values.tolist())


def _to_floats(series: Any) -> np.ndarray:
    """Return a polars series as floats (n,), NaN where it is null."""
    return np.asarray(series.to_numpy(), dtype=np.float64)


def _read_moments(name: str, moments: np.ndarray) -> Column:
    """Return the column of moments or durations (n,), which NumPy holds in microseconds.

    Moments become dates, as days since 1970. Durations become numbers of days. NaT is a gap.
    """
    days = np.where(np.isnat(moments), np.nan, moments.astype(np.int64) / MICROSECONDS)
    return Column(name, DATE if moments.dtype.kind == "M" else NUMBER, days)


def _read_categories(name: str, levels: Sequence[Any], codes: np.ndarray) -> Column:
    """Return a column of texts with the level of each row.

    codes (n,): the position of each row's level in `levels`, −1 for a gap. A level that is a whole
    number has the same text as an integer: 1.0 becomes "1".
    """
    cells = [_to_python_value(level) for level in levels]
    texts = [None if is_missing(cell) else convert_to_text(cell) for cell in cells]
    # The code −1 selects the last entry, which is the gap.
    return Column(name, TEXT, np.array([*texts, None], dtype=object)[codes])


def _read_objects(name: str, cells: list[Any]) -> list[Any]:
    """Return the cells (n) as Python objects that `interpret_cells` can read.

    Raises TypeError for lists, dicts and other objects.  name: the column, for the error.
    """
    values = [_to_python_value(cell) for cell in cells]
    for row, value in enumerate(values):
        if value is not None and not isinstance(value, str | int | float | Decimal | date):
            raise TypeError(
                "A cell of the argument must be a string, a number, a boolean, a date or missing, "
                f"but row {row + 1} of column {name!r} is a {type(value).__name__}. Turn it into "
                "one of these, or leave the column out."
            )
    return values


def _to_python_value(cell: Any) -> Any:
    """Return a cell as a Python object.

    NumPy scalars and bytes become Python values, whole floats become int, and the gaps of pandas
    become None.
    """
    if isinstance(cell, np.generic):
        # `item` makes integers of dates in nanoseconds, but dates of those in microseconds.
        if cell.dtype.kind in "mM":
            cell = cell.astype(f"{cell.dtype.kind}8[us]")
        cell = cell.item()
    if type(cell).__name__ in PANDAS_GAPS:
        return None
    if isinstance(cell, bytes):
        return cell.decode("utf-8", "replace")
    return int(cell) if isinstance(cell, float) and cell.is_integer() else cell
