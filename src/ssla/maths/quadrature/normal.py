"""Nodes for expectations under N(0, I) in C dimensions: one fixed set for each C."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ssla.maths.constants import cached_constant

HERMITE_NODES = {1: 32, 2: 12}  # an axis, by dimension
PAIRS = 64  # points of the low-discrepancy set, each with its mirror image


@cached_constant
def gauss_hermite_rule(count: int) -> tuple[Tensor, Tensor]:
    """Return points (J,) and weights (J,) of Gauss–Hermite for N(0, 1), J = count."""
    x, w = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(count))
    return x, w / w.sum()


@cached_constant
def normal_nodes(size: int, pairs: int = PAIRS) -> tuple[Tensor, Tensor]:
    """Return points z (J, C) and weights (J,) with Σ_j w_j h(z_j) ≈ E h(Z), Z ~ N(0, I).

    Gauss–Hermite for C ≤ 2; else scrambled Sobol points with a fixed seed and their mirror images.
    Where there are enough of them, the set is whitened: its first, second and third moments are
    then those of N(0, I) (the second of every direction).
    """
    if size <= 2:
        x, w = gauss_hermite_rule(HERMITE_NODES[size])
        if size == 1:
            return x.unsqueeze(1), w
        return torch.cartesian_prod(x, x), torch.outer(w, w).flatten()
    u = torch.quasirandom.SobolEngine(size, scramble=True, seed=0).draw(pairs, dtype=torch.float64)
    z = torch.special.ndtri(u.clamp(1e-6, 1 - 1e-6))
    # With the mirror images the mean is zero, so whitening needs the second moment only.
    if pairs >= 2 * size:
        factor = torch.linalg.cholesky(z.mT @ z / pairs)
        z = torch.linalg.solve_triangular(factor, z.mT, upper=False).mT
    return torch.cat([z, -z]), torch.full((2 * pairs,), 0.5 / pairs, dtype=torch.float64)
