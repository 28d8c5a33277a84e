"""Mixtures of many normal distributions, all at once: Σ_k w_k N(m_k, s_k²)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor
from torch.special import ndtr, ndtri

from ssla.likelihoods.likelihood import LOG_2PI
from ssla.maths.quadrature import Regions, bracketed_root
from ssla.maths.quadrature.normal import hermite
from ssla.predictive.law import Law
from ssla.predictive.mixture_laws import ROUNDING, ScalarMixtureLaw
from ssla.predictive.predictive import Diagnostics, Predictive, is_extreme
from ssla.refit.increments import Increments
from ssla.values import Marginal

NODES = 7  # of the log variance
AT_ONCE = 1 << 21  # numbers of a block of rows


@final
@dataclass(frozen=True, eq=False)
class NormalsLaw(Law):
    """means and scales (N, K), weights (K,) with sum 1, doubt (N,): the epistemic part of the
    variance.
    """

    means: Tensor
    scales: Tensor
    weights: Tensor
    doubt: Tensor

    @property
    def kind(self) -> str:
        return "scalar"

    @property
    def rows(self) -> int:
        return len(self.means)

    @cached_property
    def mean(self) -> Tensor:
        return self.means @ self.weights

    @cached_property
    def variance(self) -> Tensor:
        return (self.scales**2 + (self.means - self.mean[:, None]) ** 2) @ self.weights

    @property
    def epistemic(self) -> Tensor:
        return self.doubt

    @property
    def aleatoric(self) -> Tensor:
        return self.variance - self.doubt

    @property
    def mass(self) -> Tensor:
        return torch.ones(self.rows, dtype=torch.float64)

    def log_prob(self, y: Tensor) -> Tensor:
        heights = self.weights.log() - 0.5 * LOG_2PI
        return self._over(y, lambda z, s: (heights - 0.5 * z * z - s.log()).logsumexp(-1))

    def cdf(self, y: Tensor) -> Tensor:
        return self._over(y, lambda z, s: ndtr(z) @ self.weights)

    def _over(self, y: Tensor, ask: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """An answer from z = (y − m)/s and s (n, k, K) for y (N, k), a block of rows at a time."""
        size = max(AT_ONCE // max(y.shape[1] * self.means.shape[1], 1), 1)
        parts = [
            ask(
                (y[i : i + size, :, None] - self.means[i : i + size, None])
                / self.scales[i : i + size, None],
                s,
            )
            for i in range(0, len(y), size)
            for s in (self.scales[i : i + size, None],)
        ]
        return torch.cat(parts) if parts else y.new_empty(y.shape)

    def icdf(self, q: Tensor) -> Tensor:
        ends = self.means[..., None] + self.scales[..., None] * ndtri(q)  # (N, K, k)
        return bracketed_root(lambda y: self.cdf(y) - q, ends.amin(1), ends.amax(1), ROUNDING * q)

    @cached_property
    def _alone(self) -> ScalarMixtureLaw:
        return ScalarMixtureLaw((self,), torch.ones(1, dtype=torch.float64))

    @property
    def mode(self) -> Tensor:
        return self._alone.mode

    def hdr(self, level: float) -> Regions:
        return self._alone.hdr(level)

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        picks = torch.multinomial(
            self.weights, max(n * self.rows, 1), replacement=True, generator=generator
        )
        at = picks[: n * self.rows].reshape(n, self.rows)
        rows = torch.arange(self.rows).expand_as(at)
        white = torch.randn(n, self.rows, dtype=torch.float64, generator=generator)
        return self.means[rows, at] + self.scales[rows, at] * white

    def increments(self, y: Tensor) -> Increments:
        raise TypeError(
            "This predictive is an average over the posterior of mean and log variance, not a sum "
            "of increments. For increments ask one posterior: posterior.predict(x).increments(y)."
        )


def averaged(
    marginals: list[Marginal],
    weights: Tensor,
    factors: Tensor,
    shares: Tensor,
    like: Tensor,
    most: float = math.inf,
) -> Predictive:
    """y ~ N(μ, eˢ) averaged over (μ, s) ~ N(f, K), for several marginals f (N, 2), K (N, 2, 2) with
    weights (M,), each stretched around its mean by factors (F,) with shares (F,). most: the largest
    s, because an exponential explodes far from the data.

    Closed in μ: given s, y is normal with mean μ̂ + β(s − ŝ), β = Cov(μ, s)/Var s, and variance eˢ
    + Var(μ|s). Gauss–Hermite in s.
    """
    nodes, node_weights = hermite(NODES)
    means, scales = [], []
    for f, K in marginals:
        c = K[:, 1, 1].clamp_min(1e-300)
        slope = (K[:, 0, 1] / c)[:, None]
        away = c.sqrt()[:, None] * nodes  # s − ŝ (N, J)
        variance = (f[:, 1:] + away).clamp_max(most).exp() + (
            K[:, 0, 0, None] - slope * K[:, 0, 1, None]
        ).clamp_min(0.0)
        means.append(f[:, :1, None] + (slope * away)[:, :, None] * factors)
        scales.append(variance.sqrt()[:, :, None] * factors)
    centres = torch.stack([f[:, 0] for f, _ in marginals], 1)
    own = torch.stack([K[:, 0, 0] for _, K in marginals], 1) * (shares @ factors**2)
    doubt = (own + (centres - (centres @ weights)[:, None]) ** 2) @ weights
    whole = (weights[:, None, None] * node_weights[:, None] * shares).flatten()
    law = NormalsLaw(
        torch.stack(means, 1).flatten(1), torch.stack(scales, 1).flatten(1), whole, doubt
    )
    extreme = torch.stack([is_extreme(f, K.diagonal(dim1=1, dim2=2)) for f, K in marginals]).any(0)
    return _predictive(law, like, extreme)


def pooled(one: Predictive, other: Predictive, share: float) -> Predictive:
    """The mixture of two mixtures of normals, with the share of the other."""
    parts = [law for law in (one.law, other.law) if isinstance(law, NormalsLaw)]
    assert len(parts) == 2
    weights = torch.tensor([1 - share, share], dtype=torch.float64)
    centres = torch.stack([law.mean for law in parts], 1)
    doubts = (
        torch.stack([law.epistemic for law in parts], 1)
        + (centres - (centres @ weights)[:, None]) ** 2
    )
    means, scales = (
        torch.cat([getattr(law, name) for law in parts], 1) for name in ("means", "scales")
    )
    whole = torch.cat([weight * law.weights for weight, law in zip(weights, parts, strict=True)])
    extreme = one.diagnostics.extreme_rows | other.diagnostics.extreme_rows
    return _predictive(NormalsLaw(means, scales, whole, doubts @ weights), one.like, extreme)


def _predictive(law: NormalsLaw, like: Tensor, extreme: Tensor) -> Predictive:
    no = torch.zeros(law.rows, dtype=torch.bool)
    return Predictive(law, like, Diagnostics("output", no, no, no, mixed=law).with_extreme(extreme))
