"""Writing a table completely or not at all."""

from __future__ import annotations

import contextlib
import csv
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from ssla.files.replacing import new_file
from ssla.tables.columns.kinds import TableError

FORMULA = (
    "=",
    "+",
    "-",
    "@",
    "\t",
    "\r",
)  # a spreadsheet executes a text that begins with one of these
PLAIN_NUMBER = (
    r"-|[+-]?([0-9][0-9.,]*|[.,][0-9]+)([eE][+-]?[0-9]+)?"  # also 1.234,5, and "-" for a gap
)
GROUP = 1 << 17  # rows of a row group in Parquet


def check_output(path: Path) -> None:
    """TableError for an unsupported suffix, before the work starts."""
    if path.suffix.lower() not in (".csv", ".parquet", ".pq"):
        raise TableError(f"The output {path} must end in .csv or .parquet.")
    if path.is_dir():
        raise TableError(f"The output {path} is a directory.")


def write_table(path: Path, columns: Mapping[str, np.ndarray]) -> None:
    """CSV or Parquet by the suffix, through a temporary file beside it."""
    with new_table(path) as add:
        add(columns)


Add = Callable[[Mapping[str, np.ndarray]], None]


@contextlib.contextmanager
def new_table(path: Path, types: Mapping[str, Any] | None = None) -> Iterator[Add]:
    """A function that appends rows, with the same columns in every call.

    The file appears if the block ends without an error.

    types: pyarrow types of columns of a Parquet file, where the first rows may not show them.
    """
    check_output(path)
    with new_file(path) as draft:
        if path.suffix.lower() == ".csv":
            with draft.open("w", newline="", encoding="utf-8") as stream:
                yield _append_csv(stream)
        else:
            with _ParquetRows(draft, dict(types or {})) as rows:
                yield rows.add


def _append_csv(stream: IO[str]) -> Add:
    writer = csv.writer(stream)
    headers: list[str] = []

    def add(columns: Mapping[str, np.ndarray]) -> None:
        if not headers:
            headers.extend(map(harmless, columns))
            writer.writerow(headers)
        cells = (
            v.tolist() if v.dtype.kind == "f" else map(harmless, v.tolist())
            for v in columns.values()
        )
        writer.writerows(zip(*cells, strict=True))

    return add


class _ParquetRows:
    """Collects rows until they fill a row group.

    The first rows decide the types that are not given.
    """

    def __init__(self, draft: Path, types: dict[str, Any]) -> None:
        self.draft, self.types = draft, types
        self.waiting: list[Any] = []
        self.writer: Any = None

    def add(self, columns: Mapping[str, np.ndarray]) -> None:
        import pyarrow

        made = {
            name: pyarrow.array(v if v.dtype.kind == "f" else v.tolist(), self.types.get(name))
            for name, v in columns.items()
        }
        self.types |= {name: array.type for name, array in made.items()}
        self.waiting.append(pyarrow.table(made))
        if sum(table.num_rows for table in self.waiting) >= GROUP:
            self._write()

    def _write(self) -> None:
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.concat_tables(self.waiting)
        self.waiting = []
        if self.writer is None:
            self.writer = pyarrow.parquet.ParquetWriter(self.draft, table.schema)
        self.writer.write_table(table)

    def __enter__(self) -> _ParquetRows:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self.waiting:
            self._write()
        if self.writer is not None:
            self.writer.close()


def harmless(cell: Any) -> Any:
    """A text that a spreadsheet would execute as a formula, prefixed with an apostrophe.

    Numbers are unchanged, also as texts.
    """
    formula = (
        isinstance(cell, str) and cell.startswith(FORMULA) and not re.fullmatch(PLAIN_NUMBER, cell)
    )
    return f"'{cell}" if formula else cell
