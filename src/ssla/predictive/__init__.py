"""From log densities to answers: distribution-like results."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch

from ssla._checks import covariances, finite
from ssla.data import Inputs, as_tensor
from ssla.likelihoods import Gaussian, Likelihood
from ssla.likelihoods.support import Classes, Continuous
from ssla.numerics.quadrature import Regions
from ssla.posterior import Posterior
from ssla.predictive.affine import AffinePredictive, affine
from ssla.predictive.circular import CircularPredictive, circular_predictive
from ssla.predictive.classes import ClassPredictive, class_predictive
from ssla.predictive.counts import CountPredictive, count_predictive
from ssla.predictive.gaussian import Ellipsoid, GaussianPredictive, additive_law
from ssla.predictive.grid import GridPredictive, grid_predictive
from ssla.predictive.mixture import mixture
from ssla.predictive.mixture_classes import ClassMixture
from ssla.predictive.mixture_scalar import ScalarMixture
from ssla.predictive.mixture_vector import VectorMixture
from ssla.predictive.predictive import Diagnostics, Predictive, kind_of
from ssla.predictive.refitted import doubts, refitted
from ssla.priors import ADDITIVE, EXACT
from ssla.refit import (
    AutoRefit,
    LogDensity,
    NoRefit,
    OutputLogDensity,
    OutputRefit,
    OutputRung,
    Refit,
    WeightRefit,
    on_marginal,
    resolve,
)
from ssla.refit.increments import EMPIRICAL

__all__ = [
    "AffinePredictive",
    "CircularPredictive",
    "ClassMixture",
    "ClassPredictive",
    "CountPredictive",
    "Diagnostics",
    "Ellipsoid",
    "GaussianPredictive",
    "GridPredictive",
    "Predictive",
    "Regions",
    "ScalarMixture",
    "VectorMixture",
    "affine",
    "from_marginal",
    "kind_of",
    "mixture",
    "predict",
]


def predict(posterior: Posterior, x: Inputs, refit: str | Refit = "output") -> Predictive:
    """The predictive of y at x (see Posterior.predict)."""
    if not isinstance(posterior, Posterior):
        raise TypeError(f"predict needs a Posterior, as ssla.fit returns it, but got {type(posterior).__name__}.")
    rung = resolve(refit)
    if posterior.convention != EXACT and not isinstance(rung, OutputRung):
        raise ValueError(
            f"refit={rung.name!r} knows the exact convention only, but this posterior has convention={posterior.convention!r}. "
            "Use refit='output', 'newton' or 'none', or posterior.with_prior(posterior.prior)."
        )
    if isinstance(rung, WeightRefit | AutoRefit):
        weights = rung(posterior, x)
        output = _answer(weights.output, OutputRefit(), warn=False)
        reasons = doubts(rung, weights, output) if isinstance(rung, AutoRefit) else None
        answer = refitted(weights, output, rung.name, reasons)
        wanted = [reasons is None or bool(reasons[i]) for i in range(len(answer.diagnostics.fallback))]
        failed = [rung != "weights" for rung, yes in zip(answer.diagnostics.rung or (), wanted, strict=True) if yes]
        weights.warn(sum(failed), len(failed), "inputs have refits of the weights that", stacklevel=4)
        return _warned(answer)
    return _answer(rung(posterior, x), rung)


def from_marginal(likelihood: Likelihood, mean: Any, covariance: Any, refit: str | Refit = "output") -> Predictive:
    """The predictive of y when f ~ N(mean, covariance): for beliefs about f that come from elsewhere.

    mean (N, C), covariance (N, C, C). Works with the rungs that need no more than that: all but a refit of weights.
    """
    rung = resolve(refit)
    if not isinstance(rung, OutputRung):
        raise ValueError(f"refit={rung.name!r} needs the network and its data; from f alone use 'output', 'newton' or 'none'.")
    f, K = as_tensor(mean), as_tensor(covariance)
    if f.dim() != 2 or K.shape != (*f.shape, f.shape[1]):
        raise ValueError(f"mean must be (N, C) and covariance (N, C, C), but they are {tuple(f.shape)} and {tuple(K.shape)}.")
    finite("mean", f, "Give finite outputs.")
    finite("covariance", K, "Give finite covariances.")
    K = covariances("covariance", K)
    likelihood.check_outputs(f)
    return _answer(on_marginal(rung, likelihood, f, K), rung)


def _answer(log_density: LogDensity, rung: Refit, warn: bool = True) -> Predictive:
    """Choose the form of the answer by the support of y; closed form where there is one."""
    told = _warned if warn else _as_it_is
    likelihood = log_density.likelihood
    f = log_density.marginal.mean
    support = likelihood.support_for(f.shape[1])
    empirical = isinstance(rung, NoRefit) and rung.curvature == EMPIRICAL
    convention = log_density.convention if isinstance(log_density, OutputLogDensity) else EXACT
    if isinstance(likelihood, Gaussian) and not empirical:
        no = torch.zeros(f.shape[0], dtype=torch.bool)
        flags = Diagnostics(rung.name, no, no, no, convention)
        noise, law = likelihood.covariance_for(f), None
        if convention == ADDITIVE and log_density.moves and isinstance(log_density, OutputLogDensity):
            law = additive_law(noise, log_density.marginal, log_density.prior_response)
        return GaussianPredictive(log_density, noise, isinstance(rung, NoRefit), flags, law)
    if support.kind == "vector":
        raise ValueError(
            "A vector target has no closed form with NoRefit(curvature='empirical'). Use curvature='observed', or another refit."
        )
    if isinstance(support, Classes):
        classes = class_predictive(log_density, support.count, rung.name)
        return replace(classes, diagnostics=replace(classes.diagnostics, convention=convention))
    if support.kind == "count":
        counts = count_predictive(log_density, rung.name)
        return told(replace(counts, diagnostics=replace(counts.diagnostics, convention=convention)))
    if support.kind == "circular":
        around = circular_predictive(log_density, rung.name)
        return told(replace(around, diagnostics=replace(around.diagnostics, convention=convention)))
    assert isinstance(support, Continuous)
    grid = grid_predictive(log_density, support, rung.name)
    return told(replace(grid, diagnostics=replace(grid.diagnostics, convention=convention)))


def _as_it_is(predictive: Predictive) -> Predictive:
    return predictive


def _warned(predictive: Predictive) -> Predictive:
    """Say it aloud where rows could not be integrated to their tolerance."""
    bad = predictive.diagnostics.inaccurate
    if bool(bad.any()):
        better = "" if predictive.diagnostics.refit == "output" else " refit='output' is safer."
        warnings.warn(
            f"{int(bad.sum())} of {bad.numel()} predictives are inaccurate (refit={predictive.diagnostics.refit!r}): their "
            "density has no integral, or a spike that could not be resolved. See predictive.diagnostics and predictive.mass."
            + better,
            UserWarning,
            stacklevel=4,
        )
    return predictive
