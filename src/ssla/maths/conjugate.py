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

    product: v -> A v. precondition: v -> about A⁻¹ v. It ends when the residual's length, measured
    by the preconditioner, has fallen by `tolerance`, or after `most` products. If a direction d has
    no positive curvature dᵀAd, x of the steps before it is returned; None if it is the first one.
    """
    x = torch.zeros_like(right)
    residual = right.clone()
    preconditioned = precondition(residual)
    direction = preconditioned
    length = float(residual @ preconditioned)
    first_length = length
    # The right side is zero, or not a number.
    if not length > 0:
        return x
    for count in range(most):
        A_direction = product(direction)
        curvature = float(direction @ A_direction)
        if not curvature > 0:
            return x if count else None
        step = length / curvature
        x = x + step * direction
        residual = residual - step * A_direction
        preconditioned = precondition(residual)
        new_length = float(residual @ preconditioned)
        if not new_length > tolerance**2 * first_length:
            break
        # The next direction is conjugate to all before it: dᵀAd′ = 0.
        direction = preconditioned + new_length / length * direction
        length = new_length
    return x
