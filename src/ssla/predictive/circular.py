"""An angle y whose log density is known pointwise: equally spaced angles around the circle."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from ssla.maths.quadrature import Around, Regions, build_circles, wrapped
from ssla.predictive.law import Law, gathered, gathered_regions
from ssla.predictive.predictive import Diagnostics, Predictive
from ssla.predictive.spread import total_variance
from ssla.refit import LogDensity
from ssla.refit.increments import Increments


@final
@dataclass(frozen=True, eq=False)
class CircularLaw(Law):
    """The normalised density exp(total(y)) / mass over [−π, π); another y counts as the same angle
    in there.

    mean is the circular mean, the direction of E exp(iy) (without meaning where that is zero);
    variance is E d² and d the angle between y and the mean, so that a narrow distribution has the
    variance that it has on a line. cdf and icdf cut the circle at −π. interval cuts it opposite the
    mean, and hdr is a union of arcs.
    """

    log_density: LogDensity
    pieces: list[Around]

    kind = "circular"

    @property
    def rows(self) -> int:
        return self.log_density.marginal.mean.shape[0]

    @cached_property
    def _log_mass(self) -> Tensor:
        return gathered(self.pieces, [p.circle.log_mass for p in self.pieces])

    @cached_property
    def mean(self) -> Tensor:
        return gathered(self.pieces, [p.circle.mean for p in self.pieces])

    @cached_property
    def variance(self) -> Tensor:
        return gathered(self.pieces, [p.circle.variance for p in self.pieces])

    @cached_property
    def mode(self) -> Tensor:
        return gathered(self.pieces, [p.circle.mode for p in self.pieces])

    @property
    def mass(self) -> Tensor:
        return self._log_mass.exp()

    @property
    def epistemic(self) -> Tensor:
        """What the variance exceeds the noise by."""
        return self.variance - self.aleatoric

    @cached_property
    def aleatoric(self) -> Tensor:
        """E_f Var[y|f], or the variance where that is less."""
        if not self.log_density.moves:
            return self.variance
        return torch.minimum(
            total_variance(self.log_density.likelihood, *self.log_density.marginal)[1],
            self.variance,
        )

    def log_prob(self, y: Tensor) -> Tensor:
        return self.log_density.at(wrapped(y)).log - self._log_mass[:, None]

    def cdf(self, y: Tensor) -> Tensor:
        """P(−π ≤ Y ≤ y); 0 below −π and 1 above π."""
        value = y.clamp(-torch.pi, torch.pi)
        return gathered(self.pieces, [p.circle.cdf(value[p.rows]) for p in self.pieces])

    def icdf(self, q: Tensor) -> Tensor:
        return self._quantiles(q.expand(self.rows, -1))

    def _quantiles(self, q: Tensor) -> Tensor:
        """(N, k) -> (N, k)."""
        return gathered(self.pieces, [p.circle.icdf(q[p.rows]) for p in self.pieces])

    def interval(self, level: float) -> Tensor:
        """The central interval of the circle cut opposite its mean (N, 2).

        Both ends are within π of the mean, so one of them may lie outside [−π, π): y is inside if
        mean + d is, where d is the angle from the mean to y.
        """
        tail = (1 - level) / 2
        mean = self.mean[:, None]
        cut = gathered(
            self.pieces, [p.circle.cdf(wrapped(mean[p.rows] - torch.pi)) for p in self.pieces]
        )
        ends = self._quantiles((cut + torch.tensor([tail, 1 - tail], dtype=torch.float64)) % 1)
        return mean + wrapped(ends - mean)

    def hdr(self, level: float) -> Regions:
        """A union of arcs in [−π, π]. An arc across ±π is given as two."""
        return gathered_regions(self.pieces, [p.circle.hdr(level) for p in self.pieces])

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """By inversion."""
        return self._quantiles(
            torch.rand(self.rows, n, dtype=torch.float64, generator=generator)
        ).mT

    def increments(self, y: Tensor) -> Increments:
        return self.log_density(wrapped(y))


def circular_predictive(log_density: LogDensity, refit: str) -> Predictive:
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
    flags = Diagnostics(refit, fallback, unconverged, inaccurate)
    return Predictive(CircularLaw(log_density, pieces), log_density.like, flags)
