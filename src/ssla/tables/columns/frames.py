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
    text_of,
)
from ssla.tables.columns.reading import Table

MICROSECONDS = SECONDS * 1_000_000
NOTHING = ("NAType", "NaTType")  # pandas.NA and pandas.NaT
SOURCE = Path("X")  # what errors call the table


def is_gap(cell: Any) -> bool:
    """Whether a value is None, NaN, pandas.NA or pandas.NaT; a text such as "NA" is not a gap
    here, but a label.
    """
    return cell is None or type(cell).__name__ in NOTHING or bool(cell != cell)


def with_gaps(values: Any) -> Any:
    """A masked array with gaps (NaN, NaT or None) in place of its masked cells; all else as it
    is.
    """
    if not isinstance(values, np.ma.MaskedArray):
        return values
    mask, kind = np.ma.getmaskarray(values), values.dtype.kind
    if not mask.any():
        return np.ma.getdata(values)
    if kind in "biuf":
        return np.where(mask, np.nan, np.ma.getdata(values).astype(np.float64))
    if kind in "mM":
        return np.where(mask, np.array("NaT", dtype=values.dtype), np.ma.getdata(values))
    cells = np.array(np.ma.getdata(values), dtype=object)
    cells[mask] = None
    return cells


def is_frame(X: Any) -> bool:
    """Whether X is a data frame of pandas or polars."""
    return _is(X, "pandas") or _is(X, "polars")


def is_plain(X: Any) -> bool:
    """Whether all columns of a frame, or all cells of an array, are numbers or booleans by
    their type. (They may be NaN.)
    """
    if _is(X, "pandas"):
        return all(getattr(dtype, "kind", "O") in "biufc" for dtype in X.dtypes)
    if _is(X, "polars"):
        return all(dtype.is_numeric() or str(dtype) == "Boolean" for dtype in X.dtypes)
    return np.asarray(X).dtype.kind in "biufc"


def table_of(X: Any, names: Sequence[str]) -> Table:
    """The table of a frame, or of an array (n, d). names: of the d columns, in their order."""
    twice = (
        {name for name in names if list(names).count(name) > 1}
        if len(set(names)) < len(names)
        else set()
    )
    if twice:
        raise TableError(
            f"X has several columns named {min(twice)!r}. Rename or remove all but one."
        )
    if _is(X, "pandas"):
        parts: Iterable[Any] = (_of_pandas(name, X.iloc[:, i]) for i, name in enumerate(names))
    elif _is(X, "polars"):
        parts = (_of_polars(name, X.to_series(i)) for i, name in enumerate(names))
    else:
        parts = (_of_array(name, X[:, i]) for i, name in enumerate(names))
    return Table(SOURCE, dict(zip(names, parts, strict=True)), len(X), indexed=False)


def _is(X: Any, library: str) -> bool:
    module = sys.modules.get(library)
    return module is not None and isinstance(X, getattr(module, "DataFrame", ()))


def _of_pandas(name: str, series: Any) -> Column | list[Any]:
    kind = getattr(series.dtype, "kind", "O")
    if hasattr(series.dtype, "categories"):
        return _categories(name, series.dtype.categories.tolist(), series.cat.codes.to_numpy())
    if kind in "biuf":
        return Column(
            name,
            BOOLEAN if kind == "b" else NUMBER,
            series.to_numpy(dtype=np.float64, na_value=np.nan),
        )
    if kind == "M":
        moments = (
            series.dt.tz_convert(None) if getattr(series.dt, "tz", None) is not None else series
        )
        return Column(name, DATE, _days(moments.to_numpy(dtype="datetime64[us]")))
    if kind == "m":
        return Column(name, NUMBER, _days(series.to_numpy(dtype="timedelta64[us]")))
    cells = series.to_numpy(dtype=object).tolist()
    return _cells(
        name, [None if gap else cell for cell, gap in zip(cells, series.isna(), strict=True)]
    )


def _of_polars(name: str, series: Any) -> Column | list[Any]:
    dtype = str(series.dtype).partition("(")[0]
    if dtype == "Boolean" or series.dtype.is_numeric():
        kind = BOOLEAN if dtype == "Boolean" else NUMBER
        return Column(name, kind, _numbers(series.cast(sys.modules["polars"].Float64)))
    if dtype in ("Date", "Datetime"):
        return Column(name, DATE, _numbers(series.dt.epoch("us")) / MICROSECONDS)
    if dtype == "Duration":
        return Column(name, NUMBER, _numbers(series.dt.total_microseconds()) / MICROSECONDS)
    if dtype in ("Categorical", "Enum"):
        return _categories(name, series.to_list(), np.arange(len(series)))
    return _cells(name, series.to_list())


def _of_array(name: str, values: np.ndarray) -> Column | list[Any]:
    if values.dtype.kind in "biuf":
        return Column(
            name, BOOLEAN if values.dtype.kind == "b" else NUMBER, values.astype(np.float64)
        )
    if values.dtype.kind in "mM":
        return Column(
            name,
            DATE if values.dtype.kind == "M" else NUMBER,
            _days(values.astype(f"{values.dtype.kind}8[us]")),
        )
    return _cells(name, values.tolist())


def _numbers(series: Any) -> np.ndarray:
    """A polars series as floats, NaN where it is null."""
    return np.asarray(series.to_numpy(), dtype=np.float64)


def _days(moments: np.ndarray) -> np.ndarray:
    """Microseconds as days, NaN for NaT."""
    return np.where(np.isnat(moments), np.nan, moments.astype(np.int64) / MICROSECONDS)


def _categories(name: str, levels: Sequence[Any], codes: np.ndarray) -> Column:
    """codes (n,): which level, −1 for a gap. A number is written in one way: 1.0 as 1."""
    texts = [
        None if (cell := _plain(level)) is None or is_missing(cell) else text_of(cell)
        for level in levels
    ]
    return Column(name, TEXT, np.array([*texts, None], dtype=object)[codes])


def _cells(name: str, cells: list[Any]) -> list[Any]:
    """Cells that `interpret` reads; TypeError for lists, dicts and other objects."""
    plain = [_plain(cell) for cell in cells]
    for row, cell in enumerate(plain):
        if cell is not None and not isinstance(cell, str | int | float | Decimal | date):
            raise TypeError(
                "A cell of the argument must be a string, a number, a boolean, a date or missing, "
                f"but row {row + 1} of column {name!r} is a {type(cell).__name__}. Turn it into "
                "one of these, or leave the column out."
            )
    return plain


def _plain(cell: Any) -> Any:
    """A cell as a Python object: a whole number as int, None for a gap."""
    if isinstance(cell, np.generic):
        cell = (
            cell.astype(f"{cell.dtype.kind}8[us]").item()
            if cell.dtype.kind in "mM"
            else cell.item()
        )
    if type(cell).__name__ in NOTHING:
        return None
    if isinstance(cell, bytes):
        return cell.decode("utf-8", "replace")
    return int(cell) if isinstance(cell, float) and cell.is_integer() else cell
