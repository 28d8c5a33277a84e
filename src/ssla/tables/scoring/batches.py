"""Batches of rows in the forms of data tools: pandas, polars, a mapping of arrays, an array.

A batch is recognised by the module of its class, so that pandas and polars are not imported (but
where a model needs a data frame and gets none).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ssla._checks import did_you_mean, warn
from ssla.data import as_tensor
from ssla.tables.columns import Table
from ssla.tables.columns.frames import replace_masked, table_of
from ssla.tables.scoring.answer_columns import Columns

SOURCE = Path("the batch")
PANDAS, POLARS, MAPPING, ARRAY = "pandas", "polars", "mapping", "array"


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows in one of the four forms.

    kind: the form in which the batch came, and in which its columns are returned.
    """

    kind: str
    content: Any

    @property
    def names(self) -> list[str]:
        """The names of the columns; an array has none."""
        if self.kind == ARRAY:
            return []
        return [str(name) for name in getattr(self.content, "columns", self.content)]

    @property
    def rows(self) -> int:
        """The number of rows."""
        if self.kind != MAPPING:
            return len(self.content)
        return len(next(iter(self.content.values()))) if self.content else 0

    def column(self, name: str) -> Any:
        """Return a column; the ValueError of an unknown name has the most similar one."""
        if name not in self.names:
            raise ValueError(
                f"The batch has no column {name!r}.{did_you_mean(name, self.names)} It has: "
                f"{', '.join(self.names)}."
            )
        return self.content[name]

    def table(self, names: Collection[str]) -> Table:
        """Return the named columns as a table of cells; the other columns are empty.

        A name that the batch lacks is reported when its column is read. Raises ValueError if the
        columns have different lengths.
        """
        cells = {
            name: list_cells(self.column(name)) if name in names else [] for name in self.names
        }
        if any(len(cells[name]) != self.rows for name in names if name in cells):
            raise ValueError("The columns of the batch have different lengths.")
        return Table(SOURCE, cells, self.rows)

    def renamed_table(self, names: Sequence[str], model_names: Sequence[str]) -> Table:
        """Return the named columns (of an array: all) under the names that an estimator has.

        They are in the form in which the estimator reads them itself. Raises ValueError if their
        number is not that of its inputs, or if a column is missing.
        """
        given = self.array().shape[1] if self.kind == ARRAY else len(names)
        if given != len(model_names):
            raise ValueError(
                f"The model has {len(model_names)} inputs, but {given} were given. Its inputs are: "
                f"{', '.join(model_names)}."
            )
        if self.kind == ARRAY:
            return table_of(self.array(), model_names)
        if self.kind == MAPPING:
            renamed = {
                model_name: self.column(name)
                for name, model_name in zip(names, model_names, strict=True)
            }
            return Batch(MAPPING, renamed).table(model_names)
        return table_of(self._select_columns(names), model_names)

    def _select_columns(self, names: Sequence[str]) -> Any:
        """Return the named columns of a data frame as one; ValueError for an unknown name."""
        for name in names:
            self.column(name)  # its error names the most similar column
        positions = [self.names.index(name) for name in names]
        return (
            self.content.iloc[:, positions] if self.kind == PANDAS else self.content[:, positions]
        )

    def frame(self, names: Sequence[str]) -> Any:
        """Return the named columns as a data frame of the batch's own library, or of pandas.

        An array has them in this order. Raises ValueError if columns are missing.
        """
        if self.kind == ARRAY:
            if self.array().shape[1:] != (len(names),):
                raise ValueError(
                    f"The model has {len(names)} inputs ({', '.join(names)}), but the array is "
                    f"{self.content.shape}."
                )
            return import_module(PANDAS).DataFrame(self.array(), columns=list(names))
        if self.kind == MAPPING:
            return import_module(PANDAS).DataFrame(
                {name: replace_masked(self.column(name)) for name in names}
            )
        return self._select_columns(names)

    def matrix(self, names: Sequence[str]) -> np.ndarray:
        """Return the named columns beside one another (N, d).

        A single column of arrays is the input itself (N, …). Raises ValueError if columns are
        missing or hold other cells than numbers.
        """
        columns = [np.asarray(replace_masked(self.column(name))) for name in names]
        if len(columns) == 1:
            cells = columns[0]
            if cells.dtype == object and len(cells) and np.ndim(cells[0]):
                columns = [np.stack(list(cells))]
        for name, column in zip(names, columns, strict=True):
            if column.dtype.kind not in "biuf":
                raise ValueError(
                    f"The column {name!r} of the batch holds {column.dtype}, but this model needs "
                    "numbers."
                )
        return columns[0] if len(columns) == 1 and columns[0].ndim > 1 else np.stack(columns, 1)

    def array(self) -> np.ndarray:
        """Return the array (N, …) of a batch of this form; ValueError unless it holds numbers."""
        array: np.ndarray = self.content
        if array.ndim < 2 or array.dtype.kind not in "biuf":
            raise ValueError(
                f"The batch must be an array (rows, inputs) of numbers, but is {array.dtype} of "
                f"shape {array.shape}."
            )
        return array

    def attach(self, columns: Columns, keep: Sequence[str]) -> Any:
        """Return the kept columns of the batch and then the given ones, in the batch's form.

        An array becomes a dictionary, as a mapping does.
        """
        kept = {
            output_name: self.column(name)
            for name, output_name in name_kept_columns(keep, columns).items()
        }
        if self.kind == PANDAS:
            # Arrays have no index of their own, so the rows are those of the batch.
            arrays = {name: getattr(column, "array", column) for name, column in kept.items()}
            frame = sys.modules["pandas"].DataFrame
            return frame(arrays | columns, index=self.content.index)
        if self.kind == POLARS:
            polars = sys.modules["polars"]
            series = [column.alias(name) for name, column in kept.items()]
            # polars reads texts from a list, and not from an array of objects.
            series += [
                polars.Series(name, column.tolist() if column.dtype == object else column)
                for name, column in columns.items()
            ]
            return polars.DataFrame(series)
        return kept | columns


def read_batch(content: Any) -> Batch:
    """Return the batch of a data frame, mapping, tensor or array.

    Raises TypeError for another form, and ValueError for a frame with two columns of one name.
    """
    origin = type(content).__module__.partition(".")[0]
    if origin in (PANDAS, POLARS) and type(content).__name__ == "DataFrame":
        names = [str(name) for name in content.columns]
        if len(set(names)) < len(names):
            raise ValueError(
                "The batch has several columns of one name. Rename or remove all but one."
            )
        return Batch(origin, content)
    if isinstance(content, Mapping):
        return Batch(MAPPING, content)
    if isinstance(content, Tensor):
        content = as_tensor(content).cpu().numpy()
    if isinstance(content, np.ndarray):
        return Batch(ARRAY, replace_masked(content))
    raise TypeError(
        "The batch must be a data frame of pandas or polars, a mapping of column names to arrays, "
        f"or an array, but is a {type(content).__module__}.{type(content).__name__}."
    )


def list_cells(column: Any) -> Sequence[Any] | np.ndarray:
    """Return numbers (N,) as an array; other cells as a list, with None for gaps."""
    if hasattr(column, "null_count") and hasattr(column, "to_list"):  # polars
        is_number = column.dtype.is_integer() or column.dtype.is_float()
        if is_number and not column.null_count():
            return np.asarray(column.to_numpy())
        return list(column.to_list())
    missing = None
    column = replace_masked(column)
    if hasattr(column, "isna"):  # pandas
        if isinstance(column.dtype, np.dtype) and column.dtype.kind in "iuf":
            return np.asarray(column)
        missing = column.isna().tolist()
    elif isinstance(column, np.ndarray):
        if column.dtype.kind in "iuf":
            return column
        if column.dtype.kind == "M":
            missing = np.isnat(column).tolist()
            column = column.astype("datetime64[us]")  # nanoseconds would become whole numbers
    listed = column.tolist() if hasattr(column, "tolist") else list(column)
    cells = [cell.item() if isinstance(cell, np.generic) else cell for cell in listed]
    if missing is None:
        return cells
    return [None if is_gap else cell for cell, is_gap in zip(cells, missing, strict=True)]


def name_kept_columns(keep: Sequence[str], columns: Collection[str]) -> dict[str, str]:
    """Return the name of each kept column in the output.

    A column with the name of an output gets a prefix, and the user a warning.
    """
    output_names: dict[str, str] = {}
    for name in keep:
        output_name = name
        while output_name in columns or (output_name != name and output_name in keep):
            output_name = f"input_{output_name}"
        if output_name != name:
            warn(
                f"The kept column {name!r} is written as {output_name!r}, because {name!r} is an "
                "output."
            )
        output_names[name] = output_name
    return output_names
