"""The laws of mixtures of numbers, counts, vectors and classes.

    p(y) = Σ_m w_m p_m(y)

Densities, probabilities and distribution functions average; quantiles and regions do not and are
searched for. By the law of total variance the members' disagreement, Var_m E_m[y], is added to the
epistemic part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from ssla.maths.quadrature import Regions, bracketed_root
from ssla.predictive.class_integrals import entropy_of
from ssla.predictive.class_law import (
    check_classes,
    draw_classes,
    most_probable,
    smallest_set,
)
from ssla.predictive.count_law import densest_runs
from ssla.predictive.law import Law, ends_of_runs
from ssla.predictive.predictive import vector_targets
from ssla.refit.increments import Increments

NODES = 385  # over all members together
REACH = 5.2  # in normal scores: quantiles from 1e-7 to 1 − 1e-7
FARTHEST_REACH = 8.1  # beyond, 1 − q is less than the rounding error of q
DEEPEST = 700.0  # log p below the peak at which a density counts as zero
COUNT_REACH = 6.2  # in normal scores, for quantiles of counts: 3e-10
BISECTIONS = 50
MOST_COUNTS = 4096
REGION_DRAWS = 4096
ROUNDING = 4 * torch.finfo(torch.float64).eps  # of a cdf, relative to its value


@dataclass(frozen=True, eq=False)
class MixtureLaw(Law):
    """Laws of the same kind and rows, with weights (M,) or (M, N) that sum to one over the
    members.
    """

    laws: tuple[Law, ...]
    weights: Tensor

    @property
    def rows(self) -> int:
        return self.laws[0].rows

    def each(self, ask: Callable[[Law], Tensor]) -> Tensor:
        """One answer of each member, stacked in front: (M, …)."""
        return torch.stack([ask(law) for law in self.laws])

    def average(self, ask: Callable[[Law], Tensor]) -> Tensor:
        """Σ w_m a_m."""
        return self.weigh(self.each(ask))

    def weigh(self, values: Tensor) -> Tensor:
        """(M, N, …) -> (N, …)."""
        return (self._beside(values) * values).sum(0)

    def _beside(self, values: Tensor) -> Tensor:
        """The weights in a shape that broadcasts with values (M, N, …)."""
        by_row = self.weights if self.weights.dim() == 2 else self.weights[:, None]
        return by_row.reshape(*by_row.shape, *[1] * (values.dim() - 2))

    def log_average(self, ask: Callable[[Law], Tensor]) -> Tensor:
        """log Σ w_m exp(a_m)."""
        values = self.each(ask)
        return (values + self._beside(values).log()).logsumexp(0)

    @cached_property
    def mean(self) -> Tensor:
        return self.average(lambda m: m.mean)

    @property
    def variance(self) -> Tensor:
        return self.epistemic + self.aleatoric

    @cached_property
    def epistemic(self) -> Tensor:
        """E_m of the members' own, and Var_m E_m[y]."""
        disagreement = self.weigh((self.each(lambda m: m.mean) - self.mean) ** 2)
        return self.average(lambda m: m.epistemic) + disagreement

    @cached_property
    def aleatoric(self) -> Tensor:
        return self.average(lambda m: m.aleatoric)

    @property
    def mass(self) -> Tensor:
        """The average of the members' integrals before they were normalised."""
        return self.average(lambda m: m.mass)

    def check(self, y: Tensor) -> None:
        for law in self.laws:
            law.check(y)

    def log_prob(self, y: Tensor) -> Tensor:
        return self.log_average(lambda m: m.log_prob(y))

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """n draws for each row, each from a member taken with its weight: (n, N, …)."""
        if self.weights.dim() == 2:
            picks = draw_classes(self.weights.mT, n, generator)
        else:
            count = n * self.rows
            picks = torch.multinomial(
                self.weights, max(count, 1), replacement=True, generator=generator
            )  # not less than one
            picks = picks[:count].reshape(n, self.rows)
        draws = self.each(lambda m: m.sample(n, generator))  # (M, n, N, …)
        index = picks.reshape(1, n, self.rows, *[1] * (draws.dim() - 3)).expand(1, *draws.shape[1:])
        return draws.gather(0, index).squeeze(0)

    def increments(self, y: Tensor) -> Increments:
        """Of the only member with any weight; several have increments each, but not together."""
        if len(self.laws) == 1:
            return self.laws[0].increments(y)
        raise TypeError(
            "The log of a mixture is not a sum of increments. Ask its members one by one: "
            "[member.increments(y) for member in predictive.members]."
        )


@final
@dataclass(frozen=True, eq=False)
class ScalarMixtureLaw(MixtureLaw):
    """Σ w_m p_m(y) over the real line, or over counts.

    log_prob and cdf are exact averages; quantiles are searched for.
    """

    @property
    def kind(self) -> str:
        return self.laws[0].kind

    def cdf(self, y: Tensor) -> Tensor:
        return self.average(lambda m: m.cdf(y))

    def below(self, y: Tensor) -> Tensor:
        return self.average(lambda m: m.below(y))

    def icdf(self, q: Tensor) -> Tensor:
        """Between the members' own quantiles."""
        ends = self.each(lambda m: m.icdf(q))
        if self.kind == "count":
            return _first_count(lambda y: self.cdf(y) - q, ends.amin(0), ends.amax(0))
        return bracketed_root(lambda y: self.cdf(y) - q, ends.amin(0), ends.amax(0), ROUNDING * q)

    @cached_property
    def _nodes(self) -> tuple[Tensor, Tensor]:
        """Places (N, F) in order and log densities there: quantiles of every member, staggered;
        or the counts between them.
        """
        return self._counts if self.kind == "count" else self._nodes_to(REACH)

    def _nodes_to(self, reach: float) -> tuple[Tensor, Tensor]:
        """The nodes of a continuous mixture, between quantiles at ± reach normal scores."""
        count = len(self.laws)
        per_member = max(NODES // count, 33)
        steps = torch.linspace(-reach, reach, per_member * count, dtype=torch.float64)
        parts = [m.icdf(torch.special.ndtr(steps[i::count])) for i, m in enumerate(self.laws)]
        places = torch.cat(parts, 1).sort(1).values
        return places, self.log_prob(places)

    @cached_property
    def mode(self) -> Tensor:
        """The highest point: of the densest node and its neighbours, by a parabola through log
        p.
        """
        places, logs = self._nodes
        if self.kind == "count":
            return places.gather(1, logs.argmax(1, keepdim=True)).squeeze(1)
        best = logs.argmax(1, keepdim=True).clamp(1, places.shape[1] - 2)
        (a, b, c), (fa, fb, fc) = (
            tuple(t.gather(1, best + s) for s in (-1, 0, 1)) for t in (places, logs)
        )
        left, right = (b - a) * (fb - fc), (b - c) * (fb - fa)
        turn = b - 0.5 * ((b - a) * left - (b - c) * right) / (left - right)
        good = torch.isfinite(turn) & (turn >= a) & (turn <= c)
        return torch.where(good, turn, places.gather(1, logs.argmax(1, keepdim=True))).squeeze(1)

    def hdr(self, level: float) -> Regions:
        """{y: p(y) ≥ c} with that probability: a union of intervals.

        c is found by bisection on the exact probability of the set; between nodes log p is taken as
        linear. An atom at the lowest value has no length, so it is always inside. Where no interval
        begins there, it is an interval by itself.
        """
        if self.kind == "count":
            return self._runs(level)
        reach = _reach_of(level)
        places, logs = self._nodes if reach == REACH else self._nodes_to(reach)
        lowest = places[:, :1]
        atom = (self.cdf(lowest) - self.below(lowest)).squeeze(1)
        needed = level - atom
        low, high = torch.maximum(logs[:, 0], logs[:, -1]), logs.amax(1)
        # a density that is high at an end, as of positive numbers at zero, needs a lower threshold
        short = self._probability(_above(places, logs, low)) < needed
        low = torch.where(short, torch.maximum(logs.amin(1), high - DEEPEST), low)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            enough = self._probability(_above(places, logs, middle)) >= needed
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        region = _above(places, logs, torch.where(needed > 0, low, torch.inf))
        return _with_atom(region, lowest, (atom > 0)[:, None])

    @cached_property
    def _counts(self) -> tuple[Tensor, Tensor]:
        """All counts that matter (every second, third, … where they are more than thousands)."""
        ends = self.icdf(torch.tensor([1e-9, 1 - 1e-9], dtype=torch.float64))
        width = ends[:, 1] - ends[:, 0] + 1
        step = (width / MOST_COUNTS).ceil()
        most = int((width / step).max().ceil()) if len(width) else 1
        places = ends[:, :1] + step[:, None] * torch.arange(most, dtype=torch.float64)
        return places, self.log_prob(places)

    def _runs(self, level: float) -> Regions:
        """The smallest set of counts with at least that probability, as runs lower … upper."""
        edges = self._count_edges
        first, last = edges[:, :-1], edges[:, 1:] - 1
        share = self.cdf(last) - self.cdf(first - 1)
        heights = torch.where(
            last >= first, self.log_prob(((first + last) / 2).floor().clamp_min(0)), -torch.inf
        )
        return densest_runs(edges, heights, share, level)

    @property
    def _count_edges(self) -> Tensor:
        """Ends of blocks of counts (N, k + 1): single counts, or blocks between quantiles where the
        counts are more than MOST_COUNTS."""
        places, _ = self._counts
        step = places[:, 1:2] - places[:, :1] if places.shape[1] > 1 else torch.ones_like(places)
        edges = torch.cat([places, places[:, -1:] + 1], 1)
        if not bool((step > 1).any()):
            return edges
        count = len(self.laws)
        per_member = MOST_COUNTS // (2 * count)
        scores = torch.linspace(-COUNT_REACH, COUNT_REACH, per_member * count, dtype=torch.float64)
        starts = torch.cat(
            [m.icdf(torch.special.ndtr(scores[i::count])) for i, m in enumerate(self.laws)], 1
        )
        blocks = torch.cat([starts, starts + 1], 1).sort(1).values
        size = max(blocks.shape[1], edges.shape[1])
        blocks, edges = (
            torch.cat([e, e[:, -1:].expand(-1, size - e.shape[1])], 1) for e in (blocks, edges)
        )
        return torch.where(step > 1, blocks, edges)

    def _probability(self, region: Regions) -> Tensor:
        ends = torch.cat([region.lower, region.upper], 1)
        F = torch.where(ends.isnan(), 0.0, self.cdf(torch.nan_to_num(ends)))
        half = region.lower.shape[1]
        return (F[:, half:] - F[:, :half]).sum(1)


@dataclass(frozen=True, eq=False)
class DensityRegion:
    """{y: log p(y) ≥ threshold}, one threshold for each row (N,)."""

    law: Law
    threshold: Tensor

    def contains(self, y: Any) -> Tensor:
        """(N, D) -> (N,) bool."""
        value = vector_targets(y, *self.law.mean.shape)
        self.law.check(value)
        return self.law.log_prob(value) >= self.threshold


@final
@dataclass(frozen=True, eq=False)
class VectorMixtureLaw(MixtureLaw):
    """Σ w_m p_m(y), y (D,). Distribution functions and quantiles are of each target by itself."""

    kind = "vector"

    @cached_property
    def covariance(self) -> Tensor:
        off = self.each(lambda m: m.mean) - self.mean
        return self.average(lambda m: m.covariance) + self.weigh(
            off.unsqueeze(-1) * off.unsqueeze(-2)
        )

    @property
    def variance(self) -> Tensor:
        return self.covariance.diagonal(dim1=1, dim2=2)

    @property
    def mode(self) -> Tensor:
        """The densest of the members' modes: exact where they lie apart or coincide, close
        elsewhere.
        """
        modes = self.each(lambda m: m.mode).movedim(0, 1)  # (N, M, D)
        return modes[torch.arange(len(modes)), self.log_prob(modes).argmax(1)]

    def cdf(self, y: Tensor) -> Tensor:
        return self.average(lambda m: m.cdf(y))

    def icdf(self, q: Tensor) -> Tensor:
        ends = self.each(lambda m: m.icdf(q))
        return bracketed_root(
            lambda y: self.cdf(y.mT).mT - q, ends.amin(0), ends.amax(0), ROUNDING * q
        )

    def hdr(self, level: float) -> DensityRegion:
        """The densest region; its threshold is a quantile over 4,096 fixed draws (level ± 0.01)."""
        draws = self.sample(REGION_DRAWS, torch.Generator().manual_seed(0)).movedim(0, 1)
        logs = self.log_prob(draws)
        return DensityRegion(self, logs.quantile(1 - level, dim=1) if len(logs) else logs[:, 0])


@final
@dataclass(frozen=True, eq=False)
class ClassMixtureLaw(MixtureLaw):
    """P(Y = c) = Σ w_m P_m(Y = c). Mean and variance are of the class indicators."""

    kind = "class"

    @cached_property
    def _log_probs(self) -> Tensor:
        classes = torch.arange(self.laws[0].probs.shape[1], dtype=torch.float64).expand(
            self.rows, -1
        )
        return self.log_average(lambda m: m.log_prob(classes))

    @property
    def probs(self) -> Tensor:
        return self._log_probs.exp()

    @property
    def mode(self) -> Tensor:
        return most_probable(self._log_probs)

    @cached_property
    def entropy(self) -> Tensor:
        return entropy_of(self._log_probs)

    @cached_property
    def mutual_information(self) -> Tensor:
        """H(Σ w_m E_m p) − Σ w_m E_m H(p): the members' own, and their disagreement."""
        noise = self.average(lambda m: m.entropy - m.mutual_information)
        return (self.entropy - noise).clamp_min(0)

    def check(self, y: Tensor) -> None:
        check_classes(y, self._log_probs.shape[1])

    def log_prob(self, y: Tensor) -> Tensor:
        return self._log_probs.gather(1, y.long())

    def interval(self, level: float) -> Tensor:
        return smallest_set(self.probs, level)

    def hdr(self, level: float) -> Tensor:
        """The same as `interval`."""
        return smallest_set(self.probs, level)

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        return draw_classes(self.probs, n, generator)


def _first_count(function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """The smallest whole number in [low, high] where the rising function is no longer negative.

    From 2⁵³ on, neighbouring floating-point numbers differ by more than one: the search ends at
    neighbours.
    """
    low, high = low - 1, high.clone()
    while True:
        middle = ((low + high) / 2).floor()
        if not bool(((middle > low) & (middle < high)).any()):
            break
        enough = function(middle) >= -1e-14
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high


def _reach_of(level: float) -> float:
    """Normal scores between which nodes must lie for a region of that probability."""
    tail = torch.tensor((1 - level) / 8, dtype=torch.float64)
    return max(REACH, min(-float(torch.special.ndtri(tail)), FARTHEST_REACH))


def _with_atom(region: Regions, place: Tensor, wanted: Tensor) -> Regions:
    """Add the lowest value (N, 1) in the rows where it is wanted (N, 1) and not inside yet."""
    alone = wanted & ~(region.lower[:, :1] <= place)
    if not bool(alone.any()):
        return region
    nothing = torch.full_like(place, math.nan)
    ends = (
        torch.where(alone, torch.cat([place, end], 1), torch.cat([end, nothing], 1))
        for end in region
    )
    return Regions(*ends)


def _above(places: Tensor, logs: Tensor, threshold: Tensor) -> Regions:
    """Where log p exceeds the threshold (N,), ends by linear interpolation."""
    excess = logs - threshold[:, None]
    lower, upper = ends_of_runs(excess > 0)
    ends = []
    for at, step in ((lower, -1), (upper, 1)):
        here = at.clamp_min(0)
        other = (here + step).clamp(0, places.shape[1] - 1)
        a, b = excess.gather(1, here), excess.gather(1, other)
        x, y = places.gather(1, here), places.gather(1, other)
        share = torch.where(a - b > 0, a / (a - b), torch.zeros_like(a)).clamp(0, 1)
        ends.append(torch.where(at < 0, math.nan, x + share * (y - x)))
    return Regions(*ends)
