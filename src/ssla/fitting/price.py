"""What the doubt of a classifier costs on its own training rows.

The module finds a prior that keeps this price low. "Doubt" is epistemic uncertainty. A network that
has memorised its training rows is right there with certainty, and its evidence has almost no
preference between priors: the prior of the highest evidence may give doubt that costs more than it
is worth on new rows. Where the network is as good on new rows as on these, they would pay the same
price. So without validation rows the price has a limit: as much as the network itself loses on
these rows, and .003 nats. Networks that have not memorised their rows are not affected.

The price of doubt is the mean log density of the rows under the network itself, less that under the
predictive, in nats a row.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ssla.fitting.choice import compute_mean_and_error
from ssla.fitting.fit_plan import FitPlan
from ssla.fitting.prior_choice import describe_change
from ssla.fitting.steps import with_variational_gaussian
from ssla.fitting.training_rows import TrainingRows
from ssla.fitting.tuning_space import make_prior_with_precision
from ssla.fitting.variational import ROUGH
from ssla.priors import BoundGaussian
from ssla.report import TILT

if TYPE_CHECKING:
    from ssla.posterior import Posterior

# Nats a row beside the network's own loss. At .003 the networks of benchmarks/networks lose .004 to
# .006 on cnn, where the evidence alone lost .012 to .017, and still win .30 to .34 on clinc, where
# it won .36 to .38.
MOST_PRICE = 0.003
# The numbers below were not measured: they are guesses.
NEAR, AIM = 0.8, 0.9  # shares of the limit: a price between NEAR and one is near enough
ROUNDS = 8  # most factors that are tried
STRONGEST = 1e6  # factor on the precision
STEEPNESS = (0.5, 2.0)  # limits of the slope of log price over log precision, times −1
SHORT_OF_ENOUGH = 0.9  # share of the way to a factor that is known to be enough


def limit_price(posterior: Posterior, plan: FitPlan, rows: TrainingRows | None) -> Posterior:
    """Return the posterior, under a stronger prior if its doubt costs too much on training rows.

    Only classifiers whose trained weights were kept are changed. plan: of the fit, whose prior
    nobody gave. rows: a sample of training rows. The posterior is returned unchanged where there
    are none, or where their Jacobians do not fit in memory: each price would read the rows again.
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

    limit = MOST_PRICE - compute_mean_and_error(rows.plug_in, rows.weights).mean

    def compute_price(candidate: Posterior) -> float:
        """Compute the price of a posterior's doubt on the rows, in nats a row."""
        return compute_mean_and_error(
            rows.plug_in - rows.compute_scores(candidate), rows.weights
        ).mean

    prices = {1.0: compute_price(posterior)}  # by the factor on the precision
    if not prices[1.0] > limit:
        return posterior

    # Each rough Gaussian starts from the one before it; the last one is found as if asked for.
    rough = replace(plan, tolerance=ROUGH)
    current = posterior
    for _ in range(ROUNDS):
        factor = min(_choose_next_factor(prices, limit), STRONGEST)
        current = _strengthen_prior(posterior, current, factor, rough)
        prices[factor] = compute_price(current)
        if NEAR * limit <= prices[factor] <= limit or factor == STRONGEST:
            break

    current = _strengthen_prior(posterior, current, factor, plan)
    change = (
        f"the prior was made {factor:.3g} times stronger than the evidence says, because the "
        f"network has memorised its training rows: its doubt cost {prices[1.0]:.2g} nats a row "
        f"there, and now costs {prices[factor]:.2g}. Rows that it has not seen (validation=) would "
        "tell how much doubt is right"
    )
    return describe_change(current, change, posterior.mode)


def _strengthen_prior(
    posterior: Posterior, current: Posterior, factor: float, plan: FitPlan
) -> Posterior:
    """Return the posterior with `factor` times its prior precision.

    current: the posterior with the last factor that was tried. A variational Gaussian is found
    again by the passes of `plan`, starting from that of `current`.
    """
    precision = factor * posterior.bound_prior.precision(posterior.theta)
    prior = make_prior_with_precision(posterior, precision)
    stronger = replace(posterior, prior=prior)
    if posterior.variational is None:
        return stronger
    plan = replace(plan, prior=prior, start=current.variational)
    return with_variational_gaussian(plan, stronger)


def _choose_next_factor(prices: dict[float, float], limit: float) -> float:
    """Return the next factor on the precision to try, by a straight line of log price.

    The line is over the logarithm of the factor. The next factor is where it meets AIM times the
    limit. prices: the known prices, by their factors; that of a factor of one must be above the
    limit.
    """
    above = sorted((factor for factor in prices if prices[factor] > limit), reverse=True)
    below = min((factor for factor in prices if prices[factor] <= limit), default=None)
    nearest = above[0]

    # The line goes through the nearest price above the limit and another one.
    second = below
    if second is None and len(above) > 1:
        second = above[1]
    steepness = 1.0
    if second is not None and 0 < prices[second] != prices[nearest]:
        steepness = -math.log(prices[second] / prices[nearest]) / math.log(second / nearest)
    low, high = STEEPNESS
    step = math.log(prices[nearest] / (AIM * limit)) / min(max(steepness, low), high)

    # The step ends a little short of the factor that is known to be enough.
    if below is not None:
        step = min(step, SHORT_OF_ENOUGH * math.log(below / nearest))
    return nearest * math.exp(step)
