"""The law of total variance under f ~ N(f̂, K): how much of Var[y] is noise, how much is
uncertainty of f.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ssla.likelihoods import Likelihood
from ssla.maths.linalg import covariance_root
from ssla.maths.quadrature.normal import normal_nodes
from ssla.refit import LogDensity

ROWS_AT_ONCE = 1024  # a guess
QUASI_POINTS = 256  # and their mirror images, for three outputs and more; a guess


def total_variance(likelihood: Likelihood, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
    """Return Var_f E[y|f] and E_f Var[y|f] under f ~ N(f̂, K), of the shape of likelihood.mean(f).

    f̂ (N, C), K (N, C, C). Gauss–Hermite for one and two outputs, 512 quasi-random points for more.
    Where not every f is allowed, to first order around f̂.
    """
    if not likelihood.linear_domain:
        return _first_order_variance(likelihood, f, K)
    nodes, weights = normal_nodes(f.shape[-1], QUASI_POINTS)
    of_means, of_noise = [], []
    for points in _outputs_at_nodes(f, K, nodes):
        mean, variance = likelihood.mean(points), likelihood.variance(points)
        w = weights.reshape(1, -1, *[1] * (mean.dim() - 2))
        centre = (w * mean).sum(1, keepdim=True)
        of_means.append((w * (mean - centre) ** 2).sum(1))
        of_noise.append((w * variance).sum(1))
    return torch.cat(of_means), torch.cat(of_noise)


def mean_entropy(likelihood: Likelihood, f: Tensor, K: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return H(E_f p) and E_f H(p) in nats (N,), for the probabilities p of `count` classes.

    f (N, C), K (N, C, C). The difference is the mutual information. It is zero where not every f is
    allowed: there are no nodes for such a likelihood, and both are taken at f̂.
    """
    nodes, weights = normal_nodes(f.shape[-1], QUASI_POINTS)
    if not likelihood.linear_domain:
        nodes, weights = torch.zeros_like(nodes[:1]), torch.ones_like(weights[:1])
    classes = torch.arange(count, dtype=torch.float64)
    of_mean, mean_of = [], []
    for points in _outputs_at_nodes(f, K, nodes):
        y = classes.expand(*points.shape[:2], -1)
        p = torch.softmax(likelihood.log_prob(y, points.unsqueeze(2)), -1)  # (m, J, classes)
        mean_of.append(torch.special.entr(p).sum(-1) @ weights)
        of_mean.append(torch.special.entr(torch.einsum("j,mjc->mc", weights, p)).sum(-1))
    return torch.cat(of_mean), torch.cat(mean_of)


def _outputs_at_nodes(f: Tensor, K: Tensor, nodes: Tensor) -> Iterator[Tensor]:
    """Yield f + R z (m, J, C) at nodes z (J, C), with K = R Rᵀ, a block of rows at a time.

    There is one block, an empty one, where there are no rows.
    """
    for start in range(0, max(f.shape[0], 1), ROWS_AT_ONCE):
        block = slice(start, start + ROWS_AT_ONCE)
        yield f[block].unsqueeze(1) + nodes @ covariance_root(K[block]).mT


def split_variance(log_density: LogDensity, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Split the predictive's own variance into epistemic and aleatoric, of its shape, in the
    proportion of the law of total variance.

    A rung that does not move f (ASSLA) has no uncertainty of f: its variance is all aleatoric. An
    infinite variance is all aleatoric too, beside the finite uncertainty of f.
    """
    if not log_density.outputs_move:
        return torch.zeros_like(variance), variance
    doubt, noise = total_variance(log_density.likelihood, *log_density.marginal)
    total = doubt + noise
    share = torch.where(torch.isfinite(total) & (total > 0), doubt / total, torch.zeros_like(total))
    infinite = torch.isinf(variance)
    epistemic = torch.where(infinite, doubt, share * variance)
    return epistemic, variance - torch.where(infinite, torch.zeros_like(epistemic), epistemic)


def _first_order_variance(likelihood: Likelihood, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
    """Return sᵀKs and Var[y|f] at f (N, C), with s the slope of E[y|f]: (N,) each."""
    with torch.enable_grad():
        free = f.detach().clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(likelihood.mean(free).sum(), free)
    of_mean = (slope.unsqueeze(-2) @ K @ slope.unsqueeze(-1)).squeeze((-2, -1))
    return of_mean, likelihood.variance(f)
