"""Predictives that carry gradients in x and y, by reverse-mode autograd.

Gaussian noise has a closed form and classes are integrals. Counts and other numbers are in
`ssla.predictive.implicit`.

The values are those of the plain predictive. f̂ and K at x are differentiable because the network
is (see `Posterior.linearised`). The covariance of θ does not depend on x.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from ssla._checks import batched
from ssla.data import Inputs
from ssla.likelihoods import Likelihood
from ssla.maths.roots import FullRoot, Root
from ssla.predictive.class_integrals import at_temperature_one, integrate_with_graph
from ssla.predictive.class_law import integrated_predictive
from ssla.predictive.gaussian_law import GaussianLaw
from ssla.predictive.implicit import pointwise_predictive
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
    """f̂ and K with their graph, in the place of a log density: the increments of a refit carry
    no gradient and are refused.
    """

    likelihood: Likelihood
    marginal: Marginal
    moves: bool
    like: Tensor

    def __call__(self, y: Tensor) -> Increments:
        _refuse_increments()

    def at(self, y: Tensor, rows: Tensor | None = None) -> Density:
        _refuse_increments()


def _refuse_increments() -> NoReturn:
    raise ValueError(
        "Increments carry no gradient. Ask posterior.predict(x).increments(y), without "
        "differentiable=True."
    )


def differentiable_predictive(posterior: Posterior, x: Inputs, rung: Refit) -> Predictive:
    """The predictive of y at x, with the graph of x.

    ValueError where there is no derivative of the answers.
    """
    likelihood = posterior.likelihood.predictive
    if posterior.convention != EXACT:
        _refuse(
            f"convention={posterior.convention!r}",
            "Use posterior.with_prior(posterior.prior), the exact convention",
        )
    if not isinstance(rung, OutputRung):
        _refuse(f"refit={rung.name!r}", "Use refit='output'")
    if likelihood.quadratic and not (isinstance(rung, NoRefit) and rung.curvature == EMPIRICAL):
        marginal = posterior.outputs_at(x, differentiable=True)
        moments = Moments(likelihood, marginal, rung.moves, posterior.like(marginal))
        no = torch.zeros(len(marginal.mean), dtype=torch.bool)
        law = GaussianLaw(
            moments, likelihood.covariance_for(marginal.mean), isinstance(rung, NoRefit)
        )
        return Predictive(
            law, moments.like, Diagnostics(rung.name, no, no, no), differentiable=True
        )
    if not likelihood.differentiable and likelihood.logit_temperature is None:
        _refuse(
            f"{type(likelihood).__name__}() with refit={rung.name!r}",
            "posterior.marginal(x, differentiable=True) has gradients for every likelihood",
        )
    if not isinstance(rung, OutputRefit) or rung.steps is not None:
        _refuse(f"{type(likelihood).__name__}() with refit={rung.name!r}", "Use refit='output'")
    if likelihood.differentiable:
        return pointwise_predictive(posterior, x, rung)
    parts, outputs = list(_regular(posterior, x)), posterior.network.outputs
    f = torch.cat([torch.empty(0, outputs, dtype=torch.float64), *(f for f, _ in parts)])
    eye = torch.eye(outputs, dtype=torch.float64)
    R = torch.cat(
        [
            torch.empty(0, outputs, outputs, dtype=torch.float64),
            *(r.times(eye.to(r.dtype)).double() for _, r in parts),
        ]
    )
    marginal = Marginal(f, R @ R.mT)
    moments = Moments(likelihood, marginal, True, posterior.like(marginal))
    integrals = integrate_with_graph(at_temperature_one(likelihood, parts), outputs)
    return integrated_predictive(moments, integrals, rung.name, differentiable=True)


def _regular(posterior: Posterior, x: Inputs) -> Iterator[tuple[Tensor, Root]]:
    """f̂ and roots of K. ValueError where K is singular: its root then has no derivative."""
    for f, root in posterior.roots_at(x, differentiable=True):
        pivots = (
            root.values.diagonal(dim1=1, dim2=2) ** 2
            if isinstance(root, FullRoot)
            else root.variances()
        )
        bad = (pivots <= SINGULAR * root.variances()).any(1)
        if not batched(bad) and bool(bad.any()):
            raise ValueError(
                f"The covariance of the outputs is singular at {int(bad.sum())} of {len(bad)} "
                "inputs, and the probabilities of classes have no derivative there by its root. "
                "Select more weights (the last layer with its bias), or predict without "
                "differentiable=True."
            )
        yield f, root


def _refuse(what: str, instead: str) -> NoReturn:
    raise ValueError(
        "predict(differentiable=True) works for Gaussian noise, and with refit='output' for the "
        f"other likelihoods of the library, but not yet for {what}. {instead}, or predict without "
        "differentiable=True."
    )
