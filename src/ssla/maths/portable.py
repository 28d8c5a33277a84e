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

DEGREE = 30  # of the Chebyshev series for log erfcx: its error is then rounding
SHIFT = 8  # from this z on, Stirling's series has the digits of float64
# The coefficients B_2k / (2k (2k − 1)) of 1/z, 1/z³, 1/z⁵, … with Bernoulli numbers B_2k
STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@lru_cache(maxsize=1)
def _compute_erfc_coefficients() -> tuple[float, ...]:
    """Return the coefficients of a Chebyshev series for log erfcx(z) − log t, z ≥ 0.

    erfcx(z) is exp(z²) erfc(z). The series is in u = 2t − 1 with t = 2/(2 + z), which maps z ≥ 0 to
    u in (−1, 1].
    """

    def compute_remainder(u: np.ndarray) -> np.ndarray:
        """Compute log erfcx(z) − log t at u, elementwise, with t and z as above."""
        t = (u + 1) / 2
        erfcx: np.ndarray = torch.special.erfcx(torch.from_numpy(2 / t - 2)).numpy()
        logs: np.ndarray = np.log(erfcx) - np.log(t)
        return logs

    series = np.polynomial.chebyshev.chebinterpolate(compute_remainder, DEGREE)  # type: ignore[type-var]
    return tuple(float(c) for c in series)


def _log_erfc(z: Tensor) -> Tensor:
    """Compute log erfc(z) for z ≥ 0, elementwise."""
    t = 2 / (2 + z)
    u = 2 * t - 1
    coefficients = _compute_erfc_coefficients()
    # Clenshaw's recurrence b_k = 2u b_{k+1} − b_{k+2} + c_k sums the Chebyshev series.
    b, b_before = torch.zeros_like(u), torch.zeros_like(u)
    for c in reversed(coefficients[1:]):
        b, b_before = 2 * u * b - b_before + c, b
    # log erfc = log erfcx − z²
    return t.log() - z * z + (u * b - b_before + coefficients[0])


def _log_upper_tail(x: Tensor) -> Tensor:
    """Compute log Φ(−|x|), elementwise, with Φ(−|x|) = ½ erfc(|x|/√2)."""
    return _log_erfc(x.abs() / math.sqrt(2)) - math.log(2)


def log_ndtr(x: Tensor) -> Tensor:
    """Compute log Φ(x), elementwise, with Φ the distribution function of N(0, 1)."""
    tail = _log_upper_tail(x)
    return torch.where(x < 0, tail, torch.log1p(-tail.exp()))


def log_gamma(x: Tensor) -> Tensor:
    """Compute log Γ(x) for 0 < x < 1e38, elementwise."""
    # log Γ(x) = log Γ(z) − log[x (x + 1) … (x + SHIFT − 1)] with z = x + SHIFT
    z = x + SHIFT
    product = x
    for k in range(1, SHIFT):
        product = product * (x + k)

    # Stirling's series for log Γ(z), by Horner's rule in 1/z²
    inverse = 1 / z
    square = inverse * inverse
    series = torch.zeros_like(z)
    for c in reversed(STIRLING):
        series = series * square + c
    return (z - 0.5) * z.log() - z + HALF_LOG_2PI + series * inverse - product.log()


def softplus(x: Tensor) -> Tensor:
    """Compute log(1 + eˣ) = max(x, 0) + log(1 + e^−|x|), elementwise, without overflow."""
    return torch.relu(x) + torch.log1p(torch.exp(-x.abs()))
