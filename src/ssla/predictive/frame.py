"""Where the refits of a density are made: each row's map from y to t, −1 … 1 over its region, and the nodes in t."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ssla.likelihoods.support import Continuous, Support

TAIL = 2.5e-4  # of the output predictive, beyond the nodes on either side
QUANTILES = (TAIL, 0.0668, 0.5, 0.9332, 1 - TAIL)  # the region, its centre, and ± 1.5 standard deviations of a normal
REACH = 2.2  # the region's width over that of ± 1.5 standard deviations, in w; a normal has 2.32 in y
BENDS = torch.logspace(math.log10(0.3), math.log10(4.0), 48, dtype=torch.float64)  # scales tried, in standard deviations
CANDIDATES = 401


@dataclass(frozen=True)
class Frame:
    """t is linear in w = asinh((z − centre)/scale), z the support's real coordinate; in y itself for counts.

    The scale is chosen so that w has the tails of a normal, a little shortened: a correction to a heavy-tailed density is then
    as smooth in w as one to a normal density is in y.
    """

    support: Support
    centre: Tensor  # (N,)
    scale: Tensor
    low: Tensor  # w at the ends
    high: Tensor

    @staticmethod
    def over(support: Support, quantiles: Tensor, least: int) -> Frame:
        """From the output predictive's QUANTILES (N, 5); counts get a region of `least` numbers or more."""
        if not isinstance(support, Continuous):
            low = quantiles[:, 0].floor().clamp_min(0)
            high = torch.maximum(quantiles[:, -1].ceil(), low + least - 1)
            return Frame(support, torch.zeros_like(low), torch.ones_like(low), low, high)
        z = support.to_real(quantiles)
        centre = z[:, 2]
        off = z - centre[:, None]
        scales = (z[:, 3] - z[:, 1])[:, None] / 2 * BENDS  # (N, S)
        w = torch.asinh(off[:, None] / scales[..., None])
        reach = (w[..., 4] - w[..., 0]) / (w[..., 3] - w[..., 1])
        scale = scales.gather(1, (reach - REACH).abs().argmin(1, keepdim=True)).squeeze(1)
        return Frame(support, centre, scale, *(torch.asinh(off[:, end] / scale) for end in (0, -1)))

    @property
    def counts(self) -> bool:
        return not isinstance(self.support, Continuous)

    @property
    def usable(self) -> Tensor:
        return torch.isfinite(self.low + self.high) & (self.high > self.low) & (self.scale > 0)

    def take(self, rows: Tensor) -> Frame:
        return Frame(self.support, self.centre[rows], self.scale[rows], self.low[rows], self.high[rows])

    def replaced(self, rows: Tensor, other: Frame) -> Frame:
        """With the rows (N,) bool of another one."""
        parts = ("centre", "scale", "low", "high")
        return Frame(self.support, *(torch.where(rows, getattr(other, part), getattr(self, part)) for part in parts))

    def outward(self, t: Tensor) -> Tensor:
        """t (m, k) -> y; whole numbers for counts."""
        w = self.low[:, None] + (self.high - self.low)[:, None] * (t + 1) / 2
        if isinstance(self.support, Continuous):
            return self.support.from_real(self.centre[:, None] + self.scale[:, None] * torch.sinh(w))
        return w.round()

    def inward(self, y: Tensor) -> Tensor:
        """y (m, k) -> t."""
        w = y
        if isinstance(self.support, Continuous):
            w = torch.asinh((self.support.to_real(y) - self.centre[:, None]) / self.scale[:, None])
        return 2 * (w - self.low[:, None]) / (self.high - self.low)[:, None] - 1

    def nodes(self, known: Tensor, more: int) -> tuple[Tensor, Tensor]:
        """y at `more` nodes beside those known (m, k; NaN: none), and which of them are new: counts run out.  (m, more) each.

        The first are Chebyshev's, ends included; each further one is where Π|t − t_j| is largest (Leja's rule).
        """
        if bool(known.isnan().all()):
            y = self.outward(chebyshev_nodes(more).expand(len(known), -1))
            y = _distinct(y, self.high) if self.counts else y
            return y, torch.ones_like(y, dtype=torch.bool)
        values = self.outward(chebyshev_nodes(CANDIDATES).expand(len(known), -1))
        t = self.inward(values)
        log = (t.unsqueeze(-1) - self.inward(known).unsqueeze(1)).abs().log().nan_to_num(nan=0.0, neginf=-math.inf).sum(-1)
        chosen, new = [], []
        for _ in range(more):
            largest, place = log.max(1, keepdim=True)
            chosen.append(values.gather(1, place))
            new.append(largest > -math.inf)
            log = log + (t - t.gather(1, place)).abs().log()
        return torch.cat(chosen, 1), torch.cat(new, 1)


@lru_cache(maxsize=8)
def chebyshev_nodes(count: int) -> Tensor:
    """−cos(πj/(count − 1)): from −1 to 1."""
    return -torch.cos(math.pi * torch.arange(count, dtype=torch.float64) / (count - 1))


def _distinct(z: Tensor, top: Tensor) -> Tensor:
    """Whole numbers in order (m, k), pushed apart where two are the same; the last is at most `top`."""
    place = torch.arange(z.shape[1], dtype=torch.float64)
    up = (z - place).cummax(1).values + place
    return torch.minimum(up, top[:, None] - (z.shape[1] - 1 - place))
