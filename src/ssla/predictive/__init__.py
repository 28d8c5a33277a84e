"""From log densities to answers: distribution-like results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssla._checks import check_finite, checked_covariances, in_plain_torch, warn
from ssla.curvature.memory import DEFAULT_BUDGET
from ssla.data import Inputs, as_inputs, as_tensor, row_count
from ssla.likelihoods import Likelihood
from ssla.likelihoods.support import Classes, Continuous
from ssla.maths.quadrature import Regions
from ssla.maths.roots import Root, full_root
from ssla.predictive.affine import affine
from ssla.predictive.circular import circular_predictive
from ssla.predictive.class_integrals import at_temperature_one, integrate_classes
from ssla.predictive.class_law import class_predictive, integrated_predictive
from ssla.predictive.count_law import count_predictive
from ssla.predictive.differentiable import differentiable_predictive
from ssla.predictive.gaussian_law import Ellipsoid, GaussianLaw, additive_law
from ssla.predictive.grid_law import grid_predictive
from ssla.predictive.law import Law
from ssla.predictive.mixing import mixture
from ssla.predictive.predictive import Diagnostics, Predictive, is_extreme
from ssla.predictive.refitted import check_refittable, make_refitted_predictive
from ssla.predictive.transformed import transformed
from ssla.priors import ADDITIVE, EXACT
from ssla.refit import (
    AutoRefit,
    ByChunks,
    LogDensity,
    NoRefit,
    OutputLogDensity,
    OutputRefit,
    OutputRung,
    Refit,
    WeightLogDensity,
    WeightRefit,
    on_marginal,
    resolve,
)
from ssla.refit.increments import EMPIRICAL

if TYPE_CHECKING:
    from ssla.posterior import Posterior

__all__ = [
    "Diagnostics",
    "Ellipsoid",
    "GaussianLaw",
    "Law",
    "Predictive",
    "Regions",
    "affine",
    "from_marginal",
    "mixture",
    "predict",
    "predictive_of_outputs",
    "transformed",
]

OUTPUT = OutputRefit()
# probabilities of classes up to which they are held in float64 (32 MiB); a guess
MOST_IN_FLOAT64 = 1 << 22


def predict(
    posterior: Posterior, x: Inputs, refit: str | Refit = "output", differentiable: bool = False
) -> Predictive:
    """Return the predictive of y at x (see Posterior.predict).

    TypeError unless it is a posterior; ValueError where refit, convention and target do not go
    together.
    """
    if not hasattr(posterior, "bound_prior"):  # the class itself stands above this package
        raise TypeError(
            "predict needs a Posterior, as ssla.fit returns it, but got "
            f"{type(posterior).__name__}."
        )
    rung = resolve(refit)
    if differentiable:
        return differentiable_predictive(posterior, x, rung)
    if posterior.convention != EXACT and not isinstance(rung, OutputRung):
        raise ValueError(
            f"refit={rung.name!r} works with the exact convention only, but this posterior has "
            f"convention={posterior.convention!r}. Use refit='output', 'newton' or 'none', or "
            "posterior.with_prior(posterior.prior)."
        )
    if isinstance(rung, WeightRefit | AutoRefit):
        return _predict_by_weights(posterior, x, rung)
    if isinstance(rung, OutputRefit) and _integrates_classes(
        rung, posterior.likelihood.predictive, posterior.convention
    ):
        return _predict_classes(posterior, x, rung)
    return _warn_if_inaccurate(_predictive_of(rung(posterior, x), rung))


def _predict_by_weights(
    posterior: Posterior, x: Inputs, rung: WeightRefit | AutoRefit
) -> Predictive:
    """Refit the weights at x: at every row, or for "auto" at rows where the output rung is
    doubtful. Warns of refits that failed; ValueError for targets without such a predictive.
    """
    weights = rung(posterior, x)
    output = _predictive_of(weights.output, OUTPUT)
    check_refittable(weights)
    reasons = _refit_reasons(rung, weights, output) if isinstance(rung, AutoRefit) else None
    predictive = make_refitted_predictive(weights, output, rung.name, reasons)
    answered_by = predictive.diagnostics.rung or ()
    failed = [
        name != "weights" for i, name in enumerate(answered_by) if reasons is None or reasons[i]
    ]
    weights.warn_of_failures(sum(failed), len(failed), "inputs have refits of the weights that")
    return _warn_if_inaccurate(predictive)


def _predict_classes(posterior: Posterior, x: Inputs, rung: OutputRefit) -> Predictive:
    """Integrate the probabilities of classes at x over f, a chunk of rows at a time."""
    inputs = as_inputs(x)
    log_density = ByChunks(rung, posterior, inputs)
    extreme: list[Tensor] = []

    def chunks() -> Iterator[tuple[Tensor, Root]]:
        """Yield f̂ and a root of K, and note on the way which rows are extreme."""
        for f, root in posterior.roots_at(inputs):
            extreme.append(is_extreme(f, root.variances()))
            yield f, root

    parts = at_temperature_one(posterior.likelihood.predictive, chunks())
    rows, outputs = row_count(inputs), posterior.network.outputs
    # Answers of a float32 network are given in float32. Very many of them are also held so: half
    # the memory.
    many = rows * outputs > MOST_IN_FLOAT64 and log_density.like.dtype.itemsize <= 4
    dtype = torch.float32 if many else torch.float64
    integrals = integrate_classes(parts, outputs, posterior.memory_budget, rows, dtype)
    predictive = integrated_predictive(log_density, integrals, rung.name)
    return _with_extreme(predictive, torch.cat(extreme)) if extreme else predictive


def _with_extreme(predictive: Predictive, extreme: Tensor) -> Predictive:
    """Return the predictive with extreme rows (N,) bool in its diagnostics."""
    return replace(predictive, diagnostics=predictive.diagnostics.with_extreme(extreme))


def _integrates_classes(rung: Refit, likelihood: Likelihood, convention: str) -> bool:
    """Tell whether the answers are probabilities of classes, which are integrated over f.

    The output refit approximates such an integral for other targets.
    """
    return (
        isinstance(rung, OutputRefit)
        and rung.steps is None
        and likelihood.logit_temperature is not None
        and convention == EXACT
    )


def _refit_reasons(auto: AutoRefit, weights: WeightLogDensity, output: Predictive) -> list[str]:
    """Return for each row why "auto" refits the weights; an empty text where it does not."""
    if weights.exact:
        return [""] * output.law.rows
    flags = output.diagnostics
    likely = output.probs if output.kind == "class" else output.interval(auto.level)
    return auto.reasons(weights, output.mass, flags.unconverged | flags.inaccurate, likely)


@in_plain_torch
def from_marginal(
    likelihood: Likelihood, mean: Any, covariance: Any, refit: str | Refit = "output"
) -> Predictive:
    """Return the predictive of y when f ~ N(mean, covariance): for distributions of f that come
    from elsewhere.

    mean (N, C), covariance (N, C, C). Works with the rungs that need no more than that: all but a
    refit of weights. ValueError for other rungs, shapes, and numbers that are not finite.
    """
    rung = resolve(refit)
    if not isinstance(rung, OutputRung):
        raise ValueError(
            f"refit={rung.name!r} needs the network and its data; from f alone use 'output', "
            "'newton' or 'none'."
        )
    f, K = as_tensor(mean), as_tensor(covariance)
    if f.dim() != 2 or K.shape != (*f.shape, f.shape[1]):
        raise ValueError(
            f"mean must be (N, C) and covariance (N, C, C), but they are {tuple(f.shape)} and "
            f"{tuple(K.shape)}."
        )
    check_finite("mean", f, "Give finite outputs.")
    check_finite("covariance", K, "Give finite covariances.")
    return predictive_of_outputs(likelihood, f, checked_covariances("covariance", K), rung)


def predictive_of_outputs(
    likelihood: Likelihood, f: Tensor, K: Tensor, rung: OutputRung = OUTPUT
) -> Predictive:
    """Return the predictive of y for f ~ N(f, K), with f (N, C) and K (N, C, C).

    K is a posterior's own covariance and needs no check. ValueError where f is outside the domain
    of the likelihood.
    """
    likelihood.check_outputs(f)
    return _warn_if_inaccurate(_predictive_of(on_marginal(rung, likelihood, f, K), rung))


def _predictive_of(log_density: LogDensity, rung: Refit) -> Predictive:
    """Choose the law by the support of y, in closed form where there is one.

    ValueError for a vector target with the empirical curvature.
    """
    likelihood = log_density.likelihood
    f, K = log_density.marginal
    support = likelihood.support_for(f.shape[1])
    empirical = isinstance(rung, NoRefit) and rung.curvature == EMPIRICAL
    convention = log_density.convention if isinstance(log_density, OutputLogDensity) else EXACT
    if likelihood.quadratic and not empirical:
        predictive = _make_gaussian_predictive(log_density, rung, convention)
    elif support.kind == "vector":
        raise ValueError(
            "A vector target has no closed form with NoRefit(curvature='empirical'). Use "
            "curvature='observed', or another refit."
        )
    elif isinstance(log_density, OutputLogDensity) and _integrates_classes(
        rung, likelihood, convention
    ):
        parts = at_temperature_one(likelihood, [(f, full_root(K))])
        integrals = integrate_classes(parts, f.shape[1], DEFAULT_BUDGET)
        predictive = integrated_predictive(log_density, integrals, rung.name)
    elif isinstance(support, Classes):
        predictive = class_predictive(log_density, support.count, rung.name)
    elif support.kind == "count":
        predictive = count_predictive(log_density, rung.name)
    elif support.kind == "circular":
        predictive = circular_predictive(log_density, rung.name)
    else:
        assert isinstance(support, Continuous)
        predictive = grid_predictive(log_density, support, rung.name)
    flags = replace(predictive.diagnostics, convention=convention)
    predictive = replace(predictive, diagnostics=flags)
    return _with_extreme(predictive, is_extreme(f, K.diagonal(dim1=1, dim2=2)))


def _make_gaussian_predictive(log_density: LogDensity, rung: Refit, convention: str) -> Predictive:
    """Make the closed form for Gaussian noise; no row is flagged.

    ValueError where the additive convention has no integral.
    """
    f = log_density.marginal.mean
    noise, moved = log_density.likelihood.covariance_for(f), None
    if convention == ADDITIVE and log_density.moves and isinstance(log_density, OutputLogDensity):
        moved = additive_law(noise, log_density.marginal, log_density.prior_response)
    law = GaussianLaw(log_density, noise, isinstance(rung, NoRefit), convention, moved)
    no = torch.zeros(len(f), dtype=torch.bool)
    return Predictive(law, log_density.like, Diagnostics(rung.name, no, no, no, convention))


def _warn_if_inaccurate(predictive: Predictive) -> Predictive:
    """Warn if rows could not be integrated to their tolerance; return the predictive."""
    inaccurate = predictive.diagnostics.inaccurate
    if bool(inaccurate.any()):
        remedy = "" if predictive.diagnostics.refit == "output" else " refit='output' is safer."
        warn(
            f"{int(inaccurate.sum())} of {inaccurate.numel()} predictives are inaccurate "
            f"(refit={predictive.diagnostics.refit!r}): their density has no integral, or a spike "
            "that could not be resolved. See predictive.diagnostics and predictive.mass." + remedy
        )
    return predictive
