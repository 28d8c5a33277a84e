"""The commands that use a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import ssla
from ssla._checks import level as checked_level
from ssla.cli.training import LIKELIHOODS, Request, prepare, replace_refit, score
from ssla.persistence import FileError
from ssla.predictive import kind_of
from ssla.sklearn.files import load_with_extra
from ssla.tables import Plan, TableError, read_table, write_table
from ssla.tables.writing import check_output
from ssla.training import Architecture

PRECISIONS = (0.01, 100.0)  # a range of prior precisions
QUANTILES = (0.025, 0.05, 0.25, 0.5, 0.75, 0.95, 0.975)


def _open(model: Path) -> tuple[Any, Plan, dict[str, Any]]:
    estimator, extra = load_with_extra(model)
    if "plan" not in extra:
        raise FileError(f"{model} was saved from Python without a table's columns. Only models of `ssla train` read tables.")
    try:
        plan = Plan.from_json(extra["plan"])
        if not isinstance(extra["target"], str) or extra["facts"]["likelihood"] not in LIKELIHOODS:
            raise ValueError("the target has no name or no likelihood")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"{model} does not hold a usable plan of columns ({error}).") from error
    if plan.width != estimator.n_features_in_:
        raise FileError(f"The columns of {model} do not fit its network.")
    return estimator, plan, extra


def predict_file(model: Path, data: Path, output: Path, level: float, refit: str) -> dict[str, Any]:
    check_output(output)
    checked_level(level)
    estimator, plan, extra = _open(model)
    if refit:
        estimator = replace_refit(estimator, refit)
    encoded = plan.encode(read_table(data))
    p: Any = estimator.predict_dist(encoded.values)
    rows = len(encoded.values)
    columns: dict[str, np.ndarray] = {}
    if kind_of(p) == "class":
        columns["label"] = estimator.classes_[p.mode.numpy()]
        for i, label in enumerate(estimator.classes_):
            columns[f"p({label})"] = p.probs[:, i].numpy()
    else:
        interval = estimator.predict_interval(encoded.values, level)
        quantiles = p.icdf(list(QUANTILES)).numpy()
        columns = {"mean": p.mean.numpy(), "sd": p.stddev.numpy(), "lower": interval[:, 0], "upper": interval[:, 1]}
        columns |= {f"q{q:g}": quantiles[:, i] for i, q in enumerate(QUANTILES)}
        columns["epistemic"] = p.epistemic.numpy()
    columns["mass"] = p.mass.numpy()
    columns["rung"] = np.array([estimator.refit] * rows, dtype=object)
    write_table(output, columns)
    flagged = int((p.diagnostics.inaccurate | p.diagnostics.unconverged).sum())
    return {
        "output": str(output),
        "rows": rows,
        "target": extra["target"],
        "level": level,
        "missing": encoded.missing,
        "unknown_categories": encoded.unknown,
        "rows_flagged": flagged,
    }


def evaluate_file(model: Path, data: Path, refit: str) -> dict[str, Any]:
    estimator, plan, extra = _open(model)
    table = read_table(data)
    column = table.column(extra["target"])
    given = ~column.missing
    if not given.any():
        raise TableError(f"No row of {data} has a value in the target {column.name!r}.")
    encoded = plan.encode(table)
    facts = extra["facts"]
    if facts["likelihood"] == "classes":
        from ssla.cli.training import _label

        y = np.array([_label(value, column.kind) for value in column.values[given]], dtype=str)
    elif column.kind != "number":
        raise TableError(f"The target {column.name!r} held numbers at training, but holds {column.kind}s in {data}.")
    else:
        y = column.values[given].astype(float)
    scores = score(estimator, encoded.values[given], y, refit)
    return {"rows": len(y), **scores, "unknown_categories": encoded.unknown}


def sensitivity_of(model: Path, data: Path) -> dict[str, Any]:
    """Predictives under weaker and stronger priors, for the main component of every member."""
    compare = getattr(ssla, "sensitivity", None)
    if not callable(compare):
        raise ImportError("This installation has no ssla.sensitivity yet; update ssla to compare priors.")
    estimator, plan, _ = _open(model)
    encoded = plan.encode(read_table(data))
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
    return {"rows": len(ready.y), "inputs": ready.plan.width, "left_out": ready.plan.left_out, "cost": "\n" + str(cost)}
