"""CSV, Parquet and Excel tables with numbers, booleans, categories and gaps -> columns of
numbers, and back.
"""

from __future__ import annotations

from ssla.tables.columns.kinds import Column, Style, TableError
from ssla.tables.columns.plan import Encoded, Plan, make_plan
from ssla.tables.columns.reading import Table, read_parts, read_table
from ssla.tables.columns.target import Target, later_labels, later_numbers, read_target
from ssla.tables.columns.writing import new_table, write_table

__all__ = [
    "Column",
    "Encoded",
    "Plan",
    "Style",
    "Table",
    "TableError",
    "Target",
    "later_labels",
    "later_numbers",
    "make_plan",
    "new_table",
    "read_parts",
    "read_table",
    "read_target",
    "write_table",
]
