"""The log density of counts by an output refit, in unrolled steps:

    log p(y|f̃) − ½(f̃−f̂)ᵀK⁻¹(f̃−f̂) − ½ log|I + ΛK|

The output f ~ N(f̂, K) is the logarithm of the mean of y, and Λ is minus the second derivative of
log p(y|f) at the mode f̃. The mode solves one equation in one unknown. For k counts y (N, k), f̂ (N,
1) and K (N, 1, 1) the result is (N, k). In the code f is f̂, v is K (N, 1), and u is K⁻¹(f̃−f̂).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ssla.maths.portable import log_gamma, softplus

LAMBERT_ROUNDS = 4  # a guess: tests compare with the library, to 1e-5
BRACKET_ROUNDS = 16  # a guess, compared in the same way
ROUNDING = 1e-7  # relative: after a shorter step only rounding error is left
SHRINK = 0.9  # a step of Newton's method is at most that part of the step before; a guess
TINY = 1e-300  # a variance that counts as zero; its logarithm is finite


def compute_poisson_log_density(y: Tensor, f: Tensor, K: Tensor) -> Tensor:
    """Compute the log density of counts y (N, k) with mean e^f.

    At the mode f̃ = f̂ + K(y − e^f̃), so that w = K e^f̃ solves w + log w = log K + f̂ + Ky.
    """
    v = K[:, :, 0]
    w = _solve_lambert(v.clamp_min(TINY).log() + f + v * y)
    u = y - w / v.clamp_min(TINY)
    f_mode = f + v * y - w
    # u = y − e^f̃. Without a variance, e^f̃ cannot be taken from w / v.
    u = torch.where(v > TINY, u, y - f_mode.exp())
    log_prob = y * f_mode - f_mode.exp() - log_gamma(y + 1)
    return log_prob - 0.5 * v * u * u - 0.5 * torch.log1p(w)


def _solve_lambert(x: Tensor) -> Tensor:
    """Return w with w + log w = x, in the shape of x, by Newton steps in s = log w."""
    # The start is near the root on both sides: w ≈ x − log x for large x, w ≈ e^x for small.
    large = x.clamp_min(1.0)
    start_large = (large - large.log() + large.log() / large).log()
    start_small = x - torch.exp(x.clamp_max(1.0)) * 0.5
    s = torch.where(x > 1, start_large, start_small)
    for _ in range(LAMBERT_ROUNDS):
        w = s.exp()
        s = s - (w + s - x) / (1 + w)
    return s.exp()


def compute_negative_binomial_log_density(
    dispersion: float, y: Tensor, f: Tensor, K: Tensor
) -> Tensor:
    """Compute the log density of counts y (N, k) with mean e^f and variance e^f + α e^2f.

    dispersion: α. At the mode f̃ = f̂ + K(y − (y + r)σ(f̃ + log α)), with r = 1/α and the logistic
    function σ.
    """
    v = K[:, :, 0]
    r = 1 / dispersion
    shift = math.log(dispersion)
    z = _find_negative_binomial_mode(r, shift, y, f, v) + shift
    p, q = torch.sigmoid(z), torch.sigmoid(-z)
    u = y * q - r * p
    log_prob = (
        log_gamma(y + r) - math.lgamma(r) - log_gamma(y + 1) - r * softplus(z) - y * softplus(-z)
    )
    return log_prob - 0.5 * v * u * u - 0.5 * torch.log1p(v * (y + r) * p * q)


def _find_negative_binomial_mode(r: float, shift: float, y: Tensor, f: Tensor, v: Tensor) -> Tensor:
    """Return the mode f̃ (N, k), by Newton steps inside a bracket.

    It solves f̃ = f̂ + v(y − (y + r)σ(f̃ + shift)).

    y (N, k), f̂ and v (N, 1). The root lies between f̂ and log y, and in [f̂ − vr, f̂ + vy].
    """
    log_y = y.clamp_min(TINY).log()
    low = torch.maximum(torch.minimum(f, log_y), f - v * r)
    high = torch.minimum(torch.maximum(f, log_y), f + v * y)
    f_mode = torch.minimum(torch.maximum(log_y, low), high)
    step = 2 * (high - low)
    for _ in range(BRACKET_ROUNDS):
        p = torch.sigmoid(f_mode + shift)

        # The residual rises with f̃: it is negative below the root, and positive above it.
        residual = f_mode - f - v * (y - (y + r) * p)
        low = torch.where(residual <= 0, f_mode, low)
        high = torch.where(residual >= 0, f_mode, high)
        next_mode = f_mode - residual / (1 + v * (y + r) * p * (1 - p))
        size = (next_mode - f_mode).abs()

        # Bisection where the step leaves the bracket or does not shrink. A step within rounding
        # error is taken in any case.
        is_safe = (next_mode >= low) & (next_mode <= high) & (size <= SHRINK * step)
        next_mode = torch.where(
            is_safe | (size <= ROUNDING * (1 + f_mode.abs())), next_mode, (low + high) / 2
        )
        step = (next_mode - f_mode).abs()
        f_mode = next_mode

    return f_mode
