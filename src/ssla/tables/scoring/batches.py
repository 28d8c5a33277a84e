"""Batches of rows in the forms of data tools: pandas, polars, a mapping of arrays, an array.

A batch is recognised by the module of its class, so pandas and polars need not be imported. Only
where a model needs a data frame and gets none, pandas is.
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
from ssla.tables.columns.frames import make_table, replace_masked
from ssla.tables.scoring.answer_columns import Columns

SOURCE = Path("the batch")
PANDAS, POLARS, MAPPING, ARRAY = "pandas", "polars", "mapping", "array"


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows in one of the four forms.

    form: PANDAS, POLARS, MAPPING or ARRAY, in which the batch came and its columns are returned.
    content: the data frame, the mapping of names to columns (N, …), or the array (N, …).
    """

    form: str
    content: Any

    @property
    def names(self) -> list[str]:
        """The names of the columns; an array has none."""
        if self.form == ARRAY:
            return []
        # Iterating over a mapping gives its names.
        return [str(name) for name in getattr(self.content, "columns", self.content)]

    @property
    def rows(self) -> int:
        """The number of rows."""
        if self.form != MAPPING:
            return len(self.content)
        return len(next(iter(self.content.values()))) if self.content else 0

    def get_column(self, name: str) -> Any:
        """Return a column (N, …) as it is in the batch.

        Raises ValueError for an unknown name; the message has the most similar one.
        """
        if name not in self.names:
            raise ValueError(
                f"The batch has no column {name!r}.{did_you_mean(name, self.names)} It has: "
                f"{', '.join(self.names)}."
            )
        return self.content[name]

    def to_table(self, names: Collection[str]) -> Table:
        """Return a data frame or a mapping as a table with the cells of the named columns.

        The other columns have no cells. A name that the batch does not have is not an error here:
        the table raises it when the column is read. Raises ValueError if the columns have different
        lengths.
        """
        cells = {
            name: list_cells(self.get_column(name)) if name in names else [] for name in self.names
        }
        if any(len(cells[name]) != self.rows for name in names if name in cells):
            raise ValueError("The columns of the batch have different lengths.")
        return Table(SOURCE, cells, self.rows)

    def to_renamed_table(self, names: Sequence[str], model_names: Sequence[str]) -> Table:
        """Return the named columns as a table under the names that an estimator has for them.

        names, model_names: in the same order. All columns of an array are returned, and `names` is
        not used. Columns of a data frame or an array keep their types, as in the estimator's own
        reading. Raises ValueError if the number of columns is not that of the inputs, or if a
        column is missing.
        """
        given = self.to_array().shape[1] if self.form == ARRAY else len(names)
        if given != len(model_names):
            raise ValueError(
                f"The model has {len(model_names)} inputs, but {given} were given. Its inputs are: "
                f"{', '.join(model_names)}."
            )
        if self.form == ARRAY:
            return make_table(self.to_array(), model_names)
        if self.form == MAPPING:
            renamed = {
                model_name: self.get_column(name)
                for name, model_name in zip(names, model_names, strict=True)
            }
            return Batch(MAPPING, renamed).to_table(model_names)

        return make_table(self._select_columns(names), model_names)

    def _select_columns(self, names: Sequence[str]) -> Any:
        """Return the named columns of a data frame as a data frame of the same library.

        Raises ValueError for an unknown name.
        """
        for name in names:
            self.get_column(name)  # its error names the most similar column
        # Both libraries take columns by their positions.
        positions = [self.names.index(name) for name in names]
        if self.form == PANDAS:
            return self.content.iloc[:, positions]
        return self.content[:, positions]

    def to_frame(self, names: Sequence[str]) -> Any:
        """Return the named columns as a data frame.

        The frame is of the batch's own library, or of pandas for an array or a mapping. The columns
        of an array get the names in their order. Raises ValueError if a column is missing, or if an
        array has another number of columns.
        """
        if self.form == ARRAY:
            if self.to_array().shape[1:] != (len(names),):
                raise ValueError(
                    f"The model has {len(names)} inputs ({', '.join(names)}), but the array is "
                    f"{self.content.shape}."
                )
            return import_module(PANDAS).DataFrame(self.to_array(), columns=list(names))

        if self.form == MAPPING:
            return import_module(PANDAS).DataFrame(
                {name: replace_masked(self.get_column(name)) for name in names}
            )

        return self._select_columns(names)

    def to_matrix(self, names: Sequence[str]) -> np.ndarray:
        """Return the d named columns of a data frame or a mapping as an array (N, d).

        A single column whose cells are arrays is the array (N, …) of these. Raises ValueError if a
        column is missing or holds other cells than numbers.
        """
        columns = [np.asarray(replace_masked(self.get_column(name))) for name in names]
        if len(columns) == 1:
            cells = columns[0]
            # A column of arrays is read as one array, so that its numbers can be checked.
            if cells.dtype == object and len(cells) and np.ndim(cells[0]):
                columns = [np.stack(list(cells))]

        # NumPy's letters for booleans, integers and floats.
        for name, column in zip(names, columns, strict=True):
            if column.dtype.kind not in "biuf":
                raise ValueError(
                    f"The column {name!r} of the batch holds {column.dtype}, but this model needs "
                    "numbers."
                )

        if len(columns) == 1 and columns[0].ndim > 1:
            return columns[0]
        return np.stack(columns, 1)

    def to_array(self) -> np.ndarray:
        """Return the content of a batch in the form ARRAY, (N, …) with at least two dimensions.

        Raises ValueError if it has fewer, or if it does not hold numbers.
        """
        array: np.ndarray = self.content
        if array.ndim < 2 or array.dtype.kind not in "biuf":
            raise ValueError(
                f"The batch must be an array (rows, inputs) of numbers, but is {array.dtype} of "
                f"shape {array.shape}."
            )
        return array

    def attach_columns(self, columns: Columns, keep: Sequence[str]) -> Any:
        """Return the kept columns of the batch, followed by `columns`, in the batch's form.

        A mapping and an array become a dictionary.  keep: names of columns of the batch. Warns of a
        kept column that gets another name. Raises ValueError for a name that the batch does not
        have.
        """
        kept = {
            output_name: self.get_column(name)
            for name, output_name in name_kept_columns(keep, columns).items()
        }
        if self.form == PANDAS:
            # Arrays have no index of their own, so pandas does not reorder the rows of the batch.
            arrays = {name: getattr(column, "array", column) for name, column in kept.items()}
            frame = sys.modules["pandas"].DataFrame
            return frame(arrays | columns, index=self.content.index)
        if self.form == POLARS:
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
    """Return the batch of a data frame, mapping, tensor or array, which is recognised by its class.

    Raises TypeError for another form, and ValueError for a frame with two columns of one name.
    """
    library = type(content).__module__.partition(".")[0]
    if library in (PANDAS, POLARS) and type(content).__name__ == "DataFrame":
        names = [str(name) for name in content.columns]
        if len(set(names)) < len(names):
            raise ValueError(
                "The batch has several columns of one name. Rename or remove all but one."
            )
        return Batch(library, content)

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
    """Return the cells (N,) of a column.

    They are an array if they are numbers by their type, and otherwise a list of Python objects with
    None for gaps.

    column: a series of pandas or polars, an array, or a sequence.
    """
    # NumPy's letters are i, u and f for integers and floats, and M for moments.
    if hasattr(column, "null_count") and hasattr(column, "to_list"):  # polars
        is_number = column.dtype.is_integer() or column.dtype.is_float()
        if is_number and not column.null_count():
            return np.asarray(column.to_numpy())
        return list(column.to_list())

    missing: list[bool] | None = None  # None: the cells have no gaps other than their own
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
    """Return the name that each kept column has in the output, by its name in the batch.

    keep: names of columns of the batch.  columns: names of the outputs. A kept column with the name
    of an output gets the prefix "input_", and the user is warned.
    """
    output_names: dict[str, str] = {}
    for name in keep:
        output_name = name
        # The prefix is repeated until the name is new among outputs and kept columns.
        while output_name in columns or (output_name != name and output_name in keep):
            output_name = f"input_{output_name}"
        if output_name != name:
            warn(
                f"The kept column {name!r} is written as {output_name!r}, because {name!r} is an "
                "output."
            )
        output_names[name] = output_name

    return output_names
