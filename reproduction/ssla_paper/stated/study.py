"""The tasks of the stated experiment, and its tables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ssla_paper.runner import Claim, Record, Task
from ssla_paper.stated.claims import claims
from ssla_paper.stated.data import TOY
from ssla_paper.stated.methods import scored
from ssla_paper.stated.modes import modes
from ssla_paper.stated.numbers import gathered
from ssla_paper.stated.report import write_tables
from ssla_paper.stated.search import best, found
from ssla_paper.uci.data import FOLDER, STAND_IN

FIRST_SPLIT, SPLITS, MODE_SPLITS = 200, 20, 10  # of those of the study of UCI sets
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
                if name in MODE_SETS and split < MODE_SPLITS:
                    made.append(Task(f"modes-{name}-{seed}", modes, settings))
        return made

    def report(self, records: Mapping[str, Record], folder: Path) -> list[Claim]:
        results = gathered(records)
        write_tables(results, folder)
        return claims(results)


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
    ]
