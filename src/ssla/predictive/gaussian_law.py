"""Closed forms: Gaussian noise of known size needs no grid.

Σ (C, C) is the covariance of the noise, K (N, C, C) that of the outputs, and D = C the number of
targets. ASSLA is the rung without a refit, whose mass is below 1 (docs/mathematics.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.special import gammainc, ndtr, ndtri

from ssla._checks import in_plain_torch
from ssla.likelihoods.likelihood import LOG_2PI
from ssla.maths.quadrature import Regions
from ssla.predictive.law import Law
from ssla.predictive.predictive import shape_vector_targets
from ssla.priors import EXACT
from ssla.refit import LogDensity
from ssla.refit.increments import Increments
from ssla.values import Marginal

BISECTIONS = 100  # of a quantile: the bracket is halved to double precision


class Ellipsoid(NamedTuple):
    """The region {y: (y − centre)ᵀ covariance⁻¹ (y − centre) ≤ squared_radius} of each row."""

    centre: Tensor  # (N, D)
    covariance: Tensor  # (N, D, D)
    squared_radius: float

    @in_plain_torch
    def contains(self, y: Any) -> Tensor:
        """Tell which y are inside: (N, D) -> (N,) bool; (N, k, D) -> (N, k).

        Raises ValueError for other shapes.
        """
        rows, size = self.centre.shape
        value = shape_vector_targets(y, rows, size).to(self.centre.device)
        several = value if value.dim() == 3 else value.unsqueeze(1)
        residual = (several - self.centre.double().unsqueeze(1)).mT  # (N, D, k)
        factor = torch.linalg.cholesky(self.covariance.double())
        # With covariance = L Lᵀ, the quadratic form is ‖L⁻¹(y − centre)‖².
        white: Tensor = torch.linalg.solve_triangular(factor, residual, upper=False)
        inside = (white**2).sum(1) <= self.squared_radius
        return inside if value.dim() == 3 else inside.squeeze(1)


@final
@dataclass(frozen=True, eq=False)
class GaussianLaw(Law):
    """The law N(f̂, Σ + K) of y for a refit, and N(f̂, Σ) without one; of one target or D of them.

    The mass of a refit and of the plug-in is exactly 1; that of ASSLA is |I + Σ⁻¹K|^(−½). Under the
    conventions other than the exact one, the mass is the integral of the increments.
    """

    log_density: LogDensity
    noise: Tensor  # Σ (C, C)
    loses_mass: bool  # ASSLA, whose mass is below 1
    convention: str = EXACT
    # the Gaussian of y where the prior multiplies the likelihood's own predictive (the additive
    # convention): see `multiply_by_prior`; None: the one above
    moved: Marginal | None = None

    @property
    def kind(self) -> str:
        """Return "scalar" for one target, "vector" for several."""
        return "scalar" if self.noise.shape[0] == 1 else "vector"

    @property
    def rows(self) -> int:
        """Return N, the number of inputs."""
        return self._mean.shape[0]

    def _drop_single_target(self, value: Tensor) -> Tensor:
        """Return a value (N, D, …) without the dimension of the targets if there is one target.

        (N, 1, …) becomes (N, …). A value of several targets is returned unchanged.
        """
        return value.squeeze(1) if self.kind == "scalar" else value

    @property
    def _mean(self) -> Tensor:
        """Return the mean (N, D), also for one target (D = 1)."""
        return self.log_density.marginal.mean if self.moved is None else self.moved.mean

    @cached_property
    def covariance(self) -> Tensor:
        """Return the covariance of y (N, D, D)."""
        if self.moved is not None:
            return self.moved.covariance
        K = self.log_density.marginal.covariance
        return self.noise + K if self.log_density.outputs_move else self.noise.expand_as(K)

    @cached_property
    def _scale(self) -> Tensor:
        """Return the standard deviations of the targets (N, D), also for one target (D = 1)."""
        return self.covariance.diagonal(dim1=-2, dim2=-1).sqrt()

    @property
    def mean(self) -> Tensor:
        """Return E[y], (N,) or (N, D)."""
        return self._drop_single_target(self._mean)

    @property
    def mode(self) -> Tensor:
        """Return the mean, where a Gaussian is highest."""
        return self.mean

    @property
    def variance(self) -> Tensor:
        """Return the variance of each target, (N,) or (N, D)."""
        return self._drop_single_target(self._scale**2)

    @property
    def stddev(self) -> Tensor:
        """Return the standard deviation of each target, (N,) or (N, D)."""
        return self._drop_single_target(self._scale)

    @cached_property
    def _epistemic_variance(self) -> Tensor:
        """Return the epistemic part of the variance of each target (N, D), also for one target.

        This part is the diagonal of K, and zero without a refit. Under the additive convention it
        is the share K/(Σ + K) of the variance.
        """
        K = self.log_density.marginal.covariance.diagonal(dim1=-2, dim2=-1)
        if not self.log_density.outputs_move:
            return torch.zeros_like(K)
        return K if self.moved is None else self._scale**2 * K / (K + self.noise.diagonal())

    @property
    def epistemic(self) -> Tensor:
        """Return the epistemic part of the variance, (N,) or (N, D)."""
        return self._drop_single_target(self._epistemic_variance)

    @property
    def aleatoric(self) -> Tensor:
        """Return the variance of the noise, (N,) or (N, D)."""
        noise = self.noise.diagonal().expand_as(self._mean)
        return self._drop_single_target(
            noise if self.moved is None else self._scale**2 - self._epistemic_variance
        )

    @cached_property
    def mass(self) -> Tensor:
        """Return the integral over y of the un-normalised density (N,); the class says which."""
        if self.convention != EXACT:
            # Both densities are Gaussian in y with the same mean and covariance, so the integral is
            # the un-normalised density at the mean over the normalised one.
            peak = self.log_density.density_at(self.mean).log
            factor: Tensor = torch.linalg.cholesky(self.covariance)
            half_logdet = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            return (peak + half_logdet + 0.5 * self._mean.shape[1] * LOG_2PI).exp()
        if not self.loses_mass:
            return torch.ones(self.rows, dtype=torch.float64)

        # |I + Σ⁻¹K|^(−½) from the eigenvalues of L⁻¹KL⁻ᵀ, with Σ = LLᵀ
        factor = torch.linalg.cholesky(self.noise)
        half = torch.linalg.solve_triangular(
            factor, self.log_density.marginal.covariance, upper=False
        )
        white = torch.linalg.solve_triangular(factor, half.mT, upper=False)
        spectrum: Tensor = torch.linalg.eigvalsh(white)
        return (-0.5 * torch.log1p(spectrum.clamp_min(0)).sum(-1)).exp()

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log density of y.

        For one target (N, k) -> (N, k); for D targets (N, D) -> (N,) and (N, k, D) -> (N, k).
        """
        if self.kind == "scalar":
            z = (y - self._mean) / self._scale
            return -0.5 * (z * z + LOG_2PI) - self._scale.log()
        factor: Tensor = torch.linalg.cholesky(self.covariance)

        # For y (N, k, D), mean and factor get a dimension of size one for the k values.
        ones = [1] * (y.dim() - 2)
        mean = self._mean.reshape(len(y), *ones, self._mean.shape[1])
        residual = (y - mean).unsqueeze(-1)
        broadcast = factor.reshape(len(y), *ones, *factor.shape[1:])

        # With covariance = L Lᵀ, the quadratic form is ‖L⁻¹(y − mean)‖².
        white: Tensor = torch.linalg.solve_triangular(
            broadcast.expand(*residual.shape[:-2], *factor.shape[1:]), residual, upper=False
        )
        half_logdet = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1).reshape(len(y), *ones)
        return -0.5 * ((white**2).sum((-2, -1)) + self._mean.shape[1] * LOG_2PI) - half_logdet

    def cdf(self, y: Tensor) -> Tensor:
        """Return P(Y_d ≤ y_d) of each target, of y's shape."""
        # For y (N, k, D), mean and scale get a dimension for the k values.
        index = (slice(None), *[None] * (y.dim() - 2))
        below: Tensor = ndtr((y - self._mean[index]) / self._scale[index])
        return below

    def icdf(self, q: Tensor) -> Tensor:
        """Return the quantiles at probabilities q (k,): (N, k) or (N, D, k)."""
        quantiles = self._mean.unsqueeze(-1) + self._scale.unsqueeze(-1) * ndtri(q)
        return self._drop_single_target(quantiles)

    def hdr(self, level: float) -> Regions | Ellipsoid:
        """Return the smallest region with probability `level`.

        The result is an interval for one target, and an ellipsoid for D targets.
        """
        if self.kind == "scalar":
            ends = self.interval(level)
            return Regions(ends[:, :1], ends[:, 1:])
        return Ellipsoid(
            self._mean, self.covariance, find_chi_square_quantile(level, self._mean.shape[1])
        )

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw n values of y for each input: (n, N) or (n, N, D)."""
        white = torch.randn(n, *self._mean.shape, dtype=torch.float64, generator=generator)
        factor = torch.linalg.cholesky(self.covariance)
        draws: Tensor = self._mean + (factor @ white.unsqueeze(-1)).squeeze(-1)
        return draws.squeeze(-1) if self.kind == "scalar" else draws

    def increments(self, y: Tensor) -> Increments:
        """Return the increments of the refit at y, each of log_prob's shape."""
        return self.log_density(y)


def multiply_by_prior(noise: Tensor, marginal: Marginal, response: Marginal) -> Marginal:
    """Return the Gaussian of y under the additive convention, mean (N, C) and covariance (N, C, C).

    This Gaussian is the likelihood's predictive N(f̂, A), with A = Σ + K, times the change of the
    prior exp(bᵀu − ½ uᵀMu), with u = A⁻¹(y − f̂). Normalised, it is N(f̂ + A(A+M)⁻¹b, A(A+M)⁻¹A).

    noise: Σ (C, C). marginal: f̂ (N, C) and K (N, C, C). response: b (N, C) and M (N, C, C), see
    `prior_response`. Raises ValueError where A + M is not positive definite: the prior then grows
    faster than the likelihood's predictive falls, and the product has no integral.
    """
    A = noise + marginal.covariance
    factor, info = torch.linalg.cholesky_ex(A + response.covariance)
    if bool((info != 0).any()):
        raise ValueError(
            f"Under convention='additive' {int((info != 0).sum())} of {len(info)} predictives have "
            "no integral: this prior is not log-concave at θ̂ and outgrows the likelihood's "
            "predictive, to which it is added. Use convention='exact'."
        )
    # With A + M = L Lᵀ, half = L⁻¹A and pull = L⁻¹b: the covariance is halfᵀ half.
    half = torch.linalg.solve_triangular(factor, A, upper=False)
    pull = torch.linalg.solve_triangular(factor, response.mean.unsqueeze(-1), upper=False)
    return Marginal(marginal.mean + (half.mT @ pull).squeeze(-1), half.mT @ half)


def find_chi_square_quantile(level: float, df: int) -> float:
    """Return the quantile at probability `level` of the χ² distribution with df degrees of freedom.

    The quantile is found by bisection of the distribution function, which is gammainc(df/2, x/2).
    level must be below 1.
    """
    half = torch.tensor(df / 2, dtype=torch.float64)
    low = 0.0
    # An upper bound: P(χ² > x) ≤ exp(−x/4) 2^(df/2), which is below 1 − level here.
    high = 2.0 * df + 40.0 + 40 * -math.log1p(-level)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if float(gammainc(half, torch.tensor(middle / 2, dtype=torch.float64))) < level:
            low = middle
        else:
            high = middle
    return (low + high) / 2
