"""A linear layer whose weights come later."""

from __future__ import annotations

import torch
from torch import nn


class _Unset(nn.Linear):
    def reset_parameters(self) -> None:
        """Nothing: no random number is drawn."""


def unset_linear(inputs: int, outputs: int, dtype: torch.dtype | None = None) -> nn.Linear:
    """A linear layer with any weights.

    (`nn.utils.skip_init` does the same, but its first call takes up to two seconds.)
    """
    layer: nn.Linear = _Unset(inputs, outputs, dtype=dtype)
    layer.__class__ = nn.Linear
    return layer
