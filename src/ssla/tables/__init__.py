"""Tables as people keep them: CSV or Parquet, with numbers, booleans, categories and gaps -> columns of numbers, and back."""

from __future__ import annotations

from ssla.tables.plan import Encoded, Plan, make_plan
from ssla.tables.reading import Column, Table, TableError, read_table
from ssla.tables.writing import write_table

__all__ = ["Column", "Encoded", "Plan", "Table", "TableError", "make_plan", "read_table", "write_table"]
