"""The exact determinant of many weights and few rows, in the space of the outputs.

    log|Π + JᵀΛJ| = log|Π| + log|I + RᵀΛR|,   R Rᵀ = G = J Π⁻¹ Jᵀ (nC × nC),

with J and Λ of all rows at a task's own θ̃. The prior is Gaussian, so log|Π| is the same for every
task and cancels. H is positive definite exactly where I + RᵀΛR is. A task costs its Jacobian
(nC × P), one product and two factorisations of nC × nC.

Terms and symbols are those of `ssla.refit.weights`. Here too: Π is the prior's precision, a
diagonal (P,), and rows i and outputs c are counted together as nC.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla.data import Inputs, take_rows
from ssla.priors import BoundGaussian
from ssla.refit.weights.all_weights_jacobians import (
    compute_jacobians_on_own_rows,
    compute_jacobians_on_same_rows,
)
from ssla.refit.weights.refit_rows import TrainingRows
from ssla.refit.weights.solved import compute_row_curvature

if TYPE_CHECKING:
    from ssla.posterior import Posterior

MOST_OUTPUTS = 2000  # a guess: n·C up to which nC × nC matrices are formed for each task
BYTES_AT_ONCE = 1 << 27  # a guess: bytes of the tasks that are computed together


def allows_dual(posterior: Posterior) -> bool:
    """Return whether `Dual` is possible.

    It is for few rows, and a Gaussian prior with a precision above zero for each weight.
    """
    precision = posterior.bound_prior.precision(posterior.theta)
    has_few_rows = posterior.statistics.n * posterior.network.outputs <= MOST_OUTPUTS
    is_gaussian = isinstance(posterior.bound_prior, BoundGaussian)
    return has_few_rows and is_gaussian and bool((precision > 0).all())


def count_dual_task_bytes(posterior: Posterior) -> int:
    """Return the bytes that one task of `Dual` needs.

    They are the Jacobian of all rows (itself, in blocks, and whitened) and six matrices of nC × nC,
    in float64, with the new row among the n.
    """
    row_outputs = (posterior.statistics.n + 1) * posterior.network.outputs
    return 8 * (3 * row_outputs * posterior.theta.numel() + 6 * row_outputs**2)


@dataclass(frozen=True, eq=False)
class Dual:
    """Curvature increments −½[log|H̃(θ̃)| − log|H(θ̂)|] without a P×P matrix.

    It is for posteriors that `allows_dual`.
    """

    posterior: Posterior
    network_outputs: Callable[[Tensor, Inputs], Tensor]  # (θ (P,), x) -> f (b, C)
    rows: TrainingRows
    # ½ log|I + RᵀΛR| at θ̂ and whether it exists, by kind of curvature: each is stored by the first
    # call for its kind.
    start_values: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(
        self, point: Tensor, y: Tensor, x: Inputs, curvature_kind: str
    ) -> tuple[Tensor, Tensor]:
        """Compute the increments (m,) of tasks at points θ − θ̂ (m, P), and where they exist (m,).

        They exist where H(θ̂) and H̃ are positive definite; elsewhere they have no meaning.
        y (m, …), x (m, …): those of the new rows. curvature_kind: OBSERVED or FISHER.
        """
        theta_hat = self.posterior.theta
        if curvature_kind not in self.start_values:
            self.start_values[curvature_kind] = self._compute_half_logdet(
                theta_hat.unsqueeze(0), curvature_kind, None
            )
        start, start_exists = self.start_values[curvature_kind]
        at_once = max(BYTES_AT_ONCE // count_dual_task_bytes(self.posterior), 1)
        results = [
            self._compute_half_logdet(
                theta_hat + point[tasks], curvature_kind, (y[tasks], take_rows(x, tasks))
            )
            for tasks in torch.arange(len(point)).split(at_once)
        ]
        halves, exist = zip(*results, strict=True)
        return start - torch.cat(halves), torch.cat(exist) & start_exists

    def _compute_half_logdet(
        self, thetas: Tensor, curvature_kind: str, new_rows: tuple[Tensor, Inputs] | None
    ) -> tuple[Tensor, Tensor]:
        """Compute ½ log|I + RᵀΛR| (m,) at each θ (m, P), and where it exists (m,).

        It exists where the matrix is positive definite. curvature_kind: of Λ. new_rows: (y, x) with
        a row for each θ, which counts as the last training row; None: the training rows alone.
        """
        likelihood, bound_prior = self.posterior.likelihood, self.posterior.bound_prior
        jacobians, precisions = [], []
        for block in self.rows:
            J, f = compute_jacobians_on_same_rows(self.network_outputs, thetas, block.x)
            precision = compute_row_curvature(likelihood, curvature_kind, block.y, f).expand(
                *f.shape, f.shape[-1]
            )
            if block.weights is not None:
                precision = precision * block.weights[:, None, None]
            jacobians.append(J)
            precisions.append(precision)

        if new_rows is not None:
            y, x = new_rows
            J, f = compute_jacobians_on_own_rows(self.network_outputs, thetas, x)
            jacobians.append(J.unsqueeze(1))
            precision = compute_row_curvature(likelihood.predictive, curvature_kind, y, f)
            precisions.append(precision.expand(*f.shape, f.shape[-1]).unsqueeze(1))
        J, Lambda = torch.cat(jacobians, 1), torch.cat(precisions, 1)

        # G = J Π⁻¹ Jᵀ of all rows together (m, nC, nC), from J with the rows (i, c) flattened.
        white = (J / bound_prior.precision(self.posterior.theta).sqrt()).flatten(1, 2)
        R = _factorise_gram(white @ white.mT)
        LR = (Lambda @ R.reshape(*Lambda.shape[:3], -1)).reshape(R.shape)
        factor, info = torch.linalg.cholesky_ex(torch.eye(R.shape[-1], dtype=R.dtype) + R.mT @ LR)
        return factor.diagonal(dim1=-2, dim2=-1).log().sum(-1), info == 0


def _factorise_gram(G: Tensor) -> Tensor:
    """Return R with R Rᵀ = G, for positive semi-definite matrices G (m, k, k).

    R (m, k, k) is the Cholesky factor; for a singular G, as of equal rows, it is Q √max(λ, 0) with
    the eigenvectors Q and eigenvalues λ.
    """
    factor, info = torch.linalg.cholesky_ex(G)
    singular = info.nonzero().squeeze(-1)
    if singular.numel():
        values, vectors = torch.linalg.eigh(G[singular])
        factor[singular] = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    root: Tensor = factor
    return root
