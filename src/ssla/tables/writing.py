"""Writing a table whole or not at all."""

from __future__ import annotations

import csv
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ssla.tables.columns import TableError


def check_output(path: Path) -> None:
    """Refuse an ending that cannot be written, before any work is done."""
    if path.suffix.lower() not in (".csv", ".parquet", ".pq"):
        raise TableError(f"The output {path} must end in .csv or .parquet.")
    if path.is_dir():
        raise TableError(f"The output {path} is a directory.")


def write_table(path: Path, columns: Mapping[str, np.ndarray]) -> None:
    """CSV or Parquet by the ending, through a temporary file beside it."""
    check_output(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(handle)
    draft = Path(name)
    try:
        if path.suffix.lower() == ".csv":
            with draft.open("w", newline="", encoding="utf-8") as stream:
                writer = csv.writer(stream)
                writer.writerow(columns)
                writer.writerows(zip(*(values.tolist() for values in columns.values()), strict=True))
        else:
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.table({name: pyarrow.array(v.tolist()) for name, v in columns.items()}), draft)
        draft.chmod(0o644)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
