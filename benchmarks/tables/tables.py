"""Tables with mixed columns and gaps: the estimators without options beside peers, on the same rows
of the same splits.

    make .venv/.ready-tables
    SSLA_TABLES=…/tables SSLA_DATA=…/uci .venv/bin/python benchmarks/tables/tables.py [--task
    regression|classes] [--tables stock,…]
        [--splits 2] [--first 100] [--rows 1000] [--out results.jsonl] [--plot ranks.png]
        [--only-folder]

Regression: 13 tables of SSLA_TABLES, the eight UCI tables of the paper, scikit-learn's diabetes;
classes: 14 tables of SSLA_TABLES, scikit-learn's breast cancer, digits and wine; --only-folder: the
tables of SSLA_TABLES alone (fresh_tables.py makes a folder of tables that no default was chosen
on). At most --rows rows for training, a fifth of the table (at most 1,000 rows) for the test. NLL,
CRPS and the interval score (of 90%) in units of the target's standard deviation. Split 0 was looked
at while the defaults were chosen (regression: stock, servo, strike, autoprice, abalone, cpu_small,
house8L; classes: credit_g, heart_c, vowel), splits from 100 on were not, with one exception:
house8L of split 100 showed that the log variance needs an upper limit.

    ssla            SSLARegressor() / SSLAClassifier()
    ensemble        five ReLU networks 2 × 50 with mean and log variance (or logits), early stopping, mixed: a deep ensemble
    NGBoost         its defaults, early stopping on a tenth of the rows
    CatBoost        RMSEWithUncertainty (or its defaults for classes), early stopping on a tenth of the rows
    CatBoost mean   its defaults: only the mean, so RMSE only
    GP              scikit-learn's, RBF with a length for each column and white noise, of at most 500 rows
    booster         HistGradientBoosting; regression: with the constant noise of rows that were held out
    trees           PredictiveRegressor() / PredictiveClassifier(): the booster with a Bayesian last layer
    laplace         laplace-torch on one SiLU network 2 × 50, last layer, full covariance; noise and prior by the evidence
    MLP             scikit-learn's 2 × 50, early stopping (classes: beyond 300 rows); regression: noise of held-out rows
    MAPIE           CV+ (five folds) around HistGradientBoosting: intervals of 90% and a mean, no density (regression)
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
from scipy.stats import rankdata
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from torch import Tensor

from ssla import likelihoods, metrics
from ssla.predictive import Predictive, affine, from_marginal, mixture
from ssla.sklearn import PredictiveClassifier, PredictiveRegressor, SSLAClassifier, SSLARegressor
from ssla.tables.columns import make_plan
from ssla.tables.columns.reading import read_table
from ssla.tables.networks.folds import hold_out_rows
from ssla.tables.networks.scaling import fit_scaling
from ssla.tables.networks.training import Architecture, Rows, Schedule, train_networks
from ssla_paper.peers.laplace import laplace
from ssla_paper.peers.laplace_classes import laplace_classes
from ssla_paper.uci.data import SETS, read

LEVELS = (0.5, 0.9, 0.95)
OWN: dict[str, dict[str, Callable[..., Any]]] = {
    "regression": {"diabetes": load_diabetes},
    "classes": {"breast_cancer": load_breast_cancer, "digits": load_digits, "wine": load_wine},
}
LOWER = ("nll", "crps", "interval score", "rmse", "log-loss", "ECE", "error")  # is better
STUDENTISED = (
    1.96,
    2.343,
    2.569,
    2.728,
    2.85,
    2.949,
    3.031,
    3.102,
    3.164,
    3.219,
    3.268,
)  # of 2 to 12 methods, 5%
GP_ROWS = 500


class Split:
    """Numbers of the training and the test rows."""

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        x_test: np.ndarray,
        y_test: np.ndarray,
        classes: int,
        seed: int,
    ) -> None:
        self.x, self.y, self.x_test, self.y_test, self.classes, self.seed = (
            x,
            y,
            x_test,
            y_test,
            classes,
            seed,
        )


def names(folder: Path, task: str, alone: bool) -> list[str]:
    lines = (folder / "README.md").read_text().splitlines()
    cells = [
        [cell.strip() for cell in line.split("|")] for line in lines if line.startswith(f"| {task}")
    ]
    found = [row[2].removesuffix(".csv") for row in cells]
    return (
        found if alone else found + (list(SETS) if task == "regression" else []) + list(OWN[task])
    )


def load(folder: Path, name: str, seed: int, most: int, task: str) -> Split:
    rng = np.random.default_rng(seed)
    own = name in SETS or name in OWN[task]
    if own:
        if name in SETS:
            rows = read(Path(os.environ.get("SSLA_DATA", "data/uci")), name)
            X, y = rows.x, rows.y
        else:
            X, y = OWN[task][name](return_X_y=True)
        order = rng.permutation(len(y))
    else:
        table = read_table(folder / f"{name}.csv")
        target, order = table.names[-1], rng.permutation(table.rows)
    count = len(order)
    held = min(max(count // 5, 30), 1000)
    test, kept = order[:held], order[held : held + most]
    if not own:
        given = np.isin(np.arange(count), kept)
        X = make_plan(table, {target}, given).encode(table).values
        values = table.interpret_column(target).values
        y = (
            values.astype(float)
            if task == "regression"
            else np.unique([str(v) for v in values], return_inverse=True)[1]
        )
    return Split(
        X[kept], y[kept], X[test], y[test], int(y.max()) + 1 if task == "classes" else 0, seed
    )


def normal(mean: np.ndarray, deviation: np.ndarray) -> Predictive:
    f = torch.from_numpy(np.stack([mean, 2 * np.log(np.maximum(deviation, 1e-9))], 1).astype(float))
    return from_marginal(
        likelihoods.HeteroscedasticGaussian(),
        f,
        torch.zeros(len(f), 2, 2, dtype=f.dtype),
        "plug_in",
    )


def part(s: Split) -> tuple[np.ndarray, np.ndarray]:
    """Nine tenths of the training rows, and the rest for early stopping."""
    order = np.random.default_rng(s.seed).permutation(len(s.y))
    count = max(len(order) // 10, 5)
    return order[count:], order[:count]


def trained(s: Split, members: int, activation: str, law: Any) -> tuple[Any, Any, Any, Tensor]:
    """Networks 2 × 50 with early stopping, the scalings of inputs and target, and the scaled
    target.
    """
    x, y = torch.from_numpy(s.x), torch.from_numpy(s.y)
    ones = torch.ones(len(x), dtype=torch.float64)
    inputs = fit_scaling(x, ones)
    target = None if s.classes else fit_scaling(y[:, None], ones)
    t = target(y[:, None])[:, 0].float() if target else y
    held = hold_out_rows(
        len(x), members, 0.1, torch.Generator().manual_seed(s.seed), None if target else y
    )
    rows = Rows(inputs(x).float(), t, ones.float(), held)
    schedule = Schedule(batch_size=min(256, max(16, len(x) // 16)))
    outputs = s.classes or (2 if isinstance(law, likelihoods.HeteroscedasticGaussian) else 1)
    found = train_networks(
        Architecture(x.shape[1], outputs, activation=activation), law, rows, schedule, s.seed
    )
    return (
        [module.double() for module in found.modules],
        inputs,
        target,
        t.double() if target else y,
    )


def ensemble(s: Split) -> Any:
    law = likelihoods.Categorical() if s.classes else likelihoods.HeteroscedasticGaussian()
    modules, inputs, target, _ = trained(s, 5, "relu", law)
    with torch.no_grad():
        f = [module(inputs(torch.from_numpy(s.x_test))) for module in modules]
    if target is None:
        return torch.stack([part.softmax(1) for part in f]).mean(0).numpy()
    parts = [
        from_marginal(law, one, torch.zeros(len(one), 2, 2, dtype=one.dtype), "plug_in")
        for one in f
    ]
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
    kind = (
        CatBoostClassifier(**options)
        if s.classes
        else CatBoostRegressor(loss_function="RMSEWithUncertainty", **options)
    )
    model = kind.fit(s.x[fit], s.y[fit], eval_set=(s.x[stop], s.y[stop]))
    if not s.classes:
        found = model.predict(s.x_test)
        return normal(found[:, 0], np.sqrt(found[:, 1]))
    probs = np.full((len(s.x_test), s.classes), 1e-6)
    probs[:, model.classes_.astype(int)] = np.maximum(model.predict_proba(s.x_test), 1e-6)
    return probs / probs.sum(1, keepdims=True)


def catboost_mean(s: Split) -> Any:
    """Trained for the mean alone, which CatBoost predicts better so."""
    from catboost import CatBoostRegressor

    fit, stop = part(s)
    model = CatBoostRegressor(
        verbose=False,
        random_seed=s.seed,
        early_stopping_rounds=50,
        thread_count=1,
        allow_writing_files=False,
    )
    found: np.ndarray = model.fit(s.x[fit], s.y[fit], eval_set=(s.x[stop], s.y[stop])).predict(
        s.x_test
    )
    return found


def gp(s: Split) -> Any:
    from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(s.x)
    x, y = scaler.transform(s.x)[:GP_ROWS], s.y[:GP_ROWS]
    smooth = ConstantKernel() * RBF(np.full(x.shape[1], math.sqrt(x.shape[1])))
    if s.classes:
        model = GaussianProcessClassifier(
            ConstantKernel() * RBF(math.sqrt(x.shape[1])), random_state=s.seed
        ).fit(x, y)
        return spread(s, model.classes_, model.predict_proba(scaler.transform(s.x_test)))
    model = GaussianProcessRegressor(
        smooth + WhiteKernel(0.1), normalize_y=True, random_state=s.seed
    ).fit(x, y)
    return normal(*model.predict(scaler.transform(s.x_test), return_std=True))


def spread(s: Split, labels: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Probabilities of all classes: at least 1e-6, also of those that no training row has."""
    probs = np.full((len(found), s.classes), 1e-6)
    probs[:, labels.astype(int)] = np.maximum(found, 1e-6)
    return probs / probs.sum(1, keepdims=True)


def booster(s: Split) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    if s.classes:
        model = HistGradientBoostingClassifier(random_state=s.seed, early_stopping=True).fit(
            s.x, s.y
        )
        return spread(s, model.classes_, model.predict_proba(s.x_test))
    fit, stop = part(s)
    noise = (
        HistGradientBoostingRegressor(random_state=s.seed)
        .fit(s.x[fit], s.y[fit])
        .predict(s.x[stop])
        - s.y[stop]
    ).std()
    model = HistGradientBoostingRegressor(random_state=s.seed).fit(s.x, s.y)
    return normal(model.predict(s.x_test), np.full(len(s.x_test), noise))


def trees(s: Split) -> Any:
    if s.classes:
        model = PredictiveClassifier(random_state=s.seed).fit(s.x, s.y)
        return spread(s, model.classes_, model.predict_proba(s.x_test))
    return PredictiveRegressor(random_state=s.seed).fit(s.x, s.y).predict_dist(s.x_test)


def laplace_torch(s: Split) -> Any:
    modules, inputs, target, t = trained(
        s, 1, "silu", likelihoods.Categorical() if s.classes else None
    )
    x, new = (inputs(torch.from_numpy(part)) for part in (s.x, s.x_test))
    if s.classes:
        return laplace_classes(modules[0], x, t, structure="full")(new).numpy()
    found = laplace(modules[0], x, t, new, structure="full")
    mean, sd = (part[0] * float(target.scale[0]) for part in (found.means, found.sds))
    return normal((mean + float(target.shift[0])).numpy(), sd.numpy())


def mlp(s: Split) -> Any:
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    options = {"hidden_layer_sizes": (50, 50), "max_iter": 1000, "random_state": s.seed}
    if s.classes:
        model = make_pipeline(
            StandardScaler(), MLPClassifier(**options, early_stopping=len(s.y) > 300)
        ).fit(s.x, s.y)
        return spread(s, model[-1].classes_, model.predict_proba(s.x_test))
    shift, unit = s.y.mean(), s.y.std()
    fit, stop = part(s)
    y = (s.y - shift) / unit
    models = [
        make_pipeline(StandardScaler(), MLPRegressor(**options, early_stopping=True))
        for _ in range(2)
    ]
    noise = (models[0].fit(s.x[fit], y[fit]).predict(s.x[stop]) - y[stop]).std()
    mean = models[1].fit(s.x, y).predict(s.x_test)
    return normal(shift + unit * mean, np.full(len(mean), unit * noise))


def mapie(s: Split) -> Any:
    from mapie.regression import CrossConformalRegressor
    from sklearn.ensemble import HistGradientBoostingRegressor

    model = CrossConformalRegressor(
        HistGradientBoostingRegressor(random_state=s.seed),
        confidence_level=0.9,
        cv=5,
        method="plus",
    )
    mean, ends = model.fit_conformalize(s.x, s.y).predict_interval(s.x_test)
    return mean, ends[:, :, 0]


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
    "CatBoost mean": catboost_mean,
    "GP": gp,
    "booster": booster,
    "trees": trees,
    "laplace": laplace_torch,
    "MLP": mlp,
    "MAPIE": mapie,
    "logistic": logistic,
}
ONLY = {"MAPIE": "regression", "CatBoost mean": "regression", "logistic": "classes"}


def scores(answer: Any, s: Split) -> dict[str, float]:
    if s.classes:
        top, right = answer.max(1), answer.argmax(1) == s.y_test
        bins = np.minimum((top * 10).astype(int), 9)
        gaps = [
            abs(top[bins == b].mean() - right[bins == b].mean()) * (bins == b).mean()
            for b in range(10)
            if (bins == b).any()
        ]
        return {
            "log-loss": float(
                -np.log(np.maximum(answer[np.arange(len(top)), s.y_test], 1e-12)).mean()
            ),
            "error": float(1 - right.mean()),
            "ECE": float(sum(gaps)),
        }
    unit = float(s.y.std())
    if isinstance(answer, np.ndarray):  # a mean
        return {"rmse": float(np.sqrt(((answer - s.y_test) ** 2).mean())) / unit}
    if isinstance(answer, tuple):  # a mean and intervals of 90%
        mean, ends = answer
        below, above = np.maximum(ends[:, 0] - s.y_test, 0), np.maximum(s.y_test - ends[:, 1], 0)
        return {
            "rmse": float(np.sqrt(((mean - s.y_test) ** 2).mean())) / unit,
            "interval score": float((ends[:, 1] - ends[:, 0] + 20 * (below + above)).mean()) / unit,
            "coverage 90%": float(((below == 0) & (above == 0)).mean()),
        }
    found = {
        "nll": float(metrics.nll(answer, s.y_test)) - math.log(unit),
        "crps": float(metrics.crps(answer, s.y_test)) / unit,
        "interval score": float(metrics.interval_score(answer, s.y_test, 0.9)) / unit,
        "rmse": float(metrics.rmse(answer, s.y_test)) / unit,
    }
    return found | {
        f"coverage {level:.0%}": float(metrics.coverage(answer, s.y_test, level))
        for level in LEVELS
    }


def one_split(
    folder: Path, name: str, seed: int, most: int, task: str, methods: list[str]
) -> dict[str, Any]:
    s = load(folder, name, seed, most, task)
    result: dict[str, Any] = {"task": task, "table": name, "split": seed, "rows": len(s.y)}
    for method in methods:
        start = time.process_time()
        try:
            answer = METHODS[method](s)
            result[method] = scores(answer, s) | {"seconds": time.process_time() - start}
        except Exception as error:  # a peer that fails is shown as such
            print(
                f"{name}, split {seed}: {method} failed. {type(error).__name__}: {str(error)[:200]}",
                flush=True,
            )
    return result


def ranks_of(values: np.ndarray) -> np.ndarray:
    """Ranks of the methods on each table (tables, methods), 1 for the lowest; ties share
    theirs; without a value: last.
    """
    return rankdata(np.where(np.isnan(values), np.inf, values), axis=1)


def plot(results: list[dict[str, Any]], methods: list[str], path: Path) -> None:
    """Mean ranks with the critical difference (Nemenyi, 5%): methods under one bar are not told
    apart by these tables.
    """
    import matplotlib.pyplot as plt

    shown = [
        score
        for score in next(r["ssla"] for r in results)
        if score in LOWER and score not in ("error", "ECE")
    ]
    figure, axes = plt.subplots(
        len(shown), 1, figsize=(6.4, 1.9 * len(shown)), layout="constrained", squeeze=False
    )
    tables = list(dict.fromkeys(r["table"] for r in results))
    for ax, score in zip(axes[:, 0], shown, strict=True):
        able = [m for m in methods if any(score in r.get(m, {}) for r in results)]
        values = [
            [
                np.mean([r.get(m, {}).get(score, math.nan) for r in results if r["table"] == t])
                for m in able
            ]
            for t in tables
        ]
        ranks = ranks_of(np.array(values)).mean(0)
        critical = STUDENTISED[len(able) - 2] * math.sqrt(
            len(able) * (len(able) + 1) / (6 * len(tables))
        )
        order = ranks.argsort()
        free = [0.0, 0.0]  # from where on a label above, or below, has room
        for place, m in enumerate(order):
            below = place % 2
            at = max(ranks[m], free[below])
            free[below] = at + 0.03 * len(able)
            ax.plot(
                ranks[m], 0, "o", color="#0072B2" if able[m] == "ssla" else "#555555", markersize=5
            )
            ax.annotate(
                f"{able[m]} {ranks[m]:.1f}",
                (at, -0.2 if below else 0.2),
                rotation=35,
                ha="right" if below else "left",
                va="top" if below else "bottom",
                fontsize=7,
                annotation_clip=False,
            )
        best = ranks[order[0]]
        ax.plot([best, best + critical], [-1.5, -1.5], color="#D55E00", lw=2, solid_capstyle="butt")
        ax.annotate(
            f" critical difference {critical:.1f}",
            (best + critical, -1.5),
            fontsize=7,
            color="#D55E00",
            va="center",
        )
        ax.set(ylim=(-1.8, 1.3), yticks=[], xlim=(0.8, len(able) + 0.6))
        ax.set_title(f"mean rank, {score}, {len(tables)} tables", loc="left", fontsize=8)
        ax.tick_params(labelsize=7)
        for side in ("left", "right", "top"):
            ax.spines[side].set_visible(False)
        ax.spines["bottom"].set_color("#bbbbbb")
        ax.axhline(0, color="#bbbbbb", lw=0.8, zorder=0)
    figure.savefig(path, dpi=150)


def report(results: list[dict[str, Any]], asked: list[str]) -> str:
    """Means over splits by table, and mean ranks over tables; a method that failed on a split
    has no mean there.
    """
    lines = []
    tables = list(dict.fromkeys(r["table"] for r in results))
    for score in list(next(r[asked[0]] for r in results if asked[0] in r)):
        methods = [m for m in asked if any(score in r.get(m, {}) for r in results)]
        lines.append(f"\n{score:<24}" + "".join(f"{method:>10}" for method in methods))
        rows = []
        for name in tables:
            own = [r for r in results if r["table"] == name]
            row = [
                float(np.mean([r.get(m, {}).get(score, math.nan) for r in own])) for m in methods
            ]
            rows.append(row)
            lines.append(f"{name:<24}" + "".join(f"{value:10.3f}" for value in row))
        values = np.array(rows)
        lines.append(f"{'mean':<24}" + "".join(f"{value:10.3f}" for value in np.nanmean(values, 0)))
        if score in LOWER:
            ranks = ranks_of(values)
            lines.append(
                f"{'mean rank':<24}" + "".join(f"{value:10.2f}" for value in ranks.mean(0))
            )
            wins = (values[:, :1] < values).sum(0)
            lines.append(
                f"{'tables where ssla wins':<24}"
                + "".join(f"{wins[i]:>7}/{len(values)}" for i in range(len(methods)))
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--task", choices=("regression", "classes"), default="regression")
    parser.add_argument("--tables", default="")
    parser.add_argument("--methods", default="")
    parser.add_argument("--splits", type=int, default=2)
    parser.add_argument("--first", type=int, default=100)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument(
        "--only-folder", action="store_true", help="the tables of SSLA_TABLES alone"
    )
    parser.add_argument("--plot", type=Path, default=None, help="a picture of the mean ranks")
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        help="JSON lines; splits that it holds are not computed again",
    )
    options = parser.parse_args()
    folder = Path(os.environ.get("SSLA_TABLES", "data/tables"))
    torch.set_num_threads(1)
    usual = [m for m in METHODS if ONLY.get(m, options.task) == options.task]
    methods = options.methods.split(",") if options.methods else usual
    done = []
    if options.out and options.out.exists():
        done = [json.loads(line) for line in options.out.read_text().splitlines()]
    seen = {(r["table"], r["split"]) for r in done}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for split in range(options.first, options.first + options.splits):
            for name in (
                options.tables.split(",")
                if options.tables
                else names(folder, options.task, options.only_folder)
            ):
                if (name, split) not in seen:
                    done.append(one_split(folder, name, split, options.rows, options.task, methods))
                    if options.out:
                        with options.out.open("a") as file:
                            file.write(json.dumps(done[-1]) + "\n")
    print(report(done, methods))
    if options.plot:
        plot(done, methods, options.plot)


if __name__ == "__main__":
    main()
