"""`ssla report model/ test.csv -o report.html`: the page of a table."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ssla._checks import writable
from ssla.predictive import Predictive
from ssla.tables.cli.work import Marks, observed
from ssla.tables.columns import TableError
from ssla.tables.estimators import SSLAClassifier
from ssla.tables.report import page_of
from ssla.tables.report.subject import SHOWN_INPUTS, Subject, why_fixed
from ssla.tables.report.table_models import fit_of, predictor, remarks_on, used
from ssla.tables.scoring.saved_models import open_table_model, predictive_at


def write_page(model: Path, data: Path, output: Path, marks: Marks) -> dict[str, Any]:
    if output.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"The page must be an .html file, but --output is {output}.")
    if str(data) == "-":
        raise ValueError(
            "A report names its table and its SHA-256, so it needs a file, not standard input."
        )
    writable(output)
    opened = open_table_model(model)
    estimator, plan, extra = opened.estimator, opened.plan, opened.extra
    table = marks.read(data, extra)
    y, given = observed(table, estimator, extra)
    rows = given.nonzero()[0]
    remarks = list(remarks_on(estimator))
    if isinstance(estimator, SSLAClassifier):
        known = np.isin(y, estimator.classes_)
        if not known.any():
            raise TableError("None of the labels in the target occurs in the training table.")
        if not known.all():
            remarks.append(
                "Left out: rows with a label that is not in the training table "
                f"({int((~known).sum()):,})."
            )
        rows, y = rows[known], np.searchsorted(estimator.classes_, y[known])
    if not given.all():
        remarks.append(f"Left out: rows without a target ({int((~given).sum()):,}).")
    encoded = plan.encode(table)[rows]
    if encoded.marked:
        remarks.append(
            f"Rows with missing or unknown inputs: {encoded.marked:,}. Their predictions are mixed "
            "over values of the training table."
        )
    means = estimator.ensemble_.inputs.shift.numpy()

    def at_mean(chosen: np.ndarray, feature: int) -> Predictive:
        part, place = encoded[chosen], plan.places[feature]
        values, gaps = part.values.copy(), part.unlearned.copy()
        values[:, place], gaps[:, feature] = means[place], False
        return predictive_at(estimator, replace(part, values=values, unlearned=gaps))

    names = tuple(feature.name for feature in plan.features)[:SHOWN_INPUTS]
    cells = [table.cells_of(name) for name in names]
    subject = Subject(
        predictor(estimator, lambda other, chosen: predictive_at(other, encoded[chosen])),
        torch.from_numpy(np.asarray(y, dtype=np.float64)),
        tuple(map(str, estimator.classes_)) if isinstance(estimator, SSLAClassifier) else None,
        why_fixed(component.posterior for component in estimator.ensemble_.components),
        extra["target"],
        names,
        lambda chosen: [[column[rows[i]] for column in cells] for i in chosen],
        used(plan, extra["target"]),
        (*fit_of(estimator), ("Training", trained(extra["facts"]))),
        (
            (f"table {data.name}", digest(data)),
            *((f"model file {f.name}", digest(f)) for f in sorted(model.iterdir()) if f.is_file()),
        ),
        tuple(remarks),
        at_mean=at_mean,
        labels=(rows + 1).tolist(),
    )
    written = page_of(subject, f"How sure is the prediction of {extra['target']}?").save(output)
    return {
        "output": str(written),
        "rows": len(rows),
        "megabytes": round(written.stat().st_size / 1e6, 2),
    }


def trained(facts: dict[str, Any]) -> str:
    """Facts that `ssla train` stored, one a line."""
    return "\n".join(
        f"{name.replace('_', ' '):<22}  {value}"
        for name, value in facts.items()
        if not isinstance(value, dict)
    )


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            found.update(block)
    return found.hexdigest()
