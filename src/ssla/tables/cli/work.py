"""What the commands do: train a model, and use it."""

from __future__ import annotations

import contextlib
import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import ssla
from ssla._checks import warn, writable
from ssla.files.container import check_target
from ssla.tables.cli.console import progress
from ssla.tables.cli.optuna_search import best_options
from ssla.tables.cli.train import (
    LARGEST_TRIED,
    Prepared,
    Request,
    architecture_of,
    check_memory,
    make,
    prepare,
    rows_seen,
    shuffled,
    split,
    without_mixtures,
)
from ssla.tables.columns import Table, new_table, read_parts, read_table
from ssla.tables.columns.writing import check_output
from ssla.tables.estimators.estimator import auto_batch
from ssla.tables.estimators.loading import load_trained
from ssla.tables.estimators.saving import save
from ssla.tables.estimators.training_table import TrainingTable
from ssla.tables.networks import Settings
from ssla.tables.scoring.answer_columns import separator
from ssla.tables.scoring.batches import kept_names
from ssla.tables.scoring.saved_models import BLOCK, Counts, counts_of, open_trained
from ssla.tables.scoring.scorer import checked_levels

TIMED_EPOCHS = 6
SMALL_TABLE = 100  # rows below which the intervals of one network undercover
CAUTION = (
    "on fewer than 100 rows the coverage of a single network's intervals is below their level; use "
    "--members 5"
)
COUNTED = re.compile(r"(\d+) of (\d+) (.*)", re.DOTALL)


@dataclass(frozen=True)
class Marks:
    """--decimal and --thousands of a command.

    Without them, those of the training command are used.
    """

    decimal: str | None = None
    thousands: str | None = None

    def read(self, data: Path, training: TrainingTable | None = None) -> Table:
        return read_table(data, *self._of(training))

    def read_parts(self, data: Path, training: TrainingTable, only: set[str]) -> Iterator[Table]:
        """In blocks of rows, with these columns."""
        return read_parts(data, *self._of(training), BLOCK, only)

    def _of(self, training: TrainingTable | None) -> tuple[str | None, str | None]:
        if self.decimal is None and self.thousands is None and training is not None:
            return training.decimal, training.thousands
        return self.decimal, self.thousands


AS_AT_TRAINING = Marks()


def train_file(request: Request, quiet: bool) -> dict[str, Any]:
    """Train, save, and return the summary."""
    started = time.perf_counter()
    check_target(request.output)
    writable(request.output)
    table = read_table(request.data, request.decimal, request.thousands)
    ready = prepare(table, request)
    train, test = split(ready.y, ready.likelihood, request)
    rows, y = without_mixtures(ready.rows[train]), ready.y[train]
    check_memory(ready, LARGEST_TRIED if request.tune_trials else Settings().hidden)
    options: dict[str, Any] = {}
    tuned: dict[str, Any] = {}
    if request.tune_trials:
        options, study = best_options(request, rows, y, ready.likelihood, quiet)
        tuned = {"tuned": options, "study": study}
    estimator = make(request, ready.likelihood, options)
    with progress(request.max_epochs, "training", quiet) as advance:
        estimator.fit(rows, y, on_epoch=advance)
    facts = {
        "rows": table.rows,
        **rows_seen(estimator),
        "rows_test": len(test),
        "rows_without_target": int((~ready.target.given).sum()),
        "columns": len(ready.plan.features),
        "inputs": ready.plan.width,
        "left_out": ready.plan.left_out,
        "read_as": ready.read_as,
        "missing": ready.missing,
        "likelihood": estimator.ensemble_.settings.likelihood,
        "members": request.members,
        "epochs": estimator.n_iter_,
        "scores": estimator.evaluate(ready.rows[test], ready.y[test]) if len(test) else {},
        **tuned,
    }
    if request.members == 1 and facts["rows_trained"] < SMALL_TABLE:
        facts["caution"] = CAUTION
    training = TrainingTable(
        request.target, ready.target.style, request.decimal, request.thousands, facts
    )
    save(estimator, request.output, training)
    return {
        "model": str(request.output),
        **facts,
        "seconds": round(time.perf_counter() - started, 2),
    }


def predict_file(
    model: Path,
    data: Path,
    output: Path,
    levels: tuple[float, ...] = (0.95,),
    refit: str = "",
    keep: tuple[str, ...] = (),
    marks: Marks = AS_AT_TRAINING,
) -> dict[str, Any]:
    """Read, predict and write in blocks of rows: memory does not grow with the file."""
    check_output(output)
    writable(output)
    levels = checked_levels(levels)
    opened, training = open_trained(model)
    if refit:
        opened = opened.with_refit(refit)
    counts = Counts()
    places: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(summed_warnings())
        for table in marks.read_parts(data, training, {*opened.inputs, *keep}):
            kept = {name: table.cells_of(name) for name in keep}
            columns, found = opened.score(table, levels)
            if not counts.rows:
                places = kept_names(keep, columns)
                types = {
                    place: table.types[name]
                    for name, place in places.items()
                    if name in table.types
                }
                add = stack.enter_context(new_table(output, types))
            add(
                {
                    places[name]: np.fromiter(cells, dtype=object, count=len(cells))
                    for name, cells in kept.items()
                }
                | columns
            )
            counts.add(found)
            del table, kept, columns  # before the next block is read
    classes = getattr(opened.estimator, "classes_", None)
    return {
        "output": str(output),
        "rows": counts.rows,
        "target": training.target,
        "levels": list(levels),
        **(
            {}
            if classes is None
            else {"set_separator": separator([str(label) for label in classes])}
        ),
        "missing": dict(counts.missing),
        "unknown_categories": dict(counts.unknown),
        **_gaps(counts),
        "rows_flagged": counts.flagged,
    }


def _gaps(counts: Counts) -> dict[str, int]:
    """The numbers of rows with a missing or unknown input, and of rows mixed over training
    values.
    """
    return {"rows_with_unknown_inputs": counts.marked, "rows_mixed": counts.mixed}


@contextlib.contextmanager
def summed_warnings() -> Iterator[None]:
    """Warnings that count rows ("3 of 100 predictives …") are added up over the blocks, and
    given once.
    """
    sums: dict[str, tuple[int, int]] = {}
    others: dict[str, warnings.WarningMessage] = {}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            yield
    finally:
        for one in caught:
            text = str(one.message)
            counted = COUNTED.match(text)
            if counted and issubclass(one.category, UserWarning):
                some, all_rows = sums.get(counted[3], (0, 0))
                sums[counted[3]] = some + int(counted[1]), all_rows + int(counted[2])
            else:
                others.setdefault(text, one)
        for one in others.values():
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        for rest, (some, all_rows) in sums.items():
            warnings.warn(f"{some} of {all_rows} {rest}", stacklevel=2)


def evaluate_file(
    model: Path, data: Path, refit: str, marks: Marks = AS_AT_TRAINING
) -> dict[str, Any]:
    opened, training = open_trained(model)
    if refit:
        opened = opened.with_refit(refit)
    table = marks.read(data, training)
    y, given = training.observed(table, getattr(opened.estimator, "classes_", None))
    rows = opened.estimator.encode(table)[given]
    return {
        "rows": len(y),
        **opened.estimator.evaluate(rows, y),
        "unknown_categories": rows.unknown,
        **_gaps(counts_of(rows)),
    }


def sensitivity_of(model: Path, data: Path, marks: Marks = AS_AT_TRAINING) -> dict[str, Any]:
    """Predictives under weaker and stronger priors, for the main component of every member."""
    opened, training = open_trained(model)
    rows = opened.estimator.encode(marks.read(data, training))
    if rows.marked:
        warn(
            f"{rows.marked} rows have missing or unknown inputs. This comparison uses the mean "
            "in place of the missing value, not a mixture over training values."
        )
    compared = opened.estimator.sensitivity(rows)
    return {f"member {member}": f"\n{table}" for member, table in compared.items()}


def report_of(model: Path) -> dict[str, Any]:
    estimator, training = load_trained(model)
    facts = ({} if training is None else dict(training.facts)) | rows_seen(estimator)
    first = estimator.ensemble_.components[0].posterior
    architecture = estimator.ensemble_.architecture
    return {
        "estimator": type(estimator).__name__,
        "target": "unknown" if training is None else training.target,
        **facts,
        "network": " - ".join(map(str, (architecture.inputs, *architecture.hidden))),
        "refit": estimator.refit,
        "components": len(estimator.ensemble_.components),
        **({"networks": remark} if (remark := getattr(estimator.ensemble_, "remark", "")) else {}),
        "posterior": "\n" + str(first.report),
    }


def cost_of(
    data: Path,
    target: str,
    drop: tuple[str, ...],
    weights: str,
    structure: str,
    marks: Marks = AS_AT_TRAINING,
) -> dict[str, Any]:
    table = marks.read(data)
    ready = prepare(table, Request(data, target, Path(), drop))
    module = architecture_of(ready, Settings().hidden).build()
    cost = ssla.estimate_cost(module, len(ready.y), weights=weights, structure=structure)
    facts: dict[str, Any] = {
        "rows": len(ready.y),
        "inputs": ready.plan.width,
        "left_out": ready.plan.left_out,
        "read_as": ready.read_as,
    }
    facts["cost"] = "\n" + str(cost)
    return facts | (_seconds(ready, weights, structure) if cost.fits else {})


def _seconds(ready: Prepared, weights: str, structure: str) -> dict[str, Any]:
    """The time of `ssla train` with its defaults, from a fit of a few epochs to at most 16 batches
    of the table.

    Passes over rows take most of the time, so all of it is scaled by the number of rows: fixed
    costs are overestimated.
    """
    request = Request(Path(), "", Path())
    rows, batch = len(ready.y), auto_batch(len(ready.y))
    sample = shuffled(ready.y, ready.likelihood, request.seed)[0][
        -min(rows, 16 * batch) :
    ]  # with every class
    options = {"weights": weights, "structure": structure, "batch_size": batch}
    estimator = make(replace(request, max_epochs=TIMED_EPOCHS), ready.likelihood, options)
    ends: list[float] = []
    estimator.fit(
        ready.rows[sample],
        ready.y[sample],
        on_epoch=lambda done: ends.append(time.perf_counter()),
    )
    epoch = float(np.median(np.diff(ends)))  # "auto" may train a second time, after a fit
    rest = time.perf_counter() - ends[0] - (len(ends) - 1) * epoch
    return {
        "seconds": (request.max_epochs * len(ends) / TIMED_EPOCHS * epoch + rest)
        * rows
        / len(sample),
        "measured": f"{len(ends)} epochs and a fit of {len(sample):,} rows on this machine, "
        f"scaled to {request.max_epochs} epochs (training may stop earlier), {rows:,} "
        "rows and one network",
    }
