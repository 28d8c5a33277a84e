"""A scalar continuous y whose log density is known pointwise: adaptive grids."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ssla._checks import level as checked_level
from ssla.likelihoods import Located
from ssla.likelihoods.support import Continuous, Real
from ssla.numerics import quadrature
from ssla.numerics.quadrature import Built, Regions
from ssla.predictive.predictive import Diagnostics, answer, not_nan, probabilities, scalar_targets
from ssla.predictive.spread import split_variance
from ssla.refit import LogDensity
from ssla.refit.increments import Increments

SPLINE = 1e-7  # of the mass, on a transformed support: log p falls exponentially there, faster than a coarse spline follows


@dataclass(frozen=True, eq=False)
class GridPredictive:
    """The normalised density exp(total(y)) / mass.

    `log_prob` evaluates the log density at y itself; mass, moments, cdf, quantiles and regions come from the grids
    (see `ssla.numerics.quadrature` for what they promise).
    """

    log_density: LogDensity
    support: Continuous
    pieces: list[Built]
    diagnostics: Diagnostics

    def _out(self, value: Tensor) -> Tensor:
        return value.to(self.log_density.like)

    @property
    def _rows(self) -> int:
        return self.log_density.marginal.mean.shape[0]

    def _gather(self, values: list[Tensor]) -> Tensor:
        """One tensor a piece -> all rows in their order."""
        out = torch.empty(self._rows, *values[0].shape[1:], dtype=values[0].dtype)
        for piece, value in zip(self.pieces, values, strict=True):
            out[piece.rows] = value
        return out

    @cached_property
    def _log_mass(self) -> Tensor:
        return self._gather([p.grid.log_mass for p in self.pieces])

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        if not isinstance(self.support, Real):
            return quadrature.mapped_moments(self._log_density, self.pieces, self.support.from_real)
        parts = [p.grid.moments for p in self.pieces]
        return self._gather([m for m, _ in parts]), self._gather([v for _, v in parts])

    def _log_density(self, z: Tensor, rows: Tensor) -> Tensor:
        """Of the support's real coordinate."""
        return self.log_density.at(self.support.from_real(z), rows).log + self.support.log_slope(z)

    @property
    def mean(self) -> Tensor:
        return self._out(self._moments[0])

    @property
    def variance(self) -> Tensor:
        return self._out(self._moments[1])

    @property
    def stddev(self) -> Tensor:
        return self._out(self._moments[1].sqrt())

    @cached_property
    def mode(self) -> Tensor:
        """The highest point of the density (on a transformed support: of the density of the transform)."""
        return self._out(self.support.from_real(self._gather([p.grid.mode for p in self.pieces])))

    @property
    def mass(self) -> Tensor:
        return self._out(self._log_mass.exp())

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        f, K = self.log_density.marginal
        return split_variance(self.log_density.likelihood, f, K, self.log_density.moves, self._moments[1])

    @property
    def epistemic(self) -> Tensor:
        return self._out(self._parts[0])

    @property
    def aleatoric(self) -> Tensor:
        return self._out(self._parts[1])

    def log_prob(self, y: Any) -> Tensor:
        """(N,) -> (N,); (N, k) -> (N, k)."""
        value, single = scalar_targets(y, self._rows)
        self.support.check(value.flatten(), 1)
        return self._out(answer(self.log_density.at(value).log - self._log_mass[:, None], single))

    def cdf(self, y: Any) -> Tensor:
        """P(Y ≤ y).  (N,) -> (N,); (N, k) -> (N, k)."""
        value, single = scalar_targets(y, self._rows)
        not_nan(value)
        z = self.support.to_real(value).clamp(-1e300, 1e300)
        return self._out(answer(self._gather([p.grid.cdf(z[p.rows]) for p in self.pieces]), single))

    def icdf(self, q: Any) -> Tensor:
        """Quantiles: one number -> (N,); (k,) -> (N, k)."""
        value, single = probabilities(q)
        z = self._gather([p.grid.icdf(value.expand(p.rows.numel(), -1)) for p in self.pieces])
        return self._out(answer(self.support.from_real(z), single))

    def interval(self, level: float = 0.95) -> Tensor:
        """Central interval (N, 2)."""
        tail = (1 - checked_level(level)) / 2
        return self.icdf(torch.tensor([tail, 1 - tail], dtype=torch.float64))

    def hdr(self, level: float = 0.95) -> Regions:
        """The smallest set of that probability, a union of intervals: lower, upper (N, R), padded with NaN.

        On a transformed support, the smallest in the transform.
        """
        parts = [p.grid.hdr(checked_level(level)) for p in self.pieces]
        most = max(part.lower.shape[1] for part in parts)

        def pad(value: Tensor) -> Tensor:
            return torch.nn.functional.pad(value, (0, most - value.shape[1]), value=torch.nan)

        lower = self._gather([pad(part.lower) for part in parts])
        upper = self._gather([pad(part.upper) for part in parts])
        return Regions(self._out(self.support.from_real(lower)), self._out(self.support.from_real(upper)))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, N), by inversion."""
        u = torch.rand(self._rows, n, dtype=torch.float64, generator=generator).clamp(1e-12, 1 - 1e-12)
        z = self._gather([p.grid.icdf(u[p.rows]) for p in self.pieces])
        return self._out(self.support.from_real(z).mT)

    def increments(self, y: Any) -> Increments:
        """The three increments of the un-normalised log density, of log_prob's shape."""
        value, single = scalar_targets(y, self._rows)
        self.support.check(value.flatten(), 1)
        parts = self.log_density(value)
        return parts.map(lambda part: self._out(answer(part, single)))


def grid_predictive(log_density: LogDensity, support: Continuous, refit: str) -> GridPredictive:
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

    located = log_density.likelihood
    assert isinstance(located, Located)
    accuracy = quadrature.Accuracy(spline=None if isinstance(support, Real) else SPLINE)
    pieces = quadrature.build(evaluate, *located.guess(f, K), accuracy)
    inaccurate = torch.zeros_like(fallback)
    for rows, grid in pieces:
        inaccurate[rows] = ~grid.accurate
    return GridPredictive(log_density, support, pieces, Diagnostics(refit, fallback, unconverged, inaccurate))
