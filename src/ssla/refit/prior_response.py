"""The change of the log prior by a refit, and covariances without the prior.

Both are for the conventions in which the prior is not part of the curvature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla.curvature import Operator
from ssla.curvature.jacobians import Jacobian
from ssla.data import Inputs
from ssla.values import Marginal, join_chunks

if TYPE_CHECKING:
    from ssla.posterior import Posterior


def prior_response(posterior: Posterior, x: Inputs) -> Marginal:
    """Compute how a refit at inputs x (N rows) changes log π, to second order, in float64.

    A refit that moves the outputs by K u moves θ by H⁻¹Jᵀu, and log π by bᵀu − ½ uᵀMu. The result
    has b = J H⁻¹ ∇log π as its mean (N, C), and M = J H⁻¹ (−∇² log π) H⁻¹ Jᵀ as its covariance
    (N, C, C): `Marginal` is used for its shapes alone.
    """
    solved = posterior.covariance.solve(posterior.bound_prior.gradient(posterior.mean))
    precision = posterior.bound_prior.precision(posterior.mean)
    return join_chunks(
        posterior.network.outputs,
        [
            (J.push(solved), _project_precision(posterior.covariance, J, precision))
            for _, J in posterior.linearised(x)
        ],
    )


def compute_data_covariance(posterior: Posterior, x: Inputs) -> Tensor:
    """Compute J S⁻¹ Jᵀ (N, C, C) in float64, with S the curvature of the data without the prior.

    It is the covariance in the determinant of the paper's convention. x: N inputs. Raises
    ValueError if the data alone do not determine every parameter.
    """
    return join_chunks(
        posterior.network.outputs,
        [(f, posterior.data_operator.covariance(J)) for f, J in posterior.linearised(x)],
    ).covariance


def _project_precision(operator: Operator, J: Jacobian, M: Tensor) -> Tensor:
    """Compute J H⁻¹ M H⁻¹ Jᵀ (B, C, C) for any symmetric M, and J (B, C, P).

    operator: H⁻¹. M: a diagonal (P,), whose entries may have either sign, or a full matrix (P, P),
    which is used by its eigenvectors.
    """
    if M.dim() == 1:
        # `sandwich_covariance` takes entries that are not negative, so the two signs are apart.
        positive = operator.sandwich_covariance(J, M.clamp_min(0))
        if bool((M >= 0).all()):
            return positive
        return positive - operator.sandwich_covariance(J, (-M).clamp_min(0))
    values, vectors = torch.linalg.eigh(M)
    moves = torch.stack([J.push(operator.solve(v)).double() for v in vectors.mT], -1)  # (B, C, P)
    response: Tensor = (moves * values) @ moves.mT
    return response
