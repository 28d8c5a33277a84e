"""Estimators as the report sees them. `ssla report` and `ssla.html_report` share this code.

An estimator is recognised by what it has, so that the report of a posterior needs no scikit-learn:
`plan_` reads tables, and without one the models of other libraries take the columns as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ssla._checks import refuse_masked
from ssla.predictive import Predictive
from ssla.tables.columns import Encoded, Plan, Table
from ssla.tables.report.short_texts import of_fit, short
from ssla.tables.report.subject import (
    SHOWN_INPUTS,
    Predict,
    Subject,
    checked_names,
    digest_of,
    targets,
    why_fixed,
    with_prior_strength,
)

KINDS = {"text": "category", "boolean": "yes or no"}


def of_estimator(
    estimator: Any, X: Any, y: Any, target: str, names: Sequence[str] | None
) -> Subject:
    """A fitted estimator of `ssla.sklearn`, and rows X with observed y. names: of the columns."""
    if not hasattr(estimator, "ensemble_"):
        raise ValueError(
            f"This {type(estimator).__name__} is not fitted yet. Call fit before html_report."
        )
    refuse_masked("X", X)
    refuse_masked("y", y)
    codes = _codes(estimator, y)
    if not hasattr(estimator, "plan_"):
        return _of_matrix(estimator, X, codes, target, names)
    if isinstance(X, Table):
        return of_table(estimator, X, codes, target)
    if not hasattr(X, "columns") and np.ndim(X) != 2:
        raise ValueError(f"X must have shape (n, d), a table, but has {np.shape(X)}.")
    table = estimator.as_table(X)
    if names is None:
        names = getattr(estimator, "feature_names_in_", None)
    shown = checked_names(names, estimator.n_features_in_)
    return of_table(
        estimator, table, codes, target, shown_names=dict(zip(table.cells, shown, strict=True))
    )


def of_table(
    estimator: Any,
    table: Table,
    y: Any,
    target: str,
    rows: np.ndarray | None = None,
    shown_names: dict[str, str] | None = None,
    remarks: Sequence[str] = (),
) -> Subject:
    """An estimator with a plan, and rows of a table with observed y (m,); classes: codes.

    rows (m,): which rows of the table these are; None: all.  shown_names: of columns that the page
    calls by other names than the table does.  remarks: more sentences for the page.
    """
    plan: Plan = estimator.plan_
    chosen = np.arange(table.rows) if rows is None else rows
    encoded = plan.encode(table)[chosen]
    value = targets(y, len(encoded))
    classes = getattr(estimator, "classes_", None)
    named = shown_names or {}
    shown = plan.features[:SHOWN_INPUTS]
    cells = [table.cells_of(feature.name) for feature in shown]
    return Subject(
        predictor(estimator, lambda model, part: model.predict_dist(encoded[part])),
        value,
        None if classes is None else tuple(map(str, classes)),
        why_fixed(component.posterior for component in estimator.ensemble_.components),
        target,
        tuple(named.get(feature.name, feature.name) for feature in shown),
        lambda part: [[column[chosen[i]] for column in cells] for i in part],
        _uses(estimator, target, named),
        fit_of(estimator),
        (
            ("test inputs", digest_of(torch.from_numpy(encoded.values))),
            ("test targets", digest_of(value)),
        ),
        (*remarks_on(estimator), *remarks, *_remarks_on_gaps(encoded)),
        at_mean=lambda part, place: estimator.predict_dist(
            _at_mean(estimator, encoded[part], place)
        ),
        labels=(chosen + 1).tolist(),
    )


def _of_matrix(estimator: Any, X: Any, y: Any, target: str, names: Sequence[str] | None) -> Subject:
    """An estimator around models of other libraries, which take numbers as they are."""
    x = np.asarray(X, dtype=np.float64)
    if x.ndim != 2:
        raise ValueError(f"X must have shape (n, d), a table of numbers, but has {x.shape}.")
    if names is None:
        names = getattr(estimator, "feature_names_in_", None)
    classes = getattr(estimator, "classes_", None)
    value = targets(y, len(x))
    named = checked_names(names, x.shape[1])
    scaling = estimator.ensemble_.inputs
    if scaling is None:
        raise ValueError(
            "The report needs a table of numbers, but this estimator was fitted on other columns "
            "too."
        )

    def at_mean(rows: np.ndarray, place: int) -> Predictive:
        changed = x[rows].copy()
        changed[:, place] = float(scaling.shift[place])
        predictive: Predictive = estimator.predict_dist(_like(X, changed))
        return predictive

    return Subject(
        predictor(estimator, lambda model, rows: model.predict_dist(_like(X, x[rows]))),
        value,
        None if classes is None else tuple(map(str, classes)),
        why_fixed(component.posterior for component in estimator.ensemble_.components),
        target,
        named[:SHOWN_INPUTS],
        lambda rows: x[rows, :SHOWN_INPUTS].tolist(),
        tuple((name, "given to the models as it is") for name in named),
        fit_of(estimator),
        (("test inputs", digest_of(torch.from_numpy(x))), ("test targets", digest_of(value))),
        remarks_on(estimator),
        at_mean=at_mean,
    )


def _codes(estimator: Any, y: Any) -> Any:
    """The codes of labels (n,); numbers as they are. ValueError for labels that are new."""
    labels = getattr(estimator, "classes_", None)
    given = np.asarray(y)
    if labels is None:
        return given
    unknown = ~np.isin(given, labels)
    if unknown.any():
        raise ValueError(
            f"y has {int(unknown.sum())} labels that were not in the training data, the first "
            f"is {given[unknown][0]!r}. Leave out these rows."
        )
    return np.searchsorted(labels, given)


def _at_mean(estimator: Any, rows: Encoded, feature: int) -> Encoded:
    """The rows with one column at its training mean, and known."""
    place = rows.plan.places[feature]
    values = rows.values.copy()
    unlearned = rows.unlearned.copy()
    values[:, place] = estimator.ensemble_.inputs.shift.numpy()[place]
    unlearned[:, feature] = False
    return replace(rows, values=values, unlearned=unlearned)


def _uses(estimator: Any, target: str, named: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """What was done with every column; for numbers that are only scaled, by what."""
    plan: Plan = estimator.plan_
    if not plan.plain:
        return used(plan, target, named)
    scaling = estimator.ensemble_.inputs
    return tuple(
        (
            named.get(feature.name, feature.name),
            f"number, less {float(shift):.4g}, divided by {float(scale):.4g}",
        )
        for feature, shift, scale in zip(plan.features, scaling.shift, scaling.scale, strict=True)
    )


def used(
    plan: Plan, target: str, named: dict[str, str] | None = None
) -> tuple[tuple[str, str], ...]:
    """The target, and what was done with every column."""
    names = named or {}
    uses = [(target, "the target")]
    for feature in plan.features:
        text = KINDS.get(feature.kind, feature.kind)
        if feature.levels:
            text += f": {len(feature.levels)} values, one input for each"
        if feature.codes:
            text += f": {len(feature.codes)} values, a learned effect for each"
        if feature.rare and feature.levels:
            text += f"; {len(feature.rare)} rare values share one input"
        if feature.periods:
            text += "; days since the first, with sine and cosine of its periods"
        if feature.gaps:
            text += f"; {feature.gaps:,} training rows without a value"
        if feature.interpretation:
            text += f"; {feature.interpretation}"
        uses.append((names.get(feature.name, feature.name), text))
    uses += [(names.get(name, name), f"left out: {why}") for name, why in plan.left_out.items()]
    return tuple(uses)


def predictor(estimator: Any, predict: Callable[[Any, np.ndarray], Predictive]) -> Predict:
    """`predict(model, rows)` for the estimator with other refits and strengths of the prior."""
    made: dict[tuple[str | None, float], Any] = {}

    def run(rows: np.ndarray, refit: str | None, factor: float) -> Predictive:
        if (refit, factor) not in made:
            other = copy.copy(estimator)
            other.refit = refit or estimator.refit
            if factor != 1.0:
                components = tuple(
                    replace(c, posterior=with_prior_strength(c.posterior, factor))
                    for c in estimator.ensemble_.components
                )
                other.ensemble_ = replace(estimator.ensemble_, components=components)
            made[refit, factor] = other
        return predict(made[refit, factor], rows)

    return run


def fit_of(estimator: Any) -> tuple[tuple[str, str], ...]:
    """The settings, and the report of the main posterior."""
    ensemble = estimator.ensemble_
    main = max(ensemble.components, key=lambda component: component.weight)
    settings = "\n".join(
        f"{name:<22}  {short(value)}" for name, value in sorted(estimator.get_params().items())
    )
    count = len(ensemble.components)
    heading = (
        "Posterior"
        if count == 1
        else f"The first of {count} posteriors, whose predictives are mixed"
    )
    epochs = f", trained for {ensemble.epochs} epochs" if hasattr(ensemble, "epochs") else ""
    factor = getattr(estimator, "weight_factor_", 1.0)
    if factor != 1.0:
        settings += (
            f"\n\nThe row weights of the fit were multiplied by {factor:.4g}, to a mean of one."
        )
    return (
        (f"{type(estimator).__name__}{epochs}", settings),
        (heading, of_fit(main.posterior)),
    )


def remarks_on(estimator: Any) -> tuple[str, ...]:
    """Networks that are left out, and conformal intervals, in words."""
    remarks = [getattr(estimator.ensemble_, "remark", "")]
    if getattr(estimator, "conformal_", None) is not None:
        remarks.append(
            "The model has conformal intervals. This report is about the predictive distribution, "
            "not about these."
        )
    return tuple(text for text in remarks if text)


def _remarks_on_gaps(rows: Encoded) -> tuple[str, ...]:
    """How many rows have missing or unknown inputs."""
    if not rows.marked:
        return ()
    return (
        f"Rows with missing or unknown inputs: {rows.marked:,}. Their predictions are mixed "
        "over values of the training table.",
    )


def _like(X: Any, rows: np.ndarray) -> Any:
    """Rows as a table with the names of X, where it has names: scikit-learn compares them."""
    if hasattr(X, "columns") and hasattr(X, "iloc"):
        return type(X)(rows, columns=X.columns)
    return rows
