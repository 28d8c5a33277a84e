"""A whole density from few refits: the output rung's density, corrected.

The refit's answer and the output rung's differ by a correction that is small and smooth in y. It is interpolated over the region
that has 99.95% of the output predictive, widened where the corrected one reaches further, on Chebyshev nodes of
asinh((z − centre)/scale), z the support's real coordinate (for counts: whole numbers, of y itself), and continued as a constant
beyond it. Its Chebyshev coefficients tell the error: where the last ones are not small enough, the nodes are doubled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ssla.expansion import Increments
from ssla.likelihoods import Likelihood
from ssla.likelihoods.support import Continuous, Support
from ssla.posterior import Marginal
from ssla.refit import Density, WeightExpansion
from ssla.refit.weights import NAN

FIRST_NODES, MOST_NODES = 7, 97
TAIL = 2.5e-4  # of the output predictive, beyond the nodes on either side
REGION = 5e-4  # the same of the answer, where the promise holds
WIDENINGS = 6
QUANTILES = (TAIL, 0.0668, 0.5, 0.9332, 1 - TAIL)  # the region, its centre, and ± 1.5 standard deviations of a normal


@dataclass(frozen=True, eq=False)
class Corrected:
    """An expansion: output + correction where there is one. Increments are those of real refits at the y asked for."""

    weights: WeightExpansion
    refitted: Tensor  # (N,) bool: rows that the weights answer for
    frame: Frame
    coefficients: Tensor  # (N, K) Chebyshev
    fallback: Tensor  # (N,) bool, of the refits
    failed: Tensor  # (N,) bool: a refit failed, so that this row is the output rung's
    inaccurate: Tensor  # (N,) bool: the correction was not resolved with the most nodes
    refits: Tensor  # (N,) how many

    moves = True

    @property
    def likelihood(self) -> Likelihood:
        return self.weights.likelihood

    @property
    def marginal(self) -> Marginal:
        return self.weights.marginal

    @property
    def like(self) -> Tensor:
        return self.weights.like

    def updated(self, other: Corrected) -> Corrected:
        """With the rows that the other one has refitted, again."""
        new = other.refitted

        def pick(mine: Tensor, theirs: Tensor) -> Tensor:
            return torch.where(new.reshape(-1, *[1] * (mine.dim() - 1)), theirs, mine)

        frame = Frame(
            self.frame.support,
            *(pick(getattr(self.frame, part), getattr(other.frame, part)) for part in ("centre", "scale", "low", "high")),
        )
        return Corrected(
            self.weights,
            self.refitted,
            frame,
            pick(self.coefficients, other.coefficients),
            self.fallback | other.fallback,
            pick(self.failed, other.failed),
            pick(self.inaccurate, other.inaccurate),
            self.refits + other.refits,
        )

    def density(self, y: Tensor, rows: Tensor | None = None) -> Density:
        base = self.weights.output.density(y, rows)
        index = torch.arange(len(y)) if rows is None else rows
        t = self.frame.take(index).inward(y.reshape(len(y), -1)).clamp(-1, 1)
        return base._replace(log=base.log + _clenshaw(self.coefficients[index], t).reshape(base.log.shape))

    def __call__(self, y: Tensor) -> Increments:
        below = self.weights.output(y)
        rows = (self.refitted & ~self.failed).nonzero().squeeze(-1)
        if rows.numel():
            real = self.weights.increments(y[rows], rows)
            for target, values in zip(
                (below.likelihood, below.prior, below.curvature), (real.likelihood, real.prior, real.curvature), strict=True
            ):
                target[rows] = values
        return below


@dataclass(frozen=True)
class Frame:
    """Each row's map from y to t, −1 … 1 over its region: linear in w = asinh((z − centre)/scale), in y itself for counts."""

    support: Support
    centre: Tensor  # (N,)
    scale: Tensor
    low: Tensor  # w at the ends
    high: Tensor

    @staticmethod
    def over(support: Support, quantiles: Tensor) -> Frame:
        """From the output predictive's QUANTILES (N, 5)."""
        if not isinstance(support, Continuous):
            low = quantiles[:, 0].floor().clamp_min(0)
            high = torch.maximum(quantiles[:, -1].ceil(), low + FIRST_NODES - 1)
            return Frame(support, torch.zeros_like(low), torch.ones_like(low), low, high)
        z = support.to_real(quantiles)
        centre, scale = z[:, 2], (z[:, 3] - z[:, 1]) / 2
        return Frame(support, centre, scale, *(torch.asinh((z[:, end] - centre) / scale) for end in (0, -1)))

    @property
    def counts(self) -> bool:
        return not isinstance(self.support, Continuous)

    @property
    def usable(self) -> Tensor:
        return torch.isfinite(self.low + self.high) & (self.high > self.low) & (self.scale > 0)

    def take(self, rows: Tensor) -> Frame:
        return Frame(self.support, self.centre[rows], self.scale[rows], self.low[rows], self.high[rows])

    def outward(self, t: Tensor) -> Tensor:
        """t (m, k) -> y; whole numbers, all different, for counts."""
        w = self.low[:, None] + (self.high - self.low)[:, None] * (t + 1) / 2
        if isinstance(self.support, Continuous):
            return self.support.from_real(self.centre[:, None] + self.scale[:, None] * torch.sinh(w))
        return _distinct(w.round(), self.high)

    def inward(self, y: Tensor) -> Tensor:
        """y (m, k) -> t."""
        w = y
        if isinstance(self.support, Continuous):
            w = torch.asinh((self.support.to_real(y) - self.centre[:, None]) / self.scale[:, None])
        return 2 * (w - self.low[:, None]) / (self.high - self.low)[:, None] - 1

    def widened(self, rows: Tensor, count: int) -> Frame:
        """Counts: room for `count` nodes in some rows."""
        high = self.high.clone()
        high[rows] = torch.maximum(high[rows], self.low[rows] + count - 1)
        return replace(self, high=high)


def correct(weights: WeightExpansion, quantiles: Tensor, chosen: Tensor) -> Corrected:
    """Refit at few y of every chosen row (N,) bool; quantiles (N, 5) of the output predictive, at QUANTILES."""
    rows_total = len(chosen)
    frame = Frame.over(weights.likelihood.support_for(weights.marginal.mean.shape[1]), quantiles)
    usable = frame.usable
    coefficients = torch.zeros(rows_total, MOST_NODES, dtype=torch.float64)
    fallback, failed = torch.zeros(rows_total, dtype=torch.bool), chosen & ~usable
    inaccurate, refits = torch.zeros_like(fallback), torch.zeros(rows_total, dtype=torch.long)
    rows, count = (chosen & usable).nonzero().squeeze(-1), FIRST_NODES
    known: Tensor | None = None  # corrections at the nodes of the round before, of the rows that are left
    while rows.numel():
        here = frame.take(rows)
        t = _nodes(count).expand(len(rows), -1)
        y = here.outward(t)
        t = here.inward(y) if frame.counts else t
        fresh = slice(None) if known is None or frame.counts else slice(1, None, 2)  # every other node is new
        solved = weights.solve(y[:, fresh].contiguous(), rows)
        weights.check(solved)
        shape = y[:, fresh].shape
        found = solved.total.reshape(shape) - weights.output.density(y[:, fresh].contiguous(), rows).log
        values = found
        if known is not None and not frame.counts:
            values = torch.empty(len(rows), count, dtype=torch.float64)
            values[:, ::2], values[:, 1::2] = known, found
        refits[rows] += shape[1]
        fallback[rows] |= solved.fallback.reshape(shape).any(1)
        good = solved.converged.reshape(shape).all(1)
        failed[rows] |= ~good
        series = torch.linalg.solve(_chebyshev(t, count), torch.where(good[:, None], values, 0.0).unsqueeze(-1)).squeeze(-1)
        coefficients[rows[good], :count] = series[good]
        whole = frame.counts & (here.high - here.low <= count - 1)  # every count has its own refit
        settled = series[:, -2:].abs().sum(1) <= weights.refit.interpolation
        again = good & ~settled & ~whole
        if 2 * count - 1 > MOST_NODES:
            inaccurate[rows[again]] = True
            again = torch.zeros_like(again)
        if frame.counts:
            frame = frame.widened(rows[again], 2 * count - 1)
        rows, known, count = rows[again], values[again], 2 * count - 1
    coefficients[failed] = torch.nan if weights.refit.on_failure == NAN else 0.0
    return Corrected(weights, chosen, frame, coefficients, fallback, failed, inaccurate, refits)


def uncorrected(weights: WeightExpansion, chosen: Tensor) -> Corrected:
    """For classes, where every y has its own refit and nothing is interpolated."""
    no, zero = torch.zeros_like(chosen), torch.zeros(len(chosen), dtype=torch.float64)
    frame = Frame(weights.likelihood.support_for(weights.marginal.mean.shape[1]), zero, zero + 1, zero, zero + 1)
    return Corrected(weights, chosen, frame, zero.unsqueeze(1), no, no, no, torch.zeros_like(chosen, dtype=torch.long))


@lru_cache(maxsize=8)
def _nodes(count: int) -> Tensor:
    """−cos(πj/(count − 1)): from −1 to 1, nested when count − 1 is doubled."""
    return -torch.cos(math.pi * torch.arange(count, dtype=torch.float64) / (count - 1))


def _distinct(z: Tensor, top: Tensor) -> Tensor:
    """Whole numbers in order (m, k), pushed apart where two are the same; the last is at most `top`."""
    place = torch.arange(z.shape[1], dtype=torch.float64)
    up = (z - place).cummax(1).values + place
    return torch.minimum(up, top[:, None] - (z.shape[1] - 1 - place))


def _chebyshev(t: Tensor, count: int) -> Tensor:
    """T_k(t) (m, j, count)."""
    angle = torch.arccos(t.clamp(-1, 1))
    return torch.cos(angle.unsqueeze(-1) * torch.arange(count, dtype=torch.float64))


def _clenshaw(coefficients: Tensor, t: Tensor) -> Tensor:
    """Σ_k c_k T_k(t).  (m, K), (m, j) -> (m, j)."""
    later = last = torch.zeros_like(t)
    used = int((coefficients != 0).any(0).nonzero().max()) if bool((coefficients != 0).any()) else 0
    for k in range(used, 0, -1):
        last, later = 2 * t * last - later + coefficients[:, k, None], last
    return t * last - later + coefficients[:, :1]
