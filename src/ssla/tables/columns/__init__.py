"""Reads tables, turns their columns into numbers, and writes tables.

Tables are CSV, Parquet and Excel files and data frames, with numbers, booleans, dates, categories
and gaps.

Words of all modules here:

- *cell*: one value of a column as it was read: a text of a CSV file, or a Python object.
- *gap*: a cell without a value.
- *kind* of a column: number, boolean, text or date (`kinds`). A column of texts is a category.
- *style*: the format of numbers, such as 1.234,5 €. Its *marks* are those of decimals and
  thousands.
- *levels*: the different values of a category. *Rare* levels share one column of numbers, and a
  level that the training table did not have is *unknown*.
- *feature*: what became of one column: how its cells become one or more columns of numbers.
- *plan*: the features of a training table, by which every later table is encoded (`plan`).
"""

from __future__ import annotations

from ssla.tables.columns.kinds import Column, Style, TableError
from ssla.tables.columns.plan import Encoded, Plan, make_plan
from ssla.tables.columns.reading import Table, read_parts, read_table
from ssla.tables.columns.target import Target, read_later_labels, read_later_numbers, read_target
from ssla.tables.columns.writing import open_table, write_table

__all__ = [
    "Column",
    "Encoded",
    "Plan",
    "Style",
    "Table",
    "TableError",
    "Target",
    "make_plan",
    "open_table",
    "read_later_labels",
    "read_later_numbers",
    "read_parts",
    "read_table",
    "read_target",
    "write_table",
]
