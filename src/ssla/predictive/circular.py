"""An angle y whose log density is known pointwise: equally spaced angles around the circle."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ssla._checks import level as checked_level
from ssla.numerics.quadrature import Around, Regions, build_circles, wrapped
from ssla.predictive.predictive import Diagnostics, answer, checked, not_nan, probabilities, scalar_targets
from ssla.predictive.spread import total_variance
from ssla.refit import LogDensity
from ssla.refit.increments import Increments


@dataclass(frozen=True, eq=False)
class CircularPredictive:
    """The normalised density exp(total(y)) / mass over [−π, π); another y counts as the same angle in there.

    mean is the circular mean, the direction of E exp(iy) (without meaning where that is zero); variance is E d² and d the angle
    between y and the mean, so that a narrow distribution has the variance that it has on a line. cdf and icdf cut the circle at
    −π. interval cuts it opposite the mean, and hdr is a union of arcs.
    """

    log_density: LogDensity
    pieces: list[Around]
    diagnostics: Diagnostics

    kind = "circular"

    def _out(self, value: Tensor) -> Tensor:
        return value.to(self.log_density.like)

    @property
    def _rows(self) -> int:
        return self.log_density.marginal.mean.shape[0]

    def _gather(self, values: list[Tensor]) -> Tensor:
        out = torch.empty(self._rows, *values[0].shape[1:], dtype=values[0].dtype)
        for piece, value in zip(self.pieces, values, strict=True):
            out[piece.rows] = value
        return out

    @cached_property
    def _log_mass(self) -> Tensor:
        return self._gather([p.circle.log_mass for p in self.pieces])

    @cached_property
    def _mean(self) -> Tensor:
        return self._gather([p.circle.mean for p in self.pieces])

    @cached_property
    def _variance(self) -> Tensor:
        return self._gather([p.circle.variance for p in self.pieces])

    @property
    def mean(self) -> Tensor:
        return self._out(self._mean)

    @property
    def variance(self) -> Tensor:
        return self._out(self._variance)

    @property
    def stddev(self) -> Tensor:
        return self._out(self._variance.sqrt())

    @cached_property
    def mode(self) -> Tensor:
        return self._out(self._gather([p.circle.mode for p in self.pieces]))

    @property
    def mass(self) -> Tensor:
        return self._out(self._log_mass.exp())

    @cached_property
    def _noise(self) -> Tensor:
        if not self.log_density.moves:
            return self._variance
        return torch.minimum(total_variance(self.log_density.likelihood, *self.log_density.marginal)[1], self._variance)

    @property
    def epistemic(self) -> Tensor:
        """What the variance exceeds the noise by."""
        return self._out(self._variance - self._noise)

    @property
    def aleatoric(self) -> Tensor:
        """E_f Var[y|f], or the variance where that is less."""
        return self._out(self._noise)

    def log_prob(self, y: Any) -> Tensor:
        """(N,) -> (N,); (N, k) -> (N, k)."""
        value, single = scalar_targets(y, self._rows)
        return self._out(answer(self.log_density.at(wrapped(checked(value))).log - self._log_mass[:, None], single))

    def cdf(self, y: Any) -> Tensor:
        """P(−π ≤ Y ≤ y); 0 below −π and 1 above π.  (N,) -> (N,); (N, k) -> (N, k)."""
        value, single = scalar_targets(y, self._rows)
        not_nan(value)
        value = value.clamp(-torch.pi, torch.pi)
        return self._out(answer(self._gather([p.circle.cdf(value[p.rows]) for p in self.pieces]), single))

    def _icdf(self, q: Tensor) -> Tensor:
        """(N, k) -> (N, k)."""
        return self._gather([p.circle.icdf(q[p.rows]) for p in self.pieces])

    def icdf(self, q: Any) -> Tensor:
        """The y with cdf(y) = q: one number -> (N,); (k,) -> (N, k)."""
        value, single = probabilities(q)
        return self._out(answer(self._icdf(value.expand(self._rows, -1)), single))

    def interval(self, level: float = 0.95) -> Tensor:
        """The central interval of the circle cut opposite its mean (N, 2).

        Both ends are within π of the mean, so one of them may lie outside [−π, π): y is inside if mean + d is, where d is the
        angle from the mean to y.
        """
        tail = (1 - checked_level(level)) / 2
        mean = self._mean[:, None]
        cut = self._gather([p.circle.cdf(wrapped(mean[p.rows] - torch.pi)) for p in self.pieces])
        ends = self._icdf((cut + torch.tensor([tail, 1 - tail], dtype=torch.float64)) % 1)
        return self._out(mean + wrapped(ends - mean))

    def hdr(self, level: float = 0.95) -> Regions:
        """The smallest set of that probability, a union of arcs in [−π, π]: lower, upper (N, R), padded with NaN.

        An arc across ±π is given as two.
        """
        parts = [p.circle.hdr(checked_level(level)) for p in self.pieces]
        most = max(part.lower.shape[1] for part in parts)

        def whole(ends: list[Tensor]) -> Tensor:
            pad = torch.nn.functional.pad
            return self._out(self._gather([pad(end, (0, most - end.shape[1]), value=torch.nan) for end in ends]))

        return Regions(whole([part.lower for part in parts]), whole([part.upper for part in parts]))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, N), by inversion."""
        u = torch.rand(self._rows, n, dtype=torch.float64, generator=generator)
        return self._out(self._icdf(u).mT)

    def increments(self, y: Any) -> Increments:
        """The three increments of the un-normalised log density, of log_prob's shape."""
        value, single = scalar_targets(y, self._rows)
        parts = self.log_density(wrapped(checked(value)))
        return parts.map(lambda part: self._out(answer(part, single)))


def circular_predictive(log_density: LogDensity, refit: str) -> CircularPredictive:
    """Integrate the density of all rows around the circle."""
    count = log_density.marginal.mean.shape[0]
    fallback, unconverged, inaccurate = torch.zeros(3, count, dtype=torch.bool).unbind(0)

    def evaluate(y: Tensor, rows: Tensor) -> Tensor:
        density = log_density.at(y, rows)
        fallback[rows] |= density.fallback.any(1)
        unconverged[rows] |= ~density.converged.all(1)
        return density.log

    pieces = build_circles(evaluate, count)
    for rows, circle in pieces:
        inaccurate[rows] = ~circle.accurate
    return CircularPredictive(log_density, pieces, Diagnostics(refit, fallback, unconverged, inaccurate))
