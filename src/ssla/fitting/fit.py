"""A fit, from top to bottom: from a trained network and its data to a Posterior.

One pass collects the sums at the trained θ. What happens next is the `mode`:

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
from ssla.fitting.price import affordable
from ssla.fitting.prior_choice import choose_prior
from ssla.fitting.steps import (
    choose_mode,
    find_mode,
    posterior_at,
    read,
    settle_noise,
    with_averages,
)
from ssla.fitting.training_rows import TrainingRows

if TYPE_CHECKING:
    from ssla.posterior import Posterior


def fit(plan: FitPlan) -> Posterior:
    """The posterior of a plan; a prior that nobody gave is chosen by the evidence."""
    if plan.prior is not None:
        posterior = fit_with_prior(plan)
        warn_on_training_rows(posterior, TrainingRows.of(posterior))
        return posterior
    estimated = plan.estimates_noise
    plan, posterior = fit_at_mode(plan)
    posterior = choose_prior(plan, posterior, estimated)
    # Training rows that the network has memorised cannot tell how much doubt is right. So the
    # price of doubt on them has a limit, and a predictive that is far worse than the network warns.
    rows = TrainingRows.of(posterior)
    posterior = affordable(posterior, plan, rows)
    warn_on_training_rows(posterior, rows)
    return posterior


def fit_with_prior(plan: FitPlan) -> Posterior:
    """The posterior under the prior that was given, however well it predicts."""
    plan, posterior = fit_at_mode(plan)
    if plan.averages:
        # Another Gaussian follows. A copy has not factorised the one at the mode.
        posterior = replace(posterior)
    return with_averages(plan, posterior)


def fit_at_mode(plan: FitPlan) -> tuple[FitPlan, Posterior]:
    """The Gaussian at θ̂, under the prior that was given or that of the trained weights' scale.

    And the plan with what its passes found out.
    """
    draft = read(plan)
    draft = choose_mode(draft)
    draft = settle_noise(draft)
    draft = find_mode(draft)
    return draft.plan, posterior_at(draft)
