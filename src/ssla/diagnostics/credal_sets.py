"""Credal sets: bounds of the answers of a predictive over a set of priors or of likely weights.

A set of priors gives a set of predictives, its *members*, and the convex hull of these is a credal
set. Probabilities and expectations are linear in the predictive, so their bounds over the hull are
those over the members. A quantile of a mixture lies between the members' quantiles.

An answer is wide for two reasons, which are kept apart. Each member has a *width* of its own: the
noise and the uncertainty about the weights that the data leave. And the members differ: this
*imprecision* depends on the prior alone. With more data the imprecision goes to zero, but the width
does not. In a set of likely weights the width of a member is noise alone, and the uncertainty about
the weights is imprecision.

A *family* is a set with infinitely many members, such as all priors of a box. Its bounds are found
by a search in each row (see `predictive_sets`).
"""

from __future__ import annotations

import math
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
    compute_probability_between,
    find_smallest_interval,
    merge_regions,
)
from ssla.diagnostics.likely_outputs import LikelyOutputs
from ssla.diagnostics.predictive_sets import Bounds, FiniteMembers, Members, require_order
from ssla.diagnostics.prior_box import BoxMembers
from ssla.diagnostics.sensitivities import name_priors
from ssla.diagnostics.total_variation import TotalVariation, find_largest_distance
from ssla.predictive import Predictive
from ssla.predictive.expectation import Event, expect, probability
from ssla.predictive.predictive import drop_single_value, parse_probabilities, shape_scalar_targets
from ssla.priors import EXACT, Box, Prior
from ssla.refit import Refit
from ssla.report import PRIOR, subject_of

if TYPE_CHECKING:
    from ssla.posterior import Posterior

__all__ = ["Bounds", "Credal", "Decomposition", "TotalVariation", "credal"]

ROUNDS = 20  # of `Credal.interval`, each with one more member; a guess
SLACK = 1e-7  # by which a member's probability may be below the level; a guess
IMPRECISION_POINTS = 41  # of y, between the bounds of the 0.5% and 99.5% quantiles; a guess


class Decomposition(NamedTuple):
    """How much of the width of an answer is imprecision, and how much is width of its members."""

    imprecision: Tensor  # upper mean − lower mean (N,)
    narrowest: Tensor  # the least width of a member's interval (N,)
    widest: Tensor  # the greatest width of a member's interval (N,)


@all_in_plain_torch
@dataclass(frozen=True, eq=False)
class Credal:
    """Bounds over a set of predictives of the same N inputs. Made by `ssla.credal`."""

    members: Members
    names: tuple[str, ...]  # of the priors, of the coordinates of a box, or of the one set
    convention: str
    notes: tuple[str, ...] = ()  # where θ̂ does not follow the prior
    member_noun: str = "prior"  # what the members differ in, for pictures

    def __repr__(self) -> str:
        """Return the class name with the names, the number of inputs and the convention."""
        return (
            f"Credal({', '.join(self.names)}; {self.members.rows} inputs, convention "
            f"{self.convention!r})"
        )

    def cdf(self, y: Any) -> Bounds:
        """Return lower and upper P(Y ≤ y), a p-box: y (N,) or (N, k) -> the same shape.

        Raises TypeError for classes.
        """
        return self._compute_bounds_at(y, lambda p, value: require_order(p).cdf(value))

    def expectation(self, function: Callable[[Tensor], Tensor]) -> Bounds:
        """Return lower and upper E function(Y) (N,).

        function: applied to each y of a tensor (N, k). Raises ValueError unless it returns one
        value for each y.
        """
        return self._compute_row_bounds(lambda p: expect(p, function))

    def probability(self, event: Event) -> Bounds:
        """Return lower and upper P(Y ∈ event) (N,).

        event: (low, high), a list of such intervals, a class or a list of classes, or a function of
        y. Raises ValueError or TypeError for an event that does not fit the target.
        """
        return self._compute_row_bounds(lambda p: probability(p, event))

    @property
    def outputs(self) -> Bounds:
        """Return the bounds of the outputs f (N, C), f̂ ± √(−2 log α · K).

        Raises TypeError for sets of priors: their members are averages over f.
        """
        return self.members.outputs

    @property
    def mean(self) -> Bounds:
        """Return the bounds of the mean, of the shape of a member's mean.

        It is (N,), (N, D) for D targets and (N, C) for C classes.
        """
        return self._compute_moment_bounds(lambda p: p.mean)

    @property
    def stddev(self) -> Bounds:
        """Return the bounds of the members' standard deviations, of the shape of the mean.

        A mixture of members may have a larger one.
        """
        return self._compute_moment_bounds(lambda p: p.stddev)

    @property
    def probs(self) -> Bounds:
        """Return lower and upper probability of each class (N, C).

        Raises AttributeError for other targets.
        """
        return self._compute_moment_bounds(lambda p: p.probs)

    def log_prob(self, y: Any) -> Bounds:
        """Return the lower and upper log density at y: (N,) or (N, k) -> the same shape."""
        return self._compute_bounds_at(y, lambda p, value: p.log_prob(value))

    def quantile(self, q: Any) -> Bounds:
        """Return the bounds of the q-quantile: (N,) for one q, (N, k) for k of them.

        Raises TypeError for classes, and ValueError unless 0 ≤ q ≤ 1.
        """
        levels, is_single = parse_probabilities(q)
        bounds = [
            self._compute_row_bounds(partial(_compute_quantile, level=level))
            for level in levels.tolist()
        ]
        lower = torch.stack([of_level.lower for of_level in bounds], 1)
        upper = torch.stack([of_level.upper for of_level in bounds], 1)
        return Bounds(drop_single_value(lower, is_single), drop_single_value(upper, is_single))

    def interval(self, level: float = 0.95) -> Tensor:
        """Compute the shortest interval with at least that probability under every member (N, 2).

        For a family, the member with the least probability is searched for and added to the set,
        until none is below the level or after ROUNDS rounds. Raises TypeError for classes, and
        ValueError for counts with too many possible intervals.
        """
        checked_level(level)
        tried_members = self.members.list_members()
        ends = find_smallest_interval(tried_members, level)
        for _ in range(ROUNDS if self.members.is_family else 0):
            worst = self.members.find_worst(partial(compute_probability_between, ends=ends))
            if bool((worst.value >= level - SLACK).all()):
                return ends
            tried_members = [*tried_members, worst.predictive]
            ends = find_smallest_interval(tried_members, level)

        return ends

    def hdr(self, level: float = 0.95) -> Merged:
        """Compute the union of the members' highest-density regions.

        Returns lower and upper ends (N, R), padded with NaN. For a family, whose members change
        continuously, it is the interval from the lowest to the highest end. Raises TypeError for
        classes.
        """
        checked_level(level)
        if not self.members.is_family:
            return merge_regions([require_order(p).hdr(level) for p in self.members.list_members()])

        def find_lowest_end(p: Predictive) -> Tensor:
            """Return the lowest end of a member's region in each row (N,)."""
            lower: Tensor = require_order(p).hdr(level).lower
            return lower[:, 0].double()

        def find_highest_end(p: Predictive) -> Tensor:
            """Return the highest end of a member's region in each row (N,)."""
            upper: Tensor = require_order(p).hdr(level).upper
            return torch.nan_to_num(upper.double(), nan=-torch.inf).amax(1)

        low = self._compute_row_bounds(find_lowest_end).lower
        high = self._compute_row_bounds(find_highest_end).upper
        return Merged(low[:, None], high[:, None])

    def imprecision(self, event: Event | None = None) -> Tensor:
        """Return upper − lower probability of an event (N,).

        event: as in `probability`; None: the largest difference of upper and lower P(Y ≤ y) over a
        grid of y. Raises TypeError for classes without an event.
        """
        if event is not None:
            return self.probability(event).imprecision
        ends = self.quantile([0.005, 0.995])
        share = torch.linspace(0, 1, IMPRECISION_POINTS, dtype=torch.float64)
        y = ends.lower[:, :1] + (ends.upper[:, 1:] - ends.lower[:, :1]) * share
        return self.cdf(y).imprecision.amax(1)

    def decomposition(self, level: float = 0.95) -> Decomposition:
        """Return how far the members' means differ, and how wide their intervals are, (N,) each.

        The widths are the least and the greatest of a member's central interval at that level.
        """
        checked_level(level)
        width = self._compute_row_bounds(
            lambda p: p.interval(level).double().diff(dim=1).squeeze(1)
        )
        return Decomposition(self.mean.imprecision, width.lower, width.upper)

    def distance(self) -> Tensor:
        """Compute the largest total-variation distance between two members (N,), from 0 to 1.

        It is the largest difference, over all events and all pairs of members, of the probabilities
        that two members give to one event. So it is 0 for one member, and it never falls when the
        set grows. A box of priors is searched: the result belongs to two of its members.

        Raises TypeError for several targets. For numbers the error of the quadrature is below 1e-8.
        """
        return find_largest_distance(self.members)

    def total_variation(self) -> TotalVariation:
        """Decompose the uncertainty about a class or a count by total-variation distances.

        The distance of P and Q is ½ Σ_y |P(y) − Q(y)|. With the members P of the set, (N,) each:

          epistemic  max_{P, Q} TV(P, Q): `distance`
          aleatoric  min_{P, c} TV(P, δ_c) = 1 − max_c max_P P(c), with δ_c the certainty of c
          total      their sum

        Mixtures of members change neither part: the first is convex in P and Q, and max_c P(c) is
        convex in P. Names of classes do not matter. If the set grows, epistemic never falls and
        aleatoric never rises. For one member epistemic is 0, and aleatoric is the probability that
        its most probable class is wrong. For the set of all distributions they are 1 and 0.

        For two classes with bounds [a, b] of P(1) the parts are b − a and min(a, 1 − b), and the
        total is min(b, 1 − a). The total is at most 1 for up to three classes. For C classes it is
        at most 2 − 1/⌊C/2⌋, which members reach that are uniform on classes that they do not share.

        Raises TypeError for continuous targets: the distance of a density from certainty is always
        1. They have `distance`.
        """
        kind = self.members.list_members()[0].kind
        if kind == "class":
            highest = self.probs.upper.amax(1)
        elif kind == "count":
            highest = self._compute_row_bounds(_compute_highest_probability).upper
        else:
            raise TypeError(
                "The decomposition is for classes and counts: a density has total-variation "
                f"distance 1 from every single value, and the target is of kind {kind!r}. Ask for "
                "distance(), its epistemic part."
            )

        epistemic = self.distance()
        aleatoric = (1 - highest).clamp_min(0.0)
        return TotalVariation(aleatoric + epistemic, aleatoric, epistemic)

    def _compute_moment_bounds(self, function: Callable[[Predictive], Tensor]) -> Bounds:
        """Compute the bounds of function(member), (N,) or (N, D), entry by entry."""
        shape = function(self.members.list_members()[0]).shape
        count = math.prod(shape[1:])

        def select(p: Predictive, column: Tensor) -> Tensor:
            """Return the entries of function(p) in these columns (T, k)."""
            values = function(p).double().reshape(len(column), count)
            return values.gather(1, column.long())

        columns = torch.arange(count, dtype=torch.float64).expand(shape[0], -1)
        bounds = self.members.compute_bounds(select, columns)
        return Bounds(bounds.lower.reshape(shape), bounds.upper.reshape(shape))

    def _compute_bounds_at(
        self, y: Any, function: Callable[[Predictive, Tensor], Tensor]
    ) -> Bounds:
        """Compute the bounds over the set of function(member, y).

        y and the bounds are (N,) or (N, k). The function maps y (N, k) to (N, k).
        """
        value, is_single = shape_scalar_targets(y, self.members.rows)
        bounds = self.members.compute_bounds(
            lambda p, y_of_rows: function(p, y_of_rows).double(), value
        )
        return Bounds(
            drop_single_value(bounds.lower, is_single), drop_single_value(bounds.upper, is_single)
        )

    def _compute_row_bounds(self, function: Callable[[Predictive], Tensor]) -> Bounds:
        """Compute the bounds over the set of function(member), which is (N,)."""
        # `Members.compute_bounds` needs an argument, which is not used here.
        unused = torch.zeros(self.members.rows, 1, dtype=torch.float64)
        bounds = self.members.compute_bounds(lambda p, _: function(p).unsqueeze(1), unused)
        return Bounds(bounds.lower.squeeze(1), bounds.upper.squeeze(1))


@in_plain_torch
def credal(
    posterior: Posterior,
    x: Inputs,
    priors: Mapping[str, Prior] | Sequence[Prior] | tuple[float, float] | Box | None = None,
    convention: str = EXACT,
    refit: str | Refit = "output",
    *,
    relative_likelihood: float | None = None,
) -> Credal:
    """Return a credal set of predictives at x: those of several priors, or of all likely weights.

    No pass over the data is made.

    priors: a dict, a list or a range as in `ssla.sensitivity`, or `priors.Box(mean=(low, high),
    precision=(low, high))`, which is every Gaussian prior in the box. Its extreme members are found
    by optimisation for each answer and each input; they need not be at the corners.

    relative_likelihood: in place of priors, a number α with 0 < α ≤ 1. The set is that of all
    p(y|f) for the outputs f of weights with density q(θ) ≥ α max q under the posterior's Gaussian
    q = N(m, S): an ellipsoid (f − f̂)ᵀK⁻¹(f − f̂) ≤ −2 log α of outputs. α = 1 leaves the network's
    own answer, and smaller α give larger sets. Members have no doubt about the weights, so their
    bounds are of what y does, not of an average over f. With one output (f or its link is monotone)
    bounds of the mean, the distribution function and quantiles are exact: f̂ ± √(−2 log α · K). With
    more outputs the extreme members are searched for from several starting points: a bound is
    always that of a member, so that it is never too wide.

    Raises TypeError for angles, and ValueError for a box that the posterior cannot search, for both
    or neither of priors and relative_likelihood, and for one that is not in (0, 1].

    >>> box = ssla.priors.Box(mean=(-1, 1), precision=(0.1, 10))
    >>> c = ssla.credal(post, x, box)     # doctest: +SKIP
    >>> c.probability((0, float("inf")))  # doctest: +SKIP
    >>> ssla.credal(post, x, relative_likelihood=0.15).probs  # doctest: +SKIP
    """
    if (priors is None) == (relative_likelihood is None):
        raise ValueError(
            "ssla.credal needs either priors or relative_likelihood=, but got "
            f"{'neither' if priors is None else 'both'}. Give priors (a list, a range or a Box) "
            "for a set of priors, or a number such as relative_likelihood=0.15 for the likely "
            "weights."
        )

    if posterior.likelihood.support_for(posterior.network.outputs).kind == "circular":
        raise TypeError(
            "Bounds are for targets on a line: angles have no order. Compare the predictives of "
            "single priors."
        )

    if priors is None:
        assert relative_likelihood is not None
        return _make_likely_set(posterior, x, relative_likelihood, convention, refit)
    if isinstance(priors, Box):
        box = BoxMembers.build(posterior, x, priors, convention, refit)
        return Credal(box, box.names, convention, box.notes)
    named_priors = name_priors(posterior, priors)
    posteriors = [posterior.with_prior(prior, convention) for prior in named_priors.values()]

    # The notes of the reports that θ̂ does not follow the prior, each once.
    notes = dict.fromkeys(
        note
        for moved in posteriors
        if not moved.updates_mode_from_sums
        for note in moved.report.notes
        if subject_of(note) == PRIOR
    )
    predictives = tuple(moved.predict(x, refit) for moved in posteriors)
    return Credal(FiniteMembers(predictives), tuple(named_priors), convention, tuple(notes))


def _make_likely_set(
    posterior: Posterior,
    x: Inputs,
    relative_likelihood: float,
    convention: str,
    refit: str | Refit,
) -> Credal:
    """Return the credal set of all likely weights; see `credal`.

    Raises ValueError for a convention or a refit, which such a set does not use, and as
    `LikelyOutputs.build`.
    """
    if convention != EXACT or refit != "output":
        raise ValueError(
            "convention and refit are for sets of priors: members of a relative_likelihood set are "
            f"p(y|f) at known outputs, but convention={convention!r} and refit={refit!r} were "
            "given. Leave both out; the posterior keeps its own convention."
        )
    members = LikelyOutputs.build(posterior, x, relative_likelihood)
    name = f"relative likelihood ≥ {relative_likelihood:g}"
    return Credal(members, (name,), posterior.convention, member_noun="likely model")


def _compute_highest_probability(predictive: Predictive) -> Tensor:
    """Return the probability of the most probable count of each row, in float64 (N,)."""
    mode = predictive.law.mode[:, None]
    return predictive.law.log_prob(mode).exp().squeeze(1)


def _compute_quantile(predictive: Predictive, level: float) -> Tensor:
    """Return the quantile of each row at probability `level`, in float64 (N,).

    Raises TypeError for classes.
    """
    quantile: Tensor = require_order(predictive).icdf(level).double()
    return quantile
