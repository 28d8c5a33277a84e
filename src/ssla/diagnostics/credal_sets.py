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
from ssla._checks import level as checked_level
from ssla.data import Inputs
from ssla.diagnostics.credal_intervals import Merged, content, smallest_interval, union
from ssla.diagnostics.predictive_sets import Bounds, FiniteMembers, Members
from ssla.diagnostics.prior_box import BoxMembers
from ssla.diagnostics.sensitivities import named_priors
from ssla.predictive import Predictive
from ssla.predictive.expectation import Event, expect, probability
from ssla.predictive.predictive import answer, probabilities, scalar_targets
from ssla.priors import EXACT, Box, Prior
from ssla.refit import Refit
from ssla.report import PRIOR, subject

if TYPE_CHECKING:
    from ssla.posterior import Posterior

__all__ = ["Bounds", "Credal", "Decomposition", "credal"]

ROUNDS = 20  # of the exchange between an interval and the member that it serves worst
SLACK = 1e-7  # of probability
IMPRECISION_POINTS = 41


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
        return (
            f"Credal({', '.join(self.names)}; {self.members.rows} inputs, convention "
            f"{self.convention!r})"
        )

    def cdf(self, y: Any) -> Bounds:
        """Lower and upper P(Y ≤ y): a p-box.  (N,) or (N, k)."""
        value, single = scalar_targets(y, self.members.rows)
        found = self.members.bounds(lambda p, at: _ordered(p).cdf(at).double(), value)
        return Bounds(answer(found.lower, single), answer(found.upper, single))

    def expectation(self, function: Callable[[Tensor], Tensor]) -> Bounds:
        """Lower and upper E function(Y) (N,)."""
        return self._by_row(lambda p: expect(p, function))

    def probability(self, event: Event) -> Bounds:
        """Lower and upper P(Y ∈ event) (N,): (low, high), a list of such, classes, or a
        function of y.
        """
        return self._by_row(lambda p: probability(p, event))

    @property
    def mean(self) -> Bounds:
        return self._by_row(lambda p: p.mean.double())

    @property
    def stddev(self) -> Bounds:
        """Of the members (a mixture of them may spread wider)."""
        return self._by_row(lambda p: p.stddev.double())

    def log_prob(self, y: Any) -> Bounds:
        """Lower and upper log density at y.  (N,) or (N, k)."""
        value, single = scalar_targets(y, self.members.rows)
        found = self.members.bounds(lambda p, at: p.log_prob(at).double(), value)
        return Bounds(answer(found.lower, single), answer(found.upper, single))

    def _quantile(self, level: float) -> Bounds:
        return self._by_row(lambda p: _ordered(p).icdf(level).double())

    def quantile(self, q: Any) -> Bounds:
        """Bounds of the q-quantile: (N,), or (N, k) for several q."""
        levels, single = probabilities(q)
        found = [self._quantile(level) for level in levels.tolist()]
        lower, upper = (
            torch.stack([b.lower for b in found], 1),
            torch.stack([b.upper for b in found], 1),
        )
        return Bounds(answer(lower, single), answer(upper, single))

    def interval(self, level: float = 0.95) -> Tensor:
        """The smallest interval that every member gives at least that probability (N, 2).

        For a family the worst member of each interval is sought and joined to the set until none is
        left below the level.
        """
        checked_level(level)
        worst = self.members.start()
        found = smallest_interval(worst, level)
        for _ in range(ROUNDS if self.members.open else 0):
            probe = self.members.worst(partial(content, ends=found))
            if bool((probe.value >= level - SLACK).all()):
                return found
            worst = [*worst, probe.predictive]
            found = smallest_interval(worst, level)
        return found

    def hdr(self, level: float = 0.95) -> Merged:
        """The union of the members' highest-density regions: lower and upper ends (N, R), padded
        with NaN.

        For a family (which is connected) the hull of their ends.
        """
        checked_level(level)
        if not self.members.open:
            return union([_ordered(p).hdr(level) for p in self.members.start()])
        low = self._by_row(lambda p: _ordered(p).hdr(level).lower[:, 0].double()).lower
        high = self._by_row(
            lambda p: torch.nan_to_num(_ordered(p).hdr(level).upper.double(), nan=-torch.inf).amax(
                1
            )
        ).upper
        return Merged(low[:, None], high[:, None])

    def imprecision(self, event: Event | None = None) -> Tensor:
        """Upper − lower probability of an event (N,); without one, the largest gap of the p-box
        over a grid of y.
        """
        if event is not None:
            return self.probability(event).imprecision
        ends = self.quantile([0.005, 0.995])
        share = torch.linspace(0, 1, IMPRECISION_POINTS, dtype=torch.float64)
        y = ends.lower[:, :1] + (ends.upper[:, 1:] - ends.lower[:, :1]) * share
        return self.cdf(y).imprecision.amax(1)

    def decomposition(self, level: float = 0.95) -> Decomposition:
        """What the prior decides beside how wide each member is by itself."""
        checked_level(level)
        width = self._by_row(lambda p: p.interval(level).double().diff(dim=1).squeeze(1))
        return Decomposition(self.mean.imprecision, width.lower, width.upper)

    def _by_row(self, function: Callable[[Predictive], Tensor]) -> Bounds:
        nothing = torch.zeros(self.members.rows, 1, dtype=torch.float64)
        found = self.members.bounds(lambda p, _: function(p).unsqueeze(1), nothing)
        return Bounds(found.lower.squeeze(1), found.upper.squeeze(1))


@in_plain_torch
def credal(
    posterior: Posterior,
    x: Inputs,
    priors: Mapping[str, Prior] | Sequence[Prior] | tuple[float, float] | Box,
    convention: str = EXACT,
    refit: str | Refit = "output",
) -> Credal:
    """The credal set of predictives at x under a set of priors, without a pass over the data.

    priors: a dict, a list or a range as in `ssla.sensitivity`, or `priors.Box(mean=(low, high),
    precision=(low, high))`: every Gaussian prior in the box, whose extreme members are found by
    optimisation for each question and each input, not taken from the corners.

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
        members = BoxMembers.of(posterior, x, priors, convention, refit)
        return Credal(members, members.names, convention, members.notes)
    chosen = named_priors(posterior, priors)
    posteriors = [posterior.with_prior(prior, convention) for prior in chosen.values()]
    kept = [p.report.notes for p in posteriors if not p.follows_mode]
    notes = tuple(dict.fromkeys(note for notes in kept for note in notes if subject(note) == PRIOR))
    return Credal(
        FiniteMembers(tuple(p.predict(x, refit) for p in posteriors)),
        tuple(chosen),
        convention,
        notes,
    )


def _ordered(predictive: Predictive) -> Any:
    if predictive.kind == "class":
        raise TypeError("Classes have no order. Ask for probability([…]).")
    return predictive
