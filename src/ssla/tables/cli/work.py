"""The work of the commands: train a model, and use it."""

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
from ssla._checks import check_writable, warn
from ssla.files.container import check_target
from ssla.tables.cli.console import show_progress
from ssla.tables.cli.optuna_search import search_options
from ssla.tables.cli.train import (
    LARGEST_TRIED,
    Prepared,
    Request,
    check_memory,
    count_rows,
    make_estimator,
    prepare,
    shuffle_rows,
    split_rows,
    table_architecture,
    without_mixtures,
)
from ssla.tables.columns import Table, open_table, read_parts, read_table
from ssla.tables.columns.writing import check_output
from ssla.tables.estimators.estimator import auto_batch
from ssla.tables.estimators.loading import load_trained
from ssla.tables.estimators.saving import save
from ssla.tables.estimators.training_table import TrainingTable
from ssla.tables.networks import Settings
from ssla.tables.scoring.answer_columns import choose_separator
from ssla.tables.scoring.batches import name_kept_columns
from ssla.tables.scoring.saved_models import (
    BLOCK,
    Counts,
    TableModel,
    count_unusual,
    open_trained,
)
from ssla.tables.scoring.scorer import check_levels

TIMED_EPOCHS = 6  # from which `ssla cost` estimates the time of a training
SMALL_TABLE = 100  # rows, below which intervals of one network contain y too rarely
CAUTION = (
    "on fewer than 100 rows the coverage of a single network's intervals is below their level; use "
    "--members 5"
)
COUNTED_WARNING = re.compile(r"(?P<count>[\d,]+) of (?P<rows>[\d,]+) (?P<text>.*)", re.DOTALL)


@dataclass(frozen=True)
class NumberFormat:
    """The options --decimal and --thousands of a command: how numbers are written in its table.

    Without both, those of the training command are used.
    """

    decimal: str | None = None
    thousands: str | None = None

    def read(self, data: Path, training: TrainingTable | None = None) -> Table:
        """Read a table. training: facts of the training command; None: there was none."""
        return read_table(data, *self._marks(training))

    def read_parts(self, data: Path, training: TrainingTable, only: set[str]) -> Iterator[Table]:
        """Read a table in blocks of rows. only: the names of the columns that are read."""
        return read_parts(data, *self._marks(training), BLOCK, only)

    def _marks(self, training: TrainingTable | None) -> tuple[str | None, str | None]:
        """Return the decimal and the thousands mark; None is detected for each column."""
        if self.decimal is None and self.thousands is None and training is not None:
            return training.decimal, training.thousands
        return self.decimal, self.thousands


AS_AT_TRAINING = NumberFormat()


def train_file(request: Request, quiet: bool) -> dict[str, Any]:
    """Train on a table and save the model; return the summary.

    The model is written at the end. quiet: without a progress bar. Raises ValueError or
    TableError for options or a table that cannot be used, and OSError if the output cannot be
    written.
    """
    started = time.perf_counter()
    check_target(request.output)
    check_writable(request.output)
    table = read_table(request.data, request.decimal, request.thousands)
    ready = prepare(table, request)
    train, test = split_rows(ready.y, ready.likelihood, request)
    rows = without_mixtures(ready.rows[train])
    y = ready.y[train]
    check_memory(ready, LARGEST_TRIED if request.tune_trials else Settings().hidden)
    options: dict[str, Any] = {}
    tuned: dict[str, Any] = {}
    if request.tune_trials:
        options, study = search_options(request, rows, y, ready.likelihood, quiet)
        tuned = {"tuned": options, "study": study}
    estimator = make_estimator(request, ready.likelihood, options)
    with show_progress(request.max_epochs, "training", quiet) as advance:
        estimator.fit(rows, y, on_epoch=advance)
    facts = {
        "rows": table.rows,
        **count_rows(estimator),
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
    number_format: NumberFormat = AS_AT_TRAINING,
) -> dict[str, Any]:
    """Read, predict and write a table in blocks of rows; return a summary.

    Memory does not grow with the file. refit: empty is that of the model.  keep: columns that are
    copied to the output. Raises ValueError, TableError or FileError for options, a table or a model
    that cannot be used; no output is left then.
    """
    check_output(output)
    check_writable(output)
    levels = check_levels(levels)
    opened, training = _open_with_refit(model, refit)
    counts = Counts()
    output_names: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(sum_warnings())
        for table in number_format.read_parts(data, training, {*opened.inputs, *keep}):
            kept = {name: table.cells_of(name) for name in keep}
            columns, block_counts = opened.score(table, levels)
            # The names of the columns are known from the first block on.
            if not counts.rows:
                output_names = name_kept_columns(keep, columns)
                types = {
                    output_name: table.types[name]
                    for name, output_name in output_names.items()
                    if name in table.types
                }
                append_rows = stack.enter_context(open_table(output, types))
            kept_columns = {
                output_names[name]: np.fromiter(cells, dtype=object, count=len(cells))
                for name, cells in kept.items()
            }
            append_rows(kept_columns | columns)
            counts.add(block_counts)
            del table, kept, kept_columns, columns  # before the next block is read
    classes = getattr(opened.estimator, "classes_", None)
    separator = {}
    if classes is not None:
        separator["set_separator"] = choose_separator([str(label) for label in classes])
    return {
        "output": str(output),
        "rows": counts.rows,
        "target": training.target,
        "levels": list(levels),
        **separator,
        "missing": dict(counts.missing),
        "unknown_categories": dict(counts.unknown),
        **_gap_counts(counts),
        "rows_flagged": counts.flagged,
    }


def _open_with_refit(model: Path, refit: str) -> tuple[TableModel, TrainingTable]:
    """Open a model of `ssla train`, with another refit unless this is empty.

    Raises FileError for another model, and ValueError for an unknown refit.
    """
    opened, training = open_trained(model)
    return (opened.with_refit(refit) if refit else opened), training


def _gap_counts(counts: Counts) -> dict[str, int]:
    """Return how many rows have a missing or unknown input, and how many are mixtures for it."""
    return {"rows_with_unknown_inputs": counts.marked, "rows_mixed": counts.mixed}


@contextlib.contextmanager
def sum_warnings() -> Iterator[None]:
    """Collect the warnings inside the block, and give each text once at its end.

    The row counts of user warnings ("3 of 100 predictives …") are added up.
    """
    sums: dict[str, tuple[int, int]] = {}
    other_warnings: dict[str, warnings.WarningMessage] = {}
    try:
        with warnings.catch_warnings(record=True) as caught:
            # By default a text that was given before is not recorded again.
            warnings.simplefilter("always", UserWarning)
            yield
    finally:
        for warning in caught:
            text = str(warning.message)
            counted = COUNTED_WARNING.match(text)
            if counted and issubclass(warning.category, UserWarning):
                count, rows = sums.get(counted["text"], (0, 0))
                count += int(counted["count"].replace(",", ""))
                rows += int(counted["rows"].replace(",", ""))
                sums[counted["text"]] = (count, rows)
            else:
                other_warnings.setdefault(text, warning)
        for warning in other_warnings.values():
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
        for ending, (count, rows) in sums.items():
            warnings.warn(f"{count} of {rows} {ending}", stacklevel=2)


def evaluate_file(
    model: Path, data: Path, refit: str, number_format: NumberFormat = AS_AT_TRAINING
) -> dict[str, Any]:
    """Return the scores of a model on the rows of a table that have a target.

    refit: empty is that of the model. Raises TableError or FileError for a table or a model that
    cannot be used.
    """
    opened, training = _open_with_refit(model, refit)
    table = number_format.read(data, training)
    y, has_target = training.observed(table, getattr(opened.estimator, "classes_", None))
    rows = opened.estimator.encode(table)[has_target]
    return {
        "rows": len(y),
        **opened.estimator.evaluate(rows, y),
        "unknown_categories": rows.unknown,
        **_gap_counts(count_unusual(rows)),
    }


def compare_priors(
    model: Path, data: Path, number_format: NumberFormat = AS_AT_TRAINING
) -> dict[str, Any]:
    """Return tables of predictives under weaker and stronger priors, one for each member.

    They are of the member's main component. Warns about rows with missing or unknown inputs.
    """
    opened, training = open_trained(model)
    rows = opened.estimator.encode(number_format.read(data, training))
    if rows.marked:
        warn(
            f"{rows.marked} rows have missing or unknown inputs. This comparison uses the mean "
            "in place of the missing value, not a mixture over training values."
        )
    comparisons = opened.estimator.sensitivity(rows)
    return {f"member {member}": f"\n{table}" for member, table in comparisons.items()}


def describe_model(model: Path) -> dict[str, Any]:
    """Return settings, training data and scores of a saved estimator, and its first posterior."""
    estimator, training = load_trained(model)
    facts = ({} if training is None else dict(training.facts)) | count_rows(estimator)
    first = estimator.ensemble_.components[0].posterior
    architecture = estimator.ensemble_.architecture
    remark = getattr(estimator.ensemble_, "remark", "")
    return {
        "estimator": type(estimator).__name__,
        "target": "unknown" if training is None else training.target,
        **facts,
        "network": " - ".join(map(str, (architecture.inputs, *architecture.hidden))),
        "refit": estimator.refit,
        "components": len(estimator.ensemble_.components),
        **({"networks": remark} if remark else {}),
        "posterior": "\n" + str(first.report),
    }


def estimate_file_cost(
    data: Path,
    target: str,
    drop: tuple[str, ...],
    weights: str,
    structure: str,
    number_format: NumberFormat = AS_AT_TRAINING,
) -> dict[str, Any]:
    """Return memory and time of a training on a table with the default settings.

    The time is measured by a short training, if the memory is within its budget. drop: columns
    that are left out. Raises TableError for a table that cannot be used.
    """
    table = number_format.read(data)
    ready = prepare(table, Request(data, target, Path(), drop))
    module = table_architecture(ready, Settings().hidden).build()
    cost = ssla.estimate_cost(module, len(ready.y), weights=weights, structure=structure)
    facts: dict[str, Any] = {
        "rows": len(ready.y),
        "inputs": ready.plan.width,
        "left_out": ready.plan.left_out,
        "read_as": ready.read_as,
        "cost": f"\n{cost}",
    }
    return facts | (_measure_seconds(ready, weights, structure) if cost.fits else {})


def _measure_seconds(ready: Prepared, weights: str, structure: str) -> dict[str, Any]:
    """Estimate the time of `ssla train` with its defaults, and say from what.

    A network is fitted to at most 16 batches of the table for a few epochs.

    Passes over rows take most of the time, so all of it is scaled by the number of rows: fixed
    costs are overestimated.
    """
    request = Request(Path(), "", Path())
    rows = len(ready.y)
    batch = auto_batch(rows)
    # The end of the order has rows of every class.
    order, _ = shuffle_rows(ready.y, ready.likelihood, request.seed)
    sample = order[-min(rows, 16 * batch) :]
    options = {"weights": weights, "structure": structure, "batch_size": batch}
    estimator = make_estimator(replace(request, max_epochs=TIMED_EPOCHS), ready.likelihood, options)
    ends: list[float] = []
    estimator.fit(
        ready.rows[sample],
        ready.y[sample],
        on_epoch=lambda done: ends.append(time.perf_counter()),
    )
    # The median, because "auto" may train a second time, and a fit is then between two epochs.
    epoch_seconds = float(np.median(np.diff(ends)))
    fit_seconds = time.perf_counter() - ends[0] - (len(ends) - 1) * epoch_seconds
    training_seconds = request.max_epochs * len(ends) / TIMED_EPOCHS * epoch_seconds
    measured = (
        f"{len(ends)} epochs and a fit of {len(sample):,} rows on this machine, "
        f"scaled to {request.max_epochs} epochs (training may stop earlier), {rows:,} "
        "rows and one network"
    )
    seconds = (training_seconds + fit_seconds) * rows / len(sample)
    return {"seconds": seconds, "measured": measured}
