"""What the doubt of a classifier costs on its own training rows, and a prior that keeps the price
low.

A network that has memorised its training rows is right there with certainty, and its evidence has
almost no preference between priors: it may say doubt that costs more than it is worth on new rows.
Where the network is as good on new rows as on these, they would pay the same price. So without
validation rows the price has a limit: as much as the network itself loses on these rows, and .003
nats. A network that was not memorised is not affected.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ssla.fitting.choice import mean_and_error
from ssla.fitting.fit_plan import FitPlan
from ssla.fitting.prior_choice import described
from ssla.fitting.steps import with_averages
from ssla.fitting.training_rows import TrainingRows
from ssla.fitting.tuning_space import posterior_prior
from ssla.fitting.variational import ROUGH
from ssla.priors import BoundGaussian
from ssla.report import TILT

if TYPE_CHECKING:
    from ssla.posterior import Posterior

# Nats a row beside the network's own loss. At .003 the networks of benchmarks/networks lose .004 to
# .006 on cnn, where the evidence alone lost .012 to .017, and still win .30 to .34 on clinc, where
# it won .36 to .38.
MOST_PRICE = 0.003
NEAR, AIM = 0.8, 0.9  # shares of the limit: a price between NEAR and one is near enough
ROUNDS = 8
STRONGEST = 1e6  # factor on the precision
STEEPNESS = (0.5, 2.0)  # of log price over log precision, between which it is taken to lie


def affordable(posterior: Posterior, plan: FitPlan, rows: TrainingRows | None) -> Posterior:
    """The posterior, under a stronger prior if its doubt costs too much on training rows.

    For classifiers whose trained weights were kept and whose prior nobody gave. Not for networks so
    large that the Jacobians of these rows do not fit in memory: the guard looks at them once.
    """
    classes = posterior.likelihood.support_for(posterior.network.outputs).kind == "class"
    if (
        rows is None
        or rows.kept is None
        or not classes
        or posterior.mode != TILT
        or not isinstance(posterior.bound_prior, BoundGaussian)
    ):
        return posterior
    most = MOST_PRICE - mean_and_error(rows.plug_in, rows.weights).mean

    def price(state: Posterior) -> float:
        return mean_and_error(rows.plug_in - rows.scores(state), rows.weights).mean

    tried = {1.0: price(posterior)}
    if not tried[1.0] > most:
        return posterior
    here, factor = posterior, 1.0
    for _ in range(ROUNDS):
        factor = min(_next_factor(tried, most), STRONGEST)
        here = _under(posterior, here, factor, replace(plan, tolerance=ROUGH))
        tried[factor] = price(here)
        if NEAR * most <= tried[factor] <= most or factor == STRONGEST:
            break
    here = _under(posterior, here, factor, plan)
    what = (
        f"the prior was made {factor:.3g} times stronger than the evidence says, because the "
        f"network has memorised its training rows: its doubt cost {tried[1.0]:.2g} nats a row "
        f"there, and now costs {tried[factor]:.2g}. Rows that it has not seen (validation=) would "
        "tell how much doubt is right"
    )
    return described(here, what, posterior.mode)


def _under(posterior: Posterior, here: Posterior, factor: float, plan: FitPlan) -> Posterior:
    """The posterior with that factor on its prior precision; a variational Gaussian starts from
    the one at hand.
    """
    precision = factor * posterior.bound_prior.precision(posterior.theta)
    prior = posterior_prior(posterior, precision)
    if posterior.variational is None:
        return replace(posterior, prior=prior)
    plan = replace(plan, prior=prior, start=here.variational)
    return with_averages(plan, replace(posterior, prior=prior))


def _next_factor(tried: dict[float, float], most: float) -> float:
    """Where a straight line of log price over log factor meets the limit, from the factors at
    which the price is known.
    """
    above = sorted((k for k in tried if tried[k] > most), reverse=True)
    below = min((k for k in tried if tried[k] <= most), default=None)
    other = below if below is not None else above[1] if len(above) > 1 else None
    steepness = 1.0
    if other is not None and 0 < tried[other] != tried[above[0]]:
        steepness = -math.log(tried[other] / tried[above[0]]) / math.log(other / above[0])
    low, high = STEEPNESS
    step = math.log(tried[above[0]] / (AIM * most)) / min(max(steepness, low), high)
    if below is not None:  # a little inside, where the line is not exact
        step = min(step, 0.9 * math.log(below / above[0]))
    return above[0] * math.exp(step)
