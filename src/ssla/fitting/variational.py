"""The variational Gaussian: the N(m, S) nearest to the posterior in KL divergence, by passes that raise the evidence bound.

At the nearest one

    S⁻¹ = Σ JᵀE[Λ]J − ∇² log π(m)        Σ JᵀE[g] + ∇log π(m) = 0        (less the tilt, where θ̂ is not a mode)

with averages over f ~ N(f(m), J S Jᵀ) in place of the values at the mode. A round is a pass: it takes the averages under the
Gaussian at hand, and with them the bound. The next Gaussian has half of the new averages in its precision and the new mean: with
all of them the precision would oscillate, and the mean need not wait for it. It goes that far, or a share of the way. A share
that lowers the bound is halved, so the bound never falls. For Gaussian noise the Gaussian at the mode is the nearest already.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ssla._checks import warn
from ssla.fitting.sums import Sums, climbing
from ssla.priors import Prior
from ssla.state import FIT, VARIATIONAL, Note, State, Variational, evidence_bound
from ssla.structures import Operator, Structure

TOLERANCE = 1e-4  # nats a parameter: a round that raises the bound by less is the last
ROUGH = 1e-3  # the same, for a Gaussian that only chooses a prior
COARSE = 1e-2  # the same, to choose a prior in between
CLOSE = 1e-2  # squared standard deviations a parameter: a mean that would move farther has not converged
MOST_ROUNDS = 100
NEW = 0.5  # weight of the new averages in the precision
GROWTH = 1.5  # of the share after a round that raised the bound
SHORTEST = 1 / 32  # the least share
NARROWER = 2.0  # factor on the precision's root while the averages do not exist
MOST_NARROWINGS = 30
ROUNDS_OF_MORE = 4  # over rows that are added
ROUNDS_FROM_THERE = 12  # for rows that are slightly others
CONVERGED = 0.03  # standard deviations of the last step of the mean, after these rounds

Average = Callable[[Tensor, Operator], Sums]
"""(mean, covariance) -> the sums of averages over that Gaussian: a pass over the data."""
Choose = Callable[[State], "Prior | None"]
"""A state with averages -> a better prior; None: keep the one it has."""


class Place(NamedTuple):
    """A Gaussian, the averages under it, and its bound."""

    mean: Tensor
    curvature: Structure  # S⁻¹ less the prior's
    covariance: Operator
    averages: Sums
    bound: float


@dataclass(eq=False)
class Climb:
    """The rounds from the Gaussian that a state has, under its prior, θ̂ and tilt.

    `choose`, if given, is asked for another prior whenever the Gaussian has nearly converged, until it keeps the one it has.
    """

    state: State
    average: Average
    choose: Choose | None = None
    tolerance: float = TOLERANCE
    most: int = MOST_ROUNDS

    def run(self) -> State:
        """The state with its variational Gaussian."""
        here = self._start()
        rounds, share, converged = 1, 1.0, False
        while rounds < self.most and not converged:
            there = self._next(here, share)
            rounds += there is not None
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
                converged = self._length(here) <= CLOSE * len(here.mean)
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
        value = evidence_bound(self.state, here.mean, here.covariance, here.averages.statistics.log_likelihood)
        return here._replace(curvature=here.curvature.positive_part(), bound=value)

    def _start(self) -> Place:
        curvature = self.state.sums.curvature
        for _ in range(MOST_NARROWINGS):
            here = self._place(self.state.mean, curvature, self._operator(curvature, self.state.mean))
            if math.isfinite(here.bound):
                return here
            curvature = curvature.scaled(torch.full_like(self.state.theta, NARROWER))
        raise ValueError(
            "gaussian='variational' is not possible: the log likelihood has no finite average around the mode, however narrow "
            "the Gaussian. Use gaussian='laplace', or a log_prob that is finite for every output."
        )

    def _operator(self, curvature: Structure, mean: Tensor) -> Operator:
        return climbing(curvature, self.state.bound_prior.precision(mean))

    def _place(self, mean: Tensor, curvature: Structure, covariance: Operator) -> Place:
        found = self.average(mean, covariance)
        value = evidence_bound(self.state, mean, covariance, found.statistics.log_likelihood)
        return Place(mean, curvature, covariance, found, value)

    def _gradient(self, here: Place) -> Tensor:
        return here.averages.statistics.gradient + self.state.bound_prior.gradient(here.mean) - self.state.tilt

    def _length(self, here: Place) -> float:
        """gᵀSg: the squared distance to the next mean, in standard deviations."""
        gradient = self._gradient(here)
        return float(gradient @ here.covariance.solve(gradient))

    def _next(self, here: Place, share: float) -> Place | None:
        """The Gaussian that far along; None where its precision is not positive definite."""
        new = 1.0 if self.choose is not None else NEW  # a prior that is still to be chosen follows the new averages
        curvature = here.curvature.mixed(here.averages.statistics.curvature, new * share)
        try:
            covariance = self._operator(curvature, here.mean)
        except ValueError:
            return None
        gradient = self._gradient(here)
        own = here.averages.newton is not None
        step = (
            here.averages.newton_step(gradient, self.state.bound_prior.precision(here.mean))
            if own
            else covariance.solve(gradient)
        )
        mean = here.mean + share * step
        return self._place(mean, curvature, covariance)

    def _state_at(self, here: Place) -> State:
        statistics = replace(here.averages.statistics, curvature=here.curvature)
        return replace(self.state, variational=Variational(here.mean, statistics, self.state.tilted))

    def _finished(self, here: Place, rounds: int, converged: bool) -> State:
        report = replace(self.state.report, gaussian=VARIATIONAL, rounds=self.state.report.rounds + rounds)
        if not converged:
            message = (
                f"the variational Gaussian did not converge in {rounds} passes: its mean is "
                f"{math.sqrt(max(self._length(here), 0.0)):.2g} standard deviations from the next one"
            )
            report = replace(report, notes=(*report.notes, Note(message, FIT)))
            warn(f"{message}. It is used as it is. Use a stronger prior, or gaussian='laplace'.", RuntimeWarning)
        return replace(self._state_at(here), report=report)


def with_rows(posterior: State, average: Average) -> State:
    """The variational Gaussian with the averages of more rows, which `average` sums; those of the earlier rows are kept.

    The posterior's own statistics are those of all rows already. A few rounds over the new rows alone.
    """
    here, new = posterior, None
    for _ in range(ROUNDS_OF_MORE):
        found = average(here.mean, here.covariance).statistics
        if new is not None:
            found = replace(found, curvature=new.curvature.mixed(found.curvature, 0.5))
        earlier, new = posterior.sums.moved(here.mean - posterior.mean), found
        here = here.recentred(earlier.merge(found))
    return here


def from_there(posterior: State, average: Average) -> State:
    """The variational Gaussian of slightly other rows, which `average` sums, from the one at hand.

    A fixed number of rounds with half of the new averages. The bound is no stopping rule so close to its maximum: a step can
    overshoot to a point with the same bound, and the error of the nodes hides small gains.
    """
    here, distance = posterior, math.inf
    for _ in range(ROUNDS_FROM_THERE):
        assert here.variational is not None
        sums = average(here.mean, here.covariance)
        gradient = sums.statistics.gradient + here.bound_prior.gradient(here.mean) - here.tilt
        step = sums.newton_step(gradient, here.bound_prior.precision(here.mean))
        curvature = here.sums.curvature.mixed(sums.statistics.curvature, 0.5)
        there = replace(here.variational, mean=here.mean + step, statistics=replace(sums.statistics, curvature=curvature))
        here, distance = replace(here, variational=there), float(gradient @ step)
    if not distance <= CONVERGED**2:
        raise ValueError(f"The variational Gaussian did not converge in {ROUNDS_FROM_THERE} rounds.")
    return here
