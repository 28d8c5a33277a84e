"""The tasks of the stated experiment, and its tables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ssla_paper.heteroscedastic.numbers import OWN
from ssla_paper.runner import Claim, Record, Task
from ssla_paper.stated.baseline_report import (
    baseline_claims,
    baselines_of,
    write_baseline_tables,
)
from ssla_paper.stated.baselines import SPACES, baseline
from ssla_paper.stated.baselines import best as best_baseline
from ssla_paper.stated.baselines import found as found_baselines
from ssla_paper.stated.claims import claims
from ssla_paper.stated.data import TOY
from ssla_paper.stated.methods import scored
from ssla_paper.stated.modes import modes
from ssla_paper.stated.numbers import gathered
from ssla_paper.stated.report import write_tables
from ssla_paper.stated.search import best, found
from ssla_paper.uci.data import FOLDER, STAND_IN

FIRST_SPLIT, SPLITS = 200, 20  # the first of those of the study of UCI sets
MODE_SETS = ("auto_mpg", "liver_disorders")
SEARCHED = (
    TOY,
    "auto_mpg",
    "liver_disorders",
    "daily_demand_orders",
    "real_estate_valuation",
    "concrete",
    "airfoil_self_noise",
    "wine_quality",
)
QUICK_EPOCHS = 30
BASELINE_SPLITS = 10  # all of them, and the toy module's own rows


@dataclass(frozen=True)
class Stated:
    name = "stated"
    title = "The stated experiment: networks with a mean and a log variance"

    def tasks(self, quick: bool) -> list[Task]:
        """Of the sets that were searched: one task for each split, and one for the modes."""
        if quick:
            return _quick_tasks("auto_mpg" if os.environ.get(FOLDER) else STAND_IN)
        made: list[Task] = []
        for split in range(SPLITS):
            seed = FIRST_SPLIT + split
            for name in SEARCHED:
                chosen = best(found()[name])
                settings = {"name": name, "rate": chosen.rate, "batch": chosen.batch, "seed": seed}
                made.append(Task(f"{name}-{seed}", scored, settings))
                if name in MODE_SETS:
                    made.append(Task(f"modes-{name}-{seed}", modes, settings))
        return [*made, *baseline_tasks()]

    def report(self, records: Mapping[str, Record], folder: Path) -> list[Claim]:
        baselines = baselines_of(records)
        results = gathered({k: r for k, r in records.items() if "baseline" not in r})
        if results.splits:
            write_tables(results, folder)
        write_baseline_tables(baselines, results, folder)
        return [
            *(claims(results) if results.splits else []),
            *baseline_claims(baselines, results),
        ]


def baseline_tasks() -> list[Task]:
    """Of the baselines that were searched: one task for each split, and one for the own rows."""
    made: list[Task] = []
    for method in SPACES:
        trials = found_baselines().get(method)
        if not trials:
            continue
        chosen = best_baseline(trials).settings
        for seed in (OWN, *range(FIRST_SPLIT, FIRST_SPLIT + BASELINE_SPLITS)):
            key = f"baseline-{method}-{'own' if seed == OWN else seed}"
            made.append(
                Task(key, baseline, {"method": method, "seed": seed, "settings": dict(chosen)})
            )
    return made


def _quick_tasks(name: str) -> list[Task]:
    """One split of the toy set and of one other set, by networks that were hardly trained."""
    made: list[Task] = []
    for each in (TOY, name):
        settings = {"name": each, "seed": FIRST_SPLIT, "rate": 0.01, "batch": 64}
        settings |= {"epochs": QUICK_EPOCHS}
        few = {"structures": ["kfac"], "refits": 3}
        made.append(Task(f"{each}-{FIRST_SPLIT}", scored, {**settings, **few}))
    settings = {"name": name, "seed": FIRST_SPLIT, "rate": 0.01, "batch": 64}
    return [
        *made,
        Task(f"modes-{name}", modes, {**settings, "epochs": QUICK_EPOCHS, "tested": 3}),
        *_quick_baselines(),
    ]


def _quick_baselines() -> list[Task]:
    """One short run of each baseline, by settings that were not searched."""
    chain = {"step": 1e-3, "samples": 40, "steps": 10, "tau_in": 1.0, "tau_out": 10.0, "mass": 0.1}
    other = {"rate": 0.01, "batch": 64, "burn_in": 5, "train_draws": 5, "test_draws": 10}
    settings: dict[str, dict[str, float]] = {
        "hmc": chain,
        "hmc1": chain,
        "mfvi": {**other, "noise_scale": 1.0},
        "alpha": {**other, "noise_scale": 1.0, "alpha": 0.5},
    }
    made: list[Task] = []
    for method, chosen in settings.items():
        for seed in (OWN, FIRST_SPLIT):
            more = {} if method.startswith("hmc") else {"epochs": 10}
            key = f"baseline-{method}-{'own' if seed == OWN else seed}"
            made.append(
                Task(key, baseline, {"method": method, "seed": seed, "settings": chosen, **more})
            )
    return made
