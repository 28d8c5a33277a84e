"""Conjugate gradients: A x = b where only products with A are available."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""v (P,) -> A v (P,)."""


def conjugate_gradients(
    product: Product,
    right: Tensor,
    precondition: Product,
    tolerance: float = 1e-8,
    most: int = 200,
) -> Tensor | None:
    """Compute x (P,) with A x = right, for a symmetric A and a right side (P,).

    product: v -> A v. precondition: v -> about A⁻¹ v, symmetric and positive definite. It ends when
    the length of the residual r, √(rᵀ precondition(r)), is below `tolerance` times that of the
    right side, or after `most` products. If a direction d has no positive curvature dᵀAd, x of the
    steps before it is returned, or None if it is the first one. For a right side that is zero or
    not a number, x is zero.
    """
    x = torch.zeros_like(right)
    residual = right.clone()
    preconditioned = precondition(residual)
    direction = preconditioned
    squared_length = float(residual @ preconditioned)
    first_squared_length = squared_length

    # Written with `not`, so that it is true for NaN too, as are the comparisons below.
    if not squared_length > 0:
        return x
    for count in range(most):
        A_direction = product(direction)
        curvature = float(direction @ A_direction)
        if not curvature > 0:
            return x if count else None
        step = squared_length / curvature
        x = x + step * direction
        residual = residual - step * A_direction
        preconditioned = precondition(residual)
        new_squared_length = float(residual @ preconditioned)
        if not new_squared_length > tolerance**2 * first_squared_length:
            break

        # The next direction d′ is conjugate to all before it: dᵀAd′ = 0.
        direction = preconditioned + new_squared_length / squared_length * direction
        squared_length = new_squared_length

    return x
