"""An angle y whose log density is known pointwise: equally spaced angles around the circle."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from ssla.maths.quadrature import Regions, RowCircle, build_circles, wrap_angles
from ssla.predictive.law import PointwiseLaw, gather_regions, gather_rows
from ssla.predictive.predictive import Diagnostics, Predictive
from ssla.predictive.spread import compute_variance_parts
from ssla.refit import LogDensity
from ssla.refit.increments import Increments


@final
@dataclass(frozen=True, eq=False)
class CircularLaw(PointwiseLaw):
    """The normalised density exp(total(y)) / mass of an angle in [−π, π).

    Other y are first wrapped into [−π, π). The mean is the circular mean, the direction of
    E exp(iy); it has no meaning where that is zero. The variance is E d², with d the angle between
    y and the mean: a narrow distribution has nearly the variance that it has on a line. cdf and
    icdf cut the circle at −π. interval cuts it opposite the mean. hdr is a union of arcs.
    """

    pieces: list[RowCircle]  # blocks of rows, each with angles around the circle

    kind = "circular"

    @cached_property
    def _log_mass(self) -> Tensor:
        """Return the logarithm of the mass (N,)."""
        return gather_rows(self.pieces, [piece.circle.log_mass for piece in self.pieces])

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """Return the circular mean and variance, (N,) each."""
        return (
            gather_rows(self.pieces, [piece.circle.mean for piece in self.pieces]),
            gather_rows(self.pieces, [piece.circle.variance for piece in self.pieces]),
        )

    @cached_property
    def mode(self) -> Tensor:
        """Return the angle of highest density (N,)."""
        return gather_rows(self.pieces, [piece.circle.mode for piece in self.pieces])

    @cached_property
    def _variance_parts(self) -> tuple[Tensor, Tensor]:
        """Return the epistemic and the aleatoric part of the variance, (N,) each.

        The aleatoric part is E_f Var[y|f], but at most the variance. Without a refit it is all of
        the variance.
        """
        aleatoric = self.variance
        log_density = self.log_density
        if log_density.outputs_move:
            _, noise = compute_variance_parts(log_density.likelihood, *log_density.marginal)
            aleatoric = torch.minimum(noise, self.variance)
        return self.variance - aleatoric, aleatoric

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the normalised log density of angles: (N, k) -> (N, k)."""
        return self.log_density.density_at(wrap_angles(y)).log - self._log_mass[:, None]

    def cdf(self, y: Tensor) -> Tensor:
        """Return P(−π ≤ Y ≤ y), (N, k) -> (N, k); 0 below −π and 1 above π."""
        angles = y.clamp(-torch.pi, torch.pi)
        return gather_rows(
            self.pieces, [piece.circle.cdf(angles[piece.rows]) for piece in self.pieces]
        )

    def icdf(self, q: Tensor) -> Tensor:
        """Return the quantiles at q (k,): angles (N, k)."""
        return self._compute_quantiles(q.expand(self.rows, -1))

    def _compute_quantiles(self, q: Tensor) -> Tensor:
        """Return the quantiles at probabilities q that differ by row: (N, k) -> (N, k)."""
        return gather_rows(self.pieces, [piece.circle.icdf(q[piece.rows]) for piece in self.pieces])

    def interval(self, level: float) -> Tensor:
        """Return the central interval (N, 2), with the circle cut opposite the mean.

        Both ends are within π of the mean, so one of them may lie outside [−π, π). An angle y is
        inside if mean + d is, where d in [−π, π) is the angle from the mean to y.
        """
        tail = (1 - level) / 2
        mean = self.mean[:, None]
        cut = gather_rows(
            self.pieces,
            [piece.circle.cdf(wrap_angles(mean[piece.rows] - torch.pi)) for piece in self.pieces],
        )
        # The cdf counts from −π. Counted from the cut, probability q is at q + cdf(cut), modulo 1.
        ends = self._compute_quantiles(
            (cut + torch.tensor([tail, 1 - tail], dtype=torch.float64)) % 1
        )
        return mean + wrap_angles(ends - mean)

    def hdr(self, level: float) -> Regions:
        """Return the smallest region with probability `level`: a union of arcs in [−π, π].

        An arc across ±π is given as two arcs.
        """
        return gather_regions(self.pieces, [piece.circle.hdr(level) for piece in self.pieces])

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw n angles for each input (n, N), by inversion of the cdf."""
        u = torch.rand(self.rows, n, dtype=torch.float64, generator=generator)
        return self._compute_quantiles(u).mT

    def increments(self, y: Tensor) -> Increments:
        """Return the increments of the refit at angles y (N, k), each of shape (N, k)."""
        return self.log_density(wrap_angles(y))


def make_circular_predictive(log_density: LogDensity, refit: str) -> Predictive:
    """Return the predictive of an angle, from integrals of the density around the circle.

    log_density: of the angles at each input. refit: the name of the rung. Rows whose integral does
    not reach its tolerance are flagged as inaccurate.
    """
    count = log_density.marginal.mean.shape[0]
    fallback, unconverged, inaccurate = torch.zeros(3, count, dtype=torch.bool).unbind(0)

    def evaluate_and_flag(y: Tensor, rows: Tensor) -> Tensor:
        """Return the log density at y (m, k) of rows (m,): (m, k).

        The flags `fallback` and `unconverged` of these rows are set where some y of them has the
        flag.
        """
        density = log_density.density_at(y, rows)
        fallback[rows] |= density.fallback.any(1)
        unconverged[rows] |= ~density.converged.all(1)
        return density.log

    pieces = build_circles(evaluate_and_flag, count)
    for rows, circle in pieces:
        inaccurate[rows] = ~circle.accurate
    flags = Diagnostics(refit, fallback, unconverged, inaccurate)
    return Predictive(CircularLaw(log_density, pieces), log_density.like, flags)
