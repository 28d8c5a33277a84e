"""Reading tables, with an error of one sentence for what is wrong.

`read_table` reads a file as a whole, `read_parts` a bounded number of rows at a time.

The module has, in this order, `Table`, these two functions, and a reader for each form of file:
CSV, Parquet, Excel.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
import sys
import zlib
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np

from ssla._checks import did_you_mean, warn
from ssla.tables.columns.kinds import (
    Column,
    Style,
    TableError,
    check_column_finite,
    interpret_cells,
    read_as_kind,
)
from ssla.tables.columns.texts import DifferentError, read_arrow_columns, split_batches

MOST_COLUMNS = 10_000  # a guess
STANDARD_INPUT = "-"
TEXTS, PARQUET, EXCEL = (".csv", ".tsv", ".txt"), (".parquet", ".pq"), (".xlsx", ".xlsm")
DELIMITERS = ",;\t|"
SNIFFED_ROWS = 20  # rows from which the delimiter is detected; a guess
SNIFFED_TEXT = 1 << 20  # and their characters at the most
BYTES_AT_ONCE = 1 << 20
LARGE = SNIFFED_TEXT  # characters of a CSV file that is worth importing pyarrow; a guess
THOUSANDS = ("", ".", ",", " ", "'")
LISTED_NAMES = 12  # of columns or sheets, in a message
# How pandas names an index that was written as a column.
INDEX = re.compile(r"(Unnamed: 0(\.\d+)*|__index_level_\d+__)$")


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of the same length; a column is interpreted when it is requested."""

    path: Path
    # By column: strings of a CSV, values of other files, or a column whose kind is known.
    cells: Mapping[str, Sequence[Any] | np.ndarray | Column]
    rows: int
    stated: Style | None = None  # the format of numbers, if given
    rows_before: int = 0  # rows of the file before these
    may_have_more: bool = False  # whether the file may have rows after these
    # The pyarrow types of the columns of a Parquet file, by name; {} for other tables.
    types: dict[str, Any] = field(default_factory=dict)
    indexed: bool = True  # whether a column whose name is that of a pandas index is one

    @property
    def names(self) -> list[str]:
        """The names of the columns, without those of a row index of pandas."""
        return [name for name in self.cells if not (self.indexed and INDEX.match(name))]

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.rows

    def drop_columns(self, names: Collection[str]) -> Table:
        """Return the table without the named columns.

        Raises TableError for a name that the table does not have.
        """
        for name in names:
            self._get_stored_cells(name)  # its error names the most similar column
        kept = {name: cells for name, cells in self.cells.items() if name not in names}
        return replace(self, cells=kept)

    def with_marks(self, decimal: str | None, thousands: str | None) -> Table:
        """Return a table of the same cells whose numbers are read with these marks.

        A mark that is None has its default; if both are None, the table itself is returned. Raises
        TableError for marks that are not supported.

        decimal, thousands: as in `read_table`.
        """
        stated = _make_stated_style(decimal, thousands)
        return self if stated is None else replace(self, stated=stated)

    def get_cells(self, name: str) -> Sequence[Any]:
        """Return the cells (n) of a column as Python objects, without an interpretation.

        Raises TableError if there is no such column.
        """
        stored = self._get_stored_cells(name)
        if isinstance(stored, Column):
            return stored.cells
        cells: Sequence[Any] = stored.tolist() if isinstance(stored, np.ndarray) else list(stored)
        return cells

    def interpret_column(self, name: str, mixed: bool = False) -> Column:
        """Return a column with its kind and values, as `interpret_cells` finds them from its cells.

        mixed: whether numbers and texts may be categories. Raises TableError if there is no such
        column, or if it mixes kinds or has infinite values.
        """
        stored = self._get_stored_cells(name)
        if isinstance(stored, Column):
            return check_column_finite(stored)
        return interpret_cells(name, stored, self.stated, mixed=mixed)

    def read_column_as_kind(self, name: str, column_kind: str, style: Style) -> Column:
        """Return a column in the kind and the format of the training column.

        Marks of numbers that were given for this table are used in place of those of the format.
        Raises TableError for a missing column, a cell of another kind, or an infinite value.

        column_kind, style: the kind of the training column, and the format of its numbers.
        """
        if self.stated is not None:
            style = replace(style, decimal=self.stated.decimal, thousands=self.stated.thousands)
        stored = self._get_stored_cells(name)
        if isinstance(stored, Column):
            converted = stored.convert_kind(column_kind, style)
            if converted is not None:
                return check_column_finite(converted)
            # Cells may be read as another kind, or the error names the first that cannot be.
            stored = stored.cells

        return read_as_kind(
            name,
            stored,
            column_kind,
            style,
            source=self.path,
            rows_before=self.rows_before,
            may_have_more=self.may_have_more,
        )

    def _get_stored_cells(self, name: str) -> Sequence[Any] | np.ndarray | Column:
        """Return what the table holds of a column, a `Column` or its cells (n).

        Raises TableError if there is no such column; the message names the most similar one.
        """
        if name not in self.cells:
            hint = did_you_mean(name, self.names)
            columns = _list_first_names(self.names)
            raise TableError(f"{self.path} has no column {name!r}.{hint} It has: {columns}.")
        return self.cells[name]


def read_table(path: str | Path, decimal: str | None = None, thousands: str | None = None) -> Table:
    """Read a whole CSV, Parquet or Excel file, which its ending tells apart, as a table.

    A CSV file is in UTF-8 with one header line, and may be compressed as .csv.gz. The path "-" is a
    CSV from standard input.

    decimal, thousands: the marks of numbers that are texts, as in "1.234,5" with decimal="," and
    thousands=".". If both are None, the format is detected for each column.

    Raises TableError for a file that is missing, empty, damaged or not in one of these formats.
    """
    (table,) = read_parts(path, decimal, thousands)
    return table


def read_parts(
    path: str | Path,
    decimal: str | None = None,
    thousands: str | None = None,
    rows: int | None = None,
    only: Collection[str] | None = None,
) -> Iterator[Table]:
    """Yield the table of `read_table` in parts of `rows` rows each.

    The last part has the remaining rows. CSV and Parquet files are read part by part, so that
    memory does not grow with the file; an Excel file is read as a whole, and is one part. The
    errors are those of `read_table`, each raised when the part with its cause is read.

    path, decimal, thousands: as in `read_table`.  rows: None is one part with all rows.  only: the
    columns that are needed; None: all. Other columns of a Parquet file are not read: they have
    names, but no cells.
    """
    stated = _make_stated_style(decimal, thousands)
    marks = "" if stated is None else stated.decimal + stated.thousands
    rows_before = 0
    for part in _read_file(Path(path), marks, rows, only):
        # Only the last part can have fewer rows than the others.
        may_have_more = part.rows == rows
        yield replace(part, stated=stated, rows_before=rows_before, may_have_more=may_have_more)
        rows_before += part.rows


def _make_stated_style(decimal: str | None, thousands: str | None) -> Style | None:
    """Return the format with these marks of numbers, or None if both are None.

    A single mark that is None has its default: "." for decimal, and no thousands mark. Raises
    TableError for marks that are not supported, or that are the same.
    """
    if decimal is None and thousands is None:
        return None
    decimal = decimal or "."
    thousands = thousands or ""
    if decimal not in (".", ","):
        raise TableError(f"The decimal mark must be '.' or ',', but is {decimal!r}.")
    if thousands not in THOUSANDS or thousands == decimal:
        marks = ", ".join(repr(mark) for mark in THOUSANDS[1:] if mark != decimal)
        raise TableError(
            f"The thousands mark with the decimal mark {decimal!r} must be one of {marks}, but is "
            f"{thousands!r}."
        )

    return Style(decimal, thousands)


def _read_file(
    file: Path, marks: str, rows: int | None, only: Collection[str] | None
) -> Iterator[Table]:
    """Return an iterator over the parts of a file, with the reader for its ending.

    Raises TableError if there is no such file, or if its ending is not that of a table.

    marks: the marks of numbers that were given, as one text, which are not likely to be delimiters;
    may be empty.  rows, only: as in `read_parts`.
    """
    if str(file) == STANDARD_INPUT:
        return _read_csv_stream(Path("standard input"), sys.stdin.buffer, marks, rows)

    if not file.exists():
        raise TableError(f"There is no file {file}.")
    if file.is_dir():
        raise TableError(f"{file} is a directory, but a file with a table was expected.")

    name = file.name.lower()
    if name.endswith(PARQUET):
        return _read_parquet(file, rows, only)
    if name.endswith(EXCEL):
        return iter([_read_excel(file)])
    if name.removesuffix(".gz").endswith(TEXTS):
        return _read_csv_file(file, marks, rows)
    raise TableError(
        f"{file} ends in {file.suffix!r}; only .csv, .tsv, .txt (also followed by .gz), .parquet "
        "and .xlsx are read. Save the table in one of these formats."
    )


# --- CSV -----------------------------------------------------------------------------------


def _read_csv_file(file: Path, marks: str, rows: int | None) -> Iterator[Table]:
    """Yield the parts of a CSV file, which is decompressed if it ends in .gz.

    marks, rows: as in `_read_file`. Raises TableError if it cannot be decompressed or read.
    """
    with gzip.open(file) if file.name.lower().endswith(".gz") else file.open("rb") as stream:
        try:
            yield from _read_csv_stream(file, stream, marks, rows)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise TableError(
                f"{file} is not a complete gzip file ({error}). Copy or compress it again."
            ) from None


def _read_csv_stream(file: Path, stream: Any, marks: str, rows: int | None) -> Iterator[Table]:
    """Yield the parts of a CSV file.

    A small file is read by Python's csv module. A large file is read by pyarrow, which is faster,
    and by csv from the first part on that the two may split into cells in different ways. Raises
    TableError if the file cannot be read.

    file: what errors and tables call it.  stream: an open file of bytes, at its start.  marks,
    rows: as in `_read_file`.
    """
    # Only a file that can be read again can be given to pyarrow.
    if rows is None and not stream.seekable():
        stream = io.BytesIO(stream.read())
    start = stream.tell() if stream.seekable() else None

    # The first blocks show the delimiter, and whether the file is large.
    texts = _decode_blocks(file, stream)
    head = _read_head(texts)
    if not head:
        raise TableError(f"{file} is empty.")
    has_tabs = file.name.lower().removesuffix(".gz").endswith(".tsv")
    delimiter = "\t" if has_tabs else _detect_delimiter(head, marks)
    is_large = len(head) >= LARGE
    reader = csv.reader(_split_lines(chain([head], texts)), delimiter=delimiter)
    del head  # the reader needs it no longer than its first rows

    try:
        names = _complete_names(file, [name.strip() for name in next(reader)])
        parts_read = 0  # by pyarrow
        if is_large and start is not None:
            stream.seek(start)
            parts_read, is_complete = yield from _read_parts_by_arrow(
                file, stream, delimiter, names, rows
            )
            if is_complete:
                return

            # csv reads the parts that pyarrow has not read. If `rows` is None, there is one part,
            # of which no row has been yielded here.
            rows_read = parts_read * (rows or 0)
            stream.seek(start)
            reader = _skip_to_row(file, stream, delimiter, len(names), rows_read)
        yield from _read_parts_by_csv(file, reader, names, rows, may_be_empty=parts_read > 0)
    except csv.Error as error:
        raise TableError(f"{file} cannot be read as CSV: {error}.") from None


def _read_parts_by_arrow(
    file: Path, stream: Any, delimiter: str, names: list[str], rows: int | None
) -> Generator[Table, None, tuple[int, bool]]:
    """Yield the parts of a CSV file that pyarrow reads as csv does.

    The value of `yield from` is the number of these parts, and whether they are the whole file. It
    is False for a file without a row, because csv must raise the error.

    stream: the open file of bytes, at its start.  delimiter: that of the cells.  names: those of
    the columns.  rows: as in `_read_file`.
    """
    parts_read = 0
    try:
        for columns in read_arrow_columns(stream, delimiter, len(names), rows):
            yield Table(file, dict(zip(names, columns, strict=True)), len(columns[0]))
            parts_read += 1
    except DifferentError:
        return parts_read, False
    return parts_read, parts_read > 0


def _skip_to_row(file: Path, stream: Any, delimiter: str, width: int, rows: int) -> Any:
    """Return a csv reader of the file that has read the header and the first `rows` rows.

    Raises TableError for a skipped row of another width than the header, and csv.Error for a row
    that csv cannot read.

    file: its name, for errors.  stream: the open file of bytes, at its start.  delimiter: that of
    the cells.  width: the number of columns of the header.
    """
    reader = csv.reader(_split_lines(_decode_blocks(file, stream)), delimiter=delimiter)
    next(reader)
    for _ in _read_rows(file, reader, width, rows):
        pass
    return reader


def _read_parts_by_csv(
    file: Path, reader: Any, names: list[str], rows: int | None, may_be_empty: bool
) -> Iterator[Table]:
    """Yield the next rows of a csv reader in parts of `rows` rows (None: in one part).

    Cells are texts without spaces around them. Raises TableError for a row of another width than
    the header, and if the reader has no row but must have some.

    file: what errors and tables call it.  reader: has read the header.  names: those of the
    columns.  may_be_empty: whether the reader may have no further row.
    """
    while part := list(_read_rows(file, reader, len(names), rows)):
        may_be_empty = True  # because the file may end after this part
        cells = (list(map(str.strip, column)) for column in zip(*part, strict=True))
        yield Table(file, dict(zip(names, cells, strict=True)), len(part))
    if not may_be_empty:
        raise TableError(f"{file} has a header but no rows.")


def _read_head(texts: Iterator[str]) -> str:
    """Return the first blocks of a text, with at least SNIFFED_TEXT characters if it has so many.

    These blocks are taken from the iterator.
    """
    head = ""
    for text in texts:
        head += text
        if len(head) >= SNIFFED_TEXT:
            break
    return head


def _read_rows(file: Path, reader: Any, width: int, most: int | None) -> Iterator[list[str]]:
    """Yield the next rows of a csv reader that are not empty, each as a list of cells.

    Raises TableError for a row of another width than the header.

    file: its name, for the error.  width: the number of cells of the header.  most: how many rows
    are read at most; None: all.
    """
    for row in islice(filter(None, reader), most):
        if len(row) != width:
            raise TableError(
                f"{file}, line {reader.line_num}: {len(row)} cells, but the header has {width} "
                "columns."
            )
        yield row


def _decode_blocks(file: Path, stream: Any) -> Iterator[str]:
    """Yield the text of a file of bytes in UTF-8, in blocks that are not empty.

    A byte-order mark is left out. Raises TableError for another encoding; the message has the
    command that converts the file.

    file: its name, for errors.  stream: an open file of bytes.
    """
    remedy = "Save the table as CSV in UTF-8, or convert it: iconv -f {} -t UTF-8 old.csv > new.csv"
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    line = 1  # of the start of the block
    data = stream.read(BYTES_AT_ONCE)
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise TableError(f"{file} is UTF-16 text. {remedy.format('UTF-16')}")
    while True:
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            line += error.object.count(b"\n", 0, error.start)
            raise TableError(
                f"{file}, line {line}: the byte {error.object[error.start]:#x} is not UTF-8 text. "
                f"The encoding may be Windows-1252 or Latin-1. {remedy.format('WINDOWS-1252')}"
            ) from None
        if "\0" in text:
            line += text.count("\n", 0, text.index("\0"))
            raise TableError(
                f"{file}, line {line}: a NUL byte, so this is not plain text. "
                f"{remedy.format('UTF-16LE')}"
            )
        if text:
            yield text
        if not data:
            return
        line += data.count(b"\n")
        data = stream.read(BYTES_AT_ONCE)


def _split_lines(texts: Iterator[str]) -> Iterator[str]:
    """Yield the lines of blocks of text that are not empty, with their line ends."""
    # A line, or the end of a line in two characters, may be in two blocks.
    incomplete = ""
    for text in texts:
        lines = list(io.StringIO(incomplete + text, newline=""))
        incomplete = "" if lines[-1].endswith("\n") else lines.pop()
        yield from lines
    if incomplete:
        yield incomplete


def _detect_delimiter(text: str, marks: str) -> str:
    """Return the most likely delimiter of a CSV file.

    The most likely one splits the header into the most cells, and each of the first rows into the
    same number. Quoted text is not split. A mark of numbers is chosen only if no other delimiter
    fits.

    text: the start of the file.  marks: the marks of numbers that the user gave, as one text.
    """

    def rate_delimiter(delimiter: str) -> tuple[bool, bool, int, bool]:
        """Return what makes a delimiter likely, the most important first.

        The four values are: whether it fits all rows, whether it fits and is not a mark of numbers,
        the number of cells of the header, and whether all rows have the same width. The last is
        also True for a table with one column.
        """
        reader = csv.reader(io.StringIO(text[:SNIFFED_TEXT], newline=""), delimiter=delimiter)
        try:
            widths = [len(row) for row in islice(reader, SNIFFED_ROWS) if row]
        except csv.Error:
            # A delimiter with which the text cannot be parsed is the least likely one.
            widths = []

        width = widths[0] if widths else 0
        same_width = len(set(widths)) == 1
        splits = width > 1
        return same_width and splits, delimiter not in marks and splits, width, same_width

    return max(DELIMITERS, key=rate_delimiter)


# --- Parquet -------------------------------------------------------------------------------


def _read_parquet(file: Path, rows: int | None, only: Collection[str] | None) -> Iterator[Table]:
    """Yield the parts of a Parquet file.  rows, only: as in `read_parts`.

    Raises TableError if pyarrow is missing, or if the file cannot be read or has no rows.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TableError("Parquet files need pyarrow: pip install 'ssla[cli]'.") from None
    try:
        # A pre-buffered file would keep every row group that was read.
        with pyarrow.parquet.ParquetFile(
            file, pre_buffer=False, buffer_size=BYTES_AT_ONCE
        ) as source:
            stored = [str(name) for name in source.schema_arrow.names]
            # The names that the table has, by the names in the file.
            names = dict(zip(stored, _complete_names(file, stored), strict=True))
            rows_in_file = source.metadata.num_rows
            if not rows_in_file:
                raise TableError(f"{file} has a header but no rows.")
            needed = [name for name in stored if only is None or names[name] in only]
            types = {
                names[column.name]: _get_value_type(column.type) for column in source.schema_arrow
            }
            # Without any column the number of rows would be unknown: the first one is read.
            batches = source.iter_batches(rows or rows_in_file, columns=needed or stored[:1])
            for part in split_batches(batches, rows or rows_in_file):
                cells: dict[str, Any] = {name: [] for name in names.values()}
                for stored_name in part.column_names:
                    cells[names[stored_name]] = _read_arrow_cells(part.column(stored_name))
                yield Table(file, cells, part.num_rows, types=types)
    except TableError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise TableError(f"{file} is not a readable Parquet file ({str(error)[:100]}).") from None


def _get_value_type(arrow_type: Any) -> Any:
    """Return the type of the values of a dictionary-encoded type; another type unchanged."""
    return arrow_type.value_type if str(arrow_type).startswith("dictionary") else arrow_type


def _read_arrow_cells(column: Any) -> Sequence[Any] | np.ndarray:
    """Return the cells of a column of pyarrow.

    The cells are an array (n,) if all are integers or floats, and otherwise a list with None for
    gaps.
    """
    type_name = str(column.type)
    is_number = type_name.startswith(("int", "uint", "float", "double", "halffloat"))
    if column.null_count == 0 and is_number:
        array: np.ndarray = column.to_numpy()
        return array
    cells: list[Any] = column.to_pylist()
    return cells


# --- Excel ---------------------------------------------------------------------------------


def _read_excel(file: Path) -> Table:
    """Return the first sheet as a table, with the values that formulas had when it was saved.

    Rows without a value are left out. Warns of other sheets, and of formulas without a value.
    Raises TableError if the file cannot be read or has no rows.
    """
    rows, formulas, sheets = _load_first_sheet(file)
    if sheets[1:]:
        unread = _list_first_names(sheets[1:])
        warn(f"{file}: only the first sheet {sheets[0]!r} is read, not {unread}.")

    lost = 0  # formulas without a value
    for row, formulas_of_row in zip(rows, formulas, strict=True):
        for value, formula in zip(row, formulas_of_row, strict=True):
            lost += value is None and formula is not None
    if lost:
        warn(
            f"{file}: {lost} formulas have no stored value and count as empty cells. If they "
            "should have one, open the file in a spreadsheet program and save it again."
        )

    rows = [row for row in rows if any(cell is not None for cell in row)]
    if not rows:
        raise TableError(f"{file} is empty.")

    # The table is as wide as the last column with a value. Rows may be shorter or longer.
    width = max(i + 1 for row in rows for i, cell in enumerate(row) if cell is not None)
    stripped = []
    for row in rows:
        padded = (row + [None] * width)[:width]
        stripped.append([cell.strip() if isinstance(cell, str) else cell for cell in padded])

    head, *body = stripped
    names = _complete_names(file, ["" if name is None else str(name) for name in head])
    if not body:
        raise TableError(f"{file} has a header but no rows.")
    return Table(file, {name: [row[i] for row in body] for i, name in enumerate(names)}, len(body))


def _load_first_sheet(file: Path) -> tuple[list[list[Any]], list[list[Any]], list[str]]:
    """Return the rows of the first sheet as values and as formulas, and the titles of all sheets.

    A cell is at the same position in both; an empty cell, and a formula without a stored value, has
    the value None. Raises TableError if openpyxl is missing, or cannot read the file.
    """
    try:
        import openpyxl
    except ImportError:
        raise TableError(
            "Excel files need openpyxl: pip install 'ssla[excel]'. Or save the sheet as CSV."
        ) from None

    try:
        with_values, with_formulas = (
            openpyxl.load_workbook(file, read_only=True, data_only=data_only)
            for data_only in (True, False)
        )
        rows, formulas = (
            [list(row) for row in book.worksheets[0].iter_rows(values_only=True)]
            for book in (with_values, with_formulas)
        )
        sheets = [sheet.title for sheet in with_values.worksheets]
        with_values.close()
        with_formulas.close()
    except Exception as error:  # a bad file can raise anything
        raise TableError(
            f"{file} is not a readable Excel file ({str(error)[:100]}). Save the sheet as CSV."
        ) from None

    return rows, formulas, sheets


# --- names ---------------------------------------------------------------------------------


def _complete_names(file: Path, names: list[str]) -> list[str]:
    """Return the names of the columns, after a check.

    A first column without a name gets the name of an index of pandas. Warns of columns that are a
    row index. Raises TableError for too many columns, for no column, for other columns without a
    name, and for names that occur twice.

    file: its name, for messages.  names: those of the header, "" where there is none.
    """
    if len(names) > MOST_COLUMNS:
        raise TableError(
            f"{file} has {len(names):,} columns; at most {MOST_COLUMNS:,} are supported. Are rows "
            "and columns exchanged?"
        )

    # pandas writes its index as a first column without a name, and reads it as "Unnamed: 0".
    if names and not names[0]:
        candidates = chain(["Unnamed: 0"], (f"Unnamed: 0.{i}" for i in count(1)))
        names = [next(name for name in candidates if name not in names), *names[1:]]

    for index in filter(INDEX.match, names):
        warn(f"{file}: the column {index!r} is treated as a row index and is not an input.")
    if not names or any(not name for name in names):
        raise TableError(
            f"{file}: column {names.index('') + 1 if names else 1} has no name. The first line "
            "must name the columns."
        )

    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise TableError(
            f"{file} has several columns named {twice[0]!r}. Rename or remove all but one."
        )

    return names


def _list_first_names(names: list[str]) -> str:
    """Return the first names as a text, and their number if there are more."""
    text = ", ".join(names[:LISTED_NAMES])
    return f"{text}, … ({len(names)} in total)" if len(names) > LISTED_NAMES else text
