"""Jacobians of the outputs in the weights, for many weight vectors at once.

Each row is differentiated alone, so the work grows with the number of rows b, not with b². Symbols
are those of `ssla.refit.weights`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ssla.data import Inputs
from ssla.refit.weights.refit_rows import as_batch

NetworkOutputs = Callable[[Tensor, Inputs], Tensor]  # (θ (P,), x) -> f (b, C)


def compute_jacobians_on_same_rows(
    network_outputs: NetworkOutputs, thetas: Tensor, x: Inputs
) -> tuple[Tensor, Tensor]:
    """Compute J (m, b, C, P) and f (m, b, C) of each θ (m, P) on the same rows x (b, …).

    network_outputs: f_θ of one network. Neither result has a graph. RuntimeErrors of layers without
    a batching rule are not caught.
    """
    jacobians_of_one_network = torch.func.vmap(
        _make_row_jacobian(network_outputs), in_dims=(None, 0)
    )
    J, f = torch.func.vmap(jacobians_of_one_network, in_dims=(0, None))(thetas, x)
    return J.detach(), f.detach()


def compute_jacobians_on_own_rows(
    network_outputs: NetworkOutputs, thetas: Tensor, x: Inputs
) -> tuple[Tensor, Tensor]:
    """Compute J (m, C, P) and f (m, C) of each θ (m, P) on a row of its own, for x (m, …).

    network_outputs: f_θ of one network. Neither result has a graph. RuntimeErrors of layers without
    a batching rule are not caught.
    """
    J, f = torch.func.vmap(_make_row_jacobian(network_outputs))(thetas, x)
    return J.detach(), f.detach()


def _make_row_jacobian(
    network_outputs: NetworkOutputs,
) -> Callable[[Tensor, Inputs], tuple[Tensor, Tensor]]:
    """Return the function from θ (P,) and one row of x to J (C, P) and f (C,), in one pass."""

    def compute_outputs_twice(theta: Tensor, row: Inputs) -> tuple[Tensor, Tensor]:
        """Return f (C,) twice: `jacrev` differentiates the first and returns the second."""
        f = network_outputs(theta, as_batch(row)).squeeze(0)
        return f, f

    jacobian: Callable[[Tensor, Inputs], tuple[Tensor, Tensor]] = torch.func.jacrev(
        compute_outputs_twice, has_aux=True
    )
    return jacobian
