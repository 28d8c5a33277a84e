"""Eight UCI tables, defaults, no tuning: SSLARegressor beside the plug-in, MLPRegressor and a deep ensemble.

    SSLA_DATA=…/uci python benchmarks/tables.py [--sets auto_mpg,…] [--splits 5] [--first 100] [--out results.jsonl]

Ninety per cent of the rows for training, five random splits; NLL and CRPS in units of the target's standard deviation.

    plug-in           the same network with the noise of its training residuals
    plug-in, noise    the same network with the noise that ssla estimates on held-out rows
    MLP               sklearn.neural_network.MLPRegressor (defaults, standardised), constant residual variance
    ensemble          the same five networks, each with the noise of its training residuals, mixed
    ensemble, noise   the same five networks, each with the noise that ssla estimates, mixed
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from sklearn.neural_network import MLPRegressor
from sklearn.preprocessing import StandardScaler

from ssla import likelihoods, metrics
from ssla.predictive import affine, from_marginal, mixture
from ssla.sklearn import SSLARegressor
from ssla.tabular import building
from ssla_paper.uci.data import SETS, read

COLUMNS = ("ssla", "plug-in", "plug-in, noise", "MLP", "ssla x5", "ensemble", "ensemble, noise")


class TrainingTime:
    """Seconds of training: the time of a deep ensemble of the same networks."""

    def __enter__(self) -> TrainingTime:
        self.seconds, self.train = 0.0, building.train

        def timed(*arguments, **options):
            start = time.perf_counter()
            trained = self.train(*arguments, **options)
            self.seconds += time.perf_counter() - start
            return trained

        building.train = timed
        return self

    def __exit__(self, *_: object) -> None:
        building.train = self.train


def fitted(members: int, seed: int, x: np.ndarray, y: np.ndarray) -> tuple[SSLARegressor, float, float]:
    with TrainingTime() as training:
        start = time.perf_counter()
        model = SSLARegressor(members=members, random_state=seed).fit(x, y)
        return model, time.perf_counter() - start, training.seconds


def networks(model: SSLARegressor, x: np.ndarray, y: np.ndarray, x_test: np.ndarray, own_noise: bool):
    """The plug-in mixture of the networks as they were trained, with training or held-out noise."""
    ensemble = model.ensemble_
    z, z_test = (ensemble.inputs(torch.from_numpy(part)) for part in (x, x_test))
    target = ensemble.target(torch.from_numpy(y)[:, None])
    parts = []
    for m, module in enumerate(ensemble.modules):
        with torch.no_grad():
            f, residual = module(z_test), target - module(z)
        noise = float((residual**2).mean().sqrt())
        if not own_noise:
            noise = next(c.posterior.likelihood.noise for c in ensemble.components if c.member == m)
        parts.append(from_marginal(likelihoods.Gaussian(noise=noise), f, torch.zeros(len(f), 1, 1, dtype=f.dtype), "plug_in"))
    return affine(mixture(parts), ensemble.target.shift[0], ensemble.target.scale[0])


def mlp(seed: int, x: np.ndarray, y: np.ndarray, x_test: np.ndarray):
    inputs, target = StandardScaler().fit(x), StandardScaler().fit(y[:, None])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it does not converge in its default number of steps
        model = MLPRegressor(random_state=seed).fit(inputs.transform(x), target.transform(y[:, None])[:, 0])
    residual = target.transform(y[:, None])[:, 0] - model.predict(inputs.transform(x))
    f = torch.from_numpy(model.predict(inputs.transform(x_test)))[:, None]
    law = likelihoods.Gaussian(noise=float(residual.std()))
    plain = from_marginal(law, f, torch.zeros(len(f), 1, 1, dtype=f.dtype), "plug_in")
    return affine(plain, float(target.mean_[0]), float(target.scale_[0]))


def one_split(folder: Path, name: str, split: int) -> dict:
    rows = read(folder, name)
    X, y = rows.x, rows.y
    order = np.random.default_rng(split).permutation(len(y))
    count = max(len(y) // 10, 6)
    test, train = order[:count], order[count:]
    x, t, x_test, t_test = X[train], y[train], X[test], y[test]
    one, seconds_one, _ = fitted(1, split, x, t)
    five, seconds, training = fitted(5, split, x, t)
    answers = {
        "ssla": one.predict_dist(x_test),
        "plug-in": networks(one, x, t, x_test, own_noise=True),
        "plug-in, noise": networks(one, x, t, x_test, own_noise=False),
        "MLP": mlp(split, x, t, x_test),
        "ssla x5": five.predict_dist(x_test),
        "ensemble": networks(five, x, t, x_test, own_noise=True),
        "ensemble, noise": networks(five, x, t, x_test, own_noise=False),
    }
    unit = float(t.std())
    result = {"set": name, "split": split, "seconds": seconds, "training": training, "seconds_one": seconds_one}
    for label, p in answers.items():
        result[label] = {
            "nll": float(metrics.nll(p, t_test)) - math.log(unit),
            "crps": float(metrics.crps(p, t_test)) / unit,
            "rmse": float(metrics.rmse(p, t_test)) / unit,
            "coverage": float(metrics.coverage(p, t_test, 0.95)),
        }
    return result


def table(results: list[dict]) -> str:
    names = [name for name in SETS if any(r["set"] == name for r in results)]
    width = max(map(len, names))
    lines = []
    for score in ("nll", "crps", "coverage", "rmse"):
        lines.append(f"\n{score:<{width}}" + "".join(f"{label:>17}" for label in COLUMNS))
        means = []
        for name in names:
            some = [r for r in results if r["set"] == name]
            row = [float(np.mean([r[label][score] for r in some])) for label in COLUMNS]
            means.append(row)
            lines.append(f"{name:<{width}}" + "".join(f"{value:17.4f}" for value in row))
        lines.append(f"{'mean':<{width}}" + "".join(f"{value:17.4f}" for value in np.mean(means, 0)))
    ratios = [np.mean([r["seconds"] / r["training"] for r in results if r["set"] == name]) for name in names]
    pairs = ", ".join(f"{name} {ratio:.2f}" for name, ratio in zip(names, ratios, strict=True))
    lines.append(f"\ntime of members=5 over training its five networks: {np.mean(ratios):.2f} ({pairs})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--first", type=int, default=100, help="seed of the first split; 0 to 4 were used to choose the defaults")
    parser.add_argument(
        "--out", type=Path, default=None, help="JSON lines, one for each split; existing ones are not computed again"
    )
    options = parser.parse_args()
    folder = Path(os.environ.get("SSLA_DATA", "data/uci"))
    done = []
    if options.out and options.out.exists():
        done = [json.loads(line) for line in options.out.read_text().splitlines()]
    seen = {(r["set"], r["split"]) for r in done}
    for name in options.sets.split(","):
        for split in range(options.first, options.first + options.splits):
            if (name, split) in seen:
                continue
            done.append(one_split(folder, name, split))
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
    print(table(done))


if __name__ == "__main__":
    main()
