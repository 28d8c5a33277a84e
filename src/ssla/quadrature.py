"""One-dimensional densities known pointwise: find them, integrate them, invert them. Vectorised over rows.

A row is a log density over the real line. Nodes are z = c + s·sinh(t) with t uniform on [−T, T], so a
few dozen nodes reach from the bulk to far tails, and the trapezoidal rule in t converges
exponentially for smooth densities. Accuracy is checked, not assumed: a row is accepted when

  * every second node gives the same mass to 5e-4 (the full rule then has about the square of that),
  * the tails beyond the last nodes hold < 1e-6 of the mass (heavier ones widen T), and
  * the nodes are centred on the bulk.

Rows that fail are refined together until they pass or the node limit is reached; those that never
pass are flagged `accurate = False`. A density that has no integral is cut where it stops falling, and flagged.

Between nodes log p is a not-a-knot cubic spline in z (exact for a Gaussian), integrated by four-point
Gauss–Legendre in each panel. Beyond the last node log p goes on as a power law of its last slope.
Fails for densities with jumps or poles: they end flagged, not smoothed over.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

FIRST_NODES = 21
FIRST_REACH = 2.65  # sinh(2.65) = 7.0: seven scales to either side
MOST_NODES = 1100
MOST_ROUNDS = 24
TAIL_MASS = 1e-6
HALF_RULE_TOLERANCE = 5e-4
OVERSHOOT = 0.3  # of log p in the middle of a panel, above both its nodes (at a peak between two nodes it is about 0.01)
RELEVANT = 25.0  # log p below the peak beyond which nothing matters
TASKS_AT_ONCE = 1 << 18  # nodes evaluated in one go: bounds memory, keeps the arrays in cache

LogDensity = Callable[[Tensor, Tensor], Tensor]
"""(z (m, k), rows (m,)) -> log density (m, k) of those rows."""


@lru_cache(maxsize=64)
def _pattern(count: int, reach: float) -> tuple[Tensor, Tensor]:
    """x_j = sinh(t_j) and the trapezoidal weights dx, for t uniform on [−reach, reach]."""
    t = torch.linspace(-reach, reach, count, dtype=torch.float64)
    weights = torch.cosh(t) * (2 * reach / (count - 1))
    weights[0] /= 2
    weights[-1] /= 2
    return torch.sinh(t), weights


@lru_cache(maxsize=64)
def _spline(count: int, reach: float) -> Tensor:
    """The matrix that turns nodal values into the second derivatives of their not-a-knot cubic spline."""
    x = _pattern(count, reach)[0].numpy()
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


@lru_cache(maxsize=64)
def _midpoints(count: int, reach: float) -> Tensor:
    """The matrix (k − 1, k) that turns nodal values into the spline's values in the middle of its panels."""
    x, bends = _pattern(count, reach)[0], _spline(count, reach)
    eye = torch.eye(count, dtype=torch.float64)
    square = ((x[1:] - x[:-1]) ** 2)[:, None]
    return (eye[1:] + eye[:-1]) / 2 - square / 16 * (bends[1:] + bends[:-1])


@lru_cache(maxsize=1)
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
        endless = torch.where(size > 1e-280, math.inf, 0.0)  # nothing goes on from nothing
        return torch.where(margin > 0, size / margin.clamp_min(1e-300), endless)

    def radius(self, share: Tensor) -> Tensor:
        """The r beyond which `share` of the tail's mass lies.  (m, q)."""
        return self.distance[:, None] * share ** (-1 / (self.power - 1))[:, None]


def _tail(distance: Tensor, logs: Tensor) -> Tail:
    """From the last two nodes (inner, outer), each (m, 2)."""
    fall = logs[:, 0] - logs[:, 1]
    power = fall / (distance[:, 1].log() - distance[:, 0].log())
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
        return _pattern(self.logs.shape[1], self.reach)[0]

    @property
    def nodes(self) -> Tensor:
        """z (m, k)."""
        return self.centre[:, None] + self.scale[:, None] * self.pattern

    def rows(self, index: Tensor) -> Grid:
        """Some of the rows."""
        return Grid(self.centre[index], self.scale[index], self.reach, self.logs[index], self.accurate[index])

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

    @cached_property
    def relative(self) -> Tensor:
        """exp(log p − peak) dx, in units of the scale (m, k): the terms of the rule."""
        return (self.logs - self.peak[:, None]).exp_().mul_(_pattern(self.logs.shape[1], self.reach)[1])

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
        """Mean and variance of z, tails included (infinite where a tail says so).  (m,), (m,)."""
        offset = self.scale[:, None] * self.pattern
        left, right = self.tails
        unit = self.log_mass
        first = (self.shares * offset).sum(1) + right.moment(1, unit) - left.moment(1, unit)
        spread = offset - first[:, None]
        second = (self.shares * spread * spread).sum(1) + left.moment(2, unit) + right.moment(2, unit)
        return self.centre + first, second

    def expectation(self, values: Tensor) -> Tensor:
        """Σ h(z_j) over the nodes' shares, tails left out.  values (m, k) -> (m,)."""
        return (self.shares * values).sum(1)

    @cached_property
    def mode(self) -> Tensor:
        """The highest point: the vertex of the parabola through the best node and its neighbours.  (m,)."""
        best = self.logs.argmax(1).clamp(1, self.logs.shape[1] - 2)[:, None]
        x = self.pattern
        left, mid, right = (self.logs.gather(1, best + d).squeeze(1) for d in (-1, 0, 1))
        a = x[best.squeeze(1)] - x[best.squeeze(1) - 1]
        b = x[best.squeeze(1) + 1] - x[best.squeeze(1)]
        up, down = (mid - left) / a, (right - mid) / b
        curve = (down - up) / ((a + b) / 2)
        slope = (up * b + down * a) / (a + b)
        shift = torch.where(curve < 0, -slope / curve, torch.zeros_like(curve))
        return self.centre + self.scale * (x[best.squeeze(1)] + shift.clamp(-a, b))

    # --- between the nodes -------------------------------------------------------------------

    @cached_property
    def _logs(self) -> Tensor:
        """Relative to the peak, with zero density held at exp(−700)."""
        return (self.logs - self.peak[:, None]).clamp_min(-700.0)

    @cached_property
    def _bends(self) -> Tensor:
        """Second derivatives of the spline in x (m, k)."""
        return self._logs @ _spline(self.logs.shape[1], self.reach).mT

    def overshoots(self) -> Tensor:
        """Rows (m,) whose spline rises well above the nodes in the middle of a panel that matters: a kink or a cliff."""
        logs = self._logs
        middle = logs @ _midpoints(logs.shape[1], self.reach).mT
        above = middle - torch.maximum(logs[:, :-1], logs[:, 1:])
        return ((above > OVERSHOOT) & (middle > -RELEVANT)).any(1)

    def _panel_ends(self, panel: Tensor) -> tuple[Tensor, ...]:
        """Spline data of the panels (m, q): width, left value, right value, left bend, right bend."""
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
        panel = (torch.searchsorted(self._cumulative, target.contiguous()) - 1).clamp(0, pattern.numel() - 2)
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
        return torch.where(q >= 1, math.inf, z)

    def hdr(self, level: float) -> Regions:
        """{z: p(z) ≥ c} with c such that its probability is `level`: the smallest such set.

        c is found by bisection on the exact (spline) probability of the set, so several modes
        give several intervals.
        """
        x = self.pattern
        count = x.numel() - 1
        parts = torch.arange(8, dtype=x.dtype) / 8
        panel = torch.arange(count).repeat_interleave(8).expand(self.logs.shape[0], -1)
        part = parts.repeat(count).expand_as(panel)
        fine = torch.cat([_spline_value(self._panel_ends(panel), part), self._logs[:, -1:]], 1)
        place = torch.cat([(x[:-1, None] + parts * (x[1:] - x[:-1])[:, None]).flatten(), x[-1:]])
        low = torch.maximum(fine[:, 0], fine[:, -1])
        high = fine.max(1).values
        for _ in range(45):
            middle = (low + high) / 2
            regions = self._above(fine, place, middle)
            ends = torch.cat([regions.lower, regions.upper], 1)
            sums = torch.nan_to_num(self.cdf(torch.nan_to_num(ends, nan=0.0)).where(~ends.isnan(), ends.new_zeros(())))
            half = regions.lower.shape[1]
            enough = (sums[:, half:] - sums[:, :half]).sum(1) >= level
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        return self._above(fine, place, low)

    def _above(self, fine: Tensor, place: Tensor, threshold: Tensor) -> Regions:
        """Where the fine density exceeds the threshold, ends by linear interpolation of log p."""
        excess = fine - threshold[:, None]
        inside = excess > 0
        edge = torch.zeros_like(inside[:, :1])
        starts = ~torch.cat([edge, inside[:, :-1]], 1) & inside
        stops = ~torch.cat([inside[:, 1:], edge], 1) & inside
        rank = starts.cumsum(1)
        stop_rank = stops.cumsum(1)
        most = max(int(rank[:, -1].max()), 1)
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
                z = self.centre + self.scale * x
                out.append(torch.where(exists, z, torch.full_like(z, math.nan)))
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


# --- finding the density ---------------------------------------------------------------------


class Built(NamedTuple):
    """Grids and the rows each of them answers for."""

    rows: Tensor
    grid: Grid


class Accuracy(NamedTuple):
    """When a row is done: mass beyond the nodes, and disagreement of the half rule."""

    tail: float = TAIL_MASS
    half_rule: float = HALF_RULE_TOLERANCE


def build(log_density: LogDensity, centre: Tensor, scale: Tensor, accuracy: Accuracy = Accuracy()) -> list[Built]:  # noqa: B008
    """Adaptive grids for all rows, from a first guess of centre and scale (m,).

    A row whose density has no integral (it does not fall off, or has a pole) is cut at the valleys around its first
    guess and flagged.
    """
    accepted: dict[tuple[int, float], list[Built]] = defaultdict(list)
    first_centre, first_scale = centre.double(), scale.double()
    work = [(torch.arange(centre.numel()), first_centre, first_scale, FIRST_REACH, FIRST_NODES, 0)]
    while work:
        rows, c, s, reach, count, round_ = work.pop()
        last_chance = round_ >= MOST_ROUNDS or count * 2 - 1 > MOST_NODES
        for part in _chunks(rows.numel(), count):
            grid = _evaluate(log_density, rows[part], c[part], s[part], reach, count)
            verdict = _judge(grid, accuracy)
            ok = torch.ones_like(verdict.good) if last_chance else verdict.good
            endless = ok & ~verdict.good & _runaway(grid, verdict, first_centre[rows[part]], first_scale[rows[part]])
            if bool(endless.any()):
                lost = rows[part][endless]
                cut = _evaluate(log_density, lost, first_centre[lost], first_scale[lost], FIRST_REACH, 2 * FIRST_NODES - 1)
                accepted[2 * FIRST_NODES - 1, FIRST_REACH].append(Built(lost, _cut_at_valleys(cut)))
            kept = ok & ~endless
            if bool(kept.any()):
                some = grid if bool(kept.all()) else grid.rows(kept)
                if not bool(verdict.good[kept].all()):
                    some = replace(some, accurate=verdict.good[kept])
                accepted[count, reach].append(Built(rows[part][kept], some))
            for again, new_reach, new_count in (
                (verdict.off_centre, reach, count),
                (verdict.coarse, reach, 2 * count - 1),
                (verdict.heavy, 1.6 * reach, 2 * count - 1),
            ):
                again = again & ~ok
                if bool(again.any()):
                    moved = verdict.centre[again], verdict.scale[again]
                    work.append((rows[part][again], *moved, new_reach, new_count, round_ + 1))
    return [_join(parts) for parts in accepted.values()]


def _runaway(grid: Grid, verdict: _Verdict, first_centre: Tensor, first_scale: Tensor) -> Tensor:
    """Rows that followed a density without integral: to infinity, away from their start, or into a pole."""
    away = (grid.centre - first_centre).abs() > 3 * first_scale
    return ~torch.isfinite(grid.log_mass) | verdict.off_centre | away | (grid.scale < 1e-4 * first_scale)


def _cut_at_valleys(grid: Grid) -> Grid:
    """No density beyond the first minimum on either side of the middle node."""
    middle = grid.logs.shape[1] // 2
    left, right = grid.logs[:, : middle + 1].flip(1), grid.logs[:, middle:]
    halves = []
    for half in (left, right):
        gone = (half > half.cummin(1).values + 1e-9).cumsum(1) > 0  # once it has risen, all that follows
        halves.append(torch.where(gone, half[:, :1] - 1e4, half))
    logs = torch.cat([halves[0].flip(1)[:, :-1], halves[1]], 1)
    return Grid(grid.centre, grid.scale, grid.reach, logs, torch.zeros_like(grid.accurate))


def _chunks(rows: int, count: int) -> Iterator[slice]:
    size = max(TASKS_AT_ONCE // count, 1)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _evaluate(log_density: LogDensity, rows: Tensor, c: Tensor, s: Tensor, reach: float, count: int) -> Grid:
    x = _pattern(count, reach)[0]
    logs = log_density(c[:, None] + s[:, None] * x, rows).double()
    return Grid(c, s, reach, logs, torch.ones_like(c, dtype=torch.bool))


class _Verdict(NamedTuple):
    good: Tensor
    off_centre: Tensor
    coarse: Tensor
    heavy: Tensor
    centre: Tensor
    scale: Tensor


def _judge(grid: Grid, accuracy: Accuracy) -> _Verdict:
    """Which rows are done, and what the others need."""
    x = grid.pattern
    share = grid.relative
    body = share.sum(1)
    half = 2 * share[:, ::2].sum(1)
    left, right = (t.moment(0, grid.peak) / grid.scale for t in grid.tails)
    moments = share @ torch.stack([x, x * x], 1) / body[:, None]
    first = moments[:, 0]
    second = (moments[:, 1] - first * first).clamp_min(0).sqrt()
    spacing = float(x[x.numel() // 2 + 1])
    width = torch.maximum(second, torch.full_like(second, spacing))  # narrower than the nodes: zoom in
    edge = (grid.logs[:, 0] == grid.peak) | (grid.logs[:, -1] == grid.peak)
    off = (first.abs() > 0.4) | (second < 0.4) | (second > 3.0) | edge
    coarse = ~((half / body - 1).abs() <= accuracy.half_rule) | grid.overshoots()
    heavy = ~((left + right) / body <= accuracy.tail)
    # a heavy tail drags mean and spread along; widen before moving, unless the peak is at the edge
    off = off & ~(heavy & (second > 3.0) & ~edge)
    centre = torch.where(off, grid.centre + grid.scale * first, grid.centre)
    scale = torch.where(off, grid.scale * width, grid.scale)
    heavy, coarse = heavy & ~off, coarse & ~off & ~heavy
    good = ~(off | heavy | coarse)
    return _Verdict(good, off, coarse, heavy, centre, scale)


def _join(parts: list[Built]) -> Built:
    if len(parts) == 1:
        return parts[0]
    rows = torch.cat([p.rows for p in parts])
    grids = [p.grid for p in parts]
    return Built(
        rows,
        Grid(
            torch.cat([g.centre for g in grids]),
            torch.cat([g.scale for g in grids]),
            grids[0].reach,
            torch.cat([g.logs for g in grids]),
            torch.cat([g.accurate for g in grids]),
        ),
    )


def locate(log_density: LogDensity, rows: int) -> tuple[Tensor, Tensor]:
    """A first centre and scale for densities of which nothing is known: from 1e-6 to 1e12 around zero.

    Looks on a logarithmic ladder of nodes for the highest one, then takes mean and spread around it
    a few times. A density with two far modes is found at the higher one and widened by `build`.
    """
    index = torch.arange(rows)
    centre = torch.zeros(rows, dtype=torch.float64)
    scale = torch.full((rows,), 1e-6, dtype=torch.float64)
    reach, count = 42.0, 513
    for _ in range(12):
        x = _pattern(count, reach)[0]
        logs = torch.cat([log_density(centre[p, None] + scale[p, None] * x, index[p]) for p in _chunks(rows, count)])
        logs = torch.nan_to_num(logs.double(), nan=-math.inf, neginf=-1e300)
        best = logs.argmax(1).clamp(1, count - 2)
        share = (logs - logs.max(1, keepdim=True).values).exp() * _pattern(count, reach)[1]
        share = share / share.sum(1, keepdim=True)
        mean = (share * x).sum(1)
        spread = ((share * x * x).sum(1) - mean * mean).clamp_min(0).sqrt()
        near = (x[best + 1] - x[best - 1]) / 2
        centre, scale = centre + scale * mean, scale * torch.maximum(spread, near)
        reach, count = 6.0, 129
    return centre, scale
