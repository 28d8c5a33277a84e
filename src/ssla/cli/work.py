"""What the commands do: train a model, and use it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ssla
from ssla._checks import level as checked_level
from ssla._checks import warn, writable
from ssla.cli.console import progress
from ssla.cli.train import (
    LARGEST_TRIED,
    LIKELIHOODS,
    Prepared,
    Request,
    check_memory,
    make,
    of_predictive,
    predictive_at,
    prepare,
    replace_refit,
    rows_seen,
    score,
    shuffled,
    split,
)
from ssla.cli.tuning import best_options
from ssla.persistence import FileError
from ssla.persistence.container import check_target
from ssla.sklearn.estimator import auto_batch
from ssla.sklearn.files import load_with_extra
from ssla.sklearn.saving import save
from ssla.tables import Encoded, Plan, Style, Table, TableError, later_labels, later_numbers, read_table, write_table
from ssla.tables.writing import check_output
from ssla.tabular import Settings
from ssla.tabular.training import Architecture

PRECISIONS = (0.01, 100.0)  # a range of prior precisions
TIMED_EPOCHS = 6
SMALL_TABLE = 100  # rows below which the intervals of one network undercover
CAUTION = "on fewer than 100 rows the coverage of a single network's intervals is below their level; use --members 5"
QUANTILES = (0.025, 0.05, 0.25, 0.5, 0.75, 0.95, 0.975)
SEPARATORS = "|;,/&+~^"  # of the labels in a set: the first that occurs in no label
LAST_SEPARATOR = "\x1f"  # the "unit separator" of ASCII


@dataclass(frozen=True)
class Marks:
    """--decimal and --thousands of a command. Without them, those of the training command are used."""

    decimal: str | None = None
    thousands: str | None = None

    def read(self, data: Path, extra: dict[str, Any] | None = None) -> Table:
        if self.decimal is None and self.thousands is None and extra is not None:
            return read_table(data, extra.get("decimal"), extra.get("thousands"))
        return read_table(data, self.decimal, self.thousands)


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
        options, study = best_options(request, X, y, ready.likelihood, quiet)
        tuned = {"tuned": options, "study": study}
    estimator = make(request, ready.likelihood, options)
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
        "likelihood": ready.likelihood,
        "members": request.members,
        "epochs": estimator.n_iter_,
        "scores": scores,
        **tuned,
    }
    if request.members == 1 and facts["rows_trained"] < SMALL_TABLE:
        facts["caution"] = CAUTION
    style = asdict(ready.target.style)
    marks = {"decimal": request.decimal, "thousands": request.thousands}
    extra = {"plan": ready.plan.as_json(), "target": request.target, "target_style": style, "facts": facts, **marks}
    save(estimator, request.output, extra)
    return {"model": str(request.output), **facts, "seconds": round(time.perf_counter() - started, 2)}


def open_model(model: Path) -> tuple[Any, Plan, dict[str, Any]]:
    estimator, extra = load_with_extra(model)
    if "plan" not in extra:
        raise FileError(f"{model} was saved from Python without a table's columns. Only models of `ssla train` read tables.")
    try:
        plan = Plan.from_json(extra["plan"])
        if not isinstance(extra["target"], str) or extra["facts"]["likelihood"] not in LIKELIHOODS:
            raise ValueError("the target has no name or no likelihood")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"{model} does not contain a usable plan of columns ({error}).") from error
    if plan.width != estimator.n_features_in_:
        raise FileError(f"The columns of {model} do not fit its network.")
    return estimator, plan, extra


def _gaps(encoded: Encoded) -> dict[str, int]:
    """The numbers of rows with a missing or unknown input, and of rows mixed over training values."""
    mixed, wanted = int(encoded.mixed.sum()), int(encoded.unlearned.any(1).sum())
    if wanted > mixed:
        warn(
            f"{wanted} rows have missing or unknown inputs, but the model is of an earlier version and has no training values "
            "to mix over: their intervals are too narrow. Train it again."
        )
    return {"rows_with_unknown_inputs": encoded.marked, "rows_mixed": mixed}


def predict_file(
    model: Path,
    data: Path,
    output: Path,
    levels: tuple[float, ...] = (0.95,),
    refit: str = "",
    keep: tuple[str, ...] = (),
    marks: Marks = AS_AT_TRAINING,
) -> dict[str, Any]:
    check_output(output)
    writable(output)
    levels = tuple(dict.fromkeys(map(checked_level, levels)))
    estimator, plan, extra = open_model(model)
    if refit:
        estimator = replace_refit(estimator, refit)
    table = marks.read(data, extra)
    kept = {name: table.cells_of(name) for name in keep}
    encoded = plan.encode(table)
    p: Any = predictive_at(estimator, encoded)
    rows = len(encoded.values)
    columns: dict[str, np.ndarray] = {}
    facts: dict[str, Any] = {}
    if p.kind == "class":
        labels = [str(label) for label in estimator.classes_]
        facts["set_separator"] = separator = _separator(labels)
        columns["label"] = estimator.classes_[p.mode.numpy()]
        for i, label in enumerate(labels):
            columns[f"p({label})"] = p.probs[:, i].numpy()
        for level in levels:
            chosen = p.interval(level).tolist()
            sets = [separator.join(label for label, inside in zip(labels, row, strict=True) if inside) for row in chosen]
            columns[f"set_{_percent(level)}"] = np.array(sets, dtype=object)
    else:
        columns = {"mean": p.mean.numpy(), "sd": p.stddev.numpy()}
        for level in levels:
            lower, upper = estimator.interval_of(p, level).T
            columns |= {f"lower_{_percent(level)}": lower, f"upper_{_percent(level)}": upper}
        quantiles = p.icdf(list(QUANTILES)).numpy()
        columns |= {f"q{q:g}": quantiles[:, i] for i, q in enumerate(QUANTILES)}
        columns["epistemic"] = p.epistemic.sqrt().numpy()
    columns["mass"] = p.mass.numpy()
    columns["rung"] = np.array([estimator.refit] * rows, dtype=object)
    columns["notes"] = encoded.notes
    write_table(output, _beside(kept, columns))
    flagged = int((p.diagnostics.inaccurate | p.diagnostics.unconverged).sum())
    return {
        "output": str(output),
        "rows": rows,
        "target": extra["target"],
        "levels": list(levels),
        **facts,
        "missing": encoded.missing,
        "unknown_categories": encoded.unknown,
        **_gaps(encoded),
        "rows_flagged": flagged,
    }


def _percent(level: float) -> str:
    """0.95 -> 95, 0.975 -> 97.5."""
    return f"{100 * level:.12g}"


def _separator(labels: list[str]) -> str:
    return next((mark for mark in SEPARATORS if not any(mark in label for label in labels)), LAST_SEPARATOR)


def _beside(kept: dict[str, Sequence[Any]], columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Input columns before those of the output; a column with the name of an output gets a prefix, and a note."""
    inputs: dict[str, np.ndarray] = {}
    for name, cells in kept.items():
        place = name
        while place in columns or (place != name and place in kept):
            place = f"input_{place}"
        if place != name:
            warn(f"The kept column {name!r} is written as {place!r}, because {name!r} is an output.")
        inputs[place] = np.fromiter(cells, dtype=object, count=len(cells))
    return inputs | columns


def evaluate_file(model: Path, data: Path, refit: str, marks: Marks = AS_AT_TRAINING) -> dict[str, Any]:
    estimator, plan, extra = open_model(model)
    table = marks.read(data, extra)
    y, given = observed(table, estimator, extra)
    encoded = plan.encode(table)[given]
    scores = score(estimator, encoded, y, refit)
    return {"rows": len(y), **scores, "unknown_categories": encoded.unknown, **_gaps(encoded)}


def observed(table: Table, estimator: Any, extra: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The target of the rows that have one, and which rows these are (n,) bool; TableError if there are none."""
    name, style = extra["target"], Style(**extra.get("target_style", {}))
    if extra["facts"]["likelihood"] == "classes":
        y, given = later_labels(table, name, estimator.classes_.tolist(), earlier="target_style" not in extra)
    else:
        y, given = later_numbers(table, name, style)
    if not given.any():
        raise TableError(f"No row of {table.path} has a value in the target {name!r}.")
    return y, given


def sensitivity_of(model: Path, data: Path, marks: Marks = AS_AT_TRAINING) -> dict[str, Any]:
    """Predictives under weaker and stronger priors, for the main component of every member."""
    compare = getattr(ssla, "sensitivity", None)
    if not callable(compare):
        raise ImportError("This installation has no ssla.sensitivity yet; update ssla to compare priors.")
    estimator, plan, extra = open_model(model)
    encoded = plan.encode(marks.read(data, extra))
    if encoded.marked:
        warn(
            f"{encoded.marked} rows have missing or unknown inputs. This comparison uses the mean in place of the missing "
            "value, not a mixture over training values."
        )
    z = estimator.ensemble_.inputs(torch.from_numpy(encoded.values))
    found = {}
    for component in estimator.ensemble_.components:
        if component.weight == max(c.weight for c in estimator.ensemble_.components):
            found[f"member {component.member}"] = "\n" + str(compare(component.posterior, z, PRECISIONS))
    return found


def report_of(model: Path) -> dict[str, Any]:
    estimator, extra = load_with_extra(model)
    facts = dict(extra.get("facts", {})) | rows_seen(estimator)
    if facts["conformal"] and "rows_calibration" not in extra.get("facts", {}):  # from an ssla that scored only the predictive
        facts["scores"] = of_predictive(facts.get("scores", {}))
    first = estimator.ensemble_.components[0].posterior
    return {
        "estimator": type(estimator).__name__,
        "target": extra.get("target", "unknown"),
        **facts,
        "network": " - ".join(map(str, (estimator.n_features_in_, *estimator.ensemble_.architecture.hidden))),
        "refit": estimator.refit,
        "components": len(estimator.ensemble_.components),
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
    module = Architecture(ready.plan.width, outputs).build()
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
    """The time of `ssla train` with its defaults, from a fit of a few epochs to at most 16 batches of the table.

    Passes over rows take most of the time, so all of it is scaled by the number of rows: fixed costs are overestimated.
    """
    request = Request(Path(), "", Path())
    rows, batch = len(ready.y), auto_batch(len(ready.y))
    sample = shuffled(ready.y, ready.likelihood, request.seed)[0][-min(rows, 16 * batch) :]  # with every class
    options = {"weights": weights, "structure": structure, "batch_size": batch}
    estimator = make(replace(request, max_epochs=TIMED_EPOCHS), ready.likelihood, options)
    ends: list[float] = []
    estimator.on_epoch = lambda done: ends.append(time.perf_counter())
    estimator.fit(ready.X[sample], ready.y[sample])
    epoch, rest = (ends[-1] - ends[0]) / (len(ends) - 1), time.perf_counter() - ends[-1]
    return {
        "seconds": (request.max_epochs * epoch + rest) * rows / len(sample),
        "measured": f"{len(ends)} epochs and a fit of {len(sample):,} rows on this machine, scaled to {request.max_epochs} "
        f"epochs (training may stop earlier), {rows:,} rows and one network",
    }
