"""Linear layers without initial weights, for callers that set the weights."""

from __future__ import annotations

import torch
from torch import nn


class _Unset(nn.Linear):
    """A linear layer that draws no initial weights."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are: no random number is drawn."""


def make_unset_linear(inputs: int, outputs: int, dtype: torch.dtype | None = None) -> nn.Linear:
    """Return a linear layer with undefined weights, which the caller sets.

    dtype: None for torch's default. `nn.utils.skip_init` does the same, but its first call takes up
    to two seconds.
    """
    layer: nn.Linear = _Unset(inputs, outputs, dtype=dtype)
    # Files and plans identify layers by their class, so the caller gets a plain nn.Linear.
    layer.__class__ = nn.Linear
    return layer
