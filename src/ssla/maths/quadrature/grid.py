"""Densities on shared nodes: mass, moments, distribution function, quantiles, regions.

A row is one density p. All rows of a grid share a node pattern, the nodes x (k,) in units of a
row's scale around its centre. A panel is the interval between two neighbouring nodes, a place a
point on the line of x or z, and the reach is the t of the last node x = sinh(t). The body of a row
is its mass between the first and the last node, and its tails are beyond. Logarithms of p are
relative to the peak where a name says so.
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

# Constants without another reason are guesses, not measured.
# Largest rise of log p in the middle of a panel above both its nodes. At a peak between two nodes
# it is about 0.01.
OVERSHOOT = 0.3
# Least difference of a tail's power from the one at which a moment is infinite: a smaller one is
# rounding error.
LEAST_MARGIN = 1e-6
# For regions: the ratio of the distances of neighbouring places beyond the last node, their number
TAIL_RATIO, TAIL_PLACES = 2.0**0.25, 240
RELEVANT = 25.0  # difference of log p from the peak at which the density is negligible
NO_DENSITY = -700.0  # log p relative to the peak that stands for no density: exp(−700) > 0
BISECTIONS = 45  # of the threshold of a region: 2⁻⁴⁵ of the range of log p is rounding error
FINE = 8  # places in a panel at which regions are found. A guess
# Of the search for a quantile: the most rounds, and the step, as a share of a panel, at which it
# ends
QUANTILE_ROUNDS, QUANTILE_STEP = 50, 1e-13


@cached_constant
def node_pattern(count: int, reach: float) -> tuple[Tensor, Tensor]:
    """Return the nodes x_j = sinh(t_j) and the trapezoidal weights dx, each (count,).

    t is uniform on [−reach, reach], and dx = cosh(t) dt, half of it at the ends.
    """
    t = torch.linspace(-reach, reach, count, dtype=torch.float64)
    weights = torch.cosh(t) * (2 * reach / (count - 1))
    weights[0] /= 2
    weights[-1] /= 2
    return torch.sinh(t), weights


@cached_constant
def _build_second_derivative_matrix(count: int, reach: float) -> Tensor:
    """Return the matrix (k, k) from nodal values to the second derivatives of their spline.

    The spline is cubic and not-a-knot, on the k = count nodes of `node_pattern`. Its second
    derivatives solve system @ bends = right @ values. reach: that of `node_pattern`.
    """
    x = node_pattern(count, reach)[0].numpy()
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

    # Rows of very unequal size are brought to one size before the solve.
    scale = np.abs(system).max(1, keepdims=True)
    return torch.from_numpy(np.linalg.solve(system / scale, right / scale))


@cached_constant
def _build_midpoint_matrix(count: int, reach: float) -> Tensor:
    """Return the matrix (k − 1, k) from nodal values to the spline in the middle of its panels.

    With width h the spline is there the mean of both values less h²/16 times the sum of both second
    derivatives. count, reach: those of `node_pattern`.
    """
    x, bends = node_pattern(count, reach)[0], _build_second_derivative_matrix(count, reach)
    eye = torch.eye(count, dtype=torch.float64)
    square = ((x[1:] - x[:-1]) ** 2)[:, None]
    return (eye[1:] + eye[:-1]) / 2 - square / 16 * (bends[1:] + bends[:-1])


@cached_constant
def _legendre_rule() -> tuple[Tensor, Tensor]:
    """Return four Gauss–Legendre nodes and weights on [0, 1], each (4,)."""
    nodes, weights = np.polynomial.legendre.leggauss(4)
    return torch.from_numpy((nodes + 1) / 2), torch.from_numpy(weights / 2)


class Tail(NamedTuple):
    """The density beyond the last node: p(r) = exp(log_end)·(r/r_end)^(−power) for r ≥ r_end.

    r is the distance from the centre, in the unit of z.
    """

    distance: Tensor  # r_end, that of the last node (m,)
    log_end: Tensor  # log p there (m,)
    power: Tensor  # (m,); infinite: there is no density beyond

    def moment(self, order: int, log_unit: Tensor) -> Tensor:
        """Compute ∫ r^order p dr over r ≥ r_end, in units of exp(log_unit).  (m,) -> (m,).

        The integral is infinite where the power is too small for it to exist.
        """
        margin = self.power - 1 - order
        size = (self.log_end - log_unit).exp() * self.distance ** (1 + order)
        endless = torch.where(size > 1e-280, math.inf, 0.0)  # a tail of zero density stays zero
        return torch.where(margin > LEAST_MARGIN, size / margin.clamp_min(LEAST_MARGIN), endless)

    def radius(self, share: Tensor) -> Tensor:
        """Return the r beyond which the tail has this share of its mass.  (m, q) -> (m, q)."""
        # The mass beyond r falls as r^(1 − power).
        return self.distance[:, None] * share ** (-1 / (self.power - 1))[:, None]


def _fit_tail(distance: Tensor, logs: Tensor) -> Tail:
    """Return the power law through the last two nodes on one side.

    distance (m, 2): the distances of the inner and the outer node from the centre. logs (m, 2): log
    p at both.
    """
    fall = logs[:, 0] - logs[:, 1]
    power = fall / (distance[:, 1].log() - distance[:, 0].log())
    # Without density at the last node there is none beyond.
    power = torch.where(logs[:, 1] == -math.inf, math.inf, power)
    return Tail(distance[:, 1], logs[:, 1], power)


class _Panels(NamedTuple):
    """The cubic splines on some panels, one for each entry of the fields (m, q).

    x and widths are in units of the scale, and values are log p relative to its peak.
    """

    width: Tensor
    left: Tensor  # value at the left end
    right: Tensor  # value at the right end
    left_bend: Tensor  # second derivative in x at the left end
    right_bend: Tensor  # second derivative in x at the right end


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
        """Return the nodes x_j = sinh(t_j) (k,), in units of the scale and around zero."""
        return node_pattern(self.logs.shape[1], self.reach)[0]

    @property
    def _pattern_weights(self) -> Tensor:
        """Return the weights dx (k,) of the trapezoidal rule, in units of the scale."""
        return node_pattern(self.logs.shape[1], self.reach)[1]

    def _to_places(self, x: Tensor) -> Tensor:
        """Return z = centre + scale·x for x in units of the scale.  (q,) or (m, q) -> (m, q)."""
        return self.centre[:, None] + self.scale[:, None] * x

    @property
    def nodes(self) -> Tensor:
        """Return the nodes z (m, k)."""
        return self._to_places(self.pattern)

    def select_rows(self, index: Tensor) -> Grid:
        """Return the grid of some rows, given by their numbers (r,) or by a mask (m,) bool."""
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
        """Return the power laws beyond the last nodes: the left one, then the right one."""
        x = self.pattern
        left = self.scale[:, None] * (-x[:2]).flip(0)
        right = self.scale[:, None] * x[-2:]
        return _fit_tail(left, self.logs[:, :2].flip(1)), _fit_tail(right, self.logs[:, -2:])

    @property
    def log_terms(self) -> Tensor:
        """Return the logarithms log(p dz) (m, k) of the terms of the trapezoidal rule."""
        return self.logs + (self._pattern_weights * self.scale[:, None]).log()

    @cached_property
    def relative_terms(self) -> Tensor:
        """Return the terms exp(log p − peak) dx (m, k) of the rule, x in units of the scale."""
        return (self.logs - self.peak[:, None]).exp() * self._pattern_weights

    @cached_property
    def log_mass(self) -> Tensor:
        """Return the logarithm of the mass, log ∫ p dz (m,), with both tails."""
        body = self.relative_terms.sum(1) * self.scale
        left, right = self.tails
        return self.peak + torch.log(body + left.moment(0, self.peak) + right.moment(0, self.peak))

    @cached_property
    def shares(self) -> Tensor:
        """Return the share of the mass at each node (m, k); the tails have the rest."""
        return self.relative_terms * ((self.peak - self.log_mass).exp() * self.scale)[:, None]

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of z, each (m,), with both tails.

        Mean and variance are not finite where the tails are too heavy.
        """
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
        """Compute Σ_j share_j h(z_j), without the tails, from values h(z_j).  (m, k) -> (m,)."""
        return (self.shares * values).sum(1)

    @cached_property
    def mode(self) -> Tensor:
        """Return the place of the highest density (m,); NaN where the mass is NaN.

        It is the vertex of the parabola through the highest node and its neighbours, or that node
        where the parabola has no maximum.
        """
        best = self.logs.argmax(1).clamp(1, self.logs.shape[1] - 2)[:, None]
        left, mid, right = (self.logs.gather(1, best + d).squeeze(1) for d in (-1, 0, 1))
        x = self.pattern
        best = best.squeeze(1)

        # Distances to the left and to the right neighbour, and slopes of the chords to them
        a = x[best] - x[best - 1]
        b = x[best + 1] - x[best]
        left_slope = (mid - left) / a
        right_slope = (right - mid) / b

        # The parabola's second and first derivative at the highest node
        curvature = (right_slope - left_slope) / ((a + b) / 2)
        slope = (left_slope * b + right_slope * a) / (a + b)
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
        return (
            self._relative_logs @ _build_second_derivative_matrix(self.logs.shape[1], self.reach).mT
        )

    def find_overshooting_rows(self) -> Tensor:
        """Return which rows (m,) have a spline that rises well above the nodes of a panel.

        Only panels with relevant density count. Such a rise shows a kink or a jump, which the nodes
        do not resolve.
        """
        logs = self._relative_logs
        middle = logs @ _build_midpoint_matrix(logs.shape[1], self.reach).mT
        above = middle - torch.maximum(logs[:, :-1], logs[:, 1:])
        return ((above > OVERSHOOT) & (middle > -RELEVANT)).any(1)

    def _gather_panels(self, panel: Tensor) -> _Panels:
        """Return the spline on some panels of each row, given by their numbers (m, q)."""
        x = self.pattern
        right = panel + 1
        return _Panels(
            x[right] - x[panel],
            self._relative_logs.gather(1, panel),
            self._relative_logs.gather(1, right),
            self._second_derivatives.gather(1, panel),
            self._second_derivatives.gather(1, right),
        )

    @cached_property
    def _cumulative_mass(self) -> Tensor:
        """Return the spline's mass from −∞ to each node (m, k), with the left tail.

        The mass is ∫ p/p_max dx, with x in units of the scale.
        """
        x = self.pattern
        panels = _Panels(
            (x[1:] - x[:-1]).expand(self.logs.shape[0], -1),
            self._relative_logs[:, :-1],
            self._relative_logs[:, 1:],
            self._second_derivatives[:, :-1],
            self._second_derivatives[:, 1:],
        )
        masses = _integrate_panels(panels, torch.ones_like(panels.width))
        left = self.tails[0].moment(0, self.peak) / self.scale
        return torch.cat([left[:, None], masses], 1).cumsum(1)

    def compute_spline_error(self) -> Tensor:
        """Compute the relative difference of the spline's mass from the trapezoidal rule's (m,)."""
        log_spline_mass = self._total_mass.log() + self.scale.log() + self.peak
        return (log_spline_mass - self.log_mass).expm1().abs()

    @cached_property
    def _total_mass(self) -> Tensor:
        """Return the spline's mass with both tails (m,), in the units of `_cumulative_mass`."""
        return self._cumulative_mass[:, -1] + self.tails[1].moment(0, self.peak) / self.scale

    def cdf(self, z: Tensor) -> Tensor:
        """Compute P(Z ≤ z) from the spline and the tails.  (m, q) -> (m, q)."""
        pattern = self.pattern
        x = (z - self.centre[:, None]) / self.scale[:, None]
        panel = (torch.searchsorted(pattern, x.contiguous()) - 1).clamp(0, pattern.numel() - 2)
        panels = self._gather_panels(panel)
        fraction = ((x - pattern[panel]) / panels.width).clamp(0, 1)
        value = self._cumulative_mass.gather(1, panel) + _integrate_panels(panels, fraction)

        # Beyond the last nodes the mass of the power laws takes the place of the spline's.
        distance = (z - self.centre[:, None]).abs()
        for is_right, tail in zip((False, True), self.tails, strict=True):
            beyond = x > pattern[-1] if is_right else x < pattern[0]
            if bool(beyond.any()):
                tail_mass = tail.moment(0, self.peak)[:, None] / self.scale[:, None]
                ratio = (distance / tail.distance[:, None]).clamp_min(1)
                mass = tail_mass * ratio ** (1 - tail.power[:, None])
                value = torch.where(
                    beyond, self._total_mass[:, None] - mass if is_right else mass, value
                )

        return (value / self._total_mass[:, None]).clamp(0, 1)

    def icdf(self, q: Tensor) -> Tensor:
        """Compute the z with P(Z ≤ z) = q.  (m, k) -> (m, k).

        q ≤ 0 gives −∞ and q ≥ 1 gives ∞. It is NaN where the mass is NaN.
        """
        target = q * self._total_mass[:, None]
        z = self._to_places(self._find_spline_quantile(target))

        # Targets in a tail are quantiles of its power law.
        for is_right, tail in zip((False, True), self.tails, strict=True):
            tail_mass = tail.moment(0, self.peak)[:, None] / self.scale[:, None]
            mass = self._total_mass[:, None] - target if is_right else target
            beyond = mass < tail_mass
            if bool(beyond.any()):
                radius = tail.radius((mass / tail_mass).clamp(0, 1))
                z = torch.where(beyond, self.centre[:, None] + (radius if is_right else -radius), z)

        z = torch.where(q <= 0, -math.inf, z)
        return torch.where(
            self._total_mass[:, None].isnan(), torch.nan, torch.where(q >= 1, math.inf, z)
        )

    def _find_spline_quantile(self, target: Tensor) -> Tensor:
        """Compute the x up to which the spline and the left tail have the mass `target`.

        target (m, k), in the units of `_cumulative_mass` -> (m, k). A target in a tail gives the
        last node on that side.
        """
        pattern = self.pattern
        panel = (torch.searchsorted(self._cumulative_mass, target.contiguous()) - 1).clamp(
            0, pattern.numel() - 2
        )
        panels = self._gather_panels(panel)
        needed_mass = (target - self._cumulative_mass.gather(1, panel)).clamp_min(0)
        low, high = torch.zeros_like(needed_mass), torch.ones_like(needed_mass)
        fraction = (needed_mass / _integrate_panels(panels, high).clamp_min(1e-300)).clamp(0, 1)

        # Newton steps inside a shrinking bracket, and bisection where they leave it: usually five
        # rounds.
        for _ in range(QUANTILE_ROUNDS):
            excess = _integrate_panels(panels, fraction) - needed_mass
            low, high = (
                torch.where(excess <= 0, fraction, low),
                torch.where(excess >= 0, fraction, high),
            )
            density = _evaluate_spline(panels, fraction).exp() * panels.width
            step = excess / density.clamp_min(1e-300)
            if bool((step.abs() <= QUANTILE_STEP).all()):
                break
            newton_point = fraction - step
            inside = (newton_point >= low) & (newton_point <= high)
            fraction = torch.where(inside, newton_point, (low + high) / 2)

        return pattern[panel] + fraction * panels.width

    def hdr(self, level: float, log_slope: Callable[[Tensor], Tensor] | None = None) -> Regions:
        """Return the highest density region: the smallest set with the probability `level`.

        The region is {z: p(z) ≥ c}, with c by bisection on the probability of the set under the
        spline, so several modes give several intervals. log_slope: z -> log y′(z) for a monotone
        y(z); the set is then the smallest in y, {z: p(z) / y′(z) ≥ c}. None: the set is the
        smallest in z.
        """
        heights, places = self._compute_fine_heights()
        if log_slope is not None:
            changed = heights - log_slope(self._to_places(places))
            # A density of zero stays zero in every y.
            heights = torch.where(heights > NO_DENSITY, changed, -math.inf)

        low = torch.maximum(heights[:, 0], heights[:, -1])
        short = self._compute_region_probability(self._regions_above(heights, places, low)) < level

        # Where the region above the end nodes is too small, the density is high at an end, or the
        # tails beyond the nodes are needed.
        if bool(short.any()):
            if log_slope is None:
                heights, places = self._extend_by_tails(heights, places)
            least = torch.where(heights.isneginf(), math.inf, heights).amin(1)
            low = torch.where(short, least, low)

        high = heights.max(1).values
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            enough = (
                self._compute_region_probability(self._regions_above(heights, places, middle))
                >= level
            )
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)

        return self._regions_above(heights, places, low)

    def _compute_fine_heights(self) -> tuple[Tensor, Tensor]:
        """Return log p relative to its peak (m, F), and the F places (F,), FINE in each panel.

        The places are in units of the scale. The last node is one of them too.
        """
        x = self.pattern
        panel_count = x.numel() - 1
        fractions = torch.arange(FINE, dtype=x.dtype) / FINE
        # FINE fractions of each panel in turn, the same for all rows
        panel = torch.arange(panel_count).repeat_interleave(FINE).expand(self.logs.shape[0], -1)
        fraction = fractions.repeat(panel_count).expand_as(panel)
        inner = _evaluate_spline(self._gather_panels(panel), fraction)
        places = (x[:-1, None] + fractions * (x[1:] - x[:-1])[:, None]).flatten()
        return torch.cat([inner, self._relative_logs[:, -1:]], 1), torch.cat([places, x[-1:]])

    def _extend_by_tails(self, heights: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the heights (m, F) and places (F,) with TAIL_PLACES more beyond either end."""
        x = self.pattern
        ratios = TAIL_RATIO ** torch.arange(1, TAIL_PLACES + 1, dtype=x.dtype)
        # log p of a power law at r = r_end·ratio is log_end − power·log ratio.
        left, right = (
            (t.log_end - self.peak)[:, None] - t.power[:, None] * ratios.log() for t in self.tails
        )
        heights = torch.cat([left.flip(1), heights, right], 1).clamp_min(NO_DENSITY)
        return heights, torch.cat([x[0] * ratios.flip(0), places, x[-1] * ratios])

    def _compute_region_probability(self, regions: Regions) -> Tensor:
        """Compute the probability (m,) of unions of intervals in z."""
        ends = torch.cat([regions.lower, regions.upper], 1)
        # NaN pads rows with fewer intervals, and counts as zero.
        sums = torch.nan_to_num(
            self.cdf(torch.nan_to_num(ends, nan=0.0)).where(~ends.isnan(), ends.new_zeros(()))
        )
        count = regions.lower.shape[1]
        return (sums[:, count:] - sums[:, :count]).sum(1)

    def _regions_above(self, heights: Tensor, places: Tensor, threshold: Tensor) -> Regions:
        """Return the regions in z where heights (m, F) at places (F,) exceed a threshold (m,)."""
        return Regions(*map(self._to_places, find_regions_above(heights, places, threshold)))


def find_regions_above(heights: Tensor, places: Tensor, threshold: Tensor) -> Regions:
    """Return the intervals in which heights (m, k) at places (k,) exceed a threshold (m,).

    The ends of intervals are found by linear interpolation between the places. A row without an
    interval has NaN only.
    """
    excess = heights - threshold[:, None]
    above = excess > 0
    below = torch.zeros_like(above[:, :1])  # beyond either end nothing is above

    # A place starts an interval where its left neighbour is not above, and stops one where its
    # right neighbour is not.
    starts = ~torch.cat([below, above[:, :-1]], 1) & above
    stops = ~torch.cat([above[:, 1:], below], 1) & above

    # The number of the interval that starts or stops at a place
    start_number = starts.cumsum(1)
    stop_number = stops.cumsum(1)
    count = start_number[:, -1]
    most = max(int(count.max()), 1) if len(count) else 1
    lowers: list[Tensor] = []
    uppers: list[Tensor] = []

    # A row has one interval, rarely two or three.
    for number in range(1, most + 1):
        is_missing = count < number
        first = (starts & (start_number == number)).to(torch.uint8).argmax(1)
        last = (stops & (stop_number == number)).to(torch.uint8).argmax(1)
        lower = _interpolate_crossing(excess, places, first, -1)
        upper = _interpolate_crossing(excess, places, last, 1)
        lowers.append(lower.masked_fill(is_missing, math.nan))
        uppers.append(upper.masked_fill(is_missing, math.nan))

    return Regions(torch.stack(lowers, 1), torch.stack(uppers, 1))


def _interpolate_crossing(excess: Tensor, places: Tensor, inner: Tensor, step: int) -> Tensor:
    """Return the point (m,) at which an excess (m, k) becomes zero between a place and the next.

    inner (m,): the numbers of places inside the regions. step: −1 if the next place is the left
    neighbour, 1 if it is the right one. Without a next place, or a fall towards it, the place
    itself is returned.
    """
    outer = (inner + step).clamp(0, places.numel() - 1)
    a = excess.gather(1, inner[:, None]).squeeze(1)
    b = excess.gather(1, outer[:, None]).squeeze(1)
    share = torch.where(a - b > 0, a / (a - b), torch.zeros_like(a)).clamp(0, 1)
    return places[inner] + share * (places[outer] - places[inner])


def _evaluate_spline(panels: _Panels, fraction: Tensor) -> Tensor:
    """Compute the cubic spline at a fraction of panels.  (m, q) -> (m, q).

    fraction: the distance from the left end of each panel, as a share of its width.
    """
    width, left, right, left_bend, right_bend = panels
    remainder = 1 - fraction
    bend = (
        remainder * (remainder * remainder - 1) * left_bend
        + fraction * (fraction * fraction - 1) * right_bend
    )
    return remainder * left + fraction * right + width * width / 6 * bend


def _integrate_panels(panels: _Panels, fraction: Tensor) -> Tensor:
    """Compute ∫ exp(spline) dx from a panel's left end over a fraction of it.  (m, q) -> (m, q).

    fraction: as in `_evaluate_spline`. The rule has four Gauss–Legendre nodes.
    """
    total = torch.zeros_like(fraction)
    for node, weight in zip(*_legendre_rule(), strict=True):
        total = total + weight * _evaluate_spline(panels, fraction * node).exp()
    return total * fraction * panels.width
