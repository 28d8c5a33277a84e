"""A change of prior against a new fit, and tuning: MLP 8-50-50-1, Gaussian noise.

Goal: with_prior ≥ 50× faster than a fit at n = 100,000.

python benchmarks/speed/prior_speed.py [--rows 100000]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ssla
from ssla import priors

SETTINGS = [("last_layer", "dense"), ("last_layer", "kfac"), ("all", "kfac"), ("all", "diag")]


def clock(work: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    best, result = float("inf"), None
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - start)
    return best, result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1)
    ).eval()
    x = torch.randn(options.rows, 8)
    y = x[:, 0].sin() + 0.3 * torch.randn(options.rows)
    print(f"n = {options.rows:,}, {torch.get_num_threads()} threads\n")
    print(
        "weights     structure     fit ms   with_prior ms  fit / with_prior   evidence tuning ms  "
        "evaluations"
    )
    for weights, structure in SETTINGS:
        mode = "polish" if weights == "last_layer" else "tilt"

        def fit(
            weights: str = weights, structure: str = structure, mode: str = mode
        ) -> ssla.Posterior:
            likelihood = ssla.likelihoods.Gaussian(noise=0.3)
            return ssla.fit(
                model,
                (x, y),
                likelihood=likelihood,
                prior=priors.Gaussian(),
                weights=weights,
                structure=structure,
                mode=mode,
            )

        fitted, posterior = clock(fit, 2)
        moved, _ = clock(lambda p=posterior: p.with_prior(priors.Gaussian(7.0)), 10)  # type: ignore[misc]
        tuned, result = clock(lambda p=posterior: p.tune(), 3)  # type: ignore[misc]
        print(
            f"{weights:<12}{structure:<10}{1e3 * fitted:>10.1f}{1e3 * moved:>16.2f}{fitted / moved:>18.0f}"
            f"{1e3 * tuned:>21.1f}{result.tuning_history.evaluations:>13}",
            flush=True,
        )


if __name__ == "__main__":
    main()
