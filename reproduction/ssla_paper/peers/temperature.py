"""Temperature scaling: one number that divides the logits, by the likelihood of held-out rows."""

from __future__ import annotations

import torch
from torch import Tensor

COLDEST, WARMEST = 0.05, 20.0


def temperature(logits: Tensor, y: Tensor) -> float:
    """T that maximises Σ log softmax(f/T)_y; logits (n, C), y (n,).

    In β = 1/T the objective is concave with slope Σ_rows Σ_c p_c (f_y − f_c), so its root is found
    by bisection. If every row is correct the slope has no root and T would be 0: then the network
    is unchanged, T = 1.
    """
    f = logits.double()
    if bool((f.argmax(1) == y.long()).all()):
        return 1.0
    # in this form a slope of 1e-200 is not rounded to zero
    margin = f.gather(1, y.long()[:, None]) - f

    def slope(beta: Tensor) -> float:
        return float((torch.softmax(beta * f, 1) * margin).sum())

    low, high = torch.tensor(1 / WARMEST).double().log(), torch.tensor(1 / COLDEST).double().log()
    for _ in range(60):
        middle = (low + high) / 2
        if slope(middle.exp()) > 0:
            low = middle
        else:
            high = middle
    return float(torch.exp(-(low + high) / 2))
