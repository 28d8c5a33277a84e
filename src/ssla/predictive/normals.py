"""Mixtures of many normal distributions, all at once: Σ_k w_k N(m_k, s_k²).

Doubt is the epistemic part of a variance: that which comes from the uncertainty of the outputs.
"""

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
from ssla.maths.quadrature.normal import gauss_hermite_rule
from ssla.predictive.law import Law
from ssla.predictive.mixture_laws import (
    ROUNDING,
    ScalarMixtureLaw,
    draw_indices,
    make_mixture_of_one,
)
from ssla.predictive.predictive import Diagnostics, Predictive, is_extreme
from ssla.refit.increments import Increments
from ssla.values import Marginal

SMALLEST_DIVISOR = 1e-300  # takes the place of zero
NODES = 7  # of the log variance; a guess
ENTRIES_AT_ONCE = 1 << 21  # numbers (rows, k, K) that are held at once; a guess


@final
@dataclass(frozen=True, eq=False)
class NormalsLaw(Law):
    """The law Σ_k w_k N(m_k, s_k²) in each of N rows, with the same K weights in all of them."""

    means: Tensor  # m (N, K)
    scales: Tensor  # s (N, K)
    weights: Tensor  # w (K,), with sum 1
    doubt: Tensor  # the epistemic part of the variance (N,)

    kind = "scalar"

    @property
    def rows(self) -> int:
        """Return N, the number of inputs."""
        return len(self.means)

    @cached_property
    def mean(self) -> Tensor:
        """Return Σ w_k m_k (N,)."""
        return self.means @ self.weights

    @cached_property
    def variance(self) -> Tensor:
        """Return Σ w_k (s_k² + (m_k − mean)²) (N,)."""
        return (self.scales**2 + (self.means - self.mean[:, None]) ** 2) @ self.weights

    @property
    def epistemic(self) -> Tensor:
        """Return the epistemic part of the variance (N,), which is given with the law."""
        return self.doubt

    @property
    def aleatoric(self) -> Tensor:
        """Return the part of the variance that is not epistemic (N,)."""
        return self.variance - self.doubt

    @property
    def mass(self) -> Tensor:
        """Return ones (N,): a mixture of normalised densities is normalised."""
        return torch.ones(self.rows, dtype=torch.float64)

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log Σ w_k N(y; m_k, s_k²), (N, k) -> (N, k)."""
        heights = self.weights.log() - 0.5 * LOG_2PI
        return self._apply_to_normals(
            y, lambda z, s: (heights - 0.5 * z * z - s.log()).logsumexp(-1)
        )

    def cdf(self, y: Tensor) -> Tensor:
        """Return Σ w_k Φ((y − m_k)/s_k), (N, k) -> (N, k)."""
        return self._apply_to_normals(y, lambda z, s: ndtr(z) @ self.weights)

    def _apply_to_normals(self, y: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return function(z, s) for y (N, k), where z = (y − m)/s: (N, k).

        The function maps z (n, k, K) and s (n, 1, K) of a block of n rows to (n, k). Blocks bound
        the memory.
        """
        size = max(ENTRIES_AT_ONCE // max(y.shape[1] * self.means.shape[1], 1), 1)
        values = []
        for start in range(0, len(y), size):
            block = slice(start, start + size)
            s = self.scales[block, None]
            values.append(function((y[block, :, None] - self.means[block, None]) / s, s))
        return torch.cat(values) if values else y.new_empty(y.shape)

    def icdf(self, q: Tensor) -> Tensor:
        """Return the quantiles at probabilities q (k,): (N, k).

        They are searched for between the least and the greatest of the normals' quantiles.
        """
        ends = self.means[..., None] + self.scales[..., None] * ndtri(q)  # (N, K, k)
        return bracketed_root(lambda y: self.cdf(y) - q, ends.amin(1), ends.amax(1), ROUNDING * q)

    @cached_property
    def _as_mixture(self) -> ScalarMixtureLaw:
        """Return a mixture with this law as its only member.

        A mixture finds its mode and its regions by search.
        """
        return make_mixture_of_one(self)

    @property
    def mode(self) -> Tensor:
        """Return the y of highest density (N,)."""
        return self._as_mixture.mode

    def hdr(self, level: float) -> Regions:
        """Return the smallest region with probability `level`, a union of intervals."""
        return self._as_mixture.hdr(level)

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw n values for each input (n, N), each from a normal that is drawn by its weight."""
        chosen = draw_indices(self.weights, n, self.rows, generator)
        rows = torch.arange(self.rows).expand_as(chosen)
        white = torch.randn(n, self.rows, dtype=torch.float64, generator=generator)
        return self.means[rows, chosen] + self.scales[rows, chosen] * white

    def increments(self, y: Tensor) -> Increments:
        """Raise TypeError: an average over posteriors has no increments.

        The argument is part of the protocol.
        """
        raise TypeError(
            "This predictive is an average over the posterior of mean and log variance, not a sum "
            "of increments. For increments ask one posterior: posterior.predict(x).increments(y)."
        )


def average_normals(
    marginals: list[Marginal],
    weights: Tensor,
    factors: Tensor,
    shares: Tensor,
    like: Tensor,
    largest_log_variance: float = math.inf,
) -> Predictive:
    """Return the predictive of y ~ N(μ, eˢ), averaged over M marginals (μ, s) ~ N(f, K).

    marginals: f (N, 2) and K (N, 2, 2) of each, with weights (M,). The distribution of y under each
    marginal is stretched around its mean by each of the factors (F,); these F copies are averaged
    with the weights shares (F,). like: answers have its dtype and device. largest_log_variance: a
    limit of s, because eˢ becomes huge far from the data.

    The average over μ is a closed form, that over s is by Gauss–Hermite: see `_spread_marginal`.
    """
    nodes, node_weights = gauss_hermite_rule(NODES)
    means, scales = [], []
    for marginal in marginals:
        mean, scale = _spread_marginal(marginal, nodes, factors, largest_log_variance)
        means.append(mean)
        scales.append(scale)

    # The epistemic variance is that of μ in each marginal, and that between the marginals.
    centres = torch.stack([f[:, 0] for f, _ in marginals], 1)
    within = torch.stack([K[:, 0, 0] for _, K in marginals], 1) * (shares @ factors**2)
    doubt = _combine_epistemic(centres, within, weights)
    all_weights = (weights[:, None, None] * node_weights[:, None] * shares).flatten()
    law = NormalsLaw(
        torch.stack(means, 1).flatten(1), torch.stack(scales, 1).flatten(1), all_weights, doubt
    )
    extreme = torch.stack([is_extreme(f, K.diagonal(dim1=1, dim2=2)) for f, K in marginals]).any(0)
    return _make_normals_predictive(law, like, extreme)


def _spread_marginal(
    marginal: Marginal, nodes: Tensor, factors: Tensor, largest_log_variance: float
) -> tuple[Tensor, Tensor]:
    """Return means and standard deviations (N, J, F) of y: a normal for each node and factor.

    nodes: values (J,) of (s − ŝ)/sd s. Given s, y is normal with mean μ̂ + β(s − ŝ),
    β = Cov(μ, s)/Var s, and variance eˢ + Var(μ|s). Other arguments as of `average_normals`.
    """
    f, K = marginal
    variance_of_s = K[:, 1, 1].clamp_min(SMALLEST_DIVISOR)
    beta = (K[:, 0, 1] / variance_of_s)[:, None]
    s_step = variance_of_s.sqrt()[:, None] * nodes  # s − ŝ (N, J)
    remaining = (K[:, 0, 0, None] - beta * K[:, 0, 1, None]).clamp_min(0.0)  # Var(μ|s)
    variance = (f[:, 1:] + s_step).clamp_max(largest_log_variance).exp() + remaining
    means = f[:, :1, None] + (beta * s_step)[:, :, None] * factors
    return means, variance.sqrt()[:, :, None] * factors


def pool_normals(first: Predictive, second: Predictive, share: float) -> Predictive:
    """Return the mixture of two predictives at the same inputs, both of the law NormalsLaw.

    share: the weight of the second, from 0 to 1. Answers have the dtype of the first. Raises
    AssertionError for another law.
    """
    laws = [law for law in (first.law, second.law) if isinstance(law, NormalsLaw)]
    assert len(laws) == 2
    weights = torch.tensor([1 - share, share], dtype=torch.float64)
    centres = torch.stack([law.mean for law in laws], 1)
    within = torch.stack([law.epistemic for law in laws], 1)
    mixed = NormalsLaw(
        torch.cat([law.means for law in laws], 1),
        torch.cat([law.scales for law in laws], 1),
        torch.cat([weight * law.weights for weight, law in zip(weights, laws, strict=True)]),
        _combine_epistemic(centres, within, weights),
    )
    extreme = first.diagnostics.extreme_rows | second.diagnostics.extreme_rows
    return _make_normals_predictive(mixed, first.like, extreme)


def _combine_epistemic(means: Tensor, doubts: Tensor, weights: Tensor) -> Tensor:
    """Return the epistemic variance (N,) of a mixture of M laws.

    The result is the average of theirs, plus the variance between their means. means, doubts (N,
    M): means and epistemic variances of the laws. weights (M,), with sum 1.
    """
    return (doubts + (means - (means @ weights)[:, None]) ** 2) @ weights


def _make_normals_predictive(law: NormalsLaw, like: Tensor, extreme: Tensor) -> Predictive:
    """Make the predictive of a law of normals, with the output rung in its diagnostics.

    like: answers have its dtype and device. extreme (N,) bool: the rows to flag as extreme. No
    other flag is set.
    """
    unflagged = torch.zeros(law.rows, dtype=torch.bool)
    flags = Diagnostics("output", unflagged, unflagged, unflagged, mixed=law)
    return Predictive(law, like, flags.with_extreme(extreme))
