"""Special functions from operations that every runtime of exported graphs has in float64.

ONNX has no log-gamma, and onnxruntime no erf and softplus in float64. All agree with torch's own to
1e-13, relative.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

DEGREE = 30  # of the polynomial for log erfc: its error is then rounding
SHIFT = 8  # from which on Stirling's series has the digits of float64
STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@lru_cache(maxsize=1)
def _erfc_coefficients() -> tuple[float, ...]:
    """Chebyshev coefficients of log erfcx(z) − log t on t = 2/(2 + z) in (0, 1], z ≥ 0."""

    def values(u: np.ndarray) -> np.ndarray:
        t = (u + 1) / 2
        found: np.ndarray = torch.special.erfcx(torch.from_numpy(2 / t - 2)).numpy()
        logs: np.ndarray = np.log(found) - np.log(t)
        return logs

    return tuple(float(c) for c in np.polynomial.chebyshev.chebinterpolate(values, DEGREE))  # type: ignore[type-var]


def _log_erfc(z: Tensor) -> Tensor:
    """For z ≥ 0."""
    t = 2 / (2 + z)
    u = 2 * t - 1
    first, second = torch.zeros_like(u), torch.zeros_like(u)
    coefficients = _erfc_coefficients()
    for c in reversed(coefficients[1:]):  # Clenshaw
        first, second = 2 * u * first - second + c, first
    return t.log() - z * z + (u * first - second + coefficients[0])


def log_ndtr(x: Tensor) -> Tensor:
    """log Φ(x)."""
    tail = _log_erfc(x.abs() / math.sqrt(2)) - math.log(2)
    return torch.where(x < 0, tail, torch.log1p(-tail.exp()))


def ndtr(x: Tensor) -> Tensor:
    """Φ(x)."""
    tail = (_log_erfc(x.abs() / math.sqrt(2)) - math.log(2)).exp()
    return torch.where(x < 0, tail, 1 - tail)


def log_gamma(x: Tensor) -> Tensor:
    """log Γ(x) for 0 < x < 1e38."""
    z, product = x + SHIFT, x
    for k in range(1, SHIFT):
        product = product * (x + k)
    inverse = 1 / z
    square, series = inverse * inverse, torch.zeros_like(z)
    for c in reversed(STIRLING):
        series = series * square + c
    return (z - 0.5) * z.log() - z + HALF_LOG_2PI + series * inverse - product.log()


def softplus(x: Tensor) -> Tensor:
    """log(1 + eˣ)."""
    return torch.relu(x) + torch.log1p(torch.exp(-x.abs()))
