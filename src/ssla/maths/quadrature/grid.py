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

from ssla.maths.constants import cached_constant

# of log p in the middle of a panel, above both its nodes (at a peak between two nodes it is about
# 0.01)
OVERSHOOT = 0.3
# of a tail's power above the one at which a moment is infinite: a smaller difference is rounding
# error
LEAST_MARGIN = 1e-6
TAIL_RATIO, TAIL_PLACES = 2.0**0.25, 240  # of the places beyond the last node, for regions
RELEVANT = 25.0  # log p below the peak at which the density is negligible
NO_DENSITY = -700.0  # log p relative to the peak that stands for no density: exp(−700) > 0
BISECTIONS = 45  # of the threshold of a region: 2⁻⁴⁵ of the range of log p is rounding error
FINE = 8  # places in a panel at which regions are found. A guess


@cached_constant
def pattern_of(count: int, reach: float) -> tuple[Tensor, Tensor]:
    """Return x_j = sinh(t_j) and the trapezoidal weights dx, each (count,).

    t is uniform on [−reach, reach].
    """
    t = torch.linspace(-reach, reach, count, dtype=torch.float64)
    weights = torch.cosh(t) * (2 * reach / (count - 1))
    weights[0] /= 2
    weights[-1] /= 2
    return torch.sinh(t), weights


@cached_constant
def _second_derivative_matrix(count: int, reach: float) -> Tensor:
    """Return the matrix (k, k) from nodal values to the second derivatives of their spline.

    The spline is cubic and not-a-knot, on the k = count nodes of `pattern_of`.
    """
    x = pattern_of(count, reach)[0].numpy()
    h = np.diff(x)
    system = np.zeros((count, count))
    right = np.zeros((count, count))
    # Inner rows: the first derivatives of two neighbouring panels agree at their node.
    for j in range(1, count - 1):
        system[j, j - 1 : j + 2] = h[j - 1], 2 * (h[j - 1] + h[j]), h[j]
        right[j, j - 1 : j + 2] = 6 / h[j - 1], -6 / h[j - 1] - 6 / h[j], 6 / h[j]
    # First and last row: the third derivatives of the outer two panels agree (not-a-knot).
    system[0, :3] = h[1], -(h[0] + h[1]), h[0]
    system[-1, -3:] = h[-1], -(h[-2] + h[-1]), h[-2]
    scale = np.abs(system).max(1, keepdims=True)
    return torch.from_numpy(np.linalg.solve(system / scale, right / scale))


@cached_constant
def _midpoint_matrix(count: int, reach: float) -> Tensor:
    """Return the matrix (k − 1, k) from nodal values to the spline in the middle of its panels."""
    x, bends = pattern_of(count, reach)[0], _second_derivative_matrix(count, reach)
    eye = torch.eye(count, dtype=torch.float64)
    square = ((x[1:] - x[:-1]) ** 2)[:, None]
    return (eye[1:] + eye[:-1]) / 2 - square / 16 * (bends[1:] + bends[:-1])


@cached_constant
def _legendre_rule() -> tuple[Tensor, Tensor]:
    """Return four Gauss–Legendre nodes and weights on [0, 1], each (4,)."""
    nodes, weights = np.polynomial.legendre.leggauss(4)
    return torch.from_numpy((nodes + 1) / 2), torch.from_numpy(weights / 2)


class Tail(NamedTuple):
    """p(r) = exp(log_end)·(r/r_end)^(−power), r ≥ r_end: the density beyond the last node."""

    distance: Tensor  # (m,) r_end
    log_end: Tensor  # (m,)
    power: Tensor  # (m,)

    def moment(self, order: int, log_unit: Tensor) -> Tensor:
        """Compute ∫ r^order p dr in units of exp(log_unit).  (m,) -> (m,).

        It is infinite where the power is too small.
        """
        margin = self.power - 1 - order
        size = (self.log_end - log_unit).exp() * self.distance ** (1 + order)
        endless = torch.where(size > 1e-280, math.inf, 0.0)  # a tail of zero density stays zero
        return torch.where(margin > LEAST_MARGIN, size / margin.clamp_min(LEAST_MARGIN), endless)

    def radius(self, share: Tensor) -> Tensor:
        """Return the r beyond which the tail has a share of its mass.  (m, q) -> (m, q)."""
        # The mass beyond r falls as r^(1 − power).
        return self.distance[:, None] * share ** (-1 / (self.power - 1))[:, None]


def _fit_tail(distance: Tensor, logs: Tensor) -> Tail:
    """Return the power law through the last two nodes (inner, outer).

    distance, logs (m, 2): of the nodes from the centre, and log p there.
    """
    fall = logs[:, 0] - logs[:, 1]
    power = fall / (distance[:, 1].log() - distance[:, 0].log())
    # Without density at the last node there is none beyond.
    power = torch.where(logs[:, 1] == -math.inf, math.inf, power)
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
        """Return the nodes x_j = sinh(t_j) in units of the scale, around zero (k,)."""
        return pattern_of(self.logs.shape[1], self.reach)[0]

    @property
    def _pattern_weights(self) -> Tensor:
        """Return the weights dx of the trapezoidal rule in units of the scale (k,)."""
        return pattern_of(self.logs.shape[1], self.reach)[1]

    def _to_places(self, x: Tensor) -> Tensor:
        """Return z = centre + scale·x.  (q,) or (m, q) -> (m, q)."""
        return self.centre[:, None] + self.scale[:, None] * x

    @property
    def nodes(self) -> Tensor:
        """Return the nodes z (m, k)."""
        return self._to_places(self.pattern)

    def rows(self, index: Tensor) -> Grid:
        """Return the grid of some rows, given by their numbers or by a mask."""
        return Grid(
            self.centre[index],
            self.scale[index],
            self.reach,
            self.logs[index],
            self.accurate[index],
        )

    @cached_property
    def peak(self) -> Tensor:
        """Return the highest log p of the nodes (m,)."""
        return self.logs.max(1).values

    @cached_property
    def tails(self) -> tuple[Tail, Tail]:
        """Return the power laws beyond the last nodes, left and right."""
        x = self.pattern
        left = self.scale[:, None] * (-x[:2]).flip(0)
        right = self.scale[:, None] * x[-2:]
        return _fit_tail(left, self.logs[:, :2].flip(1)), _fit_tail(right, self.logs[:, -2:])

    @property
    def log_terms(self) -> Tensor:
        """Return the logarithms of the terms of the rule, log(p dz) (m, k)."""
        return self.logs + (self._pattern_weights * self.scale[:, None]).log()

    @cached_property
    def relative(self) -> Tensor:
        """Return the terms of the rule exp(log p − peak) dx, in units of the scale (m, k)."""
        return (self.logs - self.peak[:, None]).exp() * self._pattern_weights

    @cached_property
    def log_mass(self) -> Tensor:
        """Return the logarithm of the mass, log ∫ p dz, tails included (m,)."""
        body = self.relative.sum(1) * self.scale
        left, right = self.tails
        return self.peak + torch.log(body + left.moment(0, self.peak) + right.moment(0, self.peak))

    @cached_property
    def shares(self) -> Tensor:
        """Return the normalised mass at each node (m, k); it sums to one less the tails."""
        return self.relative * ((self.peak - self.log_mass).exp() * self.scale)[:, None]

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of z, each (m,), tails included (infinite for heavy tails)."""
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
        """Compute Σ_j share_j h(z_j) without tails, for values h(z_j).  (m, k) -> (m,)."""
        return (self.shares * values).sum(1)

    @cached_property
    def mode(self) -> Tensor:
        """Return the highest point (m,); NaN where the density is.

        It is the vertex of the parabola through the best node and its neighbours.
        """
        best = self.logs.argmax(1).clamp(1, self.logs.shape[1] - 2)[:, None]
        left, mid, right = (self.logs.gather(1, best + d).squeeze(1) for d in (-1, 0, 1))
        x = self.pattern
        best = best.squeeze(1)
        # Distances and slopes to the left and to the right neighbour
        a = x[best] - x[best - 1]
        b = x[best + 1] - x[best]
        up = (mid - left) / a
        down = (right - mid) / b
        # The parabola's second and first derivative at the best node
        curvature = (down - up) / ((a + b) / 2)
        slope = (up * b + down * a) / (a + b)
        shift = torch.where(curvature < 0, -slope / curvature, torch.zeros_like(curvature))
        mode = self.centre + self.scale * (x[best] + shift.clamp(-a, b))
        return torch.where(self.log_mass.isnan(), torch.nan, mode)

    # --- between the nodes -------------------------------------------------------------------

    @cached_property
    def _relative_logs(self) -> Tensor:
        """Return log p relative to the peak (m, k), with NO_DENSITY in place of −∞."""
        return (self.logs - self.peak[:, None]).clamp_min(NO_DENSITY)

    @cached_property
    def _second_derivatives(self) -> Tensor:
        """Return the second derivatives of the spline in x at the nodes (m, k)."""
        return self._relative_logs @ _second_derivative_matrix(self.logs.shape[1], self.reach).mT

    def overshoots(self) -> Tensor:
        """Return which rows (m,) have a spline that rises well above the nodes of a panel.

        Only panels with relevant density count. Such a rise shows a kink or a jump.
        """
        logs = self._relative_logs
        middle = logs @ _midpoint_matrix(logs.shape[1], self.reach).mT
        above = middle - torch.maximum(logs[:, :-1], logs[:, 1:])
        return ((above > OVERSHOOT) & (middle > -RELEVANT)).any(1)

    def _panel_data(self, panel: Tensor) -> tuple[Tensor, ...]:
        """Return the spline's data for some panels (m, q), each (m, q).

        They are width, left value, right value, left and right second derivative.
        """
        x = self.pattern
        right = panel + 1
        return (
            x[right] - x[panel],
            self._relative_logs.gather(1, panel),
            self._relative_logs.gather(1, right),
            self._second_derivatives.gather(1, panel),
            self._second_derivatives.gather(1, right),
        )

    @cached_property
    def _cumulative_mass(self) -> Tensor:
        """Return the integrals ∫ p/peak dx from −∞ to each node (m, k), with the left tail."""
        x = self.pattern
        ends = (
            (x[1:] - x[:-1]).expand(self.logs.shape[0], -1),
            self._relative_logs[:, :-1],
            self._relative_logs[:, 1:],
            self._second_derivatives[:, :-1],
            self._second_derivatives[:, 1:],
        )
        panels = _panel_integral(ends, torch.ones_like(ends[0]))
        left = self.tails[0].moment(0, self.peak) / self.scale
        return torch.cat([left[:, None], panels], 1).cumsum(1)

    def spline_error(self) -> Tensor:
        """Compute the relative difference of the spline's mass from the rule's (m,)."""
        return (
            ((self._total_mass.log() + self.scale.log() + self.peak) - self.log_mass).expm1().abs()
        )

    @cached_property
    def _total_mass(self) -> Tensor:
        """Return the spline's mass with both tails, ∫ p/peak dx (m,)."""
        return self._cumulative_mass[:, -1] + self.tails[1].moment(0, self.peak) / self.scale

    def cdf(self, z: Tensor) -> Tensor:
        """Compute P(Z ≤ z).  (m, q) -> (m, q)."""
        pattern = self.pattern
        x = (z - self.centre[:, None]) / self.scale[:, None]
        panel = (torch.searchsorted(pattern, x.contiguous()) - 1).clamp(0, pattern.numel() - 2)
        ends = self._panel_data(panel)
        fraction = ((x - pattern[panel]) / ends[0]).clamp(0, 1)
        value = self._cumulative_mass.gather(1, panel) + _panel_integral(ends, fraction)
        # Beyond the last nodes the mass of the power laws takes the place of the spline's.
        distance = (z - self.centre[:, None]).abs()
        for side, tail in enumerate(self.tails):
            beyond = x > pattern[-1] if side else x < pattern[0]
            if bool(beyond.any()):
                tail_mass = tail.moment(0, self.peak)[:, None] / self.scale[:, None]
                ratio = (distance / tail.distance[:, None]).clamp_min(1)
                mass = tail_mass * ratio ** (1 - tail.power[:, None])
                value = torch.where(
                    beyond, self._total_mass[:, None] - mass if side else mass, value
                )
        return (value / self._total_mass[:, None]).clamp(0, 1)

    def icdf(self, q: Tensor) -> Tensor:
        """Compute the z with P(Z ≤ z) = q.  (m, k) -> (m, k); 0 and 1 give −∞ and ∞."""
        target = q * self._total_mass[:, None]
        z = self._to_places(self._spline_quantile(target))
        # Targets in a tail are quantiles of its power law.
        for side, tail in enumerate(self.tails):
            tail_mass = tail.moment(0, self.peak)[:, None] / self.scale[:, None]
            mass = self._total_mass[:, None] - target if side else target
            beyond = mass < tail_mass
            if bool(beyond.any()):
                radius = tail.radius((mass / tail_mass).clamp(0, 1))
                z = torch.where(beyond, self.centre[:, None] + (radius if side else -radius), z)
        z = torch.where(q <= 0, -math.inf, z)
        return torch.where(
            self._total_mass[:, None].isnan(), torch.nan, torch.where(q >= 1, math.inf, z)
        )

    def _spline_quantile(self, target: Tensor) -> Tensor:
        """Compute the x up to which the spline has the mass `target`.  (m, k) -> (m, k).

        A target in a tail gives the last node there.
        """
        pattern = self.pattern
        panel = (torch.searchsorted(self._cumulative_mass, target.contiguous()) - 1).clamp(
            0, pattern.numel() - 2
        )
        ends = self._panel_data(panel)
        need = (target - self._cumulative_mass.gather(1, panel)).clamp_min(0)
        low, high = torch.zeros_like(need), torch.ones_like(need)
        fraction = (need / _panel_integral(ends, high).clamp_min(1e-300)).clamp(0, 1)
        for _ in range(50):  # Newton inside a shrinking bracket; usually five rounds
            gap = _panel_integral(ends, fraction) - need
            low, high = torch.where(gap <= 0, fraction, low), torch.where(gap >= 0, fraction, high)
            density = _spline_value(ends, fraction).exp() * ends[0]
            step = gap / density.clamp_min(1e-300)
            if bool((step.abs() <= 1e-13).all()):
                break
            new = fraction - step
            inside = (new >= low) & (new <= high)
            fraction = torch.where(inside, new, (low + high) / 2)
        return pattern[panel] + fraction * ends[0]

    def hdr(self, level: float, log_slope: Callable[[Tensor], Tensor] | None = None) -> Regions:
        """Return {z: p(z) ≥ c} with c such that its probability is `level`: the smallest such set.

        c is found by bisection on the exact (spline) probability of the set, so several modes
        give several intervals. log_slope: z -> log y′(z) of a scale y(z). The set is then the
        smallest in y: {z: p(z) / y′(z) ≥ c}.
        """
        heights, places = self._fine_heights()
        if log_slope is not None:
            changed = heights - log_slope(self._to_places(places))
            # No density is no density on every scale.
            heights = torch.where(heights > NO_DENSITY, changed, -math.inf)
        low = torch.maximum(heights[:, 0], heights[:, -1])
        short = self._region_probability(self._regions_above(heights, places, low)) < level
        # the density is high at an end, or the tails beyond the nodes are needed
        if bool(short.any()):
            if log_slope is None:
                heights, places = self._with_tails(heights, places)
            least = torch.where(heights.isneginf(), math.inf, heights).amin(1)
            low = torch.where(short, least, low)
        high = heights.max(1).values
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            enough = self._region_probability(self._regions_above(heights, places, middle)) >= level
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        return self._regions_above(heights, places, low)

    def _fine_heights(self) -> tuple[Tensor, Tensor]:
        """Return log p relative to its peak (m, F) at F places, FINE in each panel.

        The places (F,) are in units of the scale.
        """
        x = self.pattern
        panels = x.numel() - 1
        fractions = torch.arange(FINE, dtype=x.dtype) / FINE
        panel = torch.arange(panels).repeat_interleave(FINE).expand(self.logs.shape[0], -1)
        fraction = fractions.repeat(panels).expand_as(panel)
        inner = _spline_value(self._panel_data(panel), fraction)
        places = (x[:-1, None] + fractions * (x[1:] - x[:-1])[:, None]).flatten()
        return torch.cat([inner, self._relative_logs[:, -1:]], 1), torch.cat([places, x[-1:]])

    def _with_tails(self, heights: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the heights (m, F) and places (F,) with places beyond the last nodes."""
        x = self.pattern
        ratios = TAIL_RATIO ** torch.arange(1, TAIL_PLACES + 1, dtype=x.dtype)
        left, right = (
            (t.log_end - self.peak)[:, None] - t.power[:, None] * ratios.log() for t in self.tails
        )
        heights = torch.cat([left.flip(1), heights, right], 1).clamp_min(NO_DENSITY)
        return heights, torch.cat([x[0] * ratios.flip(0), places, x[-1] * ratios])

    def _region_probability(self, regions: Regions) -> Tensor:
        """Compute the probability of unions of intervals (m,)."""
        ends = torch.cat([regions.lower, regions.upper], 1)
        # NaN pads rows with fewer intervals, and counts as zero.
        sums = torch.nan_to_num(
            self.cdf(torch.nan_to_num(ends, nan=0.0)).where(~ends.isnan(), ends.new_zeros(()))
        )
        count = regions.lower.shape[1]
        return (sums[:, count:] - sums[:, :count]).sum(1)

    def _regions_above(self, heights: Tensor, places: Tensor, threshold: Tensor) -> Regions:
        """Return the regions in z where heights (m, F) at places (F,) exceed a threshold (m,)."""
        return Regions(*map(self._to_places, regions_above(heights, places, threshold)))


def regions_above(heights: Tensor, places: Tensor, threshold: Tensor) -> Regions:
    """Return where heights (m, k) at places (k,) exceed a threshold (m,).

    Ends of intervals are found by linear interpolation between the places.
    """
    excess = heights - threshold[:, None]
    inside = excess > 0
    outside = torch.zeros_like(inside[:, :1])
    starts = ~torch.cat([outside, inside[:, :-1]], 1) & inside
    stops = ~torch.cat([inside[:, 1:], outside], 1) & inside
    # The number of the interval that starts or stops at a place
    start_number = starts.cumsum(1)
    stop_number = stops.cumsum(1)
    count = start_number[:, -1]
    most = max(int(count.max()), 1) if len(count) else 1
    lowers: list[Tensor] = []
    uppers: list[Tensor] = []
    for number in range(1, most + 1):  # over the intervals of a row: one, rarely two or three
        missing = count < number
        first = (starts & (start_number == number)).to(torch.uint8).argmax(1)
        last = (stops & (stop_number == number)).to(torch.uint8).argmax(1)
        lower = _interpolate_crossing(excess, places, first, -1)
        upper = _interpolate_crossing(excess, places, last, 1)
        lowers.append(lower.masked_fill(missing, math.nan))
        uppers.append(upper.masked_fill(missing, math.nan))
    return Regions(torch.stack(lowers, 1), torch.stack(uppers, 1))


def _interpolate_crossing(excess: Tensor, places: Tensor, inner: Tensor, step: int) -> Tensor:
    """Return where an excess (m, k) becomes zero between a place and its neighbour (m,).

    inner (m,): the numbers of places inside the regions. step: −1 for their left neighbours, 1 for
    the right ones. Without a neighbour, or a fall towards it, the place itself is returned.
    """
    outer = (inner + step).clamp(0, places.numel() - 1)
    a = excess.gather(1, inner[:, None]).squeeze(1)
    b = excess.gather(1, outer[:, None]).squeeze(1)
    share = torch.where(a - b > 0, a / (a - b), torch.zeros_like(a)).clamp(0, 1)
    return places[inner] + share * (places[outer] - places[inner])


def _spline_value(ends: tuple[Tensor, ...], fraction: Tensor) -> Tensor:
    """Compute the spline at a fraction of panels.  (m, q) -> (m, q).

    ends: what `_panel_data` returns for the panels.
    """
    width, left, right, left_bend, right_bend = ends
    other = 1 - fraction
    bend = (
        other * (other * other - 1) * left_bend + fraction * (fraction * fraction - 1) * right_bend
    )
    return other * left + fraction * right + width * width / 6 * bend


def _panel_integral(ends: tuple[Tensor, ...], fraction: Tensor) -> Tensor:
    """Compute ∫ exp(spline) dx from a panel's left end over a fraction of it.  (m, q) -> (m, q).

    ends: what `_panel_data` returns for the panels.
    """
    total = torch.zeros_like(fraction)
    for node, weight in zip(*_legendre_rule(), strict=True):
        total = total + weight * _spline_value(ends, fraction * node).exp()
    return total * fraction * ends[0]
