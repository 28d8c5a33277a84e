"""The steps of `ssla train`: a table -> encoded rows and target -> the estimator of a request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import ssla
from ssla._checks import check_name, warn
from ssla.tables.columns import Encoded, Plan, Table, TableError, Target, read_target
from ssla.tables.estimators import SSLAClassifier, SSLARegressor, TableEncoder
from ssla.tables.networks.embeddings import choose_embedding_dimensions
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
FEWEST_ROWS = 10  # with a target: a guess
SMALLEST_TEST = 5  # rows: fewer than these are not a test, and are used for the training
LARGEST_TRIED = (100, 100)  # hidden layers, by --tune-trials


@dataclass(frozen=True)
class Request:
    """The options of `ssla train`."""

    data: Path  # the table
    target: str  # the name of its target column
    output: Path  # the directory of the model
    drop: tuple[str, ...] = ()  # names of columns that are left out
    likelihood: str = "auto"  # one of LIKELIHOODS
    members: int | str = "auto"  # number of networks
    max_epochs: int = 200
    test_fraction: float = 0.1  # the share of the rows that is held out for the scores
    conformal: bool = False  # whether intervals are corrected on held-out rows
    tune_trials: int = 0  # number of settings that Optuna tries
    seed: int = 0
    decimal: str | None = None  # the decimal mark; None: detected for each column
    thousands: str | None = None  # the thousands mark; None: detected for each column


@dataclass(frozen=True, eq=False)
class Prepared:
    """A training table in the form that the estimators read."""

    rows: Encoded  # the n rows with a target
    target: Target  # that of these rows
    likelihood: str  # that of the request, or "classes"
    missing: dict[str, int]  # cells of the whole table, by column
    read_as: dict[str, str]  # how columns were interpreted, if that is not obvious

    @property
    def plan(self) -> Plan:
        """The plan of the encoded rows."""
        return self.rows.plan

    @property
    def y(self) -> np.ndarray:
        """The targets (n,) of the rows: numbers, or labels."""
        return self.target.y

    @property
    def classes(self) -> int:
        """The number of classes; 0 for numbers."""
        return len(set(self.y.tolist())) if self.target.classes else 0


def prepare_table(table: Table, request: Request) -> Prepared:
    """Return a training table as the estimators read it: rows as numbers, and the target.

    Rows without a target are left out. Raises ValueError for an unknown likelihood, and TableError
    for unknown columns, too few rows, or a target that cannot be predicted.
    """
    check_name("likelihood", request.likelihood, LIKELIHOODS)
    for name in request.drop:
        table.get_cells(name)  # its error names the most similar column

    # With "auto", the column decides whether the target is a class.
    as_classes = None if request.likelihood == "auto" else request.likelihood == CLASSES
    target = read_target(table, request.target, as_classes)
    _check_target(table, target, request)

    encoder = TableEncoder(drop=(request.target, *request.drop), codes=True)
    rows = encoder.fit(table, rows=target.given).encode(table)
    read_as = dict(rows.plan.interpretation)
    if target.interpretation:
        read_as[f"{request.target} (target)"] = target.interpretation
    likelihood = CLASSES if target.classes else request.likelihood
    return Prepared(rows[target.given], target, likelihood, rows.missing, read_as)


def _check_target(table: Table, target: Target, request: Request) -> None:
    """Raise TableError for a target with fewer than FEWEST_ROWS rows, or with constant numbers.

    Warns of numbers that are only 0 and 1, because they may be classes.

    table: named in errors.  request: has the name of the target and the likelihood.
    """
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


def check_memory(prepared: Prepared, hidden: tuple[int, ...]) -> None:
    """Raise TableError if the curvature of the last layer does not fit into the memory budget.

    That happens with very many classes, and is found here before the training.  hidden: the widths
    of the hidden layers.
    """
    module = make_table_architecture(prepared, hidden).build()
    cost = ssla.estimate_cost(module, len(prepared.y), structure="dense")
    if not cost.fits:
        raise TableError(
            f"The target has {prepared.classes or 1:,} classes. Their curvature needs "
            f"{cost.statistics / 2**30:.3g} GiB, more than the {cost.budget / 2**30:.3g} GiB that "
            "this command uses. Group the rare classes, or leave out their rows."
        )


def make_table_architecture(prepared: Prepared, hidden: tuple[int, ...]) -> Architecture:
    """Return the architecture of a network for the columns and the target of a table.

    hidden: the widths of the hidden layers. Inputs are not expanded into linear pieces, as the
    estimators may do.
    """
    levels = prepared.plan.level_counts
    return Architecture(
        prepared.plan.width,
        prepared.classes or 1,
        hidden,
        levels=levels,
        dimensions=choose_embedding_dimensions(levels),
    )


def split_rows(y: np.ndarray, likelihood: str, request: Request) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the rows for the training, and of those for the scores.

    There are no rows for the scores if they would be fewer than SMALLEST_TEST. Raises ValueError
    for a fraction that is not in [0, 1).

    y (n,): the targets, by which rows of classes are stratified.  likelihood: its name.  request:
    has the fraction of rows for the scores, and the seed.
    """
    if not 0 <= request.test_fraction < 1:
        raise ValueError(
            f"--test-fraction must be between 0 and 1, but is {request.test_fraction:g}."
        )
    order, most_held_out = shuffle_rows(y, likelihood, request.seed)
    count = min(round(len(y) * request.test_fraction), most_held_out)
    if count < SMALLEST_TEST:
        count = 0
    return order[count:], order[:count]


def shuffle_rows(y: np.ndarray, likelihood: str, seed: int) -> tuple[np.ndarray, int]:
    """Return a random order of the rows (n,), and how many of the first may be held out.

    For classes the order is stratified: row r = 0, 1, … of the k rows of a class is at (r + ½)/k of
    the order. The last row of every class comes after all others and may not be held out, so that
    every class is trained.

    y (n,): the targets.  likelihood: its name; the order is stratified for "classes".  seed: draws
    the order.
    """
    order = np.random.default_rng(seed).permutation(len(y))
    if likelihood != CLASSES:
        return order, len(y)

    _, codes, sizes = np.unique(y[order], return_inverse=True, return_counts=True)
    by_class = np.argsort(codes, kind="stable")

    # The rank of each row among those of its class, from 0. The rows of a class are together in
    # `by_class`, from the position first_of_class on.
    first_of_class = np.cumsum(sizes) - sizes
    rank = np.empty(len(y), dtype=int)
    rank[by_class] = np.arange(len(y)) - np.repeat(first_of_class, sizes)

    # The last row of a class gets the position 1, after all others.
    position = np.where(rank == sizes[codes] - 1, 1.0, (rank + 0.5) / sizes[codes])
    return order[np.argsort(position, kind="stable")], len(y) - len(sizes)


def make_estimator(request: Request, likelihood: str, options: dict[str, Any]) -> Any:
    """Return the estimator of a request, which is not fitted.

    options: keywords of the estimator, which are used in place of those of the request. Raises
    ValueError for conformal intervals of classes.
    """
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
    """Return the rows with their gaps as known values, so that no prediction is a mixture.

    Training rows, the calibration rows of --conformal among them, and rows that score a trial are
    read in this way. A mixture is over 16 copies of a row (`columns.plan.DRAWS`), so predictions
    take a sixteenth of the time. The scores are those of slightly different predictives.
    """
    return replace(rows, unlearned=np.zeros_like(rows.unlearned))


def summarise_rows(estimator: Any) -> dict[str, Any]:
    """Return how many rows a fitted estimator was trained and calibrated on.

    Also returns whether it has conformal intervals. The keys are the names in the summary of the
    command.
    """
    conformal = getattr(estimator, "conformal_", None)
    return {
        "rows_trained": estimator.ensemble_.components[0].posterior.report.n,
        "conformal": conformal is not None,
        "rows_calibration": 0 if conformal is None else len(conformal.scores),
    }


def make_one_network_request(request: Request) -> Request:
    """Return the request for a trial: the same, with one network and no conformal intervals."""
    return replace(request, members=1, conformal=False)
