"""A model and its test rows as one value, which is all that the report reads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssla.data import as_inputs, as_tensor, row_count, squeeze_column, take_rows
from ssla.posterior import Posterior
from ssla.predictive import Predictive
from ssla.priors import BoundGaussian
from ssla.priors import Gaussian as GaussianPrior
from ssla.tables.report.short_texts import describe_fit, shorten

SHOWN_INPUTS = 40  # columns of the inputs that are embedded
# Rows, refit (None: that of the model) and factor on the prior precision -> predictive.
Predict = Callable[[np.ndarray, str | None, float], Predictive]


@dataclass(frozen=True, eq=False)
class Subject:
    """All that the report reads of a model and of n rows."""

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
    # the predictive of rows with one input at its training mean
    at_mean: Callable[[np.ndarray, int], Predictive] | None = None
    labels: Sequence[int] | None = None  # number of each row in its file; None: 1 … n


def posterior_subject(
    posterior: Posterior, X: Any, y: Any, refit: Any, target: str, names: Sequence[str] | None
) -> Subject:
    """Return the subject of a posterior and rows X with observed targets y (n,).

    refit: None is "output".  target: the name of y.  names: of the columns of X, if it is (n, d).
    Raises ValueError if these do not match, or if y has no finite values for one target.
    """
    x = as_inputs(X)
    observed = check_targets(y, row_count(x))
    strengths = {1.0: posterior}

    def predict(rows: np.ndarray, other_refit: str | None, factor: float) -> Predictive:
        """Predict rows (k,), with the posterior of each factor made once."""
        if factor not in strengths:
            strengths[factor] = with_prior_strength(posterior, factor)
        return strengths[factor].predict(
            take_rows(x, torch.from_numpy(rows)), other_refit or refit or "output"
        )

    # Images and nested inputs have no columns that a page could show.
    is_table = isinstance(x, Tensor) and x.dim() == 2
    column_names = check_names(names, x.shape[1]) if is_table else ()

    def inputs(rows: np.ndarray) -> list[list[Any]]:
        """Return the first columns of rows (k,), or nothing for each."""
        if not is_table:
            return [[] for _ in rows]
        cells: list[list[Any]] = x[torch.from_numpy(rows), :SHOWN_INPUTS].tolist()
        return cells

    return Subject(
        predict=predict,
        y=observed,
        classes=None,
        fixed_prior=why_prior_is_fixed([posterior]),
        target=target,
        input_names=column_names[:SHOWN_INPUTS],
        inputs=inputs,
        columns=tuple((name, "given to the network as it is") for name in column_names or ("x",)),
        fit=(("Posterior", describe_fit(posterior)),),
        hashes=(("test inputs", hash_inputs(x)), ("test targets", hash_inputs(observed))),
        posterior=posterior,
        x=x,
    )


def with_prior_strength(posterior: Posterior, factor: float) -> Posterior:
    """Return the posterior with `factor` times the precision of its Gaussian prior.

    The mean and the convention stay.
    """
    if factor == 1.0:
        return posterior
    bound = posterior.bound_prior
    assert isinstance(bound, BoundGaussian)
    # by name: tensors (P,) of a prior are not in the order of θ
    positions = posterior.network.layout.positions.items()
    precision, mean = (
        {name: values[index] for name, index in positions}
        for values in (bound.scale_precision * factor, bound.mean)
    )
    return posterior.with_prior(GaussianPrior(precision, mean), posterior.convention)


def why_prior_is_fixed(posteriors: Iterable[Posterior]) -> str:
    """Return a sentence on why the strength of the prior cannot be changed; empty if it can."""
    for posterior in posteriors:
        bound = posterior.bound_prior
        if not isinstance(bound, BoundGaussian):
            return f"The prior is {shorten(posterior.prior)}. The slider is for Gaussian priors."
        if not bool((bound.scale_precision > 0).all()):
            return "The prior is flat for some parameters, so its strength cannot be changed."
    return ""


def check_targets(y: Any, rows: int) -> Tensor:
    """Return the targets as float64 (n,); raise ValueError unless all n = rows > 0 are finite."""
    observed = squeeze_column(as_tensor(y)).to("cpu", torch.float64)
    if observed.dim() != 1:
        raise ValueError(
            f"The report is for one target, but y has shape {tuple(observed.shape)}. Fit and "
            "report one target at a time."
        )
    if len(observed) != rows:
        raise ValueError(
            f"X has {rows} rows, but y has {len(observed)}. Give one target for each row."
        )
    if not rows:
        raise ValueError("The report needs at least one row, but X is empty.")
    if not bool(torch.isfinite(observed).all()):
        raise ValueError("y has missing or infinite values. Leave out these rows.")
    return observed


def check_names(names: Sequence[str] | None, count: int) -> tuple[str, ...]:
    """Return the names of `count` columns, by default "input 0" and so on.

    Raises ValueError if there are more or fewer names.
    """
    if names is None:
        return tuple(f"input {i}" for i in range(count))
    if len(names) != count:
        raise ValueError(
            f"names must have {count} entries, one for each column of X, but has {len(names)}."
        )
    return tuple(map(str, names))


def hash_inputs(x: Any) -> str:
    """Return the SHA-256 of the numbers, in float64 and the order of rows.

    Nested inputs: of all tensors, those of a dictionary in the order of its keys.
    """
    if isinstance(x, Tensor):
        tensors = [x]
    elif isinstance(x, dict):
        tensors = [x[key] for key in sorted(x)]
    else:
        tensors = list(x)
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().to("cpu", torch.float64).contiguous().numpy().tobytes())
    return digest.hexdigest()
