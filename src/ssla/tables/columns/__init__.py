"""CSV, Parquet and Excel tables with numbers, booleans, categories and gaps -> columns of
numbers, and back.
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
