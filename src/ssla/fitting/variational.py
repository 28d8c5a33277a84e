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
from ssla.fitting.sums import Sums, climbing, newton_by_products
from ssla.maths.conjugate import Product
from ssla.priors import Prior
from ssla.report import FIT, VARIATIONAL, Note
from ssla.values import Statistics, Variational, evidence_bound

if TYPE_CHECKING:
    from ssla.posterior import Posterior

TOLERANCE = 1e-4  # nats a parameter: a round that raises the bound by less is the last
ROUGH = 1e-3  # the same, for a Gaussian that only chooses a prior
COARSE = 1e-2  # the same, to choose a prior in between
# squared standard deviations a parameter: a mean that would move farther has not converged
CLOSE = 1e-2
MOST_ROUNDS = 100
NEW = 0.5  # weight of the new averages in the precision
GROWTH = 1.5  # of the share after a round that raised the bound
SHORTEST = 1 / 32  # the least share
NARROWER = 2.0  # factor on the precision's root while the averages do not exist
MOST_NARROWINGS = 30
ROUNDS_FROM_THERE = 12  # for rows that are slightly others
CONVERGED = 0.03  # standard deviations of the last step of the mean, after these rounds

# by which conjugate gradients reduce the residual of a step of the mean. A guess: each round takes
# another step
PRECISE = 0.1
MOST_PRODUCTS = 6  # for one step (method, section 11)
Choose: TypeAlias = "Callable[[Posterior], Prior | None]"
"""A state with averages -> a better prior; None: keep the one it has."""


class Average(Protocol):
    """Passes for averages over a Gaussian of θ."""

    def __call__(self, mean: Tensor, covariance: Operator) -> Sums:
        """The sums of averages."""
        ...

    def product(self, mean: Tensor, covariance: Operator) -> Product | None:
        """Products with Σ JᵀE[Λ]J, a pass each; None where they are too slow."""
        ...


class Place(NamedTuple):
    """A Gaussian, the averages under it, and its bound."""

    mean: Tensor
    curvature: Structure  # S⁻¹ less the prior's
    covariance: Operator
    averages: Sums
    bound: float


@dataclass(frozen=True, eq=False)
class Kept:
    """Averages over rows that are not read again: a quadratic around the mean of the Gaussian
    that they were taken under.
    """

    mean: Tensor
    covariance: Operator
    statistics: Statistics

    @staticmethod
    def of(posterior: Posterior) -> Kept:
        return Kept(posterior.mean, posterior.covariance, posterior.sums)

    @cached_property
    def _trace(self) -> float:
        return self.statistics.curvature.trace(self.covariance)

    def at(self, mean: Tensor, covariance: Operator) -> Statistics:
        """The averages under another Gaussian.

        The quadratic's own average is lower than at the mean by ½ tr(Λ S).
        """
        moved = self.statistics.moved(mean - self.mean)
        spread = self.statistics.curvature.trace(covariance) - self._trace
        return replace(moved, log_likelihood=moved.log_likelihood - 0.5 * spread)


@dataclass(eq=False)
class Climb:
    """The rounds from the Gaussian that a state has, under its prior.

    The mean of a tilted state stays at θ̂: the averaged gradient there is what is subtracted, and
    only the covariance is found. A linear tilt by the gradient at θ̂ itself would let the mean
    leave, without any bound where log p is not concave.

    `choose`, if given, is asked for another prior whenever the Gaussian has nearly converged, until
    it keeps the one it has. `kept` are the averages over earlier rows; `average` then sums the new
    ones alone.
    """

    state: Posterior
    average: Average
    choose: Choose | None = None
    tolerance: float = TOLERANCE
    most: int = MOST_ROUNDS
    kept: Kept | None = None
    # the weight of new averages in the precision; None: NEW, or all while a prior is to be
    # chosen
    new: float | None = None

    @property
    def moves(self) -> bool:
        """Whether the mean is found, too."""
        return not self.state.tilted

    def run(self) -> Posterior:
        """The state with its variational Gaussian: the one with the highest bound that was
        found.
        """
        here = self._first_place()
        rounds, share, converged = 1, 1.0, False
        while rounds < self.most and not converged:
            there = self._next(here, share)
            rounds += there is not None
            # A tilted Gaussian has no mean by whose next step to judge a precision that cannot be
            # improved.
            stuck = there is None and not self.moves
            if there is None or not there.bound >= here.bound - 1e-12 * abs(here.bound):
                share /= 2
                if share >= SHORTEST:
                    continue
                gain, there, share = 0.0, here, 1.0  # the nodes' own error hides a smaller gain
            else:
                gain = (there.bound - here.bound) / len(here.mean) / share
            here, share = there, min(1.0, GROWTH * share)
            if gain <= COARSE and self.choose is not None:
                here = self._under_another_prior(here, self.choose)
            elif gain <= self.tolerance:
                converged = not stuck and self._length(here) <= CLOSE * len(here.mean)
                if gain == 0:
                    break
        return self._finished(here, rounds, converged)

    def _under_another_prior(self, here: Place, choose: Choose) -> Place:
        """The same Gaussian, with its bound under the prior that is chosen from its averages."""
        chosen = choose(self._state_at(here))
        if chosen is None:
            self.choose = None
            return here
        self.state = replace(self.state, prior=chosen)
        value = self._bound(here.mean, here.covariance, here.averages)
        return here._replace(curvature=here.curvature.positive_part(), bound=value)

    def _first_place(self) -> Place:
        """The Gaussian of the posterior; narrower where averages over it do not exist.

        ValueError if they exist for none that is tried.
        """
        mean = self.state.mean if self.moves else self.state.theta
        curvature = self.state.sums.curvature
        for _ in range(MOST_NARROWINGS):
            here = self._place(mean, curvature, self._operator(curvature, mean))
            if math.isfinite(here.bound):
                return here
            curvature = curvature.scaled(torch.full_like(self.state.theta, NARROWER))
        raise ValueError(
            "gaussian='variational' is not possible: the log likelihood has no finite average "
            "around the mode, however narrow the Gaussian. Use gaussian='laplace', or a log_prob "
            "that is finite for every output."
        )

    def _operator(self, curvature: Structure, mean: Tensor) -> Operator:
        return climbing(curvature, self.state.bound_prior.precision(mean))

    def _place(self, mean: Tensor, curvature: Structure, covariance: Operator) -> Place:
        found = self.average(mean, covariance)
        if self.kept is not None:
            found = replace(
                found, statistics=self.kept.at(mean, covariance).merge(found.statistics)
            )
        return Place(mean, curvature, covariance, found, self._bound(mean, covariance, found))

    def _bound(self, mean: Tensor, covariance: Operator, averages: Sums) -> float:
        log_likelihood = averages.statistics.log_likelihood
        return evidence_bound(self.state.bound_prior, mean, covariance, log_likelihood)

    def _gradient(self, here: Place) -> Tensor:
        """Of the bound in the mean; zero where the mean stays."""
        if not self.moves:
            return torch.zeros_like(here.mean)
        return here.averages.statistics.gradient + self.state.bound_prior.gradient(here.mean)

    def _length(self, here: Place) -> float:
        """gᵀSg: the squared distance to the next mean, in standard deviations."""
        gradient = self._gradient(here)
        return float(gradient @ here.covariance.solve(gradient))

    def _next(self, here: Place, share: float) -> Place | None:
        """The Gaussian that far along; None where its precision is not positive definite."""
        # A prior that is still to be chosen follows the new averages, unless their own share is
        # given.
        new = self.new or (1.0 if self.choose is not None else NEW)
        curvature = here.curvature.mixed(here.averages.statistics.curvature, new * share)
        try:
            covariance = self._operator(curvature, here.mean)
        except ValueError:
            return None
        if not self.moves:
            return self._place(here.mean, curvature, covariance)
        return self._place(here.mean + share * self._step(here, covariance), curvature, covariance)

    def _step(self, here: Place, covariance: Operator) -> Tensor:
        """The Newton step of the mean."""
        gradient = self._gradient(here)
        averages = here.averages
        precision = self.state.bound_prior.precision(here.mean)
        if averages.newton is None:
            product = self.average.product(here.mean, here.covariance)
            if product is None:  # the structure's curvature, which is only near the bound's
                return covariance.solve(gradient)
            return newton_by_products(
                self._of_all_rows(product), gradient, precision, covariance, PRECISE, MOST_PRODUCTS
            )
        if self.kept is None:
            return averages.newton_step(gradient, precision)
        of_all_rows = self._of_all_rows(averages.newton.push)
        return newton_by_products(
            of_all_rows, gradient, precision, covariance, tolerance=1e-8, most=200
        )

    def _of_all_rows(self, product: Product) -> Product:
        """Products with the curvature of the rows that are read, and of the earlier ones."""
        if self.kept is None:
            return product
        earlier = self.kept.statistics.curvature
        return lambda v: product(v) + earlier.push(v)

    def _state_at(self, here: Place) -> Posterior:
        statistics = replace(here.averages.statistics, curvature=here.curvature)
        return replace(
            self.state, variational=Variational(here.mean, statistics, self.state.tilted)
        )

    def _finished(self, here: Place, rounds: int, converged: bool) -> Posterior:
        report = replace(
            self.state.report, gaussian=VARIATIONAL, rounds=self.state.report.rounds + rounds
        )
        if not converged:
            off = math.sqrt(max(self._length(here), 0.0) / len(here.mean))
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
        return replace(self._state_at(here), report=report)


def with_rows(before: Posterior, posterior: Posterior, average: Average) -> Posterior:
    """The variational Gaussian with the averages of more rows, which `average` sums; those of the
    earlier rows are kept.

    before: the posterior of the earlier rows, whose Gaussian is the prior of the new ones.
    posterior: with the statistics of all rows at θ̂. Rounds over the new rows alone, which raise
    the bound of all.
    """
    kept = Kept.of(before)
    first = average(kept.mean, kept.covariance).statistics
    assert before.variational is not None
    start = replace(before.variational, statistics=kept.statistics.merge(first))
    return Climb(replace(posterior, variational=start), average, kept=kept).run()


def from_there(posterior: Posterior, average: Average) -> Posterior:
    """The variational Gaussian of slightly other rows, which `average` sums, from the one at hand.

    A fixed number of rounds with half of the new averages. The bound is no stopping rule so close
    to its maximum: a step can overshoot to a point with the same bound, and the error of the nodes
    hides small gains.
    """
    here, distance, tilt = posterior, math.inf, posterior.tilt
    for _ in range(ROUNDS_FROM_THERE):
        assert here.variational is not None
        sums = average(here.mean, here.covariance)
        gradient = sums.statistics.gradient + here.bound_prior.gradient(here.mean) - tilt
        step = sums.newton_step(gradient, here.bound_prior.precision(here.mean))
        curvature = here.sums.curvature.mixed(sums.statistics.curvature, 0.5)
        there = replace(
            here.variational,
            mean=here.mean + step,
            statistics=replace(sums.statistics, curvature=curvature),
        )
        here, distance = replace(here, variational=there), float(gradient @ step)
    if not distance <= CONVERGED**2:
        raise ValueError(
            f"The variational Gaussian did not converge in {ROUNDS_FROM_THERE} rounds."
        )
    return here


def with_sums(posterior: Posterior, statistics: Statistics) -> Posterior:
    """The same Gaussian's mean with other sums."""
    if posterior.variational is None:
        return replace(posterior, statistics=statistics)
    return replace(posterior, variational=replace(posterior.variational, statistics=statistics))


def recentred(posterior: Posterior) -> Posterior:
    """The variational Gaussian with its averages kept as they are, and m where they and the
    prior put it.

    Averages that are kept stand for a likelihood that is quadratic around m, with the curvature
    of the structure: exact to first order in what changed where the structure is dense. A
    tilted Gaussian stays where it is.
    """
    here = posterior.variational
    assert here is not None
    if posterior.tilted:
        return posterior
    gradient = posterior.sums.gradient + posterior.bound_prior.gradient(posterior.mean)
    step = posterior.covariance.solve(gradient)
    return replace(
        posterior,
        variational=replace(here, mean=here.mean + step, statistics=here.statistics.moved(step)),
    )
