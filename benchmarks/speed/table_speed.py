"""The time of reading and encoding a CSV file, in units of `pandas.read_csv`.

A table of 1,000,000 rows with ten columns: numbers, numbers with gaps, integers, categories,
booleans, dates. Goals: `read_table` in at most 1.5 times the time of pandas; `make_plan` and
`encode` together in a few seconds. Every round times all steps one after the other, so that they
have the same load; the table gives the median over rounds of the ratio to pandas of that round, and
the best time. `quoted`: the same table with all texts in quotes. `numbers`: ten columns of numbers.

    python benchmarks/speed/table_speed.py [--rounds 5] [--rows 1000000]
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.csv

from ssla.tables.columns import make_plan, read_parts, read_table

PART = 10_000  # rows of a part


def mixed(rows: int) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {f"x{i}": rng.normal(size=rows).round(6) for i in range(4)}
    columns["gaps"] = np.where(rng.random(rows) < 0.05, np.nan, rng.normal(size=rows).round(4))
    columns["count"] = rng.integers(0, 1000, rows)
    columns["city"] = rng.choice(["New York", "Rome", "Zürich", "Paris"], rows)
    columns["flag"] = rng.choice(["yes", "no"], rows)
    columns["date"] = np.datetime_as_string(
        np.datetime64("2015-01-01") + rng.integers(0, 3000, rows)
    )
    return pd.DataFrame(columns | {"y": rng.normal(size=rows).round(6)})


def numbers(rows: int) -> pd.DataFrame:
    values = np.random.default_rng(0).normal(size=(rows, 10))
    return pd.DataFrame(values, columns=[f"x{i}" for i in range(9)] + ["y"])


def timed(times: list[float], work: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    result = work()
    times.append(time.perf_counter() - start)
    return result


def measure(path: Path, rounds: int) -> dict[str, list[float]]:
    names = ("pandas.read_csv", "pyarrow.csv", "read_table", "read_parts", "make_plan", "encode")
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        timed(times["pandas.read_csv"], lambda: pd.read_csv(path))
        timed(times["pyarrow.csv"], lambda: pyarrow.csv.read_csv(path))
        table = timed(times["read_table"], lambda: read_table(path))
        timed(times["read_parts"], lambda: sum(part.rows for part in read_parts(path, rows=PART)))
        plan = timed(times["make_plan"], lambda table=table: make_plan(table, {"y"}))
        timed(times["encode"], lambda table=table, plan=plan: plan.encode(table))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1_000_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as room:
        path = Path(room) / "table.csv"
        for name, make, quoting in (
            ("mixed", mixed, csv.QUOTE_MINIMAL),
            ("quoted", mixed, csv.QUOTE_NONNUMERIC),
            ("numbers", numbers, csv.QUOTE_MINIMAL),
        ):
            make(arguments.rows).to_csv(path, index=False, quoting=quoting)
            times = measure(path, arguments.rounds)
            print(
                f"\n{name}: {arguments.rows:,} rows, {path.stat().st_size / 1e6:.0f} MB, "
                f"{arguments.rounds} rounds"
            )
            print(f"{'':18}{'ratio to pandas':>16}{'best time (s)':>16}")
            for step, found in times.items():
                ratio = statistics.median(
                    a / b for a, b in zip(found, times["pandas.read_csv"], strict=True)
                )
                print(f"{step:18}{ratio:16.2f}{min(found):16.2f}")


if __name__ == "__main__":
    main()
