"""The exact determinant of many weights and few rows, in the space of the outputs.

    log|Π + JᵀΛJ| = log|Π| + log|I + RᵀΛR|,   R Rᵀ = G = J Π⁻¹ Jᵀ (nC × nC),

with J and Λ of all rows at a task's own θ̃. The prior is Gaussian, so log|Π| is the same for every
task and cancels. H is positive definite exactly where I + RᵀΛR is. A task costs its Jacobian (nC ×
P), one product and two factorisations of nC × nC.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla.data import Inputs
from ssla.likelihoods import Likelihood
from ssla.priors import BoundGaussian
from ssla.refit.increments import FISHER
from ssla.refit.weights import all_weights_jacobians as jacobians
from ssla.refit.weights.refit_rows import TrainingRows, take

if TYPE_CHECKING:
    from ssla.posterior import Posterior

MOST_OUTPUTS = 2000  # n·C up to which nC × nC matrices are formed for each task
AT_ONCE = 1 << 27  # bytes, where one task needs less


def fits(posterior: Posterior) -> bool:
    """Whether a posterior has few enough rows, and a proper Gaussian prior with one precision
    for each weight.
    """
    precision = posterior.bound_prior.precision(posterior.theta)
    few = posterior.statistics.n * posterior.network.outputs <= MOST_OUTPUTS
    return few and isinstance(posterior.bound_prior, BoundGaussian) and bool((precision > 0).all())


def bytes_needed(posterior: Posterior) -> int:
    """Of one task: the Jacobian of all rows (itself, in blocks, and whitened) and six matrices
    of nC × nC.
    """
    outputs = (posterior.statistics.n + 1) * posterior.network.outputs
    return 8 * (3 * outputs * posterior.theta.numel() + 6 * outputs**2)


@dataclass(frozen=True, eq=False)
class Dual:
    """−½[log|H̃(θ̃)| − log|H(θ̂)|] without a P×P matrix."""

    posterior: Posterior
    run: Callable[[Tensor, Inputs], Tensor]  # (θ (P,), x) -> f (b, C)
    rows: TrainingRows
    known: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # at θ̂, by kind

    def __call__(self, point: Tensor, y: Tensor, x: Inputs, kind: str) -> tuple[Tensor, Tensor]:
        """θ − θ̂ (m, P) and the tasks' y and x -> increments (m,), and where H̃ is positive
        definite.
        """
        if kind not in self.known:
            self.known[kind] = self._half_logdet(self.posterior.theta.unsqueeze(0), kind, None)
        before, exists = self.known[kind]
        parts = [
            self._half_logdet(self.posterior.theta + point[tasks], kind, (y[tasks], take(x, tasks)))
            for tasks in torch.arange(len(point)).split(
                max(AT_ONCE // bytes_needed(self.posterior), 1)
            )
        ]
        return before - torch.cat([half for half, _ in parts]), torch.cat(
            [good for _, good in parts]
        ) & exists

    def _half_logdet(
        self, thetas: Tensor, kind: str, own: tuple[Tensor, Inputs] | None
    ) -> tuple[Tensor, Tensor]:
        """½ log|I + RᵀΛR| at each θ (m, P), of the data and the task's own (y, x); and where
        that is positive definite.
        """
        likelihood = self.posterior.likelihood
        parts, precisions = [], []
        for block in self.rows:
            J, f = jacobians.of_rows(self.run, thetas, block.x)
            precision = _curvature(likelihood, kind, block.y, f)
            parts.append(J)
            precisions.append(
                precision if block.weights is None else precision * block.weights[:, None, None]
            )
        if own is not None:
            y, x = own
            J, f = jacobians.of_own(self.run, thetas, x)
            parts.append(J.unsqueeze(1))
            precisions.append(_curvature(likelihood.predictive, kind, y, f).unsqueeze(1))
        J, Lambda = torch.cat(parts, 1), torch.cat(precisions, 1)
        white = (J / self.posterior.bound_prior.precision(self.posterior.theta).sqrt()).flatten(
            1, 2
        )
        R = _root(white @ white.mT)
        LR = (Lambda @ R.reshape(*Lambda.shape[:3], -1)).reshape(R.shape)
        factor, info = torch.linalg.cholesky_ex(torch.eye(R.shape[-1], dtype=R.dtype) + R.mT @ LR)
        return factor.diagonal(dim1=-2, dim2=-1).log().sum(-1), info == 0


def _curvature(likelihood: Likelihood, kind: str, y: Tensor, f: Tensor) -> Tensor:
    value = likelihood.fisher(f) if kind == FISHER else likelihood.precision(y, f)
    return value.expand(*f.shape, f.shape[-1])


def _root(G: Tensor) -> Tensor:
    """R with R Rᵀ = G: Cholesky, or by eigenvalues where G is singular (rows that are the same)."""
    factor, info = torch.linalg.cholesky_ex(G)
    bad = info.nonzero().squeeze(-1)
    if bad.numel():
        values, vectors = torch.linalg.eigh(G[bad])
        factor[bad] = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    root: Tensor = factor
    return root
