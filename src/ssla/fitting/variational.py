"""The variational Gaussian: the N(m, S) nearest to the posterior in KL divergence, by passes that
raise the evidence bound.

At the nearest one

    S⁻¹ = Σ JᵀE[Λ]J − ∇² log π(m)      Σ JᵀE[g] + ∇log π(m) = 0      (or m = θ̂, if tilted)

with averages over f ~ N(f(m), J S Jᵀ) in place of the values at the mode. A round is a pass: it
takes the averages under the Gaussian at hand, and with them the bound. The next Gaussian has half
of the new averages in its precision and the new mean: with all of them the precision would
oscillate, and the mean need not wait for it. It goes that far, or a share of the way. A share that
lowers the bound is halved, so the bound never falls. For Gaussian noise the Gaussian at the mode is
the nearest already.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from ssla._checks import warn
from ssla.curvature import Operator, Structure
from ssla.fitting.sums import Sums, newton_step_by_products, uphill_operator
from ssla.maths.conjugate import Product
from ssla.priors import Prior
from ssla.report import FIT, VARIATIONAL, Note
from ssla.values import Statistics, Variational, evidence_bound

if TYPE_CHECKING:
    from ssla.posterior import Posterior

# The numbers below were not measured: they are guesses, unless a comment says otherwise.
TOLERANCE = 1e-4  # nats a parameter: a round that raises the bound by less is the last
ROUGH = 1e-3  # the same, for a Gaussian that only chooses a prior
COARSE = 1e-2  # the same, to choose a prior in between
# squared standard deviations a parameter: a mean that would move farther has not converged
CLOSE = 1e-2
MOST_ROUNDS = 100
# weight of the new averages in the precision (method.md, section 11: with all of them it
# oscillates, half of them converge in 10 to 40 passes)
NEW = 0.5
GROWTH = 1.5  # of the share after a round that raised the bound
SHORTEST = 1 / 32  # the least share
NARROWER = 2.0  # factor on the precision's root while the averages do not exist
MOST_NARROWINGS = 30
ROUNDS_FROM_SIMILAR = 12  # for rows that are slightly others
CONVERGED = 0.03  # standard deviations of the last step of the mean, after these rounds

# by which conjugate gradients reduce the residual of a step of the mean: each round takes another
PRECISE = 0.1
MOST_PRODUCTS = 6  # for one step (method, section 11)
# the same for rows that are added: these products take no pass, so that the step may be exact
KEPT_PRECISE, KEPT_MOST_PRODUCTS = 1e-8, 200
ChoosePrior: TypeAlias = "Callable[[Posterior], Prior | None]"
"""A posterior with averages -> a better prior; None: keep the one it has."""


class Average(Protocol):
    """Passes for averages over a Gaussian of θ."""

    def __call__(self, mean: Tensor, covariance: Operator) -> Sums:
        """Sum the averages over N(mean, covariance) of θ, with a mean (P,)."""
        ...

    def products_under(self, mean: Tensor, covariance: Operator) -> Product | None:
        """Return products with Σ JᵀE[Λ]J, a pass each; None where they are too slow."""
        ...


class Iterate(NamedTuple):
    """A Gaussian, the averages under it, and its bound."""

    mean: Tensor  # (P,)
    curvature: Structure  # S⁻¹ less the prior's
    covariance: Operator
    averages: Sums
    bound: float


@dataclass(frozen=True, eq=False)
class KeptAverages:
    """Averages over rows that are not read again: a quadratic around the mean of the Gaussian
    that they were taken under.
    """

    mean: Tensor  # (P,)
    covariance: Operator
    statistics: Statistics

    @cached_property
    def _trace(self) -> float:
        """tr(Λ S) under the Gaussian of the averages."""
        return self.statistics.curvature.trace(self.covariance)

    def under(self, mean: Tensor, covariance: Operator) -> Statistics:
        """Return the averages under another Gaussian with a mean (P,).

        The quadratic's own average is lower than at the mean by ½ tr(Λ S).
        """
        moved = self.statistics.moved(mean - self.mean)
        spread = self.statistics.curvature.trace(covariance) - self._trace
        return replace(moved, log_likelihood=moved.log_likelihood - 0.5 * spread)


@dataclass(eq=False)
class BoundAscent:
    """The rounds from the Gaussian that a posterior has, under its prior.

    The mean of a tilted posterior stays at θ̂: the averaged gradient there is what is subtracted,
    and only the covariance is found. A linear tilt by the gradient at θ̂ itself would let the mean
    leave, without any bound where log p is not concave.

    `choose_prior`, if given, is asked for another prior whenever the Gaussian has nearly converged,
    until it keeps the one it has. `kept` are the averages over earlier rows; `average` then sums
    the new ones alone.
    """

    posterior: Posterior
    average: Average
    choose_prior: ChoosePrior | None = None
    tolerance: float = TOLERANCE
    most: int = MOST_ROUNDS
    kept: KeptAverages | None = None
    # the weight of new averages in the precision; None: NEW, or all while a prior is to be
    # chosen
    new: float | None = None

    @property
    def moves(self) -> bool:
        """Return whether the mean is found, too."""
        return not self.posterior.tilted

    def maximise_bound(self) -> Posterior:
        """Find the Gaussian with the highest bound, and return the posterior with it.

        Warns where the rounds end before the bound has converged. Raises ValueError where no
        averages exist.
        """
        current = self._first_iterate()
        rounds, share, converged = 1, 1.0, False
        while rounds < self.most and not converged:
            trial = self._next_iterate(current, share)
            rounds += trial is not None
            # A tilted Gaussian has no mean by whose next step to judge a precision that cannot be
            # improved.
            stuck = trial is None and not self.moves
            if trial is None or not trial.bound >= current.bound - 1e-12 * abs(current.bound):
                share /= 2
                if share >= SHORTEST:
                    continue
                # Even a short way gains nothing: the error of the nodes hides a smaller gain.
                gain, share = 0.0, 1.0
            else:
                gain = (trial.bound - current.bound) / len(current.mean) / share
                current = trial
            share = min(1.0, GROWTH * share)
            if gain <= COARSE and self.choose_prior is not None:
                current = self._under_another_prior(current, self.choose_prior)
            elif gain <= self.tolerance:
                near = self._squared_distance(current) <= CLOSE * len(current.mean)
                converged = not stuck and near
                if gain == 0:
                    break
        return self._finish(current, rounds, converged)

    def _under_another_prior(self, current: Iterate, choose_prior: ChoosePrior) -> Iterate:
        """Return the same Gaussian, with its bound under the prior that is chosen from its
        averages.
        """
        chosen = choose_prior(self._posterior_at(current))
        if chosen is None:
            self.choose_prior = None
            return current
        self.posterior = replace(self.posterior, prior=chosen)
        bound = self._bound(current.mean, current.covariance, current.averages)
        return current._replace(curvature=current.curvature.positive_part(), bound=bound)

    def _first_iterate(self) -> Iterate:
        """Return the Gaussian of the posterior; a narrower one where averages over it do not
        exist.

        Raises ValueError if they exist for none that is tried.
        """
        mean = self.posterior.mean if self.moves else self.posterior.theta
        curvature = self.posterior.sums.curvature
        for _ in range(MOST_NARROWINGS):
            first = self._iterate_at(mean, curvature, self._operator(curvature, mean))
            if math.isfinite(first.bound):
                return first
            curvature = curvature.scale_both_sides(torch.full_like(self.posterior.theta, NARROWER))
        raise ValueError(
            "gaussian='variational' is not possible: the log likelihood has no finite average "
            "around the mode, however narrow the Gaussian. Use gaussian='laplace', or a log_prob "
            "that is finite for every output."
        )

    def _operator(self, curvature: Structure, mean: Tensor) -> Operator:
        """Factorise the covariance of a Gaussian with a mean (P,) under the prior.

        Raises ValueError where its precision is not positive definite.
        """
        return uphill_operator(curvature, self.posterior.bound_prior.precision(mean))

    def _iterate_at(self, mean: Tensor, curvature: Structure, covariance: Operator) -> Iterate:
        """Take the averages over a Gaussian with a mean (P,), in a pass, and its bound."""
        sums = self.average(mean, covariance)
        if self.kept is not None:
            earlier = self.kept.under(mean, covariance)
            sums = replace(sums, statistics=earlier.merge(sums.statistics))
        return Iterate(mean, curvature, covariance, sums, self._bound(mean, covariance, sums))

    def _bound(self, mean: Tensor, covariance: Operator, averages: Sums) -> float:
        """Compute the evidence bound of a Gaussian with a mean (P,)."""
        log_likelihood = averages.statistics.log_likelihood
        return evidence_bound(self.posterior.bound_prior, mean, covariance, log_likelihood)

    def _gradient(self, current: Iterate) -> Tensor:
        """Compute the gradient (P,) of the bound in the mean; zero where the mean stays."""
        if not self.moves:
            return torch.zeros_like(current.mean)
        prior_gradient = self.posterior.bound_prior.gradient(current.mean)
        return current.averages.statistics.gradient + prior_gradient

    def _squared_distance(self, current: Iterate) -> float:
        """Compute gᵀSg: the squared distance to the next mean, in standard deviations."""
        gradient = self._gradient(current)
        return float(gradient @ current.covariance.solve(gradient))

    def _next_iterate(self, current: Iterate, share: float) -> Iterate | None:
        """Return the Gaussian a share of the way along; None where its precision is not positive
        definite.
        """
        # A prior that is still to be chosen follows the new averages, unless their own share is
        # given.
        new = self.new or (1.0 if self.choose_prior is not None else NEW)
        curvature = current.curvature.mix_with(current.averages.statistics.curvature, new * share)
        try:
            covariance = self._operator(curvature, current.mean)
        except ValueError:
            return None
        mean = current.mean
        if self.moves:
            mean = mean + share * self._newton_step(current, covariance)
        return self._iterate_at(mean, curvature, covariance)

    def _newton_step(self, current: Iterate, covariance: Operator) -> Tensor:
        """Compute the Newton step (P,) of the mean; `covariance` is that of the next Gaussian."""
        gradient = self._gradient(current)
        newton = current.averages.newton
        precision = self.posterior.bound_prior.precision(current.mean)
        if newton is not None and self.kept is None:
            return current.averages.newton_step(gradient, precision)
        if newton is not None:
            # The kept rows have a structure of their own, so that only products add up.
            return newton_step_by_products(
                self._product_of_all_rows(newton.push),
                gradient,
                precision,
                covariance,
                KEPT_PRECISE,
                KEPT_MOST_PRODUCTS,
            )
        product = self.average.products_under(current.mean, current.covariance)
        if product is None:  # the structure's curvature, which is only near the bound's
            return covariance.solve(gradient)
        return newton_step_by_products(
            self._product_of_all_rows(product),
            gradient,
            precision,
            covariance,
            PRECISE,
            MOST_PRODUCTS,
        )

    def _product_of_all_rows(self, product: Product) -> Product:
        """Return products with the curvature of the rows that are read, and of the earlier ones."""
        if self.kept is None:
            return product
        earlier = self.kept.statistics.curvature
        return lambda v: product(v) + earlier.push(v)

    def _posterior_at(self, current: Iterate) -> Posterior:
        """Return the posterior with a Gaussian and the averages under it."""
        statistics = replace(current.averages.statistics, curvature=current.curvature)
        variational = Variational(current.mean, statistics, self.posterior.tilted)
        return replace(self.posterior, variational=variational)

    def _finish(self, best: Iterate, rounds: int, converged: bool) -> Posterior:
        """Return the posterior with the best Gaussian and its report; warn if it has not
        converged.
        """
        report = self.posterior.report
        report = replace(report, gaussian=VARIATIONAL, rounds=report.rounds + rounds)
        if not converged:
            off = math.sqrt(max(self._squared_distance(best), 0.0) / len(best.mean))
            message = (
                f"the variational Gaussian did not converge in {rounds} passes: the best one that "
                f"was found is used, and its weights may be off by about {off:.2g} of their "
                "standard deviations each"
            )
            report = replace(report, notes=(*report.notes, Note(message, FIT)))
            warn(
                f"{message}. Predictions are off by about that share of their epistemic standard "
                "deviation. A stronger prior or mode='tilt', which keeps the trained weights, "
                "converges sooner.",
                RuntimeWarning,
            )
        return replace(self._posterior_at(best), report=report)


def add_rows(before: Posterior, posterior: Posterior, average: Average) -> Posterior:
    """Return the variational Gaussian with the averages of more rows, which `average` sums; those
    of the earlier rows are kept.

    before: the posterior of the earlier rows, whose Gaussian is the prior of the new ones.
    posterior: with the statistics of all rows at θ̂. The rounds read the new rows alone, and raise
    the bound of all.
    """
    kept = KeptAverages(before.mean, before.covariance, before.sums)
    first = average(kept.mean, kept.covariance).statistics
    assert before.variational is not None
    start = replace(before.variational, statistics=kept.statistics.merge(first))
    started = replace(posterior, variational=start)
    return BoundAscent(started, average, kept=kept).maximise_bound()


def refit_to_similar_rows(posterior: Posterior, average: Average) -> Posterior:
    """Find the variational Gaussian of slightly other rows, which `average` sums, from the one at
    hand.

    A fixed number of rounds with half of the new averages. The bound is no stopping rule so close
    to its maximum: a step can overshoot to a point with the same bound, and the error of the nodes
    hides small gains. Raises ValueError where the last step of the mean is still long.
    """
    current, distance, tilt = posterior, math.inf, posterior.tilt
    for _ in range(ROUNDS_FROM_SIMILAR):
        assert current.variational is not None
        sums = average(current.mean, current.covariance)
        gradient = sums.statistics.gradient + current.bound_prior.gradient(current.mean) - tilt
        step = sums.newton_step(gradient, current.bound_prior.precision(current.mean))
        curvature = current.sums.curvature.mix_with(sums.statistics.curvature, 0.5)
        moved = replace(
            current.variational,
            mean=current.mean + step,
            statistics=replace(sums.statistics, curvature=curvature),
        )
        current = replace(current, variational=moved)
        distance = float(gradient @ step)
    if not distance <= CONVERGED**2:
        raise ValueError(
            f"The variational Gaussian did not converge in {ROUNDS_FROM_SIMILAR} rounds."
        )
    return current


def with_sums(posterior: Posterior, statistics: Statistics) -> Posterior:
    """Return the posterior with the same mean and other sums behind its covariance."""
    if posterior.variational is None:
        return replace(posterior, statistics=statistics)
    return replace(posterior, variational=replace(posterior.variational, statistics=statistics))


def with_recentred_mean(posterior: Posterior) -> Posterior:
    """Return the variational Gaussian with its averages kept as they are, and m where they and
    the prior put it.

    Averages that are kept stand for a likelihood that is quadratic around m, with the curvature
    of the structure: exact to first order in what changed where the structure is dense. A
    tilted Gaussian stays where it is.
    """
    variational = posterior.variational
    assert variational is not None
    if posterior.tilted:
        return posterior
    gradient = posterior.sums.gradient + posterior.bound_prior.gradient(posterior.mean)
    step = posterior.covariance.solve(gradient)
    moved = replace(
        variational, mean=variational.mean + step, statistics=variational.statistics.moved(step)
    )
    return replace(posterior, variational=moved)
