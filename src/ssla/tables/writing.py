"""Writing a table completely or not at all."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ssla.persistence.replacing import new_file
from ssla.tables.columns import TableError

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet executes a text that begins with one of these
PLAIN_NUMBER = r"-|[+-]?([0-9][0-9.,]*|[.,][0-9]+)([eE][+-]?[0-9]+)?"  # also 1.234,5, and "-" for a gap


def check_output(path: Path) -> None:
    """TableError for an unsupported suffix, before the work starts."""
    if path.suffix.lower() not in (".csv", ".parquet", ".pq"):
        raise TableError(f"The output {path} must end in .csv or .parquet.")
    if path.is_dir():
        raise TableError(f"The output {path} is a directory.")


def write_table(path: Path, columns: Mapping[str, np.ndarray]) -> None:
    """CSV or Parquet by the suffix, through a temporary file beside it."""
    check_output(path)
    with new_file(path) as draft:
        if path.suffix.lower() == ".csv":
            with draft.open("w", newline="", encoding="utf-8") as stream:
                writer = csv.writer(stream)
                writer.writerow(map(harmless, columns))
                writer.writerows(zip(*(map(harmless, values.tolist()) for values in columns.values()), strict=True))
        else:
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.table({name: pyarrow.array(v.tolist()) for name, v in columns.items()}), draft)


def harmless(cell: Any) -> Any:
    """A text that a spreadsheet would execute as a formula, prefixed with an apostrophe. Numbers are unchanged, also as texts."""
    formula = isinstance(cell, str) and cell.startswith(FORMULA) and not re.fullmatch(PLAIN_NUMBER, cell)
    return f"'{cell}" if formula else cell
