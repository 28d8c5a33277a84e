"""What the commands do: train a model, and use it."""

from __future__ import annotations

import contextlib
import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

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
    of_predictive,
    prepare,
    rows_seen,
    score,
    shuffled,
    split,
)
from ssla.tables.columns import (
    Style,
    Table,
    TableError,
    later_labels,
    later_numbers,
    new_table,
    read_parts,
    read_table,
)
from ssla.tables.columns.writing import check_output
from ssla.tables.estimators.estimator import auto_batch
from ssla.tables.estimators.loading import load_with_extra
from ssla.tables.estimators.saving import save
from ssla.tables.networks import Settings
from ssla.tables.scoring.answer_columns import separator
from ssla.tables.scoring.batches import kept_names
from ssla.tables.scoring.saved_models import BLOCK, Counts, counts_of, open_table_model
from ssla.tables.scoring.scorer import checked_levels

PRECISIONS = (0.01, 100.0)  # a range of prior precisions
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

    def read(self, data: Path, extra: dict[str, Any] | None = None) -> Table:
        return read_table(data, *self._of(extra))

    def read_parts(self, data: Path, extra: dict[str, Any], only: set[str]) -> Iterator[Table]:
        """In blocks of rows, with these columns."""
        return read_parts(data, *self._of(extra), BLOCK, only)

    def _of(self, extra: dict[str, Any] | None) -> tuple[str | None, str | None]:
        if self.decimal is None and self.thousands is None and extra is not None:
            return extra.get("decimal"), extra.get("thousands")
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
    X, y = ready.X[train], ready.y[train]
    check_memory(ready, LARGEST_TRIED if request.tune_trials else Settings().hidden)
    options: dict[str, Any] = {}
    tuned: dict[str, Any] = {}
    if request.tune_trials:
        options, study = best_options(request, X, y, ready, quiet)
        tuned = {"tuned": options, "study": study}
    estimator = make(request, ready.likelihood, options, ready.plan)
    with progress(request.max_epochs, "training", quiet) as advance:
        estimator.on_epoch = advance
        estimator.fit(X, y)
        del estimator.on_epoch
    scores = score(estimator, ready.encoded[test], ready.y[test]) if len(test) else {}
    facts = {
        "rows": table.rows,
        **rows_seen(estimator),
        "rows_test": len(test),
        "rows_without_target": ready.rows_without_target,
        "columns": len(ready.plan.features),
        "inputs": ready.plan.width,
        "left_out": ready.plan.left_out,
        "read_as": ready.read_as,
        "missing": ready.missing,
        "likelihood": estimator.ensemble_.settings.likelihood,
        "members": request.members,
        "epochs": estimator.n_iter_,
        "scores": scores,
        **tuned,
    }
    if request.members == 1 and facts["rows_trained"] < SMALL_TABLE:
        facts["caution"] = CAUTION
    style = asdict(ready.target.style)
    marks = {"decimal": request.decimal, "thousands": request.thousands}
    extra = {
        "plan": ready.plan.as_json(),
        "target": request.target,
        "target_style": style,
        "facts": facts,
        **marks,
    }
    save(estimator, request.output, extra)
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
    opened = open_table_model(model)
    if refit:
        opened = opened.with_refit(refit)
    counts = Counts()
    places: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(summed_warnings())
        for table in marks.read_parts(data, opened.extra, {*opened.inputs, *keep}):
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
    counts.check()
    classes = getattr(opened.estimator, "classes_", None)
    return {
        "output": str(output),
        "rows": counts.rows,
        "target": opened.extra["target"],
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
    opened = open_table_model(model)
    table = marks.read(data, opened.extra)
    y, given = observed(table, opened.estimator, opened.extra)
    encoded = opened.plan.encode(table)[given]
    scores = score(opened.estimator, encoded, y, refit)
    counts = counts_of(encoded)
    counts.check()
    return {"rows": len(y), **scores, "unknown_categories": encoded.unknown, **_gaps(counts)}


def observed(table: Table, estimator: Any, extra: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The target of the rows that have one, and which rows these are (n,) bool; TableError if
    there are none.
    """
    name, style = extra["target"], Style(**extra.get("target_style", {}))
    if extra["facts"]["likelihood"] == "classes":
        y, given = later_labels(
            table, name, estimator.classes_.tolist(), earlier="target_style" not in extra
        )
    else:
        y, given = later_numbers(table, name, style)
    if not given.any():
        raise TableError(f"No row of {table.path} has a value in the target {name!r}.")
    return y, given


def sensitivity_of(model: Path, data: Path, marks: Marks = AS_AT_TRAINING) -> dict[str, Any]:
    """Predictives under weaker and stronger priors, for the main component of every member."""
    compare = getattr(ssla, "sensitivity", None)
    if not callable(compare):
        raise ImportError(
            "This installation has no ssla.sensitivity yet; update ssla to compare priors."
        )
    opened = open_table_model(model)
    estimator = opened.estimator
    encoded = opened.plan.encode(marks.read(data, opened.extra))
    if encoded.marked:
        warn(
            f"{encoded.marked} rows have missing or unknown inputs. This comparison uses the mean "
            "in place of the missing value, not a mixture over training values."
        )
    z = estimator.ensemble_.inputs(torch.from_numpy(encoded.values))
    found = {}
    for component in estimator.ensemble_.components:
        if component.weight == max(c.weight for c in estimator.ensemble_.components):
            found[f"member {component.member}"] = "\n" + str(
                compare(component.posterior, z, PRECISIONS)
            )
    return found


def report_of(model: Path) -> dict[str, Any]:
    estimator, extra = load_with_extra(model)
    facts = dict(extra.get("facts", {})) | rows_seen(estimator)
    if facts["conformal"] and "rows_calibration" not in extra.get(
        "facts", {}
    ):  # from an ssla that scored only the predictive
        facts["scores"] = of_predictive(facts.get("scores", {}))
    first = estimator.ensemble_.components[0].posterior
    return {
        "estimator": type(estimator).__name__,
        "target": extra.get("target", "unknown"),
        **facts,
        "network": " - ".join(
            map(str, (estimator.n_features_in_, *estimator.ensemble_.architecture.hidden))
        ),
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
    outputs = len(set(ready.y.tolist())) if ready.likelihood == "classes" else 1
    module = architecture_of(ready.plan, outputs, Settings().hidden).build()
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
    estimator = make(
        replace(request, max_epochs=TIMED_EPOCHS), ready.likelihood, options, ready.plan
    )
    ends: list[float] = []
    estimator.on_epoch = lambda done: ends.append(time.perf_counter())
    estimator.fit(ready.X[sample], ready.y[sample])
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
