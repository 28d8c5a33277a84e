"""Trees with a predictive: `PredictiveRegressor` and `PredictiveClassifier` beside the plain
models, on public tables.

    SSLA_TABLES=…/tables python benchmarks/tables/trees.py [--first 100] [--splits 3] [--rows 2000]
        [--bases hgb,forest,lightgbm,catboost] [--tables stock,…] [--final folds|all]

Random splits of at most --rows rows, three quarters for training. Texts are codes. Regression, NLL
in units of the target's standard deviation: `training noise` is the model of all rows with the
noise of its training residuals, `constant noise` the mean of the models of the folds with the
standard deviation of the out-of-fold residuals. Classes: log-loss of the model of all rows, with
probabilities of at least 1e-15, and of `PredictiveClassifier` on it. Seeds 0 to 2 chose the
defaults; report seeds from 100.
"""

from __future__ import annotations

import argparse
import math
import os
import warnings
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.base import clone
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)

from ssla import metrics
from ssla.sklearn import PredictiveClassifier, PredictiveRegressor

NUMBERS = ("abalone", "stock", "strike", "cpu_small", "servo", "autoprice", "bodyfat")
CLASSES = ("car", "credit_g", "vowel", "heart_c", "cmc")


def bases(names: list[str], seed: int) -> dict[str, tuple[object, object]]:
    """Regressor and classifier by name."""
    found: dict[str, tuple[object, object]] = {}
    for name in names:
        if name == "hgb":
            pair = (
                HistGradientBoostingRegressor(random_state=seed),
                HistGradientBoostingClassifier(random_state=seed),
            )
        elif name == "forest":
            pair = (
                RandomForestRegressor(random_state=seed),
                RandomForestClassifier(random_state=seed),
            )
        elif name == "lightgbm":
            from lightgbm import LGBMClassifier, LGBMRegressor

            options = {"verbose": -1, "n_jobs": 1, "random_state": seed}
            pair = LGBMRegressor(**options), LGBMClassifier(**options)
        elif name == "catboost":
            from catboost import CatBoostClassifier, CatBoostRegressor

            options = {
                "verbose": 0,
                "thread_count": 1,
                "random_seed": seed,
                "allow_writing_files": False,
                "iterations": 300,
            }
            pair = CatBoostRegressor(**options), CatBoostClassifier(**options)
        else:
            raise SystemExit(f"unknown base {name!r}")
        found[name] = pair
    return found


def table(name: str, seed: int, rows: int) -> tuple[np.ndarray, ...]:
    """X, y, X of the test, y of the test."""
    frame = pd.read_csv(Path(os.environ["SSLA_TABLES"]) / f"{name}.csv")
    X = np.stack(
        [c if c.dtype.kind in "if" else pd.factorize(c)[0] for _, c in frame.iloc[:, :-1].items()],
        1,
    ).astype(float)
    y = frame.iloc[:, -1].to_numpy(float) if name in NUMBERS else pd.factorize(frame.iloc[:, -1])[0]
    order = np.random.default_rng(seed).permutation(len(X))[:rows]
    cut = int(0.75 * len(order))
    train, test = order[:cut], order[cut:]
    test = test if name in NUMBERS else test[np.isin(y[test], y[train])]
    return X[train], y[train], X[test], y[test]


def gaussian(mean: np.ndarray, sd: float, y: np.ndarray) -> tuple[float, float, float]:
    z = (y - mean) / sd
    nll = float(np.mean(0.5 * z**2) + math.log(sd) + 0.5 * math.log(2 * math.pi))
    return nll, float(np.mean(np.abs(z) <= 1.6449)), float(np.sqrt(np.mean((y - mean) ** 2)))


def numbers(
    base: object, X, y, X_test, y_test, seed: int, final: str | None
) -> dict[str, tuple[float, float, float]]:
    """NLL, coverage at 90% and RMSE."""
    options = {} if final is None else {"final": final}
    shift, scale = y.mean(), y.std()
    y, y_test = (y - shift) / scale, (y_test - shift) / scale
    model = PredictiveRegressor(base, random_state=seed, **options).fit(X, y)
    p = model.predict_dist(X_test)
    plain = clone(base).fit(X, y)
    fold = model._make_folds(X, y, np.arange(len(y)), folds_generator(seed))
    grown = [clone(base).fit(X[train], y[train]) for train, _ in fold]
    error = np.concatenate(
        [y[test] - g.predict(X[test]) for g, (_, test) in zip(grown, fold, strict=True)]
    )
    return {
        "training noise": gaussian(
            plain.predict(X_test), float(np.std(y - plain.predict(X))) + 1e-6, y_test
        ),
        "constant noise": gaussian(
            np.mean([g.predict(X_test) for g in grown], 0), float(error.std()), y_test
        ),
        "ssla": (
            float(metrics.nll(p, y_test)),
            float(metrics.coverage(p, y_test, 0.9)),
            float(metrics.rmse(p, y_test)),
        ),
    }


def folds_generator(seed: int) -> np.random.RandomState:
    """The state of the estimator's generator when it draws the folds."""
    generator = np.random.RandomState(seed)
    generator.randint(2**31 - 1)
    return generator


def classes(
    base: object, X, y, X_test, y_test, seed: int, final: str | None
) -> dict[str, tuple[float, float]]:
    """Log-loss and accuracy."""
    options = {} if final is None else {"final": final}
    model = PredictiveClassifier(base, random_state=seed, **options).fit(X, y)
    place = np.searchsorted(model.classes_, y_test)
    plain = clone(base).fit(X, y).predict_proba(X_test)
    scores = {}
    for name, p in (("base", plain), ("ssla", model.predict_proba(X_test))):
        own = p[np.arange(len(p)), place].clip(1e-15)
        scores[name] = float(-np.log(own).mean()), float(np.mean(p.argmax(1) == place))
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=100)
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--bases", default="hgb,forest")
    parser.add_argument("--tables", default=",".join((*NUMBERS, *CLASSES)))
    parser.add_argument("--final", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="X does not have valid feature names")
    for name in options.tables.split(","):
        score = numbers if name in NUMBERS else classes
        found = defaultdict(list)
        for seed in range(options.first, options.first + options.splits):
            rows = table(name, seed, options.rows)
            for kind, pair in bases(options.bases.split(","), seed).items():
                for column, values in score(
                    pair[name not in NUMBERS], *rows, seed, options.final
                ).items():
                    found[kind, column].append(values)
        for (kind, column), values in found.items():
            cells = " ".join(f"{value:8.4f}" for value in np.mean(values, 0))
            print(f"{name:<12} {kind:<10} {column:<15} {cells}", flush=True)


if __name__ == "__main__":
    main()
