"""Coverage and mean width of 90% intervals on the eight UCI tables: `predictive_set` beside split
conformal and CV+.

    SSLA_DATA=…/uci python benchmarks/accuracy/conformal.py [--sets auto_mpg,…] [--splits 5] [--rows 800]
    [--level 0.9]
        [--methods networks,…] [--out FILE]

Four fifths of the rows for training, at most --rows of them; at most 1,000 of the others for
testing. Widths are in units of the standard deviation of the training targets. Columns:

    set           SSLARegressor().predictive_set: each row compared by the network that held it out; all rows in every last layer;
                  the mean of the networks' outputs at the new row
    own           SSLARegressor().predict_interval: of the predictive distribution
    split         SSLARegressor(conformal=True).predict_interval: a fifth of the rows for calibration

and for one network with constant noise, SSLARegressor("gaussian", members=1):

    held          posterior.predictive_set(x, rows=…) with the rows of early stopping, which the features have not seen
    seen          posterior.predictive_set(x): all rows, although the features were trained on them
    all weights   the same for a posterior of all weights, linearised (mode="tilt", prior by the evidence)
    own 1         predict_interval
    split 1       SSLARegressor("gaussian", members=1, conformal=True).predict_interval

    CV+           MAPIE's CrossConformalRegressor(method="plus", cv=5) around scikit-learn's MLPRegressor (50, 50), standardised

nan: not finite.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from mapie.regression import CrossConformalRegressor
from sklearn.compose import TransformedTargetRegressor
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import ssla
from ssla.sklearn import SSLARegressor
from ssla_paper.uci.data import SETS, read

COLUMNS = ("set", "own", "split", "held", "seen", "all weights", "own 1", "split 1", "CV+")
MOST_TEST_ROWS = 1_000


def networks(
    x: np.ndarray, y: np.ndarray, new: np.ndarray, level: float, seed: int
) -> dict[str, np.ndarray]:
    """The default estimator."""
    model = SSLARegressor(random_state=seed).fit(x, y)
    split = SSLARegressor(random_state=seed, conformal=True).fit(x, y)
    return {
        "set": model.predictive_set(new, level),
        "own": model.predict_interval(new, level),
        "split": split.predict_interval(new, level),
    }


def one_network(
    x: np.ndarray, y: np.ndarray, new: np.ndarray, level: float, seed: int
) -> dict[str, np.ndarray]:
    model = SSLARegressor("gaussian", members=1, random_state=seed).fit(x, y)
    split = SSLARegressor("gaussian", members=1, random_state=seed, conformal=True).fit(x, y)
    ensemble = model.ensemble_
    assert ensemble.target is not None
    assert ensemble.held is not None
    z, u = ensemble.inputs(torch.from_numpy(x)), ensemble.target(torch.from_numpy(y)[:, None])[:, 0]
    posterior, z_new = ensemble.components[0].posterior, ensemble.inputs(torch.from_numpy(new))
    whole = ssla.fit(
        ensemble.modules[0],
        (z, u),
        likelihood=posterior.likelihood,
        prior=ssla.priors.Gaussian(1.0),
        weights="all",
        mode="tilt",
        memory_budget=4 << 30,
    ).tune(over=("prior",), per_layer=False)
    sets = {
        "held": posterior.predictive_set(z_new, level, rows=ensemble.held[0]),
        "seen": posterior.predictive_set(z_new, level),
        "all weights": whole.predictive_set(z_new, level),
    }
    found = {
        name: (ensemble.target.shift + ensemble.target.scale * ends).numpy()
        for name, ends in sets.items()
    }
    return found | {
        "own 1": model.predict_interval(new, level),
        "split 1": split.predict_interval(new, level),
    }


def mapie(
    x: np.ndarray, y: np.ndarray, new: np.ndarray, level: float, seed: int
) -> dict[str, np.ndarray]:
    network = make_pipeline(
        StandardScaler(),
        MLPRegressor(hidden_layer_sizes=(50, 50), alpha=1e-2, max_iter=400, random_state=seed),
    )
    model = TransformedTargetRegressor(network, transformer=StandardScaler())
    cross = CrossConformalRegressor(
        model, confidence_level=level, method="plus", cv=5, random_state=seed
    )
    _, ends = cross.fit_conformalize(x, y).predict_interval(new)
    return {"CV+": ends[:, :, 0]}


METHODS = {method.__name__: method for method in (networks, one_network, mapie)}


def one_split(
    folder: Path, name: str, split: int, most_rows: int, level: float, methods: list[str]
) -> dict:
    table = read(folder, name)
    order = np.random.default_rng(split).permutation(len(table.y))
    count = min(most_rows, int(0.8 * len(order)))
    train, test = order[:count], order[count : count + MOST_TEST_ROWS]
    x, y, new, truth = table.x[train], table.y[train], table.x[test], table.y[test]
    result: dict = {"set": name, "split": split, "rows": count, "test": len(test), "scores": {}}
    for method in (METHODS[one] for one in methods):
        start = time.process_time()
        for label, ends in method(x, y, new, level, split).items():
            inside = (ends[:, 0] <= truth) & (truth <= ends[:, 1])
            result["scores"][label] = [
                float(inside.mean()),
                float((ends[:, 1] - ends[:, 0]).mean() / y.std()),
            ]
        result[f"seconds {method.__name__}"] = time.process_time() - start
    return result


def table(results: list[dict]) -> str:
    names = [name for name in SETS if any(r["set"] == name for r in results)]
    columns = [label for label in COLUMNS if label in results[0]["scores"]]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    means = []
    for name in names:
        own = [[r["scores"][label] for label in columns] for r in results if r["set"] == name]
        means.append(np.mean(own, 0))  # (columns, 2)
    for name, row in zip([*names, "mean"], [*means, np.mean(means, 0)], strict=True):
        lines.append(
            f"| {name} | "
            + " | ".join(f"{coverage:.1%} / {width:.3g}" for coverage, width in row)
            + " |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--first", type=int, default=300, help="seed of the first split")
    parser.add_argument("--rows", type=int, default=800, help="for training at most")
    parser.add_argument("--level", type=float, default=0.9)
    parser.add_argument("--methods", default=",".join(METHODS), help="of " + ", ".join(METHODS))
    parser.add_argument("--out", type=Path, default=None, help="JSON lines, one for each split")
    options = parser.parse_args()
    folder = Path(os.environ.get("SSLA_DATA", "data/uci"))
    torch.set_num_threads(1)
    done = []
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            "polish moved|The network is not at the mode|Tuning ended at the edge",
            UserWarning,
        )
        warnings.filterwarnings("ignore", "Stochastic Optimizer", UserWarning)  # MLPRegressor
        for name in options.sets.split(","):
            for split in range(options.first, options.first + options.splits):
                done.append(
                    one_split(
                        folder, name, split, options.rows, options.level, options.methods.split(",")
                    )
                )
                if options.out:
                    with options.out.open("a") as file:
                        file.write(json.dumps(done[-1]) + "\n")
    print(table(done))
    print(
        f"{sum(value for r in done for key, value in r.items() if key.startswith('seconds')) / 60:.1f} processor minutes"
    )


if __name__ == "__main__":
    main()
