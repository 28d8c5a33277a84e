"""The predictives of the output refit in a static graph: fixed nodes, unrolled Newton steps, no
step that depends on the data.

They have the nodes of `ssla.predictive`, so they give the same numbers. Where the library would go
on with other nodes, a row is NaN. Operations are those that onnxruntime has in float64 (see
`ssla.maths.portable`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ssla.curvature import Operator
from ssla.curvature.diagonal import DiagonalOperator
from ssla.curvature.jacobians import Features
from ssla.curvature.kfac import KfacOperator
from ssla.maths import linalg
from ssla.maths.portable import log_ndtr
from ssla.maths.quadrature.logistic import logistic_normal
from ssla.maths.roots import FullRoot, Root
from ssla.predictive.class_integrals import root_times_nodes, softmax_nodes

NODES_AT_ONCE = 64  # of a softmax integral: arrays (N, C, 64); a guess
TINY = 1e-300  # a divisor is at least this


class Levels(NamedTuple):
    """Probabilities of quantiles (k,), and the quantiles of N(0, 1): constants of the graph."""

    q: Tensor
    scores: Tensor


@dataclass(frozen=True, eq=False)
class GaussianLaw:
    """N(f̂, Σ + K), each target by itself: moments (N,), or (N, D)."""

    mean: Tensor
    variance: Tensor

    def icdf(self, levels: Levels) -> Tensor:
        """Compute the quantiles at k levels: (N, k), or (N, D, k)."""
        scale = self.variance.sqrt().unsqueeze(-1)
        return self.mean.unsqueeze(-1) + scale * levels.scores


def gaussian_law(f: Tensor, K: Tensor, noise: Tensor) -> GaussianLaw:
    """Return the law of y under Gaussian noise.  f (N, D), K and noise (N, D, D)."""
    variance = (noise + K).diagonal(dim1=-2, dim2=-1)
    return GaussianLaw(f[:, 0], variance[:, 0]) if f.shape[1] == 1 else GaussianLaw(f, variance)


def binary_probabilities(f: Tensor, K: Tensor) -> Tensor:
    """Compute the probabilities of two classes from one logit, or from the difference of two.

    f (N, C), K (N, C, C), C ≤ 2 -> (N, 2).
    """
    if f.shape[1] == 1:
        m, variance = f[:, 0], K[:, 0, 0]
    else:
        m, variance = f[:, 1] - f[:, 0], K[:, 1, 1] + K[:, 0, 0] - 2 * K[:, 0, 1]
    log_one, log_zero, _ = logistic_normal(m, variance.clamp_min(0).sqrt(), log_ndtr)
    return torch.softmax(torch.stack([log_zero, log_one], 1), 1)


def softmax_probabilities(f: Tensor, root: Root) -> Tensor:
    """Compute the mean of the softmax over the nodes, some of them at a time.

    f (N, C), the root R of K -> (N, C).
    """
    total = torch.zeros_like(f)
    for moves in _moves_of_nodes(root, softmax_nodes(f.shape[1])):
        total = total + torch.softmax(f.unsqueeze(-1) + moves, 1).sum(-1)
    return total / total.sum(1, keepdim=True)


def _moves_of_nodes(root: Root, z: Tensor) -> Iterator[Tensor]:
    """Yield R z of some nodes z (C, S) at a time: (N, C, s)."""
    if z.shape[1] < 4 * z.shape[0]:
        # So few nodes are rescaled together, as in `ssla.predictive.class_integrals`.
        yield root_times_nodes(root, z)
        return
    for nodes in z.split(NODES_AT_ONCE, 1):
        yield root.multiply(nodes)


def root_of(operator: Operator, J: Features) -> Root:
    """Return the root of K that the library takes: Cholesky, by columns.

    The operators of Kronecker factors and of a diagonal give their root without it.
    """
    if isinstance(operator, KfacOperator | DiagonalOperator):
        return operator.root(J)
    return FullRoot(_unrolled_cholesky(operator.covariance(J)))


def _unrolled_cholesky(K: Tensor) -> Tensor:
    """Compute the lower Cholesky factor of K (N, C, C) in C unrolled steps; a column without a
    positive pivot is zero.
    """
    size = K.shape[-1]
    if size <= linalg.CLOSED_FORM_LIMIT:
        return linalg.covariance_root(K)
    columns: list[Tensor] = []  # (N, C)
    for j in range(size):
        column = K[:, :, j]
        if columns:
            before = torch.stack(columns, -1)
            column = column - (before * before[:, j : j + 1]).sum(-1)
        pivot = column[:, j : j + 1].clamp_min(0).sqrt()
        column = torch.where(pivot > 0, column / pivot.clamp_min(TINY), 0.0)
        columns.append(column * (torch.arange(size) >= j))
    return torch.stack(columns, -1)
