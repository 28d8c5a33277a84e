"""The law of total variance under f ~ N(f̂, K): how much of Var[y] is noise, how much is doubt about f."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ssla.likelihoods import Custom, Likelihood
from ssla.linalg import root

ROWS_AT_ONCE = 4096


def total_variance(likelihood: Likelihood, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
    """(Var_f E[y|f], E_f Var[y|f]), each of the shape of likelihood.mean(f).

    Gauss–Hermite for one and two outputs, a 2C-point rule of third degree for more. Where not every f is
    allowed, to first order around f̂.
    """
    if not likelihood.linear_domain:
        return _first_order(likelihood, f, K)
    nodes, weights = _nodes(f.shape[-1], coarse=isinstance(likelihood, Custom))
    parts = []
    for start in range(0, f.shape[0], ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        points = f[part].unsqueeze(1) + nodes @ root(K[part]).mT  # (m, J, C)
        mean, variance = likelihood.mean(points), likelihood.variance(points)
        w = weights.reshape(1, -1, *[1] * (mean.dim() - 2))
        centre = (w * mean).sum(1, keepdim=True)
        parts.append(((w * (mean - centre) ** 2).sum(1), (w * variance).sum(1)))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def split_variance(likelihood: Likelihood, f: Tensor, K: Tensor, moves: bool, variance: Tensor) -> tuple[Tensor, Tensor]:
    """(epistemic, aleatoric) that add up to the predictive's own variance, in the law's proportion.

    A rung that does not move f (ASSLA) carries no doubt about f: its variance is all aleatoric.
    """
    if not moves:
        return torch.zeros_like(variance), variance
    doubt, noise = total_variance(likelihood, f, K)
    whole = doubt + noise
    share = torch.where(torch.isfinite(whole) & (whole > 0), doubt / whole, torch.zeros_like(whole))
    epistemic = torch.where(torch.isfinite(variance), share * variance, doubt)
    return epistemic, variance - torch.where(torch.isfinite(variance), epistemic, torch.zeros_like(epistemic))


def _nodes(size: int, coarse: bool) -> tuple[Tensor, Tensor]:
    """Points (J, C) and weights (J,) for expectations under N(0, I)."""
    if size > 2 or coarse:
        eye = torch.eye(size, dtype=torch.float64) * size**0.5
        return torch.cat([eye, -eye]), torch.full((2 * size,), 0.5 / size, dtype=torch.float64)
    x, w = np.polynomial.hermite_e.hermegauss(32 if size == 1 else 12)
    w = w / w.sum()
    if size == 1:
        return torch.from_numpy(x).unsqueeze(1), torch.from_numpy(w)
    a, b = np.meshgrid(x, x)
    return torch.from_numpy(np.stack([a.ravel(), b.ravel()], 1)), torch.from_numpy(np.outer(w, w).ravel())


def _first_order(likelihood: Likelihood, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        free = f.detach().clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(likelihood.mean(free).sum(), free)
    return (slope.unsqueeze(-2) @ K @ slope.unsqueeze(-1)).squeeze((-2, -1)), likelihood.variance(f)
