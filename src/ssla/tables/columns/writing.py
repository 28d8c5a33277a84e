"""Writing a table completely or not at all."""

from __future__ import annotations

import contextlib
import csv
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from ssla.files.replacing import replace_file
from ssla.tables.columns.kinds import TableError

# A spreadsheet executes a text that begins with one of these.
FORMULA = ("=", "+", "-", "@", "\t", "\r")
# A text of these is harmless: also 1.234,5, and "-" for a gap.
PLAIN_NUMBER = r"-|[+-]?([0-9][0-9.,]*|[.,][0-9]+)([eE][+-]?[0-9]+)?"
GROUP = 1 << 17  # fewest rows of a row group in Parquet, but for the last one; a guess
AddRows = Callable[[Mapping[str, np.ndarray]], None]  # called with columns (n,) by name


def check_output(path: Path) -> None:
    """Raise TableError if no table can be written to the path.

    This is so if its suffix is not supported, or if it is a directory.
    """
    if path.suffix.lower() not in (".csv", ".parquet", ".pq"):
        raise TableError(f"The output {path} must end in .csv or .parquet.")
    if path.is_dir():
        raise TableError(f"The output {path} is a directory.")


def write_table(path: Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write columns (n,) as CSV or Parquet, by the suffix of the path.

    The file is replaced only when all is written. Raises TableError for an unsupported suffix.
    """
    with open_table(path) as add_rows:
        add_rows(columns)


@contextlib.contextmanager
def open_table(path: Path, types: Mapping[str, Any] | None = None) -> Iterator[AddRows]:
    """Open a new table, and yield the function that appends rows to it.

    Every call of that function must have the same columns. The file appears, or is replaced, when
    the block ends without an error; after an error nothing is written. Raises TableError for an
    unsupported suffix.

    types: pyarrow types of columns of a Parquet file, by name. The first rows of such a column may
    be gaps only. The types of other columns are those of their first rows.
    """
    check_output(path)
    with replace_file(path) as draft:
        if path.suffix.lower() == ".csv":
            with draft.open("w", newline="", encoding="utf-8") as stream:
                yield _make_csv_appender(stream)
        else:
            with _ParquetRows(draft, dict(types or {})) as rows:
                yield rows.add_rows


def _make_csv_appender(stream: IO[str]) -> AddRows:
    """Return a function that appends rows to an open CSV file; its first call writes the header.

    The columns of every call are those of the first.
    """
    writer = csv.writer(stream)
    has_header = False

    def add_rows(columns: Mapping[str, np.ndarray]) -> None:
        """Append n rows, given as columns (n,) by name.

        Texts that a spreadsheet would execute are made harmless.
        """
        nonlocal has_header
        if not has_header:
            writer.writerow(map(escape_formula, columns))
            has_header = True

        # Floats need no check of their cells.
        cells = (
            column.tolist() if column.dtype.kind == "f" else map(escape_formula, column.tolist())
            for column in columns.values()
        )
        writer.writerows(zip(*cells, strict=True))

    return add_rows


class _ParquetRows:
    """Collects rows until they fill a row group.

    The first rows decide the types that are not given.
    """

    def __init__(self, draft: Path, types: dict[str, Any]) -> None:
        """Prepare a new file.  types: pyarrow types of some columns, by name."""
        self.draft = draft
        self.types = types
        self.waiting: list[Any] = []
        self.writer: Any = None

    def add_rows(self, columns: Mapping[str, np.ndarray]) -> None:
        """Append n rows, given as columns (n,) by name.

        All rows that wait are written if they fill a row group.
        """
        import pyarrow

        arrays = {
            name: pyarrow.array(
                column if column.dtype.kind == "f" else column.tolist(), self.types.get(name)
            )
            for name, column in columns.items()
        }

        # Later rows must have the types of the first.
        self.types |= {name: array.type for name, array in arrays.items()}
        self.waiting.append(pyarrow.table(arrays))
        if sum(table.num_rows for table in self.waiting) >= GROUP:
            self._write_group()

    def _write_group(self) -> None:
        """Write the rows that wait, as one row group. The first group creates the file."""
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.concat_tables(self.waiting)
        self.waiting = []
        if self.writer is None:
            self.writer = pyarrow.parquet.ParquetWriter(self.draft, table.schema)
        self.writer.write_table(table)

    def __enter__(self) -> _ParquetRows:
        """Return this object, to which the block adds rows."""
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Write the last rows, unless there was an error, and close the file."""
        if error_type is None and self.waiting:
            self._write_group()
        if self.writer is not None:
            self.writer.close()


def escape_formula(cell: Any) -> Any:
    """Return a cell that a spreadsheet does not execute.

    A text that it would execute as a formula gets an apostrophe in front. Other texts, numbers that
    are written as texts, and values that are not texts are returned unchanged.
    """
    is_formula = (
        isinstance(cell, str) and cell.startswith(FORMULA) and not re.fullmatch(PLAIN_NUMBER, cell)
    )
    return f"'{cell}" if is_formula else cell
