"""Parts of `ssla train`: table -> plan -> estimator -> scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import ssla
from ssla import metrics
from ssla._checks import one_of, warn
from ssla.tables.columns import Encoded, Plan, Table, TableError, Target, make_plan, read_target
from ssla.tables.estimators import SSLAClassifier, SSLARegressor
from ssla.tables.networks.embeddings import dimensions_of
from ssla.tables.networks.training import Architecture
from ssla.tables.scoring.saved_models import predictive_at, replace_refit

LIKELIHOODS = (
    "auto",
    "gaussian",
    "heteroscedastic",
    "positive",
    "poisson",
    "log_normal",
    "logit_normal",
    "classes",
)
FEWEST_ROWS = 10
SMALLEST_TEST = 5
OF_INTERVALS = ("coverage", "width")
LARGEST_TRIED = (100, 100)  # hidden layers, by --tune-trials


@dataclass(frozen=True)
class Request:
    """The options of `ssla train`."""

    data: Path
    target: str
    output: Path
    drop: tuple[str, ...] = ()
    likelihood: str = "auto"
    members: int | str = "auto"
    max_epochs: int = 200
    test_fraction: float = 0.1
    conformal: bool = False
    tune_trials: int = 0
    seed: int = 0
    decimal: str | None = None  # None: detected for each column
    thousands: str | None = None


@dataclass(frozen=True, eq=False)
class Prepared:
    """Numbers of a table, and how they were made."""

    plan: Plan
    X: np.ndarray
    y: np.ndarray
    likelihood: str
    missing: dict[str, int]
    rows_without_target: int
    encoded: Encoded  # of the rows with a target
    target: Target
    read_as: dict[str, str]  # how columns were interpreted, if that is not obvious


def prepare(table: Table, request: Request) -> Prepared:
    """Plan, numbers and target of a training table, or a TableError."""
    one_of("likelihood", request.likelihood, LIKELIHOODS)
    for name in request.drop:
        table.cells_of(name)  # its error names the most similar column
    asked = None if request.likelihood == "auto" else request.likelihood == "classes"
    target = read_target(table, request.target, asked)
    given = target.given
    if len(target.y) < FEWEST_ROWS:
        raise TableError(
            f"{table.path} has {len(target.y)} rows with a target; at least {FEWEST_ROWS} are "
            "needed to train."
        )
    if not target.classes and len(set(target.y.tolist())) == 1:
        raise TableError(
            f"The target {request.target!r} is constant ({target.y[0]:g}), so there is nothing to "
            "predict."
        )
    if target.zero_one and asked is None:
        warn(
            f"The target {request.target!r} has only the values 0 and 1: it is predicted as a "
            "number. For classes give --likelihood classes."
        )
    plan = make_plan(table, {request.target, *request.drop}, given, codes=True)
    encoded = plan.encode(table)
    likelihood = "classes" if target.classes else request.likelihood
    said = plan.said | ({f"{request.target} (target)": target.said} if target.said else {})
    rest = int((~given).sum())
    return Prepared(
        plan,
        encoded.values[given],
        target.y,
        likelihood,
        encoded.missing,
        rest,
        encoded[given],
        target,
        said,
    )


def check_memory(ready: Prepared, hidden: tuple[int, ...]) -> None:
    """ValueError before training if the curvature of the last layer exceeds the memory budget:
    very many classes.
    """
    outputs = len(set(ready.y.tolist())) if ready.likelihood == "classes" else 1
    cost = ssla.estimate_cost(
        architecture_of(ready.plan, outputs, hidden).build(), len(ready.y), structure="dense"
    )
    if not cost.fits:
        raise TableError(
            f"The target has {outputs:,} classes. Their curvature needs "
            f"{cost.statistics / 2**30:.3g} GiB, more than the {cost.budget / 2**30:.3g} GiB that "
            "this command uses. Group the rare classes, or leave out their rows."
        )


def architecture_of(plan: Plan, outputs: int, hidden: tuple[int, ...]) -> Architecture:
    """A network for the columns of a plan, without pieces."""
    return Architecture(
        plan.width, outputs, hidden, levels=plan.levels, dimensions=dimensions_of(plan.levels)
    )


def split(y: np.ndarray, likelihood: str, request: Request) -> tuple[np.ndarray, np.ndarray]:
    """Rows for training, and rows for the scores (none if they would be fewer than five)."""
    if not 0 <= request.test_fraction < 1:
        raise ValueError(
            f"--test-fraction must be between 0 and 1, but is {request.test_fraction:g}."
        )
    order, most = shuffled(y, likelihood, request.seed)
    count = min(round(len(y) * request.test_fraction), most)
    return (order[count:], order[:count]) if count >= SMALLEST_TEST else (order, order[:0])


def shuffled(y: np.ndarray, likelihood: str, seed: int) -> tuple[np.ndarray, int]:
    """A random order of the rows, and how many of the first may be held out.

    For classes the order is stratified: the r-th of n rows of a class is at (r + ½)/n. The last row
    of every class comes after all others and is never held out.
    """
    order = np.random.default_rng(seed).permutation(len(y))
    if likelihood != "classes":
        return order, len(y)
    _, codes, sizes = np.unique(y[order], return_inverse=True, return_counts=True)
    by_class = np.argsort(codes, kind="stable")
    rank = np.empty(len(y), dtype=int)
    rank[by_class] = np.arange(len(y)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    place = np.where(rank == sizes[codes] - 1, 1.0, (rank + 0.5) / sizes[codes])
    return order[np.argsort(place, kind="stable")], len(y) - len(sizes)


def make(request: Request, likelihood: str, options: dict[str, Any], plan: Plan) -> Any:
    """The estimator of a request, for rows that the plan has encoded."""
    estimator = _estimator(request, likelihood, options)
    estimator.levels = plan.levels
    return estimator


def _estimator(request: Request, likelihood: str, options: dict[str, Any]) -> Any:
    shared = {
        "members": request.members,
        "max_epochs": request.max_epochs,
        "random_state": request.seed,
        **options,
    }
    if likelihood == "classes":
        if request.conformal:
            raise ValueError("--conformal corrects intervals of numbers; omit it for classes.")
        return SSLAClassifier(**shared)
    return SSLARegressor(likelihood, conformal=request.conformal, **shared)


def score(
    estimator: Any, X: np.ndarray | Encoded, y: np.ndarray, refit: str = ""
) -> dict[str, Any]:
    """The scores of rows whose labels occur in training; for a conformal model also those of
    its intervals.
    """
    if refit:
        estimator = replace_refit(estimator, refit)
    if isinstance(estimator, SSLAClassifier):
        known = np.isin(y, estimator.classes_)
        if not known.any():
            raise TableError("None of the labels in the target occurs in the training table.")
        codes = np.searchsorted(estimator.classes_, y[known])
        summary = metrics.summary(predictive_at(estimator, X[known]), codes)
        return dict(summary.scores) | (
            {"unknown labels": float((~known).sum())} if not known.all() else {}
        )
    p = predictive_at(estimator, X)
    scores: dict[str, Any] = dict(metrics.summary(p, y).scores)
    conformal = estimator.conformal_
    if conformal is None:
        return scores
    found: dict[str, Any] = {name: scores[name] for name in ("nll", "crps", "rmse")}
    if not conformal.holds_for(estimator.refit):
        found["conformal intervals"] = f"none: they were calibrated with refit {conformal.refit!r}"
        return found | of_predictive(scores)
    for level in metrics.LEVELS:
        low, high = estimator.interval_of(p, level).T
        width = float((high - low).mean())
        found[f"conformal coverage {level:.0%}"] = float(((low <= y) & (y <= high)).mean())
        found[f"conformal width {level:.0%}"] = width if np.isfinite(width) else "infinite"
    return found | of_predictive(scores)


def of_predictive(scores: dict[str, Any]) -> dict[str, Any]:
    """Scores of a conformal model's predictive, labelled to distinguish them from those of its
    intervals.
    """
    return {
        f"predictive {name}" if name.startswith(OF_INTERVALS) else name: value
        for name, value in scores.items()
    }


def rows_seen(estimator: Any) -> dict[str, Any]:
    """The numbers of training and of calibration rows."""
    conformal = getattr(estimator, "conformal_", None)
    return {
        "rows_trained": estimator.ensemble_.components[0].posterior.report.n,
        "conformal": conformal is not None,
        "rows_calibration": 0 if conformal is None else len(conformal.scores),
    }


def smaller(request: Request) -> Request:
    """The estimator of a trial: one network."""
    return replace(request, members=1, conformal=False)
