"""Mixtures of predictives of D numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ssla._checks import level as checked_level
from ssla.data import as_tensor
from ssla.numerics.quadrature import bracketed_root
from ssla.predictive.mixture import Blend
from ssla.predictive.predictive import Diagnostics, probabilities
from ssla.refit.increments import Increments

REGION_DRAWS = 4096


@dataclass(frozen=True, eq=False)
class DensityRegion:
    """{y: log p(y) ≥ threshold}, one threshold a row (N,)."""

    predictive: Any
    threshold: Tensor

    def contains(self, y: Tensor) -> Tensor:
        """(N, D) -> (N,) bool."""
        inside: Tensor = self.predictive.log_prob(y) >= self.threshold
        return inside

    def moved(self, shift: Tensor, scale: Tensor) -> DensityRegion:
        """The region of shift + scale · y."""
        from ssla.predictive.affine import affine

        return DensityRegion(affine(self.predictive, shift, scale), self.threshold - scale.log().sum().to(self.threshold))


@dataclass(frozen=True, eq=False)
class VectorMixture:
    """Σ w_m p_m(y), y (D,). Distribution functions and quantiles are of each target by itself."""

    blend: Blend

    kind = "vector"

    @property
    def members(self) -> tuple[Any, ...]:
        return self.blend.members

    @property
    def diagnostics(self) -> Diagnostics:
        return self.blend.diagnostics

    @property
    def mean(self) -> Tensor:
        return self.blend.out(self.blend.mean)

    @cached_property
    def _covariance(self) -> Tensor:
        off = self.blend.each(lambda m: m.mean) - self.blend.mean
        between = self.blend.weigh(off.unsqueeze(-1) * off.unsqueeze(-2))
        return self.blend.average(lambda m: m.covariance) + between

    @property
    def covariance(self) -> Tensor:
        """(N, D, D)."""
        return self.blend.out(self._covariance)

    @property
    def variance(self) -> Tensor:
        return self.blend.out(self._covariance.diagonal(dim1=1, dim2=2))

    @property
    def stddev(self) -> Tensor:
        return self.blend.out(self._covariance.diagonal(dim1=1, dim2=2).sqrt())

    @property
    def epistemic(self) -> Tensor:
        return self.blend.out(self.blend.epistemic)

    @property
    def aleatoric(self) -> Tensor:
        return self.blend.out(self.blend.aleatoric)

    @property
    def mass(self) -> Tensor:
        return self.blend.out(self.blend.mass)

    @property
    def mode(self) -> Tensor:
        """The densest of the members' modes: exact where they lie apart or coincide, close elsewhere."""
        modes = self.blend.each(lambda m: m.mode).movedim(0, 1)  # (N, M, D)
        best = self.blend.log_average(lambda m: m.log_prob(modes)).argmax(1)
        return self.blend.out(modes[torch.arange(len(modes)), best])

    def log_prob(self, y: Any) -> Tensor:
        """(N, D) -> (N,); (N, k, D) -> (N, k)."""
        return self.blend.out(self.blend.log_average(lambda m: m.log_prob(y)))

    def cdf(self, y: Any) -> Tensor:
        """P(Y_d ≤ y_d): (N, D) -> (N, D)."""
        return self.blend.out(self.blend.average(lambda m: m.cdf(y)))

    def icdf(self, q: Any) -> Tensor:
        """Quantiles of each target: one number -> (N, D); (k,) -> (N, D, k)."""
        value, single = probabilities(q)
        ends = self.blend.each(lambda m: m.icdf(value))

        def gap(y: Tensor) -> Tensor:
            return self.blend.average(lambda m: m.cdf(y.mT)).mT - value

        found = self.blend.out(bracketed_root(gap, ends.amin(0), ends.amax(0)))
        return found.squeeze(-1) if single else found

    def interval(self, level: float = 0.95) -> Tensor:
        """Central interval of each target: (N, D, 2)."""
        tail = (1 - checked_level(level)) / 2
        return self.icdf(torch.tensor([tail, 1 - tail], dtype=torch.float64))

    def hdr(self, level: float = 0.95) -> DensityRegion:
        """The densest region of that probability; its threshold is a quantile over 4,096 fixed draws (level ± 0.01)."""
        draws = self.sample(REGION_DRAWS, torch.Generator().manual_seed(0)).movedim(0, 1)
        logs, rest = self.log_prob(draws), 1 - checked_level(level)
        return DensityRegion(self, logs.quantile(rest, dim=1) if len(logs) else logs[:, 0])

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, N, D)."""
        return self.blend.out(self.blend.choose(n, lambda m: m.sample(n, generator), generator))

    def increments(self, y: Any) -> Increments:
        return self.blend.increments(as_tensor(y))
