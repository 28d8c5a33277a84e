"""Another prior for the same data: what the sums allow, and what needs a pass.

H = S + T holds the data in S and the prior in T = −∇² log π, so another prior is another
factorisation and no pass. Whether θ̂ can follow depends on what the sums know of the likelihood
away from θ̂:

  Gaussian noise, last layer   dense or kfac: the statistics determine ℓ_D exactly: θ̂ moves, for
                               any prior
  anything else                θ̂ stays (as in a fit with mode="as_is"), or is polished again on
                               the data

The output rungs know a prior by its gradient and curvature at θ̂. For a Gaussian prior that is all
of it; for another the exact increments are a matter of refitting weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributions import Distribution

from ssla._checks import one_of
from ssla.fitting.again import polish_again
from ssla.fitting.prior_choice import described
from ssla.fitting.sums import climbing
from ssla.fitting.variational import recentred
from ssla.priors import (
    ADDITIVE,
    CONVENTIONS,
    EXACT,
    BoundPrior,
    Flat,
    Prior,
    as_prior,
    check_at,
)
from ssla.report import AS_IS, LAPLACE, POLISH, TILT
from ssla.values import Statistics

if TYPE_CHECKING:
    from ssla.posterior import Posterior

KEPT = (
    "θ̂ was kept, {residual:.3g} posterior sd from its mode ({each:.2g} per parameter); give data= "
    "to polish again"
)
MOST_STEPS = 200
DECREMENT = 1e-12  # posterior standard deviations from the mode at which the ascent ends
# a squared decrement below which the gain is below rounding error, and the full step is safe
TRUSTED = 1e-10


def with_prior(
    posterior: Posterior, prior: Prior | Distribution, convention: str, data: Any
) -> Posterior:
    """See Posterior.with_prior."""
    one_of("convention", convention, CONVENTIONS)
    new = as_prior(prior)
    check_at(new, new.bind(posterior.network.layout), posterior.theta)
    if data is not None:
        return _polished(posterior, new, convention, data)
    moved = replace(posterior, prior=new, convention=convention)
    if posterior.variational is not None:
        return _averages_kept(moved)
    if convention != EXACT:
        # data too few for it are an error of the change, not of a later prediction
        _ = moved.data_operator
    if posterior.follows_mode:
        theta, statistics = mode_from_sums(
            posterior.statistics, moved.objective_prior, posterior.theta
        )
        moved = replace(moved, theta=theta, statistics=statistics)
        return described(
            moved, "moved to its mode from the sums, without a pass; the noise was kept", POLISH
        )
    return described(moved, KEPT, TILT if posterior.mode == TILT else AS_IS)


def _averages_kept(moved: Posterior) -> Posterior:
    """A variational Gaussian under another prior, with its averages over the data kept."""
    if moved.convention != EXACT:
        report = replace(moved.report, gaussian=LAPLACE)
        laplace = replace(moved, variational=None, report=report)
        _ = laplace.data_operator
        what = (
            "this convention is defined at the mode: the Gaussian there (laplace) took the "
            "variational one's place; "
        )
        return described(laplace, what + KEPT, TILT if moved.mode == TILT else AS_IS)
    there = recentred(moved)
    return described(there, _how_it_moved(there), TILT if moved.mode == TILT else AS_IS)


def _how_it_moved(there: Posterior) -> str:
    """What a change of the prior did to a variational Gaussian, for the report."""
    if there.tilted:
        what = "the covariance has changed and the mean stayed at the trained weights"
    elif there.sums.curvature.whole:
        what = "the Gaussian has moved"
    else:
        structure = there.sums.curvature.name
        what = (
            f"the mean has moved only approximately, by the curvature that structure={structure!r} "
            "keeps of the data"
        )
    return f"{what}; the averages over the data and θ̂ were kept. Give data= to fit it again"


def _polished(posterior: Posterior, prior: Prior, convention: str, data: Any) -> Posterior:
    """A fresh polish on the data, from the trained weights; the noise stays what it is."""
    objective = Flat() if convention == ADDITIVE else prior
    again = polish_again(posterior, objective, data)
    passes = posterior.report.passes + again.report.passes
    found = replace(
        again, prior=prior, convention=convention, report=replace(again.report, passes=passes)
    )
    return described(found, "polished again on the data; the noise was kept", POLISH)


def mode_from_sums(
    statistics: Statistics, bound: BoundPrior, theta: Tensor
) -> tuple[Tensor, Statistics]:
    """The mode of ℓ_D + log π where ℓ_D is the quadratic of the sums, and the sums there.

    One Newton step for a Gaussian prior, a safeguarded ascent for another. Fails after `MOST_STEPS`
    steps.
    """
    height = float(bound.log_prob(theta))
    for _ in range(MOST_STEPS):
        gradient = statistics.gradient + bound.gradient(theta)
        step = climbing(statistics.curvature, bound.precision(theta)).solve(gradient)
        decrement = float(gradient @ step)
        if decrement <= DECREMENT**2 * (1 + abs(height)):
            return theta, statistics
        rise, bend = (
            float(step @ statistics.gradient),
            float(step @ statistics.curvature.push(step)),
        )
        size = 1.0
        while True:
            there = float(bound.log_prob(theta + size * step))
            gain = size * rise - 0.5 * size**2 * bend + there - height
            if gain >= 1e-4 * size * decrement or decrement <= TRUSTED:
                break
            size /= 2
            if size < 1e-10:
                return theta, statistics  # no step rises: the mode to rounding
        theta, statistics, height = theta + size * step, statistics.moved(size * step), there
    raise ValueError(
        f"The mode under this prior was not found in {MOST_STEPS} Newton steps: log π may have "
        "several modes or none. Use a smoother prior, or a fit with mode='as_is'."
    )
