"""The report: one HTML file that shows how sure a model is, where it is not, why, and whether
another prior would change that.

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

from ssla._checks import in_plain_torch, writable
from ssla.posterior import Posterior
from ssla.refit import Refit
from ssla.tables.report.facts import collect
from ssla.tables.report.page import render
from ssla.tables.report.subject import Subject, of_posterior
from ssla.tables.report.table_models import of_estimator

MOST_ROWS = 2000
__all__ = ["HTML", "MOST_ROWS", "html_report", "page_of"]


@dataclass(frozen=True, eq=False)
class HTML:
    """A page. `save(path)` writes it, `str` gives it, and a notebook shows it.

    `facts` holds the numbers that it embeds.
    """

    text: str = field(repr=False)
    facts: dict[str, Any] = field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> Path:
        target = Path(path)
        writable(target)
        target.write_text(self.text, encoding="utf-8")
        return target

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
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
    """One self-contained page on the predictions for test rows X with observed targets y.

    It opens without a network.

    It has the scores beside those of the plug-in, calibration, the rows with the most doubt, a
    table of rows, and the predictive of each row under weaker and stronger priors, computed by
    `with_prior`. y has one target.

    model: a Posterior, or a fitted estimator of `ssla.sklearn`; its X is an array or a data frame,
    as at its fit.
    refit: of a Posterior ("output" if not given); an estimator has its own.  names: of the columns
    of X.  target: the name of y. max_rows: how many rows the page holds. Of more rows it holds the
    worst predicted, the most doubtful, and evenly spaced ones; scores are of all rows.

    >>> ssla.html_report(posterior, X_test, y_test).save("report.html")      # doctest: +SKIP
    """
    if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 4:
        raise ValueError(f"max_rows must be a whole number from 4, but is {max_rows!r}.")
    if isinstance(model, Posterior):
        subject = of_posterior(model, X, y, refit, target, names)
    elif hasattr(model, "predict_dist"):
        if refit is not None:
            raise ValueError(
                "refit= is for a Posterior. An estimator uses its own: model.set_params(refit=...)."
            )
        subject = of_estimator(model, X, y, target, names)
    else:
        raise TypeError(
            "html_report needs a Posterior or an estimator of ssla.sklearn, but got a "
            f"{type(model).__name__}. Call ssla.fit(model, data, ...) first."
        )
    return page_of(subject, title, max_rows)


def page_of(subject: Subject, title: str | None = None, max_rows: int = MOST_ROWS) -> HTML:
    facts = collect(subject, max_rows)
    return HTML(
        render(subject, facts, title or f"How sure is the prediction of {subject.target}?"), facts
    )
