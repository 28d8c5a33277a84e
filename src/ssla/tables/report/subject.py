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
# A function of the positions of rows (k,), a refit (None: that of the model) and a factor on the
# prior precision, which returns the predictive of these rows.
Predict = Callable[[np.ndarray, str | None, float], Predictive]


@dataclass(frozen=True, eq=False)
class Subject:
    """All that the report reads of a model and of n rows."""

    predict: Predict
    y: Tensor  # the observed targets (n,); classes: codes
    classes: tuple[str, ...] | None  # their labels; None: not known, or no classes
    fixed_prior: str | None  # why there is no slider of the prior; None: there is one
    target: str  # the name of y
    input_names: tuple[str, ...]  # those of the shown inputs
    inputs: Callable[[np.ndarray], list[list[Any]]]  # positions of rows (k,) -> their cells
    columns: tuple[tuple[str, str], ...]  # name and use of every column
    fit: tuple[tuple[str, str], ...]  # heading and text
    hashes: tuple[tuple[str, str], ...]  # what was hashed, and its SHA-256
    remarks: tuple[str, ...] = ()  # sentences at the top of the page
    posterior: Posterior | None = None  # for `ssla.explain`, with its inputs x; None: an estimator
    x: Any = None
    # positions of rows (k,) and of an input -> their predictive with this input at its training
    # mean
    predict_at_mean: Callable[[np.ndarray, int], Predictive] | None = None
    labels: Sequence[int] | None = None  # number of each row in its file; None: 1 … n


def make_posterior_subject(
    posterior: Posterior, X: Any, y: Any, refit: Any, target: str, names: Sequence[str] | None
) -> Subject:
    """Return the subject of a posterior and rows X with observed targets y (n,).

    refit: a name or an object; None is "output".  target: the name of y.  names: the names of the
    columns of X if it is (n, d); None: numbers. Raises ValueError if these do not match, or if y
    has missing or infinite values or several targets.
    """
    x = as_inputs(X)
    observed = check_targets(y, row_count(x))
    posteriors = {1.0: posterior}  # by the factor on the prior precision

    def predict(rows: np.ndarray, other_refit: str | None, factor: float) -> Predictive:
        """Return the predictive of rows (k,) as in `Predict`; each posterior is made once."""
        if factor not in posteriors:
            posteriors[factor] = with_prior_strength(posterior, factor)
        return posteriors[factor].predict(
            take_rows(x, torch.from_numpy(rows)), other_refit or refit or "output"
        )

    # Images and nested inputs have no columns that a page could show.
    is_table = isinstance(x, Tensor) and x.dim() == 2
    column_names = check_names(names, x.shape[1]) if is_table else ()

    def list_inputs(rows: np.ndarray) -> list[list[Any]]:
        """Return the first SHOWN_INPUTS cells of the rows (k,); none if X is not a table."""
        if not is_table:
            return [[] for _ in rows]
        cells: list[list[Any]] = x[torch.from_numpy(rows), :SHOWN_INPUTS].tolist()
        return cells

    return Subject(
        predict=predict,
        y=observed,
        classes=None,
        fixed_prior=explain_fixed_prior([posterior]),
        target=target,
        input_names=column_names[:SHOWN_INPUTS],
        inputs=list_inputs,
        columns=tuple((name, "given to the network as it is") for name in column_names or ("x",)),
        fit=(("Posterior", describe_fit(posterior)),),
        hashes=(("test inputs", hash_tensors(x)), ("test targets", hash_tensors(observed))),
        posterior=posterior,
        x=x,
    )


def with_prior_strength(posterior: Posterior, factor: float) -> Posterior:
    """Return the posterior with `factor` times the precision of its prior, which must be Gaussian.

    The mean of the prior and the convention stay. The posterior of the factor 1 is unchanged, with
    any prior.
    """
    if factor == 1.0:
        return posterior
    bound = posterior.bound_prior
    assert isinstance(bound, BoundGaussian)

    # A prior takes values by the names of parameters. Those of `bound` are (P,), in the order of θ.
    positions = posterior.network.layout.positions.items()
    precision, mean = (
        {name: values[index] for name, index in positions}
        for values in (bound.scale_precision * factor, bound.mean)
    )
    return posterior.with_prior(GaussianPrior(precision, mean), posterior.convention)


def explain_fixed_prior(posteriors: Iterable[Posterior]) -> str | None:
    """Return a sentence on why the strength of the prior cannot be changed; None if it can.

    The strength cannot be changed if one of the posteriors has a prior that is not Gaussian, or is
    flat.
    """
    for posterior in posteriors:
        bound = posterior.bound_prior
        if not isinstance(bound, BoundGaussian):
            return f"The prior is {shorten(posterior.prior)}. The slider is for Gaussian priors."
        if not bool((bound.scale_precision > 0).all()):
            return "The prior is flat for some parameters, so its strength cannot be changed."
    return None


def check_targets(y: Any, rows: int) -> Tensor:
    """Return the targets (n,) or (n, 1) as float64 (n,) on the CPU.

    rows: the number of rows of X. Raises ValueError for several targets, another number of them
    than rows, no row, and missing or infinite values.
    """
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
    """Return the names of `count` columns as texts.

    names: None is "input 0", "input 1", … Raises ValueError if there are more or fewer names.
    """
    if names is None:
        return tuple(f"input {i}" for i in range(count))
    if len(names) != count:
        raise ValueError(
            f"names must have {count} entries, one for each column of X, but has {len(names)}."
        )
    return tuple(map(str, names))


def hash_tensors(x: Any) -> str:
    """Return the SHA-256 of the numbers of a tensor, in float64 and the order of rows.

    x: a tensor, a sequence of tensors, or a dictionary of tensors. Several are hashed one after the
    other, those of a dictionary in the order of its keys.
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
