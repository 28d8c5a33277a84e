"""Batches of rows in the forms that data tools hand over, and back: pandas, polars, a mapping of
arrays, an array.

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
from ssla.tables.columns.frames import table_of, with_gaps
from ssla.tables.scoring.answer_columns import Columns

SOURCE = Path("the batch")
PANDAS, POLARS, MAPPING, ARRAY = "pandas", "polars", "mapping", "array"


@dataclass(frozen=True, eq=False)
class Batch:
    """kind: the form in which the batch came, and in which its columns are returned."""

    kind: str
    content: Any

    @property
    def names(self) -> list[str]:
        return (
            []
            if self.kind == ARRAY
            else [str(name) for name in getattr(self.content, "columns", self.content)]
        )

    @property
    def rows(self) -> int:
        if self.kind != MAPPING:
            return len(self.content)
        return len(next(iter(self.content.values()))) if self.content else 0

    def column(self, name: str) -> Any:
        if name not in self.names:
            raise ValueError(
                f"The batch has no column {name!r}.{did_you_mean(name, self.names)} It has: "
                f"{', '.join(self.names)}."
            )
        return self.content[name]

    def table(self, names: Collection[str]) -> Table:
        """The named columns as cells.

        A name that the batch lacks is reported when its column is read.
        """
        here = self.names
        cells = {name: cells_of(self.column(name)) if name in names else [] for name in here}
        if any(len(cells[name]) != self.rows for name in names if name in cells):
            raise ValueError("The columns of the batch have different lengths.")
        return Table(SOURCE, cells, self.rows)

    def selected(self, names: Sequence[str], called: Sequence[str]) -> Table:
        """The named columns (of an array: all) under the names of an estimator, in the form in
        which it reads them itself.
        """
        given = self.array().shape[1] if self.kind == ARRAY else len(names)
        if given != len(called):
            raise ValueError(
                f"The model has {len(called)} inputs, but {given} were given. Its inputs are: "
                f"{', '.join(called)}."
            )
        if self.kind == ARRAY:
            return table_of(self.array(), called)
        for name in names:
            self.column(name)  # its error names the most similar column
        if self.kind == MAPPING:
            own = {place: self.column(name) for name, place in zip(names, called, strict=True)}
            return Batch(MAPPING, own).table(called)
        at = [self.names.index(name) for name in names]
        return table_of(
            self.content.iloc[:, at] if self.kind == PANDAS else self.content[:, at], called
        )

    def frame(self, names: Sequence[str]) -> Any:
        """The named columns as a data frame: of the batch's own library, otherwise of pandas.

        An array has them in this order.
        """
        if self.kind == ARRAY:
            if self.array().shape[1:] != (len(names),):
                raise ValueError(
                    f"The model has {len(names)} inputs ({', '.join(names)}), but the array is "
                    f"{self.content.shape}."
                )
            return import_module(PANDAS).DataFrame(self.array(), columns=list(names))
        columns = {
            name: self.column(name) for name in names
        }  # its error names the most similar column
        if self.kind == MAPPING:
            return import_module(PANDAS).DataFrame(
                {name: with_gaps(column) for name, column in columns.items()}
            )
        at = [self.names.index(name) for name in names]
        return self.content.iloc[:, at] if self.kind == PANDAS else self.content[:, at]

    def matrix(self, names: Sequence[str]) -> np.ndarray:
        """The named columns beside one another (N, d).

        A single column of arrays is the input itself (N, …).
        """
        columns = [np.asarray(with_gaps(self.column(name))) for name in names]
        if (
            len(columns) == 1
            and columns[0].dtype == object
            and len(columns[0])
            and np.ndim(columns[0][0])
        ):
            columns = [np.stack(list(columns[0]))]
        for name, column in zip(names, columns, strict=True):
            if column.dtype.kind not in "biuf":
                raise ValueError(
                    f"The column {name!r} of the batch holds {column.dtype}, but this model needs "
                    "numbers."
                )
        return columns[0] if len(columns) == 1 and columns[0].ndim > 1 else np.stack(columns, 1)

    def array(self) -> np.ndarray:
        array: np.ndarray = self.content
        if array.ndim < 2 or array.dtype.kind not in "biuf":
            raise ValueError(
                f"The batch must be an array (rows, inputs) of numbers, but is {array.dtype} of "
                f"shape {array.shape}."
            )
        return array

    def returned(self, columns: Columns, keep: Sequence[str]) -> Any:
        """The columns in the form of the batch, after the kept ones."""
        kept = {place: self.column(name) for name, place in kept_names(keep, columns).items()}
        if self.kind == PANDAS:
            frame = sys.modules["pandas"].DataFrame
            return frame(
                {name: getattr(c, "array", c) for name, c in kept.items()} | columns,
                index=self.content.index,
            )
        if self.kind == POLARS:
            polars = sys.modules["polars"]
            made = {
                name: polars.Series(name, c.tolist() if c.dtype == object else c)
                for name, c in columns.items()
            }
            return polars.DataFrame(
                [c.alias(name) for name, c in kept.items()] + list(made.values())
            )
        return kept | columns


def batch_of(content: Any) -> Batch:
    """TypeError for a form that is not supported."""
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
        return Batch(ARRAY, with_gaps(content))
    raise TypeError(
        "The batch must be a data frame of pandas or polars, a mapping of column names to arrays, "
        f"or an array, but is a {type(content).__module__}.{type(content).__name__}."
    )


def cells_of(column: Any) -> Sequence[Any] | np.ndarray:
    """Numbers as an array; other cells as a list, with None for gaps."""
    if hasattr(column, "null_count") and hasattr(column, "to_list"):  # polars
        plain = column.dtype.is_integer() or column.dtype.is_float()
        return (
            np.asarray(column.to_numpy())
            if plain and not column.null_count()
            else list(column.to_list())
        )
    missing = None
    column = with_gaps(column)
    if hasattr(column, "isna"):  # pandas
        if isinstance(column.dtype, np.dtype) and column.dtype.kind in "iuf":
            return np.asarray(column)
        missing = column.isna().tolist()
    elif isinstance(column, np.ndarray):
        if column.dtype.kind in "iuf":
            return column
        if column.dtype.kind == "M":
            missing, column = np.isnat(column).tolist(), column.astype("datetime64[us]")
    cells = [cell.item() if isinstance(cell, np.generic) else cell for cell in _list(column)]
    return (
        cells
        if missing is None
        else [None if gap else cell for cell, gap in zip(cells, missing, strict=True)]
    )


def _list(column: Any) -> list[Any]:
    return column.tolist() if hasattr(column, "tolist") else list(column)


def kept_names(keep: Sequence[str], columns: Collection[str]) -> dict[str, str]:
    """Kept column -> its name in the output; a column with the name of an output gets a prefix,
    and a note.
    """
    places: dict[str, str] = {}
    for name in keep:
        place = name
        while place in columns or (place != name and place in keep):
            place = f"input_{place}"
        if place != name:
            warn(
                f"The kept column {name!r} is written as {place!r}, because {name!r} is an output."
            )
        places[name] = place
    return places
