"""A model and its test rows, as the report sees them: predictions for chosen rows, refits and
strengths of the prior.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssla._checks import refuse_masked
from ssla.data import Inputs, as_inputs, as_tensor, column, map_inputs, row_count
from ssla.posterior import Posterior
from ssla.predictive import Predictive
from ssla.priors import BoundGaussian
from ssla.priors import Gaussian as GaussianPrior
from ssla.tables.report.short_texts import of_fit, short

SHOWN_INPUTS = 40  # columns of the inputs that are embedded
Predict = Callable[
    [np.ndarray, str | None, float], Predictive
]  # rows, refit (None: the model's), factor on the prior precision


@dataclass(frozen=True, eq=False)
class Subject:
    """What the report needs to know of a model and of n rows."""

    predict: Predict
    y: Tensor  # (n,); classes: codes
    classes: tuple[str, ...] | None
    fixed_prior: str  # why there is no slider; empty: there is one
    target: str
    input_names: tuple[str, ...]
    inputs: Callable[[np.ndarray], list[list[Any]]]  # the cells of rows
    columns: tuple[tuple[str, str], ...]  # name and use of every column
    fit: tuple[tuple[str, str], ...]  # heading and text
    hashes: tuple[tuple[str, str], ...]
    remarks: tuple[str, ...] = ()
    posterior: Posterior | None = None  # for `ssla.explain`
    x: Any = None
    at_mean: Callable[[np.ndarray, int], Predictive] | None = (
        None  # rows with one input at its training mean
    )
    labels: Sequence[int] | None = None  # number of each row in its file; None: 1 … n


def of_posterior(
    posterior: Posterior, X: Any, y: Any, refit: Any, target: str, names: Sequence[str] | None
) -> Subject:
    x = as_inputs(X)
    value = _targets(y, row_count(x))
    strengths = {1.0: posterior}

    def predict(rows: np.ndarray, other: str | None, factor: float) -> Predictive:
        if factor not in strengths:
            strengths[factor] = with_prior_strength(posterior, factor)
        return strengths[factor].predict(take(x, rows), other or refit or "output")

    table = isinstance(x, Tensor) and x.dim() == 2
    named = _names(names, x.shape[1]) if table else ()
    return Subject(
        predict,
        value,
        None,
        why_fixed([posterior]),
        target,
        named[:SHOWN_INPUTS],
        (lambda rows: x[torch.from_numpy(rows), :SHOWN_INPUTS].tolist())
        if table
        else (lambda rows: [[] for _ in rows]),
        tuple((name, "given to the network as it is") for name in named)
        or (("x", "given to the network as it is"),),
        (("Posterior", of_fit(posterior)),),
        (("test inputs", _digest(x)), ("test targets", _digest(value))),
        posterior=posterior,
        x=x,
    )


def of_estimator(
    estimator: Any, X: Any, y: Any, target: str, names: Sequence[str] | None
) -> Subject:
    """An estimator of `ssla.sklearn`, which is recognised by its `predict_dist` and `ensemble_`."""
    if not hasattr(estimator, "ensemble_"):
        raise ValueError(
            f"This {type(estimator).__name__} is not fitted yet. Call fit before html_report."
        )
    refuse_masked("X", X)
    refuse_masked("y", y)
    x = np.asarray(X, dtype=np.float64)
    if x.ndim != 2:
        raise ValueError(f"X must have shape (n, d), a table of numbers, but has {x.shape}.")
    if names is None:
        names = getattr(estimator, "feature_names_in_", None)
    labels = getattr(estimator, "classes_", None)
    given = np.asarray(y)
    if labels is not None:
        unknown = ~np.isin(given, labels)
        if unknown.any():
            raise ValueError(
                f"y has {int(unknown.sum())} labels that were not in the training data, the first "
                f"is {given[unknown][0]!r}. Leave out these rows."
            )
        given = np.searchsorted(labels, given)
    value = _targets(given, len(x))
    named = _names(names, x.shape[1])
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

    wrapped = not hasattr(
        estimator.ensemble_, "epochs"
    )  # models of other libraries take the columns as they are
    uses = tuple(
        (
            name,
            "given to the models as it is"
            if wrapped
            else f"number, less {float(shift):.4g}, divided by {float(scale):.4g}",
        )
        for name, shift, scale in zip(named, scaling.shift, scaling.scale, strict=True)
    )
    return Subject(
        predictor(estimator, lambda model, rows: model.predict_dist(_like(X, x[rows]))),
        value,
        None if labels is None else tuple(map(str, labels)),
        why_fixed(component.posterior for component in estimator.ensemble_.components),
        target,
        named[:SHOWN_INPUTS],
        lambda rows: x[rows, :SHOWN_INPUTS].tolist(),
        uses,
        fit_of(estimator),
        (("test inputs", _digest(torch.from_numpy(x))), ("test targets", _digest(value))),
        remarks_on(estimator),
        at_mean=at_mean,
    )


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
    found = [getattr(estimator.ensemble_, "remark", "")]
    if getattr(estimator, "conformal_", None) is not None:
        found.append(
            "The model has conformal intervals. This report is about the predictive distribution, "
            "not about these."
        )
    return tuple(text for text in found if text)


def with_prior_strength(posterior: Posterior, factor: float) -> Posterior:
    """The posterior with `factor` times the precision of its Gaussian prior; mean and
    convention stay.
    """
    if factor == 1.0:
        return posterior
    bound = posterior.bound_prior
    assert isinstance(bound, BoundGaussian)
    # by name: tensors (P,) of a prior are not in the order of θ
    places = posterior.network.layout.positions.items()
    precision, mean = (
        {name: part[index] for name, index in places}
        for part in (bound.scale_precision * factor, bound.mean)
    )
    return posterior.with_prior(GaussianPrior(precision, mean), posterior.convention)


def why_fixed(posteriors: Any) -> str:
    """Why the strength of the prior cannot be changed; empty if it can."""
    for posterior in posteriors:
        bound = posterior.bound_prior
        if not isinstance(bound, BoundGaussian):
            return f"The prior is {short(posterior.prior)}. The slider is for Gaussian priors."
        if not bool((bound.scale_precision > 0).all()):
            return "The prior is flat for some parameters, so its strength cannot be changed."
    return ""


def take(x: Inputs, rows: np.ndarray) -> Inputs:
    index = torch.from_numpy(rows)
    return map_inputs(lambda part: part[index], x)


def _targets(y: Any, rows: int) -> Tensor:
    value = column(as_tensor(y)).to("cpu", torch.float64)
    if value.dim() != 1:
        raise ValueError(
            f"The report is for one target, but y has shape {tuple(value.shape)}. Fit and report "
            "one target at a time."
        )
    if len(value) != rows:
        raise ValueError(
            f"X has {rows} rows, but y has {len(value)}. Give one target for each row."
        )
    if not rows:
        raise ValueError("The report needs at least one row, but X is empty.")
    if not bool(torch.isfinite(value).all()):
        raise ValueError("y has missing or infinite values. Leave out these rows.")
    return value


def _like(X: Any, rows: np.ndarray) -> Any:
    """Rows as a table with the names of X, where it has names: scikit-learn compares them."""
    if hasattr(X, "columns") and hasattr(X, "iloc"):
        return type(X)(rows, columns=X.columns)
    return rows


def _names(names: Sequence[str] | None, count: int) -> tuple[str, ...]:
    if names is None:
        return tuple(f"input {i}" for i in range(count))
    if len(names) != count:
        raise ValueError(
            f"names must have {count} entries, one for each column of X, but has {len(names)}."
        )
    return tuple(map(str, names))


def _digest(x: Any) -> str:
    """SHA-256 of the numbers, in float64 and the order of rows; of all tensors of nested inputs."""
    found = hashlib.sha256()
    parts = (
        [x]
        if isinstance(x, Tensor)
        else [x[key] for key in sorted(x)]
        if isinstance(x, dict)
        else list(x)
    )
    for part in parts:
        found.update(part.detach().to("cpu", torch.float64).contiguous().numpy().tobytes())
    return found.hexdigest()
