"""Estimators as subjects of the report. `ssla report` and `ssla.html_report` share this code.

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
from ssla.tables.report.short_texts import describe_fit, shorten
from ssla.tables.report.subject import (
    SHOWN_INPUTS,
    Predict,
    Subject,
    check_names,
    check_targets,
    explain_fixed_prior,
    hash_tensors,
    with_prior_strength,
)

KIND_NAMES = {"text": "category", "boolean": "yes or no"}


def make_estimator_subject(
    estimator: Any, X: Any, y: Any, target: str, names: Sequence[str] | None
) -> Subject:
    """Return the subject of a fitted estimator of `ssla.sklearn`, and rows X with observed y (n,).

    X: a table, a data frame, or an array (n, d).  target: the name of y.  names: the names of the
    columns of X; None: those of the fit. Raises ValueError if the estimator is not fitted, or if X,
    y or names do not match it.
    """
    if not hasattr(estimator, "ensemble_"):
        raise ValueError(
            f"This {type(estimator).__name__} is not fitted yet. Call fit before html_report."
        )

    refuse_masked("X", X)
    refuse_masked("y", y)
    codes = _encode_labels(estimator, y)
    if not hasattr(estimator, "plan_"):
        return _make_matrix_subject(estimator, X, codes, target, names)
    if isinstance(X, Table):
        return make_table_subject(estimator, X, codes, target)
    if not hasattr(X, "columns") and np.ndim(X) != 2:
        raise ValueError(f"X must have shape (n, d), a table, but has {np.shape(X)}.")
    table = estimator.as_table(X)
    if names is None:
        names = getattr(estimator, "feature_names_in_", None)
    page_names = check_names(names, estimator.n_features_in_)
    shown_names = dict(zip(table.cells, page_names, strict=True))
    return make_table_subject(estimator, table, codes, target, shown_names=shown_names)


def make_table_subject(
    estimator: Any,
    table: Table,
    y: Any,
    target: str,
    rows: np.ndarray | None = None,
    shown_names: dict[str, str] | None = None,
    remarks: Sequence[str] = (),
) -> Subject:
    """Return the subject of an estimator with a plan, and m rows of a table with observed y (m,).

    y: numbers, or the codes of classes.  rows (m,): the positions of these rows in the table; None:
    all.  shown_names: the names on the page by those in the table, for columns where they differ.
    remarks: more sentences for the page. Raises ValueError if y has no finite value for each row.
    target: the name of y.
    """
    plan: Plan = estimator.plan_
    chosen = np.arange(table.rows) if rows is None else rows
    encoded = plan.encode(table)[chosen]
    observed = check_targets(y, len(encoded))
    page_names = shown_names or {}
    shown = plan.features[:SHOWN_INPUTS]
    shown_columns = [table.get_cells(feature.name) for feature in shown]

    def list_inputs(positions: np.ndarray) -> list[list[Any]]:
        """Return the cells of the shown columns for each of the rows (k,)."""
        return [[cells[row] for cells in shown_columns] for row in chosen[positions]]

    def predict_at_mean(positions: np.ndarray, feature: int) -> Predictive:
        """Return the predictive of rows (k,) with one feature at its training mean."""
        rows_at_mean = _set_to_mean(estimator, encoded[positions], feature)
        predictive: Predictive = estimator.predict_dist(rows_at_mean)
        return predictive

    return Subject(
        predict=make_predict(
            estimator, lambda model, positions: model.predict_dist(encoded[positions])
        ),
        y=observed,
        classes=_list_class_names(estimator),
        fixed_prior=explain_fixed_prior(
            component.posterior for component in estimator.ensemble_.components
        ),
        target=target,
        input_names=tuple(page_names.get(feature.name, feature.name) for feature in shown),
        inputs=list_inputs,
        columns=_describe_inputs(estimator, target, page_names),
        fit=describe_estimator(estimator),
        hashes=(
            ("test inputs", hash_tensors(torch.from_numpy(encoded.values))),
            ("test targets", hash_tensors(observed)),
        ),
        remarks=(*list_estimator_remarks(estimator), *remarks, *_list_gap_remarks(encoded)),
        predict_at_mean=predict_at_mean,
        labels=(chosen + 1).tolist(),
    )


def _list_class_names(estimator: Any) -> tuple[str, ...] | None:
    """Return the labels of an estimator's classes as texts; None if it predicts numbers."""
    classes = getattr(estimator, "classes_", None)
    return None if classes is None else tuple(map(str, classes))


def _make_matrix_subject(
    estimator: Any, X: Any, y: Any, target: str, names: Sequence[str] | None
) -> Subject:
    """Return the subject of an estimator without a plan, around models of other libraries.

    These take the numbers X (n, d) as they are.  y (n,): numbers, or the codes of classes.  target:
    the name of y.  names: the names of the columns; None: those of the fit. Raises ValueError if X
    is not a table of numbers, if the estimator was fitted on other columns, or if y or names do not
    match.
    """
    x = _read_matrix(X)
    if names is None:
        names = getattr(estimator, "feature_names_in_", None)
    observed = check_targets(y, len(x))
    column_names = check_names(names, x.shape[1])
    scaling = estimator.ensemble_.inputs
    if scaling is None:
        raise ValueError(
            "The report needs a table of numbers, but this estimator was fitted on other columns "
            "too."
        )

    def predict_at_mean(rows: np.ndarray, feature: int) -> Predictive:
        """Return the predictive of rows (k,) with one column at its training mean."""
        changed = x[rows].copy()
        changed[:, feature] = float(scaling.shift[feature])
        predictive: Predictive = estimator.predict_dist(_restore_frame(X, changed))
        return predictive

    return Subject(
        predict=make_predict(
            estimator, lambda model, rows: model.predict_dist(_restore_frame(X, x[rows]))
        ),
        y=observed,
        classes=_list_class_names(estimator),
        fixed_prior=explain_fixed_prior(
            component.posterior for component in estimator.ensemble_.components
        ),
        target=target,
        input_names=column_names[:SHOWN_INPUTS],
        inputs=lambda rows: x[rows, :SHOWN_INPUTS].tolist(),
        columns=tuple((name, "given to the models as it is") for name in column_names),
        fit=describe_estimator(estimator),
        hashes=(
            ("test inputs", hash_tensors(torch.from_numpy(x))),
            ("test targets", hash_tensors(observed)),
        ),
        remarks=list_estimator_remarks(estimator),
        predict_at_mean=predict_at_mean,
    )


def _read_matrix(X: Any) -> np.ndarray:
    """Return X as numbers (n, d) in float64; raise ValueError if X has another shape or texts."""
    x = np.asarray(X, dtype=np.float64)
    if x.ndim != 2:
        raise ValueError(f"X must have shape (n, d), a table of numbers, but has {x.shape}.")
    return x


def _encode_labels(estimator: Any, y: Any) -> Any:
    """Return the codes (n,) of the labels y (n,); if the estimator predicts numbers, y as an array.

    Raises ValueError for labels that were not in the training data.
    """
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

    return np.searchsorted(labels, given)  # labels are sorted, as in scikit-learn


def _set_to_mean(estimator: Any, rows: Encoded, feature: int) -> Encoded:
    """Return a copy of the rows in which one feature is at its training mean.

    The feature has no gaps then, so no row is a mixture over its values.
    """
    columns = rows.plan.column_slices[feature]
    values = rows.values.copy()
    values[:, columns] = estimator.ensemble_.inputs.shift.numpy()[columns]
    unlearned = rows.unlearned.copy()
    unlearned[:, feature] = False
    return replace(rows, values=values, unlearned=unlearned)


def _describe_inputs(
    estimator: Any, target: str, page_names: dict[str, str]
) -> tuple[tuple[str, str], ...]:
    """Return name and use of every column, and the scaling of numbers if the plan has only these.

    target: the name of the target.  page_names: the names on the page by those in the plan, for
    columns where they differ.
    """
    plan: Plan = estimator.plan_
    if not plan.is_identity:
        return describe_columns(plan, target, page_names)
    scaling = estimator.ensemble_.inputs
    return tuple(
        (
            page_names.get(feature.name, feature.name),
            f"number, less {float(shift):.4g}, divided by {float(scale):.4g}",
        )
        for feature, shift, scale in zip(plan.features, scaling.shift, scaling.scale, strict=True)
    )


def describe_columns(
    plan: Plan, target: str, page_names: dict[str, str] | None = None
) -> tuple[tuple[str, str], ...]:
    """Return name and use of the target and of every column, also of those that are left out.

    target: the name of the target.  page_names: the names on the page by those in the plan, for
    columns where they differ; None: for no column.
    """
    names = page_names or {}
    uses = [(target, "the target")]
    for feature in plan.features:
        text = KIND_NAMES.get(feature.kind, feature.kind)
        # A category has levels or codes, but not both.
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


def make_predict(estimator: Any, predict: Callable[[Any, np.ndarray], Predictive]) -> Predict:
    """Return a function that predicts with variants of the estimator.

    A variant has another refit, or another strength of the prior.

    predict: a function of an estimator and the positions of rows (k,) that returns the predictive.
    """
    variants: dict[tuple[str | None, float], Any] = {}

    def predict_with_variant(rows: np.ndarray, refit: str | None, factor: float) -> Predictive:
        """Return the predictive of rows (k,) as in `Predict`; each variant is made once."""
        if (refit, factor) not in variants:
            variant = copy.copy(estimator)
            variant.refit = refit or estimator.refit
            if factor != 1.0:
                components = tuple(
                    replace(component, posterior=with_prior_strength(component.posterior, factor))
                    for component in estimator.ensemble_.components
                )
                variant.ensemble_ = replace(estimator.ensemble_, components=components)
            variants[refit, factor] = variant
        return predict(variants[refit, factor], rows)

    return predict_with_variant


def describe_estimator(estimator: Any) -> tuple[tuple[str, str], ...]:
    """Return (heading, text) of the settings, and of the report of the main posterior.

    The main posterior is that with the largest weight in the mixture.
    """
    ensemble = estimator.ensemble_
    main = max(ensemble.components, key=lambda component: component.weight)
    settings = "\n".join(
        f"{name:<22}  {shorten(value)}" for name, value in sorted(estimator.get_params().items())
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
        (heading, describe_fit(main.posterior)),
    )


def list_estimator_remarks(estimator: Any) -> tuple[str, ...]:
    """Return sentences on networks that are left out and on conformal intervals.

    The result is () if there are none.
    """
    remarks = [getattr(estimator.ensemble_, "remark", "")]
    if getattr(estimator, "conformal_", None) is not None:
        remarks.append(
            "The model has conformal intervals. This report is about the predictive distribution, "
            "not about these."
        )
    return tuple(text for text in remarks if text)


def _list_gap_remarks(rows: Encoded) -> tuple[str, ...]:
    """Return a sentence on the rows with missing or unknown inputs; () if there are none."""
    if not rows.noted_row_count:
        return ()
    return (
        f"Rows with missing or unknown inputs: {rows.noted_row_count:,}. Their predictions are "
        "mixed over values of the training table.",
    )


def _restore_frame(X: Any, rows: np.ndarray) -> Any:
    """Return rows (k, d) as a data frame with the columns of X if X is a data frame of pandas.

    scikit-learn compares the names of the columns with those of the fit. For another X the rows are
    returned unchanged.
    """
    if hasattr(X, "columns") and hasattr(X, "iloc"):
        return type(X)(rows, columns=X.columns)
    return rows
