"""Counts: summed one by one to a tail bound; in blocks where there are thousands of them.

p is the un-normalised probability of a count, and total its logarithm.

    table     the blocks of counts of some rows (`Table`)
    window    the range of counts that the table of a row covers
    reach     the largest |t| of a window, with t as in `Table`
    height    the log of the mean probability of a count of a block
    tail      the mass beyond an end of the window, as a share of that inside
    pattern   how the edges of a row are made (`_choose_edges`); rows of one pattern are computed
              together
"""

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
from ssla.predictive.spread import compute_variance_parts
from ssla.refit import LogDensity

# These numbers are guesses unless a reason is given. tests/predictive/test_counts.py checks the
# accuracy that they give: six digits of the mass.
TAIL = 1e-8  # share of the mass beyond either end of a window
# Blocks for a unit of t: a block is about a thirtieth of the scale wide, or of the distance from
# the centre.
BLOCKS_PER_UNIT = 32
FINER = 4  # the factor on the number of blocks, where they do not resolve a peak
FINEST = 256  # the largest of these factors, all together
# The largest mean of counts for which smaller blocks are tried; from 9e15 on, doubles skip whole
# numbers.
RESOLVED = 1e15
# Blocks resolve a row's peaks if the mean square of their relative corrections is at most this.
ROUGH = 1e-6
FIRST_REACH = 2.8  # sinh(2.8) = 8.2 scales to either side
WIDEST_REACH = 30.0
WIDER = 1.6  # the factor from one reach to the next
LARGEST_COUNT = 1e30  # of a window
LARGEST_FINITE = 1e300  # takes the place of an infinite y
BELOW_ONE = 1 - 1e-12  # the largest share of a block at which a count of it is drawn
SMALL_DOUBT = 0.25  # variance of f up to which the scale of the bulk follows it
SINGLE_COUNTS = 128  # every window has these, so that a probability that rises again is seen
WIDE = 64  # counts in a block, from which rounding hardly changes its width
UNEVEN = 0.1  # log ratio of two neighbours' widths, from which they belong to two patterns
NOTHING = -1e300  # log of no probability, finite so that sums of it are
MODE_ROUNDS = 12  # of the search for the mode: each divides its step by 8
CDF_ROUNDING = 1e-14  # a cdf that is below q by no more counts as equal to it
SMALLEST_RISE = 1e-9  # of a log probability: a smaller one is rounding
SMALLEST_DIVISOR = 1e-300  # takes the place of zero
TASKS_AT_ONCE = 1 << 18
# The widest window of each row reaches above the single counts, because means are not negative and
# scales are at least 1. `_tabulate_all_rows` ends by this.
assert math.sinh(WIDEST_REACH) > SINGLE_COUNTS


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
        return Table(*(field[chosen] for field in self))


@final
@dataclass(frozen=True, eq=False)
class CountLaw(PointwiseLaw):
    """P(Y = y) = exp(total(y)) / mass for y = 0, 1, 2, …"""

    tables: list[Table]  # each row is in exactly one

    kind = "count"

    @cached_property
    def _log_mass(self) -> Tensor:
        """Return the logarithm of the mass (N,)."""
        return gather_rows(self.tables, [t.logs.logsumexp(1) for t in self.tables])

    @cached_property
    def _block_shares(self) -> list[Tensor]:
        """Return the probability of each block, (m, k) for each table."""
        return [torch.softmax(t.logs, 1) for t in self.tables]

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of y, (N,) each."""
        means, variances = [], []
        for table, share in zip(self.tables, self._block_shares, strict=True):
            mean = (share * table.centres).sum(1)
            means.append(mean)
            # Inside a block the counts are taken as uniform, with variance (width² − 1)/12.
            within = (table.widths**2 - 1).clamp_min(0) / 12
            variances.append((share * ((table.centres - mean[:, None]) ** 2 + within)).sum(1))
        return gather_rows(self.tables, means), gather_rows(self.tables, variances)

    @cached_property
    def mode(self) -> Tensor:
        """Return the most probable count (N,); NaN where the density is NaN.

        The search starts in the middle of the block whose counts are the most probable. It goes on
        among 25 counts around the best one, which are 8 times denser in each round, until they are
        neighbours.
        """
        peaks = [_compute_log_heights(table).argmax(1, keepdim=True) for table in self.tables]
        tables_and_peaks = list(zip(self.tables, peaks, strict=True))
        middles = [table.middles.gather(1, peak) for table, peak in tables_and_peaks]
        widths = [table.widths.gather(1, peak) for table, peak in tables_and_peaks]
        best = gather_rows(self.tables, middles).round()
        reach = gather_rows(self.tables, widths)  # the counts around the best one still in question
        for _ in range(MODE_ROUNDS):
            if not bool((reach > 1).any()):
                break
            step = (reach / 8).ceil()
            tried = (best + step * torch.arange(-12, 13, dtype=torch.float64)).clamp_min(0)
            best = tried.gather(1, self.log_density.density_at(tried).log.argmax(1, keepdim=True))
            # With steps of one count the row is done.
            reach = torch.where(step > 1, step, torch.ones_like(step))
        return torch.where(self._log_mass.isnan(), torch.nan, best.squeeze(1))

    def check(self, y: Tensor) -> None:
        """Raise ValueError unless y (N, k) holds whole numbers from 0 on."""
        Counts().check(y.flatten(), 1)

    @cached_property
    def _cumulative(self) -> list[Tensor]:
        """Return the probability of all counts below each edge, from 0 to 1.

        The result is (m, k + 1) for each table.
        """
        sums = [share.cumsum(1) for share in self._block_shares]
        return [pad(total / total[:, -1:], (1, 0)) for total in sums]

    def cdf(self, y: Tensor) -> Tensor:
        """Return P(Y ≤ y), (N, k) -> (N, k); y may be infinite.

        Inside a block it is linear in the count.
        """
        value = torch.floor(y.clamp(-1, LARGEST_FINITE))
        probabilities = []
        for table, cumulative in zip(self.tables, self._cumulative, strict=True):
            # P(Y ≤ y) is the probability of the counts below y + 1.
            above = (value[table.rows] + 1).clamp(table.edges[:, :1], table.edges[:, -1:])
            block = torch.searchsorted(table.edges, above.contiguous(), right=True) - 1
            block = block.clamp(0, table.logs.shape[1] - 1)
            low, high = cumulative.gather(1, block), cumulative.gather(1, block + 1)
            width = table.widths.gather(1, block).clamp_min(1)
            probabilities.append(
                low + (above - table.edges.gather(1, block)) / width * (high - low)
            )
        return gather_rows(self.tables, probabilities)

    def icdf(self, q: Tensor) -> Tensor:
        """Return the smallest counts y with P(Y ≤ y) ≥ q: (k,) -> (N, k)."""
        quantiles = []
        for table, cumulative in zip(self.tables, self._cumulative, strict=True):
            target = q.expand(table.rows.numel(), -1) * cumulative[:, -1:] - CDF_ROUNDING
            block, share = _find_in_blocks(cumulative, target, right=False)
            # The quantile is the last of the counts that are needed, at least one of the block.
            counts = (share.clamp(0, 1) * table.widths.gather(1, block)).ceil().clamp_min(1)
            quantiles.append(table.edges.gather(1, block) + (counts - 1))
        return gather_rows(self.tables, quantiles)

    def hdr(self, level: float) -> Regions:
        """Return the smallest set of counts with at least the probability `level`.

        The set is a union of runs lower … upper (N, R), ends included and padded with NaN. Rows
        whose density is NaN are all NaN.
        """
        runs = [
            find_densest_runs(table.edges, _compute_log_heights(table), share, level)
            for table, share in zip(self.tables, self._block_shares, strict=True)
        ]
        unknown = self._log_mass.isnan()[:, None]
        return Regions(
            *(torch.where(unknown, torch.nan, end) for end in gather_regions(self.tables, runs))
        )

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw n counts for each input (n, N), by inversion of the cdf."""
        u = torch.rand(self.rows, n, dtype=torch.float64, generator=generator)
        draws = []
        for table, cumulative in zip(self.tables, self._cumulative, strict=True):
            block, share = _find_in_blocks(
                cumulative, u[table.rows] * cumulative[:, -1:], right=True
            )
            counts = (share.clamp(0, BELOW_ONE) * table.widths.gather(1, block)).floor()
            draws.append(table.edges.gather(1, block) + counts)
        return gather_rows(self.tables, draws).mT


def _find_in_blocks(cumulative: Tensor, target: Tensor, right: bool) -> tuple[Tensor, Tensor]:
    """Find the blocks in which cumulative probabilities (m, k + 1) reach the targets (m, j).

    Returns the number of the block (m, j), and the share of its probability that is below the
    target (m, j). right: whether a target that equals the probability at an edge belongs to the
    block on the right of the edge.
    """
    block = torch.searchsorted(cumulative, target.contiguous(), right=right) - 1
    block = block.clamp(0, cumulative.shape[1] - 2)
    low, high = cumulative.gather(1, block), cumulative.gather(1, block + 1)
    return block, (target - low) / (high - low).clamp_min(SMALLEST_DIVISOR)


def _compute_log_heights(table: Table) -> Tensor:
    """Return the log of the mean probability of a count in each block (m, k), un-normalised.

    The log is −∞ for blocks without a count.
    """
    return torch.where(table.widths > 0, table.logs - table.widths.clamp_min(1).log(), -torch.inf)


def find_densest_runs(edges: Tensor, heights: Tensor, shares: Tensor, level: float) -> Regions:
    """Find the most probable counts whose probabilities together reach the level.

    edges (N, k + 1): block j holds the counts edges[j] … edges[j+1] − 1. heights (N, k): the log
    probability of one of its counts. shares (N, k): the probability of the block. Returns runs
    lower … upper (N, R), ends included and padded with NaN. The least probable block that is needed
    is cut: all of it can be much more than the level needs.
    """
    widths = edges.diff(dim=1)
    inside = select_highest(heights, shares, level)
    first, last = find_runs(_fill_empty_blocks(inside, widths == 0))
    lower = edges.gather(1, first.clamp_min(0))
    upper = edges.gather(1, last.clamp_min(0) + 1) - 1

    # The block to cut, and how many of its counts the level still needs.
    lowest = torch.where(inside & (widths > 0), heights, torch.inf).argmin(1, keepdim=True)
    start, width, share = (values.gather(1, lowest) for values in (edges, widths, shares))
    share_of_others = torch.where(inside, shares, 0.0).sum(1, keepdim=True) - share
    needed = (level - share_of_others) / share.clamp_min(SMALLEST_DIVISOR) * width
    kept = needed.ceil().clamp_min(1).minimum(width)

    # The block begins or ends its run, or is the run. What is kept must join the rest of the run: a
    # block at the end keeps its left part. A block that is the run keeps the side of the higher
    # neighbour.
    begins = lower == start
    ends = upper == start + width - 1
    left_height = _get_neighbour_heights(heights, lowest, step=-1)
    right_height = _get_neighbour_heights(heights, lowest, step=1)
    keeps_left_part = ends & (~begins | (left_height >= right_height))
    lower = torch.where(begins & ~keeps_left_part, start + width - kept, lower)
    upper = torch.where(keeps_left_part, start + kept - 1, upper)
    return Regions(
        torch.where(first < 0, torch.nan, lower), torch.where(last < 0, torch.nan, upper)
    )


def _get_neighbour_heights(heights: Tensor, blocks: Tensor, step: int) -> Tensor:
    """Return the heights (N, 1) of the blocks that are `step` to the right of the given ones.

    A negative step is to the left. heights (N, k); blocks (N, 1): numbers of blocks. The height
    beyond the first and the last block is −∞.
    """
    beside = blocks + step
    beyond = (beside < 0) | (beside >= heights.shape[1])
    return torch.where(beyond, -torch.inf, heights.gather(1, beside.clamp(0, heights.shape[1] - 1)))


def _fill_empty_blocks(inside: Tensor, empty: Tensor) -> Tensor:
    """Return `inside` with each empty block set as the last block with a count before it.

    inside, empty (N, k) bool: blocks of the region, and blocks without a count. Otherwise empty
    blocks would cut a run of counts in two. Empty blocks at the start are not inside.
    """
    number = torch.arange(inside.shape[1]).expand_as(inside)
    last_full = torch.where(empty, -1, number).cummax(1).values
    is_last_full_inside = inside.gather(1, last_full.clamp_min(0))
    return torch.where(empty & (last_full >= 0), is_last_full_inside, inside & ~empty)


def make_count_predictive(log_density: LogDensity, refit: str) -> Predictive:
    """Return the predictive of a count, from the sums of its probabilities.

    log_density: of the counts at each input. refit: the name of the rung. The window of a row is
    widened until its tails hold less than TAIL of the mass. Probabilities that never fall, as those
    of one Newton step far from its point, have no sum. They are cut where they begin to rise, and
    the row is flagged as inaccurate.
    """
    tabulation = _Tabulation(log_density)
    tables = _tabulate_all_rows(tabulation)
    inaccurate = torch.zeros_like(tabulation.fallback)
    for table in tables:
        inaccurate[table.rows] = ~table.accurate
    flags = Diagnostics(refit, tabulation.fallback, tabulation.unconverged, inaccurate)
    return Predictive(CountLaw(log_density, _join_equal_sizes(tables)), log_density.like, flags)


class _Tabulation:
    """Makes tables of the log density of N rows, and collects the flags of the rows."""

    def __init__(self, log_density: LogDensity) -> None:
        """Compute a mean and a scale of y for each row, (N,) each, from which windows are chosen.

        The scale is at least one count.
        """
        f, K = log_density.marginal
        self.log_density = log_density
        self.mean = log_density.likelihood.mean(f)
        # The scale contains the noise and a small uncertainty of f at most. Longer tails are found
        # when windows are widened.
        small = K.clamp_max(SMALL_DOUBT) if log_density.outputs_move else torch.zeros_like(K)
        doubt, noise = compute_variance_parts(log_density.likelihood, f, small)
        self.scale = (doubt + noise).sqrt().clamp_min(1.0)
        self.fallback = torch.zeros(len(f), dtype=torch.bool)
        self.unconverged = torch.zeros_like(self.fallback)

    def tabulate_rows(self, rows: Tensor, reach: float, finer: int = 1) -> Table:
        """Return the table of rows (m,), with blocks from t = −reach to reach (see `Table`).

        finer: how many times more blocks than usual. The rows must have edges of one pattern (see
        `_split_rows`). Sets the flags `fallback` and `unconverged` of the rows.
        """
        mean, scale = self.mean[rows, None], self.scale[rows, None]
        edges = _choose_edges(mean, scale, reach, BLOCKS_PER_UNIT * finer)
        # Placeholders stand for the totals and centres, which are computed below.
        placeholder = edges[:, 1:]
        all_true = torch.ones_like(rows, dtype=torch.bool)
        table = Table(rows, edges, placeholder, placeholder, accurate=all_true)
        density = self.log_density.density_at(table.middles.clamp_min(0), rows)
        has_counts = table.widths > 0
        self.fallback[rows] |= (density.fallback & has_counts).any(1)
        self.unconverged[rows] |= (~density.converged & has_counts).any(1)
        totals, centres, corrections = sum_blocks(table, density.log)
        totals = torch.where(has_counts, totals, NOTHING).clamp_min(NOTHING)
        accurate = (torch.softmax(totals, 1) * corrections**2).sum(1) <= ROUGH
        return table._replace(logs=totals, centres=centres, accurate=accurate)

    def refine_table(self, table: Table, reach: float) -> list[Table]:
        """Return tables of the same rows, with inaccurate rows tabulated again in smaller blocks.

        reach: of the table's windows. A peak may be narrow beside the scale, as where zeros are
        mixed with large counts. Rows with means beyond `RESOLVED` stay as they are: rounding of
        their counts is the error, and smaller blocks do not help.
        """
        is_beyond = self.mean[table.rows] > RESOLVED
        tables = [table]
        if bool(is_beyond.any()):
            tables = [table.take(is_beyond), table.take(~is_beyond)]
        # The last table is always the one that is not finished.
        finer = 1
        while finer < FINEST and not bool(tables[-1].accurate.all()):
            finer *= FINER
            rough = tables.pop()
            tables.append(rough.take(rough.accurate))
            tables.append(self.tabulate_rows(rough.rows[~rough.accurate], reach, finer))
        return tables


def _tabulate_all_rows(tabulation: _Tabulation) -> list[Table]:
    """Return tables of all rows, in windows that are widened until both tails hold less than TAIL.

    tabulation: makes the tables, and collects flags. A row whose sum does not exist, or whose
    widest window is too short, is marked as inaccurate.
    """
    mean, scale = tabulation.mean, tabulation.scale
    if not len(mean):  # a law needs a table also where there are no rows
        no_rows = mean.new_empty(0, 1)
        no_edges = mean.new_empty(0, 2)
        no_flags = torch.zeros(0, dtype=torch.bool)
        return [Table(torch.arange(0), no_edges, no_rows, no_rows, accurate=no_flags)]

    tables: list[Table] = []
    pending = torch.arange(len(mean))
    reach = FIRST_REACH

    # The reach grows up to WIDEST_REACH. There no window is too short, and all rows are finished,
    # so this ends.
    while pending.numel():
        is_last = reach >= WIDEST_REACH
        # A window that ends below the single counts holds less than they do: widen it at once.
        short = mean[pending] + scale[pending] * math.sinh(reach) <= SINGLE_COUNTS
        to_widen = [pending[short]]
        for rows in _split_rows(pending[~short], mean, scale, reach):
            table = tabulation.tabulate_rows(rows, reach)
            left_tail, right_tail = estimate_tails(table)
            done = (left_tail <= TAIL) & (right_tail <= TAIL)
            if bool(done.any()):
                tables += tabulation.refine_table(table.take(done), reach)
            if not is_last:
                to_widen.append(rows[~done])
                continue
            # No window is wider: a row that is not done has no sum, or is cut at its last window.
            endless = torch.isinf(right_tail)
            cut = ~done & ~endless
            if bool(cut.any()):
                tables.append(_mark_inaccurate(table.take(cut)))
            if bool(endless.any()):
                first_window = tabulation.tabulate_rows(rows[endless], FIRST_REACH)
                tables.append(_cut_at_valley(first_window, mean[rows[endless]]))
        pending = torch.cat(to_widen)
        reach = min(WIDER * reach, WIDEST_REACH)

    return tables


def _mark_inaccurate(table: Table) -> Table:
    """Return the table with all of its rows marked as inaccurate."""
    return table._replace(accurate=torch.zeros_like(table.accurate))


def _split_rows(rows: Tensor, mean: Tensor, scale: Tensor, reach: float) -> list[Tensor]:
    """Split rows (m,) into pieces of bounded size, in each of which edges have one pattern.

    The pattern is that of `_choose_edges`: whether the window reaches down to the single counts,
    and whether its centre is above them. mean and scale (N,) are those of all rows.
    """
    reaches_down = mean[rows] - scale[rows] * math.sinh(reach) < SINGLE_COUNTS
    is_centre_above = mean[rows] > SINGLE_COUNTS
    size = max(TASKS_AT_ONCE // int(2 * reach * BLOCKS_PER_UNIT), 1)
    groups = (
        rows[~reaches_down],
        rows[reaches_down & ~is_centre_above],
        rows[reaches_down & is_centre_above],
    )
    return [piece for group in groups if group.numel() for piece in group.split(size)]


def _choose_edges(mean: Tensor, scale: Tensor, reach: float, by_unit: int) -> Tensor:
    """Choose the edges of blocks (m, k + 1), for rows that have edges of one pattern.

    mean, scale (m, 1). reach: the largest t (see `Table`). by_unit: blocks for a unit of t. A
    window that reaches down to small counts holds these one by one. If its centre is above them,
    blocks between that grow with the count are added.
    """
    t = torch.linspace(-reach, reach, 2 * int(reach * by_unit) + 1, dtype=torch.float64)
    edges = (mean + scale * torch.sinh(t)).round().clamp(0, LARGEST_COUNT)
    # All rows have one pattern, so the first row decides.
    if float(edges[0, 0]) >= SINGLE_COUNTS:
        return edges
    more = torch.arange(SINGLE_COUNTS + 1, dtype=torch.float64)
    if float(mean[0]) > SINGLE_COUNTS:
        steps = int(math.log(float(edges.max()) / SINGLE_COUNTS) * by_unit) + 1
        growing = SINGLE_COUNTS * torch.exp(torch.arange(1, steps, dtype=torch.float64) / by_unit)
        more = torch.cat([more, growing.round()])
    # An edge beyond the window becomes 0, which is dropped as a repetition.
    in_window = torch.where(more < edges[:, -1:], more, 0.0)
    return _drop_repeated_edges(torch.cat([edges, in_window], 1).sort(1).values)


def _drop_repeated_edges(edges: Tensor) -> Tensor:
    """Drop the edges that repeat the one before: (m, k) in order -> (m, j) with j ≤ k.

    j is the largest number of different edges in a row. Rows with fewer begin with repetitions of
    their first edge.
    """
    is_first = torch.ones_like(edges[:, :1], dtype=torch.bool)
    is_new = torch.cat([is_first, edges.diff(dim=1) > 0], 1)
    # A stable sort moves the new edges to the end of the row, in their order.
    longest = int(is_new.sum(1).max())
    kept = is_new.to(torch.uint8).argsort(dim=1, stable=True)[:, -longest:]
    return torch.where(is_new.gather(1, kept), edges.gather(1, kept), edges[:, :1])


def sum_blocks(table: Table, logs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum p over each block, from logs = log p at the middle of each block (m, k).

    table: whose blocks are summed; its other fields are not used. Returns log Σ p, the mean count,
    and the relative correction of Σ p, (m, k) each. Inside a block
    p is taken as quadratic: its curvature corrects the sum, and its slope the mean count. Both
    follow from differences to the two neighbours, so that the first and the last block are not
    corrected.
    """
    w, x = table.widths, table.middles

    # The distances to the middles of both neighbours.
    before, after = x[:, 1:-1] - x[:, :-2], x[:, 2:] - x[:, 1:-1]
    logs = logs.clamp_min(NOTHING)
    possible = logs > NOTHING

    # Blocks beside one without counts or without probability are not corrected.
    safe = (before > 0) & (after > 0) & possible[:, 2:] & possible[:, 1:-1] & possible[:, :-2]
    before, after = before.clamp_min(0.5), after.clamp_min(0.5)
    finite_logs = torch.where(possible, logs, 0.0)

    # (log p)' and p''/p = (log p)'² + (log p)'' from differences to both neighbours.
    left_slope = (finite_logs[:, 1:-1] - finite_logs[:, :-2]) / before
    right_slope = (finite_logs[:, 2:] - finite_logs[:, 1:-1]) / after
    slope = (left_slope * after + right_slope * before) / (before + after)
    bend = slope**2 + 2 * (right_slope - left_slope) / (before + after)

    # 12 × the variance of a uniform distribution over the block.
    square = torch.where(safe, (w[:, 1:-1] ** 2 - 1).clamp_min(0), torch.zeros_like(bend))

    # Σ p = w p (1 + variance/2 · p''/p), and the mean count is x + variance · (log p)'. Both are
    # limited (guesses), where a block is too rough for the expansion.
    correction = square / 24 * bend
    limited = correction.clamp(-0.5, 1.0)
    shift = torch.maximum(torch.minimum(square / 12 * slope, w[:, 1:-1] / 2), -w[:, 1:-1] / 2)
    return (
        logs + w.clamp_min(1).log() + pad(torch.log1p(limited), (1, 1)),
        x + pad(shift, (1, 1)),
        pad(correction, (1, 1)),
    )


def _join_equal_sizes(tables: list[Table]) -> list[Table]:
    """Join the tables that have the same number of blocks, each group into one table."""
    groups: dict[int, list[Table]] = {}
    for table in tables:
        groups.setdefault(table.logs.shape[1], []).append(table)
    return [
        Table(*(torch.cat(fields) for fields in zip(*group, strict=True)))
        for group in groups.values()
    ]


def _cut_at_valley(table: Table, mean: Tensor) -> Table:
    """Return the table without the counts from the first rise of p to the right of the mean (m,).

    The sum over all counts of these rows does not exist. All rows are marked as inaccurate.
    """
    heights = _compute_log_heights(table)
    is_right = (table.middles > mean[:, None] + 1) & (table.widths > 0)
    lowest_so_far = torch.where(is_right, heights, torch.inf).cummin(1).values
    is_beyond = (is_right & (heights > lowest_so_far + SMALLEST_RISE)).cumsum(1) > 0
    return _mark_inaccurate(table)._replace(logs=torch.where(is_beyond, NOTHING, table.logs))


def _find_last_two_blocks(table: Table) -> Tensor:
    """Return the numbers of the last two blocks that have counts (m, 2); 0 where there are fewer.

    The number of the last one comes second.
    """
    number = torch.where(table.widths > 0, torch.arange(table.widths.shape[1]), -1)
    last = number.amax(1, keepdim=True)
    before = torch.where(number < last, number, -1).amax(1, keepdim=True)
    return torch.cat([before, last], 1).clamp_min(0)


def _estimate_power_tail(table: Table, total: Tensor, last_two: Tensor) -> Tensor:
    """Estimate the mass to the right of the last block (m,), as a share of the mass of all blocks.

    The heights of the last two blocks are continued as a power of the count. last_two (m, 2): the
    numbers of these blocks. total (m,): the log of the mass of all blocks. The estimate holds for
    widths of any pattern: the total of a narrow block after a wide one is small, but its tail is
    long.
    """
    before, last = _compute_log_heights(table).gather(1, last_two).unbind(1)
    log_counts = table.middles.gather(1, last_two).clamp_min(0.5).log()
    power = (before - last) / (log_counts[:, 1] - log_counts[:, 0])
    top = table.edges[:, -1].clamp_min(1)
    at_top = last - power * (top.log() - log_counts[:, 1])
    # ∫ from the top of p(top) (y/top)^−power dy, which is infinite for power ≤ 1
    tail = (at_top - total).exp() * top / (power - 1)
    # The power is not finite where the last block has no probability.
    return torch.where(power.isfinite(), torch.where(power > 1, tail, torch.inf), 0.0)


def _compute_log_ratio_of_totals(table: Table, last_two: Tensor) -> Tensor:
    """Return the log of the ratio (m,) of the last block's total to that of the block before.

    last_two (m, 2): the numbers of these blocks. Where two patterns of edges are interleaved, the
    widths of neighbours differ irregularly. There the ratio is that of the heights, times the ratio
    of the middles, as if the widths grew in proportion to the count.
    """
    before, last = table.widths.gather(1, last_two).clamp_min(1).unbind(1)
    by_totals = table.logs.gather(1, last_two).diff(dim=1)[:, 0]
    uneven = (torch.minimum(before, last) >= WIDE) & ((last / before).log().abs() > UNEVEN)
    first, second = table.middles.gather(1, last_two).unbind(1)
    by_heights = by_totals - (last / before).log() + (second / first.clamp_min(1)).log()
    return torch.where(uneven, by_heights, by_totals)


def estimate_tails(table: Table, first: int = 0) -> tuple[Tensor, Tensor]:
    """Estimate the left and the right tail of each row of a table, (m,) each.

    They are the mass beyond the blocks, as a share of the mass of the blocks. On the right it is
    the larger one of a geometric series of block totals and of a power law, both through the last
    two blocks. On the left, the counts down to zero are taken to be as probable as those of the
    first block. first: the number of the first block with counts, where a row has empty blocks
    before it.
    """
    total = table.logs.logsumexp(1)
    last_two = _find_last_two_blocks(table)
    last = table.logs.gather(1, last_two)[:, 1]
    ratio = _compute_log_ratio_of_totals(table, last_two).exp()
    tail = (last - total).exp() * ratio / (1 - ratio)
    right_tail = torch.where(ratio < 1, tail, torch.full_like(tail, torch.inf))
    right_tail = torch.maximum(right_tail, _estimate_power_tail(table, total, last_two))
    # If the last block has no probability, the counts have ended before it.
    right_tail = torch.where(last <= NOTHING, torch.zeros_like(right_tail), right_tail)
    # The height of the first block, times the number of counts below it.
    log_below = _compute_log_heights(table)[:, first] + table.edges[:, 0].clamp_min(1).log() - total
    left_tail = torch.where(table.edges[:, 0] > 0, log_below.exp(), torch.zeros_like(log_below))
    return left_tail, right_tail
