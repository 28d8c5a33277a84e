"""Records by kind of task, and means over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssla_paper.robustness.methods import NAMES
from ssla_paper.runner import Record


@dataclass(frozen=True)
class Results:
    """Lists of records by kind of task."""

    calibration: list[Record]
    shift: list[Record]
    labels: list[Record]
    covariate: list[Record]
    ablation: list[Record]
    cost: list[Record]

    @staticmethod
    def of(records: Mapping[str, Record]) -> Results:
        def kind(name: str) -> list[Record]:
            return [
                record for key, record in records.items() if key.startswith(f"{name}-") and record
            ]

        return Results(
            *(
                kind(name)
                for name in ("calibration", "shift", "labels", "covariate", "ablation", "cost")
            )
        )

    def missing(self) -> dict[str, str]:
        """Methods whose library was missing."""
        found: dict[str, str] = {}
        for record in [*self.calibration, *self.shift, *self.labels]:
            found.update(record["missing"])
        return found

    def scores(self, dataset: str, method: str, score: str) -> list[float]:
        """One value for each seed."""
        runs = [r["methods"] for r in self.calibration if r["dataset"] == dataset]
        return [run[method]["scores"][score] for run in runs if method in run]

    def aurocs(self, dataset: str, place: str, method: str, by: str = "entropy") -> list[float]:
        runs = [
            r["methods"].get(method, {}).get("auroc", {})
            for r in self.calibration
            if r["dataset"] == dataset
        ]
        return [run[place][by] for run in runs if by in run.get(place, {})]

    def datasets(self) -> list[str]:
        return unique(r["dataset"] for r in self.calibration)

    def places(self, dataset: str) -> list[str]:
        return unique(
            p
            for r in self.calibration
            if r["dataset"] == dataset
            for p in r["methods"]["plug_in"]["auroc"]
        )


def unique(values: Any) -> list[Any]:
    """In their order."""
    return list(dict.fromkeys(values))


def methods_in(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name for name in NAMES if any(name in run for run in runs)]


def mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None and math.isfinite(v)]
    return statistics.mean(known) if known and len(known) == len(values) else None


def spread(values: Sequence[float | None], digits: int = 3) -> str | None:
    """mean ± standard deviation over seeds."""
    middle = mean(values)
    if middle is None:
        return None
    known = [v for v in values if v is not None]
    shown = _short(middle, digits)
    return f"{shown} ± {_short(statistics.stdev(known), digits)}" if len(known) > 1 else shown


def _short(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if abs(value) < 1000 else f"{value:.1e}"
