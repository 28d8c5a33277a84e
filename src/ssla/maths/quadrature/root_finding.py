"""Roots of monotone functions, thousands at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MOST_ROUNDS = 100  # bisection alone needs about 60
RELATIVE = 4e-15  # width of a bracket at which it is rounding error


def bracketed_root(
    function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, noise: Tensor | float = 0.0
) -> Tensor:
    """Find x in [low, high] with function(x) = 0, elementwise, for tensors of any one shape.

    function: elementwise, from ≤ 0 at low to ≥ 0 at high, rising. It is called with tensors of the
    shape of low. noise: its rounding error. Inverse quadratic steps are taken where they are safe,
    bisection elsewhere (Chandrupatla's rule). The search ends when every bracket has the width of
    rounding error or a value of at most `noise`, and after MOST_ROUNDS. Where low ≥ high, or either
    is not finite, the result is low. An end where the function is zero, or has the other sign by
    rounding, is the root.
    """
    # In the search a is the latest point, and b the end of the bracket on the other side of the
    # root; fa and fb are the function there. Settled entries have their root already.
    settled = ~(torch.isfinite(low) & torch.isfinite(high) & (low < high))

    # Settled entries are evaluated too, at a finite point whose value is not used.
    finite_low = torch.nan_to_num(low, nan=0.0, posinf=0.0, neginf=0.0)
    a, b = torch.where(settled, finite_low, high), torch.where(settled, finite_low, low)
    fa, fb = function(a), function(b)

    # At the ends a = high and b = low, unless settled.
    settled_root = torch.where((fa <= 0) & (fb < 0) & ~settled, high, low)
    settled = settled | (fa <= 0) | (fb >= 0)
    best = a
    fraction = torch.full_like(a, 0.5)
    for _ in range(MOST_ROUNDS):
        x = a + fraction * (b - a)
        fx = function(x)

        # The new point becomes a, and b the end at which the function has the other sign. c is the
        # end that is dropped.
        same = torch.sign(fx) == torch.sign(fa)
        c, fc = torch.where(same, a, b), torch.where(same, fa, fb)
        b, fb = torch.where(same, b, a), torch.where(same, fb, fa)
        a, fa = x, fx
        best = torch.where(fa.abs() < fb.abs(), a, b)
        width = (b - a).abs()

        # The smallest step, as a fraction of the bracket, that is not rounding error
        least = RELATIVE * torch.maximum(a.abs(), b.abs()) / width.clamp_min(1e-300)
        if bool((settled | (least > 0.5) | (torch.minimum(fa.abs(), fb.abs()) <= noise)).all()):
            break

        fraction = _interpolate_root(a, b, c, fa, fb, fc)
        fraction = torch.minimum(torch.maximum(fraction, least), 1 - least).clamp(0, 1)

    return torch.where(settled, settled_root, best)


def _interpolate_root(
    a: Tensor, b: Tensor, c: Tensor, fa: Tensor, fb: Tensor, fc: Tensor
) -> Tensor:
    """Return the next point to try, as a fraction of the way from a to b, elementwise.

    fa, fb and fc: the function at a, b and c. The fraction is that of the inverse quadratic through
    the three points where this is monotone, and ½ elsewhere.
    """
    # Chandrupatla: it is monotone where place and height of a between b and c satisfy both
    # inequalities.
    place, height = (a - b) / (c - b), (fa - fb) / (fc - fb)
    safe = (height**2 < place) & ((1 - height) ** 2 < 1 - place)
    step = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
    bisection = torch.full_like(step, 0.5)
    return torch.where(safe & torch.isfinite(step), step, bisection)
