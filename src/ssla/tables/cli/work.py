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
    make_estimator,
    make_table_architecture,
    prepare_table,
    shuffle_rows,
    split_rows,
    summarise_rows,
    without_mixtures,
)
from ssla.tables.columns import Table, open_table, read_parts, read_table
from ssla.tables.columns.writing import check_output
from ssla.tables.estimators.estimator import choose_batch_size
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
    count_unusual_rows,
    open_trained,
)
from ssla.tables.scoring.scorer import check_levels

# A training of which `ssla cost` measures the time: guesses.
TIMED_EPOCHS = 6
TIMED_BATCHES = 16
SMALL_TABLE = 100  # rows, below which intervals of one network contain y too rarely
CAUTION = (
    "on fewer than 100 rows the coverage of a single network's intervals is below their level; use "
    "--members 5"
)
COUNTED_WARNING = re.compile(r"(?P<count>[\d,]+) of (?P<rows>[\d,]+) (?P<text>.*)", re.DOTALL)


@dataclass(frozen=True)
class NumberFormat:
    """The options --decimal and --thousands of a command: how numbers are written in its table.

    If both are None, those of the training command are used.
    """

    decimal: str | None = None
    thousands: str | None = None

    def read_table(self, data: Path, training: TrainingTable | None = None) -> Table:
        """Return the table of a file.

        training: what the training command stored; None: there was no such command. Raises
        TableError if the file cannot be read.
        """
        return read_table(data, *self._choose_marks(training))

    def read_blocks(self, data: Path, training: TrainingTable, only: set[str]) -> Iterator[Table]:
        """Return an iterator over the table of a file, in blocks of BLOCK rows.

        training: what the training command stored.  only: the names of the columns that are needed.
        Raises TableError if the file cannot be read.
        """
        return read_parts(data, *self._choose_marks(training), BLOCK, only)

    def _choose_marks(self, training: TrainingTable | None) -> tuple[str | None, str | None]:
        """Return the decimal and the thousands mark for a table.

        If both are None, they are detected for each column.  training: as in `read_table`.
        """
        if self.decimal is None and self.thousands is None and training is not None:
            return training.decimal, training.thousands
        return self.decimal, self.thousands


AS_AT_TRAINING = NumberFormat()


def train_file(request: Request, quiet: bool) -> dict[str, Any]:
    """Train on a table and save the model, and return the summary for the console.

    The model is written at the end, so nothing is written after an error. Raises ValueError or
    TableError for options or a table that cannot be used, and OSError if the output cannot be
    written.

    quiet: whether there is no progress bar.
    """
    started = time.perf_counter()

    # Errors of the output, the table and the memory are raised before the training.
    check_target(request.output)
    check_writable(request.output)
    table = read_table(request.data, request.decimal, request.thousands)
    prepared = prepare_table(table, request)
    train, test = split_rows(prepared.y, prepared.likelihood, request)
    rows = without_mixtures(prepared.rows[train])
    y = prepared.y[train]
    check_memory(prepared, LARGEST_TRIED if request.tune_trials else Settings().hidden)

    options: dict[str, Any] = {}
    tuned: dict[str, Any] = {}
    if request.tune_trials:
        options, study = search_options(request, rows, y, prepared.likelihood, quiet)
        tuned = {"tuned": options, "study": study}

    estimator = make_estimator(request, prepared.likelihood, options)
    with show_progress(request.max_epochs, "training", quiet) as advance:
        estimator.fit(rows, y, on_epoch=advance)

    facts = _collect_training_facts(estimator, table, prepared, request, test) | tuned
    if request.members == 1 and facts["rows_trained"] < SMALL_TABLE:
        facts["caution"] = CAUTION
    training = TrainingTable(
        request.target, prepared.target.style, request.decimal, request.thousands, facts
    )
    save(estimator, request.output, training)
    return {
        "model": str(request.output),
        **facts,
        "seconds": round(time.perf_counter() - started, 2),
    }


def _collect_training_facts(
    estimator: Any, table: Table, prepared: Prepared, request: Request, test: np.ndarray
) -> dict[str, Any]:
    """Return what is stored beside a trained estimator, by the names in the summary.

    These are numbers of rows and columns, what was done with the columns, and the scores.

    table, prepared: the whole table, and its rows with a target.  test (m,): the positions of the
    m rows for the scores, among those with a target; without any there are no scores.
    """
    return {
        "rows": table.rows,
        **summarise_rows(estimator),
        "rows_test": len(test),
        "rows_without_target": int((~prepared.target.given).sum()),
        "columns": len(prepared.plan.features),
        "inputs": prepared.plan.width,
        "left_out": prepared.plan.left_out,
        "read_as": prepared.read_as,
        "missing": prepared.missing,
        "likelihood": estimator.ensemble_.settings.likelihood,
        "members": request.members,
        "epochs": estimator.n_iter_,
        "scores": estimator.evaluate(prepared.rows[test], prepared.y[test]) if len(test) else {},
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
    """Read, predict and write a table in blocks of rows, and return a summary for the console.

    Memory does not grow with the file. Raises ValueError, TableError or FileError for options, a
    table or a model that cannot be used; no output is left then.

    model: a directory of `ssla train`.  data, output: the tables.  levels: probabilities of the
    intervals or sets.  refit: the name of a refit; empty: that of the model.  keep: columns that
    are copied to the output.  number_format: how numbers are written in the table.
    """
    check_output(output)
    check_writable(output)
    levels = check_levels(levels)
    opened, training = _open_with_refit(model, refit)
    with sum_warnings():
        tables = number_format.read_blocks(data, training, {*opened.inputs, *keep})
        counts = _write_predictions(opened, tables, output, levels, keep)

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
        **_summarise_gaps(counts),
        "rows_flagged": counts.rows_flagged,
    }


def _write_predictions(
    opened: TableModel,
    tables: Iterator[Table],
    output: Path,
    levels: tuple[float, ...],
    keep: tuple[str, ...],
) -> Counts:
    """Write the kept columns and the predictions of all rows to one output, a table at a time.

    Returns the counts of what was unusual in all rows. After an error no output is left.

    opened: the model.  tables: blocks of rows, at least one.  levels, keep: as in `predict_file`.
    """
    counts = Counts()
    output_names: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for table in tables:
            kept = {name: table.get_cells(name) for name in keep}
            columns, block_counts = opened.predict_table(table, levels)
            # The first block decides the names of the columns, so the output is opened here.
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
            counts.add_counts(block_counts)
            # The memory of this block is not needed while the next block is read.
            del table, kept, kept_columns, columns

    return counts


def _open_with_refit(model: Path, refit: str) -> tuple[TableModel, TrainingTable]:
    """Open a model of `ssla train`, and return it with what the training command stored.

    refit: the name of a refit to use in place of its own; empty: its own. Raises FileError for
    another model, and ValueError for an unknown refit.
    """
    opened, training = open_trained(model)
    return (opened.with_refit(refit) if refit else opened), training


def _summarise_gaps(counts: Counts) -> dict[str, int]:
    """Return how many rows have a missing or unknown input, and how many of these are mixtures.

    The keys are the names in the summary. A mixture is over training values in place of the input.
    """
    return {"rows_with_unknown_inputs": counts.rows_noted, "rows_mixed": counts.rows_mixed}


@contextlib.contextmanager
def sum_warnings() -> Iterator[None]:
    """Collect the warnings inside the block, and warn with each text once at its end.

    Row counts of user warnings, as in "3 of 100 predictives …", are added up over warnings with the
    same text after the counts. Warnings are given also if the block ends with an error.
    """
    sums: dict[str, tuple[int, int]] = {}  # count and rows, by the text after them
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
    """Return the scores of a model on the rows of a table that have a target, with their counts.

    Raises TableError or FileError for a table or a model that cannot be used.

    model: a directory of `ssla train`.  data: the table.  refit: the name of a refit; empty: that
    of the model.  number_format: how numbers are written in the table.
    """
    opened, training = _open_with_refit(model, refit)
    table = number_format.read_table(data, training)
    y, has_target = training.read_targets(table, getattr(opened.estimator, "classes_", None))
    rows = opened.estimator.encode(table)[has_target]
    return {
        "rows": len(y),
        **opened.estimator.evaluate(rows, y),
        "unknown_categories": rows.unknown,
        **_summarise_gaps(count_unusual_rows(rows)),
    }


def compare_priors(
    model: Path, data: Path, number_format: NumberFormat = AS_AT_TRAINING
) -> dict[str, Any]:
    """Return a text for each member, with a table of how its predictions change with the prior.

    The table compares weaker and stronger priors of the member's posterior with the largest weight.
    Warns of rows with missing or unknown inputs. Raises TableError or FileError for a table or a
    model that cannot be used.

    model: a directory of `ssla train`.  data: the table, which needs no target.  number_format: how
    numbers are written in it.
    """
    opened, training = open_trained(model)
    rows = opened.estimator.encode(number_format.read_table(data, training))
    if rows.noted_row_count:
        warn(
            f"{rows.noted_row_count} rows have missing or unknown inputs. This comparison uses the "
            "mean in place of the missing value, not a mixture over training values."
        )
    comparisons = opened.estimator.sensitivity(rows)
    return {f"member {member}": f"\n{table}" for member, table in comparisons.items()}


def describe_model(model: Path) -> dict[str, Any]:
    """Return settings, training data and scores of a saved estimator, by their printed names.

    The report of its first posterior is among them. Facts of the training command are missing if
    the estimator was saved from Python. Raises FileError if the file is not an estimator.
    """
    estimator, training = load_trained(model)
    facts = ({} if training is None else dict(training.facts)) | summarise_rows(estimator)
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

    The time is that of a short training, scaled up; it is missing if the memory is above its
    budget. Raises TableError for a table that cannot be used.

    data: the table.  target: the name of its target column.  drop: columns that are left out.
    weights, structure: as in `ssla.fit`.  number_format: how numbers are written in the table.
    """
    table = number_format.read_table(data)
    prepared = prepare_table(table, Request(data, target, Path(), drop))
    module = make_table_architecture(prepared, Settings().hidden).build()
    cost = ssla.estimate_cost(module, len(prepared.y), weights=weights, structure=structure)
    facts: dict[str, Any] = {
        "rows": len(prepared.y),
        "inputs": prepared.plan.width,
        "left_out": prepared.plan.left_out,
        "read_as": prepared.read_as,
        "cost": f"\n{cost}",
    }
    if not cost.fits:
        return facts
    return facts | _measure_seconds(prepared, weights, structure)


def _measure_seconds(prepared: Prepared, weights: str, structure: str) -> dict[str, Any]:
    """Return an estimate of the seconds of `ssla train` with its defaults.

    The key "measured" has a text on how they were measured. A network is trained on at most
    TIMED_BATCHES batches of the table for TIMED_EPOCHS epochs. Passes over rows take most of the
    time, so all of it is scaled by the number of rows. Fixed costs are therefore overestimated.

    prepared: the table.  weights, structure: as in `ssla.fit`.
    """
    request = Request(Path(), "", Path())
    rows = len(prepared.y)
    batch = choose_batch_size(rows)

    # The end of the order has rows of every class.
    order, _ = shuffle_rows(prepared.y, prepared.likelihood, request.seed)
    sample = order[-min(rows, TIMED_BATCHES * batch) :]
    options = {"weights": weights, "structure": structure, "batch_size": batch}
    estimator = make_estimator(
        replace(request, max_epochs=TIMED_EPOCHS), prepared.likelihood, options
    )
    ends: list[float] = []  # times at which epochs ended
    estimator.fit(
        prepared.rows[sample],
        prepared.y[sample],
        on_epoch=lambda done: ends.append(time.perf_counter()),  # `done` is part of the protocol
    )

    # The median, because "auto" may train a second time, and a fit is then between two epochs.
    epoch_seconds = float(np.median(np.diff(ends)))

    # The time after the first epoch, without the other epochs, is that of the fit of the posterior.
    fit_seconds = time.perf_counter() - ends[0] - (len(ends) - 1) * epoch_seconds

    # There are more ends than TIMED_EPOCHS if a second training was made.
    training_seconds = request.max_epochs * len(ends) / TIMED_EPOCHS * epoch_seconds
    measured = (
        f"{len(ends)} epochs and a fit of {len(sample):,} rows on this machine, "
        f"scaled to {request.max_epochs} epochs (training may stop earlier), {rows:,} "
        "rows and one network"
    )
    seconds = (training_seconds + fit_seconds) * rows / len(sample)
    return {"seconds": seconds, "measured": measured}
