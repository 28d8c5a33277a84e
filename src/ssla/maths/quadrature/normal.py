"""Nodes for expectations under N(0, I) in C dimensions: one fixed set for each C."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ssla.maths.constants import cached_constant

HERMITE_NODES = {1: 32, 2: 12}  # in each direction, by dimension. A guess
PAIRS = 64  # points of the low-discrepancy set, each with its mirror image. A guess


@cached_constant
def gauss_hermite_rule(count: int) -> tuple[Tensor, Tensor]:
    """Return points and weights of Gauss–Hermite for N(0, 1), each (count,); weights sum to one."""
    x, w = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(count))
    return x, w / w.sum()


@cached_constant
def normal_nodes(size: int, pairs: int = PAIRS) -> tuple[Tensor, Tensor]:
    """Return points z (J, C) and weights (J,) with Σ_j w_j h(z_j) ≈ E h(Z), Z ~ N(0, I).

    size: C. For C ≤ 2 it is a Gauss–Hermite rule, and `pairs` is not used. For more it is a set of
    `pairs` scrambled Sobol points with a fixed seed, then their mirror images in the same order. If
    pairs ≥ 2C, the set is whitened: its first, second and third moments are those of N(0, I).
    """
    if size <= 2:
        x, w = gauss_hermite_rule(HERMITE_NODES[size])
        if size == 1:
            return x.unsqueeze(1), w
        return torch.cartesian_prod(x, x), torch.outer(w, w).flatten()

    u = torch.quasirandom.SobolEngine(size, scramble=True, seed=0).draw(pairs, dtype=torch.float64)
    z = torch.special.ndtri(u.clamp(1e-6, 1 - 1e-6))  # the quantile function is infinite at 0, 1

    # With the mirror images the mean is zero, so whitening needs the second moment only.
    if pairs >= 2 * size:
        factor = torch.linalg.cholesky(z.mT @ z / pairs)
        z = torch.linalg.solve_triangular(factor, z.mT, upper=False).mT
    return torch.cat([z, -z]), torch.full((2 * pairs,), 0.5 / pairs, dtype=torch.float64)
