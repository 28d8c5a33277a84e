"""Reading a table, and saying in one sentence what is wrong with it."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ssla.tables.columns import Column, Style, TableError, interpret, read_as

MOST_COLUMNS = 10_000


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of the same length, not yet interpreted: a column is looked at when it is asked for."""

    path: Path
    cells: dict[str, list[Any]]  # by column: strings of a CSV, values of a Parquet file
    rows: int
    decimal: str = "."
    thousands: str = ""

    @property
    def names(self) -> list[str]:
        return list(self.cells)

    def column(self, name: str) -> Column:
        """Its kind and values, or TableError."""
        return interpret(name, self.cells_of(name), Style(self.decimal, self.thousands))

    def column_as(self, name: str, kind: str, style: Style) -> Column:
        """Read as what it was at training, or TableError. The table's own decimal and thousands signs come first, if stated."""
        if (self.decimal, self.thousands) != (".", ""):
            style = replace(style, decimal=self.decimal, thousands=self.thousands)
        return read_as(name, self.cells_of(name), kind, style, self.path)

    def cells_of(self, name: str) -> list[Any]:
        """The cells as they are in the file, or TableError."""
        if name not in self.cells:
            raise TableError(f"{self.path} has no column {name!r}.{_nearest(name, self.names)} It has: {_some(self.names)}.")
        return self.cells[name]


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


def _nearest(name: str, names: Iterable[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.4)
    return f" Did you mean {near[0]!r}?" if near else ""


def _some(names: list[str]) -> str:
    return ", ".join(names[:12]) + (f", … ({len(names)} in all)" if len(names) > 12 else "")
