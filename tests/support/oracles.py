"""Answers computed another way: analytic, quadrature, brute force, finite differences.

Nothing here uses ssla's algebra.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy import optimize, stats
from torch import nn


class Constant(nn.Module):
    """f = θ, whatever x is: the normal–normal model as a network (feature 1, no bias)."""

    def __init__(self, outputs: int = 1, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.head = nn.Linear(1, outputs, bias=False, dtype=dtype)

    def forward(self, x):
        return self.head(torch.ones_like(x[:, :1]))


def linear_predictive(X, y, sigma2, prior_precision, prior_mean, x_new):
    """Exact Bayesian linear regression in NumPy: mean and variance of y at x_new (rows)."""
    X, y, x_new = (np.asarray(a, dtype=float) for a in (X, y, x_new))
    H = X.T @ X / sigma2 + np.diag(np.broadcast_to(prior_precision, X.shape[1]))
    b = X.T @ y / sigma2 + np.broadcast_to(prior_precision, X.shape[1]) * np.broadcast_to(
        prior_mean, X.shape[1]
    )
    theta = np.linalg.solve(H, b)
    return x_new @ theta, sigma2 + np.einsum("ni,ij,nj->n", x_new, np.linalg.inv(H), x_new)


def linear_log_evidence(X, y, sigma2, prior_precision, prior_mean):
    """log N(y; X m, σ²I + X P⁻¹ Xᵀ)."""
    X, y = np.asarray(X, dtype=float), np.asarray(y, dtype=float)
    P = np.broadcast_to(prior_precision, X.shape[1])
    mean = X @ np.broadcast_to(prior_mean, X.shape[1])
    return stats.multivariate_normal(mean, sigma2 * np.eye(len(y)) + (X / P) @ X.T).logpdf(y)


def gauss_hermite(likelihood, y, f, K, nodes=60):
    """log ∫ p(y|f) N(f; f̂, K) df for y (N, k), f (N, C), K (N, C, C), C ≤ 2: (N, k)."""
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    w = w / w.sum()
    C = f.shape[1]
    grid = np.stack(np.meshgrid(*[x] * C, indexing="ij"), -1).reshape(-1, C)
    weights = np.array(w)
    for _ in range(C - 1):
        weights = np.multiply.outer(weights, w)
    weights = torch.from_numpy(weights.reshape(-1))
    R = torch.linalg.cholesky(K + 1e-300 * torch.eye(C))
    points = f[:, None, :] + torch.from_numpy(grid) @ R.mT  # (N, J, C)
    logs = likelihood.log_prob(y[:, :, None], points[:, None, :, :])
    return torch.logsumexp(logs + weights.log(), -1)


def monte_carlo_classes(f, K, draws=400_000, seed=0):
    """E softmax(f) under N(f̂, K): (N, C)."""
    generator = torch.Generator().manual_seed(seed)
    white = torch.randn(draws // 2, f.shape[1], dtype=torch.float64, generator=generator)
    white = torch.cat([white, -white])
    R = torch.linalg.cholesky(K)
    return torch.stack([torch.softmax(f[i] + white @ R[i].mT, -1).mean(0) for i in range(len(f))])


def jacobian(model, x, names):
    """∂f/∂θ by one backward pass for each output of each row: (N, C, P) in the order of `names`."""
    parameters = dict(model.named_parameters())
    rows = []
    for i in range(len(x)):
        f = model(x[i : i + 1]).reshape(-1)
        row = []
        for value in f:
            grads = torch.autograd.grad(value, [parameters[n] for n in names], retain_graph=True)
            row.append(torch.cat([g.flatten() for g in grads]))
        rows.append(torch.stack(row))
    return torch.stack(rows).detach()


def finite_difference(function, f, eps=1e-5):
    """∂ function(f)/∂f by central differences; function (…, C) -> (…) or (…, D).

    -> (…, C) or (…, D, C).
    """
    columns = []
    for c in range(f.shape[-1]):
        step = torch.zeros_like(f)
        step[..., c] = eps * (1 + f[..., c].abs())
        up, down = function(f + step), function(f - step)
        width = 2 * step[..., c]
        columns.append((up - down) / (width if up.dim() == width.dim() else width.unsqueeze(-1)))
    return torch.stack(columns, -1)


def kl_on_grid(log_p, log_q, weights):
    """∫ p (log p − log q) for densities on nodes with weights (…, k): (…)."""
    return (log_p.exp() * (log_p - log_q) * weights).sum(-1)


def random_spd(*shape, seed=0, scale=1.0, singular=False):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(*shape, dtype=torch.float64, generator=generator)
    if singular:
        A[..., :, -1] = A[..., :, 0]
        A = A[..., :1].expand_as(A)
    return scale * A @ A.mT


def brute_force_refit(log_joint, log_new, theta, tilted=True):
    """SSLA by its definition, one task at a time: SciPy finds the mode, autograd gives Hessians,
    NumPy determinants.

    log_joint(θ) and log_new(θ) are scalar torch functions of a flat θ. -> (log density, θ̃).
    """
    theta = theta.detach().clone()
    slope = torch.func.grad(log_joint)(theta) if tilted else torch.zeros_like(theta)

    def objective(t):
        return log_joint(t) + log_new(t) - slope @ (t - theta)

    def as_numpy(function):
        return lambda t: -function(torch.from_numpy(np.array(t))).detach().numpy()

    hessian = torch.func.jacrev(torch.func.grad(objective))
    found = optimize.minimize(
        as_numpy(objective),
        theta.numpy(),
        jac=as_numpy(torch.func.grad(objective)),
        hess=as_numpy(hessian),
        method="trust-exact",
        options={"gtol": 1e-9, "maxiter": 2000},
    )
    end = torch.from_numpy(found.x)
    for _ in range(3):  # what the values' rounding hid from SciPy
        end = end - torch.linalg.solve(hessian(end), torch.func.grad(objective)(end))
    assert torch.func.grad(objective)(end).abs().max() < 1e-8
    sign, after = np.linalg.slogdet(-hessian(end).numpy())
    sign_before, before = np.linalg.slogdet(
        -torch.func.jacrev(torch.func.grad(log_joint))(theta).numpy()
    )
    assert sign > 0
    assert sign_before > 0
    value = float(log_joint(end) - log_joint(theta) + log_new(end) - slope @ (end - theta))
    return value - 0.5 * (after - before), end
