"""Credal sets: bounds on everything a predictive can be asked, over a set of priors.

A set of priors gives a set of predictives, and its convex hull is a credal set. Probabilities and
expectations are linear in the predictive, so their bounds over the hull are those over the members;
a quantile of a mixture lies between the members' quantiles.

Two things widen an answer, and they are kept apart: each member has a *width* of its own (noise and
what the data left open), and the members differ (*imprecision*: what only the prior decides). More
data shrink the second to nothing, not the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ssla._checks import all_in_plain_torch, in_plain_torch
from ssla._checks import check_level as checked_level
from ssla.data import Inputs
from ssla.diagnostics.credal_intervals import (
    Merged,
    merge_regions,
    probability_between,
    smallest_interval,
)
from ssla.diagnostics.predictive_sets import Bounds, FiniteMembers, Members, require_order
from ssla.diagnostics.prior_box import BoxMembers
from ssla.diagnostics.sensitivities import named_priors
from ssla.predictive import Predictive
from ssla.predictive.expectation import Event, expect, probability
from ssla.predictive.predictive import as_probabilities, drop_single_value, scalar_targets
from ssla.priors import EXACT, Box, Prior
from ssla.refit import Refit
from ssla.report import PRIOR, subject_of

if TYPE_CHECKING:
    from ssla.posterior import Posterior

__all__ = ["Bounds", "Credal", "Decomposition", "credal"]

ROUNDS = 20  # of the exchange between an interval and the member that it serves worst; a guess
SLACK = 1e-7  # of probability; a guess
IMPRECISION_POINTS = 41  # of y, between the bounds of the 0.5% and 99.5% quantiles; a guess


class Decomposition(NamedTuple):
    """Why an answer is wide (N,): what the prior decides, and how wide each member is by itself."""

    imprecision: Tensor  # upper mean − lower mean
    narrowest: Tensor  # the least width of a member's interval
    widest: Tensor


@all_in_plain_torch
@dataclass(frozen=True, eq=False)
class Credal:
    """Bounds over a set of predictives, for every input."""

    members: Members
    names: tuple[str, ...]
    convention: str
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return the names of the members and the number of inputs."""
        return (
            f"Credal({', '.join(self.names)}; {self.members.rows} inputs, convention "
            f"{self.convention!r})"
        )

    def cdf(self, y: Any) -> Bounds:
        """Return lower and upper P(Y ≤ y), a p-box: (N,) or (N, k).  TypeError for classes."""
        return self._bounds_at(y, lambda p, value: require_order(p).cdf(value))

    def expectation(self, function: Callable[[Tensor], Tensor]) -> Bounds:
        """Return lower and upper E function(Y) (N,)."""
        return self._bounds_by_row(lambda p: expect(p, function))

    def probability(self, event: Event) -> Bounds:
        """Return lower and upper P(Y ∈ event) (N,); event: (low, high), a list of such, classes,
        or a function of y.
        """
        return self._bounds_by_row(lambda p: probability(p, event))

    @property
    def mean(self) -> Bounds:
        """The bounds of the mean (N,)."""
        return self._bounds_by_row(lambda p: p.mean.double())

    @property
    def stddev(self) -> Bounds:
        """The bounds of the members' standard deviations (N,); a mixture may spread wider."""
        return self._bounds_by_row(lambda p: p.stddev.double())

    def log_prob(self, y: Any) -> Bounds:
        """Return the lower and upper log density at y: (N,) or (N, k)."""
        return self._bounds_at(y, lambda p, value: p.log_prob(value))

    def quantile(self, q: Any) -> Bounds:
        """Return the bounds of the q-quantile: (N,), or (N, k) for several q.

        TypeError for classes.
        """
        levels, single = as_probabilities(q)
        bounds = [self._bounds_by_row(partial(_quantile, level=level)) for level in levels.tolist()]
        lower = torch.stack([each.lower for each in bounds], 1)
        upper = torch.stack([each.upper for each in bounds], 1)
        return Bounds(drop_single_value(lower, single), drop_single_value(upper, single))

    def interval(self, level: float = 0.95) -> Tensor:
        """Compute the smallest interval that every member gives at least that probability (N, 2).

        For a family the worst member of each interval is sought and joined to the set until none is
        left below the level, in at most ROUNDS rounds. TypeError for classes.
        """
        checked_level(level)
        known = self.members.list_members()
        ends = smallest_interval(known, level)
        for _ in range(ROUNDS if self.members.is_family else 0):
            worst = self.members.find_worst(partial(probability_between, ends=ends))
            if bool((worst.value >= level - SLACK).all()):
                return ends
            known = [*known, worst.predictive]
            ends = smallest_interval(known, level)
        return ends

    def hdr(self, level: float = 0.95) -> Merged:
        """Compute the union of the members' highest-density regions: lower and upper ends (N, R),
        padded with NaN.

        For a family (which is connected) the hull of their ends. TypeError for classes.
        """
        checked_level(level)
        if not self.members.is_family:
            return merge_regions([require_order(p).hdr(level) for p in self.members.list_members()])

        def lowest(p: Predictive) -> Tensor:
            """Return the lower end of the region (N,)."""
            lower: Tensor = require_order(p).hdr(level).lower
            return lower[:, 0].double()

        def highest(p: Predictive) -> Tensor:
            """Return the upper end of the region (N,)."""
            upper: Tensor = require_order(p).hdr(level).upper
            return torch.nan_to_num(upper.double(), nan=-torch.inf).amax(1)

        low = self._bounds_by_row(lowest).lower
        high = self._bounds_by_row(highest).upper
        return Merged(low[:, None], high[:, None])

    def imprecision(self, event: Event | None = None) -> Tensor:
        """Return upper − lower probability of an event (N,); without one, the largest gap of the
        p-box over a grid of y.
        """
        if event is not None:
            return self.probability(event).imprecision
        ends = self.quantile([0.005, 0.995])
        share = torch.linspace(0, 1, IMPRECISION_POINTS, dtype=torch.float64)
        y = ends.lower[:, :1] + (ends.upper[:, 1:] - ends.lower[:, :1]) * share
        return self.cdf(y).imprecision.amax(1)

    def decomposition(self, level: float = 0.95) -> Decomposition:
        """Return what the prior decides beside how wide each member is by itself."""
        checked_level(level)
        width = self._bounds_by_row(lambda p: p.interval(level).double().diff(dim=1).squeeze(1))
        return Decomposition(self.mean.imprecision, width.lower, width.upper)

    def _bounds_at(self, y: Any, function: Callable[[Predictive, Tensor], Tensor]) -> Bounds:
        """Compute the bounds of function(·, y) over the set, for y (N,) or (N, k), in the shape of
        y.
        """
        value, single = scalar_targets(y, self.members.rows)
        bounds = self.members.bounds(lambda p, at: function(p, at).double(), value)
        return Bounds(
            drop_single_value(bounds.lower, single), drop_single_value(bounds.upper, single)
        )

    def _bounds_by_row(self, function: Callable[[Predictive], Tensor]) -> Bounds:
        """Compute the bounds of a function of a member, (N,), over the set."""
        nothing = torch.zeros(self.members.rows, 1, dtype=torch.float64)
        bounds = self.members.bounds(lambda p, _: function(p).unsqueeze(1), nothing)
        return Bounds(bounds.lower.squeeze(1), bounds.upper.squeeze(1))


@in_plain_torch
def credal(
    posterior: Posterior,
    x: Inputs,
    priors: Mapping[str, Prior] | Sequence[Prior] | tuple[float, float] | Box,
    convention: str = EXACT,
    refit: str | Refit = "output",
) -> Credal:
    """Return the credal set of predictives at x under a set of priors.

    No pass over the data is made.

    priors: a dict, a list or a range as in `ssla.sensitivity`, or `priors.Box(mean=(low, high),
    precision=(low, high))`: every Gaussian prior in the box, whose extreme members are found by
    optimisation for each question and each input, not taken from the corners.

    Raises TypeError for angles, and ValueError for a box that the posterior cannot search.

    >>> box = ssla.priors.Box(mean=(-1, 1), precision=(0.1, 10))
    >>> c = ssla.credal(post, x, box)     # doctest: +SKIP
    >>> c.probability((0, float("inf")))  # doctest: +SKIP
    """
    if posterior.likelihood.support_for(posterior.network.outputs).kind == "circular":
        raise TypeError(
            "Bounds are for targets on a line: angles have no order. Compare the predictives of "
            "single priors."
        )
    if isinstance(priors, Box):
        box = BoxMembers.build(posterior, x, priors, convention, refit)
        return Credal(box, box.names, convention, box.notes)
    chosen = named_priors(posterior, priors)
    posteriors = [posterior.with_prior(prior, convention) for prior in chosen.values()]
    # Where θ̂ does not follow the prior, the reports say so; each such note once.
    notes = dict.fromkeys(
        note
        for moved in posteriors
        if not moved.updates_mode_from_sums
        for note in moved.report.notes
        if subject_of(note) == PRIOR
    )
    predictives = tuple(moved.predict(x, refit) for moved in posteriors)
    return Credal(FiniteMembers(predictives), tuple(chosen), convention, tuple(notes))


def _quantile(predictive: Predictive, level: float) -> Tensor:
    """Return the quantile of each row in float64 (N,); TypeError for classes."""
    quantile: Tensor = require_order(predictive).icdf(level).double()
    return quantile
