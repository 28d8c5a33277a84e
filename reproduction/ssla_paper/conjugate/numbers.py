"""Numbers of a record, and their format."""

from __future__ import annotations

import statistics

from ssla_paper.runner import Record


def values(record: Record, method: str, what: str) -> list[float]:
    return [run["methods"][method][what] for run in record["runs"]]


def spread(found: list[float], form: str = ".1e") -> str:
    """mean ± standard deviation"""
    mean = format(statistics.mean(found), form)
    return mean if len(found) < 2 else f"{mean} ± {format(statistics.stdev(found), form)}"
