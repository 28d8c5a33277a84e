"""Records -> means with standard errors, and the published table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from ssla_paper.runner import Record

LEVELS = (95, 90, 75, 50)
OWN = 42  # the toy module's default seed
PUBLISHED = {  # coverage at the four levels
    "SSLA KFAC": (88, 84, 76, 72),
    "SSLA DIAG": (92, 92, 80, 64),
    "SSLA DENSE": (92, 88, 76, 56),
    "ASSLA KFAC": (76, 68, 60, 56),
    "ASSLA DIAG": (76, 68, 60, 56),
    "ASSLA DENSE": (76, 68, 60, 56),
    "LA KFAC": (100, 100, 92, 68),
    "LA DIAG": (100, 100, 92, 68),
    "LA DENSE": (100, 100, 92, 68),
    "VI": (92, 92, 80, 64),
    "MFVI": (100, 100, 96, 80),
    "HMC": (88, 88, 76, 68),
}
LABELS = {  # method -> its name in tables, and its column in the paper
    "truth": ("the truth itself", None),
    "plug_in": ("plug-in", None),
    "none-kfac": ("ASSLA (none), kfac", "ASSLA KFAC"),
    "none-diag": ("ASSLA (none), diag", "ASSLA DIAG"),
    "none-dense": ("ASSLA (none), dense", "ASSLA DENSE"),
    "newton-kfac": ("newton, kfac", None),
    "newton-diag": ("newton, diag", None),
    "newton-dense": ("newton, dense", None),
    "output-kfac": ("output, kfac", None),
    "output-diag": ("output, diag", None),
    "output-dense": ("output, dense (our default)", None),
    "output-all": ("output, all weights, kfac", None),
    "output-ensemble": ("output, dense, five networks", None),
    "weights-kfac": ("SSLA (weights), kfac", "SSLA KFAC"),
    "weights-diag": ("SSLA (weights), diag", "SSLA DIAG"),
    "weights-dense": ("SSLA (weights), dense", "SSLA DENSE"),
    "la-kfac": ("LA, one σ fitted, kfac", "LA KFAC"),
    "la-diag": ("LA, one σ fitted, diag", "LA DIAG"),
    "la-dense": ("LA, one σ fitted, dense", "LA DENSE"),
    "la_scaled-kfac": ("LA, the network's σ(x), kfac", None),
    "la_scaled-diag": ("LA, the network's σ(x), diag", None),
    "la_scaled-dense": ("LA, the network's σ(x), dense", None),
    "ensemble": ("deep ensemble (5)", None),
    "bb_alpha": ("VI (BB-α, α = 1, 1×20)", "VI"),
    "mean_field": ("MFVI (1×20)", None),
    "mean_field_deep": ("MFVI (2×50)", "MFVI"),
    "nuts": ("HMC (NUTS, 2×50)", "HMC"),
}


@dataclass(frozen=True)
class Mean:
    """Over data seeds; error: the standard error (NaN of one seed)."""

    value: float
    error: float
    seeds: int

    def shown(self, digits: int) -> str:
        if math.isnan(self.error):
            return f"{self.value:.{digits}f}"
        return f"{self.value:.{digits}f} ± {self.error:.{digits}f}"


def mean_of(values: list[float]) -> Mean:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Mean(statistics.mean(values), error, len(values))


@dataclass(frozen=True)
class Found:
    """Scores by method: over seeds with fresh test rows, and on the module's 25 rows at its own
    seed.
    """

    means: Mapping[str, Mapping[str, Mean]]
    each: Mapping[str, Mapping[int, Mapping[str, float]]]  # method -> seed -> scores
    single: Mapping[str, Mapping[str, float]]
    missing: Mapping[str, str]  # task -> what to install

    def gap(self, method: str) -> float:
        """The mean over the four levels of |coverage − nominal|."""
        return statistics.mean(
            abs(self.means[method][f"cover{level}"].value - level) for level in LEVELS
        )

    def coverage(self, method: str) -> str:
        return "/".join(f"{self.means[method][f'cover{level}'].value:.1f}" for level in LEVELS)

    def difference(self, one: str, other: str, score: str) -> Mean:
        """one − other on the seeds that both have."""
        both = sorted(set(self.each[one]) & set(self.each[other]))
        return mean_of(
            [self.each[one][seed][score] - self.each[other][seed][score] for seed in both]
        )


def gathered(records: Mapping[str, Record]) -> Found:
    each: dict[str, dict[int, Mapping[str, float]]] = {}
    single: dict[str, Mapping[str, float]] = {}
    for record in records.values():
        for method, scores in record.get("scores", {}).items():
            if "bands" in record:
                single[method] = scores
            else:
                each.setdefault(method, {})[record["seed"]] = scores
    means = {}
    for method in LABELS:
        if method in each:
            runs = list(each[method].values())
            means[method] = {name: mean_of([run[name] for run in runs]) for name in runs[0]}
    missing = {key: record["missing"] for key, record in records.items() if "missing" in record}
    return Found(means, each, single, missing)


def by_seed(records: Mapping[str, Record]) -> dict[int, dict[str, list[float]]]:
    """Coverage by the published procedures: data seed -> column of Table 2 -> the four levels."""
    found: dict[int, dict[str, list[float]]] = {}
    for record in records.values():
        for seed, assla, la in zip(
            record.get("seeds", []), record.get("assla", []), record.get("la", []), strict=True
        ):
            found[seed] = {f"ASSLA {structure}": assla for structure in la} | {
                f"LA {s}": column for s, column in la.items()
            }
    return found


def percentiles(
    rows: list[list[float]], low: float = 0.025, high: float = 0.975
) -> list[tuple[float, float]]:
    """By level, the ends of the central range over rows (N, 4): order statistics, so that they
    are observed coverages.
    """
    ends = []
    for column in zip(*rows, strict=True):
        ordered = sorted(column)
        ends.append(
            (ordered[int(low * (len(ordered) - 1))], ordered[math.ceil(high * (len(ordered) - 1))])
        )
    return ends
