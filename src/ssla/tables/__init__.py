"""CSV, Parquet and Excel tables with numbers, booleans, categories and gaps -> columns of numbers, and back."""

from __future__ import annotations

from ssla.tables.columns import Column, Style, TableError
from ssla.tables.plan import Encoded, Plan, make_plan
from ssla.tables.reading import Table, read_table
from ssla.tables.target import Target, later_labels, later_numbers, read_target
from ssla.tables.writing import write_table

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
    "read_table",
    "read_target",
    "write_table",
]
