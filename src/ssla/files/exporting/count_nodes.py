"""Counts in a static graph: the blocks of `ssla.predictive.count_law`, for the first three reaches.

A block holds neighbouring counts. The reach is how far the blocks go from their centre, as the
largest t of edges at centre + scale · sinh(t). Tables have N rows and k blocks.
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
HIGHEST_GROWING = 1e6  # the largest count of blocks that grow with the count; a guess
ROUNDING = 1e-14  # of a probability; a guess


@dataclass(frozen=True, eq=False)
class CountLaw:
    """Tables of all reaches, and which rows use each: the first one with small enough tails.

    Answers for rows that use none are NaN.
    """

    tables: tuple[Table, ...]
    used_by: tuple[Tensor, ...]  # (N,) bool for each table; a row uses at most one

    def _choose_by_row(self, values: list[Tensor]) -> Tensor:
        """Return the value of each row from the table that it uses; NaN for rows that use none.

        values: (N,) or (N, k) for each table -> (N,) or (N, k).
        """
        chosen = torch.full_like(values[0], torch.nan)
        for value, rows in zip(values, self.used_by, strict=True):
            chosen = torch.where(rows if value.dim() == 1 else rows.unsqueeze(1), value, chosen)
        return chosen

    @cached_property
    def _block_probabilities(self) -> list[Tensor]:
        """Return the probability of each block, (N, k) for each table."""
        return [torch.softmax(table.logs, 1) for table in self.tables]

    @cached_property
    def _table_means(self) -> list[Tensor]:
        """Return the mean of the counts, (N,) for each table."""
        return [
            (probabilities * table.centres).sum(1)
            for table, probabilities in zip(self.tables, self._block_probabilities, strict=True)
        ]

    @cached_property
    def mean(self) -> Tensor:
        """Return the mean of the counts (N,)."""
        return self._choose_by_row(self._table_means)

    @cached_property
    def variance(self) -> Tensor:
        """Return the variance of the counts (N,), between and within the blocks.

        Counts within a block are taken as equally probable.
        """
        variances = []
        for table, probabilities, mean in zip(
            self.tables, self._block_probabilities, self._table_means, strict=True
        ):
            within = (table.widths**2 - 1).clamp_min(0) / 12  # of w equally probable counts
            between = (table.centres - mean.unsqueeze(1)) ** 2
            variances.append((probabilities * (between + within)).sum(1))
        return self._choose_by_row(variances)

    @cached_property
    def _cumulative_probabilities(self) -> list[Tensor]:
        """Return the probability of all counts below each edge, (N, k + 1) for each table.

        The probability rises from exactly 0 to exactly 1.
        """
        cumulative = []
        for probabilities in self._block_probabilities:
            sums = probabilities.cumsum(1)
            cumulative.append(torch.cat([torch.zeros_like(sums[:, :1]), sums / sums[:, -1:]], 1))
        return cumulative

    def icdf(self, levels: Levels) -> Tensor:
        """Return the smallest counts y with P(Y ≤ y) ≥ level, for each of the levels: (N, levels).

        Counts within a block are taken as equally probable.
        """
        values = []
        for table, cumulative in zip(self.tables, self._cumulative_probabilities, strict=True):
            target = levels.q * cumulative[:, -1:] - ROUNDING
            # The block begins at the last edge below which the probability is too small.
            block = (cumulative.unsqueeze(1) < target.unsqueeze(-1)).to(torch.int64).sum(-1) - 1
            block = block.clamp(0, table.logs.shape[1] - 1)
            low, high = cumulative.gather(1, block), cumulative.gather(1, block + 1)
            # The share of the block's counts that are needed, and the last of these counts.
            share = ((target - low) / (high - low).clamp_min(1e-300)).clamp(0, 1)
            last_needed = (share * table.widths.gather(1, block)).ceil().clamp_min(1) - 1
            values.append(table.edges.gather(1, block) + last_needed)

        return self._choose_by_row(values)


def make_count_law(likelihood: Likelihood, f: Tensor, K: Tensor) -> CountLaw:
    """Return the law of counts with mean e^f and a known `overdispersion`, for f ~ N(f̂, K).

    f: f̂ (N, 1). K (N, 1, 1). A row uses the table of the first reach whose tails are small enough,
    and no table if that one is not accurate: the library would then take other blocks. The variance
    of counts with mean m is m + αm², with the overdispersion α of the likelihood, which is 0 for
    Poisson counts.
    """
    overdispersion = likelihood.overdispersion
    assert overdispersion is not None
    mean, scale = _locate_blocks(overdispersion, f, K)
    tables: list[Table] = []
    used_by: list[Tensor] = []
    remaining = torch.isfinite(mean)  # rows without a table so far
    for reach in REACHES:
        table = _make_table(overdispersion, f, K, mean, scale, reach)

        # Small and growing counts come first in the sorted edges of rows that do not have them.
        _, single, growing = _make_edge_patterns(reach)
        lower_tail, upper_tail = estimate_tails(table, len(single) + len(growing))
        is_first = remaining & (lower_tail <= TAIL) & (upper_tail <= TAIL)
        tables.append(table)

        # Growing blocks that begin among the small counts end at HIGHEST_GROWING: not far enough.
        is_mixed = (table.edges[:, 0] < SINGLE_COUNTS) & (mean > SINGLE_COUNTS)
        ends_early = is_mixed & (table.edges[:, -1] > HIGHEST_GROWING)
        used_by.append(is_first & table.accurate & ~ends_early)
        remaining = remaining & ~is_first

    return CountLaw(tuple(tables), tuple(used_by))


def _locate_blocks(overdispersion: float, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
    """Return the centre of the blocks and their unit, (N,) each, as in `make_count_predictive`.

    The centre is e^f̂, and the unit is the standard deviation of the counts, at least 1. f: f̂ (N,
    1). K (N, 1, 1). overdispersion: α of `make_count_law`.
    """
    nodes, weights = normal_nodes(1)
    # Means of the counts at the nodes of f. A large variance of f is cut: it would move the unit
    # away from the bulk.
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
    """Return the table of the blocks up to a reach, with their log probabilities.

    f: f̂ (N, 1). K (N, 1, 1). mean and scale (N,): the centre of the blocks and their unit.
    overdispersion: α of `make_count_law`.
    """
    edges = _make_block_edges(mean.unsqueeze(1), scale.unsqueeze(1), reach)

    # The middles and widths of the blocks follow from the edges. Logs and centres are placeholders.
    frame = Table(mean, edges, edges[:, 1:], edges[:, 1:], torch.ones_like(mean, dtype=torch.bool))
    y = frame.middles.clamp_min(0)
    if overdispersion == 0:
        logs = modes.compute_poisson_log_density(y, f, K)
    else:
        logs = modes.compute_negative_binomial_log_density(overdispersion, y, f, K)

    totals, centres, corrections = sum_blocks(frame, logs)
    totals = torch.where(frame.widths > 0, totals, NOTHING).clamp_min(NOTHING)
    accurate = (torch.softmax(totals, 1) * corrections**2).sum(1) <= ROUGH
    return frame._replace(logs=totals, centres=centres, accurate=accurate)


def _make_block_edges(mean: Tensor, scale: Tensor, reach: float) -> Tensor:
    """Return the edges of the blocks (N, k + 1) in rising order, as in `ssla.predictive.count_law`.

    mean and scale (N, 1). All rows have the same number of edges. Those that a row does not need
    repeat its first edge, so that their blocks have no counts. reach: the largest t, see the
    module.
    """
    pattern, single, growing = _make_edge_patterns(reach)
    edges = (mean + scale * pattern).round().clamp(0, LARGEST_COUNT)
    last = edges[:, -1:]
    has_small = mean - scale * math.sinh(reach) < SINGLE_COUNTS
    is_far = mean > SINGLE_COUNTS
    first = torch.where(has_small, 0.0, edges[:, :1])
    small = torch.where(has_small & (single < last), single, first)
    large = torch.where(has_small & is_far & (growing < last), growing, first)
    return torch.cat([edges, small, large], 1).sort(1).values


@lru_cache(maxsize=8)  # there are three reaches
def _make_edge_patterns(reach: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return three patterns of edges, which are constants of the graph.

    The patterns are sinh(t) for t up to the reach, the small counts, and counts that grow by equal
    factors.
    """
    t = torch.linspace(-reach, reach, 2 * int(reach * BLOCKS_PER_UNIT) + 1, dtype=torch.float64)
    single = torch.arange(SINGLE_COUNTS + 1, dtype=torch.float64)
    steps = int(math.log(HIGHEST_GROWING / SINGLE_COUNTS) * BLOCKS_PER_UNIT) + 1
    growing = (
        SINGLE_COUNTS * torch.exp(torch.arange(1, steps, dtype=torch.float64) / BLOCKS_PER_UNIT)
    ).round()
    return torch.sinh(t), single, growing
