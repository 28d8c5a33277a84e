"""A scalar continuous y whose log density is known pointwise: adaptive grids."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from ssla.likelihoods.support import Continuous, Real
from ssla.maths import quadrature
from ssla.maths.quadrature import Built, Regions
from ssla.predictive.law import PointwiseLaw, gathered, gathered_regions
from ssla.predictive.predictive import Diagnostics, Predictive
from ssla.refit import LogDensity

# of the mass, on a transformed support: log p falls exponentially there, faster than a coarse
# spline follows
SPLINE = 1e-7


@final
@dataclass(frozen=True, eq=False)
class GridLaw(PointwiseLaw):
    """The normalised density exp(total(y)) / mass.

    `log_prob` evaluates the log density at y itself; mass, moments, cdf, quantiles and regions come
    from the grids (see `ssla.maths.quadrature` for their accuracy).
    """

    support: Continuous
    pieces: list[Built]

    kind = "scalar"

    @cached_property
    def _log_mass(self) -> Tensor:
        return gathered(self.pieces, [p.grid.log_mass for p in self.pieces])

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        if not isinstance(self.support, Real):
            return quadrature.mapped_moments(self._log_density, self.pieces, self.support.from_real)
        means, variances = zip(*(p.grid.moments for p in self.pieces), strict=True)
        return gathered(self.pieces, means), gathered(self.pieces, variances)

    def _log_density(self, z: Tensor, rows: Tensor) -> Tensor:
        """Of the support's real coordinate."""
        return self.log_density.at(self.support.from_real(z), rows).log + self.support.log_slope(z)

    @cached_property
    def mode(self) -> Tensor:
        """The highest point of the density (on a transformed support: of the density of the
        transform).
        """
        return self.support.from_real(gathered(self.pieces, [p.grid.mode for p in self.pieces]))

    def check(self, y: Tensor) -> None:
        self.support.check(y.flatten(), 1)

    def cdf(self, y: Tensor) -> Tensor:
        z = self.support.to_real(y).clamp(-1e300, 1e300)
        return gathered(self.pieces, [p.grid.cdf(z[p.rows]) for p in self.pieces])

    def icdf(self, q: Tensor) -> Tensor:
        return self._quantiles(q.expand(self.rows, -1))

    def _quantiles(self, q: Tensor) -> Tensor:
        """(N, k) -> (N, k)."""
        return self.support.from_real(
            gathered(self.pieces, [p.grid.icdf(q[p.rows]) for p in self.pieces])
        )

    def hdr(self, level: float) -> Regions:
        """A union of intervals, the smallest in y."""
        slope = None if isinstance(self.support, Real) else self.support.log_slope
        lower, upper = gathered_regions(
            self.pieces, [p.grid.hdr(level, slope) for p in self.pieces]
        )
        return Regions(self.support.from_real(lower), self.support.from_real(upper))

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """By inversion."""
        u = torch.rand(self.rows, n, dtype=torch.float64, generator=generator).clamp(
            1e-12, 1 - 1e-12
        )
        return self._quantiles(u).mT


def grid_predictive(log_density: LogDensity, support: Continuous, refit: str) -> Predictive:
    """Build the grids of all rows."""
    f, K = log_density.marginal
    fallback = torch.zeros(f.shape[0], dtype=torch.bool)
    unconverged = torch.zeros_like(fallback)

    def evaluate(z: Tensor, rows: Tensor) -> Tensor:
        density = log_density.at(support.from_real(z), rows)
        if bool(density.fallback.any()):
            fallback[rows] |= density.fallback.any(1)
        if not bool(density.converged.all()):
            unconverged[rows] |= ~density.converged.all(1)
        return density.log + support.log_slope(z) if not isinstance(support, Real) else density.log

    accuracy = quadrature.Accuracy(spline=None if isinstance(support, Real) else SPLINE)
    pieces = quadrature.build(evaluate, *log_density.likelihood.guess(f, K), accuracy)
    inaccurate = torch.zeros_like(fallback)
    for rows, grid in pieces:
        inaccurate[rows] = ~grid.accurate
    flags = Diagnostics(refit, fallback, unconverged, inaccurate)
    return Predictive(GridLaw(log_density, support, pieces), log_density.like, flags)
