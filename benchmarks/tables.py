"""Tables with mixed columns and gaps: the estimators without options beside peers, on the same rows of the same splits.

    SSLA_TABLES=…/tables SSLA_DATA=…/uci python benchmarks/tables.py [--task regression|classes] [--tables stock,…] [--splits 2]
        [--first 100] [--rows 1000] [--out results.jsonl]

Regression: 13 tables of SSLA_TABLES and the eight UCI tables of the paper; classes: 14 tables of SSLA_TABLES. At most --rows rows
for training, a fifth of the table (at most 1,000 rows) for the test. NLL and CRPS in units of the target's standard deviation.
Split 0 was looked at while the defaults were chosen (regression: stock, servo, strike, autoprice, abalone, cpu_small, house8L;
classes: credit_g, heart_c, vowel), splits from 100 on were not, with one exception: house8L of split 100 showed that the log
variance needs an upper limit.

    ssla            SSLARegressor() / SSLAClassifier()
    ensemble        five ReLU networks 2 × 50 with mean and log variance (or logits), early stopping, mixed: a deep ensemble
    NGBoost         its defaults, early stopping on a tenth of the rows
    CatBoost        RMSEWithUncertainty (or its defaults for classes), early stopping on a tenth of the rows
    GP              scikit-learn's, RBF with a length for each column and white noise, of at most 500 rows
    booster         HistGradientBoosting; regression: with the constant noise of rows that were held out
    trees           PredictiveRegressor() / PredictiveClassifier(): the booster with a Bayesian last layer
    logistic        logistic regression (classes)
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ssla import likelihoods, metrics
from ssla.predictive import Predictive, affine, from_marginal, mixture
from ssla.sklearn import PredictiveClassifier, PredictiveRegressor, SSLAClassifier, SSLARegressor
from ssla.tables import make_plan
from ssla.tables.reading import read_table
from ssla.tabular.folds import folds
from ssla.tabular.scaling import scaling_of
from ssla.tabular.training import Architecture, Rows, Schedule, train
from ssla_paper.uci.data import SETS, read

LEVELS = (0.5, 0.9, 0.95)
GP_ROWS = 500


class Split:
    """Numbers of the training and the test rows."""

    def __init__(self, x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray, classes: int, seed: int) -> None:
        self.x, self.y, self.x_test, self.y_test, self.classes, self.seed = x, y, x_test, y_test, classes, seed


def names(folder: Path, task: str) -> list[str]:
    lines = (folder / "README.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith(f"| {task}")]
    return [row[2].removesuffix(".csv") for row in cells] + (list(SETS) if task == "regression" else [])


def load(folder: Path, name: str, seed: int, most: int, task: str) -> Split:
    rng = np.random.default_rng(seed)
    if name in SETS:
        rows = read(Path(os.environ.get("SSLA_DATA", "data/uci")), name)
        X, y, order = rows.x, rows.y, rng.permutation(len(rows.y))
    else:
        table = read_table(folder / f"{name}.csv")
        target, order = table.names[-1], rng.permutation(table.rows)
    count = len(order)
    held = min(max(count // 5, 30), 1000)
    test, kept = order[:held], order[held : held + most]
    if name not in SETS:
        given = np.isin(np.arange(count), kept)
        X = make_plan(table, {target}, given).encode(table).values
        values = table.column(target).values
        y = values.astype(float) if task == "regression" else np.unique([str(v) for v in values], return_inverse=True)[1]
    return Split(X[kept], y[kept], X[test], y[test], int(y.max()) + 1 if task == "classes" else 0, seed)


def normal(mean: np.ndarray, deviation: np.ndarray) -> Predictive:
    f = torch.from_numpy(np.stack([mean, 2 * np.log(np.maximum(deviation, 1e-9))], 1).astype(float))
    return from_marginal(likelihoods.HeteroscedasticGaussian(), f, torch.zeros(len(f), 2, 2, dtype=f.dtype), "plug_in")


def part(s: Split) -> tuple[np.ndarray, np.ndarray]:
    """Nine tenths of the training rows, and the rest for early stopping."""
    order = np.random.default_rng(s.seed).permutation(len(s.y))
    count = max(len(order) // 10, 5)
    return order[count:], order[:count]


def ensemble(s: Split) -> Any:
    x, y = torch.from_numpy(s.x), torch.from_numpy(s.y)
    ones = torch.ones(len(x), dtype=torch.float64)
    inputs = scaling_of(x, ones)
    target = None if s.classes else scaling_of(y[:, None], ones)
    law = likelihoods.HeteroscedasticGaussian() if target else likelihoods.Categorical()
    t = target(y[:, None])[:, 0].float() if target else y
    held = folds(len(x), 5, 0.1, torch.Generator().manual_seed(s.seed), None if target else y)
    rows = Rows(inputs(x).float(), t, ones.float(), held)
    schedule = Schedule(batch_size=min(256, max(16, len(x) // 16)))
    trained = train(Architecture(x.shape[1], s.classes or 2, activation="relu"), law, rows, schedule, s.seed)
    with torch.no_grad():
        f = [module.double()(inputs(torch.from_numpy(s.x_test))) for module in trained.modules]
    if target is None:
        return torch.stack([part.softmax(1) for part in f]).mean(0).numpy()
    parts = [from_marginal(law, one, torch.zeros(len(one), 2, 2, dtype=one.dtype), "plug_in") for one in f]
    return affine(mixture(parts), target.shift[0], target.scale[0])


def ngboost(s: Split) -> Any:
    from ngboost import NGBClassifier, NGBRegressor
    from ngboost.distns import k_categorical

    fit, stop = part(s)
    if s.classes:
        model = NGBClassifier(Dist=k_categorical(s.classes), verbose=False, random_state=s.seed)
    else:
        model = NGBRegressor(verbose=False, random_state=s.seed)
    model.fit(s.x[fit], s.y[fit], X_val=s.x[stop], Y_val=s.y[stop], early_stopping_rounds=50)
    if s.classes:
        return model.predict_proba(s.x_test)
    found = model.pred_dist(s.x_test)
    return normal(found.loc, found.scale)


def catboost(s: Split) -> Any:
    from catboost import CatBoostClassifier, CatBoostRegressor

    fit, stop = part(s)
    options = {
        "verbose": False,
        "random_seed": s.seed,
        "early_stopping_rounds": 50,
        "thread_count": 1,
        "allow_writing_files": False,
    }
    kind = CatBoostClassifier(**options) if s.classes else CatBoostRegressor(loss_function="RMSEWithUncertainty", **options)
    model = kind.fit(s.x[fit], s.y[fit], eval_set=(s.x[stop], s.y[stop]))
    if not s.classes:
        found = model.predict(s.x_test)
        return normal(found[:, 0], np.sqrt(found[:, 1]))
    probs = np.full((len(s.x_test), s.classes), 1e-6)
    probs[:, model.classes_.astype(int)] = np.maximum(model.predict_proba(s.x_test), 1e-6)
    return probs / probs.sum(1, keepdims=True)


def gp(s: Split) -> Any:
    from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(s.x)
    x, y = scaler.transform(s.x)[:GP_ROWS], s.y[:GP_ROWS]
    smooth = ConstantKernel() * RBF(np.full(x.shape[1], math.sqrt(x.shape[1])))
    if s.classes:
        model = GaussianProcessClassifier(ConstantKernel() * RBF(math.sqrt(x.shape[1])), random_state=s.seed).fit(x, y)
        return spread(s, model.classes_, model.predict_proba(scaler.transform(s.x_test)))
    model = GaussianProcessRegressor(smooth + WhiteKernel(0.1), normalize_y=True, random_state=s.seed).fit(x, y)
    return normal(*model.predict(scaler.transform(s.x_test), return_std=True))


def spread(s: Split, labels: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Probabilities of all classes: at least 1e-6, also of those that no training row has."""
    probs = np.full((len(found), s.classes), 1e-6)
    probs[:, labels.astype(int)] = np.maximum(found, 1e-6)
    return probs / probs.sum(1, keepdims=True)


def booster(s: Split) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    if s.classes:
        model = HistGradientBoostingClassifier(random_state=s.seed, early_stopping=True).fit(s.x, s.y)
        return spread(s, model.classes_, model.predict_proba(s.x_test))
    fit, stop = part(s)
    noise = (HistGradientBoostingRegressor(random_state=s.seed).fit(s.x[fit], s.y[fit]).predict(s.x[stop]) - s.y[stop]).std()
    model = HistGradientBoostingRegressor(random_state=s.seed).fit(s.x, s.y)
    return normal(model.predict(s.x_test), np.full(len(s.x_test), noise))


def trees(s: Split) -> Any:
    if s.classes:
        model = PredictiveClassifier(random_state=s.seed).fit(s.x, s.y)
        return spread(s, model.classes_, model.predict_proba(s.x_test))
    return PredictiveRegressor(random_state=s.seed).fit(s.x, s.y).predict_dist(s.x_test)


def logistic(s: Split) -> np.ndarray:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000)).fit(s.x, s.y)
    return spread(s, model[-1].classes_, model.predict_proba(s.x_test))


def ours(s: Split) -> Any:
    if s.classes:
        model = SSLAClassifier(random_state=s.seed).fit(s.x, s.y)
        return spread(s, model.classes_, model.predict_proba(s.x_test))
    return SSLARegressor(random_state=s.seed).fit(s.x, s.y).predict_dist(s.x_test)


METHODS: dict[str, Callable[[Split], Any]] = {
    "ssla": ours,
    "ensemble": ensemble,
    "NGBoost": ngboost,
    "CatBoost": catboost,
    "GP": gp,
    "booster": booster,
    "trees": trees,
    "logistic": logistic,
}


def scores(answer: Any, s: Split) -> dict[str, float]:
    if s.classes:
        top, right = answer.max(1), answer.argmax(1) == s.y_test
        bins = np.minimum((top * 10).astype(int), 9)
        gaps = [abs(top[bins == b].mean() - right[bins == b].mean()) * (bins == b).mean() for b in range(10) if (bins == b).any()]
        return {
            "log-loss": float(-np.log(np.maximum(answer[np.arange(len(top)), s.y_test], 1e-12)).mean()),
            "error": float(1 - right.mean()),
            "ECE": float(sum(gaps)),
        }
    unit = float(s.y.std())
    found = {
        "nll": float(metrics.nll(answer, s.y_test)) - math.log(unit),
        "crps": float(metrics.crps(answer, s.y_test)) / unit,
        "rmse": float(metrics.rmse(answer, s.y_test)) / unit,
    }
    return found | {f"coverage {level:.0%}": float(metrics.coverage(answer, s.y_test, level)) for level in LEVELS}


def one_split(folder: Path, name: str, seed: int, most: int, task: str, methods: list[str]) -> dict[str, Any]:
    s = load(folder, name, seed, most, task)
    result: dict[str, Any] = {"task": task, "table": name, "split": seed, "rows": len(s.y)}
    for method in methods:
        start = time.process_time()
        try:
            answer = METHODS[method](s)
            result[method] = scores(answer, s) | {"seconds": time.process_time() - start}
        except Exception as error:  # a peer that fails is shown as such
            print(f"{name}, split {seed}: {method} failed. {type(error).__name__}: {str(error)[:200]}", flush=True)
    return result


def report(results: list[dict[str, Any]], methods: list[str]) -> str:
    """Means over splits by table, and mean ranks over tables; a method that failed on a split has no mean there."""
    lines = []
    tables = list(dict.fromkeys(r["table"] for r in results))
    for score in list(next(r[methods[0]] for r in results if methods[0] in r)):
        lines.append(f"\n{score:<24}" + "".join(f"{method:>10}" for method in methods))
        rows = []
        for name in tables:
            own = [r for r in results if r["table"] == name]
            row = [float(np.mean([r[m][score] if m in r else math.nan for r in own])) for m in methods]
            rows.append(row)
            lines.append(f"{name:<24}" + "".join(f"{value:10.3f}" for value in row))
        values = np.array(rows)
        lines.append(f"{'mean':<24}" + "".join(f"{value:10.3f}" for value in np.nanmean(values, 0)))
        if score in ("nll", "crps", "rmse", "log-loss", "ECE", "error"):
            ranks = np.where(np.isnan(values), np.inf, values).argsort(1).argsort(1) + 1
            lines.append(f"{'mean rank':<24}" + "".join(f"{value:10.2f}" for value in ranks.mean(0)))
            wins = (values[:, :1] < values).sum(0)
            lines.append(f"{'tables where ssla wins':<24}" + "".join(f"{wins[i]:>7}/{len(values)}" for i in range(len(methods))))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--task", choices=("regression", "classes"), default="regression")
    parser.add_argument("--tables", default="")
    parser.add_argument("--methods", default="")
    parser.add_argument("--splits", type=int, default=2)
    parser.add_argument("--first", type=int, default=100)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=None, help="JSON lines; splits that it holds are not computed again")
    options = parser.parse_args()
    folder = Path(os.environ.get("SSLA_TABLES", "data/tables"))
    torch.set_num_threads(1)
    usual = [m for m in METHODS if m != ("logistic" if options.task == "regression" else "")]
    methods = options.methods.split(",") if options.methods else usual
    done = []
    if options.out and options.out.exists():
        done = [json.loads(line) for line in options.out.read_text().splitlines()]
    seen = {(r["table"], r["split"]) for r in done}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for split in range(options.first, options.first + options.splits):
            for name in options.tables.split(",") if options.tables else names(folder, options.task):
                if (name, split) not in seen:
                    done.append(one_split(folder, name, split, options.rows, options.task, methods))
                    if options.out:
                        with options.out.open("a") as file:
                            file.write(json.dumps(done[-1]) + "\n")
    print(report(done, methods))


if __name__ == "__main__":
    main()
