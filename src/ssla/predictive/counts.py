"""Counts: summed one by one to a tail bound; in blocks where there are thousands of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssla._checks import level as checked_level
from ssla.expansion import Increments
from ssla.likelihoods.support import Counts
from ssla.predictive.base import Diagnostics, answer, checked, probabilities, scalar_targets
from ssla.predictive.spread import split_variance, total_variance
from ssla.quadrature import Regions
from ssla.refit import Expansion

TAIL = 1e-8
MOST_BLOCKS = 4096
FIRST_COUNTS = 32
MOST_ROUNDS = 40
ROUNDS_TO_FALL = 5  # a row whose last probabilities still rise after these many widenings has no sum


class Table(NamedTuple):
    """Rows with the same number of blocks. Block j holds the counts low + stride·j … low + stride·(j+1) − 1."""

    rows: Tensor  # (m,)
    low: Tensor  # (m,)
    stride: Tensor  # (m,) odd: the log probability is taken at the block's middle
    logs: Tensor  # (m, k) log of the block's total
    accurate: Tensor  # (m,) bool


@dataclass(frozen=True, eq=False)
class CountPredictive:
    """P(Y = y) = exp(total(y)) / mass for y = 0, 1, 2, …"""

    expansion: Expansion
    tables: list[Table]
    diagnostics: Diagnostics

    def _out(self, value: Tensor) -> Tensor:
        return value.to(self.expansion.like)

    @property
    def _rows(self) -> int:
        return self.expansion.marginal.mean.shape[0]

    def _gather(self, values: list[Tensor]) -> Tensor:
        out = torch.empty(self._rows, *values[0].shape[1:], dtype=values[0].dtype)
        for table, value in zip(self.tables, values, strict=True):
            out[table.rows] = value
        return out

    @cached_property
    def _log_mass(self) -> Tensor:
        return self._gather([t.logs.logsumexp(1) for t in self.tables])

    @cached_property
    def _shares(self) -> list[Tensor]:
        return [torch.softmax(t.logs, 1) for t in self.tables]

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        means, variances = [], []
        for table, share in zip(self.tables, self._shares, strict=True):
            middle = _middles(table)
            mean = (share * middle).sum(1)
            means.append(mean)
            within = (table.stride**2 - 1) / 12  # of a uniform block
            variances.append((share * (middle - mean[:, None]) ** 2).sum(1) + within)
        return self._gather(means), self._gather(variances)

    @property
    def mean(self) -> Tensor:
        return self._out(self._moments[0])

    @property
    def variance(self) -> Tensor:
        return self._out(self._moments[1])

    @property
    def stddev(self) -> Tensor:
        return self._out(self._moments[1].sqrt())

    @cached_property
    def mode(self) -> Tensor:
        best = [_middles(t).gather(1, t.logs.argmax(1, keepdim=True)).squeeze(1) for t in self.tables]
        return self._out(self._gather(best))

    @property
    def mass(self) -> Tensor:
        return self._out(self._log_mass.exp())

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        f, K = self.expansion.marginal
        return split_variance(self.expansion.likelihood, f, K, self.expansion.moves, self._moments[1])

    @property
    def epistemic(self) -> Tensor:
        return self._out(self._parts[0])

    @property
    def aleatoric(self) -> Tensor:
        return self._out(self._parts[1])

    def log_prob(self, y: Any) -> Tensor:
        """(N,) -> (N,); (N, k) -> (N, k). Only whole numbers from 0 have a probability."""
        value, single = scalar_targets(y, self._rows)
        Counts().check(value.flatten(), 1)
        return self._out(answer(self.expansion.density(value).log - self._log_mass[:, None], single))

    @cached_property
    def _cumulative(self) -> list[Tensor]:
        """(m, k + 1), from 0."""
        return [torch.nn.functional.pad(share.cumsum(1), (1, 0)).clamp_max(1.0) for share in self._shares]

    def cdf(self, y: Any) -> Tensor:
        """P(Y ≤ y).  (N,) -> (N,); (N, k) -> (N, k)."""
        value, single = scalar_targets(y, self._rows)
        value = torch.floor(checked(value))
        parts = []
        for table, cumulative in zip(self.tables, self._cumulative, strict=True):
            place = (value[table.rows] + 1 - table.low[:, None]) / table.stride[:, None]  # blocks up to and with y
            place = place.clamp(0, table.logs.shape[1])
            below = place.floor().long().clamp_max(table.logs.shape[1] - 1)
            low, high = cumulative.gather(1, below), cumulative.gather(1, below + 1)
            parts.append(low + (place - below) * (high - low))
        return self._out(answer(self._gather(parts), single))

    def icdf(self, q: Any) -> Tensor:
        """The smallest count y with P(Y ≤ y) ≥ q.  One number -> (N,); (k,) -> (N, k)."""
        value, single = probabilities(q)
        parts = []
        for table, cumulative in zip(self.tables, self._cumulative, strict=True):
            target = value.expand(table.rows.numel(), -1) * cumulative[:, -1:] - 1e-14
            block = (torch.searchsorted(cumulative, target.contiguous()) - 1).clamp(0, table.logs.shape[1] - 1)
            low, high = cumulative.gather(1, block), cumulative.gather(1, block + 1)
            inside = ((target - low) / (high - low).clamp_min(1e-300)).clamp(0, 1)
            whole = (inside * table.stride[:, None]).ceil().clamp_min(1) - 1
            parts.append(table.low[:, None] + table.stride[:, None] * block + whole)
        return self._out(answer(self._gather(parts), single))

    def interval(self, level: float = 0.95) -> Tensor:
        """Central interval (N, 2), both ends included."""
        tail = (1 - checked_level(level)) / 2
        return self.icdf(torch.tensor([tail, 1 - tail], dtype=torch.float64))

    def hdr(self, level: float = 0.95) -> Regions:
        """The smallest set of counts of at least that probability, as runs lower … upper (ends included)."""
        checked_level(level)
        parts = [_runs(t, share, level) for t, share in zip(self.tables, self._shares, strict=True)]
        most = max(part.lower.shape[1] for part in parts)

        def pad(value: Tensor) -> Tensor:
            return torch.nn.functional.pad(value, (0, most - value.shape[1]), value=torch.nan)

        return Regions(
            self._out(self._gather([pad(p.lower) for p in parts])), self._out(self._gather([pad(p.upper) for p in parts]))
        )

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, N)."""
        u = torch.rand(self._rows, n, dtype=torch.float64, generator=generator)
        parts = []
        for table, cumulative in zip(self.tables, self._cumulative, strict=True):
            target = (u[table.rows] * cumulative[:, -1:]).contiguous()
            block = (torch.searchsorted(cumulative, target, right=True) - 1).clamp(0, table.logs.shape[1] - 1)
            low, high = cumulative.gather(1, block), cumulative.gather(1, block + 1)
            inside = ((target - low) / (high - low).clamp_min(1e-300)).clamp(0, 1 - 1e-12)
            parts.append(table.low[:, None] + table.stride[:, None] * block + (inside * table.stride[:, None]).floor())
        return self._out(self._gather(parts).mT)

    def increments(self, y: Any) -> Increments:
        """The three increments of the un-normalised log probability, of log_prob's shape."""
        value, single = scalar_targets(y, self._rows)
        Counts().check(value.flatten(), 1)
        parts = self.expansion(value)
        return Increments(*(self._out(answer(p, single)) for p in (parts.likelihood, parts.prior, parts.curvature)))


def _middles(table: Table) -> Tensor:
    """(m, k)."""
    blocks = torch.arange(table.logs.shape[1], dtype=torch.float64)
    return table.low[:, None] + table.stride[:, None] * blocks + (table.stride[:, None] - 1) / 2


def _runs(table: Table, share: Tensor, level: float) -> Regions:
    order = share.argsort(1, descending=True)
    reached = share.gather(1, order).cumsum(1)
    needed = torch.nn.functional.pad(reached[:, :-1] < level, (1, 0), value=True)
    inside = torch.zeros_like(needed).scatter(1, order, needed)
    edge = torch.zeros_like(inside[:, :1])
    starts = inside & ~torch.cat([edge, inside[:, :-1]], 1)
    stops = inside & ~torch.cat([inside[:, 1:], edge], 1)
    most = int(starts.sum(1).max())
    lowers, uppers = [], []
    for r in range(1, most + 1):
        exists = starts.sum(1) >= r
        first = (starts & (starts.cumsum(1) == r)).to(torch.uint8).argmax(1)
        last = (stops & (stops.cumsum(1) == r)).to(torch.uint8).argmax(1)
        lowers.append(torch.where(exists, table.low + table.stride * first, torch.nan))
        uppers.append(torch.where(exists, table.low + table.stride * (last + 1) - 1, torch.nan))
    return Regions(torch.stack(lowers, 1), torch.stack(uppers, 1))


def count_predictive(expansion: Expansion, refit: str) -> CountPredictive:
    """Sum the probabilities of all rows, widening each row's window until its tails hold < 1e-8 of the mass.

    Probabilities that never fall (a Newton step far from its point can do that) are cut where they begin to rise.
    """
    f, K = expansion.marginal
    likelihood = expansion.likelihood
    doubt, noise = total_variance(likelihood, f, K if expansion.moves else torch.zeros_like(K))
    mean, scale = likelihood.mean(f), (doubt + noise).sqrt()
    fallback = torch.zeros(f.shape[0], dtype=torch.bool)
    unconverged = torch.zeros_like(fallback)
    low = (mean - 8 * scale).floor().clamp_min(0)
    high = (mean + 8 * scale).ceil() + FIRST_COUNTS
    first_low, first_high = low.clone(), high.clone()
    pending = torch.arange(f.shape[0])
    tables: list[Table] = []
    for round_ in range(MOST_ROUNDS):
        again = []
        for rows, count in _by_size(pending, high[pending] - low[pending]):
            table = _tabulate(expansion, rows, low[rows], high[rows], count, fallback, unconverged)
            left, right = _tails(table)
            left = torch.where(table.low > 0, left, torch.zeros_like(left))
            done = (left <= TAIL) & (right <= TAIL)
            final = done if round_ < MOST_ROUNDS - 1 else torch.ones_like(done)
            endless = torch.isinf(right) & (round_ >= ROUNDS_TO_FALL)
            if bool(endless.any()):
                lost = rows[endless]
                for some, size in _by_size(lost, first_high[lost] - first_low[lost]):
                    cut = _tabulate(expansion, some, first_low[some], first_high[some], size, fallback, unconverged)
                    tables.append(_cut_at_valley(cut, mean[some]))
            final = final & ~endless
            if bool(final.any()):
                kept = Table(*(part[final] for part in table))
                tables.append(kept._replace(accurate=done[final]))
            final = final | endless
            width = high[rows] - low[rows]
            low[rows] = torch.where(left > TAIL, (low[rows] - width).clamp_min(0), low[rows])
            high[rows] = torch.where(right > TAIL, high[rows] + width, high[rows])
            again.append(rows[~final])
        pending = torch.cat(again)
        if pending.numel() == 0:
            break
    inaccurate = torch.zeros_like(fallback)
    for table in tables:
        inaccurate[table.rows] = ~table.accurate
    return CountPredictive(expansion, tables, Diagnostics(refit, fallback, unconverged, inaccurate))


def _cut_at_valley(table: Table, mean: Tensor) -> Table:
    """No probability beyond the first rise to the right of the mean: the sum does not exist, so this row is flagged."""
    right = _middles(table) >= mean[:, None]
    logs = torch.where(right, table.logs, torch.inf).cummin(1).values
    rising = right & (table.logs > logs + 1e-9) & (_middles(table) > mean[:, None] + 1)
    gone = rising.cumsum(1) > 0
    return table._replace(
        logs=torch.where(gone, table.logs.amin(1, keepdim=True) - 1e4, table.logs), accurate=torch.zeros_like(table.accurate)
    )


def _by_size(rows: Tensor, widths: Tensor) -> list[tuple[Tensor, int]]:
    """Rows grouped by the number of blocks they get: powers of two up to the limit."""
    blocks = 2 ** torch.log2(widths.clamp(FIRST_COUNTS, MOST_BLOCKS)).ceil().long()
    return [(rows[blocks == size], int(size)) for size in sorted(set(blocks.tolist()))]


def _tabulate(
    expansion: Expansion, rows: Tensor, low: Tensor, high: Tensor, count: int, fallback: Tensor, unconverged: Tensor
) -> Table:
    stride = ((high - low) / count).ceil().clamp_min(1)
    stride = torch.where(stride % 2 == 0, stride + 1, stride)
    frame = Table(rows, low, stride, torch.zeros(rows.numel(), count), torch.ones_like(rows, dtype=torch.bool))
    density = expansion.density(_middles(frame), rows)
    fallback[rows] |= density.fallback.any(1)
    unconverged[rows] |= ~density.converged.all(1)
    return frame._replace(logs=density.log + stride.log()[:, None])


def _tails(table: Table) -> tuple[Tensor, Tensor]:
    """Mass beyond the first and last block, by geometric continuation, relative to the whole."""
    total = table.logs.logsumexp(1)
    sides = []
    for inner, outer in ((table.logs[:, 1], table.logs[:, 0]), (table.logs[:, -2], table.logs[:, -1])):
        ratio = (outer - inner).exp()
        tail = (outer - total).exp() * ratio / (1 - ratio)
        sides.append(torch.where(ratio < 1, tail, torch.full_like(tail, torch.inf)))
    return sides[0], sides[1]
