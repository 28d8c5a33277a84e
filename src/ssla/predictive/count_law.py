"""Counts: summed one by one to a tail bound; in blocks where there are thousands of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, final

import torch
from torch import Tensor

from ssla.likelihoods.support import Counts
from ssla.maths.quadrature import Regions
from ssla.predictive.law import PointwiseLaw, ends_of_runs, gathered, gathered_regions, highest
from ssla.predictive.predictive import Diagnostics, Predictive
from ssla.predictive.spread import total_variance
from ssla.refit import LogDensity

TAIL = 1e-8
BLOCKS_PER_UNIT = (
    32  # of t: a block is about a thirtieth of the scale wide, or of the distance from the centre
)
FINEST = 256  # times as many, where those do not resolve a peak
# the largest mean of counts for which smaller blocks are tried; from 9e15 on, doubles skip whole
# numbers
RESOLVED = 1e15
ROUGH = 1e-6  # the mean square of the blocks' relative corrections above which they do not
FIRST_REACH = 2.8  # sinh(2.8) = 8.2 scales to either side
WIDEST_REACH = 30.0
WIDER = 1.6  # the factor from one reach to the next
LARGEST_COUNT = 1e30
SMALL_DOUBT = 0.25
SINGLE_COUNTS = 128  # every window has these, so that a probability that rises again is seen
WIDE, UNEVEN = (
    64,
    0.1,
)  # counts in a block, and the logarithm of the ratio of two neighbours' widths, beyond rounding
NOTHING = -1e300  # log of no probability, finite so that sums of it are
MODE_ROUNDS = 12
TASKS_AT_ONCE = 1 << 18


class Table(NamedTuple):
    """Rows with the same number of blocks.

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
        return self.edges[:, 1:] - self.edges[:, :-1]

    @property
    def middles(self) -> Tensor:
        return (self.edges[:, 1:] + self.edges[:, :-1] - 1) / 2


@final
@dataclass(frozen=True, eq=False)
class CountLaw(PointwiseLaw):
    """P(Y = y) = exp(total(y)) / mass for y = 0, 1, 2, …"""

    tables: list[Table]

    kind = "count"

    @cached_property
    def _log_mass(self) -> Tensor:
        return gathered(self.tables, [t.logs.logsumexp(1) for t in self.tables])

    @cached_property
    def _shares(self) -> list[Tensor]:
        return [torch.softmax(t.logs, 1) for t in self.tables]

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        means, variances = [], []
        for table, share in zip(self.tables, self._shares, strict=True):
            mean = (share * table.centres).sum(1)
            means.append(mean)
            within = (table.widths**2 - 1).clamp_min(0) / 12  # of a uniform block
            variances.append((share * ((table.centres - mean[:, None]) ** 2 + within)).sum(1))
        return gathered(self.tables, means), gathered(self.tables, variances)

    @cached_property
    def mode(self) -> Tensor:
        """The most probable count: the best block, then the counts around its middle."""
        peaks = [_heights(t).argmax(1, keepdim=True) for t in self.tables]
        best = gathered(
            self.tables, [t.middles.gather(1, at) for t, at in zip(self.tables, peaks, strict=True)]
        ).round()
        reach = gathered(
            self.tables, [t.widths.gather(1, at) for t, at in zip(self.tables, peaks, strict=True)]
        )
        for _ in range(MODE_ROUNDS):
            if not bool((reach > 1).any()):
                break
            step = (reach / 8).ceil()
            near = (best + step * torch.arange(-12, 13, dtype=torch.float64)).clamp_min(0)
            best = near.gather(1, self.log_density.at(near).log.argmax(1, keepdim=True))
            reach = torch.where(step > 1, step, torch.ones_like(step))
        return torch.where(self._log_mass.isnan(), torch.nan, best.squeeze(1))

    def check(self, y: Tensor) -> None:
        """Only whole numbers from 0 have a probability."""
        Counts().check(y.flatten(), 1)

    @cached_property
    def _cumulative(self) -> list[Tensor]:
        """(m, k + 1), from 0."""
        sums = [share.cumsum(1) for share in self._shares]
        return [torch.nn.functional.pad(part / part[:, -1:], (1, 0)) for part in sums]

    def cdf(self, y: Tensor) -> Tensor:
        value = torch.floor(y.clamp(-1, 1e300))
        parts = []
        for table, cumulative in zip(self.tables, self._cumulative, strict=True):
            y_up = (value[table.rows] + 1).clamp(
                table.edges[:, :1], table.edges[:, -1:]
            )  # counts below it are ≤ y
            block = (torch.searchsorted(table.edges, y_up.contiguous(), right=True) - 1).clamp(
                0, table.logs.shape[1] - 1
            )
            low, high = cumulative.gather(1, block), cumulative.gather(1, block + 1)
            width = table.widths.gather(1, block).clamp_min(1)
            parts.append(low + (y_up - table.edges.gather(1, block)) / width * (high - low))
        return gathered(self.tables, parts)

    def icdf(self, q: Tensor) -> Tensor:
        """The smallest count y with P(Y ≤ y) ≥ q."""
        parts = []
        for table, cumulative in zip(self.tables, self._cumulative, strict=True):
            target = q.expand(table.rows.numel(), -1) * cumulative[:, -1:] - 1e-14
            block = (torch.searchsorted(cumulative, target.contiguous()) - 1).clamp(
                0, table.logs.shape[1] - 1
            )
            low, high = cumulative.gather(1, block), cumulative.gather(1, block + 1)
            inside = ((target - low) / (high - low).clamp_min(1e-300)).clamp(0, 1)
            whole = (inside * table.widths.gather(1, block)).ceil().clamp_min(1) - 1
            parts.append(table.edges.gather(1, block) + whole)
        return gathered(self.tables, parts)

    def hdr(self, level: float) -> Regions:
        """The smallest set of counts of at least that probability, as runs lower … upper (ends
        included).
        """
        runs = [_runs(t, share, level) for t, share in zip(self.tables, self._shares, strict=True)]
        lost = self._log_mass.isnan()[:, None]
        return Regions(
            *(torch.where(lost, torch.nan, end) for end in gathered_regions(self.tables, runs))
        )

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        u = torch.rand(self.rows, n, dtype=torch.float64, generator=generator)
        parts = []
        for table, cumulative in zip(self.tables, self._cumulative, strict=True):
            target = (u[table.rows] * cumulative[:, -1:]).contiguous()
            block = (torch.searchsorted(cumulative, target, right=True) - 1).clamp(
                0, table.logs.shape[1] - 1
            )
            low, high = cumulative.gather(1, block), cumulative.gather(1, block + 1)
            inside = ((target - low) / (high - low).clamp_min(1e-300)).clamp(0, 1 - 1e-12)
            parts.append(
                table.edges.gather(1, block) + (inside * table.widths.gather(1, block)).floor()
            )
        return gathered(self.tables, parts).mT


def _heights(table: Table) -> Tensor:
    """Log probability of one count of each block."""
    return torch.where(table.widths > 0, table.logs - table.widths.clamp_min(1).log(), -torch.inf)


def _runs(table: Table, share: Tensor, level: float) -> Regions:
    """The highest single counts, as runs lower … upper."""
    return densest_runs(table.edges, _heights(table), share, level)


def densest_runs(edges: Tensor, heights: Tensor, shares: Tensor, level: float) -> Regions:
    """The highest counts whose shares reach the level, as runs lower … upper (ends included).

    edges (N, k + 1): block j holds edges[j] … edges[j+1] − 1. heights (N, k): the log probability
    of one of its counts. The last block that is needed is cut: all of it can be much more than the
    level needs.
    """
    widths = edges.diff(dim=1)
    inside = highest(heights, shares, level)
    first, last = ends_of_runs(_bridge(inside, widths == 0))
    lower, upper = edges.gather(1, first.clamp_min(0)), edges.gather(1, last.clamp_min(0) + 1) - 1
    lowest = torch.where(inside & (widths > 0), heights, torch.inf).argmin(1, keepdim=True)
    start, width, share = (part.gather(1, lowest) for part in (edges, widths, shares))
    rest = torch.where(inside, shares, 0.0).sum(1, keepdim=True) - share
    kept = ((level - rest) / share.clamp_min(1e-300) * width).ceil().clamp_min(1).minimum(width)
    # The kept part is beside the rest of its run. A block that is a run by itself keeps the side of
    # its higher neighbour.
    begins, ends = lower == start, upper == start + width - 1
    left, right = (_neighbour(heights, lowest, step) for step in (-1, 1))
    from_left = ends & (~begins | (left >= right))
    lower = torch.where(begins & ~from_left, start + width - kept, lower)
    upper = torch.where(from_left, start + kept - 1, upper)
    return Regions(
        torch.where(first < 0, torch.nan, lower), torch.where(last < 0, torch.nan, upper)
    )


def _neighbour(heights: Tensor, at: Tensor, step: int) -> Tensor:
    """The heights beside some blocks (N, 1); −∞ beyond the first and the last."""
    place = at + step
    found = heights.gather(1, place.clamp(0, heights.shape[1] - 1))
    return torch.where((place < 0) | (place >= heights.shape[1]), -torch.inf, found)


def _bridge(inside: Tensor, empty: Tensor) -> Tensor:
    """Blocks without a count belong to the run before them."""
    place = torch.arange(inside.shape[1]).expand_as(inside)
    last = torch.where(empty, -1, place).cummax(1).values
    return torch.where(empty & (last >= 0), inside.gather(1, last.clamp_min(0)), inside & ~empty)


def count_predictive(log_density: LogDensity, refit: str) -> Predictive:
    """Sum the probabilities of all rows, widening each row's window until its tails hold < 1e-8 of
    the mass.

    Probabilities that never fall (a Newton step far from its point can do that) are cut where they
    begin to rise.
    """
    f, K = log_density.marginal
    likelihood = log_density.likelihood
    mean = likelihood.mean(f)
    # the scale of the bulk: noise, and the uncertainty of the mean as if it were small (tails are
    # found by widening)
    doubt, noise = total_variance(
        likelihood, f, K.clamp_max(SMALL_DOUBT) if log_density.moves else torch.zeros_like(K)
    )
    scale = (doubt + noise).sqrt().clamp_min(1.0)
    fallback = torch.zeros(f.shape[0], dtype=torch.bool)
    unconverged = torch.zeros_like(fallback)

    def tabulate(rows: Tensor, reach: float, finer: int = 1) -> Table:
        edges = _edges(mean[rows, None], scale[rows, None], reach, BLOCKS_PER_UNIT * finer)
        frame = Table(
            rows, edges, edges[:, 1:], edges[:, 1:], torch.ones_like(rows, dtype=torch.bool)
        )
        density = log_density.at(frame.middles.clamp_min(0), rows)
        real = frame.widths > 0
        fallback[rows] |= (density.fallback & real).any(1)
        unconverged[rows] |= (~density.converged & real).any(1)
        totals, centres, corrections = block_totals(frame, density.log)
        totals = torch.where(real, totals, NOTHING).clamp_min(NOTHING)
        accurate = (torch.softmax(totals, 1) * corrections**2).sum(1) <= ROUGH
        return frame._replace(logs=totals, centres=centres, accurate=accurate)

    def resolved(table: Table, reach: float) -> list[Table]:
        """With smaller blocks in the rows that need them: a peak may be narrow beside the scale, as
        of zeros and large counts.

        Rows with means beyond `RESOLVED` stay as they are: there rounding is what is rough, and
        smaller blocks do not help.
        """
        beyond = mean[table.rows] > RESOLVED
        found, finer = (
            [_some(table, beyond), _some(table, ~beyond)] if bool(beyond.any()) else [table],
            1,
        )
        while finer < FINEST and not bool(found[-1].accurate.all()):
            rough, finer = found.pop(), 4 * finer
            found.append(_some(rough, rough.accurate))
            found.append(tabulate(rough.rows[~rough.accurate], reach, finer))
        return found

    tables: list[Table] = []
    if not f.shape[0]:  # no rows have a table too: an empty one
        none = mean.new_empty(0, 1)
        tables.append(Table(torch.arange(0), mean.new_empty(0, 2), none, none, fallback))
    pending, reach = torch.arange(f.shape[0]), FIRST_REACH
    while pending.numel():
        last = reach >= WIDEST_REACH
        short = mean[pending] + scale[pending] * math.sinh(reach) <= SINGLE_COUNTS
        again = [pending[short]]
        for rows in _groups(pending[~short], mean, scale, reach):
            table = tabulate(rows, reach)
            left, right = tails_of(table)
            done = (left <= TAIL) & (right <= TAIL)
            endless = torch.isinf(right) & last
            if bool(done.any()):
                tables += resolved(_some(table, done), reach)
            cut = ~done & ~endless & last
            if bool(cut.any()):
                tables.append(_some(table, cut)._replace(accurate=done[cut]))
            if bool(endless.any()):
                tables.append(
                    _cut_at_valley(tabulate(rows[endless], FIRST_REACH), mean[rows[endless]])
                )
            if not last:
                again.append(rows[~done])
        pending = torch.cat(again)
        reach = min(WIDER * reach, WIDEST_REACH)
    inaccurate = torch.zeros_like(fallback)
    for table in tables:
        inaccurate[table.rows] = ~table.accurate
    flags = Diagnostics(refit, fallback, unconverged, inaccurate)
    return Predictive(CountLaw(log_density, _by_pattern(tables)), log_density.like, flags)


def _groups(rows: Tensor, mean: Tensor, scale: Tensor, reach: float) -> list[Tensor]:
    """Rows in pieces that bound the memory, those with the same kinds of edges together."""
    low = mean[rows] - scale[rows] * math.sinh(reach) < SINGLE_COUNTS
    far = mean[rows] > SINGLE_COUNTS
    size = max(TASKS_AT_ONCE // int(2 * reach * BLOCKS_PER_UNIT), 1)
    kinds = (rows[~low], rows[low & ~far], rows[low & far])
    return [part for group in kinds if group.numel() for part in group.split(size)]


def _some(table: Table, chosen: Tensor) -> Table:
    return Table(*(part[chosen] for part in table))


def _edges(mean: Tensor, scale: Tensor, reach: float, by_unit: int) -> Tensor:
    """(m, k + 1), for the rows of one group. A window that reaches down to small counts takes those
    one by one, and if its centre is far above them, blocks that grow with the count on the way up.
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
    return _different(torch.cat([edges, inside], 1).sort(1).values)


def _different(edges: Tensor) -> Tensor:
    """The different edges of each row, after repetitions of its first one where it has fewer:
    few blocks without a count.
    """
    new = torch.cat([torch.ones_like(edges[:, :1], dtype=torch.bool), edges.diff(dim=1) > 0], 1)
    kept = new.to(torch.uint8).argsort(dim=1, stable=True)[:, -int(new.sum(1).max()) :]
    return torch.where(new.gather(1, kept), edges.gather(1, kept), edges[:, :1])


def block_totals(table: Table, logs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log Σ p over each block, its mean count and the relative correction that p's curvature
    made, from log p at the middles.
    """
    w, x = table.widths, table.middles
    before, after = x[:, 1:-1] - x[:, :-2], x[:, 2:] - x[:, 1:-1]
    logs = logs.clamp_min(NOTHING)
    possible = logs > NOTHING
    safe = (before > 0) & (after > 0) & possible[:, 2:] & possible[:, 1:-1] & possible[:, :-2]
    before, after = before.clamp_min(0.5), after.clamp_min(0.5)
    near = torch.where(possible, logs, 0.0)
    left, right = (near[:, 1:-1] - near[:, :-2]) / before, (near[:, 2:] - near[:, 1:-1]) / after
    slope = (left * after + right * before) / (before + after)
    bend = slope**2 + 2 * (right - left) / (before + after)
    square = torch.where(
        safe, (w[:, 1:-1] ** 2 - 1).clamp_min(0), torch.zeros_like(bend)
    )  # 12 × the variance in a block
    correction = square / 24 * bend
    factor = correction.clamp(-0.5, 1.0)
    shift = torch.maximum(torch.minimum(square / 12 * slope, w[:, 1:-1] / 2), -w[:, 1:-1] / 2)
    pad = torch.nn.functional.pad
    return (
        logs + w.clamp_min(1).log() + pad(torch.log1p(factor), (1, 1)),
        x + pad(shift, (1, 1)),
        pad(correction, (1, 1)),
    )


def _by_pattern(tables: list[Table]) -> list[Table]:
    """Tables with as many blocks, joined."""
    groups: dict[int, list[Table]] = {}
    for table in tables:
        groups.setdefault(table.logs.shape[1], []).append(table)
    return [
        Table(*(torch.cat(parts) for parts in zip(*group, strict=True)))
        for group in groups.values()
    ]


def _cut_at_valley(table: Table, mean: Tensor) -> Table:
    """No probability beyond the first rise to the right of the mean: the sum does not exist, so
    this row is flagged.
    """
    heights = _heights(table)
    right = (table.middles > mean[:, None] + 1) & (table.widths > 0)
    lowest = torch.where(right, heights, torch.inf).cummin(1).values
    gone = (right & (heights > lowest + 1e-9)).cumsum(1) > 0
    return table._replace(
        logs=torch.where(gone, NOTHING, table.logs), accurate=torch.zeros_like(table.accurate)
    )


def _last_two(table: Table) -> Tensor:
    """The numbers of the last two blocks that have counts (m, 2)."""
    place = torch.where(table.widths > 0, torch.arange(table.widths.shape[1]), -1)
    last = place.amax(1, keepdim=True)
    before = torch.where(place < last, place, -1).amax(1, keepdim=True)
    return torch.cat([before, last], 1).clamp_min(0)


def _power_tail(table: Table, heights: Tensor, total: Tensor, ends: Tensor) -> Tensor:
    """Mass beyond the last block by a power of the count through the last two, as a share of all.

    It needs no regular widths: a narrow block after a wide one has a small total, but a long tail.
    """
    before, last = heights.gather(1, ends).unbind(1)
    places = table.middles.gather(1, ends).clamp_min(0.5).log()
    power = (before - last) / (places[:, 1] - places[:, 0])
    end = table.edges[:, -1].clamp_min(1)
    at_end = last - power * (end.log() - places[:, 1])
    tail = (at_end - total).exp() * end / (power - 1)
    known = power.isfinite()
    return torch.where(known, torch.where(power > 1, tail, torch.inf), 0.0)


def _falls_by(table: Table, ends: Tensor) -> Tensor:
    """Log of the ratio of the last block's total to that of the block before; `ends` are their
    numbers (m, 2).

    Blocks of two interleaved patterns of edges are of different widths. There it is the ratio for a
    step from one middle to the next, as if widths grew with the count.
    """
    before, last = table.widths.gather(1, ends).clamp_min(1).unbind(1)
    by_totals = table.logs.gather(1, ends).diff(dim=1)[:, 0]
    uneven = (torch.minimum(before, last) >= WIDE) & ((last / before).log().abs() > UNEVEN)
    first, second = table.middles.gather(1, ends).unbind(1)
    by_heights = by_totals - (last / before).log() + (second / first.clamp_min(1)).log()
    return torch.where(uneven, by_heights, by_totals)


def tails_of(table: Table, first: int = 0) -> tuple[Tensor, Tensor]:
    """Mass beyond the last block, by geometric continuation of the last two, relative to the whole;
    the same on the left.

    first: the number of the first block that has counts, where a row does not begin at zero.
    """
    total = table.logs.logsumexp(1)
    heights = _heights(table)
    ends = _last_two(table)
    last = table.logs.gather(1, ends)[:, 1]
    ratio = _falls_by(table, ends).exp()
    tail = (last - total).exp() * ratio / (1 - ratio)
    right = torch.where(ratio < 1, tail, torch.full_like(tail, torch.inf))
    right = torch.maximum(right, _power_tail(table, heights, total, ends))
    impossible = last <= NOTHING  # the counts have an end
    right = torch.where(impossible, torch.zeros_like(right), right)
    # at most as high as the first block, down to zero
    below = heights[:, first] + table.edges[:, 0].clamp_min(1).log() - total
    left = torch.where(table.edges[:, 0] > 0, below.exp(), torch.zeros_like(below))
    return left, right
