"""Features so large that their squares overflow: inputs far beyond the training rows.

K = J H⁻¹ Jᵀ has squares of the features. Float32 holds them up to 1e19 only, so larger ones are
float64. Beyond `LARGEST` a row is moved along its ray, with its outputs, to that size:
probabilities have reached their limit long before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssla._checks import batched

LARGEST = 1e60  # of features: fourth powers of what is made of them are finite
ROOM = 1e15  # of features in float32: their squares, and sums of them, are finite


def shrink_factors(*parts: Tensor) -> Tensor | None:
    """Factors (B,) in (0, 1] after which no entry of the parts (B, …) exceeds `LARGEST`; None where
    nothing is to be done.

    An infinite entry counts as the largest number. Inside torch.func.vmap values cannot be read:
    nothing is done.
    """
    given = [part.detach() for part in parts if part.numel()]
    if any(batched(part) for part in given) or all(_is_small(part) for part in given):
        return None
    largest = torch.finfo(torch.float64).max
    sizes = [part.double().flatten(1).abs().amax(1).clamp_max(largest) for part in given]
    return LARGEST / torch.stack(sizes).amax(0).clamp_min(LARGEST)


def shrunk(part: Tensor, factors: Tensor) -> Tensor:
    """A part (B, …) in float64, each row times its factor."""
    largest = torch.finfo(torch.float64).max
    return part.double().clamp(-largest, largest) * factors.reshape(-1, *[1] * (part.dim() - 1))


def _is_small(part: Tensor) -> bool:
    return bool(part.abs().amax() <= (LARGEST if part.dtype == torch.float64 else ROOM))
