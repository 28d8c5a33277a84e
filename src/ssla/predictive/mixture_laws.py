"""The laws of mixtures of numbers, counts, vectors and classes.

    p(y) = Σ_m w_m p_m(y)

Densities, probabilities and distribution functions average; quantiles and regions do not and are
searched for. By the law of total variance the members' disagreement, Var_m E_m[y], is added to the
epistemic part.

M members have weights w_m, with sum 1. A normal score is the quantile of a standard normal: the
quantile of y at the normal score u is that at the probability Φ(u). An atom is a single value with
a positive probability.
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
from ssla.predictive.class_law import ClassProbabilities, draw_classes
from ssla.predictive.count_law import find_densest_runs
from ssla.predictive.law import Law, find_runs
from ssla.predictive.predictive import shape_vector_targets
from ssla.refit.increments import Increments

# How finely a mixture is searched. These numbers are guesses unless a reason is given.
NODES = 385  # over all members together
LEAST_NODES = 33  # of one member
REACH = 5.2  # in normal scores: quantiles from 1e-7 to 1 − 1e-7
FARTHEST_REACH = 8.1  # beyond, 1 − q is less than the rounding error of q
DEEPEST = 700.0  # log p below the peak at which a density counts as zero
COUNT_REACH = 6.2  # in normal scores, for quantiles of counts: 3e-10
COUNT_TAIL = 1e-9  # of the probability, beyond the counts that are searched on either side
BISECTIONS = 50  # of a difference of log p: to rounding error
MOST_COUNTS = 4096  # that are looked at one by one
REGION_DRAWS = 4096  # for the threshold of a region: a level ± 0.01
ROUNDING = 4 * torch.finfo(torch.float64).eps  # of a cdf, relative to its value
CDF_ROUNDING = 1e-14  # of the difference of a cdf of counts and a probability


@dataclass(frozen=True, eq=False)
class MixtureLaw(Law):
    """The mixture of M laws of the same kind of target at the same N inputs."""

    laws: tuple[Law, ...]
    weights: Tensor  # (M,), or (M, N) if they differ by input; their sum over the members is 1

    @property
    def rows(self) -> int:
        """Return N, the number of inputs."""
        return self.laws[0].rows

    def stack_members(self, ask: Callable[[Law], Tensor]) -> Tensor:
        """Return the answers ask(member) (N, …) of all members in one tensor (M, N, …)."""
        return torch.stack([ask(law) for law in self.laws])

    def average_members(self, ask: Callable[[Law], Tensor]) -> Tensor:
        """Return Σ w_m a_m (N, …) over the answers a_m = ask(member) (N, …)."""
        return self._sum_weighted(self.stack_members(ask))

    def _sum_weighted(self, values: Tensor) -> Tensor:
        """Return Σ w_m values_m: (M, N, …) -> (N, …)."""
        return (self._broadcast_weights(values) * values).sum(0)

    def _broadcast_weights(self, values: Tensor) -> Tensor:
        """Return the weights in a shape that broadcasts with values (M, N, …)."""
        by_row = self.weights if self.weights.dim() == 2 else self.weights[:, None]
        return by_row.reshape(*by_row.shape, *[1] * (values.dim() - 2))

    def log_average_members(self, ask: Callable[[Law], Tensor]) -> Tensor:
        """Return log Σ w_m exp(a_m) (N, …) over the answers a_m = ask(member) (N, …)."""
        values = self.stack_members(ask)
        return (values + self._broadcast_weights(values).log()).logsumexp(0)

    @cached_property
    def mean(self) -> Tensor:
        """Return Σ w_m E_m[y], of the shape of a member's mean."""
        return self.average_members(lambda m: m.mean)

    @property
    def variance(self) -> Tensor:
        """Return Var[y] = epistemic + aleatoric, of the shape of the mean."""
        return self.epistemic + self.aleatoric

    @cached_property
    def epistemic(self) -> Tensor:
        """Return the average of the members' epistemic variances, plus Var_m E_m[y]."""
        disagreement = self._sum_weighted((self.stack_members(lambda m: m.mean) - self.mean) ** 2)
        return self.average_members(lambda m: m.epistemic) + disagreement

    @cached_property
    def aleatoric(self) -> Tensor:
        """Return the average of the members' aleatoric variances."""
        return self.average_members(lambda m: m.aleatoric)

    @property
    def mass(self) -> Tensor:
        """Return the average of the members' masses (N,)."""
        return self.average_members(lambda m: m.mass)

    def check(self, y: Tensor) -> None:
        """Raise ValueError where y is outside the support of any member."""
        for law in self.laws:
            law.check(y)

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log Σ w_m p_m(y), of the shape that a member returns."""
        return self.log_average_members(lambda m: m.log_prob(y))

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw n values for each row, each from a member that is drawn by its weight: (n, N, …).

        Every member draws n values of each row, of which one member's are kept.
        """
        if self.weights.dim() == 2:
            chosen = draw_classes(self.weights.mT, n, generator)
        else:
            chosen = draw_indices(self.weights, n, self.rows, generator)
        draws = self.stack_members(lambda m: m.sample(n, generator))  # (M, n, N, …)
        index = chosen.reshape(1, n, self.rows, *[1] * (draws.dim() - 3))
        return draws.gather(0, index.expand(1, *draws.shape[1:])).squeeze(0)

    def increments(self, y: Tensor) -> Increments:
        """Return the increments at y of a single member.

        Raises TypeError for several members: a mixture of them has no increments.
        """
        if len(self.laws) == 1:
            return self.laws[0].increments(y)
        raise TypeError(
            "The log of a mixture is not a sum of increments. Ask its members one by one: "
            "[member.increments(y) for member in predictive.members]."
        )


@final
@dataclass(frozen=True, eq=False)
class ScalarMixtureLaw(MixtureLaw):
    """The mixture Σ w_m p_m(y) of numbers or of counts.

    log_prob and cdf are exact averages. Quantiles, mode and regions are searched for.
    """

    @property
    def kind(self) -> str:
        """Return the kind of the members, "scalar" or "count"."""
        return self.laws[0].kind

    def cdf(self, y: Tensor) -> Tensor:
        """Return Σ w_m P_m(Y ≤ y), (N, k) -> (N, k)."""
        return self.average_members(lambda m: m.cdf(y))

    def below(self, y: Tensor) -> Tensor:
        """Return Σ w_m P_m(Y < y), (N, k) -> (N, k)."""
        return self.average_members(lambda m: m.below(y))

    def icdf(self, q: Tensor) -> Tensor:
        """Return the quantiles at probabilities q (k,): (N, k).

        They are searched for between the least and the greatest of the members' quantiles.
        """
        ends = self.stack_members(lambda m: m.icdf(q))
        if self.kind == "count":
            return _find_first_count(lambda y: self.cdf(y) - q, ends.amin(0), ends.amax(0))
        return bracketed_root(lambda y: self.cdf(y) - q, ends.amin(0), ends.amax(0), ROUNDING * q)

    @cached_property
    def _search_nodes(self) -> tuple[Tensor, Tensor]:
        """Return the y (N, F) at which the mixture is searched, in order, and log p there (N, F).

        For numbers these are quantiles of all members. For counts see `_searched_counts`.
        """
        if self.kind == "count":
            return self._searched_counts
        return self._make_search_nodes(REACH)

    def _make_search_nodes(self, reach: float) -> tuple[Tensor, Tensor]:
        """Return nodes (N, F) of a mixture of numbers, in order, and log p there (N, F).

        The nodes are quantiles of the members, between those at ± reach normal scores.
        """
        per_member = max(NODES // len(self.laws), LEAST_NODES)
        nodes = self._compute_member_quantiles(reach, per_member).sort(1).values
        return nodes, self.log_prob(nodes)

    def _compute_member_quantiles(self, reach: float, per_member: int) -> Tensor:
        """Return `per_member` quantiles of each member (N, M · per_member), not in order.

        The quantiles are at normal scores from −reach to reach. Each member has scores of its own,
        so that the quantiles of equal members do not coincide.
        """
        count = len(self.laws)
        scores = torch.linspace(-reach, reach, per_member * count, dtype=torch.float64)
        return torch.cat(
            [m.icdf(torch.special.ndtr(scores[i::count])) for i, m in enumerate(self.laws)], 1
        )

    @cached_property
    def mode(self) -> Tensor:
        """Return the y of highest density (N,).

        For numbers it is the vertex of the parabola of log p through the densest node and its
        neighbours, or the densest node where the parabola has no vertex between them.
        """
        nodes, logs = self._search_nodes
        densest = nodes.gather(1, logs.argmax(1, keepdim=True))
        if self.kind == "count":
            return densest.squeeze(1)
        # log p is fa, fb, fc at three nodes a < b < c.
        centre = logs.argmax(1, keepdim=True).clamp(1, nodes.shape[1] - 2)
        a, b, c = (nodes.gather(1, centre + step) for step in (-1, 0, 1))
        fa, fb, fc = (logs.gather(1, centre + step) for step in (-1, 0, 1))
        # The vertex of a parabola through three points, as in Brent's method.
        to_left, to_right = (b - a) * (fb - fc), (b - c) * (fb - fa)
        vertex = b - 0.5 * ((b - a) * to_left - (b - c) * to_right) / (to_left - to_right)
        usable = torch.isfinite(vertex) & (vertex >= a) & (vertex <= c)
        return torch.where(usable, vertex, densest).squeeze(1)

    def hdr(self, level: float) -> Regions:
        """Return {y: p(y) ≥ c} with probability `level`, as a union of intervals or runs of counts.

        The threshold c is found by bisection on the exact probability of the set; between nodes
        log p is taken as linear. An atom at the lowest value has no length, so it is always inside.
        If no interval begins there, it is an interval by itself.
        """
        if self.kind == "count":
            return self._find_densest_counts(level)
        reach = _choose_reach(level)
        nodes, logs = self._search_nodes if reach == REACH else self._make_search_nodes(reach)
        lowest = nodes[:, :1]
        atom = (self.cdf(lowest) - self.below(lowest)).squeeze(1)
        needed = level - atom

        # The threshold is between log p at the ends of the nodes and the maximum. It is lower where
        # the density is high at an end, as of positive numbers at zero.
        low = torch.maximum(logs[:, 0], logs[:, -1])
        high = logs.amax(1)
        is_lower = self._compute_probability(_find_region_above(nodes, logs, low)) < needed
        low = torch.where(is_lower, torch.maximum(logs.amin(1), high - DEEPEST), low)
        for _ in range(BISECTIONS):
            threshold = (low + high) / 2
            region = _find_region_above(nodes, logs, threshold)
            enough = self._compute_probability(region) >= needed
            low = torch.where(enough, threshold, low)
            high = torch.where(enough, high, threshold)

        # Where the atom alone is enough, the rest of the region is empty.
        region = _find_region_above(nodes, logs, torch.where(needed > 0, low, torch.inf))
        return _add_atom(region, lowest, (atom > 0)[:, None])

    @cached_property
    def _searched_counts(self) -> tuple[Tensor, Tensor]:
        """Return the counts (N, F) that hold almost all of the probability, and log p there (N, F).

        COUNT_TAIL is beyond them on either side. In rows with more than MOST_COUNTS of them, only
        every second, third, … count is returned.
        """
        ends = self.icdf(torch.tensor([COUNT_TAIL, 1 - COUNT_TAIL], dtype=torch.float64))
        width = ends[:, 1] - ends[:, 0] + 1
        step = (width / MOST_COUNTS).ceil()
        most = int((width / step).max().ceil()) if len(width) else 1
        # Rows with fewer counts go on beyond their last one.
        counts = ends[:, :1] + step[:, None] * torch.arange(most, dtype=torch.float64)
        return counts, self.log_prob(counts)

    def _find_densest_counts(self, level: float) -> Regions:
        """Return the smallest set of counts with probability `level`, as runs of counts (N, R)."""
        edges = self._count_edges
        first, last = edges[:, :-1], edges[:, 1:] - 1
        share = self.cdf(last) - self.cdf(first - 1)
        heights = torch.where(
            last >= first, self.log_prob(((first + last) / 2).floor().clamp_min(0)), -torch.inf
        )
        return find_densest_runs(edges, heights, share, level)

    @property
    def _count_edges(self) -> Tensor:
        """Return the edges of blocks of counts (N, k + 1).

        Block j holds the counts from edge j up to edge j + 1, without the latter. Blocks are single
        counts; in rows with more than MOST_COUNTS their edges are quantiles of the members.
        """
        counts, _ = self._searched_counts
        step = counts[:, 1:2] - counts[:, :1] if counts.shape[1] > 1 else torch.ones_like(counts)
        edges = torch.cat([counts, counts[:, -1:] + 1], 1)
        if not bool((step > 1).any()):
            return edges
        # Each quantile is a block by itself, so that a peak at one count stays visible.
        starts = self._compute_member_quantiles(COUNT_REACH, MOST_COUNTS // (2 * len(self.laws)))
        quantile_edges = torch.cat([starts, starts + 1], 1).sort(1).values
        # Both get the same number of edges: the last one is repeated, for blocks without a count.
        size = max(quantile_edges.shape[1], edges.shape[1])
        quantile_edges = _repeat_last(quantile_edges, size)
        edges = _repeat_last(edges, size)
        return torch.where(step > 1, quantile_edges, edges)

    def _compute_probability(self, region: Regions) -> Tensor:
        """Return the probability (N,) of a union of intervals (N, R), padded with NaN."""
        ends = torch.cat([region.lower, region.upper], 1)
        below = torch.where(ends.isnan(), 0.0, self.cdf(torch.nan_to_num(ends)))
        half = region.lower.shape[1]
        return (below[:, half:] - below[:, :half]).sum(1)


@dataclass(frozen=True, eq=False)
class DensityRegion:
    """The region {y: log p(y) ≥ threshold}, with one threshold for each row (N,)."""

    law: Law
    threshold: Tensor

    def contains(self, y: Any) -> Tensor:
        """Tell for each row whether y (N, D) is inside: (N,) bool.

        Raises ValueError for another number of rows or targets, and where y is not finite.
        """
        value = shape_vector_targets(y, *self.law.mean.shape)
        self.law.check(value)
        return self.law.log_prob(value) >= self.threshold


@final
@dataclass(frozen=True, eq=False)
class VectorMixtureLaw(MixtureLaw):
    """The mixture Σ w_m p_m(y) of vectors y (D,). cdf and quantiles are those of each target."""

    kind = "vector"

    @cached_property
    def covariance(self) -> Tensor:
        """Return the average of the members' covariances, plus that of their means (N, D, D)."""
        from_mean = self.stack_members(lambda m: m.mean) - self.mean
        disagreement = self._sum_weighted(from_mean.unsqueeze(-1) * from_mean.unsqueeze(-2))
        return self.average_members(lambda m: m.covariance) + disagreement

    @property
    def variance(self) -> Tensor:
        """Return the variance of each target (N, D)."""
        return self.covariance.diagonal(dim1=1, dim2=2)

    @property
    def mode(self) -> Tensor:
        """Return the densest of the members' modes (N, D).

        This is the mode of the mixture if the members' modes are far apart or coincide, and an
        approximation otherwise.
        """
        modes = self.stack_members(lambda m: m.mode).movedim(0, 1)  # (N, M, D)
        return modes[torch.arange(len(modes)), self.log_prob(modes).argmax(1)]

    def cdf(self, y: Tensor) -> Tensor:
        """Return Σ w_m P_m(Y_d ≤ y_d) of each target, of y's shape."""
        return self.average_members(lambda m: m.cdf(y))

    def icdf(self, q: Tensor) -> Tensor:
        """Return the quantiles of each target at probabilities q (k,): (N, D, k).

        They are searched for between the least and the greatest of the members' quantiles.
        """
        ends = self.stack_members(lambda m: m.icdf(q))
        # `cdf` has the targets last, and the search the quantiles.
        return bracketed_root(
            lambda y: self.cdf(y.mT).mT - q, ends.amin(0), ends.amax(0), ROUNDING * q
        )

    def hdr(self, level: float) -> DensityRegion:
        """Return the region {y: log p(y) ≥ c} whose probability is about `level`.

        The threshold c of a row is a quantile of log p over REGION_DRAWS draws with a fixed seed.
        """
        draws = self.sample(REGION_DRAWS, torch.Generator().manual_seed(0)).movedim(0, 1)
        logs = self.log_prob(draws)
        return DensityRegion(self, logs.quantile(1 - level, dim=1) if len(logs) else logs[:, 0])


@final
@dataclass(frozen=True, eq=False)
class ClassMixtureLaw(ClassProbabilities, MixtureLaw):
    """The mixture P(Y = c) = Σ w_m P_m(Y = c) of classes.

    Mean and variance are of the same quantities as in the members: of the indicators of the
    classes, or for Bernoulli of y itself.
    """

    @cached_property
    def log_probs(self) -> Tensor:
        """Return log Σ w_m P_m(Y = c) for every class c (N, C)."""
        classes = torch.arange(self.laws[0].probs.shape[1], dtype=torch.float64)
        return self.log_average_members(lambda m: m.log_prob(classes.expand(self.rows, -1)))

    @cached_property
    def mutual_information(self) -> Tensor:
        """Return H(Σ w_m E_m p) − Σ w_m E_m H(p) in nats (N,).

        The result contains the mutual information of the members and their disagreement.
        """
        noise = self.average_members(lambda m: m.entropy - m.mutual_information)
        return (self.entropy - noise).clamp_min(0)


def make_mixture_of_one(law: Law) -> ScalarMixtureLaw:
    """Return a mixture with a single law of numbers, whose mode and regions are found by search."""
    return ScalarMixtureLaw((law,), torch.ones(1, dtype=torch.float64))


def draw_indices(weights: Tensor, n: int, rows: int, generator: torch.Generator | None) -> Tensor:
    """Draw numbers (n, rows) from 0 to K − 1, each with the probability in weights (K,).

    generator: of the random numbers; None for torch's own.
    """
    count = n * rows
    # torch.multinomial refuses to draw nothing.
    drawn = torch.multinomial(weights, max(count, 1), replacement=True, generator=generator)
    return drawn[:count].reshape(n, rows)


def _repeat_last(values: Tensor, size: int) -> Tensor:
    """Return values (N, k) with the last column repeated up to `size` columns: (N, size)."""
    return torch.cat([values, values[:, -1:].expand(-1, size - values.shape[1])], 1)


def _find_first_count(function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Find the smallest whole numbers in [low, high] (N, k) where a rising function is at least 0.

    The function must be at least 0 at `high`. Values down to −CDF_ROUNDING count as 0. From 2⁵³ on,
    neighbouring floating-point numbers differ by more than one, and the search ends at neighbours.
    """
    # The function is negative at low and not at high.
    low, high = low - 1, high.clone()
    while True:
        count = ((low + high) / 2).floor()
        if not bool(((count > low) & (count < high)).any()):
            return high
        enough = function(count) >= -CDF_ROUNDING
        low, high = torch.where(enough, low, count), torch.where(enough, count, high)


def _choose_reach(level: float) -> float:
    """Return the normal score up to which nodes must reach for a region with probability `level`.

    Beyond it each tail has an eighth of the probability outside the region (a guess), within REACH
    and FARTHEST_REACH.
    """
    tail = torch.tensor((1 - level) / 8, dtype=torch.float64)
    return max(REACH, min(-float(torch.special.ndtri(tail)), FARTHEST_REACH))


def _add_atom(region: Regions, lowest: Tensor, has_atom: Tensor) -> Regions:
    """Return the region (N, R) with an interval for the atom at the lowest value (N, 1).

    has_atom (N, 1) bool: the rows with an atom. The interval is added in those of them in which no
    interval of the region begins at or below the atom.
    """
    is_added = has_atom & ~(region.lower[:, :1] <= lowest)
    if not bool(is_added.any()):
        return region
    padding = torch.full_like(lowest, math.nan)
    ends = (
        torch.where(is_added, torch.cat([lowest, end], 1), torch.cat([end, padding], 1))
        for end in region
    )
    return Regions(*ends)


def _find_region_above(nodes: Tensor, logs: Tensor, threshold: Tensor) -> Regions:
    """Find the intervals in which log p exceeds the threshold (N,): ends (N, R), padded with NaN.

    logs (N, F) is log p at the nodes (N, F), which are in order; between them it is taken as
    linear.
    """
    excess = logs - threshold[:, None]
    ends = []
    # The first node of a run has its end to the left, the last node to the right.
    for end_nodes, step in zip(find_runs(excess > 0), (-1, 1), strict=True):
        inner = end_nodes.clamp_min(0)
        outer = (inner + step).clamp(0, nodes.shape[1] - 1)
        # The line from (x, a) inside to (y, b) outside crosses zero at this share of the way.
        a, b = excess.gather(1, inner), excess.gather(1, outer)
        x, y = nodes.gather(1, inner), nodes.gather(1, outer)
        share = torch.where(a - b > 0, a / (a - b), torch.zeros_like(a)).clamp(0, 1)
        ends.append(torch.where(end_nodes < 0, math.nan, x + share * (y - x)))
    return Regions(*ends)
