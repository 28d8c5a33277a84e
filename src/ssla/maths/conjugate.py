"""Conjugate gradients: A x = b where only products with A are to be had."""

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
    """x with A x = right, for a symmetric A; `precondition` applies about A⁻¹.

    Ends when the residual's length, measured by the preconditioner, has fallen by `tolerance`, or
    after `most` products. Where a direction has no positive curvature, x is what was found before
    it, which is a direction of ascent; None if it is the first one.
    """
    x = torch.zeros_like(right)
    residual = right.clone()
    z = precondition(residual)
    direction = z
    length = float(residual @ z)
    first = length
    if not length > 0:
        return x
    for count in range(most):
        turned = product(direction)
        bend = float(direction @ turned)
        if not bend > 0:
            return x if count else None
        size = length / bend
        x = x + size * direction
        residual = residual - size * turned
        z = precondition(residual)
        new = float(residual @ z)
        if not new > tolerance**2 * first:
            break
        direction = z + new / length * direction
        length = new
    return x
