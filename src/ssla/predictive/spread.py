"""The law of total variance under f ~ N(f̂, K).

The law says how much of Var[y] is noise, and how much is uncertainty of f: Var[y] is
Var_f E[y|f], the epistemic part or doubt, plus E_f Var[y|f], the aleatoric part or noise.
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


def compute_variance_parts(likelihood: Likelihood, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
    """Return Var_f E[y|f] and E_f Var[y|f] under f ~ N(f̂, K), of the shape of likelihood.mean(f).

    f: f̂ (N, C); K (N, C, C). The averages over f are by Gauss–Hermite for one and two outputs, and
    over 512 quasi-random points for more. Where the likelihood does not allow every f, they are to
    first order around f̂: a node could be outside.
    """
    if not likelihood.linear_domain:
        return _compute_first_order_parts(likelihood, f, K)
    nodes, weights = normal_nodes(f.shape[-1], QUASI_POINTS)
    of_means, of_noise = [], []
    for points in _iterate_outputs_at_nodes(f, K, nodes):  # (m, J, C)
        mean = likelihood.mean(points)  # (m, J), or (m, J, D) for D values of y
        w = weights.reshape(1, -1, *[1] * (mean.dim() - 2))
        centre = (w * mean).sum(1, keepdim=True)
        of_means.append((w * (mean - centre) ** 2).sum(1))
        of_noise.append((w * likelihood.variance(points)).sum(1))
    return torch.cat(of_means), torch.cat(of_noise)


def average_entropies(
    likelihood: Likelihood, f: Tensor, K: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Return H(E_f p) and E_f H(p) in nats (N,), for the probabilities p of `count` classes.

    f: f̂ (N, C); K (N, C, C). The averages are those of `compute_variance_parts`. The difference of
    the two results is the mutual information. Where the likelihood does not allow every f, a node
    could be outside: both are taken at f̂, and the difference is zero.
    """
    nodes, weights = normal_nodes(f.shape[-1], QUASI_POINTS)
    if not likelihood.linear_domain:
        # one node, f̂ itself
        nodes = torch.zeros_like(nodes[:1])
        weights = torch.ones_like(weights[:1])
    classes = torch.arange(count, dtype=torch.float64)
    entropies_of_mean = []
    mean_entropies = []
    for points in _iterate_outputs_at_nodes(f, K, nodes):
        y = classes.expand(*points.shape[:2], -1)
        p = torch.softmax(likelihood.log_prob(y, points.unsqueeze(2)), -1)  # (m, J, classes)
        mean_p = torch.einsum("j,mjc->mc", weights, p)
        mean_entropies.append(torch.special.entr(p).sum(-1) @ weights)
        entropies_of_mean.append(torch.special.entr(mean_p).sum(-1))
    return torch.cat(entropies_of_mean), torch.cat(mean_entropies)


def _iterate_outputs_at_nodes(f: Tensor, K: Tensor, nodes: Tensor) -> Iterator[Tensor]:
    """Yield f + R z (m, J, C) for blocks of m rows, with nodes z (J, C) and K = R Rᵀ.

    f (N, C), K (N, C, C). Without rows, one empty block is yielded, so that results can be joined.
    """
    for start in range(0, max(f.shape[0], 1), ROWS_AT_ONCE):
        block = slice(start, start + ROWS_AT_ONCE)
        yield f[block].unsqueeze(1) + nodes @ covariance_root(K[block]).mT


def split_variance(log_density: LogDensity, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Split the variance of a law into an epistemic and an aleatoric part, both of its shape.

    log_density: of the law, with its f̂ and K. The proportion is that of the law of total variance
    under f ~ N(f̂, K). A rung that does not move f (ASSLA) has no uncertainty of f: its variance is
    all aleatoric. Where the variance is infinite, the epistemic part is Var_f E[y|f], and the
    aleatoric part is infinite.
    """
    if not log_density.outputs_move:
        return torch.zeros_like(variance), variance
    doubt, noise = compute_variance_parts(log_density.likelihood, *log_density.marginal)
    total = doubt + noise
    # 0/0 and ∞/∞ count as zero.
    share = torch.where(torch.isfinite(total) & (total > 0), doubt / total, torch.zeros_like(total))
    infinite = torch.isinf(variance)
    epistemic = torch.where(infinite, doubt, share * variance)
    # From an infinite variance nothing is subtracted: the epistemic part could be infinite, too.
    return epistemic, variance - torch.where(infinite, torch.zeros_like(epistemic), epistemic)


def _compute_first_order_parts(
    likelihood: Likelihood, f: Tensor, K: Tensor
) -> tuple[Tensor, Tensor]:
    """Return Var_f E[y|f] to first order, which is sᵀKs, and Var[y|f], (N,) each.

    f (N, C) holds f̂, K is (N, C, C), and s is the gradient of E[y|f] in f. y must be one number.
    """
    with torch.enable_grad():
        free = f.detach().clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(likelihood.mean(free).sum(), free)
    of_mean = (slope.unsqueeze(-2) @ K @ slope.unsqueeze(-1)).squeeze((-2, -1))
    return of_mean, likelihood.variance(f)
