"""From log densities to answers: distribution-like results.

Words of this package:

    N, C, D       inputs (rows), outputs of the network, and values of y in a row
    f̂, K          mean (N, C) and covariance (N, C, C) of the outputs: the marginal at each input
    refit         the mode of the parameters after (x, y) was added to the data; of the outputs, or
                  of all weights (docs/mathematics.md)
    rung          a kind of refit, by name: "output", "weights", "auto", …
    increments    the parts of the un-normalised log density of y: of the likelihood, of the prior
                  and of the curvature. `total` is their sum
    mass          the integral (or sum) of the un-normalised density over y; the truth has mass 1
    law           the distribution of y at N inputs, in float64 (`Law`)
    predictive    a law with the shapes, checks and dtypes of its answers (`Predictive`)
    row flagged   something happened in it that the user may want to know (`Diagnostics`)
    epistemic     the part of the variance that comes from the uncertainty of f, also "doubt"
    aleatoric     the part of the variance that is noise
"""

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
from ssla.predictive.circular import make_circular_predictive
from ssla.predictive.class_integrals import divide_by_temperature, integrate_classes
from ssla.predictive.class_law import make_class_predictive, make_integrated_predictive
from ssla.predictive.count_law import make_count_predictive
from ssla.predictive.differentiable import make_differentiable_predictive
from ssla.predictive.gaussian_law import Ellipsoid, GaussianLaw, multiply_by_prior
from ssla.predictive.grid_law import make_grid_predictive
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
    make_log_density_of_marginal,
    resolve,
)
from ssla.refit.increments import EMPIRICAL, FISHER

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
    """Return the predictive of y at the inputs x (see Posterior.predict).

    refit: a rung or its name. differentiable: whether the answers carry gradients in x and y.
    Raises TypeError unless `posterior` is a Posterior, and ValueError where refit, convention and
    target cannot be combined.
    """
    # This package cannot import Posterior. Only a Posterior has this attribute.
    if not hasattr(posterior, "bound_prior"):
        raise TypeError(
            "predict needs a Posterior, as ssla.fit returns it, but got "
            f"{type(posterior).__name__}."
        )

    rung = resolve(refit)
    if differentiable:
        return make_differentiable_predictive(posterior, x, rung)
    if posterior.convention != EXACT and not isinstance(rung, OutputRung | WeightRefit):
        raise ValueError(
            f"refit={rung.name!r} works with the exact convention only, but this posterior has "
            f"convention={posterior.convention!r}. Use refit='output', 'newton', 'none' or "
            "'weights', or posterior.with_prior(posterior.prior)."
        )
    if isinstance(rung, WeightRefit | AutoRefit):
        return _predict_by_weights(posterior, x, rung)

    # Classes come before the general case: they are integrated without the K of all rows at once.
    if isinstance(rung, OutputRefit) and _integrates_classes(
        rung, posterior.likelihood.predictive, posterior.convention
    ):
        return _predict_classes(posterior, x, rung)
    return _warn_if_inaccurate(_make_predictive(rung(posterior, x), rung))


def _predict_by_weights(
    posterior: Posterior, x: Inputs, rung: WeightRefit | AutoRefit
) -> Predictive:
    """Return the predictive at x by refits of the weights.

    Every row is refitted; with the rung "auto", only the rows in which the output rung is doubtful.
    Warns of refits that failed. Raises ValueError for angles, and for vectors without a closed
    form.
    """
    weights = rung(posterior, x)
    output = _make_predictive(weights.output, OUTPUT)
    check_refittable(weights)
    reasons = _find_refit_reasons(rung, weights, output) if isinstance(rung, AutoRefit) else None
    predictive = make_refitted_predictive(weights, output, rung.name, reasons)
    answered_by = predictive.diagnostics.rung or ()
    # A row with a refit has failed if another rung answered for it.
    failed = [
        rung_name != "weights"
        for row, rung_name in enumerate(answered_by)
        if reasons is None or reasons[row]
    ]
    weights.warn_of_failures(sum(failed), len(failed), "inputs have refits of the weights that")
    return _warn_if_inaccurate(predictive)


def _predict_classes(posterior: Posterior, x: Inputs, rung: OutputRefit) -> Predictive:
    """Return the predictive of classes at x, whose probabilities are integrals over f.

    They are computed a chunk of rows at a time, so that K of all rows is never held.
    """
    inputs = as_inputs(x)
    log_density = ByChunks(rung, posterior, inputs)
    extreme: list[Tensor] = []

    def iterate_roots_and_flag_extremes() -> Iterator[tuple[Tensor, Root]]:
        """Yield f̂ (B, C) and a root of K for each chunk, and append its flags to `extreme`."""
        for f, root in posterior.iterate_means_and_roots(inputs):
            extreme.append(is_extreme(f, root.variances()))
            yield f, root

    scaled_roots = divide_by_temperature(
        posterior.likelihood.predictive, iterate_roots_and_flag_extremes()
    )
    rows = row_count(inputs)
    outputs = posterior.network.outputs

    # A float32 network answers in float32. Where there are very many answers they are also held in
    # float32, which takes half the memory.
    has_many_answers = rows * outputs > MOST_IN_FLOAT64
    is_single = log_density.like.dtype.itemsize <= 4
    dtype = torch.float32 if has_many_answers and is_single else torch.float64
    integrals = integrate_classes(scaled_roots, outputs, posterior.memory_budget, rows, dtype)
    predictive = make_integrated_predictive(log_density, integrals, rung.name)

    # Without rows there are no chunks, and so no flags.
    return _flag_extreme_rows(predictive, torch.cat(extreme)) if extreme else predictive


def _flag_extreme_rows(predictive: Predictive, extreme: Tensor) -> Predictive:
    """Return the predictive with these rows (N,) bool flagged as extreme in its diagnostics."""
    return replace(predictive, diagnostics=predictive.diagnostics.with_extreme(extreme))


def _integrates_classes(rung: Refit, likelihood: Likelihood, convention: str) -> bool:
    """Tell whether class probabilities are computed as integrals over f, in place of refits.

    This is so where a refit would only approximate this integral: for the output refit to the mode,
    a likelihood of classes with a temperature, and the exact convention.
    """
    return (
        isinstance(rung, OutputRefit)
        and rung.steps is None
        and likelihood.logit_temperature is not None
        and convention == EXACT
    )


def _find_refit_reasons(
    auto: AutoRefit, weights: WeightLogDensity, output: Predictive
) -> list[str]:
    """Return for each row why "auto" refits the weights; an empty text where it does not.

    weights: the log density of refits of the weights. output: the predictive of the output rung,
    whose mass and flags decide.
    """
    if weights.equals_output_refit:  # a refit of the weights gives the same answer
        return [""] * output.law.rows
    flags = output.diagnostics
    likely = output.probs if output.kind == "class" else output.interval(auto.level)
    return auto.find_reasons(weights, output.mass, flags.unconverged | flags.inaccurate, likely)


@in_plain_torch
def from_marginal(
    likelihood: Likelihood, mean: Any, covariance: Any, refit: str | Refit = "output"
) -> Predictive:
    """Return the predictive of y for outputs f ~ N(mean, covariance) that the caller gives.

    mean (N, C), covariance (N, C, C). No posterior is needed. refit: a rung or its name. A refit of
    the weights needs the network, so it is refused. Raises ValueError for such a rung, for other
    shapes, and for numbers that are not finite.
    """
    rung = resolve(refit)
    if not isinstance(rung, OutputRung):
        raise ValueError(
            f"refit={rung.name!r} needs the network and its data; from f alone use 'output', "
            "'newton' or 'none'."
        )
    if isinstance(rung, NoRefit) and rung.data_curvature != FISHER:
        raise ValueError(
            "NoRefit(data_curvature='observed') sums the curvature of training rows, and f alone "
            "has none. Use data_curvature='fisher': the covariance that you give is used as it is."
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
    """Return the predictive of y for outputs f ~ N(f̂, K).

    f (N, C): f̂. K (N, C, C). rung: the kind of refit. K is not checked: it must be symmetric and
    positive semi-definite, as the library computes it. Raises ValueError where f is outside the
    domain of the likelihood.
    """
    likelihood.check_outputs(f)
    return _warn_if_inaccurate(
        _make_predictive(make_log_density_of_marginal(rung, likelihood, f, K), rung)
    )


def _make_predictive(log_density: LogDensity, rung: Refit) -> Predictive:
    """Return the predictive of a log density, which a rung made.

    The support of y chooses the law, and a closed form is preferred. Raises ValueError for a vector
    target with the empirical curvature.
    """
    likelihood = log_density.likelihood
    f, K = log_density.marginal
    support = likelihood.support_for(f.shape[1])
    empirical = isinstance(rung, NoRefit) and rung.curvature == EMPIRICAL
    convention = log_density.convention if isinstance(log_density, OutputLogDensity) else EXACT

    # The empirical curvature depends on y, so that not even Gaussian noise has a closed form.
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
        scaled_roots = divide_by_temperature(likelihood, [(f, full_root(K))])
        integrals = integrate_classes(scaled_roots, f.shape[1], DEFAULT_BUDGET)
        predictive = make_integrated_predictive(log_density, integrals, rung.name)
    elif isinstance(support, Classes):
        predictive = make_class_predictive(log_density, support.count, rung.name)
    elif support.kind == "count":
        predictive = make_count_predictive(log_density, rung.name)
    elif support.kind == "circular":
        predictive = make_circular_predictive(log_density, rung.name)
    else:
        assert isinstance(support, Continuous)
        predictive = make_grid_predictive(log_density, support, rung.name)
    flags = replace(predictive.diagnostics, convention=convention)
    predictive = replace(predictive, diagnostics=flags)
    return _flag_extreme_rows(predictive, is_extreme(f, K.diagonal(dim1=1, dim2=2)))


def _make_gaussian_predictive(log_density: LogDensity, rung: Refit, convention: str) -> Predictive:
    """Return the closed-form predictive for Gaussian noise; no row is flagged.

    rung: which made the log density. convention: where the prior enters. Raises ValueError where
    the density under the additive convention has no integral.
    """
    f = log_density.marginal.mean
    noise = log_density.likelihood.covariance_for(f)
    moved = None
    if (
        convention == ADDITIVE
        and log_density.outputs_move
        and isinstance(log_density, OutputLogDensity)
    ):
        moved = multiply_by_prior(noise, log_density.marginal, log_density.prior_response)

    # Without a refit the density has a mass below one.
    loses_mass = isinstance(rung, NoRefit)
    law = GaussianLaw(log_density, noise, loses_mass, convention, moved)
    unflagged = torch.zeros(len(f), dtype=torch.bool)
    flags = Diagnostics(rung.name, unflagged, unflagged, unflagged, convention)
    return Predictive(law, log_density.like, flags)


def _warn_if_inaccurate(predictive: Predictive) -> Predictive:
    """Return the predictive unchanged; warn if rows were not integrated to their tolerance."""
    inaccurate = predictive.diagnostics.inaccurate
    if bool(inaccurate.any()):
        remedy = "" if predictive.diagnostics.refit == "output" else " refit='output' is safer."
        warn(
            f"{int(inaccurate.sum())} of {inaccurate.numel()} predictives are inaccurate "
            f"(refit={predictive.diagnostics.refit!r}): their density has no integral, or a spike "
            "that could not be resolved. See predictive.diagnostics and predictive.mass." + remedy
        )
    return predictive
