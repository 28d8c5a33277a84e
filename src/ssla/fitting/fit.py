"""A fit, from top to bottom: from a trained network and its data to a Posterior.

    read       one pass over the data sums what follows needs, at the trained weights
    noise      of a Gaussian likelihood, from the residuals, where it is to be estimated
    mode       θ̂: see below
    Gaussian   at θ̂ with the curvature there (laplace), or the nearest one (variational)
    prior      the one that was given, or the one that the evidence chooses
    report     each step adds to `posterior.report`; at the end a comparison with the network warns

What happens to θ̂ is the `mode`:

  polish   Newton steps to the mode of ℓ_D + log π. With Gaussian noise and a last layer the
           objective is quadratic, so the mode follows from the sums: no further pass. Otherwise
           each step is a pass (over cached features while they fit the memory budget).
  tilt     θ̂ stays; the residual gradient is subtracted from the objective, so that θ̂ is its mode.
  as_is    θ̂ stays and is taken for the mode; a large residual gradient is warned about.

By default a last layer is polished if it is not trained (`ssla.fitting.trained`). All other weights
are tilted. Where rows that the network has not seen choose the setting, `ssla.fitting.validation`
fits several plans and keeps one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ssla.fitting.fit_plan import FitPlan
from ssla.fitting.guard import warn_on_training_rows
from ssla.fitting.price import limit_price
from ssla.fitting.prior_choice import choose_prior
from ssla.fitting.steps import (
    choose_mode,
    find_mode,
    make_gaussian_at_mode,
    read_data,
    settle_noise,
    with_variational_gaussian,
)
from ssla.fitting.training_rows import TrainingRows

if TYPE_CHECKING:
    from ssla.posterior import Posterior


def fit(plan: FitPlan) -> Posterior:
    """Fit the posterior that a plan asks for.

    A prior that nobody gave is chosen by the evidence. Raises ValueError for data, a network or a
    prior that cannot be fitted. Warns where the predictive is far worse than the network itself on
    training rows.
    """
    if plan.prior is not None:
        posterior = fit_with_prior(plan)
        rows = TrainingRows.sample_from(posterior)
    else:
        learned_plan, posterior = fit_at_mode(plan)
        posterior = choose_prior(learned_plan, posterior, plan.estimates_noise)
        # Training rows that the network has memorised cannot tell how much doubt is right. So the
        # price of doubt on them has a limit.
        rows = TrainingRows.sample_from(posterior)
        posterior = limit_price(posterior, learned_plan, rows)
    # A predictive that is far worse than the network itself is never returned without a warning.
    warn_on_training_rows(posterior, rows)
    return posterior


def fit_with_prior(plan: FitPlan) -> Posterior:
    """Fit a posterior under the plan's prior, without a comparison with the network itself.

    A plan without a prior takes that of the trained weights' scale. Raises as `fit`.
    """
    plan, posterior = fit_at_mode(plan)
    if plan.finds_variational:
        # The factorisation at the mode is kept by its posterior. A copy has none, so that the
        # memory is free for the variational Gaussian.
        posterior = replace(posterior)
    return with_variational_gaussian(plan, posterior)


def fit_at_mode(plan: FitPlan) -> tuple[FitPlan, Posterior]:
    """Fit the Gaussian at θ̂, and return it after the plan with what its passes found out.

    These findings are the structure, the noise and the number of rows. The prior is the one that
    was given, or the one of the trained weights' scale. Raises as `fit`.
    """
    draft = read_data(plan)
    draft = choose_mode(draft)
    draft = settle_noise(draft)
    draft = find_mode(draft)
    return draft.plan, make_gaussian_at_mode(draft)
