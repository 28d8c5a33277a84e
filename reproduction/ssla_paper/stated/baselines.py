"""HMC, MFVI and black-box α on the toy set: searched in the paper's ranges, then scored.

A search is done once for each method, on the rows of one split of the toy set: Optuna's TPE, by the
NLL of the validation rows, which are 15. Its trials are kept in found_baselines.json, and
`python -m ssla_paper.stated.baselines hmc` makes one again. Test rows have no part in it.

The text gives ranges, not how they are drawn from. Here those over more than one power of ten are
drawn by their logarithm. It does not give the number of trials of these searches either.
"""

from __future__ import annotations

import json
import math
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ssla_paper.heteroscedastic.data import toy
from ssla_paper.heteroscedastic.numbers import OWN
from ssla_paper.peers import GaussianMixture, library
from ssla_paper.runner import Record, write_whole
from ssla_paper.stated.chains import (
    effective,
    initial,
    mixture,
    outputs_of,
    potential,
    split_r_hat,
    walk,
)
from ssla_paper.stated.data import TOY, Case, case
from ssla_paper.stated.mean_field import Independent, independent
from ssla_paper.stated.methods import mean_scores, row_scores

FILE = Path(__file__).with_name("found_baselines.json")
TRIALS, SEED, SPLIT = 50, 42, 200  # of the sampler; the split whose rows are searched
MIXED = 200  # draws of a chain in its mixture, evenly spaced
KEPT = 0.5  # the last part of a chain; the text does not say what is left out
WORST = 1e6  # the NLL of a trial without a finite one
Settings = dict[str, float]


class Range(NamedTuple):
    """A stated range."""

    low: float
    high: float
    is_whole: bool = False
    is_log: bool = False


NETWORK = {"rate": Range(1e-5, 1e-1, is_log=True), "batch": Range(32, 256, True)}
CHAIN = {
    "step": Range(1e-5, 1e-3, is_log=True),
    "samples": Range(500, 2000, True),
    "steps": Range(10, 50, True),
    "tau_in": Range(0.1, 10, is_log=True),
    "tau_out": Range(10, 500, is_log=True),
    "mass": Range(0.1, 10, is_log=True),
}
VARIATIONAL = {
    "burn_in": Range(50, 200, True),
    "train_draws": Range(5, 50, True),
    "test_draws": Range(10, 100, True),
    "noise_scale": Range(0.5, 2),
}
SPACES = {  # method -> setting -> its range
    "hmc": CHAIN,
    "hmc1": CHAIN,  # one output, as in hamiltorch's regression
    "mfvi": {**NETWORK, **VARIATIONAL},
    "alpha": {**NETWORK, **VARIATIONAL, "alpha": Range(0, 1)},
}
OUTPUTS = {"hmc": 2, "hmc1": 1}


class Trial(NamedTuple):
    """One trial: settings, the NLL of the validation rows, and seconds of the processor."""

    settings: Settings
    loss: float
    seconds: float


def baseline(
    method: str, seed: int, settings: Settings, chains: int = 2, epochs: int | None = None
) -> Record:
    """Score a method on one split; split 42 is the toy module's own seed, with its own 25 test rows.

    chains: of HMC, of which the first is scored and all are compared. epochs: fewer, for tests.
    """
    rows = own_case() if seed == OWN else case(TOY, seed)
    facts: Record
    if method in OUTPUTS:
        answer, held, facts = _sampled(method, rows, settings, seed, chains)
    else:
        more = {} if epochs is None else {"epochs": epochs}
        q = _fitted(rows, settings, seed, more)
        generator = torch.Generator().manual_seed(seed)
        answer = q.mixture(rows.test[0], int(settings["test_draws"]), generator)
        held = q.mixture(rows.validation[0], int(settings["test_draws"]), generator)
        facts = {
            "epochs": q.epochs,
            "divergence": q.divergence,
            "weight_sd": float(q.sd.median()),
        }
    found = row_scores(answer, rows.test[1])
    return {
        "baseline": method,
        "split": seed,
        "settings": dict(settings),
        "rows": [len(part[1]) for part in (rows.train, rows.validation, rows.test)],
        "validation": -float(held.log_prob(rows.validation[1]).mean()),
        "scores": mean_scores(found, rows.unit),
        "spread": float(answer.mean.std(correction=0) / rows.test[1].std(correction=0)),
        "facts": facts,
    }


def own_case() -> Case:
    """Return the toy module's own rows: 200 for training, 15 for validation and 25 for testing."""
    data = toy(OWN)
    return Case(data.train, data.validation, data.test, 1.0)


def _sampled(
    method: str, rows: Case, settings: Settings, seed: int, chains: int
) -> tuple[GaussianMixture, GaussianMixture, Record]:
    """Return the mixtures of the first chain at test and validation rows, and facts of all."""
    outputs = OUTPUTS[method]
    x, y = rows.train[0].float(), rows.train[1].float()
    gradient = potential(x, y, settings["tau_in"], settings["tau_out"], outputs)
    answers: list[GaussianMixture] = []
    means, accepted = [], []
    for chain in range(chains):
        generator = torch.Generator().manual_seed(seed + 1000 * chain)
        found = walk(
            gradient,
            initial(x.shape[1], outputs, generator),
            step=settings["step"],
            steps=int(settings["steps"]),
            mass=settings["mass"],
            samples=int(settings["samples"]),
            generator=generator,
        )
        kept = found.draws[int((1 - KEPT) * len(found.draws)) :]
        accepted.append(found.accepted)
        means.append(outputs_of(kept, rows.test[0].float(), outputs)[..., 0])
        if chain == 0:
            chosen = kept[torch.linspace(0, len(kept) - 1, min(MIXED, len(kept))).long()]
            answers = [
                mixture(chosen, part[0], settings["tau_out"], outputs)
                for part in (rows.test, rows.validation)
            ]
    values = torch.stack(means)
    r_hat, size = split_r_hat(values), effective(values[:1])
    facts = {
        "accepted": accepted,
        "draws": values.shape[1],
        "r_hat": float(r_hat.median()),
        "worst_r_hat": float(r_hat.max()),
        "effective": float(size.median()),
        "chains": chains,
    }
    return answers[0], answers[1], facts


def _fitted(rows: Case, settings: Settings, seed: int, more: dict[str, int]) -> Independent:
    return independent(
        rows.train,
        rows.validation,
        rate=settings["rate"],
        batch=int(settings["batch"]),
        burn_in=int(settings["burn_in"]),
        train_draws=int(settings["train_draws"]),
        test_draws=int(settings["test_draws"]),
        noise_scale=settings["noise_scale"],
        alpha=settings.get("alpha"),
        seed=seed,
        **more,
    )


def validation_loss(method: str, rows: Case, settings: Settings) -> float:
    """Return the NLL of the validation rows, by seed 0; WORST where it is not finite."""
    try:
        if method in OUTPUTS:
            _, held, _ = _sampled(method, rows, settings, 0, 1)
        else:
            q = _fitted(rows, settings, 0, {})
            generator = torch.Generator().manual_seed(0)
            held = q.mixture(rows.validation[0], int(settings["test_draws"]), generator)
    except ValueError:  # no mixture: a network without a finite answer
        return WORST
    loss = -float(held.log_prob(rows.validation[1]).mean())
    return loss if math.isfinite(loss) else WORST


def search(method: str, trials: int = TRIALS, space: dict[str, Range] | None = None) -> list[Trial]:
    """Return all trials of a search, in their order. space: other ranges, for tests."""
    optuna = library("optuna", "optuna")
    data = case(TOY, SPLIT)
    rows = Case(data.train, data.validation, data.validation, data.unit)  # no test rows in a search
    made: list[Trial] = []

    def objective(trial: Any) -> float:
        settings: Settings = {}
        for name, span in (space or SPACES[method]).items():
            if span.is_whole:
                settings[name] = trial.suggest_int(name, int(span.low), int(span.high))
            else:
                settings[name] = trial.suggest_float(name, span.low, span.high, log=span.is_log)
        start = time.process_time()
        loss = validation_loss(method, rows, settings)
        made.append(Trial(settings, loss, round(time.process_time() - start, 2)))
        return loss

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=SEED))
    study.optimize(objective, n_trials=trials)
    return made


def best(trials: list[Trial]) -> Trial:
    """Return the trial with the lowest NLL of the validation rows."""
    return min(trials, key=lambda trial: trial.loss)


@lru_cache(maxsize=1)
def found() -> dict[str, list[Trial]]:
    """Return the trials of all methods that were searched."""
    kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return {name: [Trial(*trial) for trial in trials] for name, trials in kept.items()}


def keep(method: str, trials: list[Trial]) -> None:
    """Write the trials of one method into the file of all."""
    found.cache_clear()
    methods = {**found(), method: trials}
    lines = [
        f" {json.dumps(each)}: [\n"
        + ",\n".join(f"  {json.dumps(list(trial))}" for trial in methods[each])
        + "\n ]"
        for each in SPACES
        if each in methods
    ]
    write_whole(FILE, "{\n" + ",\n".join(lines) + "\n}\n")
    found.cache_clear()


def main(names: list[str]) -> None:
    """Search the methods, all by default, and write each as soon as it is done."""
    torch.set_num_threads(1)
    for name in names or list(SPACES):
        trials = search(name)
        keep(name, trials)
        spent = sum(trial.seconds for trial in trials)
        sys.stdout.write(f"{name} {best(trials)} {spent:.0f} s\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
