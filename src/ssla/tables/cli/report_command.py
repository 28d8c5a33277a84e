"""`ssla report model/ test.csv -o report.html`: the page of a table."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ssla._checks import writable
from ssla.tables.cli.work import Marks
from ssla.tables.columns import TableError
from ssla.tables.report import page_of
from ssla.tables.report.table_models import of_table, used
from ssla.tables.scoring.saved_models import open_trained


def write_page(model: Path, data: Path, output: Path, marks: Marks) -> dict[str, Any]:
    if output.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"The page must be an .html file, but --output is {output}.")
    if str(data) == "-":
        raise ValueError(
            "A report names its table and its SHA-256, so it needs a file, not standard input."
        )
    writable(output)
    opened, training = open_trained(model)
    estimator = opened.estimator
    table = marks.read(data, training)
    classes = getattr(estimator, "classes_", None)
    y, given = training.observed(table, classes)
    rows = given.nonzero()[0]
    remarks = []
    if classes is not None:
        known = np.isin(y, classes)
        if not known.any():
            raise TableError("None of the labels in the target occurs in the training table.")
        if not known.all():
            remarks.append(
                "Left out: rows with a label that is not in the training table "
                f"({int((~known).sum()):,})."
            )
        rows, y = rows[known], np.searchsorted(classes, y[known])
    if not given.all():
        remarks.append(f"Left out: rows without a target ({int((~given).sum()):,}).")
    subject = of_table(estimator, table, y, training.target, rows, remarks=remarks)
    files = [file for file in sorted(model.iterdir()) if file.is_file()]
    subject = replace(
        subject,
        columns=used(estimator.plan_, training.target),
        fit=(*subject.fit, ("Training", trained(training.facts))),
        hashes=(
            (f"table {data.name}", digest(data)),
            *((f"model file {file.name}", digest(file)) for file in files),
        ),
    )
    written = page_of(subject, f"How sure is the prediction of {training.target}?").save(output)
    return {
        "output": str(written),
        "rows": len(rows),
        "megabytes": round(written.stat().st_size / 1e6, 2),
    }


def trained(facts: Mapping[str, Any]) -> str:
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
