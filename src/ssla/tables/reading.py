"""Reading a table, and saying in one sentence what is wrong with it."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MISSING = {"", "na", "n/a", "nan", "null", "none", "?", "-"}
TRUE, FALSE = {"true", "yes"}, {"false", "no"}
MOST_COLUMNS = 10_000
NUMBER, BOOLEAN, TEXT = "number", "boolean", "text"


class TableError(ValueError):
    """A table that cannot be used, and why."""


@dataclass(frozen=True, eq=False)
class Column:
    """kind "number" or "boolean": values are floats, NaN where missing; "text": strings, None where missing."""

    name: str
    kind: str
    values: np.ndarray

    @property
    def missing(self) -> np.ndarray:
        """bool (n,)."""
        if self.kind == TEXT:
            return np.array([value is None for value in self.values], dtype=bool)
        gaps: np.ndarray = np.isnan(self.values)
        return gaps


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of the same length, not yet interpreted: a column is looked at when it is asked for."""

    path: Path
    cells: dict[str, list[Any]]  # by column: strings of a CSV, values of a Parquet file
    rows: int

    @property
    def names(self) -> list[str]:
        return list(self.cells)

    def column(self, name: str) -> Column:
        """Its kind and values, or TableError."""
        if name not in self.cells:
            raise TableError(f"{self.path} has no column {name!r}.{_nearest(name, self.names)} It has: {_some(self.names)}.")
        return _interpret(name, self.cells[name])


def read_table(path: str | Path) -> Table:
    """A CSV (UTF-8, one header line) or Parquet file, by its ending."""
    file = Path(path)
    if not file.exists():
        raise TableError(f"There is no file {file}.")
    if file.is_dir():
        raise TableError(f"{file} is a directory, but a CSV or Parquet file was expected.")
    if file.suffix.lower() in (".parquet", ".pq"):
        return _read_parquet(file)
    if file.suffix.lower() in (".csv", ".tsv", ".txt"):
        return _read_csv(file)
    raise TableError(f"{file} ends in {file.suffix!r}; only .csv, .tsv and .parquet are read.")


def _read_csv(file: Path) -> Table:
    if file.stat().st_size == 0:
        raise TableError(f"{file} is empty.")
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            sample = stream.readline()
            if "\0" in sample:
                raise TableError(f"{file} has NUL bytes: it is not a text file. Export it as CSV in UTF-8.")
            stream.seek(0)
            delimiter = "\t" if file.suffix.lower() == ".tsv" else max(",;\t", key=sample.count)
            reader = csv.reader(stream, delimiter=delimiter)
            names = _checked_names(file, [name.strip() for name in next(reader)])
            columns: list[list[str]] = [[] for _ in names]
            for row in reader:
                if not row:
                    continue
                if len(row) != len(names):
                    raise TableError(
                        f"{file}, line {reader.line_num}: {len(row)} cells, but the header has {len(names)} columns."
                    )
                for cells, cell in zip(columns, row, strict=True):
                    if "\0" in cell:
                        raise TableError(f"{file}, line {reader.line_num}: a NUL byte. Export the table as CSV in UTF-8.")
                    cells.append(cell.strip())
    except UnicodeDecodeError as error:
        raise TableError(f"{file} is not UTF-8 text (byte {error.start}). Save it as CSV in UTF-8.") from None
    except csv.Error as error:
        raise TableError(f"{file} cannot be read as CSV: {error}.") from None
    return _checked(Table(file, dict(zip(names, columns, strict=True)), len(columns[0])))


def _read_parquet(file: Path) -> Table:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TableError("Parquet files need pyarrow: pip install 'ssla[cli]'.") from None
    try:
        table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise TableError(f"{file} is not a readable Parquet file ({str(error)[:100]}).") from None
    names = _checked_names(file, [str(name) for name in table.column_names])
    cells = {name: table.column(i).to_pylist() for i, name in enumerate(names)}
    return _checked(Table(file, cells, table.num_rows))


def _checked_names(file: Path, names: list[str]) -> list[str]:
    if len(names) > MOST_COLUMNS:
        raise TableError(f"{file} has {len(names):,} columns; at most {MOST_COLUMNS:,} are taken. Is it turned on its side?")
    if not names or any(not name for name in names):
        raise TableError(
            f"{file}: column {names.index('') + 1 if names else 1} has no name. The first line must name the columns."
        )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise TableError(f"{file} has several columns named {twice[0]!r}. Rename or remove all but one.")
    return names


def _checked(table: Table) -> Table:
    if table.rows == 0:
        raise TableError(f"{table.path} has a header but no rows.")
    return table


def _interpret(name: str, cells: list[Any]) -> Column:
    """Numbers if all are, booleans if all are, else texts; numbers mixed with texts are refused."""
    given = [cell for cell in cells if not _is_missing(cell)]
    if all(_truth(cell) is not None for cell in given) and given:
        return Column(name, BOOLEAN, np.array([math.nan if _is_missing(c) else _truth(c) for c in cells], dtype=float))
    numbers = [math.nan if _is_missing(cell) else _number(cell) for cell in cells]
    wrong = [i for i, number in enumerate(numbers) if number is None]
    if wrong and len(wrong) < len(given):
        if len(wrong) > 0.5 * len(given):
            return Column(name, TEXT, np.array([None if _is_missing(c) else str(c) for c in cells], dtype=object))
        raise TableError(
            f"Column {name!r} mixes numbers and texts: row {wrong[0] + 1} is {str(cells[wrong[0]])[:30]!r}, {len(wrong)} such "
            f"cells in all. Correct them, or leave the column out with --drop {name!r}."
        )
    if wrong:
        return Column(name, TEXT, np.array([None if _is_missing(c) else str(c) for c in cells], dtype=object))
    values = np.array(numbers, dtype=float)
    endless = np.isinf(values).nonzero()[0]
    if len(endless):
        raise TableError(
            f"Column {name!r} has an infinite value in row {endless[0] + 1} ({len(endless)} in all). Correct or empty them."
        )
    return Column(name, NUMBER, values)


def _is_missing(cell: Any) -> bool:
    return cell is None or (isinstance(cell, str) and cell.lower() in MISSING) or (isinstance(cell, float) and math.isnan(cell))


def _truth(cell: Any) -> float | None:
    text = str(cell).lower()
    return 1.0 if text in TRUE else 0.0 if text in FALSE else None


def _number(cell: Any) -> float | None:
    if isinstance(cell, bool):
        return float(cell)
    if isinstance(cell, int | float):
        return float(cell)
    try:
        return float(cell) if isinstance(cell, str) and "_" not in cell else None
    except ValueError:
        return None


def _nearest(name: str, names: Iterable[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.4)
    return f" Did you mean {near[0]!r}?" if near else ""


def _some(names: list[str]) -> str:
    return ", ".join(names[:12]) + (f", … ({len(names)} in all)" if len(names) > 12 else "")
