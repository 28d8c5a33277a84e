"""The law of total variance under f ~ N(f̂, K): how much of Var[y] is noise, how much is uncertainty of f."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ssla.likelihoods import Likelihood
from ssla.numerics.linalg import root
from ssla.refit import LogDensity

ROWS_AT_ONCE = 1024
QUASI_POINTS = 256


def total_variance(likelihood: Likelihood, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
    """(Var_f E[y|f], E_f Var[y|f]), each of the shape of likelihood.mean(f).

    Gauss–Hermite for one and two outputs, 512 quasi-random points for more. Where not every f is allowed, to first order
    around f̂.
    """
    if not likelihood.linear_domain:
        return _first_order(likelihood, f, K)
    nodes, weights = _nodes(f.shape[-1])
    parts = []
    for start in range(0, max(f.shape[0], 1), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        points = f[part].unsqueeze(1) + nodes @ root(K[part]).mT  # (m, J, C)
        mean, variance = likelihood.mean(points), likelihood.variance(points)
        w = weights.reshape(1, -1, *[1] * (mean.dim() - 2))
        centre = (w * mean).sum(1, keepdim=True)
        parts.append(((w * (mean - centre) ** 2).sum(1), (w * variance).sum(1)))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def split_variance(log_density: LogDensity, variance: Tensor) -> tuple[Tensor, Tensor]:
    """(epistemic, aleatoric) that add up to the predictive's own variance, in the proportion of the law of total variance.

    A rung that does not move f (ASSLA) has no uncertainty of f: its variance is all aleatoric.
    """
    if not log_density.moves:
        return torch.zeros_like(variance), variance
    doubt, noise = total_variance(log_density.likelihood, *log_density.marginal)
    whole = doubt + noise
    share = torch.where(torch.isfinite(whole) & (whole > 0), doubt / whole, torch.zeros_like(whole))
    epistemic = torch.where(torch.isinf(variance), doubt, share * variance)
    return epistemic, variance - torch.where(torch.isinf(variance), torch.zeros_like(epistemic), epistemic)


@lru_cache(maxsize=16)
def _nodes(size: int) -> tuple[Tensor, Tensor]:
    """Points (J, C) and weights (J,) for expectations under N(0, I)."""
    if size > 2:  # Sobol points, each with its mirror image: the same set every time
        u = torch.quasirandom.SobolEngine(size).draw(QUASI_POINTS + 1, dtype=torch.float64)[1:]
        z = torch.special.ndtri(u.clamp(1e-6, 1 - 1e-6))
        return torch.cat([z, -z]), torch.full((2 * QUASI_POINTS,), 0.5 / QUASI_POINTS, dtype=torch.float64)
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
