"""Posteriors saved by the version that wrote them, and what they predicted.

A later version must load them and answer the same.

python tests/golden/saved.py     # writes tests/golden/saved/; only with a new version of the format
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from core_cases import LIKELIHOODS, TESTS, network, rows

import ssla
from ssla.predictive.class_law import select_smallest_set

FOLDER = Path(__file__).with_name("saved")
CASES = {  # name: (likelihood, weights, structure)
    "gaussian": ("gaussian estimate", "last_layer", "dense"),
    "heteroscedastic": ("heteroscedastic", "last_layer", "kfac"),
    "poisson": ("poisson", "all", "diag"),
    "categorical": ("categorical", "all", "kfac"),
    "low rank": ("student", "all", "low_rank"),
}


def get_module(name: str) -> nn.Sequential:
    return network(LIKELIHOODS[CASES[name][0]][1])


def answers(posterior: ssla.Posterior, name: str) -> dict[str, list[float]]:
    kind = LIKELIHOODS[CASES[name][0]][2]
    x, y = rows(get_module(name), kind, TESTS, seed=3)
    p = posterior.predict(x)
    if p.kind == "class":  # the probabilities were the increments' then; they are integrals now
        logs = torch.stack(
            [p.increments(torch.full_like(y, c)).total for c in range(p.probs.shape[1])], 1
        ).double()
        probs = torch.softmax(logs, 1)
        found = {
            "mean": probs,
            "variance": probs * (1 - probs),
            "log_prob": probs.gather(1, y[:, None]).log(),
            "mass": logs.logsumexp(1).exp(),
            "interval": select_smallest_set(probs, 0.9),
        }
        return {what: value.double().flatten().tolist() for what, value in found.items()}
    found = {
        "mean": p.mean,
        "variance": p.variance,
        "log_prob": p.log_prob(y),
        "mass": p.mass,
        "interval": p.interval(0.9),
    }
    return {what: value.double().flatten().tolist() for what, value in found.items()}


def main() -> None:
    torch.set_num_threads(1)
    for name, (likelihood, weights, structure) in CASES.items():
        law, _, kind = LIKELIHOODS[likelihood]
        module = get_module(name)
        posterior = ssla.fit(
            module,
            rows(module, kind),
            likelihood=law,
            prior=ssla.priors.Gaussian(),
            gaussian="laplace",
            weights=weights,
            structure=structure,
        )
        posterior.save(FOLDER / name)
        (FOLDER / f"{name}.json").write_text(json.dumps(answers(posterior, name)) + "\n")


if __name__ == "__main__":
    main()
