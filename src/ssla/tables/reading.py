"""Reading tables, with an error of one sentence for what is wrong."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
import sys
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ssla._checks import did_you_mean, warn
from ssla.tables.columns import Column, Style, TableError, checked, interpret, read_as

MOST_COLUMNS = 10_000
STANDARD_INPUT = "-"
TEXTS, PARQUET, EXCEL = (".csv", ".tsv", ".txt"), (".parquet", ".pq"), (".xlsx", ".xlsm")
DELIMITERS, SNIFFED_ROWS, SNIFFED_TEXT = ",;\t|", 20, 1 << 20
THOUSANDS = ("", ".", ",", " ", "'")
INDEX = re.compile(r"(Unnamed: 0(\.\d+)*|__index_level_\d+__)$")  # how pandas names an index that was written as a column


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of the same length; a column is interpreted when it is requested."""

    path: Path
    cells: Mapping[str, Sequence[Any] | Column]  # by column: strings of a CSV, values of a Parquet or Excel file; or a kind
    rows: int
    stated: Style | None = None  # the format of numbers, if given
    indexed: bool = True  # whether a column with the name of a pandas index is one

    @property
    def names(self) -> list[str]:
        """Without the row index of pandas, which is recognised by its name."""
        return [name for name in self.cells if not (self.indexed and INDEX.match(name))]

    def cells_of(self, name: str) -> Sequence[Any]:
        """The cells as they were read; TableError if there is no such column."""
        found = self._given(name)
        return found.cells if isinstance(found, Column) else found

    def column(self, name: str) -> Column:
        """The kind and values of a column, or TableError."""
        found = self._given(name)
        return checked(found) if isinstance(found, Column) else interpret(name, found, self.stated)

    def column_as(self, name: str, kind: str, style: Style) -> Column:
        """The column in the kind of the training column, or TableError. Marks given for this table take precedence."""
        if self.stated is not None:
            style = replace(style, decimal=self.stated.decimal, thousands=self.stated.thousands)
        found = self._given(name)
        if isinstance(found, Column) and (same := found.as_kind(kind, style)) is not None:
            return checked(same)
        return read_as(name, self.cells_of(name), kind, style, self.path)

    def _given(self, name: str) -> Sequence[Any] | Column:
        if name not in self.cells:
            hint = did_you_mean(name, self.names)
            raise TableError(f"{self.path} has no column {name!r}.{hint} It has: {_some(self.names)}.")
        return self.cells[name]


def read_table(path: str | Path, decimal: str | None = None, thousands: str | None = None) -> Table:
    """A CSV (UTF-8, one header line; also as .csv.gz), Parquet or Excel file, by its ending; "-" is a CSV from standard input.

    decimal, thousands: the marks of numbers that are texts, as in "1.234,5" with decimal="," and thousands=".". Without
    them the format is detected for each column.
    """
    if decimal is None and thousands is None:
        return _read(Path(path), "")
    decimal, thousands = decimal or ".", thousands or ""
    if decimal not in (".", ","):
        raise TableError(f"The decimal mark must be '.' or ',', but is {decimal!r}.")
    if thousands not in THOUSANDS or thousands == decimal:
        marks = ", ".join(repr(mark) for mark in THOUSANDS[1:] if mark != decimal)
        raise TableError(f"The thousands mark with the decimal mark {decimal!r} must be one of {marks}, but is {thousands!r}.")
    return replace(_read(Path(path), decimal + thousands), stated=Style(decimal, thousands))


def _read(file: Path, marks: str) -> Table:
    if str(file) == STANDARD_INPUT:
        return _read_csv(Path("standard input"), sys.stdin.buffer.read(), marks)
    if not file.exists():
        raise TableError(f"There is no file {file}.")
    if file.is_dir():
        raise TableError(f"{file} is a directory, but a file with a table was expected.")
    name = file.name.lower()
    if name.endswith(PARQUET):
        return _read_parquet(file)
    if name.endswith(EXCEL):
        return _read_excel(file)
    if name.removesuffix(".gz").endswith(TEXTS):
        data = file.read_bytes()
        return _read_csv(file, _unzipped(file, data) if name.endswith(".gz") else data, marks)
    raise TableError(
        f"{file} ends in {file.suffix!r}; only .csv, .tsv, .txt (also followed by .gz), .parquet and .xlsx are read. "
        "Save the table in one of these formats."
    )


def _unzipped(file: Path, data: bytes) -> bytes:
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise TableError(f"{file} is not a complete gzip file ({error}). Copy or compress it again.") from None


def _read_csv(file: Path, data: bytes, marks: str) -> Table:
    text = _text(file, data)
    if not text:
        raise TableError(f"{file} is empty.")
    tabs = file.name.lower().removesuffix(".gz").endswith(".tsv")
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter="\t" if tabs else _delimiter(text, marks))
        names = _checked_names(file, [name.strip() for name in next(reader)])
        columns: list[list[str]] = [[] for _ in names]
        for row in reader:
            if not row:
                continue
            if len(row) != len(names):
                raise TableError(f"{file}, line {reader.line_num}: {len(row)} cells, but the header has {len(names)} columns.")
            for cells, cell in zip(columns, row, strict=True):
                cells.append(cell.strip())
    except csv.Error as error:
        raise TableError(f"{file} cannot be read as CSV: {error}.") from None
    return _checked(Table(file, dict(zip(names, columns, strict=True)), len(columns[0])))


def _text(file: Path, data: bytes) -> str:
    """UTF-8, with or without a byte-order mark; for another encoding the error gives the conversion."""
    remedy = "Save the table as CSV in UTF-8, or convert it: iconv -f {} -t UTF-8 old.csv > new.csv"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise TableError(f"{file} is UTF-16 text. {remedy.format('UTF-16')}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TableError(
            f"{file}, line {line}: the byte {error.object[error.start]:#x} is not UTF-8 text. The encoding may be "
            f"Windows-1252 or Latin-1. {remedy.format('WINDOWS-1252')}"
        ) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise TableError(f"{file}, line {line}: a NUL byte, so this is not plain text. {remedy.format('UTF-16LE')}")
    return text


def _delimiter(text: str, marks: str) -> str:
    """The delimiter that splits the header into most cells and the first rows into as many, outside quotes; a mark of numbers
    only if no other delimiter fits."""

    def fit(delimiter: str) -> tuple[bool, bool, int, bool]:
        reader = csv.reader(io.StringIO(text[:SNIFFED_TEXT], newline=""), delimiter=delimiter)
        try:
            widths = [len(row) for row in islice(reader, SNIFFED_ROWS) if row]
        except csv.Error:
            widths = []
        width, same = (widths[0] if widths else 0), len(set(widths)) == 1
        return same and width > 1, delimiter not in marks and width > 1, width, same

    return max(DELIMITERS, key=fit)


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


def _read_excel(file: Path) -> Table:
    """The first sheet: values as they were stored when it was last calculated."""
    try:
        import openpyxl
    except ImportError:
        raise TableError("Excel files need openpyxl: pip install 'ssla[excel]'. Or save the sheet as CSV.") from None
    try:
        stored, written = (openpyxl.load_workbook(file, read_only=True, data_only=values) for values in (True, False))
        rows, formulas = ([list(row) for row in book.worksheets[0].iter_rows(values_only=True)] for book in (stored, written))
        sheets = [sheet.title for sheet in stored.worksheets]
        stored.close()
        written.close()
    except Exception as error:  # a bad file can raise anything
        raise TableError(f"{file} is not a readable Excel file ({str(error)[:100]}). Save the sheet as CSV.") from None
    if sheets[1:]:
        warn(f"{file}: only the first sheet {sheets[0]!r} is read, not {_some(sheets[1:])}.")
    lost = sum(
        a is None and b is not None for row, row_ in zip(rows, formulas, strict=True) for a, b in zip(row, row_, strict=True)
    )
    if lost:
        warn(
            f"{file}: {lost} formulas have no stored value and count as empty cells. If they should have one, open the file in a "
            "spreadsheet program and save it again."
        )
    width = max((i + 1 for row in rows for i, cell in enumerate(row) if cell is not None), default=0)
    if not width:
        raise TableError(f"{file} is empty.")
    head, *body = (
        [cell.strip() if isinstance(cell, str) else cell for cell in (row + [None] * width)[:width]]
        for row in rows
        if any(cell is not None for cell in row)
    )
    names = _checked_names(file, ["" if name is None else str(name) for name in head])
    return _checked(Table(file, {name: [row[i] for row in body] for i, name in enumerate(names)}, len(body)))


def _checked_names(file: Path, names: list[str]) -> list[str]:
    if len(names) > MOST_COLUMNS:
        raise TableError(
            f"{file} has {len(names):,} columns; at most {MOST_COLUMNS:,} are supported. Are rows and columns exchanged?"
        )
    if names and not names[0]:
        free = (f"Unnamed: 0{suffix}" for suffix in ("", *(f".{i}" for i in range(1, len(names) + 1))))
        names = [next(name for name in free if name not in names), *names[1:]]
    for index in filter(INDEX.match, names):
        warn(f"{file}: the column {index!r} is treated as a row index and is not an input.")
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


def _some(names: list[str]) -> str:
    return ", ".join(names[:12]) + (f", … ({len(names)} in total)" if len(names) > 12 else "")
