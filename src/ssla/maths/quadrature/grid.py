"""Rows of densities on shared node patterns: mass, moments, distribution function, quantiles,
regions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ssla.maths.constants import constant

# of log p in the middle of a panel, above both its nodes (at a peak between two nodes it is about
# 0.01)
OVERSHOOT = 0.3
# of a tail's power above the one at which a moment is infinite: a smaller difference is rounding
# error
LEAST_MARGIN = 1e-6
TAIL_RATIO, TAIL_PLACES = 2.0**0.25, 240  # of the places beyond the last node, for regions
RELEVANT = 25.0  # log p below the peak at which the density is negligible


@constant
def pattern_of(count: int, reach: float) -> tuple[Tensor, Tensor]:
    """x_j = sinh(t_j) and the trapezoidal weights dx, for t uniform on [−reach, reach]."""
    t = torch.linspace(-reach, reach, count, dtype=torch.float64)
    weights = torch.cosh(t) * (2 * reach / (count - 1))
    weights[0] /= 2
    weights[-1] /= 2
    return torch.sinh(t), weights


@constant
def _spline(count: int, reach: float) -> Tensor:
    """The matrix that maps nodal values to the second derivatives of their not-a-knot cubic
    spline.
    """
    x = pattern_of(count, reach)[0].numpy()
    h = np.diff(x)
    system = np.zeros((count, count))
    right = np.zeros((count, count))
    for j in range(1, count - 1):
        system[j, j - 1 : j + 2] = h[j - 1], 2 * (h[j - 1] + h[j]), h[j]
        right[j, j - 1 : j + 2] = 6 / h[j - 1], -6 / h[j - 1] - 6 / h[j], 6 / h[j]
    system[0, :3] = h[1], -(h[0] + h[1]), h[0]
    system[-1, -3:] = h[-1], -(h[-2] + h[-1]), h[-2]
    scale = np.abs(system).max(1, keepdims=True)
    return torch.from_numpy(np.linalg.solve(system / scale, right / scale))


@constant
def _midpoints(count: int, reach: float) -> Tensor:
    """The matrix (k − 1, k) that maps nodal values to the spline's values in the middle of its
    panels.
    """
    x, bends = pattern_of(count, reach)[0], _spline(count, reach)
    eye = torch.eye(count, dtype=torch.float64)
    square = ((x[1:] - x[:-1]) ** 2)[:, None]
    return (eye[1:] + eye[:-1]) / 2 - square / 16 * (bends[1:] + bends[:-1])


@constant
def _legendre() -> tuple[Tensor, Tensor]:
    """Four Gauss–Legendre nodes and weights on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(4)
    return torch.from_numpy((nodes + 1) / 2), torch.from_numpy(weights / 2)


class Tail(NamedTuple):
    """p(r) = exp(log_end)·(r/r_end)^(−power), r ≥ r_end: the density beyond the last node."""

    distance: Tensor  # (m,) r_end
    log_end: Tensor  # (m,)
    power: Tensor  # (m,)

    def moment(self, order: int, log_unit: Tensor) -> Tensor:
        """∫ r^order p dr in units of exp(log_unit); infinite where the power is too small."""
        margin = self.power - 1 - order
        size = (self.log_end - log_unit).exp() * self.distance ** (1 + order)
        endless = torch.where(size > 1e-280, math.inf, 0.0)  # a tail of zero density stays zero
        return torch.where(margin > LEAST_MARGIN, size / margin.clamp_min(LEAST_MARGIN), endless)

    def radius(self, share: Tensor) -> Tensor:
        """The r beyond which the tail has the share `share` of its mass.  (m, q)."""
        return self.distance[:, None] * share ** (-1 / (self.power - 1))[:, None]


def _tail(distance: Tensor, logs: Tensor) -> Tail:
    """From the last two nodes (inner, outer), each (m, 2)."""
    fall = logs[:, 0] - logs[:, 1]
    power = fall / (distance[:, 1].log() - distance[:, 0].log())
    power = torch.where(
        logs[:, 1] == -math.inf, math.inf, power
    )  # no density there, so none beyond
    return Tail(distance[:, 1], logs[:, 1], power)


class Regions(NamedTuple):
    """Unions of intervals, one row each: lower and upper ends (m, R), padded with NaN."""

    lower: Tensor
    upper: Tensor


@dataclass(frozen=True)
class Grid:
    """Rows that share a node pattern: z_j = centre + scale·sinh(t_j), with log p(z_j) in `logs`."""

    centre: Tensor  # (m,)
    scale: Tensor  # (m,)
    reach: float
    logs: Tensor  # (m, k)
    accurate: Tensor  # (m,) bool

    @property
    def pattern(self) -> Tensor:
        return pattern_of(self.logs.shape[1], self.reach)[0]

    @property
    def nodes(self) -> Tensor:
        """z (m, k)."""
        return self.centre[:, None] + self.scale[:, None] * self.pattern

    def rows(self, index: Tensor) -> Grid:
        """Some of the rows."""
        return Grid(
            self.centre[index],
            self.scale[index],
            self.reach,
            self.logs[index],
            self.accurate[index],
        )

    @cached_property
    def peak(self) -> Tensor:
        return self.logs.max(1).values

    @cached_property
    def tails(self) -> tuple[Tail, Tail]:
        """The power laws beyond the last nodes, left and right."""
        x = self.pattern
        left = self.scale[:, None] * (-x[:2]).flip(0)
        right = self.scale[:, None] * x[-2:]
        return _tail(left, self.logs[:, :2].flip(1)), _tail(right, self.logs[:, -2:])

    @property
    def log_terms(self) -> Tensor:
        """log(p dz) (m, k): the terms of the rule."""
        return (
            self.logs + (pattern_of(self.logs.shape[1], self.reach)[1] * self.scale[:, None]).log()
        )

    @cached_property
    def relative(self) -> Tensor:
        """exp(log p − peak) dx, in units of the scale (m, k): the terms of the rule."""
        return (self.logs - self.peak[:, None]).exp() * pattern_of(self.logs.shape[1], self.reach)[
            1
        ]

    @cached_property
    def log_mass(self) -> Tensor:
        """log ∫ p dz, tails included.  (m,)."""
        body = self.relative.sum(1) * self.scale
        left, right = self.tails
        return self.peak + torch.log(body + left.moment(0, self.peak) + right.moment(0, self.peak))

    @cached_property
    def shares(self) -> Tensor:
        """Normalised mass at each node (m, k); sums to one less the tails."""
        return self.relative * ((self.peak - self.log_mass).exp() * self.scale)[:, None]

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of z, tails included (infinite for heavy tails).  (m,), (m,)."""
        offset = self.scale[:, None] * self.pattern
        left, right = self.tails
        unit = self.log_mass
        first = (self.shares * offset).sum(1) + right.moment(1, unit) - left.moment(1, unit)
        spread = offset - first[:, None]
        second = (
            (self.shares * spread * spread).sum(1) + left.moment(2, unit) + right.moment(2, unit)
        )
        return self.centre + first, second

    def expectation(self, values: Tensor) -> Tensor:
        """Σ h(z_j) over the nodes' shares, without tails.  values (m, k) -> (m,)."""
        return (self.shares * values).sum(1)

    @cached_property
    def mode(self) -> Tensor:
        """The highest point: the vertex of the parabola through the best node and its neighbours.

        (m,).
        """
        best = self.logs.argmax(1).clamp(1, self.logs.shape[1] - 2)[:, None]
        x = self.pattern
        left, mid, right = (self.logs.gather(1, best + d).squeeze(1) for d in (-1, 0, 1))
        a = x[best.squeeze(1)] - x[best.squeeze(1) - 1]
        b = x[best.squeeze(1) + 1] - x[best.squeeze(1)]
        up, down = (mid - left) / a, (right - mid) / b
        curve = (down - up) / ((a + b) / 2)
        slope = (up * b + down * a) / (a + b)
        shift = torch.where(curve < 0, -slope / curve, torch.zeros_like(curve))
        found = self.centre + self.scale * (x[best.squeeze(1)] + shift.clamp(-a, b))
        return torch.where(self.log_mass.isnan(), torch.nan, found)

    # --- between the nodes -------------------------------------------------------------------

    @cached_property
    def _logs(self) -> Tensor:
        """Relative to the peak, with zero density replaced by exp(−700)."""
        return (self.logs - self.peak[:, None]).clamp_min(-700.0)

    @cached_property
    def _bends(self) -> Tensor:
        """Second derivatives of the spline in x (m, k)."""
        return self._logs @ _spline(self.logs.shape[1], self.reach).mT

    def overshoots(self) -> Tensor:
        """Rows (m,) whose spline rises well above the nodes in the middle of a relevant panel:
        a kink or a jump.
        """
        logs = self._logs
        middle = logs @ _midpoints(logs.shape[1], self.reach).mT
        above = middle - torch.maximum(logs[:, :-1], logs[:, 1:])
        return ((above > OVERSHOOT) & (middle > -RELEVANT)).any(1)

    def _panel_ends(self, panel: Tensor) -> tuple[Tensor, ...]:
        """Spline data of the panels (m, q): width, left value, right value, left and right
        second derivative.
        """
        x = self.pattern
        right = panel + 1
        return (
            x[right] - x[panel],
            self._logs.gather(1, panel),
            self._logs.gather(1, right),
            self._bends.gather(1, panel),
            self._bends.gather(1, right),
        )

    @cached_property
    def _cumulative(self) -> Tensor:
        """∫ p/peak dx from −∞ to each node (m, k); the last column less the right tail."""
        x = self.pattern
        ends = (
            (x[1:] - x[:-1]).expand(self.logs.shape[0], -1),
            self._logs[:, :-1],
            self._logs[:, 1:],
            self._bends[:, :-1],
            self._bends[:, 1:],
        )
        panels = _panel_integral(ends, torch.ones_like(ends[0]))
        left = self.tails[0].moment(0, self.peak) / self.scale
        return torch.cat([left[:, None], panels], 1).cumsum(1)

    def spline_error(self) -> Tensor:
        """The relative difference of the spline's mass from the rule's (m,)."""
        return ((self._total.log() + self.scale.log() + self.peak) - self.log_mass).expm1().abs()

    @cached_property
    def _total(self) -> Tensor:
        return self._cumulative[:, -1] + self.tails[1].moment(0, self.peak) / self.scale

    def cdf(self, z: Tensor) -> Tensor:
        """P(Z ≤ z).  z (m, q) -> (m, q)."""
        pattern = self.pattern
        x = (z - self.centre[:, None]) / self.scale[:, None]
        panel = (torch.searchsorted(pattern, x.contiguous()) - 1).clamp(0, pattern.numel() - 2)
        ends = self._panel_ends(panel)
        part = ((x - pattern[panel]) / ends[0]).clamp(0, 1)
        value = self._cumulative.gather(1, panel) + _panel_integral(ends, part)
        distance = (z - self.centre[:, None]).abs()
        for side, tail in enumerate(self.tails):
            beyond = x > pattern[-1] if side else x < pattern[0]
            if bool(beyond.any()):
                rest = tail.moment(0, self.peak)[:, None] / self.scale[:, None]
                ratio = (distance / tail.distance[:, None]).clamp_min(1)
                mass = rest * ratio ** (1 - tail.power[:, None])
                value = torch.where(beyond, self._total[:, None] - mass if side else mass, value)
        return (value / self._total[:, None]).clamp(0, 1)

    def icdf(self, q: Tensor) -> Tensor:
        """The z with P(Z ≤ z) = q.  q (m, k) -> (m, k); 0 and 1 give −∞ and ∞."""
        pattern = self.pattern
        target = q * self._total[:, None]
        panel = (torch.searchsorted(self._cumulative, target.contiguous()) - 1).clamp(
            0, pattern.numel() - 2
        )
        ends = self._panel_ends(panel)
        need = (target - self._cumulative.gather(1, panel)).clamp_min(0)
        low, high = torch.zeros_like(need), torch.ones_like(need)
        part = (need / _panel_integral(ends, high).clamp_min(1e-300)).clamp(0, 1)
        for _ in range(50):  # Newton inside a shrinking bracket; usually five rounds
            gap = _panel_integral(ends, part) - need
            low, high = torch.where(gap <= 0, part, low), torch.where(gap >= 0, part, high)
            density = _spline_value(ends, part).exp() * ends[0]
            step = gap / density.clamp_min(1e-300)
            if bool((step.abs() <= 1e-13).all()):
                break
            new = part - step
            inside = (new >= low) & (new <= high)
            part = torch.where(inside, new, (low + high) / 2)
        x = pattern[panel] + part * ends[0]
        z = self.centre[:, None] + self.scale[:, None] * x
        for side, tail in enumerate(self.tails):
            rest = tail.moment(0, self.peak)[:, None] / self.scale[:, None]
            mass = self._total[:, None] - target if side else target
            beyond = mass < rest
            if bool(beyond.any()):
                radius = tail.radius((mass / rest).clamp(0, 1))
                z = torch.where(beyond, self.centre[:, None] + (radius if side else -radius), z)
        z = torch.where(q <= 0, -math.inf, z)
        return torch.where(
            self._total[:, None].isnan(), torch.nan, torch.where(q >= 1, math.inf, z)
        )

    def hdr(self, level: float, log_slope: Callable[[Tensor], Tensor] | None = None) -> Regions:
        """{z: p(z) ≥ c} with c such that its probability is `level`: the smallest such set.

        c is found by bisection on the exact (spline) probability of the set, so several modes
        give several intervals. log_slope: of a scale y(z). The set is then the smallest in y:
        {z: p(z) / y′(z) ≥ c}.
        """
        fine, place = self._fine()
        if log_slope is not None:
            there = fine - log_slope(self.centre[:, None] + self.scale[:, None] * place)
            # −700 stands for no density, on every scale
            fine = torch.where(fine > -700.0, there, -math.inf)
        low = torch.maximum(fine[:, 0], fine[:, -1])
        short = self._probability(self._above(fine, place, low)) < level
        # the density is high at an end, or the tails beyond the nodes are needed
        if bool(short.any()):
            if log_slope is None:
                fine, place = self._with_tails(fine, place)
            low = torch.where(short, torch.where(fine.isneginf(), math.inf, fine).amin(1), low)
        high = fine.max(1).values
        for _ in range(45):
            middle = (low + high) / 2
            enough = self._probability(self._above(fine, place, middle)) >= level
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        return self._above(fine, place, low)

    def _fine(self) -> tuple[Tensor, Tensor]:
        """Log p relative to its peak (m, F), and places (F,) in units of the scale: eight in a
        panel.
        """
        x = self.pattern
        count = x.numel() - 1
        parts = torch.arange(8, dtype=x.dtype) / 8
        panel = torch.arange(count).repeat_interleave(8).expand(self.logs.shape[0], -1)
        part = parts.repeat(count).expand_as(panel)
        fine = torch.cat([_spline_value(self._panel_ends(panel), part), self._logs[:, -1:]], 1)
        place = torch.cat([(x[:-1, None] + parts * (x[1:] - x[:-1])[:, None]).flatten(), x[-1:]])
        return fine, place

    def _with_tails(self, fine: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """The same with places beyond the last nodes."""
        x = self.pattern
        ratios = TAIL_RATIO ** torch.arange(1, TAIL_PLACES + 1, dtype=x.dtype)
        left, right = (
            (t.log_end - self.peak)[:, None] - t.power[:, None] * ratios.log() for t in self.tails
        )
        fine = torch.cat([left.flip(1), fine, right], 1).clamp_min(-700.0)
        return fine, torch.cat([x[0] * ratios.flip(0), place, x[-1] * ratios])

    def _probability(self, regions: Regions) -> Tensor:
        """Of unions of intervals (m,)."""
        ends = torch.cat([regions.lower, regions.upper], 1)
        sums = torch.nan_to_num(
            self.cdf(torch.nan_to_num(ends, nan=0.0)).where(~ends.isnan(), ends.new_zeros(()))
        )
        half = regions.lower.shape[1]
        return (sums[:, half:] - sums[:, :half]).sum(1)

    def _above(self, fine: Tensor, place: Tensor, threshold: Tensor) -> Regions:
        regions = regions_above(fine, place, threshold)
        return Regions(*(self.centre[:, None] + self.scale[:, None] * ends for ends in regions))


def regions_above(fine: Tensor, place: Tensor, threshold: Tensor) -> Regions:
    """Where values (m, k) at points (k,) exceed a threshold (m,), ends by linear interpolation."""
    excess = fine - threshold[:, None]
    inside = excess > 0
    edge = torch.zeros_like(inside[:, :1])
    starts = ~torch.cat([edge, inside[:, :-1]], 1) & inside
    stops = ~torch.cat([inside[:, 1:], edge], 1) & inside
    rank = starts.cumsum(1)
    stop_rank = stops.cumsum(1)
    most = max(int(rank[:, -1].max()), 1) if len(rank) else 1
    lowers: list[Tensor] = []
    uppers: list[Tensor] = []
    last = place.numel() - 1
    for r in range(1, most + 1):  # over the intervals of a row: one, rarely two or three
        exists = rank[:, -1] >= r
        for marks, order, step, out in ((starts, rank, -1, lowers), (stops, stop_rank, 1, uppers)):
            at = (marks & (order == r)).to(torch.uint8).argmax(1)
            other = (at + step).clamp(0, last)
            a = excess.gather(1, at[:, None]).squeeze(1)
            b = excess.gather(1, other[:, None]).squeeze(1)
            share = torch.where(a - b > 0, a / (a - b), torch.zeros_like(a)).clamp(0, 1)
            x = place[at] + share * (place[other] - place[at])
            out.append(torch.where(exists, x, torch.full_like(x, math.nan)))
    return Regions(torch.stack(lowers, 1), torch.stack(uppers, 1))


def _spline_value(ends: tuple[Tensor, ...], part: Tensor) -> Tensor:
    """The spline at the fraction `part` of a panel."""
    width, left, right, left_bend, right_bend = ends
    other = 1 - part
    bend = other * (other * other - 1) * left_bend + part * (part * part - 1) * right_bend
    return other * left + part * right + width * width / 6 * bend


def _panel_integral(ends: tuple[Tensor, ...], part: Tensor) -> Tensor:
    """∫ exp(spline) dx from a panel's left end over the fraction `part` of it."""
    total = torch.zeros_like(part)
    for node, weight in zip(*_legendre(), strict=True):
        total = total + weight * _spline_value(ends, part * node).exp()
    return total * part * ends[0]
