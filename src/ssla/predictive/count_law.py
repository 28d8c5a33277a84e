"""Counts: summed one by one to a tail bound; in blocks where there are thousands of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from ssla.likelihoods.support import Counts
from ssla.maths.quadrature import Regions
from ssla.predictive.law import (
    PointwiseLaw,
    find_runs,
    gather_regions,
    gather_rows,
    select_highest,
)
from ssla.predictive.predictive import Diagnostics, Predictive
from ssla.predictive.spread import total_variance
from ssla.refit import LogDensity

# These numbers are guesses unless a reason is given. tests/predictive/test_counts.py checks the
# accuracy that they give: six digits of the mass.
TAIL = 1e-8  # share of the mass beyond either end of a window
# of t: a block is about a thirtieth of the scale wide, or of the distance from the centre
BLOCKS_PER_UNIT = 32
FINEST = 256  # times as many, where those do not resolve a peak
# the largest mean of counts for which smaller blocks are tried; from 9e15 on, doubles skip whole
# numbers
RESOLVED = 1e15
ROUGH = 1e-6  # the mean square of the blocks' relative corrections above which they do not
FIRST_REACH = 2.8  # sinh(2.8) = 8.2 scales to either side
WIDEST_REACH = 30.0
WIDER = 1.6  # the factor from one reach to the next
LARGEST_COUNT = 1e30
SMALL_DOUBT = 0.25  # variance of f up to which the scale of the bulk follows it
SINGLE_COUNTS = 128  # every window has these, so that a probability that rises again is seen
WIDE = 64  # counts in a block, from which rounding hardly changes its width
UNEVEN = 0.1  # log ratio of two neighbours' widths, from which they belong to two patterns
NOTHING = -1e300  # log of no probability, finite so that sums of it are
MODE_ROUNDS = 12  # each divides the step of the search by 8
TASKS_AT_ONCE = 1 << 18


class Table(NamedTuple):
    """The blocks of counts of some rows, which all have the same number of blocks.

    Block j holds the counts edges[j] … edges[j+1] − 1 (none where they are equal).

    Edges are round(c + s·sinh(t)) with t uniform: single counts near the centre, blocks that grow
    with the distance from it.
    """

    rows: Tensor  # (m,)
    edges: Tensor  # (m, k + 1)
    logs: Tensor  # (m, k) log of the block's total
    centres: Tensor  # (m, k) the mean count of the block
    accurate: Tensor  # (m,) bool

    @property
    def widths(self) -> Tensor:
        """Return the number of counts in each block (m, k)."""
        return self.edges[:, 1:] - self.edges[:, :-1]

    @property
    def middles(self) -> Tensor:
        """Return the middle between the first and the last count of each block (m, k)."""
        return (self.edges[:, 1:] + self.edges[:, :-1] - 1) / 2

    def take(self, chosen: Tensor) -> Table:
        """Return the table of some of its rows, chosen (m,) bool."""
        return Table(*(part[chosen] for part in self))


@final
@dataclass(frozen=True, eq=False)
class CountLaw(PointwiseLaw):
    """P(Y = y) = exp(total(y)) / mass for y = 0, 1, 2, …"""

    tables: list[Table]

    kind = "count"

    @cached_property
    def _log_mass(self) -> Tensor:
        """Return the logarithm of the mass (N,)."""
        return gather_rows(self.tables, [t.logs.logsumexp(1) for t in self.tables])

    @cached_property
    def _block_shares(self) -> list[Tensor]:
        """Return the probabilities of the blocks, (m, k) for each table."""
        return [torch.softmax(t.logs, 1) for t in self.tables]

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance, (N,) each."""
        means, variances = [], []
        for table, share in zip(self.tables, self._block_shares, strict=True):
            mean = (share * table.centres).sum(1)
            means.append(mean)
            # The variance inside a block is that of a uniform distribution over its counts.
            within = (table.widths**2 - 1).clamp_min(0) / 12
            variances.append((share * ((table.centres - mean[:, None]) ** 2 + within)).sum(1))
        return gather_rows(self.tables, means), gather_rows(self.tables, variances)

    @cached_property
    def mode(self) -> Tensor:
        """Return the most probable count (N,); NaN where the density is NaN."""
        peaks = [_log_heights(t).argmax(1, keepdim=True) for t in self.tables]
        best, reach = (
            gather_rows(
                self.tables,
                [part.gather(1, peak) for part, peak in zip(parts, peaks, strict=True)],
            )
            for parts in ([t.middles for t in self.tables], [t.widths for t in self.tables])
        )
        best = best.round()
        # The search goes on among the counts around the middle of the best block.
        for _ in range(MODE_ROUNDS):
            if not bool((reach > 1).any()):
                break
            step = (reach / 8).ceil()
            near = (best + step * torch.arange(-12, 13, dtype=torch.float64)).clamp_min(0)
            best = near.gather(1, self.log_density.density_at(near).log.argmax(1, keepdim=True))
            reach = torch.where(step > 1, step, torch.ones_like(step))
        return torch.where(self._log_mass.isnan(), torch.nan, best.squeeze(1))

    def check(self, y: Tensor) -> None:
        """Raise ValueError unless y are whole numbers from 0."""
        Counts().check(y.flatten(), 1)

    @cached_property
    def _cumulative(self) -> list[Tensor]:
        """Return the probability below each edge, (m, k + 1) for each table: 0 first, 1 last."""
        sums = [share.cumsum(1) for share in self._block_shares]
        return [pad(part / part[:, -1:], (1, 0)) for part in sums]

    def cdf(self, y: Tensor) -> Tensor:
        """Return P(Y ≤ y), (N, k) -> (N, k); inside a block it is linear in the count."""
        value = torch.floor(y.clamp(-1, 1e300))
        parts = []
        for table, cumulative in zip(self.tables, self._cumulative, strict=True):
            # P(Y ≤ y) is the probability of the counts below y + 1.
            above = (value[table.rows] + 1).clamp(table.edges[:, :1], table.edges[:, -1:])
            block = torch.searchsorted(table.edges, above.contiguous(), right=True) - 1
            block = block.clamp(0, table.logs.shape[1] - 1)
            low, high = cumulative.gather(1, block), cumulative.gather(1, block + 1)
            width = table.widths.gather(1, block).clamp_min(1)
            parts.append(low + (above - table.edges.gather(1, block)) / width * (high - low))
        return gather_rows(self.tables, parts)

    def icdf(self, q: Tensor) -> Tensor:
        """Return the smallest counts y with P(Y ≤ y) ≥ q: (k,) -> (N, k)."""
        parts = []
        for table, cumulative in zip(self.tables, self._cumulative, strict=True):
            target = q.expand(table.rows.numel(), -1) * cumulative[:, -1:] - 1e-14
            block, share = _find_in_blocks(cumulative, target, right=False)
            # At least the first count of the block is ≤ the quantile.
            counts = (share.clamp(0, 1) * table.widths.gather(1, block)).ceil().clamp_min(1)
            parts.append(table.edges.gather(1, block) + (counts - 1))
        return gather_rows(self.tables, parts)

    def hdr(self, level: float) -> Regions:
        """Return the smallest set of counts with at least that probability, as runs lower … upper
        (ends included); NaN where the density is NaN.
        """
        runs = [
            densest_runs(t.edges, _log_heights(t), share, level)
            for t, share in zip(self.tables, self._block_shares, strict=True)
        ]
        unknown = self._log_mass.isnan()[:, None]
        return Regions(
            *(torch.where(unknown, torch.nan, end) for end in gather_regions(self.tables, runs))
        )

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw n counts for each input (n, N), by inversion of the cdf."""
        u = torch.rand(self.rows, n, dtype=torch.float64, generator=generator)
        parts = []
        for table, cumulative in zip(self.tables, self._cumulative, strict=True):
            block, share = _find_in_blocks(
                cumulative, u[table.rows] * cumulative[:, -1:], right=True
            )
            counts = (share.clamp(0, 1 - 1e-12) * table.widths.gather(1, block)).floor()
            parts.append(table.edges.gather(1, block) + counts)
        return gather_rows(self.tables, parts).mT


def _find_in_blocks(cumulative: Tensor, target: Tensor, right: bool) -> tuple[Tensor, Tensor]:
    """Find where cumulative probabilities (m, k + 1) reach a target (m, j).

    Returns the block (m, j), and the share of the block's probability below the target (m, j).
    right: whether a target that equals an edge belongs to the block on its right.
    """
    block = torch.searchsorted(cumulative, target.contiguous(), right=right) - 1
    block = block.clamp(0, cumulative.shape[1] - 2)
    low, high = cumulative.gather(1, block), cumulative.gather(1, block + 1)
    return block, (target - low) / (high - low).clamp_min(1e-300)


def _log_heights(table: Table) -> Tensor:
    """Return the log probability of one count of each block (m, k); −∞ where it has none."""
    return torch.where(table.widths > 0, table.logs - table.widths.clamp_min(1).log(), -torch.inf)


def densest_runs(edges: Tensor, heights: Tensor, shares: Tensor, level: float) -> Regions:
    """Return the highest counts whose shares reach the level, as runs lower … upper (ends
    included).

    edges (N, k + 1): block j holds edges[j] … edges[j+1] − 1. heights (N, k): the log probability
    of one of its counts. The last block that is needed is cut: all of it can be much more than the
    level needs.
    """
    widths = edges.diff(dim=1)
    inside = select_highest(heights, shares, level)
    first, last = find_runs(_with_empty_blocks(inside, widths == 0))
    lower, upper = edges.gather(1, first.clamp_min(0)), edges.gather(1, last.clamp_min(0) + 1) - 1
    # The lowest block inside is cut to the counts that the level still needs.
    lowest = torch.where(inside & (widths > 0), heights, torch.inf).argmin(1, keepdim=True)
    start, width, share = (part.gather(1, lowest) for part in (edges, widths, shares))
    share_of_others = torch.where(inside, shares, 0.0).sum(1, keepdim=True) - share
    kept = (
        ((level - share_of_others) / share.clamp_min(1e-300) * width)
        .ceil()
        .clamp_min(1)
        .minimum(width)
    )
    # The kept part is beside the rest of its run. A block that is a run by itself keeps the side of
    # its higher neighbour.
    begins, ends = lower == start, upper == start + width - 1
    left, right = (_neighbour_heights(heights, lowest, step) for step in (-1, 1))
    from_left = ends & (~begins | (left >= right))
    lower = torch.where(begins & ~from_left, start + width - kept, lower)
    upper = torch.where(from_left, start + kept - 1, upper)
    return Regions(
        torch.where(first < 0, torch.nan, lower), torch.where(last < 0, torch.nan, upper)
    )


def _neighbour_heights(heights: Tensor, blocks: Tensor, step: int) -> Tensor:
    """Return the heights (N, k) of the neighbours of some blocks (N, 1), `step` blocks to the
    right: (N, 1); −∞ beyond the first and the last block.
    """
    beside = blocks + step
    beyond = (beside < 0) | (beside >= heights.shape[1])
    return torch.where(beyond, -torch.inf, heights.gather(1, beside.clamp(0, heights.shape[1] - 1)))


def _with_empty_blocks(inside: Tensor, empty: Tensor) -> Tensor:
    """Let blocks without a count belong to the run before them: bool (N, k), (N, k) -> (N, k).

    Otherwise they would cut a run of counts in two.
    """
    number = torch.arange(inside.shape[1]).expand_as(inside)
    last_full = torch.where(empty, -1, number).cummax(1).values
    before = inside.gather(1, last_full.clamp_min(0))
    return torch.where(empty & (last_full >= 0), before, inside & ~empty)


def count_predictive(log_density: LogDensity, refit: str) -> Predictive:
    """Sum the probabilities of all rows, widening each row's window until its tails hold < 1e-8 of
    the mass.

    Probabilities that never fall (a Newton step far from its point can do that) are cut where they
    begin to rise.
    """
    tabulation = _Tabulation(log_density)
    tables = _tabulate_all(tabulation)
    inaccurate = torch.zeros_like(tabulation.fallback)
    for table in tables:
        inaccurate[table.rows] = ~table.accurate
    flags = Diagnostics(refit, tabulation.fallback, tabulation.unconverged, inaccurate)
    return Predictive(CountLaw(log_density, _join_equal_sizes(tables)), log_density.like, flags)


class _Tabulation:
    """Makes tables of a log density, and records the rows that were flagged on the way."""

    def __init__(self, log_density: LogDensity) -> None:
        """Compute centre and scale of every row's bulk, (N,) each."""
        f, K = log_density.marginal
        self.log_density = log_density
        self.mean = log_density.likelihood.mean(f)
        # The scale is that of the noise, and of the uncertainty of the mean as if it were small:
        # longer tails are found by widening.
        small = K.clamp_max(SMALL_DOUBT) if log_density.outputs_move else torch.zeros_like(K)
        doubt, noise = total_variance(log_density.likelihood, f, small)
        self.scale = (doubt + noise).sqrt().clamp_min(1.0)
        self.fallback = torch.zeros(len(f), dtype=torch.bool)
        self.unconverged = torch.zeros_like(self.fallback)

    def tabulate(self, rows: Tensor, reach: float, finer: int = 1) -> Table:
        """Sum the blocks of the rows (m,) up to `reach`; blocks are `finer` times as many."""
        mean, scale = self.mean[rows, None], self.scale[rows, None]
        edges = _block_edges(mean, scale, reach, BLOCKS_PER_UNIT * finer)
        unknown = edges[:, 1:]  # totals and centres are filled in below
        table = Table(rows, edges, unknown, unknown, torch.ones_like(rows, dtype=torch.bool))
        density = self.log_density.density_at(table.middles.clamp_min(0), rows)
        has_counts = table.widths > 0
        self.fallback[rows] |= (density.fallback & has_counts).any(1)
        self.unconverged[rows] |= (~density.converged & has_counts).any(1)
        totals, centres, corrections = sum_blocks(table, density.log)
        totals = torch.where(has_counts, totals, NOTHING).clamp_min(NOTHING)
        accurate = (torch.softmax(totals, 1) * corrections**2).sum(1) <= ROUGH
        return table._replace(logs=totals, centres=centres, accurate=accurate)

    def refine(self, table: Table, reach: float) -> list[Table]:
        """Use smaller blocks in the rows that need them: a peak may be narrow beside the scale, as
        of zeros and large counts.

        Rows with means beyond `RESOLVED` stay as they are: there rounding is what is rough, and
        smaller blocks do not help.
        """
        beyond = self.mean[table.rows] > RESOLVED
        tables = [table.take(beyond), table.take(~beyond)] if bool(beyond.any()) else [table]
        finer = 1
        while finer < FINEST and not bool(tables[-1].accurate.all()):
            finer *= 4
            rough = tables.pop()
            tables.append(rough.take(rough.accurate))
            tables.append(self.tabulate(rough.rows[~rough.accurate], reach, finer))
        return tables


def _tabulate_all(tabulation: _Tabulation) -> list[Table]:
    """Tabulate every row, in windows that are widened until both tails hold less than TAIL.

    A row whose sum does not exist, or whose widest window is too short, is marked as inaccurate.
    """
    mean, scale = tabulation.mean, tabulation.scale
    if not len(mean):  # a law needs a table also where there are no rows
        none = mean.new_empty(0, 1)
        return [Table(torch.arange(0), mean.new_empty(0, 2), none, none, tabulation.fallback)]
    tables: list[Table] = []
    pending, reach = torch.arange(len(mean)), FIRST_REACH
    while pending.numel():
        is_last = reach >= WIDEST_REACH
        # A window that ends below the single counts holds less than they do: widen it at once.
        short = mean[pending] + scale[pending] * math.sinh(reach) <= SINGLE_COUNTS
        again = [pending[short]]
        for rows in _split_rows(pending[~short], mean, scale, reach):
            table = tabulation.tabulate(rows, reach)
            left, right = estimate_tails(table)
            done = (left <= TAIL) & (right <= TAIL)
            endless = torch.isinf(right) & is_last
            cut = ~done & ~endless & is_last
            if bool(done.any()):
                tables += tabulation.refine(table.take(done), reach)
            if bool(cut.any()):
                tables.append(table.take(cut)._replace(accurate=done[cut]))
            if bool(endless.any()):
                near = tabulation.tabulate(rows[endless], FIRST_REACH)
                tables.append(_cut_at_valley(near, mean[rows[endless]]))
            if not is_last:
                again.append(rows[~done])
        pending = torch.cat(again)
        reach = min(WIDER * reach, WIDEST_REACH)
    return tables


def _split_rows(rows: Tensor, mean: Tensor, scale: Tensor, reach: float) -> list[Tensor]:
    """Split rows (m,) into pieces that bound the memory and have edges of one pattern each.

    mean and scale (N,) are those of all rows.
    """
    low = mean[rows] - scale[rows] * math.sinh(reach) < SINGLE_COUNTS
    far = mean[rows] > SINGLE_COUNTS
    size = max(TASKS_AT_ONCE // int(2 * reach * BLOCKS_PER_UNIT), 1)
    groups = (rows[~low], rows[low & ~far], rows[low & far])
    return [part for group in groups if group.numel() for part in group.split(size)]


def _block_edges(mean: Tensor, scale: Tensor, reach: float, by_unit: int) -> Tensor:
    """Choose the edges of blocks (m, k + 1) for rows with edges of one pattern; mean, scale (m, 1).

    A window that reaches down to small counts takes those one by one, and if its centre is far
    above them, blocks that grow with the count on the way up.
    """
    t = torch.linspace(-reach, reach, 2 * int(reach * by_unit) + 1, dtype=torch.float64)
    edges = (mean + scale * torch.sinh(t)).round().clamp(0, LARGEST_COUNT)
    if float(edges[0, 0]) >= SINGLE_COUNTS:
        return edges
    more = torch.arange(SINGLE_COUNTS + 1, dtype=torch.float64)
    if float(mean[0]) > SINGLE_COUNTS:
        steps = int(math.log(float(edges.max()) / SINGLE_COUNTS) * by_unit) + 1
        growing = SINGLE_COUNTS * torch.exp(torch.arange(1, steps, dtype=torch.float64) / by_unit)
        more = torch.cat([more, growing.round()])
    inside = torch.where(more < edges[:, -1:], more, 0.0)
    return _drop_repeated(torch.cat([edges, inside], 1).sort(1).values)


def _drop_repeated(edges: Tensor) -> Tensor:
    """Drop edges (m, k) that repeat the one before: (m, j) with j ≤ k, few blocks without a count.

    Rows with fewer different edges than others begin with repetitions of their first one.
    """
    new = torch.cat([torch.ones_like(edges[:, :1], dtype=torch.bool), edges.diff(dim=1) > 0], 1)
    # A stable sort of False before True keeps the order. All rows keep as many as the longest has.
    kept = new.to(torch.uint8).argsort(dim=1, stable=True)[:, -int(new.sum(1).max()) :]
    return torch.where(new.gather(1, kept), edges.gather(1, kept), edges[:, :1])


def sum_blocks(table: Table, logs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum p over each block from log p at the middles (m, k), corrected for slope and curvature.

    Returns log Σ p, the mean count, and the relative correction by p's curvature, (m, k) each. The
    first and the last block are not corrected.
    """
    w, x = table.widths, table.middles
    before, after = x[:, 1:-1] - x[:, :-2], x[:, 2:] - x[:, 1:-1]
    logs = logs.clamp_min(NOTHING)
    possible = logs > NOTHING
    safe = (before > 0) & (after > 0) & possible[:, 2:] & possible[:, 1:-1] & possible[:, :-2]
    before, after = before.clamp_min(0.5), after.clamp_min(0.5)
    near = torch.where(possible, logs, 0.0)
    # (log p)' and p''/p = (log p)'² + (log p)'' from differences to both neighbours
    left, right = (near[:, 1:-1] - near[:, :-2]) / before, (near[:, 2:] - near[:, 1:-1]) / after
    slope = (left * after + right * before) / (before + after)
    bend = slope**2 + 2 * (right - left) / (before + after)
    # 12 × the variance of a uniform distribution over the block
    square = torch.where(safe, (w[:, 1:-1] ** 2 - 1).clamp_min(0), torch.zeros_like(bend))
    correction = square / 24 * bend
    factor = correction.clamp(-0.5, 1.0)
    shift = torch.maximum(torch.minimum(square / 12 * slope, w[:, 1:-1] / 2), -w[:, 1:-1] / 2)
    return (
        logs + w.clamp_min(1).log() + pad(torch.log1p(factor), (1, 1)),
        x + pad(shift, (1, 1)),
        pad(correction, (1, 1)),
    )


def _join_equal_sizes(tables: list[Table]) -> list[Table]:
    """Join the tables that have the same number of blocks."""
    groups: dict[int, list[Table]] = {}
    for table in tables:
        groups.setdefault(table.logs.shape[1], []).append(table)
    return [
        Table(*(torch.cat(parts) for parts in zip(*group, strict=True)))
        for group in groups.values()
    ]


def _cut_at_valley(table: Table, mean: Tensor) -> Table:
    """Set the probability to zero beyond the first rise to the right of the mean (m,).

    The sum over all counts does not exist there, so these rows are marked as inaccurate.
    """
    heights = _log_heights(table)
    right = (table.middles > mean[:, None] + 1) & (table.widths > 0)
    lowest = torch.where(right, heights, torch.inf).cummin(1).values
    beyond = (right & (heights > lowest + 1e-9)).cumsum(1) > 0
    return table._replace(
        logs=torch.where(beyond, NOTHING, table.logs), accurate=torch.zeros_like(table.accurate)
    )


def _last_two_blocks(table: Table) -> Tensor:
    """Return the numbers of the last two blocks that have counts (m, 2)."""
    number = torch.where(table.widths > 0, torch.arange(table.widths.shape[1]), -1)
    last = number.amax(1, keepdim=True)
    before = torch.where(number < last, number, -1).amax(1, keepdim=True)
    return torch.cat([before, last], 1).clamp_min(0)


def _power_tail(table: Table, total: Tensor, last_two: Tensor) -> Tensor:
    """Estimate the mass beyond the last block by a power law through the last two (m, 2).

    Returns it as a share of all mass (m,); total (m,) is the log of that. It needs no regular
    widths: a narrow block after a wide one has a small total, but a long tail.
    """
    before, last = _log_heights(table).gather(1, last_two).unbind(1)
    log_counts = table.middles.gather(1, last_two).clamp_min(0.5).log()
    power = (before - last) / (log_counts[:, 1] - log_counts[:, 0])
    top = table.edges[:, -1].clamp_min(1)
    at_top = last - power * (top.log() - log_counts[:, 1])
    # ∫ from the top of p(top) (y/top)^−power dy, which is infinite for power ≤ 1
    tail = (at_top - total).exp() * top / (power - 1)
    return torch.where(power.isfinite(), torch.where(power > 1, tail, torch.inf), 0.0)


def _log_ratio_of_totals(table: Table, last_two: Tensor) -> Tensor:
    """Return the log ratio (m,) of the last block's total to that of the block before.

    last_two (m, 2): their numbers. Blocks of two interleaved patterns of edges are of different
    widths. There it is the ratio for a step from one middle to the next, as if widths grew with the
    count.
    """
    before, last = table.widths.gather(1, last_two).clamp_min(1).unbind(1)
    by_totals = table.logs.gather(1, last_two).diff(dim=1)[:, 0]
    uneven = (torch.minimum(before, last) >= WIDE) & ((last / before).log().abs() > UNEVEN)
    first, second = table.middles.gather(1, last_two).unbind(1)
    by_heights = by_totals - (last / before).log() + (second / first.clamp_min(1)).log()
    return torch.where(uneven, by_heights, by_totals)


def estimate_tails(table: Table, first: int = 0) -> tuple[Tensor, Tensor]:
    """Estimate the mass to the left and to the right of the blocks, as shares of all mass (m,).

    On the right it is the larger one of a geometric series and of a power law through the last two
    blocks. On the left it is at most as high as the first block, down to zero.

    first: the number of the first block that has counts, where a row does not begin at zero.
    """
    total = table.logs.logsumexp(1)
    last_two = _last_two_blocks(table)
    last = table.logs.gather(1, last_two)[:, 1]
    ratio = _log_ratio_of_totals(table, last_two).exp()
    tail = (last - total).exp() * ratio / (1 - ratio)
    right = torch.where(ratio < 1, tail, torch.full_like(tail, torch.inf))
    right = torch.maximum(right, _power_tail(table, total, last_two))
    # Where the last block has no probability, the counts have an end.
    right = torch.where(last <= NOTHING, torch.zeros_like(right), right)
    below = _log_heights(table)[:, first] + table.edges[:, 0].clamp_min(1).log() - total
    left = torch.where(table.edges[:, 0] > 0, below.exp(), torch.zeros_like(below))
    return left, right
