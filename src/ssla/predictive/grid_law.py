"""A scalar continuous y whose log density is known pointwise: adaptive grids."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from ssla.likelihoods.support import Continuous, Real
from ssla.maths import quadrature
from ssla.maths.quadrature import Regions, RowGrid
from ssla.predictive.law import PointwiseLaw, gather_regions, gather_rows
from ssla.predictive.predictive import Diagnostics, Predictive
from ssla.refit import LogDensity

# Error of a spline, as a share of the mass, on a transformed support: log p falls exponentially
# there, faster than a coarse spline follows. The number is a guess.
SPLINE = 1e-7
LARGEST_FINITE = 1e300  # takes the place of an infinite z, because a grid needs finite values
LEAST_PROBABILITY = 1e-12  # of a draw, and that of the complement


@final
@dataclass(frozen=True, eq=False)
class GridLaw(PointwiseLaw):
    """The normalised density exp(total(y)) / mass of one continuous target.

    `log_prob` evaluates the log density at y itself. Mass, moments, cdf, quantiles and regions come
    from the grids; `ssla.maths.quadrature` states their accuracy. The nodes of a grid are values of
    z, the support's real coordinate.
    """

    support: Continuous  # of y
    pieces: list[RowGrid]  # blocks of rows, each with its nodes of z

    kind = "scalar"

    @cached_property
    def _log_mass(self) -> Tensor:
        """Return the logarithm of the mass (N,)."""
        return gather_rows(self.pieces, [piece.grid.log_mass for piece in self.pieces])

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of y, (N,) each."""
        # The grid has the moments of z. They are those of y only where z = y.
        if not isinstance(self.support, Real):
            return quadrature.mapped_moments(
                self._log_density_of_z, self.pieces, self.support.from_real
            )
        means, variances = zip(*(piece.grid.moments for piece in self.pieces), strict=True)
        return gather_rows(self.pieces, means), gather_rows(self.pieces, variances)

    def _log_density_of_z(self, z: Tensor, rows: Tensor) -> Tensor:
        """Return the un-normalised log density of z, log p(y) + log dy/dz: (m, k) -> (m, k).

        rows (m,): the inputs to which the rows of z belong.
        """
        return self.log_density.density_at(
            self.support.from_real(z), rows
        ).log + self.support.log_slope(z)

    @cached_property
    def mode(self) -> Tensor:
        """Return the y (N,) at which the density of z is highest."""
        return self.support.from_real(
            gather_rows(self.pieces, [piece.grid.mode for piece in self.pieces])
        )

    def check(self, y: Tensor) -> None:
        """Raise ValueError where y (N, k) is outside the support."""
        self.support.check(y.flatten(), 1)

    def cdf(self, y: Tensor) -> Tensor:
        """Return P(Y ≤ y), (N, k) -> (N, k); y may be infinite."""
        z = self.support.to_real(y).clamp(-LARGEST_FINITE, LARGEST_FINITE)
        return gather_rows(self.pieces, [piece.grid.cdf(z[piece.rows]) for piece in self.pieces])

    def icdf(self, q: Tensor) -> Tensor:
        """Return the quantiles at q (k,): (N, k)."""
        return self._compute_quantiles(q.expand(self.rows, -1))

    def _compute_quantiles(self, q: Tensor) -> Tensor:
        """Return the quantiles at probabilities q that differ by row: (N, k) -> (N, k)."""
        z = gather_rows(self.pieces, [piece.grid.icdf(q[piece.rows]) for piece in self.pieces])
        return self.support.from_real(z)

    def hdr(self, level: float) -> Regions:
        """Return the smallest region of y with probability `level`, a union of intervals."""
        # The slope makes the region the smallest in y; without it, it would be so in z.
        slope = None if isinstance(self.support, Real) else self.support.log_slope
        z = gather_regions(self.pieces, [piece.grid.hdr(level, slope) for piece in self.pieces])
        return Regions(*map(self.support.from_real, z))

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw n values for each input (n, N), by inversion of the cdf."""
        u = torch.rand(self.rows, n, dtype=torch.float64, generator=generator)
        # The quantiles at 0 and 1 may be infinite.
        return self._compute_quantiles(u.clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)).mT


def make_grid_predictive(log_density: LogDensity, support: Continuous, refit: str) -> Predictive:
    """Return the predictive of one continuous target, by a grid over y for each row.

    log_density: of y at each input. support: of y. refit: the name of the rung. Rows whose integral
    does not reach its tolerance are flagged as inaccurate.
    """
    f, K = log_density.marginal
    fallback, unconverged, inaccurate = torch.zeros(3, len(f), dtype=torch.bool).unbind(0)

    def evaluate_and_flag(z: Tensor, rows: Tensor) -> Tensor:
        """Return the log density of z (m, k) in rows (m,): (m, k).

        The flags `fallback` and `unconverged` of these rows are set where some y of them has the
        flag.
        """
        density = log_density.density_at(support.from_real(z), rows)
        # Most evaluations have nothing to flag; `any` is cheaper than writing to rows.
        if bool(density.fallback.any()):
            fallback[rows] |= density.fallback.any(1)
        if not bool(density.converged.all()):
            unconverged[rows] |= ~density.converged.all(1)
        return density.log if isinstance(support, Real) else density.log + support.log_slope(z)

    accuracy = quadrature.Accuracy(spline=None if isinstance(support, Real) else SPLINE)
    centre, scale = log_density.likelihood.locate_target(f, K)
    pieces = quadrature.build_grids(evaluate_and_flag, centre, scale, accuracy)
    for rows, grid in pieces:
        inaccurate[rows] = ~grid.accurate
    flags = Diagnostics(refit, fallback, unconverged, inaccurate)
    return Predictive(GridLaw(log_density, support, pieces), log_density.like, flags)
