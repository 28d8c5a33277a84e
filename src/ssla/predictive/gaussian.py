"""Closed forms: Gaussian noise of known size needs no grid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.special import gammainc, ndtr, ndtri

from ssla._checks import level as checked_level
from ssla.data import as_tensor
from ssla.likelihoods.likelihood import LOG_2PI
from ssla.numerics.quadrature import Regions
from ssla.posterior import Marginal
from ssla.predictive.predictive import Diagnostics, answer, checked, probabilities, scalar_targets
from ssla.priors import EXACT
from ssla.refit import LogDensity
from ssla.refit.increments import Increments


class Ellipsoid(NamedTuple):
    """{y: (y − centre)ᵀ covariance⁻¹ (y − centre) ≤ squared_radius}."""

    centre: Tensor  # (N, D)
    covariance: Tensor  # (N, D, D)
    squared_radius: float

    def contains(self, y: Tensor) -> Tensor:
        """(N, D) -> (N,) bool."""
        r = (y.to(self.centre) - self.centre).unsqueeze(-1)
        white: Tensor = torch.linalg.solve_triangular(torch.linalg.cholesky(self.covariance), r, upper=False)
        return (white**2).sum((-2, -1)) <= self.squared_radius


@dataclass(frozen=True, eq=False)
class GaussianPredictive:
    """N(f̂, Σ + K) for a refit, N(f̂, Σ) for none; one target (N,) or D of them (N, D).

    The mass of a refit (and of the plug-in) is 1 exactly, that of ASSLA |I + Σ⁻¹K|^(−½) (`loses_mass`); under the conventions
    that do not treat the prior as Bayes' rule does, it is what the increments integrate to. `law` is the Gaussian of y where the
    prior is added to the likelihood's own predictive.
    """

    log_density: LogDensity
    noise: Tensor  # Σ (C, C)
    loses_mass: bool
    diagnostics: Diagnostics
    law: Marginal | None = None

    def _out(self, value: Tensor) -> Tensor:
        return value.to(self.log_density.like)

    @property
    def _scalar(self) -> bool:
        return self.noise.shape[0] == 1

    def _targets(self, value: Tensor) -> Tensor:
        """(N, D) -> (N,) for one target."""
        return self._out(value.squeeze(1) if self._scalar else value)

    @property
    def _mean(self) -> Tensor:
        return self.log_density.marginal.mean if self.law is None else self.law.mean

    @cached_property
    def _covariance(self) -> Tensor:
        if self.law is not None:
            return self.law.covariance
        K = self.log_density.marginal.covariance
        return self.noise + K if self.log_density.moves else self.noise.expand_as(K)

    @cached_property
    def _scale(self) -> Tensor:
        """(N, D)."""
        return self._covariance.diagonal(dim1=-2, dim2=-1).sqrt()

    @property
    def mean(self) -> Tensor:
        return self._targets(self._mean)

    @property
    def mode(self) -> Tensor:
        return self.mean

    @property
    def variance(self) -> Tensor:
        return self._targets(self._scale**2)

    @property
    def stddev(self) -> Tensor:
        return self._targets(self._scale)

    @property
    def covariance(self) -> Tensor:
        """(N, D, D)."""
        return self._out(self._covariance)

    @cached_property
    def _doubt(self) -> Tensor:
        """The epistemic part of the variance (N, D): K's; where a prior was added, in the proportion of K to Σ + K."""
        K = self.log_density.marginal.covariance.diagonal(dim1=-2, dim2=-1)
        if not self.log_density.moves:
            return torch.zeros_like(K)
        return K if self.law is None else self._scale**2 * K / (K + self.noise.diagonal())

    @property
    def epistemic(self) -> Tensor:
        return self._targets(self._doubt)

    @property
    def aleatoric(self) -> Tensor:
        return self._targets(self.noise.diagonal().expand_as(self._mean) if self.law is None else self._scale**2 - self._doubt)

    @cached_property
    def mass(self) -> Tensor:
        """(N,)."""
        if self.diagnostics.convention != EXACT:
            # the increments are quadratic in y: their height at the mean, over that of the normalised density
            peak = self.log_density.at(self._mean.squeeze(1) if self._scalar else self._mean).log
            half_logdet = torch.linalg.cholesky(self._covariance).diagonal(dim1=-2, dim2=-1).log().sum(-1)
            return self._out((peak + half_logdet + 0.5 * self._mean.shape[1] * LOG_2PI).exp())
        if not self.loses_mass:
            return self._out(torch.ones(self._mean.shape[0], dtype=torch.float64))
        factor = torch.linalg.cholesky(self.noise)
        half = torch.linalg.solve_triangular(factor, self.log_density.marginal.covariance, upper=False)
        white = torch.linalg.solve_triangular(factor, half.mT, upper=False)
        return self._out((-0.5 * torch.log1p(torch.linalg.eigvalsh(white).clamp_min(0)).sum(-1)).exp())

    def _vectors(self, y: Any) -> Tensor:
        value = as_tensor(y).to("cpu", torch.float64)
        if value.dim() not in (2, 3) or value.shape[0] != self._mean.shape[0] or value.shape[-1] != self._mean.shape[1]:
            N, D = self._mean.shape
            raise ValueError(f"y must have shape ({N}, {D}) or ({N}, k, {D}), but has {tuple(value.shape)}.")
        return checked(value)

    def log_prob(self, y: Any) -> Tensor:
        """(N,) -> (N,), (N, k) -> (N, k); D targets: (N, D) -> (N,)."""
        if self._scalar:
            value, single = scalar_targets(y, self._mean.shape[0])
            z = (checked(value) - self._mean) / self._scale
            return self._out(answer(-0.5 * (z * z + LOG_2PI) - self._scale.log(), single))
        value = self._vectors(y)
        factor = torch.linalg.cholesky(self._covariance)
        extra = value.dim() - 2
        shape = (value.shape[0], *[1] * extra, *factor.shape[1:])
        r = (value - self._mean.reshape(value.shape[0], *[1] * extra, self._mean.shape[1])).unsqueeze(-1)
        white = torch.linalg.solve_triangular(factor.reshape(shape).expand(*r.shape[:-2], *factor.shape[1:]), r, upper=False)
        half_logdet = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1).reshape(len(value), *[1] * extra)
        return self._out(-0.5 * ((white**2).sum((-2, -1)) + self._mean.shape[1] * LOG_2PI) - half_logdet)

    def cdf(self, y: Any) -> Tensor:
        """P(Y ≤ y); for D targets each by itself."""
        if self._scalar:
            value, single = scalar_targets(y, self._mean.shape[0])
            return self._out(answer(ndtr((value - self._mean) / self._scale), single))
        value = self._vectors(y)
        middle = (slice(None), *[None] * (value.dim() - 2))
        return self._out(ndtr((value - self._mean[middle]) / self._scale[middle]))

    def icdf(self, q: Any) -> Tensor:
        """Quantiles: one number -> (N,) or (N, D); a vector (k,) -> (N, k) or (N, D, k)."""
        value, single = probabilities(q)
        z = self._mean.unsqueeze(-1) + self._scale.unsqueeze(-1) * ndtri(value)
        z = z.squeeze(1) if self._scalar else z
        return self._out(z.squeeze(-1) if single else z)

    def interval(self, level: float = 0.95) -> Tensor:
        """Central interval: (N, 2), or (N, D, 2)."""
        tail = (1 - checked_level(level)) / 2
        return self.icdf(torch.tensor([tail, 1 - tail], dtype=torch.float64))

    def hdr(self, level: float = 0.95) -> Regions | Ellipsoid:
        """The smallest region of that probability: an interval, or an ellipsoid for D targets."""
        if self._scalar:
            ends = self.interval(level)
            return Regions(ends[:, :1], ends[:, 1:])
        radius = chi_square_quantile(checked_level(level), self._mean.shape[1])
        return Ellipsoid(self._out(self._mean), self.covariance, radius)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, N), or (n, N, D)."""
        white = torch.randn(n, *self._mean.shape, dtype=torch.float64, generator=generator)
        factor = torch.linalg.cholesky(self._covariance)
        draws = self._mean + (factor @ white.unsqueeze(-1)).squeeze(-1)
        return self._out(draws.squeeze(-1) if self._scalar else draws)

    def increments(self, y: Any) -> Increments:
        """The three increments of the un-normalised log density, of log_prob's shape."""
        if not self._scalar:
            value, single = self._vectors(y), False
        else:
            value, single = scalar_targets(y, self._mean.shape[0])
        parts = self.log_density(checked(value))
        return parts.map(lambda part: self._out(answer(part, single)))


def additive_law(noise: Tensor, marginal: Marginal, response: Marginal) -> Marginal:
    """N(f̂, A) · exp(bᵀu − ½ uᵀMu) with A = Σ + K, u = A⁻¹(y − f̂): the Gaussian N(f̂ + A(A+M)⁻¹b, A(A+M)⁻¹A).

    Fails where A + M is not positive definite: the prior then grows faster than the likelihood's predictive falls.
    """
    A = noise + marginal.covariance
    factor, info = torch.linalg.cholesky_ex(A + response.covariance)
    if bool((info != 0).any()):
        raise ValueError(
            f"Under convention='additive' {int((info != 0).sum())} of {len(info)} predictives have no integral: this prior is "
            "not log-concave at θ̂ and outgrows the likelihood's predictive, to which it is added. Use convention='exact'."
        )
    half = torch.linalg.solve_triangular(factor, A, upper=False)  # V = halfᵀ half
    pull = torch.linalg.solve_triangular(factor, response.mean.unsqueeze(-1), upper=False)
    return Marginal(marginal.mean + (half.mT @ pull).squeeze(-1), half.mT @ half)


def chi_square_quantile(level: float, df: int) -> float:
    """By bisection on the regularised incomplete gamma function."""
    half = torch.tensor(df / 2, dtype=torch.float64)
    low, high = 0.0, 2.0 * df + 40.0 + 40 * -math.log1p(-level)
    for _ in range(100):
        middle = (low + high) / 2
        if float(gammainc(half, torch.tensor(middle / 2, dtype=torch.float64))) < level:
            low = middle
        else:
            high = middle
    return (low + high) / 2
