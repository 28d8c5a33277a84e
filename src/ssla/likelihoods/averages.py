"""E log p(y|f), E g and E Λ under f ~ N(f̂, K): what a variational Gaussian sums in place of the values at f̂.

By fixed nodes (Gauss–Hermite for one and two outputs, a low-discrepancy set for more), a few rows at a time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ssla.likelihoods.classes import Bernoulli, Categorical
from ssla.likelihoods.counts import NegativeBinomial, Poisson
from ssla.likelihoods.gaussian import Gaussian
from ssla.likelihoods.likelihood import Derivatives, Likelihood
from ssla.likelihoods.tempered import Tempered
from ssla.numerics.quadrature.normal import normal_nodes
from ssla.numerics.roots import Root

NUMBERS_AT_ONCE = 1 << 22
# up to how many outputs -> pairs of the low-discrepancy set; for ten classes more change predictives by less than 2e-4 in KL, and
# for many classes the sums over rows average out what one row's nodes miss
PAIRS = ((64, 128), (300, 32), (math.inf, 16))


def averages(likelihood: Likelihood, y: Tensor, f: Tensor, root: Root, fisher: bool = False) -> Derivatives:
    """E log p (B,), E g (B, C), E Λ (B, C, C); with `fisher` the expected Fisher information, never indefinite, for E Λ."""
    B, C = f.shape
    nodes, weights = normal_nodes(C, next(pairs for most, pairs in PAIRS if most >= C))
    z = nodes.mT.contiguous()
    fast = isinstance(likelihood, Categorical) or (isinstance(likelihood, Tempered) and isinstance(likelihood.base, Categorical))
    each = len(nodes) * C * (1 if fast else C) + C * C
    size = max(NUMBERS_AT_ONCE // each, 1)
    parts = []
    for start in range(0, max(B, 1), size):
        rows = slice(start, start + size)
        points = f[rows].unsqueeze(1) + root.take(rows).times(z).mT  # (b, J, C)
        parts.append((_of_classes if fast else _of_nodes)(likelihood, y[rows], points, weights, fisher))
    return Derivatives(*(torch.cat(column) for column in zip(*parts, strict=True)))


def concave(likelihood: Likelihood) -> bool:
    """Whether log p is known to be concave in f, so that E Λ is never indefinite."""
    law = likelihood.base if isinstance(likelihood, Tempered) else likelihood
    return isinstance(law, Bernoulli | Categorical | Gaussian | NegativeBinomial | Poisson)


def _of_nodes(likelihood: Likelihood, y: Tensor, f: Tensor, weights: Tensor, fisher: bool) -> Derivatives:
    found = likelihood.derivatives(y.unsqueeze(1).expand(*f.shape[:2], *y.shape[1:]), f)
    if fisher:
        found = found._replace(precision=likelihood.fisher(f))
    log_prob, score, precision = (torch.tensordot(part, weights, dims=([1], [0])) for part in found)
    return Derivatives(log_prob, score, (precision + precision.mT) / 2)


def _of_classes(likelihood: Likelihood, y: Tensor, f: Tensor, weights: Tensor, fisher: bool) -> Derivatives:
    """E Λ = diag(E p) − E p pᵀ, without a matrix for each node."""
    beta = likelihood.beta if isinstance(likelihood, Tempered) else 1.0
    log_sum = f.logsumexp(-1)
    hit = y.long()[:, None, None].expand(-1, f.shape[1], 1)
    log_prob = (f.gather(2, hit).squeeze(2) - log_sum) @ weights
    p = f.sub_(log_sum.unsqueeze(-1)).exp_()
    weighted = p * weights[:, None]
    mean = weighted.sum(1)
    outer = weighted.mT @ p
    precision = torch.diag_embed(outer.sum(-1)) - outer  # rows sum to zero
    score = torch.nn.functional.one_hot(y.long(), f.shape[-1]) - mean
    return Derivatives(beta * log_prob, beta * score, beta * precision)
