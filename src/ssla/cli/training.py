"""`ssla train`: table -> plan -> estimator -> scores -> directory."""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import ssla
from ssla import metrics
from ssla._checks import one_of
from ssla.cli.console import progress
from ssla.ensemble import Settings, predict_with_gaps
from ssla.persistence.container import check_target
from ssla.predictive import Predictive
from ssla.sklearn import SSLAClassifier, SSLARegressor
from ssla.sklearn.files import save
from ssla.tables import Encoded, Plan, Table, TableError, Target, make_plan, read_table, read_target
from ssla.training import Architecture

LIKELIHOODS = ("auto", "gaussian", "heteroscedastic", "poisson", "classes")
FEWEST_ROWS = 10
SMALLEST_TEST = 5
LARGEST_TRIED = (100, 100)  # hidden layers, by --tune-trials


@dataclass(frozen=True)
class Request:
    """The options of `ssla train`."""

    data: Path
    target: str
    output: Path
    drop: tuple[str, ...] = ()
    likelihood: str = "auto"
    members: int = 1
    max_epochs: int = 200
    test_fraction: float = 0.1
    conformal: bool = False
    tune_trials: int = 0
    seed: int = 0


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
    read_as: dict[str, str]  # how columns were understood, where that is not plain


def run(request: Request, quiet: bool) -> dict[str, Any]:
    """Do it, and say what was done."""
    started = time.perf_counter()
    check_target(request.output)
    table = read_table(request.data)
    ready = prepare(table, request)
    check_memory(ready, LARGEST_TRIED if request.tune_trials else Settings().hidden)
    options: dict[str, Any] = {}
    if request.tune_trials:
        from ssla.cli.tuning import best_options

        options = best_options(request, ready, quiet)
    train, test = split(len(ready.y), request)
    estimator = make(request, ready.likelihood, options)
    with progress(request.max_epochs, "training", quiet) as advance:
        estimator.on_epoch = advance
        estimator.fit(ready.X[train], ready.y[train])
        del estimator.on_epoch
    scores = score(estimator, ready.encoded[test], ready.y[test]) if len(test) else {}
    facts = {
        "rows": table.rows,
        "rows_trained": len(train),
        "rows_without_target": ready.rows_without_target,
        "columns": len(ready.plan.features),
        "inputs": ready.plan.width,
        "left_out": ready.plan.left_out,
        "read_as": ready.read_as,
        "missing": ready.missing,
        "likelihood": ready.likelihood,
        "members": request.members,
        "epochs": estimator.n_iter_,
        "scores": scores,
    }
    if options:
        facts["tuned"] = options
    extra = {"plan": ready.plan.as_json(), "target": request.target, "target_style": asdict(ready.target.style), "facts": facts}
    save(estimator, request.output, extra)
    return {"model": str(request.output), **facts, "seconds": round(time.perf_counter() - started, 2)}


def prepare(table: Table, request: Request) -> Prepared:
    """Plan, numbers and target of a training table, or a TableError."""
    one_of("likelihood", request.likelihood, LIKELIHOODS)
    for name in request.drop:
        table.cells_of(name)  # its error names the nearest
    asked = None if request.likelihood == "auto" else request.likelihood == "classes"
    target = read_target(table, request.target, asked)
    given = target.given
    if len(target.y) < FEWEST_ROWS:
        raise TableError(f"{table.path} has {len(target.y)} rows with a target; at least {FEWEST_ROWS} are needed to learn.")
    if not target.classes and len(set(target.y.tolist())) == 1:
        raise TableError(f"The target {request.target!r} is constant ({target.y[0]:g}), so there is nothing to learn.")
    if target.zero_one and asked is None:
        warnings.warn(
            f"The target {request.target!r} has only the values 0 and 1: it is predicted as a number. For classes give "
            "--likelihood classes.",
            UserWarning,
            stacklevel=2,
        )
    plan = make_plan(table, {request.target, *request.drop}, given)
    encoded = plan.encode(table)
    likelihood = "classes" if target.classes else "gaussian" if asked is None else request.likelihood
    said = plan.said | ({f"{request.target} (target)": target.said} if target.said else {})
    rest = int((~given).sum())
    return Prepared(plan, encoded.values[given], target.y, likelihood, encoded.missing, rest, encoded[given], target, said)


def check_memory(ready: Prepared, hidden: tuple[int, ...]) -> None:
    """Refuse, before the training, a last layer whose curvature is larger than the memory budget: that of very many classes."""
    outputs = len(set(ready.y.tolist())) if ready.likelihood == "classes" else 1
    cost = ssla.estimate_cost(Architecture(ready.plan.width, outputs, hidden).build(), len(ready.y))
    if not cost.fits:
        raise TableError(
            f"The target has {outputs:,} classes. Their curvature needs {cost.statistics / 2**30:.3g} GiB, more than the "
            f"{cost.budget / 2**30:.3g} GiB that this command uses. Group the rare classes, or leave out their rows."
        )


def split(rows: int, request: Request) -> tuple[np.ndarray, np.ndarray]:
    if not 0 <= request.test_fraction < 1:
        raise ValueError(f"--test-fraction must lie between 0 and 1, but is {request.test_fraction:g}.")
    order = np.random.default_rng(request.seed).permutation(rows)
    count = round(rows * request.test_fraction)
    return (order[count:], order[:count]) if count >= SMALLEST_TEST else (order, order[:0])


def make(request: Request, likelihood: str, options: dict[str, Any]) -> Any:
    shared = {"members": request.members, "max_epochs": request.max_epochs, "random_state": request.seed, **options}
    if likelihood == "classes":
        if request.conformal:
            raise ValueError("--conformal corrects intervals of numbers; for classes leave it out.")
        return SSLAClassifier(**shared)
    return SSLARegressor(likelihood, conformal=request.conformal, **shared)


def predictive_at(estimator: Any, rows: np.ndarray | Encoded) -> Predictive:
    """The predictive of rows; those with inputs that training did not have are mixed over values of the training table."""
    if isinstance(rows, Encoded):
        return predict_with_gaps(estimator.predict_dist, rows.values, rows.mixed, rows.copies(), rows.shares)
    predictive: Predictive = estimator.predict_dist(rows)
    return predictive


def score(estimator: Any, X: np.ndarray | Encoded, y: np.ndarray, refit: str = "") -> dict[str, float]:
    """The usual scores; of labels that the model knows."""
    if refit:
        estimator = replace_refit(estimator, refit)
    if isinstance(estimator, SSLAClassifier):
        known = np.isin(y, estimator.classes_)
        if not known.any():
            raise TableError("None of the labels in the target was seen at training.")
        codes = np.searchsorted(estimator.classes_, y[known])
        summary = metrics.summary(predictive_at(estimator, X[known]), codes)
        return dict(summary.scores) | ({"unknown labels": float((~known).sum())} if not known.all() else {})
    return dict(metrics.summary(predictive_at(estimator, X), y).scores)


def replace_refit(estimator: Any, refit: str) -> Any:
    """The same fitted estimator on another rung."""
    import copy

    other = copy.copy(estimator)
    other.refit = refit
    return other


def smaller(request: Request) -> Request:
    """For trials: one network."""
    return replace(request, members=1, conformal=False)
