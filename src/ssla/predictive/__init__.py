"""From log densities to answers: distribution-like results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssla._checks import covariances, finite, in_plain_torch, warn
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
from ssla.predictive.refitted import check_refittable, refitted
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
HELD_IN_FULL = 1 << 22  # probabilities of classes that are held in float64: 32 MiB


def predict(
    posterior: Posterior, x: Inputs, refit: str | Refit = "output", differentiable: bool = False
) -> Predictive:
    """The predictive of y at x (see Posterior.predict)."""
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
        weights = rung(posterior, x)
        output = _predictive(weights.output, OutputRefit())
        check_refittable(weights)
        reasons = _reasons(rung, weights, output) if isinstance(rung, AutoRefit) else None
        answer = refitted(weights, output, rung.name, reasons)
        wanted = [
            reasons is None or bool(reasons[i]) for i in range(len(answer.diagnostics.fallback))
        ]
        failed = [
            rung != "weights"
            for rung, yes in zip(answer.diagnostics.rung or (), wanted, strict=True)
            if yes
        ]
        weights.warn(sum(failed), len(failed), "inputs have refits of the weights that")
        return _warned(answer)
    if isinstance(rung, OutputRefit) and _integrates(
        rung, posterior.likelihood.predictive, posterior.convention
    ):
        inputs = as_inputs(x)
        whole = ByChunks(rung, posterior, inputs)
        extreme: list[Tensor] = []
        parts = at_temperature_one(
            posterior.likelihood.predictive, _watched(posterior.roots_at(inputs), extreme)
        )
        rows, outputs = row_count(inputs), posterior.network.outputs
        # Answers of a float32 network are given in float32. Very many of them are also held so:
        # half the memory.
        many = rows * outputs > HELD_IN_FULL and whole.like.dtype.itemsize <= 4
        held = torch.float32 if many else torch.float64
        integrals = integrate_classes(parts, outputs, posterior.memory_budget, rows, held)
        found = integrated_predictive(whole, integrals, rung.name)
        return _flagged(found, torch.cat(extreme)) if extreme else found
    return _warned(_predictive(rung(posterior, x), rung))


def _watched(
    parts: Iterable[tuple[Tensor, Root]], extreme: list[Tensor]
) -> Iterator[tuple[Tensor, Root]]:
    """The same parts; which of their rows are extreme is appended to the list."""
    for f, root in parts:
        extreme.append(is_extreme(f, root.variances()))
        yield f, root


def _flagged(predictive: Predictive, extreme: Tensor) -> Predictive:
    """The predictive with extreme rows (N,) bool in its diagnostics."""
    return replace(predictive, diagnostics=predictive.diagnostics.with_extreme(extreme))


def _integrates(rung: Refit, likelihood: Likelihood, convention: str) -> bool:
    """Whether the probabilities of classes are integrals over f, which the output refit
    approximates for other targets.
    """
    return (
        isinstance(rung, OutputRefit)
        and rung.steps is None
        and likelihood.logit_temperature is not None
        and convention == EXACT
    )


def _reasons(auto: AutoRefit, weights: WeightLogDensity, output: Predictive) -> list[str]:
    """Why "auto" refits the weights, for each row; empty where it does not."""
    if weights.exact:
        return [""] * output.law.rows
    flags = output.diagnostics
    likely = output.probs if output.kind == "class" else output.interval(auto.level)
    return auto.reasons(weights, output.mass, flags.unconverged | flags.inaccurate, likely)


@in_plain_torch
def from_marginal(
    likelihood: Likelihood, mean: Any, covariance: Any, refit: str | Refit = "output"
) -> Predictive:
    """The predictive of y when f ~ N(mean, covariance): for distributions of f that come from
    elsewhere.

    mean (N, C), covariance (N, C, C). Works with the rungs that need no more than that: all but a
    refit of weights.
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
    finite("mean", f, "Give finite outputs.")
    finite("covariance", K, "Give finite covariances.")
    return predictive_of_outputs(likelihood, f, covariances("covariance", K), rung)


def predictive_of_outputs(
    likelihood: Likelihood, f: Tensor, K: Tensor, rung: OutputRung = OUTPUT
) -> Predictive:
    """The predictive of y for f ~ N(f, K), where K is a posterior's own covariance and needs no
    check.  (N, C), (N, C, C).
    """
    likelihood.check_outputs(f)
    return _warned(_predictive(on_marginal(rung, likelihood, f, K), rung))


def _predictive(log_density: LogDensity, rung: Refit) -> Predictive:
    """Choose the law by the support of y; closed form where there is one."""
    likelihood = log_density.likelihood
    f = log_density.marginal.mean
    support = likelihood.support_for(f.shape[1])
    empirical = isinstance(rung, NoRefit) and rung.curvature == EMPIRICAL
    convention = log_density.convention if isinstance(log_density, OutputLogDensity) else EXACT
    if likelihood.quadratic and not empirical:
        no = torch.zeros(f.shape[0], dtype=torch.bool)
        noise, moved = likelihood.covariance_for(f), None
        if (
            convention == ADDITIVE
            and log_density.moves
            and isinstance(log_density, OutputLogDensity)
        ):
            moved = additive_law(noise, log_density.marginal, log_density.prior_response)
        law = GaussianLaw(log_density, noise, isinstance(rung, NoRefit), convention, moved)
        flags = Diagnostics(rung.name, no, no, no, convention)
        return _flagged(Predictive(law, log_density.like, flags), _extreme_rows(log_density))
    if support.kind == "vector":
        raise ValueError(
            "A vector target has no closed form with NoRefit(curvature='empirical'). Use "
            "curvature='observed', or another refit."
        )
    if isinstance(log_density, OutputLogDensity) and _integrates(rung, likelihood, convention):
        parts = at_temperature_one(likelihood, [(f, full_root(log_density.marginal.covariance))])
        integrals = integrate_classes(parts, f.shape[1], DEFAULT_BUDGET)
        found = integrated_predictive(log_density, integrals, rung.name)
    elif isinstance(support, Classes):
        found = class_predictive(log_density, support.count, rung.name)
    elif support.kind == "count":
        found = count_predictive(log_density, rung.name)
    elif support.kind == "circular":
        found = circular_predictive(log_density, rung.name)
    else:
        assert isinstance(support, Continuous)
        found = grid_predictive(log_density, support, rung.name)
    found = replace(found, diagnostics=replace(found.diagnostics, convention=convention))
    return _flagged(found, _extreme_rows(log_density))


def _extreme_rows(log_density: LogDensity) -> Tensor:
    f, K = log_density.marginal
    return is_extreme(f, K.diagonal(dim1=1, dim2=2))


def _warned(predictive: Predictive) -> Predictive:
    """Warn where rows could not be integrated to their tolerance."""
    bad = predictive.diagnostics.inaccurate
    if bool(bad.any()):
        better = "" if predictive.diagnostics.refit == "output" else " refit='output' is safer."
        warn(
            f"{int(bad.sum())} of {bad.numel()} predictives are inaccurate "
            f"(refit={predictive.diagnostics.refit!r}): their density has no integral, or a spike "
            "that could not be resolved. See predictive.diagnostics and predictive.mass." + better
        )
    return predictive
