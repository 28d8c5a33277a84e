"""What a refit does to the log prior, and covariances without it: for the other conventions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla.curvature import Operator
from ssla.curvature.jacobians import Jacobian
from ssla.data import Inputs
from ssla.values import Marginal, joined

if TYPE_CHECKING:
    from ssla.posterior import Posterior


def prior_response(posterior: Posterior, x: Inputs) -> Marginal:
    """What a refit does to log π, to second order: mean b = J H⁻¹ ∇log π, covariance J H⁻¹ (−∇²
    log π) H⁻¹ Jᵀ.

    A refit that moves the outputs by K u moves θ by H⁻¹Jᵀu and log π by bᵀu − ½ uᵀ(·)u.
    """
    pull = posterior.covariance.solve(posterior.bound_prior.gradient(posterior.mean))
    middle = posterior.bound_prior.precision(posterior.mean)
    return joined(
        posterior.network.outputs,
        [
            (J.push(pull), _response(posterior.covariance, J, middle))
            for _, J in posterior.linearised(x)
        ],
    )


def data_covariance(posterior: Posterior, x: Inputs) -> Tensor:
    """J S⁻¹ Jᵀ (N, C, C) in float64: what the determinant of the paper's convention takes."""
    return joined(
        posterior.network.outputs,
        [(f, posterior.data_operator.covariance(J)) for f, J in posterior.linearised(x)],
    ).covariance


def _response(operator: Operator, J: Jacobian, middle: Tensor) -> Tensor:
    """J H⁻¹ M H⁻¹ Jᵀ for any symmetric M: a diagonal (P,) of either sign, or a full matrix by
    its eigenvectors.
    """
    if middle.dim() == 1:
        plus = operator.response(J, middle.clamp_min(0))
        return (
            plus
            if bool((middle >= 0).all())
            else plus - operator.response(J, (-middle).clamp_min(0))
        )
    values, vectors = torch.linalg.eigh(middle)
    moves = torch.stack([J.push(operator.solve(v)).double() for v in vectors.mT], -1)  # (B, C, P)
    whole: Tensor = (moves * values) @ moves.mT
    return whole
