"""`ssla report model/ test.csv -o report.html`: the page of a table."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ssla._checks import check_writable
from ssla.tables.cli.work import NumberFormat
from ssla.tables.columns import Table, TableError
from ssla.tables.estimators.training_table import TrainingTable
from ssla.tables.report import build_page
from ssla.tables.report.table_models import describe_columns, make_table_subject
from ssla.tables.scoring.saved_models import open_trained


def write_page(
    model: Path, data: Path, output: Path, number_format: NumberFormat
) -> dict[str, Any]:
    """Write the page of a model on the rows of a table, and return a summary for the console.

    Raises ValueError for standard input and for another file than HTML, and TableError if no row
    has a target that can be scored.

    model: a directory of `ssla train`.  data: the table, with its target.  output: the page.
    number_format: how numbers are written in the table.
    """
    if output.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"The page must be an .html file, but --output is {output}.")
    if str(data) == "-":
        raise ValueError(
            "A report names its table and its SHA-256, so it needs a file, not standard input."
        )

    check_writable(output)

    opened, training = open_trained(model)
    estimator = opened.estimator
    table = number_format.read_table(data, training)
    y, rows, remarks = _select_rows(estimator, training, table)
    subject = make_table_subject(estimator, table, y, training.target, rows, remarks=remarks)
    files = [file for file in sorted(model.iterdir()) if file.is_file()]
    subject = replace(
        subject,
        columns=describe_columns(estimator.plan_, training.target),
        fit=(*subject.fit, ("Training", list_facts(training.facts))),
        hashes=(
            (f"table {data.name}", hash_file(data)),
            *((f"model file {file.name}", hash_file(file)) for file in files),
        ),
    )
    written = build_page(subject, f"How sure is the prediction of {training.target}?").save(output)
    return {
        "output": str(written),
        "rows": len(rows),
        "megabytes": round(written.stat().st_size / 1e6, 2),
    }


def _select_rows(
    estimator: Any, training: TrainingTable, table: Table
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Select the m rows of the table that can be scored.

    Returns their targets (m,), their positions in the table (m,), and sentences on the rows that
    are left out. The targets of classes are codes. Rows without a target, or with a label that was
    not in the training table, are left out. Raises TableError if no row has a target, or if no
    label is of the training table.

    training: what `ssla train` stored beside the estimator.
    """
    classes = getattr(estimator, "classes_", None)
    y, has_target = training.read_targets(table, classes)
    rows = has_target.nonzero()[0]
    remarks: list[str] = []

    if classes is not None:
        is_known = np.isin(y, classes)  # which of the rows with a target
        if not is_known.any():
            raise TableError("None of the labels in the target occurs in the training table.")
        if not is_known.all():
            remarks.append(
                "Left out: rows with a label that is not in the training table "
                f"({int((~is_known).sum()):,})."
            )
        rows = rows[is_known]
        y = np.searchsorted(classes, y[is_known])  # labels are sorted, as in scikit-learn

    if not has_target.all():
        remarks.append(f"Left out: rows without a target ({int((~has_target).sum()):,}).")
    return y, rows, remarks


def list_facts(facts: Mapping[str, Any]) -> str:
    """Return the facts that `ssla train` stored as a text, one a line: a name and its value.

    Facts that are dictionaries are left out.
    """
    return "\n".join(
        f"{name.replace('_', ' '):<22}  {value}"
        for name, value in facts.items()
        if not isinstance(value, dict)
    )


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits. It is read in blocks of a mebibyte."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
