"""Reading a table, and saying in one sentence what is wrong with it."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import math
import re
import sys
import warnings
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ssla._checks import did_you_mean

MISSING = {"", "na", "n/a", "nan", "null", "none", "?", "-"}
TRUE, FALSE = {"true", "yes"}, {"false", "no"}
MOST_COLUMNS = 10_000
NUMBER, BOOLEAN, TEXT = "number", "boolean", "text"
STANDARD_INPUT = "-"
TEXTS, PARQUET, EXCEL = (".csv", ".tsv", ".txt"), (".parquet", ".pq"), (".xlsx", ".xlsm")
DELIMITERS, SNIFFED_ROWS, SNIFFED_TEXT = ",;\t|", 20, 1 << 20
THOUSANDS = ("", ".", ",", " ", "'")
INDEX = re.compile(r"(Unnamed: 0(\.\d+)*|__index_level_\d+__)$")  # how pandas names an index that was written as a column


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
    cells: dict[str, list[Any]]  # by column: strings of a CSV, values of a Parquet or Excel file
    rows: int
    decimal: str = "."
    thousands: str = ""

    @property
    def names(self) -> list[str]:
        """Without the row index of pandas, which is found by its name alone."""
        return [name for name in self.cells if not INDEX.match(name)]

    def cells_of(self, name: str) -> list[Any]:
        """As they were read, or TableError."""
        if name not in self.cells:
            hint = did_you_mean(name, self.names)
            raise TableError(f"{self.path} has no column {name!r}.{hint} It has: {_some(self.names)}.")
        return self.cells[name]

    def column(self, name: str) -> Column:
        """Its kind and values, or TableError."""
        cells = self.cells_of(name)
        column = _interpret(name, cells, self.decimal, self.thousands)
        if column.kind == TEXT and _has_other_marks(column, self.decimal, self.thousands):
            example = next(cell for cell in column.values if cell is not None)
            warnings.warn(
                f"Column {name!r} of {self.path} is read as texts, but {example!r} and all others look like numbers with other "
                "marks. If they are numbers, give the marks (for example --decimal , or --thousands ,).",
                UserWarning,
                stacklevel=2,
            )
        return column


def read_table(path: str | Path, decimal: str = ".", thousands: str = "") -> Table:
    """A CSV (UTF-8, one header line; also as .csv.gz), Parquet or Excel file, by its ending; "-" is a CSV from standard input.

    decimal, thousands: the marks of numbers that are texts, as in "1.234,5" with decimal="," and thousands=".".
    """
    if decimal not in (".", ","):
        raise TableError(f"The decimal mark must be '.' or ',', but is {decimal!r}.")
    if thousands not in THOUSANDS or thousands == decimal:
        marks = ", ".join(repr(mark) for mark in THOUSANDS[1:] if mark != decimal)
        raise TableError(
            f"The mark of thousands beside the decimal mark {decimal!r} must be one of {marks}, but is {thousands!r}."
        )
    return replace(_read(Path(path), decimal + thousands), decimal=decimal, thousands=thousands)


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
        "Save the table in one of these forms."
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
    """The delimiter that splits the header into most cells and the first rows into as many, quotes respected; no mark of numbers
    if another delimiter does it."""

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
    except Exception as error:  # the content of a bad file decides what is raised
        raise TableError(f"{file} is not a readable Excel file ({str(error)[:100]}). Save the sheet as CSV.") from None
    if sheets[1:]:
        warnings.warn(f"{file}: only the first sheet {sheets[0]!r} is read, not {_some(sheets[1:])}.", UserWarning, stacklevel=4)
    lost = sum(
        a is None and b is not None for row, row_ in zip(rows, formulas, strict=True) for a, b in zip(row, row_, strict=True)
    )
    if lost:
        warnings.warn(
            f"{file}: {lost} formulas have no stored value and count as empty cells. If they should have one, open the file in a "
            "spreadsheet program and save it again.",
            UserWarning,
            stacklevel=4,
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
        raise TableError(f"{file} has {len(names):,} columns; at most {MOST_COLUMNS:,} are taken. Is it turned on its side?")
    if names and not names[0]:
        free = (f"Unnamed: 0{suffix}" for suffix in ("", *(f".{i}" for i in range(1, len(names) + 1))))
        names = [next(name for name in free if name not in names), *names[1:]]
    for index in filter(INDEX.match, names):
        warnings.warn(f"{file}: the column {index!r} is taken as a row index and is not an input.", UserWarning, stacklevel=5)
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


def _interpret(name: str, cells: list[Any], decimal: str = ".", thousands: str = "") -> Column:
    """Numbers if all are, booleans if all are, else texts; numbers mixed with texts are refused."""
    given = [cell for cell in cells if not _is_missing(cell)]
    if all(_truth(cell) is not None for cell in given) and given:
        return Column(name, BOOLEAN, np.array([math.nan if _is_missing(c) else _truth(c) for c in cells], dtype=float))
    numbers = [math.nan if _is_missing(cell) else _number(cell, decimal, thousands) for cell in cells]
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


def _number(cell: Any, decimal: str = ".", thousands: str = "") -> float | None:
    if isinstance(cell, int | float):
        return float(cell)
    if not isinstance(cell, str) or "_" in cell:
        return None
    if thousands:
        cell = _without_thousands(cell, decimal, thousands)
    if decimal != ".":
        if "." in cell:
            return None
        cell = cell.replace(decimal, ".")
    try:
        return float(cell)
    except ValueError:
        return None


def _without_thousands(cell: str, decimal: str, thousands: str) -> str:
    """1.234.567,8 -> 1234567,8; left alone where the groups are not of three digits, so that 1.5 is not read as 15."""
    if thousands == " ":
        cell = re.sub("[\u00a0\u2009\u202f]", " ", cell)
    t = re.escape(thousands)
    grouped = re.fullmatch(rf"[+-]?\d{{1,3}}({t}\d{{3}})+({re.escape(decimal)}\d*)?", cell)
    return cell.replace(thousands, "") if grouped else cell


def _has_other_marks(column: Column, decimal: str, thousands: str) -> bool:
    """Whether all texts are numbers as other countries write them, and some not as they were asked for."""
    given = [cell for cell in column.values if cell is not None]
    return any(_number(cell, decimal, thousands) is None for cell in given) and any(
        all(_number(cell, *other) is not None for cell in given) for other in ((",", "."), (".", ","))
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:12]) + (f", … ({len(names)} in all)" if len(names) > 12 else "")
