"""The commands that use a trained model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ssla
from ssla._checks import level as checked_level
from ssla.cli.training import Request, predictive_at, prepare, replace_refit, score
from ssla.persistence import FileError
from ssla.predictive import kind_of
from ssla.sklearn.files import load_with_extra
from ssla.tables import Encoded, Plan, Style, TableError, later_labels, later_numbers, read_table, write_table
from ssla.tables.writing import check_output
from ssla.training import Architecture

PRECISIONS = (0.01, 100.0)  # a range of prior precisions
QUANTILES = (0.025, 0.05, 0.25, 0.5, 0.75, 0.95, 0.975)


def _open(model: Path) -> tuple[Any, Plan, dict[str, Any]]:
    estimator, extra = load_with_extra(model)
    if "plan" not in extra:
        raise FileError(f"{model} was saved from Python without a table's columns. Only models of `ssla train` read tables.")
    try:
        return estimator, Plan.from_json(extra["plan"]), extra
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"{model} does not hold a usable plan of columns ({error}).") from error


def _encode(plan: Plan, estimator: Any, data: Path) -> Encoded:
    if plan.width != estimator.n_features_in_:
        raise FileError("The model's columns do not fit its network.")
    return plan.encode(read_table(data))


def _gaps(encoded: Encoded) -> dict[str, int]:
    """Rows with a missing or unknown input, and how many of them were mixed over the training values."""
    mixed, wanted = int(encoded.mixed.sum()), int(encoded.unlearned.any(1).sum())
    if wanted > mixed:
        warnings.warn(
            f"{wanted} rows have missing or unknown inputs, but the model is of an earlier version and holds no training values "
            "to mix over: their intervals are too narrow. Train it again.",
            UserWarning,
            stacklevel=2,
        )
    return {"rows_with_unknown_inputs": encoded.marked, "rows_mixed": mixed}


def predict_file(model: Path, data: Path, output: Path, level: float, refit: str) -> dict[str, Any]:
    check_output(output)
    checked_level(level)
    estimator, plan, extra = _open(model)
    if refit:
        estimator = replace_refit(estimator, refit)
    encoded = _encode(plan, estimator, data)
    p: Any = predictive_at(estimator, encoded)
    rows = len(encoded.values)
    columns: dict[str, np.ndarray] = {}
    if kind_of(p) == "class":
        columns["label"] = estimator.classes_[p.mode.numpy()]
        for i, label in enumerate(estimator.classes_):
            columns[f"p({label})"] = p.probs[:, i].numpy()
    else:
        interval = estimator.interval_of(p, level)
        quantiles = p.icdf(list(QUANTILES)).numpy()
        columns = {"mean": p.mean.numpy(), "sd": p.stddev.numpy(), "lower": interval[:, 0], "upper": interval[:, 1]}
        columns |= {f"q{q:g}": quantiles[:, i] for i, q in enumerate(QUANTILES)}
        columns["epistemic"] = p.epistemic.numpy()
    columns["mass"] = p.mass.numpy()
    columns["rung"] = np.array([estimator.refit] * rows, dtype=object)
    columns["notes"] = encoded.notes
    write_table(output, columns)
    flagged = int((p.diagnostics.inaccurate | p.diagnostics.unconverged).sum())
    return {
        "output": str(output),
        "rows": rows,
        "target": extra["target"],
        "level": level,
        "missing": encoded.missing,
        "unknown_categories": encoded.unknown,
        **_gaps(encoded),
        "rows_flagged": flagged,
    }


def evaluate_file(model: Path, data: Path, refit: str) -> dict[str, Any]:
    estimator, plan, extra = _open(model)
    table = read_table(data)
    name, style = extra["target"], Style(**extra.get("target_style", {}))
    if extra["facts"]["likelihood"] == "classes":
        y, given = later_labels(table, name, estimator.classes_.tolist(), earlier="target_style" not in extra)
    else:
        y, given = later_numbers(table, name, style)
    if not given.any():
        raise TableError(f"No row of {data} has a value in the target {name!r}.")
    encoded = plan.encode(table)[given]
    scores = score(estimator, encoded, y, refit)
    return {"rows": len(y), **scores, "unknown_categories": encoded.unknown, **_gaps(encoded)}


def sensitivity_of(model: Path, data: Path) -> dict[str, Any]:
    """Predictives under weaker and stronger priors, for the main component of every member."""
    compare = getattr(ssla, "sensitivity", None)
    if not callable(compare):
        raise ImportError("This installation has no ssla.sensitivity yet; update ssla to compare priors.")
    estimator, plan, _ = _open(model)
    encoded = _encode(plan, estimator, data)
    if encoded.marked:
        warnings.warn(
            f"{encoded.marked} rows have missing or unknown inputs. Here they are compared with the mean in place of the missing "
            "value, not mixed over the training values.",
            UserWarning,
            stacklevel=2,
        )
    z = estimator.ensemble_.inputs(torch.from_numpy(encoded.values))
    found = {}
    for component in estimator.ensemble_.components:
        if component.weight == max(c.weight for c in estimator.ensemble_.components):
            found[f"member {component.member}"] = "\n" + str(compare(component.posterior, z, PRECISIONS))
    return found


def report_of(model: Path) -> dict[str, Any]:
    estimator, extra = load_with_extra(model)
    facts = dict(extra.get("facts", {}))
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


def cost_of(data: Path, target: str, drop: tuple[str, ...], weights: str, structure: str) -> dict[str, Any]:
    table = read_table(data)
    ready = prepare(table, Request(data, target, Path(), drop))
    outputs = len(set(ready.y.tolist())) if ready.likelihood == "classes" else 1
    module = Architecture(ready.plan.width, outputs).build()
    cost = ssla.estimate_cost(module, len(ready.y), weights=weights, structure=structure)
    return {
        "rows": len(ready.y),
        "inputs": ready.plan.width,
        "left_out": ready.plan.left_out,
        "read_as": ready.read_as,
        "cost": "\n" + str(cost),
    }
