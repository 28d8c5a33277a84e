"""Densities over the circle known pointwise: the trapezoidal rule on equally spaced angles, and
Fourier series between them.

For a smooth periodic density both converge exponentially. A row is accepted when every second angle
gives the same mass to 1e-7; rows that never pass (jumps, peaks narrower than about 1e-3) are
flagged `accurate = False`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ssla.maths.quadrature.grid import Regions, regions_above
from ssla.maths.quadrature.root_finding import bracketed_root

FIRST_ANGLES = 64
MOST_ANGLES = 1 << 14
HALF_RULE = 1e-7
FINER = 8  # points between two angles at which the series is tabulated
ANGLES_AT_ONCE = 1 << 18


def wrapped(y: Tensor) -> Tensor:
    """The same angle in [−π, π)."""
    turned = torch.remainder(y + math.pi, 2 * math.pi) - math.pi
    return torch.where(
        (y >= -math.pi) & (y < math.pi), y, turned
    )  # angles inside are returned without rounding


@dataclass(frozen=True)
class Circle:
    """Rows on the angles −π + 2πj/k, with log p in `logs`.

    The distribution function is cut at −π.
    """

    logs: Tensor  # (m, k)
    accurate: Tensor  # (m,) bool

    @property
    def angles(self) -> Tensor:
        """(k,)."""
        return _places(self.logs.shape[1])[:-1]

    @cached_property
    def log_mass(self) -> Tensor:
        return self.logs.logsumexp(1) + math.log(2 * math.pi / self.logs.shape[1])

    @cached_property
    def shares(self) -> Tensor:
        """(m, k); they sum to one."""
        return torch.softmax(self.logs, 1)

    @cached_property
    def _harmonics(self) -> Tensor:
        """φ_j = E exp(i j (Y + π)), j = 0 … k/2 − 1  (m, k/2)."""
        harmonics: Tensor = torch.fft.rfft(self.shares, dim=1).conj()
        return harmonics[:, : self.logs.shape[1] // 2]

    @cached_property
    def mean(self) -> Tensor:
        """The circular mean: the direction of E exp(iY)  (m,)."""
        return wrapped(self._harmonics[:, 1].angle() - math.pi)

    @cached_property
    def variance(self) -> Tensor:
        """E d², d = Y − mean wrapped to [−π, π): by the Fourier series of d², π²/3 + 4 Σ (−1)ʲ
        cos(jd)/j².
        """
        j = torch.arange(1, self._harmonics.shape[1], dtype=torch.float64)
        turn = torch.polar(
            torch.ones_like(self.mean[:, None] * j), -(self.mean[:, None] + math.pi) * j
        )
        return math.pi**2 / 3 + 4 * (
            (self._harmonics[:, 1:] * turn).real * (1 - 2 * (j % 2)) / j**2
        ).sum(1)

    @cached_property
    def _fine(self) -> tuple[Tensor, Tensor, Tensor]:
        """Points from −π to π (K + 1,), the density and the distribution function there (m, K +
        1).
        """
        count = FINER * self.logs.shape[1]
        phi = self._harmonics.conj()
        j = torch.arange(phi.shape[1], dtype=torch.float64)
        density = torch.fft.irfft(phi, count, dim=1) * count / (2 * math.pi)
        wave = torch.where(j > 0, phi / (1j * j.clamp_min(1)), 0)
        waves = torch.fft.irfft(wave, count, dim=1) * count / (2 * math.pi)
        place = _places(count)
        density, waves = (torch.cat([part, part[:, :1]], 1) for part in (density, waves))
        below = (place + math.pi) / (2 * math.pi) + waves - waves[:, :1]
        return place, density.clamp_min(0), below.clamp(0, 1).cummax(1).values

    def cdf(self, y: Tensor) -> Tensor:
        """P(−π ≤ Y ≤ y), by a cubic between the fine points.  y (m, q) in [−π, π] -> (m, q)."""
        place, density, below = self._fine
        panel = (torch.searchsorted(place, y.contiguous()) - 1).clamp(0, place.numel() - 2)
        width = place[1] - place[0]
        t = ((y - place[panel]) / width).clamp(0, 1)
        low, high = below.gather(1, panel), below.gather(1, panel + 1)
        up, down = density.gather(1, panel) * width, density.gather(1, panel + 1) * width
        cubic = low + t * (
            up + t * (3 * (high - low) - 2 * up - down + t * (up + down - 2 * (high - low)))
        )
        return torch.minimum(torch.maximum(cubic, low), high)

    def icdf(self, q: Tensor) -> Tensor:
        """The y with P(−π ≤ Y ≤ y) = q.  (m, k) -> (m, k)."""
        place, _, below = self._fine
        panel = (torch.searchsorted(below, q.contiguous()) - 1).clamp(0, place.numel() - 2)
        return bracketed_root(lambda y: self.cdf(y) - q, place[panel], place[panel + 1])

    @property
    def mode(self) -> Tensor:
        """The highest point (m,): the vertex of the parabola through the best fine point and
        its neighbours.
        """
        place, density, _ = self._fine
        p = density[:, :-1]
        best = p.argmax(1, keepdim=True)
        left, mid, right = (p.gather(1, (best + d) % p.shape[1]).squeeze(1) for d in (-1, 0, 1))
        curve = left - 2 * mid + right
        shift = torch.where(curve < 0, (left - right) / (2 * curve), torch.zeros_like(curve))
        return wrapped(place[best.squeeze(1)] + shift.clamp(-1, 1) * (place[1] - place[0]))

    def hdr(self, level: float) -> Regions:
        """The smallest set of arcs with that probability. An arc across ±π is returned as two."""
        place, density, _ = self._fine
        low, high = torch.zeros_like(density[:, 0]), density.amax(1)
        for _ in range(45):
            middle = (low + high) / 2
            lower, upper = regions_above(density, place, middle)
            inside = [
                torch.nan_to_num(self.cdf(torch.nan_to_num(ends, nan=-math.pi)), nan=0.0)
                for ends in (lower, upper)
            ]
            enough = (inside[1] - inside[0]).sum(1) >= level
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        return regions_above(density, place, low)


def _places(count: int) -> Tensor:
    """count + 1 points from −π to π."""
    return torch.linspace(-math.pi, math.pi, count + 1, dtype=torch.float64)


class Around(NamedTuple):
    """Circles, and the rows of each."""

    rows: Tensor
    circle: Circle


def build_circles(log_density: Callable[[Tensor, Tensor], Tensor], rows: int) -> list[Around]:
    """Equally spaced angles for all rows, doubled until they suffice.

    log_density as for `build`, over angles.
    """
    found: list[Around] = []
    pending, count = torch.arange(rows), FIRST_ANGLES
    while pending.numel():
        again = []
        for part in pending.split(max(ANGLES_AT_ONCE // count, 1)):
            logs = log_density(_places(count)[:-1].expand(part.numel(), -1), part).double()
            half = (logs[:, ::2].logsumexp(1) - logs.logsumexp(1) + math.log(2)).expm1().abs()
            good = half <= HALF_RULE
            kept = good | (count >= MOST_ANGLES)
            if bool(kept.any()):
                found.append(Around(part[kept], Circle(logs[kept], good[kept])))
            again.append(part[~kept])
        pending, count = torch.cat(again), 2 * count
    return found
