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

low and high are logarithms of y. z₀ = low − 1 is the z at which T reaches zero. Φ and φ are the
standard normal distribution function and density. The value 0 is an atom: it has a positive
probability.
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
    """The function T of the module, for logarithms low < high, applied to each value."""

    low: float
    high: float
    closed: bool = True  # whether a negative y is refused
    support: ClassVar[str] = "zero or positive"
    atom: ClassVar[float | None] = 0.0

    @property
    def zero_point(self) -> float:
        """Return z₀ = low − 1, the z at which T reaches zero."""
        return self.low - 1

    def to_y(self, z: Tensor) -> Tensor:
        """Return y = max(T(z), 0), which is zero for z ≤ z₀."""
        # All three pieces of T are e^c (1 + z − c), with c the nearest logarithm in [low, high].
        nearest = z.clamp(self.low, self.high)
        value = nearest.exp() * (1 + z - nearest).clamp_min(0.0)
        # 1 + (low − 1) − low is not always zero in floating point.
        return torch.where(z > self.zero_point, value, 0.0)

    def to_z(self, y: Tensor) -> Tensor:
        """Return z = T⁻¹(y); on a closed scale it is z₀ for y ≤ 0."""
        # y = e^c (1 + z − c) solved for z, with e^c the y nearest to this one in [e^low, e^high]
        nearest = y.clamp(math.exp(self.low), math.exp(self.high))
        return nearest.log() + (y.clamp_min(0) if self.closed else y) / nearest - 1

    def log_slope(self, z: Tensor) -> Tensor:
        """Return log T′(z), which is constant below `low` and above `high`."""
        return z.clamp(self.low, self.high)

    def is_in_support(self, y: Tensor) -> Tensor:
        """Return which y are allowed, as a mask of y's shape.

        On a closed scale they are those from zero on, and on an open one all that are finite.
        """
        return y >= 0 if self.closed else y.isfinite()

    def moments_of_normals(self, means: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return E[y] and E[y²] for z ~ N(m, s²), of the shape of means m and scales s.

        Each is a sum over three ranges of z: the lower line, the exponential and the upper line.
        """
        infinite = torch.full_like(means, torch.inf)
        # The ends of the ranges, in standard deviations of z from its mean.
        a, b, c = ((end - means) / scales for end in (self.zero_point, self.low, self.high))
        below = _compute_line_moments(self.low, means, scales, a, b)
        above = _compute_line_moments(self.high, means, scales, c, infinite)
        # log E[e^{kz}; low ≤ z ≤ high]: e^{kz} turns N(m, s²) into N(m + k s², s²), times a factor.
        logs = [
            k * means
            + 0.5 * (k * scales) ** 2
            + log_normal_probability(b - k * scales, c - k * scales)
            for k in (1, 2)
        ]
        return below[0] + logs[0].exp() + above[0], below[1] + logs[1].exp() + above[1]


@final
@dataclass(frozen=True)
class Censored:
    """The function y = max(z, 0), for a model of y itself.

    It is applied to each value. The probability that the model gives to negative values becomes
    that of zero.
    """

    support: ClassVar[str] = "zero or positive"
    atom: ClassVar[float | None] = 0.0

    def to_y(self, z: Tensor) -> Tensor:
        """Return max(z, 0)."""
        return z.clamp_min(0.0)

    def to_z(self, y: Tensor) -> Tensor:
        """Return z = y, or zero for negative y."""
        return y.clamp_min(0.0)

    def log_slope(self, z: Tensor) -> Tensor:
        """Return zeros: the slope above zero is one."""
        return torch.zeros_like(z)

    def is_in_support(self, y: Tensor) -> Tensor:
        """Return which y are not negative, as a mask of y's shape."""
        return y >= 0

    def moments_of_normals(self, means: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return E[y] and E[y²] for z ~ N(m, s²), of the shape of means m and scales s."""
        t = means / scales
        share = ndtr(t)  # P(z > 0)
        height = (-0.5 * t * t - 0.5 * LOG_2PI).exp()  # the standard normal density at t
        first = means * share + scales * height
        second = (means**2 + scales**2) * share + means * scales * height
        return first, second


def _compute_line_moments(
    end: float, means: Tensor, scales: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """Return E[y; a ≤ t ≤ b] and E[y²; a ≤ t ≤ b] for y = e^end (1 + z − end) on one of the lines.

    Here z = m + s t with t ~ N(0, 1). means m, scales s, a and b have one shape, which is that of
    the results; a and b may be infinite.
    """
    level = 1 + means - end
    # ∫ φ, ∫ t φ and ∫ t² φ over [a, b], with φ the standard normal density; t φ(t) is 0 at infinity
    share = ndtr(b) - ndtr(a)
    phi_a, phi_b = ((-0.5 * t * t - 0.5 * LOG_2PI).exp() for t in (a, b))
    of_t = phi_a - phi_b
    of_t_squared = share + (
        torch.where(a.isinf(), 0.0, a * phi_a) - torch.where(b.isinf(), 0.0, b * phi_b)
    )
    first = level * share + scales * of_t
    second = level**2 * share + 2 * level * scales * of_t + scales**2 * of_t_squared
    return math.exp(end) * first, math.exp(2 * end) * second


def log_normal_probability(a: Tensor, b: Tensor) -> Tensor:
    """Return log(Φ(b) − Φ(a)) for a < b of one shape, without cancellation in either tail.

    Φ is the standard normal distribution function.
    """
    # An interval above zero is mirrored to [−b, −a], because Φ is close to one above zero.
    is_above = a > 0
    low = torch.where(is_above, -b, a)
    high = torch.where(is_above, -a, b)
    log_upper = log_ndtr(high)
    between: Tensor = log_upper + torch.log1p(-(log_ndtr(low) - log_upper).exp())
    return between
