"""Densities over the circle known pointwise: their mass, moments, quantiles and regions.

Integrals are taken by the trapezoidal rule on equally spaced angles, and the density between the
angles is a Fourier series. For a smooth periodic density both converge exponentially. A row is
accepted when every second angle gives the same mass to 1e-7; rows that never pass (jumps, peaks
narrower than about 1e-3) are flagged `accurate = False`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ssla.maths.quadrature.grid import BISECTIONS, Regions, find_regions_above
from ssla.maths.quadrature.root_finding import bracketed_root

# Guesses, not measured.
FIRST_ANGLES = 64
MOST_ANGLES = 1 << 14
HALF_RULE = 1e-7  # allowed relative difference of the mass by every second angle
FINER = 8  # points of the table of the series for each angle
ANGLES_AT_ONCE = 1 << 18  # evaluated at once: bounds memory


def wrap_angles(y: Tensor) -> Tensor:
    """Return the same angles, in radians, in [−π, π), elementwise."""
    turned = torch.remainder(y + math.pi, 2 * math.pi) - math.pi
    # Angles that are inside already are returned without rounding.
    return torch.where((y >= -math.pi) & (y < math.pi), y, turned)


@dataclass(frozen=True)
class Circle:
    """The densities p of m rows on the k angles −π + 2πj/k, with log p in `logs`.

    Y is the angle, and its distribution function P(−π ≤ Y ≤ y) begins at −π.
    """

    logs: Tensor  # (m, k)
    accurate: Tensor  # (m,) bool

    @property
    def angles(self) -> Tensor:
        """Return the angles −π + 2πj/k (k,)."""
        return _space_points(self.logs.shape[1])[:-1]

    @cached_property
    def log_mass(self) -> Tensor:
        """Return the logarithm of the mass, log ∫ p dy over the circle (m,)."""
        return self.logs.logsumexp(1) + math.log(2 * math.pi / self.logs.shape[1])

    @cached_property
    def shares(self) -> Tensor:
        """Return the share of the mass at each angle (m, k); the shares of a row sum to one."""
        return torch.softmax(self.logs, 1)

    @cached_property
    def _harmonics(self) -> Tensor:
        """Return the characteristic function φ_j = E exp(i j (Y + π)) (m, k/2), j < k/2."""
        # rfft has the exponent −i j (Y + π), hence the conjugate.
        harmonics: Tensor = torch.fft.rfft(self.shares, dim=1).conj()
        return harmonics[:, : self.logs.shape[1] // 2]

    @cached_property
    def mean(self) -> Tensor:
        """Return the circular mean (m,): the direction of E exp(iY), in [−π, π)."""
        return wrap_angles(self._harmonics[:, 1].angle() - math.pi)

    @cached_property
    def variance(self) -> Tensor:
        """Return the variance E d² around the mean (m,), with d = Y − mean wrapped to [−π, π).

        By the Fourier series d² = π²/3 + 4 Σ_j (−1)ʲ cos(jd)/j².
        """
        j = torch.arange(1, self._harmonics.shape[1], dtype=torch.float64)
        # exp(−i j (mean + π)): the harmonics around the mean are φ_j times it.
        turn = torch.polar(
            torch.ones_like(self.mean[:, None] * j), -(self.mean[:, None] + math.pi) * j
        )
        cosines = (self._harmonics[:, 1:] * turn).real  # E cos(jd)
        signs = 1 - 2 * (j % 2)  # (−1)ʲ
        return math.pi**2 / 3 + 4 * (cosines * signs / j**2).sum(1)

    @cached_property
    def _fine_table(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return points from −π to π (K + 1,), and density and cdf there, each (m, K + 1).

        K is FINER·k. The values are those of the Fourier series, with the density clamped at zero
        and the distribution function made monotone.
        """
        count = FINER * self.logs.shape[1]
        phi = self._harmonics.conj()
        j = torch.arange(phi.shape[1], dtype=torch.float64)
        density = torch.fft.irfft(phi, count, dim=1) * count / (2 * math.pi)

        # The distribution function is the integral of the series: a line and periodic waves.
        integrated = torch.where(j > 0, phi / (1j * j.clamp_min(1)), 0)
        waves = torch.fft.irfft(integrated, count, dim=1) * count / (2 * math.pi)
        place = _space_points(count)

        # The value at π is that at −π.
        density, waves = (torch.cat([values, values[:, :1]], 1) for values in (density, waves))
        below = (place + math.pi) / (2 * math.pi) + waves - waves[:, :1]
        return place, density.clamp_min(0), below.clamp(0, 1).cummax(1).values

    def cdf(self, y: Tensor) -> Tensor:
        """Compute P(−π ≤ Y ≤ y) by a cubic between the fine points.

        y (m, q) in [−π, π] -> (m, q). The cubic has the density as its slope at the points.
        """
        place, density, below = self._fine_table
        panel = (torch.searchsorted(place, y.contiguous()) - 1).clamp(0, place.numel() - 2)
        width = place[1] - place[0]
        t = ((y - place[panel]) / width).clamp(0, 1)
        low, high = below.gather(1, panel), below.gather(1, panel + 1)

        # Hermite's cubic, from the values and the slopes at both ends of the panel.
        left_slope = density.gather(1, panel) * width
        right_slope = density.gather(1, panel + 1) * width
        square = 3 * (high - low) - 2 * left_slope - right_slope
        cubic = low + t * (
            left_slope + t * (square + t * (left_slope + right_slope - 2 * (high - low)))
        )
        return torch.minimum(torch.maximum(cubic, low), high)

    def icdf(self, q: Tensor) -> Tensor:
        """Compute the y in [−π, π] with P(−π ≤ Y ≤ y) = q.  (m, k) -> (m, k)."""
        place, _, below = self._fine_table
        panel = (torch.searchsorted(below, q.contiguous()) - 1).clamp(0, place.numel() - 2)
        return bracketed_root(lambda y: self.cdf(y) - q, place[panel], place[panel + 1])

    @property
    def mode(self) -> Tensor:
        """Return the angle of the highest density (m,).

        It is the vertex of the parabola through the highest point of the table and its neighbours,
        or that point where the parabola has no maximum.
        """
        place, density, _ = self._fine_table
        p = density[:, :-1]  # without the last point, which is the first one
        best = p.argmax(1, keepdim=True)
        left, mid, right = (p.gather(1, (best + d) % p.shape[1]).squeeze(1) for d in (-1, 0, 1))
        curve = left - 2 * mid + right
        shift = torch.where(curve < 0, (left - right) / (2 * curve), torch.zeros_like(curve))
        return wrap_angles(place[best.squeeze(1)] + shift.clamp(-1, 1) * (place[1] - place[0]))

    def hdr(self, level: float) -> Regions:
        """Return the highest density region: the smallest set of arcs with the probability `level`.

        The threshold of the density is found by bisection. An arc across ±π counts as two.
        """
        place, density, _ = self._fine_table
        low, high = torch.zeros_like(density[:, 0]), density.amax(1)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            # NaN pads rows with fewer arcs, and counts as zero at both ends.
            below_lower, below_upper = (
                torch.nan_to_num(self.cdf(torch.nan_to_num(ends, nan=-math.pi)), nan=0.0)
                for ends in find_regions_above(density, place, middle)
            )
            enough = (below_upper - below_lower).sum(1) >= level
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)

        return find_regions_above(density, place, low)


def _space_points(count: int) -> Tensor:
    """Return count + 1 equally spaced points (count + 1,) from −π to π."""
    return torch.linspace(-math.pi, math.pi, count + 1, dtype=torch.float64)


class RowCircle(NamedTuple):
    """A circle, and the numbers of its rows (m,)."""

    rows: Tensor
    circle: Circle


def build_circles(log_density: Callable[[Tensor, Tensor], Tensor], rows: int) -> list[RowCircle]:
    """Return grids of equally spaced angles, which are doubled until they suffice, with their rows.

    log_density: (angles (m, k), row numbers (m,)) -> log p (m, k). rows: how many rows there are.
    Rows that do not pass with MOST_ANGLES are flagged as not accurate.
    """
    circles: list[RowCircle] = []
    pending = torch.arange(rows)
    count = FIRST_ANGLES
    while pending.numel():
        retried = []
        for chunk in pending.split(max(ANGLES_AT_ONCE // count, 1)):
            logs = log_density(_space_points(count)[:-1].expand(chunk.numel(), -1), chunk).double()
            # The relative difference of the mass by every second angle from that by all angles
            error = (logs[:, ::2].logsumexp(1) - logs.logsumexp(1) + math.log(2)).expm1().abs()
            passes = error <= HALF_RULE
            accepted = passes | (count >= MOST_ANGLES)
            if bool(accepted.any()):
                circles.append(RowCircle(chunk[accepted], Circle(logs[accepted], passes[accepted])))
            retried.append(chunk[~accepted])

        pending = torch.cat(retried)
        count *= 2

    return circles
