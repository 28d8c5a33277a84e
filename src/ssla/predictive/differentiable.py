"""Predictives that carry gradients in x and y, by reverse-mode autograd.

Gaussian noise has a closed form and classes are integrals. Counts and other numbers are in
`ssla.predictive.implicit`.

The values are those of the plain predictive. f̂ and K at x are differentiable because the network
is (see `Posterior.linearised`). The covariance of θ does not depend on x.

The graph of x is what autograd records: a tensor with it can be differentiated back to x.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from ssla._checks import is_inside_vmap
from ssla.data import Inputs
from ssla.likelihoods import Likelihood
from ssla.maths.roots import FullRoot, Root
from ssla.predictive.class_integrals import divide_by_temperature, integrate_with_graph
from ssla.predictive.class_law import make_integrated_predictive
from ssla.predictive.gaussian_law import GaussianLaw
from ssla.predictive.implicit import make_pointwise_predictive
from ssla.predictive.predictive import Diagnostics, Predictive
from ssla.priors import EXACT
from ssla.refit import Density, NoRefit, OutputRefit, OutputRung, Refit
from ssla.refit.increments import EMPIRICAL, Increments
from ssla.values import Marginal

if TYPE_CHECKING:
    from ssla.posterior import Posterior

SINGULAR = 1e-12  # of a variance: the square root of a smaller pivot has no usable derivative


@dataclass(frozen=True, eq=False)
class Moments:
    """f̂ and K with their graph, as a LogDensity for laws that evaluate no refit.

    The log densities and increments of a refit carry no gradient and are refused.
    """

    likelihood: Likelihood
    marginal: Marginal
    outputs_move: bool  # whether a refit moves f, so that its uncertainty counts
    like: Tensor  # answers have its dtype and device

    def __call__(self, y: Tensor) -> Increments:
        """Raise ValueError: increments carry no gradient. The argument is part of the protocol."""
        _refuse_increments()

    def density_at(self, y: Tensor, rows: Tensor | None = None) -> Density:
        """Raise ValueError: log densities of a refit carry no gradient.

        The arguments are part of the protocol.
        """
        _refuse_increments()


def _refuse_increments() -> NoReturn:
    """Raise ValueError for increments; the message names the call that returns them."""
    raise ValueError(
        "Increments carry no gradient. Ask posterior.predict(x).increments(y), without "
        "differentiable=True."
    )


def make_differentiable_predictive(posterior: Posterior, x: Inputs, rung: Refit) -> Predictive:
    """Return the predictive of y at the inputs x, with the graph of x.

    rung: the kind of refit. Raises ValueError for a convention, refit or likelihood whose answers
    have no derivative.
    """
    likelihood = posterior.likelihood.predictive
    if posterior.convention != EXACT:
        _refuse_request(
            f"convention={posterior.convention!r}",
            "Use posterior.with_prior(posterior.prior), the exact convention",
        )
    if not isinstance(rung, OutputRung):
        _refuse_request(f"refit={rung.name!r}", "Use refit='output'")

    # Gaussian noise has a closed form for every other rung; the other likelihoods have derivatives
    # for the full output refit only.
    if likelihood.quadratic and not (isinstance(rung, NoRefit) and rung.curvature == EMPIRICAL):
        return _make_gaussian_predictive(posterior, x, rung)
    if not likelihood.differentiable and likelihood.logit_temperature is None:
        _refuse_request(
            f"{type(likelihood).__name__}() with refit={rung.name!r}",
            "posterior.marginal(x, differentiable=True) has gradients for every likelihood",
        )
    if not isinstance(rung, OutputRefit) or rung.steps is not None:
        _refuse_request(
            f"{type(likelihood).__name__}() with refit={rung.name!r}", "Use refit='output'"
        )
    if likelihood.differentiable:
        return make_pointwise_predictive(posterior, x, rung)
    return _make_class_predictive(posterior, x, rung)


def _make_gaussian_predictive(posterior: Posterior, x: Inputs, rung: OutputRung) -> Predictive:
    """Return the closed-form predictive for Gaussian noise at x, with the graph of x.

    No row is flagged.
    """
    likelihood = posterior.likelihood.predictive
    marginal = posterior.outputs_at(x, differentiable=True)
    moments = Moments(likelihood, marginal, rung.outputs_move, posterior.answer_template(marginal))
    noise = likelihood.covariance_for(marginal.mean)
    # Without a refit the density has a mass below one.
    loses_mass = isinstance(rung, NoRefit)
    law = GaussianLaw(moments, noise, loses_mass)
    unflagged = torch.zeros(len(marginal.mean), dtype=torch.bool)
    flags = Diagnostics(rung.name, fallback=unflagged, unconverged=unflagged, inaccurate=unflagged)
    return Predictive(law, moments.like, flags, differentiable=True)


def _make_class_predictive(posterior: Posterior, x: Inputs, rung: OutputRefit) -> Predictive:
    """Return the predictive of classes at x, with the graph of x.

    Raises ValueError where K is singular.
    """
    likelihood = posterior.likelihood.predictive
    outputs_and_roots = list(_iterate_roots_with_graph(posterior, x))
    outputs = posterior.network.outputs

    # The empty tensors give the right shapes where there are no rows.
    no_rows = torch.empty(0, outputs, outputs, dtype=torch.float64)
    f = torch.cat([no_rows[:, 0], *(f for f, _ in outputs_and_roots)])
    eye = torch.eye(outputs, dtype=torch.float64)
    R = torch.cat(
        [no_rows, *(root.multiply(eye.to(root.dtype)).double() for _, root in outputs_and_roots)]
    )
    marginal = Marginal(f, R @ R.mT)
    moments = Moments(
        likelihood, marginal, outputs_move=True, like=posterior.answer_template(marginal)
    )
    integrals = integrate_with_graph(divide_by_temperature(likelihood, outputs_and_roots), outputs)
    return make_integrated_predictive(moments, integrals, rung.name, differentiable=True)


def _iterate_roots_with_graph(posterior: Posterior, x: Inputs) -> Iterator[tuple[Tensor, Root]]:
    """Yield f̂ (B, C) and a root of K for each chunk of x, with their graph.

    Raises ValueError where K is singular, because its root has no derivative there. Inside
    torch.func.vmap values cannot be read, and nothing is raised.
    """
    for f, root in posterior.iterate_means_and_roots(x, differentiable=True):
        # The squared pivots of a Cholesky factor. Other roots are smooth where variances are not 0.
        if isinstance(root, FullRoot):
            pivots = root.values.diagonal(dim1=1, dim2=2) ** 2
        else:
            pivots = root.variances()
        singular = (pivots <= SINGULAR * root.variances()).any(1)
        if not is_inside_vmap(singular) and bool(singular.any()):
            raise ValueError(
                f"The covariance of the outputs is singular at {int(singular.sum())} of "
                f"{len(singular)} inputs, and the probabilities of classes have no derivative "
                "there by its root. Select more weights (the last layer with its bias), or predict "
                "without differentiable=True."
            )
        yield f, root


def _refuse_request(request: str, remedy: str) -> NoReturn:
    """Raise ValueError for a request whose answers have no derivative.

    request, remedy: parts of the message; the remedy has no full stop.
    """
    raise ValueError(
        "predict(differentiable=True) works for Gaussian noise, and with refit='output' for the "
        f"other likelihoods of the library, but not yet for {request}. {remedy}, or predict "
        "without differentiable=True."
    )
