"""A scale for targets that are not negative: logarithmic where the data are, linear beyond.

    y = T(z) = e^low (1 + z − low)    for z ≤ low
               e^z                    for low ≤ z ≤ high
               e^high (1 + z − high)  for z ≥ high

T and its slope are continuous. Values below e^low, and zero itself, have a positive density. Beyond
e^high the target grows only in proportion to z, so that heavy tails of z leave it a mean and a
variance. T is negative below z₀ = low − 1, where y = max(T(z), 0) instead: what a model of z has
there is the probability of zero, and no quantile or draw is negative. The density at zero is that
of the part above. A negative y is refused on a closed scale. On an open one its density is that of
T(z), so that a target which turns out to be negative after all has a finite score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.special import log_ndtr, ndtr

from ssla.likelihoods.likelihood import LOG_2PI


@final
@dataclass(frozen=True)
class Positive:
    """T, for logarithms low < high."""

    low: float
    high: float
    closed: bool = True
    support: ClassVar[str] = "zero or positive"
    atom: ClassVar[float | None] = 0.0

    @property
    def zero(self) -> float:
        """Return z₀ = low − 1, where T is zero."""
        return self.low - 1

    def to_y(self, z: Tensor) -> Tensor:
        """Return T(z), zero for z ≤ z₀."""
        inside = z.clamp(self.low, self.high)
        value = inside.exp() * (1 + z - inside).clamp_min(0.0)
        # 1 + (low − 1) − low is not always zero in floating point.
        return torch.where(z > self.zero, value, 0.0)

    def to_z(self, y: Tensor) -> Tensor:
        """Return T⁻¹(y); on a closed scale z₀ for y ≤ 0."""
        inside = y.clamp(math.exp(self.low), math.exp(self.high))
        return inside.log() + (y.clamp_min(0) if self.closed else y) / inside - 1

    def log_slope(self, z: Tensor) -> Tensor:
        """Return log T′(z), which is constant below `low` and above `high`."""
        return z.clamp(self.low, self.high)

    def is_in_support(self, y: Tensor) -> Tensor:
        """Tell which y are not negative; on an open scale, which are finite."""
        return y >= 0 if self.closed else y.isfinite()

    def moments_of_normals(self, means: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return E[y] and E[y²] for z ~ N(m, s²), of the shape of m and s.

        They are sums over the lower line, the exponential and the upper line.
        """
        infinite = torch.full_like(means, torch.inf)
        a, b, c = ((end - means) / scales for end in (self.zero, self.low, self.high))
        below = _line_moments(self.low, means, scales, a, b)
        above = _line_moments(self.high, means, scales, c, infinite)
        # E[e^{kz}; low ≤ z ≤ high]: a Gaussian whose mean is moved by k s²
        logs = [
            k * means + 0.5 * (k * scales) ** 2 + log_normal_between(b - k * scales, c - k * scales)
            for k in (1, 2)
        ]
        return below[0] + logs[0].exp() + above[0], below[1] + logs[1].exp() + above[1]


@final
@dataclass(frozen=True)
class Censored:
    """y = max(z, 0), for a model of y itself: what it has below zero is the probability of zero."""

    support: ClassVar[str] = "zero or positive"
    atom: ClassVar[float | None] = 0.0

    def to_y(self, z: Tensor) -> Tensor:
        """Return max(z, 0)."""
        return z.clamp_min(0.0)

    def to_z(self, y: Tensor) -> Tensor:
        """Return y, or zero for negative y."""
        return y.clamp_min(0.0)

    def log_slope(self, z: Tensor) -> Tensor:
        """Return zeros: the slope above zero is one."""
        return torch.zeros_like(z)

    def is_in_support(self, y: Tensor) -> Tensor:
        """Tell which y are not negative."""
        return y >= 0

    def moments_of_normals(self, means: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return E[y] and E[y²] for z ~ N(m, s²), of the shape of m and s."""
        t = means / scales
        share, height = ndtr(t), (-0.5 * t * t - 0.5 * LOG_2PI).exp()
        first = means * share + scales * height
        second = (means**2 + scales**2) * share + means * scales * height
        return first, second


def _line_moments(
    end: float, means: Tensor, scales: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """Return E[y; a ≤ t ≤ b] and E[y²; a ≤ t ≤ b] for y = e^end (1 + m + st − end), t ~ N(0, 1).

    The results have the shape of m, s, a and b.
    """
    level = 1 + means - end
    share = ndtr(b) - ndtr(a)
    heights = [(-0.5 * t * t - 0.5 * LOG_2PI).exp() for t in (a, b)]
    # ∫ t φ and ∫ t² φ over [a, b], the second less the share; t φ(t) is 0 at infinity
    fall = heights[0] - heights[1]
    bent = torch.where(a.isinf(), 0.0, a * heights[0]) - torch.where(b.isinf(), 0.0, b * heights[1])
    first = level * share + scales * fall
    second = level**2 * share + 2 * level * scales * fall + scales**2 * (share + bent)
    return math.exp(end) * first, math.exp(2 * end) * second


def log_normal_between(a: Tensor, b: Tensor) -> Tensor:
    """Return log(Φ(b) − Φ(a)) for a < b of any shape, without cancellation in either tail."""
    # Above zero the interval is mirrored, because Φ is close to one there.
    flip = a > 0
    a, b = torch.where(flip, -b, a), torch.where(flip, -a, b)
    upper = log_ndtr(b)
    between: Tensor = upper + torch.log1p(-(log_ndtr(a) - upper).exp())
    return between
