"""The report: one HTML file on how sure a model is.

It also shows in which rows the model is unsure, why, and whether another prior would change that.

Words of all modules here: a *subject* is a model with its test rows. The *doubt* of a row is the
epistemic part of its predictive, which more data would remove, and the *noise* is the aleatoric
part. A *factor* multiplies the precision of the prior. The *shown* rows are those that the page
holds. The *plug-in* is the model without the uncertainty of its weights.

The page has its own small script, and draws its pictures itself: a plotting library would add
megabytes and is not needed. It loads nothing, which its content security policy enforces.
"""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ssla._checks import check_writable, in_plain_torch
from ssla.posterior import Posterior
from ssla.refit import Refit
from ssla.tables.report.facts import collect_facts
from ssla.tables.report.page import render_page
from ssla.tables.report.subject import Subject, make_posterior_subject
from ssla.tables.report.table_models import make_estimator_subject

MOST_ROWS = 2000  # that a page holds by default; a guess
FEWEST_ROWS = 4  # that max_rows may be: `choose_rows` takes quarters of it
__all__ = ["HTML", "MOST_ROWS", "build_page", "html_report"]


@dataclass(frozen=True, eq=False)
class HTML:
    """A page. `save(path)` writes it to a file, `str` returns its text, and a notebook shows it.

    `facts` holds the numbers that it embeds.
    """

    text: str = field(repr=False)
    facts: dict[str, Any] = field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file, and return its path.

        A file of this name is replaced. Raises OSError if it cannot be written.
        """
        target = Path(path)
        check_writable(target)
        target.write_text(self.text, encoding="utf-8")
        return target

    def __str__(self) -> str:
        """Return the HTML text."""
        return self.text

    def _repr_html_(self) -> str:
        """Return the HTML of a frame with the page, which a notebook calls to show it."""
        style = "width:100%;height:46rem;border:1px solid #888"
        return (
            f'<iframe title="ssla report" style="{style}" '
            f'srcdoc="{html.escape(self.text)}"></iframe>'
        )


@in_plain_torch
def html_report(
    model: Any,
    X: Any,
    y: Any,
    *,
    refit: str | Refit | None = None,
    names: Sequence[str] | None = None,
    target: str = "y",
    title: str | None = None,
    max_rows: int = MOST_ROWS,
) -> HTML:
    """Return one self-contained page on the predictions for test rows X with observed targets y.

    The page opens without a network connection. It has the scores beside those of the plug-in,
    calibration, the rows with the most doubt, a table of rows, and the predictive of each row under
    weaker and stronger priors, computed by `with_prior`.

    model: a Posterior, or a fitted estimator of `ssla.sklearn`.
    X: the rows, in a form that the model reads. An estimator reads an array or a data frame, as at
    its fit.
    y: one target for each row.
    refit: the refit of a Posterior; None is "output". An estimator uses its own.
    names: the names of the columns of X; None: those of the fit, or numbers.
    target: the name of y.
    title: the heading of the page; None is a question about the target.
    max_rows: how many rows the page holds, from 4. Of more rows it holds the worst predicted, the
    most doubtful, and evenly spaced ones. Scores are always of all rows.

    Raises ValueError if the rows or the arguments do not match the model, and TypeError for another
    model.

    >>> ssla.html_report(posterior, X_test, y_test).save("report.html")      # doctest: +SKIP
    """
    if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < FEWEST_ROWS:
        raise ValueError(f"max_rows must be a whole number from 4, but is {max_rows!r}.")
    if isinstance(model, Posterior):
        subject = make_posterior_subject(model, X, y, refit, target, names)
    elif hasattr(model, "predict_dist"):
        if refit is not None:
            raise ValueError(
                "refit= is for a Posterior. An estimator uses its own: model.set_params(refit=...)."
            )
        subject = make_estimator_subject(model, X, y, target, names)
    else:
        raise TypeError(
            "html_report needs a Posterior or an estimator of ssla.sklearn, but got a "
            f"{type(model).__name__}. Call ssla.fit(model, data, ...) first."
        )

    return build_page(subject, title, max_rows)


def build_page(subject: Subject, title: str | None = None, max_rows: int = MOST_ROWS) -> HTML:
    """Return the page on a model and its test rows.

    title: the heading; None is a question about the target.  max_rows: how many rows it holds.
    Raises ValueError for a model of several targets.
    """
    facts = collect_facts(subject, max_rows)
    heading = title or f"How sure is the prediction of {subject.target}?"
    return HTML(render_page(subject, facts, heading), facts)
