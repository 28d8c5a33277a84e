"""Reading tables, with an error of one sentence for what is wrong.

`read_table` reads a file as a whole, `read_parts` a bounded number of rows at a time.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
import sys
import zlib
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from ssla._checks import did_you_mean, warn
from ssla.tables.columns.kinds import Column, Style, TableError, checked, interpret, read_as
from ssla.tables.columns.texts import DifferentError, arrow_columns, of_equal_size

MOST_COLUMNS = 10_000
STANDARD_INPUT = "-"
TEXTS, PARQUET, EXCEL = (".csv", ".tsv", ".txt"), (".parquet", ".pq"), (".xlsx", ".xlsm")
DELIMITERS, SNIFFED_ROWS, SNIFFED_TEXT = ",;\t|", 20, 1 << 20
BYTES_AT_ONCE = 1 << 20
LARGE = SNIFFED_TEXT  # characters of a CSV file that is worth importing pyarrow
THOUSANDS = ("", ".", ",", " ", "'")
INDEX = re.compile(
    r"(Unnamed: 0(\.\d+)*|__index_level_\d+__)$"
)  # how pandas names an index that was written as a column


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of the same length; a column is interpreted when it is requested."""

    path: Path
    cells: Mapping[
        str, Sequence[Any] | np.ndarray | Column
    ]  # by column: strings of a CSV, values of other files; or a kind
    rows: int
    stated: Style | None = None  # the format of numbers, if given
    first: int = 0  # rows of the file before these
    part: bool = False  # whether the file may have more rows after these
    types: dict[str, Any] = field(
        default_factory=dict
    )  # of the columns of a Parquet file, in pyarrow
    indexed: bool = True  # whether a column with the name of a pandas index is one

    @property
    def names(self) -> list[str]:
        """Without the row index of pandas, which is recognised by its name."""
        return [name for name in self.cells if not (self.indexed and INDEX.match(name))]

    def __len__(self) -> int:
        return self.rows

    def without(self, names: Collection[str]) -> Table:
        """The other columns; TableError for a name that the table does not have."""
        for name in names:
            self._given(name)  # its error names the most similar column
        kept = {name: cells for name, cells in self.cells.items() if name not in names}
        return replace(self, cells=kept)

    def written_with(self, decimal: str | None, thousands: str | None) -> Table:
        """The same cells, read with these marks of numbers; without marks the table itself."""
        if decimal is None and thousands is None:
            return self
        return replace(self, stated=_stated(decimal or ".", thousands or ""))

    def cells_of(self, name: str) -> Sequence[Any]:
        """The cells as they were read; TableError if there is no such column."""
        found = self._given(name)
        if isinstance(found, Column):
            return found.cells
        cells: Sequence[Any] = found.tolist() if isinstance(found, np.ndarray) else list(found)
        return cells

    def column(self, name: str, mixed: bool = False) -> Column:
        """The kind and values of a column, or TableError. mixed: see `interpret`."""
        found = self._given(name)
        return (
            checked(found)
            if isinstance(found, Column)
            else interpret(name, found, self.stated, mixed)
        )

    def column_as(self, name: str, kind: str, style: Style) -> Column:
        """The column in the kind of the training column, or TableError.

        Marks given for this table take precedence.
        """
        if self.stated is not None:
            style = replace(style, decimal=self.stated.decimal, thousands=self.stated.thousands)
        found = self._given(name)
        if isinstance(found, Column):
            if (same := found.as_kind(kind, style)) is not None:
                return checked(same)
            found = found.cells
        return read_as(name, found, kind, style, self.path, self.first, self.part)

    def _given(self, name: str) -> Sequence[Any] | np.ndarray | Column:
        if name not in self.cells:
            hint = did_you_mean(name, self.names)
            raise TableError(
                f"{self.path} has no column {name!r}.{hint} It has: {_some(self.names)}."
            )
        return self.cells[name]


def read_table(path: str | Path, decimal: str | None = None, thousands: str | None = None) -> Table:
    """A CSV (UTF-8, one header line; also as .csv.gz), Parquet or Excel file, by its ending; "-" is
    a CSV from standard input.

    decimal, thousands: the marks of numbers that are texts, as in "1.234,5" with decimal="," and
    thousands=".". Without them the format is detected for each column.
    """
    (whole,) = read_parts(path, decimal, thousands)
    return whole


def read_parts(
    path: str | Path,
    decimal: str | None = None,
    thousands: str | None = None,
    rows: int | None = None,
    only: Collection[str] | None = None,
) -> Iterator[Table]:
    """The same table in parts of `rows` rows each; the last has the rest. None: in one part.

    CSV and Parquet files are read part by part, so that memory does not grow with the file; an
    Excel file is read as a whole. only: the columns that are needed. Others of a Parquet file are
    not read: they have names, but no cells.
    """
    stated = (
        None if decimal is None and thousands is None else _stated(decimal or ".", thousands or "")
    )
    marks = "" if stated is None else stated.decimal + stated.thousands
    done = 0
    for part in _parts(Path(path), marks, rows, only):
        yield replace(part, stated=stated, first=done, part=part.rows == rows)
        done += part.rows


def _stated(decimal: str, thousands: str) -> Style:
    if decimal not in (".", ","):
        raise TableError(f"The decimal mark must be '.' or ',', but is {decimal!r}.")
    if thousands not in THOUSANDS or thousands == decimal:
        marks = ", ".join(repr(mark) for mark in THOUSANDS[1:] if mark != decimal)
        raise TableError(
            f"The thousands mark with the decimal mark {decimal!r} must be one of {marks}, but is "
            f"{thousands!r}."
        )
    return Style(decimal, thousands)


def _parts(
    file: Path, marks: str, rows: int | None, only: Collection[str] | None
) -> Iterator[Table]:
    if str(file) == STANDARD_INPUT:
        return _csv_parts(Path("standard input"), sys.stdin.buffer, marks, rows)
    if not file.exists():
        raise TableError(f"There is no file {file}.")
    if file.is_dir():
        raise TableError(f"{file} is a directory, but a file with a table was expected.")
    name = file.name.lower()
    if name.endswith(PARQUET):
        return _parquet_parts(file, rows, only)
    if name.endswith(EXCEL):
        return iter([_read_excel(file)])
    if name.removesuffix(".gz").endswith(TEXTS):
        return _open_csv(file, marks, rows)
    raise TableError(
        f"{file} ends in {file.suffix!r}; only .csv, .tsv, .txt (also followed by .gz), .parquet "
        "and .xlsx are read. Save the table in one of these formats."
    )


def _open_csv(file: Path, marks: str, rows: int | None) -> Iterator[Table]:
    with gzip.open(file) if file.name.lower().endswith(".gz") else file.open("rb") as stream:
        try:
            yield from _csv_parts(file, stream, marks, rows)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise TableError(
                f"{file} is not a complete gzip file ({error}). Copy or compress it again."
            ) from None


def _csv_parts(file: Path, stream: Any, marks: str, rows: int | None) -> Iterator[Table]:
    """stream: an open file of bytes. A large file is read by pyarrow, and by csv from the first
    part that they may split in different ways.
    """
    if rows is None and not stream.seekable():
        stream = io.BytesIO(stream.read())
    start = stream.tell() if stream.seekable() else None
    texts = _texts(file, stream)
    head = ""
    for text in texts:
        head += text
        if len(head) >= SNIFFED_TEXT:
            break
    if not head:
        raise TableError(f"{file} is empty.")
    tabs = file.name.lower().removesuffix(".gz").endswith(".tsv")
    delimiter = "\t" if tabs else _delimiter(head, marks)
    large = len(head) >= LARGE
    reader = csv.reader(_lines(chain([head], texts)), delimiter=delimiter)
    del head
    done = 0
    try:
        names = _checked_names(file, [name.strip() for name in next(reader)])
        width = len(names)
        if large and start is not None:
            stream.seek(start)
            try:
                for columns in arrow_columns(stream, delimiter, width, rows):
                    yield Table(file, dict(zip(names, columns, strict=True)), len(columns[0]))
                    done += 1
                if done:
                    return
            except DifferentError:
                pass
            stream.seek(start)
            reader = csv.reader(_lines(_texts(file, stream)), delimiter=delimiter)
            next(reader)
            deque(_rows(file, reader, width, done * (rows or 0)), maxlen=0)  # rows that were given
        while (part := list(_rows(file, reader, width, rows))) or not done:
            if not part:
                raise TableError(f"{file} has a header but no rows.")
            done += 1
            cells = (list(map(str.strip, column)) for column in zip(*part, strict=True))
            yield Table(file, dict(zip(names, cells, strict=True)), len(part))
    except csv.Error as error:
        raise TableError(f"{file} cannot be read as CSV: {error}.") from None


def _rows(file: Path, reader: Any, width: int, most: int | None) -> Iterator[list[str]]:
    """At most so many rows that are not empty, each of the width of the header."""
    for row in islice(filter(None, reader), most):
        if len(row) != width:
            raise TableError(
                f"{file}, line {reader.line_num}: {len(row)} cells, but the header has {width} "
                "columns."
            )
        yield row


def _texts(file: Path, stream: Any) -> Iterator[str]:
    """UTF-8, with or without a byte-order mark, a block at a time; for another encoding the
    error gives the conversion.
    """
    remedy = "Save the table as CSV in UTF-8, or convert it: iconv -f {} -t UTF-8 old.csv > new.csv"
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    lines, data = 1, stream.read(BYTES_AT_ONCE)
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise TableError(f"{file} is UTF-16 text. {remedy.format('UTF-16')}")
    while True:
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            line = lines + error.object.count(b"\n", 0, error.start)
            raise TableError(
                f"{file}, line {line}: the byte {error.object[error.start]:#x} is not UTF-8 text. "
                f"The encoding may be Windows-1252 or Latin-1. {remedy.format('WINDOWS-1252')}"
            ) from None
        if "\0" in text:
            line = lines + text.count("\n", 0, text.index("\0"))
            raise TableError(
                f"{file}, line {line}: a NUL byte, so this is not plain text. "
                f"{remedy.format('UTF-16LE')}"
            )
        if text:
            yield text
        if not data:
            return
        lines += data.count(b"\n")
        data = stream.read(BYTES_AT_ONCE)


def _lines(texts: Iterator[str]) -> Iterator[str]:
    """Lines with their ends; a line, or the end of a line in two characters, may be in two
    blocks.
    """
    rest = ""
    for text in texts:
        lines = list(io.StringIO(rest + text, newline=""))
        rest = "" if lines[-1].endswith("\n") else lines.pop()
        yield from lines
    if rest:
        yield rest


def _delimiter(text: str, marks: str) -> str:
    """The delimiter that splits the header into most cells and the first rows into as many, outside
    quotes; a mark of numbers only if no other delimiter fits.
    """

    def fit(delimiter: str) -> tuple[bool, bool, int, bool]:
        reader = csv.reader(io.StringIO(text[:SNIFFED_TEXT], newline=""), delimiter=delimiter)
        try:
            widths = [len(row) for row in islice(reader, SNIFFED_ROWS) if row]
        except csv.Error:
            widths = []
        width, same = (widths[0] if widths else 0), len(set(widths)) == 1
        return same and width > 1, delimiter not in marks and width > 1, width, same

    return max(DELIMITERS, key=fit)


def _parquet_parts(file: Path, rows: int | None, only: Collection[str] | None) -> Iterator[Table]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TableError("Parquet files need pyarrow: pip install 'ssla[cli]'.") from None
    try:
        # a pre-buffered file keeps every row group that was read
        with pyarrow.parquet.ParquetFile(
            file, pre_buffer=False, buffer_size=BYTES_AT_ONCE
        ) as source:
            stored = [str(name) for name in source.schema_arrow.names]
            names = _checked_names(file, stored)
            count = source.metadata.num_rows
            if not count:
                raise TableError(f"{file} has a header but no rows.")
            wanted = (
                stored
                if only is None
                else [old for old, name in zip(stored, names, strict=True) if name in only]
            )
            batches = source.iter_batches(rows or count, columns=wanted or stored[:1])
            new = dict(zip(stored, names, strict=True))
            types = {new[one.name]: _decoded(one.type) for one in source.schema_arrow}
            for table in of_equal_size(batches, rows or count):
                cells = {new[old]: _arrow_cells(table.column(old)) for old in table.column_names}
                yield Table(
                    file, {name: cells.get(name, []) for name in names}, table.num_rows, types=types
                )
    except TableError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise TableError(f"{file} is not a readable Parquet file ({str(error)[:100]}).") from None


def _decoded(kind: Any) -> Any:
    """The type of the values of a dictionary; another type itself."""
    return kind.value_type if str(kind).startswith("dictionary") else kind


def _arrow_cells(column: Any) -> Sequence[Any] | np.ndarray:
    """An array if all cells are integers or floats, else a list."""
    kind = str(column.type)
    if column.null_count == 0 and kind.startswith(("int", "uint", "float", "double", "halffloat")):
        array: np.ndarray = column.to_numpy()
        return array
    cells: list[Any] = column.to_pylist()
    return cells


def _read_excel(file: Path) -> Table:
    """The first sheet: values as they were stored when it was last calculated."""
    try:
        import openpyxl
    except ImportError:
        raise TableError(
            "Excel files need openpyxl: pip install 'ssla[excel]'. Or save the sheet as CSV."
        ) from None
    try:
        stored, written = (
            openpyxl.load_workbook(file, read_only=True, data_only=values)
            for values in (True, False)
        )
        rows, formulas = (
            [list(row) for row in book.worksheets[0].iter_rows(values_only=True)]
            for book in (stored, written)
        )
        sheets = [sheet.title for sheet in stored.worksheets]
        stored.close()
        written.close()
    except Exception as error:  # a bad file can raise anything
        raise TableError(
            f"{file} is not a readable Excel file ({str(error)[:100]}). Save the sheet as CSV."
        ) from None
    if sheets[1:]:
        warn(f"{file}: only the first sheet {sheets[0]!r} is read, not {_some(sheets[1:])}.")
    lost = sum(
        a is None and b is not None
        for row, row_ in zip(rows, formulas, strict=True)
        for a, b in zip(row, row_, strict=True)
    )
    if lost:
        warn(
            f"{file}: {lost} formulas have no stored value and count as empty cells. If they "
            "should have one, open the file in a spreadsheet program and save it again."
        )
    width = max(
        (i + 1 for row in rows for i, cell in enumerate(row) if cell is not None), default=0
    )
    if not width:
        raise TableError(f"{file} is empty.")
    head, *body = (
        [cell.strip() if isinstance(cell, str) else cell for cell in (row + [None] * width)[:width]]
        for row in rows
        if any(cell is not None for cell in row)
    )
    names = _checked_names(file, ["" if name is None else str(name) for name in head])
    if not body:
        raise TableError(f"{file} has a header but no rows.")
    return Table(file, {name: [row[i] for row in body] for i, name in enumerate(names)}, len(body))


def _checked_names(file: Path, names: list[str]) -> list[str]:
    if len(names) > MOST_COLUMNS:
        raise TableError(
            f"{file} has {len(names):,} columns; at most {MOST_COLUMNS:,} are supported. Are rows "
            "and columns exchanged?"
        )
    if names and not names[0]:
        free = (
            f"Unnamed: 0{suffix}" for suffix in ("", *(f".{i}" for i in range(1, len(names) + 1)))
        )
        names = [next(name for name in free if name not in names), *names[1:]]
    for index in filter(INDEX.match, names):
        warn(f"{file}: the column {index!r} is treated as a row index and is not an input.")
    if not names or any(not name for name in names):
        raise TableError(
            f"{file}: column {names.index('') + 1 if names else 1} has no name. The first line "
            "must name the columns."
        )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise TableError(
            f"{file} has several columns named {twice[0]!r}. Rename or remove all but one."
        )
    return names


def _some(names: list[str]) -> str:
    return ", ".join(names[:12]) + (f", … ({len(names)} in total)" if len(names) > 12 else "")
