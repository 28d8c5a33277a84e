"""Parts of `ssla train`: table -> encoded rows and target -> the estimator of a request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import ssla
from ssla._checks import one_of, warn
from ssla.tables.columns import Encoded, Plan, Table, TableError, Target, read_target
from ssla.tables.estimators import SSLAClassifier, SSLARegressor, TableEncoder
from ssla.tables.networks.embeddings import dimensions_of
from ssla.tables.networks.ensemble import CLASSES
from ssla.tables.networks.training import Architecture

LIKELIHOODS = (
    "auto",
    "gaussian",
    "heteroscedastic",
    "positive",
    "poisson",
    "log_normal",
    "logit_normal",
    CLASSES,
)
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
    """A training table as the estimators read it."""

    rows: Encoded  # those with a target
    target: Target
    likelihood: str
    missing: dict[str, int]  # cells of the whole table, by column
    read_as: dict[str, str]  # how columns were interpreted, if that is not obvious

    @property
    def plan(self) -> Plan:
        return self.rows.plan

    @property
    def y(self) -> np.ndarray:
        return self.target.y

    @property
    def classes(self) -> int:
        """The number of classes; 0 for numbers."""
        return len(set(self.y.tolist())) if self.target.classes else 0


def prepare(table: Table, request: Request) -> Prepared:
    """The rows and the target of a training table, or a TableError."""
    one_of("likelihood", request.likelihood, LIKELIHOODS)
    for name in request.drop:
        table.cells_of(name)  # its error names the most similar column
    asked = None if request.likelihood == "auto" else request.likelihood == CLASSES
    target = read_target(table, request.target, asked)
    _check_target(table, target, request)
    encoder = TableEncoder(drop=(request.target, *request.drop), codes=True)
    rows = encoder.fit(table, rows=target.given).encode(table)
    read_as = rows.plan.interpretation | (
        {f"{request.target} (target)": target.interpretation} if target.interpretation else {}
    )
    likelihood = CLASSES if target.classes else request.likelihood
    return Prepared(rows[target.given], target, likelihood, rows.missing, read_as)


def _check_target(table: Table, target: Target, request: Request) -> None:
    """TableError for too few rows and for a constant; a note for 0 and 1 that may be classes."""
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
    if target.zero_one and request.likelihood == "auto":
        warn(
            f"The target {request.target!r} has only the values 0 and 1: it is predicted as a "
            "number. For classes give --likelihood classes."
        )


def check_memory(ready: Prepared, hidden: tuple[int, ...]) -> None:
    """ValueError before training if the curvature of the last layer exceeds the memory budget:
    very many classes.
    """
    module = architecture_of(ready, hidden).build()
    cost = ssla.estimate_cost(module, len(ready.y), structure="dense")
    if not cost.fits:
        raise TableError(
            f"The target has {ready.classes or 1:,} classes. Their curvature needs "
            f"{cost.statistics / 2**30:.3g} GiB, more than the {cost.budget / 2**30:.3g} GiB that "
            "this command uses. Group the rare classes, or leave out their rows."
        )


def architecture_of(ready: Prepared, hidden: tuple[int, ...]) -> Architecture:
    """A network for the columns and the target of a table, without pieces."""
    levels = ready.plan.levels
    return Architecture(
        ready.plan.width,
        ready.classes or 1,
        hidden,
        levels=levels,
        dimensions=dimensions_of(levels),
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
    if likelihood != CLASSES:
        return order, len(y)
    _, codes, sizes = np.unique(y[order], return_inverse=True, return_counts=True)
    by_class = np.argsort(codes, kind="stable")
    rank = np.empty(len(y), dtype=int)
    rank[by_class] = np.arange(len(y)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    place = np.where(rank == sizes[codes] - 1, 1.0, (rank + 0.5) / sizes[codes])
    return order[np.argsort(place, kind="stable")], len(y) - len(sizes)


def make(request: Request, likelihood: str, options: dict[str, Any]) -> Any:
    """The estimator of a request, not fitted."""
    shared = {
        "members": request.members,
        "max_epochs": request.max_epochs,
        "random_state": request.seed,
        **options,
    }
    if likelihood == CLASSES:
        if request.conformal:
            raise ValueError("--conformal corrects intervals of numbers; omit it for classes.")
        return SSLAClassifier(**shared)
    return SSLARegressor(likelihood, conformal=request.conformal, **shared)


def without_mixtures(rows: Encoded) -> Encoded:
    """The same numbers, with gaps that stay filled: no row is a mixture over training values.

    Calibration rows of --conformal and rows that score a trial have always been read so. It takes a
    sixteenth of the time, and the scores are those of slightly other predictives.
    """
    return replace(rows, unlearned=np.zeros_like(rows.unlearned))


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
