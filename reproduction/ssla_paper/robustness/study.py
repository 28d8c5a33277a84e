"""The study: its tasks, and its report from their records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ssla_paper.robustness import ablation, classification, covariate, overhead
from ssla_paper.robustness.claims import claims
from ssla_paper.robustness.data import SIZES, table_at_hand
from ssla_paper.robustness.figures import write_figures
from ssla_paper.robustness.methods import NAMES
from ssla_paper.robustness.results import Results
from ssla_paper.robustness.tables import write_tables
from ssla_paper.runner import Claim, Record, Task

SEEDS, COST_SEEDS = 5, 3
TABLE = "concrete"  # the same on every machine, so that its records can be shipped
SHARES = {"cancer": (0.0, 0.1, 0.2, 0.3, 0.4), "digits": (0.0, 0.2, 0.4)}


@dataclass(frozen=True)
class Robustness:
    name = "robustness"
    title = "Robustness: what the appendix claims and does not show"

    def tasks(self, quick: bool) -> list[Task]:
        return _quick() if quick else _full()

    def report(self, records: Mapping[str, Record], folder: Path) -> list[Claim]:
        results = Results.of(records)
        write_tables(results, folder)
        write_figures(results, folder)
        return claims(results)


def _full() -> list[Task]:
    found = []
    for seed in range(SEEDS):
        at = {"seed": seed}
        found += [
            Task(
                f"calibration-{_slug(d)}-{seed}",
                classification.calibration,
                {"dataset": d, **at},
                3,
            )
            for d in SIZES
        ]
        found += [Task(f"shift-{seed}", classification.shift, at, 2)]
        for dataset, shares in SHARES.items():
            size = {"size": 0.6} if dataset == "digits" else {}
            for share in shares:
                settings = {"dataset": dataset, "share": share, **at, **size}
                found += [
                    Task(f"labels-{dataset}-{share:g}-{seed}", classification.labels, settings, 3)
                ]
        found += [
            Task(f"covariate-{d}-{seed}", covariate.one, {"dataset": d, **at}, 3)
            for d in ("toy", TABLE)
        ]
        cases = ("digits 0–4", "toy", TABLE)
        found += [
            Task(f"ablation-{_slug(d)}-{seed}", ablation.one, {"dataset": d, **at}, 2)
            for d in cases
        ]
    costs = [(m, s) for m in NAMES for s in range(COST_SEEDS)]
    return found + [
        Task(f"cost-{m}-{s}", overhead.measured, {"method": m, "seed": s}, 2) for m, s in costs
    ]


def _quick() -> list[Task]:
    small = {"size": 0.3, "epochs": 40}
    found = []
    for dataset, seeds in (("moons", 1), ("wine", 1)):
        for seed in range(seeds):
            settings = {"dataset": dataset, "seed": seed, "size": 0.5, "epochs": 40}
            found += [Task(f"calibration-{dataset}-{seed}", classification.calibration, settings)]
    degrees = {"noises": [0.0, 0.4], "angles": [45.0]}
    found += [Task("shift-0", classification.shift, {"seed": 0, **small, "size": 0.2, **degrees})]
    shares = (0.0, 0.4)
    found += [
        Task(
            f"labels-cancer-{s:g}-0",
            classification.labels,
            {"dataset": "cancer", "share": s, "seed": 0, **small},
        )
        for s in shares
    ]
    table = table_at_hand()
    found += [Task(f"covariate-{table}-0", covariate.one, {"dataset": table, "seed": 0, **small})]
    skip = {"skip": ["weights", "structure", "mode"]}
    found += [
        Task("ablation-wine-0", ablation.one, {"dataset": "wine", "seed": 0, **small, **skip})
    ]
    return [
        *found,
        Task(
            "cost-default-0",
            overhead.measured,
            {"method": "default", "seed": 0, "size": 0.2, "epochs": 20},
        ),
    ]


def _slug(name: str) -> str:
    return name.replace(" ", "-").replace("–", "-")
