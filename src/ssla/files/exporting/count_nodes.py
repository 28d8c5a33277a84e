"""Counts in a static graph: the blocks of `ssla.predictive.count_law`, for the first
three reaches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ssla.files.exporting import modes
from ssla.files.exporting.laws import Levels
from ssla.likelihoods import Likelihood
from ssla.maths.quadrature.normal import normal_nodes
from ssla.predictive.count_law import (
    BLOCKS_PER_UNIT,
    FIRST_REACH,
    LARGEST_COUNT,
    NOTHING,
    ROUGH,
    SINGLE_COUNTS,
    SMALL_DOUBT,
    TAIL,
    WIDER,
    Table,
    block_totals,
    tails_of,
)

REACHES = (FIRST_REACH, WIDER * FIRST_REACH, WIDER**2 * FIRST_REACH)
HIGHEST_GROWING = 1e6  # to which blocks that grow with the count go


@dataclass(frozen=True, eq=False)
class CountLaw:
    """Tables of all reaches, and which of them each row takes: the first whose tails hold < 1e-8.

    Rows without one are NaN.
    """

    tables: tuple[Table, ...]
    taken: tuple[Tensor, ...]  # (N,) bool, at most one of them True

    whole = True

    def _chosen(self, values: list[Tensor]) -> Tensor:
        found = torch.full_like(values[0], torch.nan)
        for value, rows in zip(values, self.taken, strict=True):
            found = torch.where(rows if value.dim() == 1 else rows.unsqueeze(1), value, found)
        return found

    @cached_property
    def _shares(self) -> list[Tensor]:
        return [torch.softmax(table.logs, 1) for table in self.tables]

    @cached_property
    def _means(self) -> list[Tensor]:
        return [
            (share * table.centres).sum(1)
            for table, share in zip(self.tables, self._shares, strict=True)
        ]

    @cached_property
    def mean(self) -> Tensor:
        return self._chosen(self._means)

    @cached_property
    def variance(self) -> Tensor:
        parts = []
        for table, share, mean in zip(self.tables, self._shares, self._means, strict=True):
            within = (table.widths**2 - 1).clamp_min(0) / 12
            parts.append((share * ((table.centres - mean.unsqueeze(1)) ** 2 + within)).sum(1))
        return self._chosen(parts)

    @cached_property
    def _cumulative(self) -> list[Tensor]:
        """(N, k + 1), from 0."""
        sums = [share.cumsum(1) for share in self._shares]
        return [torch.cat([torch.zeros_like(part[:, :1]), part / part[:, -1:]], 1) for part in sums]

    def density(self, y: Tensor) -> Tensor:
        raise NotImplementedError("counts have no density")

    def cdf(self, y: Tensor) -> Tensor:
        parts = []
        for table, cumulative in zip(self.tables, self._cumulative, strict=True):
            above = torch.minimum(torch.maximum(y + 1, table.edges[:, :1]), table.edges[:, -1:])
            at = (table.edges.unsqueeze(1) <= above.unsqueeze(-1)).to(torch.int64).sum(-1) - 1
            at = at.clamp(0, table.logs.shape[1] - 1)
            low, high = cumulative.gather(1, at), cumulative.gather(1, at + 1)
            width = table.widths.gather(1, at).clamp_min(1)
            parts.append(low + (above - table.edges.gather(1, at)) / width * (high - low))
        return self._chosen(parts)

    def icdf(self, levels: Levels) -> Tensor:
        """The smallest count y with P(Y ≤ y) ≥ level."""
        parts = []
        for table, cumulative in zip(self.tables, self._cumulative, strict=True):
            target = levels.q * cumulative[:, -1:] - 1e-14
            at = (cumulative.unsqueeze(1) < target.unsqueeze(-1)).to(torch.int64).sum(-1) - 1
            at = at.clamp(0, table.logs.shape[1] - 1)
            low, high = cumulative.gather(1, at), cumulative.gather(1, at + 1)
            inside = ((target - low) / (high - low).clamp_min(1e-300)).clamp(0, 1)
            whole = (inside * table.widths.gather(1, at)).ceil().clamp_min(1) - 1
            parts.append(table.edges.gather(1, at) + whole)
        return self._chosen(parts)


def count_law(likelihood: Likelihood, f: Tensor, K: Tensor) -> CountLaw:
    """The law of counts with mean e^f and a known `overdispersion`, for f ~ N(f̂, K)."""
    overdispersion = likelihood.overdispersion
    assert overdispersion is not None
    mean, scale = _location(overdispersion, f, K)
    tables, taken = [], []
    open_rows = torch.isfinite(mean)
    for reach in REACHES:
        table = _table(overdispersion, f, K, mean, scale, reach)
        left, right = tails_of(table, sum(len(counts) for counts in _patterns(reach)[1:]))
        done = open_rows & (left <= TAIL) & (right <= TAIL)
        tables.append(table)
        mixed = (table.edges[:, 0] < SINGLE_COUNTS) & (mean > SINGLE_COUNTS)
        taken.append(done & table.accurate & ~(mixed & (table.edges[:, -1] > HIGHEST_GROWING)))
        open_rows = open_rows & ~done
    return CountLaw(tuple(tables), tuple(taken))


def _location(overdispersion: float, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
    """Where the blocks are centred, and their unit: as in `count_predictive`."""
    nodes, weights = normal_nodes(1)
    points = torch.exp(f + K[:, :, 0].clamp(0, SMALL_DOUBT).sqrt() * nodes[:, 0])
    noise = points if overdispersion == 0 else points + overdispersion * points**2
    centre = (weights * points).sum(1, keepdim=True)
    variance = (weights * ((points - centre) ** 2 + noise)).sum(1)
    return torch.exp(f[:, 0]), variance.sqrt().clamp_min(1.0)


def _table(
    overdispersion: float,
    f: Tensor,
    K: Tensor,
    mean: Tensor,
    scale: Tensor,
    reach: float,
) -> Table:
    edges = _edges(mean.unsqueeze(1), scale.unsqueeze(1), reach)
    frame = Table(mean, edges, edges[:, 1:], edges[:, 1:], torch.ones_like(mean, dtype=torch.bool))
    y = frame.middles.clamp_min(0)
    if overdispersion == 0:
        logs = modes.poisson(y, f, K)
    else:
        logs = modes.negative_binomial(overdispersion, y, f, K)
    totals, centres, corrections = block_totals(frame, logs)
    totals = torch.where(frame.widths > 0, totals, NOTHING).clamp_min(NOTHING)
    accurate = (torch.softmax(totals, 1) * corrections**2).sum(1) <= ROUGH
    return frame._replace(logs=totals, centres=centres, accurate=accurate)


def _edges(mean: Tensor, scale: Tensor, reach: float) -> Tensor:
    """As in `ssla.predictive.count_law`.

    Edges that a row does not have repeat its first one: blocks without a count.
    """
    pattern, single, growing = _patterns(reach)
    edges = (mean + scale * pattern).round().clamp(0, LARGEST_COUNT)
    last = edges[:, -1:]
    low, far = mean - scale * math.sinh(reach) < SINGLE_COUNTS, mean > SINGLE_COUNTS
    none = torch.where(low, 0.0, edges[:, :1])
    small = torch.where(low & (single < last), single, none)
    large = torch.where(low & far & (growing < last), growing, none)
    return torch.cat([edges, small, large], 1).sort(1).values


@lru_cache(maxsize=8)
def _patterns(reach: float) -> tuple[Tensor, Tensor, Tensor]:
    """Constants of the graph: sinh(t), the small counts, and counts that grow by equal factors."""
    t = torch.linspace(-reach, reach, 2 * int(reach * BLOCKS_PER_UNIT) + 1, dtype=torch.float64)
    single = torch.arange(SINGLE_COUNTS + 1, dtype=torch.float64)
    steps = int(math.log(HIGHEST_GROWING / SINGLE_COUNTS) * BLOCKS_PER_UNIT) + 1
    growing = (
        SINGLE_COUNTS * torch.exp(torch.arange(1, steps, dtype=torch.float64) / BLOCKS_PER_UNIT)
    ).round()
    return torch.sinh(t), single, growing
