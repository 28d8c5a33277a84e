"""The log density of an output refit in unrolled steps: log p(y|f̃) − ½(f̃−f̂)ᵀK⁻¹(f̃−f̂) − ½ log|I
+ ΛK|.

Every likelihood leaves one equation in one unknown. y (N, k), f̂ (N, C), K (N, C, C) -> (N, k).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ssla.maths.portable import log_gamma, softplus

LAMBERT_ROUNDS = 4
BRACKET_ROUNDS = 16
ROUNDING = 1e-7  # relative: after a shorter step only rounding error is left
SHRINKS = 0.9  # a step of Newton's method is at most that part of the step before


def poisson(y: Tensor, f: Tensor, K: Tensor) -> Tensor:
    """f̃ = f̂ + K(y − e^f̃): with w = K e^f̃ it is w + log w = log K + f̂ + Ky."""
    v = K[:, :, 0]
    x = v.clamp_min(1e-300).log() + f + v * y
    w = _lambert(x)
    u = y - w / v.clamp_min(1e-300)
    at = f + v * y - w
    u = torch.where(v > 1e-300, u, y - at.exp())
    log_prob = y * at - at.exp() - log_gamma(y + 1)
    return log_prob - 0.5 * v * u * u - 0.5 * torch.log1p(w)


def _lambert(x: Tensor) -> Tensor:
    """w with w + log w = x, by Newton steps in log w, from a start that is never far."""
    large = x.clamp_min(1.0)
    s = torch.where(
        x > 1,
        (large - large.log() + large.log() / large).log(),
        x - torch.exp(x.clamp_max(1.0)) * 0.5,
    )
    for _ in range(LAMBERT_ROUNDS):
        w = s.exp()
        s = s - (w + s - x) / (1 + w)
    return s.exp()


def negative_binomial(dispersion: float, y: Tensor, f: Tensor, K: Tensor) -> Tensor:
    """f̃ = f̂ + K(y − (y + r)σ(f̃ + log α)), r = 1/α.

    The root lies between f̂ and log y, and in [f̂ − Kr, f̂ + Ky].
    """
    v, r, shift = K[:, :, 0], 1 / dispersion, math.log(dispersion)
    best = y.clamp_min(1e-300).log()
    low, high = (
        torch.maximum(torch.minimum(f, best), f - v * r),
        torch.minimum(torch.maximum(f, best), f + v * y),
    )
    at = torch.minimum(torch.maximum(best, low), high)
    step = 2 * (high - low)
    for _ in range(BRACKET_ROUNDS):
        p = torch.sigmoid(at + shift)
        gap = at - f - v * (y - (y + r) * p)
        low, high = torch.where(gap <= 0, at, low), torch.where(gap >= 0, at, high)
        new = at - gap / (1 + v * (y + r) * p * (1 - p))
        size = (new - at).abs()
        good = (new >= low) & (new <= high) & (size <= SHRINKS * step)
        new = torch.where(good | (size <= ROUNDING * (1 + at.abs())), new, (low + high) / 2)
        at, step = new, (new - at).abs()
    z = at + shift
    p, q = torch.sigmoid(z), torch.sigmoid(-z)
    u = y * q - r * p
    log_prob = (
        log_gamma(y + r) - math.lgamma(r) - log_gamma(y + 1) - r * softplus(z) - y * softplus(-z)
    )
    return log_prob - 0.5 * v * u * u - 0.5 * torch.log1p(v * (y + r) * p * q)
