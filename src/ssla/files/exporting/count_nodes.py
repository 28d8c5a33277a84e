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
    estimate_tails,
    sum_blocks,
)

REACHES = (FIRST_REACH, WIDER * FIRST_REACH, WIDER**2 * FIRST_REACH)
HIGHEST_GROWING = 1e6  # to which blocks that grow with the count go; a guess
ROUNDING = 1e-14  # of a probability


@dataclass(frozen=True, eq=False)
class CountLaw:
    """Tables of all reaches, and which of them each row takes: the first whose tails hold < 1e-8.

    Rows without one are NaN.
    """

    tables: tuple[Table, ...]
    taken: tuple[Tensor, ...]  # (N,) bool, at most one of them True

    def _choose_by_row(self, values: list[Tensor]) -> Tensor:
        """Take the value of each row from the table that it takes; NaN where it takes none.

        values: (N,) or (N, k) for each table -> (N,) or (N, k).
        """
        chosen = torch.full_like(values[0], torch.nan)
        for value, rows in zip(values, self.taken, strict=True):
            chosen = torch.where(rows if value.dim() == 1 else rows.unsqueeze(1), value, chosen)
        return chosen

    @cached_property
    def _block_probabilities(self) -> list[Tensor]:
        """The probability of each block, (N, k) for each table."""
        return [torch.softmax(table.logs, 1) for table in self.tables]

    @cached_property
    def _table_means(self) -> list[Tensor]:
        """The mean of the counts, (N,) for each table."""
        return [
            (share * table.centres).sum(1)
            for table, share in zip(self.tables, self._block_probabilities, strict=True)
        ]

    @cached_property
    def mean(self) -> Tensor:
        """The mean of the counts (N,)."""
        return self._choose_by_row(self._table_means)

    @cached_property
    def variance(self) -> Tensor:
        """The variance of the counts (N,): between the blocks, and of equal counts within."""
        variances = []
        for table, share, mean in zip(
            self.tables, self._block_probabilities, self._table_means, strict=True
        ):
            within = (table.widths**2 - 1).clamp_min(0) / 12
            between = (table.centres - mean.unsqueeze(1)) ** 2
            variances.append((share * (between + within)).sum(1))
        return self._choose_by_row(variances)

    @cached_property
    def _cumulative_probabilities(self) -> list[Tensor]:
        """The probability of all counts below each edge, from 0: (N, k + 1) for each table."""
        sums = [share.cumsum(1) for share in self._block_probabilities]
        return [torch.cat([torch.zeros_like(s[:, :1]), s / s[:, -1:]], 1) for s in sums]

    def icdf(self, levels: Levels) -> Tensor:
        """Compute the smallest counts y with P(Y ≤ y) ≥ level: (N, k)."""
        values = []
        for table, cumulative in zip(self.tables, self._cumulative_probabilities, strict=True):
            target = levels.q * cumulative[:, -1:] - ROUNDING
            # The block after the last edge below which the probability is too small.
            block = (cumulative.unsqueeze(1) < target.unsqueeze(-1)).to(torch.int64).sum(-1) - 1
            block = block.clamp(0, table.logs.shape[1] - 1)
            low, high = cumulative.gather(1, block), cumulative.gather(1, block + 1)
            inside = ((target - low) / (high - low).clamp_min(1e-300)).clamp(0, 1)
            count_inside = (inside * table.widths.gather(1, block)).ceil().clamp_min(1) - 1
            values.append(table.edges.gather(1, block) + count_inside)
        return self._choose_by_row(values)


def count_law(likelihood: Likelihood, f: Tensor, K: Tensor) -> CountLaw:
    """Return the law of counts with mean e^f and a known `overdispersion`, for f ~ N(f̂, K).

    f̂ (N, 1), K (N, 1, 1). A row takes the first reach whose tails are small enough.
    """
    overdispersion = likelihood.overdispersion
    assert overdispersion is not None
    mean, scale = _locate_blocks(overdispersion, f, K)
    tables, taken = [], []
    remaining = torch.isfinite(mean)  # rows without a table so far
    for reach in REACHES:
        table = _make_table(overdispersion, f, K, mean, scale, reach)
        left, right = estimate_tails(
            table, sum(len(counts) for counts in _edge_patterns(reach)[1:])
        )
        done = remaining & (left <= TAIL) & (right <= TAIL)
        tables.append(table)
        # Growing blocks that begin among the small counts end at HIGHEST_GROWING: not far enough.
        mixed = (table.edges[:, 0] < SINGLE_COUNTS) & (mean > SINGLE_COUNTS)
        taken.append(done & table.accurate & ~(mixed & (table.edges[:, -1] > HIGHEST_GROWING)))
        remaining = remaining & ~done
    return CountLaw(tuple(tables), tuple(taken))


def _locate_blocks(overdispersion: float, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
    """Compute where the blocks are centred and their unit, (N,) each.

    They are those of `make_count_predictive`. f (N, 1), K (N, 1, 1).
    """
    nodes, weights = normal_nodes(1)
    points = torch.exp(f + K[:, :, 0].clamp(0, SMALL_DOUBT).sqrt() * nodes[:, 0])
    noise = points if overdispersion == 0 else points + overdispersion * points**2
    centre = (weights * points).sum(1, keepdim=True)
    variance = (weights * ((points - centre) ** 2 + noise)).sum(1)
    return torch.exp(f[:, 0]), variance.sqrt().clamp_min(1.0)


def _make_table(
    overdispersion: float,
    f: Tensor,
    K: Tensor,
    mean: Tensor,
    scale: Tensor,
    reach: float,
) -> Table:
    """Compute the log probabilities of the blocks that reach so far.

    f (N, 1), K (N, 1, 1), mean and scale (N,): the centre of the blocks and their unit.
    """
    edges = _block_edges(mean.unsqueeze(1), scale.unsqueeze(1), reach)
    frame = Table(mean, edges, edges[:, 1:], edges[:, 1:], torch.ones_like(mean, dtype=torch.bool))
    y = frame.middles.clamp_min(0)
    if overdispersion == 0:
        logs = modes.poisson_log_density(y, f, K)
    else:
        logs = modes.negative_binomial_log_density(overdispersion, y, f, K)
    totals, centres, corrections = sum_blocks(frame, logs)
    totals = torch.where(frame.widths > 0, totals, NOTHING).clamp_min(NOTHING)
    accurate = (torch.softmax(totals, 1) * corrections**2).sum(1) <= ROUGH
    return frame._replace(logs=totals, centres=centres, accurate=accurate)


def _block_edges(mean: Tensor, scale: Tensor, reach: float) -> Tensor:
    """Return the edges of the blocks (N, k + 1), as in `ssla.predictive.count_law`.

    mean and scale (N, 1). Edges that a row does not have repeat its first one: blocks without a
    count.
    """
    pattern, single, growing = _edge_patterns(reach)
    edges = (mean + scale * pattern).round().clamp(0, LARGEST_COUNT)
    last = edges[:, -1:]
    has_small = mean - scale * math.sinh(reach) < SINGLE_COUNTS
    is_far = mean > SINGLE_COUNTS
    first = torch.where(has_small, 0.0, edges[:, :1])
    small = torch.where(has_small & (single < last), single, first)
    large = torch.where(has_small & is_far & (growing < last), growing, first)
    return torch.cat([edges, small, large], 1).sort(1).values


@lru_cache(maxsize=8)
def _edge_patterns(reach: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return constants of the graph: sinh(t), the small counts, and counts that grow by equal
    factors.
    """
    t = torch.linspace(-reach, reach, 2 * int(reach * BLOCKS_PER_UNIT) + 1, dtype=torch.float64)
    single = torch.arange(SINGLE_COUNTS + 1, dtype=torch.float64)
    steps = int(math.log(HIGHEST_GROWING / SINGLE_COUNTS) * BLOCKS_PER_UNIT) + 1
    growing = (
        SINGLE_COUNTS * torch.exp(torch.arange(1, steps, dtype=torch.float64) / BLOCKS_PER_UNIT)
    ).round()
    return torch.sinh(t), single, growing
