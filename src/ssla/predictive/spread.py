"""The law of total variance under f ~ N(f̂, K): how much of Var[y] is noise, how much is
uncertainty of f.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssla.likelihoods import Likelihood
from ssla.maths.linalg import root
from ssla.maths.quadrature.normal import normal_nodes
from ssla.refit import LogDensity

ROWS_AT_ONCE = 1024
QUASI_POINTS = 256


def total_variance(likelihood: Likelihood, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
    """(Var_f E[y|f], E_f Var[y|f]), each of the shape of likelihood.mean(f).

    Gauss–Hermite for one and two outputs, 512 quasi-random points for more. Where not every f is
    allowed, to first order around f̂.
    """
    if not likelihood.linear_domain:
        return _first_order(likelihood, f, K)
    nodes, weights = normal_nodes(f.shape[-1], QUASI_POINTS)
    parts = []
    for start in range(0, max(f.shape[0], 1), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        points = f[part].unsqueeze(1) + nodes @ root(K[part]).mT  # (m, J, C)
        mean, variance = likelihood.mean(points), likelihood.variance(points)
        w = weights.reshape(1, -1, *[1] * (mean.dim() - 2))
        centre = (w * mean).sum(1, keepdim=True)
        parts.append(((w * (mean - centre) ** 2).sum(1), (w * variance).sum(1)))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def mean_entropy(likelihood: Likelihood, f: Tensor, K: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(H(E_f p), E_f H(p)) in nats (N,), for the probabilities p of `count` classes: the difference
    is the mutual information.

    By the nodes of `total_variance`. Where not every f is allowed there are no such nodes: without
    a difference, at f̂.
    """
    nodes, weights = normal_nodes(f.shape[-1], QUASI_POINTS)
    if not likelihood.linear_domain:
        nodes, weights = torch.zeros_like(nodes[:1]), torch.ones_like(weights[:1])
    classes, parts = torch.arange(count, dtype=torch.float64), []
    for start in range(0, max(f.shape[0], 1), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        points = f[part].unsqueeze(1) + nodes @ root(K[part]).mT  # (m, J, C)
        logs = likelihood.log_prob(
            classes.expand(*points.shape[:2], -1), points.unsqueeze(2)
        )  # (m, J, classes)
        p = torch.softmax(logs, -1)
        of_nodes = torch.special.entr(p).sum(-1) @ weights
        parts.append((torch.special.entr(torch.einsum("j,mjc->mc", weights, p)).sum(-1), of_nodes))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def split_variance(log_density: LogDensity, variance: Tensor) -> tuple[Tensor, Tensor]:
    """(epistemic, aleatoric) that add up to the predictive's own variance, in the proportion of the
    law of total variance.

    A rung that does not move f (ASSLA) has no uncertainty of f: its variance is all aleatoric.
    """
    if not log_density.moves:
        return torch.zeros_like(variance), variance
    doubt, noise = total_variance(log_density.likelihood, *log_density.marginal)
    whole = doubt + noise
    share = torch.where(torch.isfinite(whole) & (whole > 0), doubt / whole, torch.zeros_like(whole))
    epistemic = torch.where(torch.isinf(variance), doubt, share * variance)
    return epistemic, variance - torch.where(
        torch.isinf(variance), torch.zeros_like(epistemic), epistemic
    )


def _first_order(likelihood: Likelihood, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        free = f.detach().clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(likelihood.mean(free).sum(), free)
    return (slope.unsqueeze(-2) @ K @ slope.unsqueeze(-1)).squeeze((-2, -1)), likelihood.variance(f)
