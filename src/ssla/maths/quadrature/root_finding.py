"""Roots of monotone functions, thousands at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MOST_ROUNDS = 100
RELATIVE = 4e-15


def bracketed_root(
    function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, noise: Tensor | float = 0.0
) -> Tensor:
    """x in [low, high] with function(x) = 0, elementwise; function rises from ≤ 0 at low to ≥ 0 at
    high.

    Inverse quadratic steps where they are safe, bisection elsewhere (Chandrupatla's rule). Ends
    when every bracket has the width of rounding error, or a value of at most `noise`, which is the
    rounding error of the function. Where low = high, or either is infinite, the result is low. An
    end where the function is zero, or has the other sign by rounding, is the root.
    """
    settled = ~(torch.isfinite(low) & torch.isfinite(high) & (low < high))
    anywhere = torch.nan_to_num(low, nan=0.0, posinf=0.0, neginf=0.0)
    a, b = torch.where(settled, anywhere, high), torch.where(settled, anywhere, low)
    fa, fb = function(a), function(b)
    end = torch.where((fa <= 0) & (fb < 0) & ~settled, high, low)
    settled = settled | (fa <= 0) | (fb >= 0)
    best, part = a, torch.full_like(a, 0.5)
    for _ in range(MOST_ROUNDS):
        x = a + part * (b - a)
        fx = function(x)
        same = torch.sign(fx) == torch.sign(fa)
        c, fc = torch.where(same, a, b), torch.where(same, fa, fb)
        b, fb = torch.where(same, b, a), torch.where(same, fb, fa)
        a, fa = x, fx
        best = torch.where(fa.abs() < fb.abs(), a, b)
        width = (b - a).abs()
        least = RELATIVE * torch.maximum(a.abs(), b.abs()) / width.clamp_min(1e-300)
        if bool((settled | (least > 0.5) | (torch.minimum(fa.abs(), fb.abs()) <= noise)).all()):
            break
        place, height = (a - b) / (c - b), (fa - fb) / (fc - fb)
        safe = (height**2 < place) & ((1 - height) ** 2 < 1 - place)
        step = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        part = torch.where(safe & torch.isfinite(step), step, torch.full_like(step, 0.5))
        part = torch.minimum(torch.maximum(part, least), 1 - least).clamp(0, 1)
    return torch.where(settled, end, best)
