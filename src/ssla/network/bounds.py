"""Features so large that their squares overflow: inputs far beyond the training rows.

K = J H⁻¹ Jᵀ has squares of the features. Float32 holds them up to 1e19 only, so larger ones are
float64. Beyond `LARGEST` a row is moved along its ray, with its outputs, to that size:
probabilities have reached their limit long before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssla._checks import is_inside_vmap

LARGEST = 1e60  # of features in float64: fourth powers are finite, and so are squares of K
LARGEST_FLOAT32 = 1e15  # of features in float32: squares, and sums of squares, are finite


def shrink_factors(*arrays_of_rows: Tensor) -> Tensor | None:
    """Return factors (B,) in (0, 1] after which no entry of the arrays (B, …) exceeds `LARGEST`.

    The result is None if all entries are small enough as they are. An infinite entry counts as the
    largest number. Inside torch.func.vmap values cannot be read, and the result is None.
    """
    arrays = [array.detach() for array in arrays_of_rows if array.numel()]
    if any(is_inside_vmap(array) for array in arrays) or all(_is_small(array) for array in arrays):
        return None
    largest = torch.finfo(torch.float64).max
    sizes = [array.double().flatten(1).abs().amax(1).clamp_max(largest) for array in arrays]
    return LARGEST / torch.stack(sizes).amax(0).clamp_min(LARGEST)


def shrink_rows(array: Tensor, factors: Tensor) -> Tensor:
    """Return an array (B, …) in float64, with each row times its factor (B,).

    Infinite entries are first replaced by the largest number.
    """
    largest = torch.finfo(torch.float64).max
    by_row = factors.reshape(-1, *[1] * (array.dim() - 1))  # (B, 1, …)
    return array.double().clamp(-largest, largest) * by_row


def _is_small(array: Tensor) -> bool:
    """Return whether squares of the entries, and sums of them, are finite in the array's dtype."""
    limit = LARGEST if array.dtype == torch.float64 else LARGEST_FLOAT32
    return bool(array.abs().amax() <= limit)
