"""The stated search: Optuna's TPE, 100 trials of learning rate and batch size by validation NLL.

A search is done once for each set, on the rows of one split, and its trials are kept in
found_settings.json. `python -m ssla_paper.stated.search auto_mpg` makes one again.
"""

from __future__ import annotations

import json
import math
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ssla_paper.peers import library
from ssla_paper.runner import write_whole
from ssla_paper.stated.data import TOY, case
from ssla_paper.stated.network import trained
from ssla_paper.uci.data import SETS

FILE = Path(__file__).with_name("found_settings.json")
TRIALS, SEED = 100, 42  # of the rows, of the sampler; networks of the search have seed 0
RATES, BATCHES = (1e-5, 1e-1), (32, 256)


class Trial(NamedTuple):
    """One trial: settings and the lowest validation NLL (without its constant)."""

    rate: float
    batch: int
    loss: float


def search(name: str, trials: int = TRIALS) -> list[Trial]:
    """Return all trials of a search, in their order."""
    optuna = library("optuna", "optuna")
    rows = case(name, SEED)
    made: list[Trial] = []

    def objective(trial: Any) -> float:
        rate = trial.suggest_float("rate", *RATES, log=True)
        batch = trial.suggest_int("batch", *BATCHES)
        _, loss = trained(rows, rate, batch, 0)
        made.append(Trial(rate, batch, loss))
        return loss if math.isfinite(loss) else 1e6

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=SEED))
    study.optimize(objective, n_trials=trials)
    return made


def best(trials: list[Trial]) -> Trial:
    """Return the trial with the lowest validation NLL."""
    return min(trials, key=lambda trial: trial.loss)


@lru_cache(maxsize=1)
def found() -> dict[str, list[Trial]]:
    """Return the trials of all sets that were searched, by set."""
    kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return {name: [Trial(*trial) for trial in trials] for name, trials in kept.items()}


def keep(name: str, trials: list[Trial]) -> None:
    """Write the trials of one set into the file of all."""
    found.cache_clear()
    sets = {**found(), name: trials}
    lines = [
        f" {json.dumps(each)}: {json.dumps([list(trial) for trial in sets[each]])}"
        for each in (TOY, *SETS)
        if each in sets
    ]
    write_whole(FILE, "{\n" + ",\n".join(lines) + "\n}\n")
    found.cache_clear()


def main(names: list[str]) -> None:
    """Search the sets, all by default, and write each as soon as it is done."""
    torch.set_num_threads(1)
    for name in names or [TOY, *SETS]:
        trials = search(name)
        keep(name, trials)
        sys.stdout.write(f"{name} {best(trials)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
