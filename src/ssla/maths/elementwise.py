"""Functions of the entries of tensors that neither overflow nor cancel, and their shapes."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus


def common_shape(*tensors: Tensor) -> torch.Size:
    """Return the shape to which all tensors broadcast."""
    # torch.broadcast_shapes would import torch's compiler first, which takes seconds.
    shape: torch.Size = torch.broadcast_tensors(*tensors)[0].shape
    return shape


def capped_exp(t: Tensor) -> Tensor:
    """Return exp(t), elementwise, but at most the fourth root of the dtype's largest number.

    So products of up to four such values stay finite. It is exp(t) itself for t ≤ 177 in float64
    and for t ≤ 22 in float32.
    """
    return torch.exp(t.clamp_max(largest_exponent(t.dtype)))


def largest_exponent(dtype: torch.dtype) -> float:
    """Return the t from which on `capped_exp` is constant, for a floating-point dtype."""
    return math.log(torch.finfo(dtype).max) / 4


def softplus_difference(old: Tensor, step: Tensor) -> Tensor:
    """Return softplus(old + step) − softplus(old), elementwise, without cancellation.

    For |step| ≤ 1 this is log1p(σ(old)·expm1(step)). For larger steps the plain difference does not
    cancel.
    """
    # The clamp keeps the branch that is not taken finite, and with it the gradient of `where`.
    close = torch.log1p(torch.sigmoid(old) * torch.expm1(step.clamp(-1, 1)))
    return torch.where(step.abs() <= 1, close, softplus(old + step) - softplus(old))


def uniform_numbers(template: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """Return uniform numbers strictly inside (0, 1), float64 of shape (n, *template.shape).

    The numbers are on the device of `template`. Without a generator, torch's global one is used.
    """
    u = torch.rand(
        (n, *template.shape), dtype=torch.float64, device=template.device, generator=generator
    )
    # Quantile functions are infinite at 0 and 1.
    return u.clamp(1e-16, 1 - 1e-16)
