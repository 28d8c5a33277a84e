"""Jacobians of the outputs in the weights, for many weights at once.

Each row for itself: the work grows with b, not with b².
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ssla.data import Inputs
from ssla.refit.weights.refit_rows import leading

Run = Callable[[Tensor, Inputs], Tensor]  # (θ (P,), x) -> f (b, C)


def of_rows(run: Run, thetas: Tensor, x: Inputs) -> tuple[Tensor, Tensor]:
    """θ (m, P), the same rows x (b, …) for all -> J (m, b, C, P) and f (m, b, C)."""
    one = torch.func.vmap(_of_row(run), in_dims=(None, 0))
    J, f = torch.func.vmap(one, in_dims=(0, None))(thetas, x)
    return J.detach(), f.detach()


def of_own(run: Run, thetas: Tensor, x: Inputs) -> tuple[Tensor, Tensor]:
    """θ (m, P), a row of its own for each, x (m, …) -> J (m, C, P) and f (m, C)."""
    J, f = torch.func.vmap(_of_row(run))(thetas, x)
    return J.detach(), f.detach()


def _of_row(run: Run) -> Callable[[Tensor, Inputs], tuple[Tensor, Tensor]]:
    def both(theta: Tensor, row: Inputs) -> tuple[Tensor, Tensor]:
        f = run(theta, leading(row)).squeeze(0)
        return f, f

    jacobian: Callable[[Tensor, Inputs], tuple[Tensor, Tensor]] = torch.func.jacrev(
        both, has_aux=True
    )
    return jacobian
