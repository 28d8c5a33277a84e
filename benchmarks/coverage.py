"""Coverage of SSLARegressor(likelihood="heteroscedastic", members=5) on the eight UCI tables.

    SSLA_DATA=…/uci python benchmarks/coverage.py [--sets auto_mpg,…] [--splits 2] [--rows 2000] [--members 5] [--out FILE]

Ninety per cent of the rows for training, at most --rows rows of each table. Prints the share of test rows inside the central
intervals at levels of 50, 90 and 95%, and NLL in units of the target's standard deviation. All columns have the same networks:

    ssla      the estimator: variational Gaussians, priors by the held-out rows of each member
    laplace   what the estimator did before: Laplace Gaussians, priors by the evidence. The estimator has no argument for this,
              so that `laplace` below builds it
    networks  the networks as they were trained, mixed: a deep ensemble

nan: one of the splits failed, with a message. The mean is over tables where none failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import ssla
from ssla import likelihoods, metrics
from ssla.predictive import Predictive, affine, from_marginal, mixture
from ssla.sklearn import SSLARegressor
from ssla.tabular.component import Component
from ssla.tabular.ensemble import Ensemble
from ssla_paper.uci.data import SETS, read

COLUMNS = ("ssla", "laplace", "networks")
LEVELS = (0.5, 0.9, 0.95)
SCORES = (*(f"{level:.0%}" for level in LEVELS), "nll")


def laplace(ensemble: Ensemble, x: np.ndarray, y: np.ndarray) -> Ensemble:
    """The same networks with the Gaussian at the mode of all rows, under the prior precision of the highest evidence."""
    assert ensemble.target is not None
    data = ensemble.inputs(torch.from_numpy(x)), ensemble.target(torch.from_numpy(y)[:, None])[:, 0]
    components = []
    for m, module in enumerate(ensemble.modules):
        post = ssla.fit(
            module,
            data,
            likelihood=likelihoods.HeteroscedasticGaussian(),
            prior=ssla.priors.Gaussian(ensemble.settings.schedule.precision),
            gaussian="laplace",
        )
        post = post.tune(objective="evidence", over=("prior",), per_layer=False)
        components.append(Component(post, m, 1 / len(ensemble.modules)))
    return replace(ensemble, components=tuple(components))


def networks(ensemble: Ensemble, x: np.ndarray) -> Predictive:
    """The mixture of the networks as they were trained."""
    assert ensemble.target is not None
    z, law, parts = ensemble.inputs(torch.from_numpy(x)), likelihoods.HeteroscedasticGaussian(), []
    for module in ensemble.modules:
        with torch.no_grad():
            f = module(z)
        parts.append(from_marginal(law, f, torch.zeros(len(f), 2, 2, dtype=f.dtype), "plug_in"))
    return affine(mixture(parts), ensemble.target.shift[0], ensemble.target.scale[0])


def one_split(folder: Path, name: str, split: int, members: int, most_rows: int) -> dict:
    table = read(folder, name)
    order = np.random.default_rng(split).permutation(len(table.y))[:most_rows]
    count = max(len(order) // 10, 6)
    test, train = order[:count], order[count:]
    x, y, x_test, y_test = table.x[train], table.y[train], table.x[test], table.y[test]
    start = time.perf_counter()
    model = SSLARegressor("heteroscedastic", members=members, random_state=split).fit(x, y)
    seconds = time.perf_counter() - start
    answers = {"ssla": model.predict_dist(x_test), "networks": networks(model.ensemble_, x_test)}
    try:
        answers["laplace"] = laplace(model.ensemble_, x, y).predict(torch.from_numpy(x_test))
    except ValueError as error:
        print(f"{name}, split {split}: laplace failed. {error}", flush=True)
    result = {"set": name, "split": split, "rows": len(order), "members": members, "seconds": seconds}
    for label, p in answers.items():
        result[label] = {f"{level:.0%}": float(metrics.coverage(p, y_test, level)) for level in LEVELS}
        result[label]["nll"] = float(metrics.nll(p, y_test)) - math.log(float(y.std()))
    return result


def table(results: list[dict]) -> str:
    names = [name for name in SETS if any(r["set"] == name for r in results)]
    head = [f"{score} {label}" for score in SCORES for label in COLUMNS]
    lines = ["| | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    rows = []
    for name in names:
        own = [r for r in results if r["set"] == name]
        rows.append(
            [float(np.mean([r[label][score] if label in r else math.nan for r in own])) for score in SCORES for label in COLUMNS]
        )
    whole = [row for row in rows if not any(map(math.isnan, row))]
    for name, row in zip([*names, f"mean of {len(whole)}"], [*rows, list(np.mean(whole or rows, 0))], strict=True):
        cells = [f"{value:.3f}" if "nll" in title else f"{value:.1%}" for value, title in zip(row, head, strict=True)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--splits", type=int, default=2)
    parser.add_argument("--first", type=int, default=100, help="seed of the first split; 0 to 4 were used to choose the defaults")
    parser.add_argument("--rows", type=int, default=2000, help="of a table at most")
    parser.add_argument("--members", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="JSON lines, one for each split")
    options = parser.parse_args()
    folder = Path(os.environ.get("SSLA_DATA", "data/uci"))
    torch.set_num_threads(1)
    done = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "polish moved|The network is not at the mode", UserWarning)  # as the estimator does
        for name in options.sets.split(","):
            for split in range(options.first, options.first + options.splits):
                done.append(one_split(folder, name, split, options.members, options.rows))
                if options.out:
                    with options.out.open("a") as file:
                        file.write(json.dumps(done[-1]) + "\n")
    print(table(done))


if __name__ == "__main__":
    main()
