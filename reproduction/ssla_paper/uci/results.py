"""The records of all tasks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ssla_paper.runner import Record
from ssla_paper.uci.data import SETS, STAND_IN
from ssla_paper.uci.published import SEED

NAMES = {  # in the order of the tables
    "output": "ours, output",
    "weights": "SSLA, weights",
    "none": "ASSLA, none",
    "plug-in": "plug-in",
    "plug-in, noise": "plug-in, our noise",
    "LA": "LA fitted",
    "LA, noise": "LA, our noise",
    "LA, polished": "LA, our noise, polished",
    "output x5": "ours x5, output",
    "weights x5": "SSLA x5, weights",
    "none x5": "ASSLA x5, none",
    "ensemble": "ensemble of 5",
    "ensemble, noise": "ensemble, our noise",
    "MC dropout": "MC dropout",
    "MFVI": "MFVI",
    "NUTS": "NUTS",
    "conformal": "split conformal",
}
COMPARED = (
    "output",
    "none",
    "plug-in",
    "LA",
    "LA, noise",
    "LA, polished",
    "output x5",
    "ensemble",
    "ensemble, noise",
    "MC dropout",
    "MFVI",
)
LEVELS = (95, 75, 50)


@dataclass(frozen=True, eq=False)
class Results:
    """Scores by method, set and split; what is missing and why; the published procedure's
    records by set.
    """

    scores: dict[str, dict[str, dict[int, Record]]]
    missing: dict[str, str]
    published: dict[str, Record]
    gap: float  # largest difference of log density between output and real refits
    refit_seconds: float  # mean of one task
    notes: dict[str, int]  # warnings of our fits, and the number of splits

    @property
    def sets(self) -> list[str]:
        order = [*SETS, STAND_IN]
        return sorted({name for found in self.scores.values() for name in found}, key=order.index)

    def splits(self, method: str, name: str) -> list[Record]:
        """Of the random splits, without the published one."""
        found = self.scores.get(method, {}).get(name, {})
        return [found[seed] for seed in sorted(found) if seed != SEED]

    def mean(self, method: str, name: str, score: str) -> float | None:
        values = [record[score] for record in self.splits(method, name) if score in record]
        return statistics.fmean(values) if values else None

    def deviation(self, method: str, name: str, score: str) -> float:
        """Between splits; 0 with one."""
        values = [record[score] for record in self.splits(method, name) if score in record]
        return statistics.stdev(values) if len(values) > 1 else 0.0

    def on_published_split(self, method: str, name: str) -> Record | None:
        return self.scores.get(method, {}).get(name, {}).get(SEED)

    def matrix(self, methods: tuple[str, ...], score: str) -> dict[str, np.ndarray]:
        """By set, (splits, methods), over the splits that all have."""
        found = {}
        for name in self.sets:
            shared = set.intersection(
                *(set(self.scores.get(m, {}).get(name, {})) for m in methods)
            ) - {SEED}
            rows = [[self.scores[m][name][seed][score] for m in methods] for seed in sorted(shared)]
            if rows:
                found[name] = np.array(rows)
        return found

    def coverage_error(self, method: str, names: list[str]) -> float:
        """Mean over sets, splits and levels of |coverage − level|, per cent: of one split, as
        published.
        """
        return statistics.fmean(
            statistics.fmean(
                abs(record[f"cover{level}"] - level) for record in self.splits(method, name)
            )
            for name in names
            for level in LEVELS
        )

    def there(self, methods: tuple[str, ...]) -> tuple[str, ...]:
        """Those with scores on every set."""
        return tuple(m for m in methods if all(self.splits(m, name) for name in self.sets))


def gathered(records: Mapping[str, Record]) -> Results:
    scores: dict[str, dict[str, dict[int, Record]]] = {}
    missing: dict[str, str] = {}
    published: dict[str, Record] = {}
    gaps, seconds = [0.0], [0.0]
    notes: dict[str, int] = {}
    for record in records.values():
        if "runs" in record or "split" not in record:
            published[record["set"]] = record
            continue
        for method, found in record["methods"].items():
            if "missing" in found:
                missing[method] = found["missing"]
            else:
                scores.setdefault(method, {}).setdefault(record["set"], {})[record["split"]] = found
        if "refit_gap" in record:
            gaps.append(record["refit_gap"])
            seconds.append(record["refit_seconds"])
            for note in sorted(set(record.get("warnings", []))):
                notes[note] = notes.get(note, 0) + 1
    return Results(
        scores, missing, published, max(gaps), statistics.fmean(seconds[1:] or seconds), notes
    )
