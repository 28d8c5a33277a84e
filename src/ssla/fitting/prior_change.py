"""Another prior for the same data: what the sums allow, and what needs a pass.

H = S + T holds the data in S and the prior in T = −∇² log π, so another prior is another
factorisation and no pass. Whether θ̂ can follow depends on what the sums know of the likelihood
away from θ̂:

  Gaussian noise, last layer   with dense or kfac curvature the statistics determine ℓ_D exactly:
                               θ̂ moves, for any prior
  anything else                θ̂ stays (as in a fit with mode="as_is"), or is polished again on
                               the data

Refits in the outputs use only the prior's gradient and curvature at θ̂. For a Gaussian prior these
are exact; for another prior only refits of the weights give the exact increments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributions import Distribution

from ssla._checks import check_name
from ssla.fitting.further_passes import polish_again
from ssla.fitting.prior_choice import describe_change
from ssla.fitting.sums import factorise_for_uphill_step
from ssla.fitting.variational import with_recentred_mean
from ssla.priors import (
    ADDITIVE,
    CONVENTIONS,
    EXACT,
    BoundPrior,
    Flat,
    Prior,
    as_prior,
    check_density_at,
)
from ssla.report import AS_IS, LAPLACE, POLISH, TILT
from ssla.values import Statistics

if TYPE_CHECKING:
    from ssla.posterior import Posterior

KEPT = (
    "θ̂ was kept, {residual:.3g} posterior sd from its mode ({each:.2g} per parameter); give data= "
    "to polish again"
)
# The numbers below were not measured: they are guesses.
MOST_STEPS = 200
DECREMENT = 1e-12  # posterior standard deviations from the mode at which the ascent ends
# a squared decrement below which the gain is below rounding error, and the full step is safe
TRUSTED = 1e-10
SHORTEST = 1e-10  # share of a Newton step
SUFFICIENT = 1e-4  # share of the expected gain that a step must reach (Armijo)


def change_prior(
    posterior: Posterior, prior: Prior | Distribution, convention: str, data: Any
) -> Posterior:
    """Return the posterior under another prior: see Posterior.with_prior.

    data: the training rows, on which θ̂ is polished again; None: no pass is made. Raises ValueError
    for an unknown convention, a prior without a finite density at θ̂, and a curvature that is not
    positive definite.
    """
    check_name("convention", convention, CONVENTIONS)
    new = as_prior(prior)
    check_density_at(new, new.bind(posterior.network.layout), posterior.theta)
    if data is not None:
        return _polish_under(posterior, new, convention, data)
    changed = replace(posterior, prior=new, convention=convention)
    if posterior.variational is not None:
        return _keep_averages(changed)
    if convention != EXACT:
        # Factorised now: too few data for this convention are an error here, not in a prediction.
        _ = changed.data_operator

    if posterior.updates_mode_from_sums:
        theta, statistics = find_mode_from_sums(
            posterior.statistics, changed.objective_prior, posterior.theta
        )
        moved = replace(changed, theta=theta, statistics=statistics)
        return describe_change(
            moved, "moved to its mode from the sums, without a pass; the noise was kept", POLISH
        )
    return describe_change(changed, KEPT, _name_mode_of_kept_theta(posterior))


def _name_mode_of_kept_theta(posterior: Posterior) -> str:
    """Return the mode of a posterior whose θ̂ stays when its prior changes."""
    return TILT if posterior.mode == TILT else AS_IS


def _keep_averages(changed: Posterior) -> Posterior:
    """Return a variational posterior whose prior has been changed, with its averages kept.

    changed: the posterior with the new prior. Its mean moves to suit the prior. Conventions that
    are defined at the mode take the Gaussian there in its place. Raises ValueError where the data
    alone do not determine it.
    """
    mode = _name_mode_of_kept_theta(changed)
    if changed.convention == EXACT:
        moved = with_recentred_mean(changed)
        return describe_change(moved, _describe_move(moved), mode)
    report = replace(changed.report, gaussian=LAPLACE)
    laplace = replace(changed, variational=None, report=report)
    _ = laplace.data_operator
    change = (
        "this convention is defined at the mode: the Gaussian there (laplace) took the "
        "variational one's place; "
    )
    return describe_change(laplace, change + KEPT, mode)


def _describe_move(moved: Posterior) -> str:
    """Return a sentence for the report: what a change of the prior did to a variational Gaussian.

    moved: the posterior after the change.
    """
    curvature = moved.sums.curvature
    if moved.tilted:
        change = "the covariance has changed and the mean stayed at the trained weights"
    elif curvature.couples_all_parameters:
        change = "the Gaussian has moved"
    else:
        change = (
            "the mean has moved only approximately, by the curvature that "
            f"structure={curvature.name!r} keeps of the data"
        )
    return f"{change}; the averages over the data and θ̂ were kept. Give data= to fit it again"


def _polish_under(posterior: Posterior, prior: Prior, convention: str, data: Any) -> Posterior:
    """Return the posterior polished again on `data` under a prior, from the trained weights.

    The noise stays the same. Raises as `polish_again`.
    """
    # The additive convention leaves the prior out of the objective, and adds its increment later.
    objective = Flat() if convention == ADDITIVE else prior
    polished = polish_again(posterior, objective, data)
    passes = posterior.report.passes + polished.report.passes
    report = replace(polished.report, passes=passes)
    changed = replace(polished, prior=prior, convention=convention, report=report)
    return describe_change(changed, "polished again on the data; the noise was kept", POLISH)


def find_mode_from_sums(
    statistics: Statistics, bound: BoundPrior, theta: Tensor
) -> tuple[Tensor, Statistics]:
    """Find the mode of ℓ_D + log π from the statistics at θ (P,), without a pass.

    bound: the prior π over θ. Returns the mode (P,), and the statistics there. Correct only where
    ℓ_D is the quadratic of the sums. A Gaussian prior takes one Newton step, another a
    safeguarded ascent. Raises ValueError after `MOST_STEPS` steps, and where the curvature cannot
    be factorised.
    """
    height = float(bound.log_prob(theta))
    for _ in range(MOST_STEPS):
        gradient = statistics.gradient + bound.gradient(theta)
        step = factorise_for_uphill_step(statistics.curvature, bound.precision(theta)).solve(
            gradient
        )
        decrement = float(gradient @ step)
        if decrement <= DECREMENT**2 * (1 + abs(height)):
            return theta, statistics
        # Along the step ℓ_D is rise·size − ½ bend·size², so that only log π is evaluated.
        rise = float(step @ statistics.gradient)
        bend = float(step @ statistics.curvature.push(step))
        size = 1.0
        while True:
            new_height = float(bound.log_prob(theta + size * step))
            gain = size * rise - 0.5 * size**2 * bend + new_height - height
            # Armijo's rule: a small share of the expected gain is enough.
            if gain >= SUFFICIENT * size * decrement or decrement <= TRUSTED:
                break
            size /= 2
            if size < SHORTEST:
                # No step raises the log posterior: this is the mode, up to rounding errors.
                return theta, statistics
        theta = theta + size * step
        statistics = statistics.with_theta_moved(size * step)
        height = new_height

    raise ValueError(
        f"The mode under this prior was not found in {MOST_STEPS} Newton steps: log π may have "
        "several modes or none. Use a smoother prior, or a fit with mode='as_is'."
    )
