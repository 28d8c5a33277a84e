"""The predictives of the output refit in a static graph.

The graph has fixed nodes, unrolled Newton steps, and no step that depends on the data. These
predictives have the nodes of `ssla.predictive`, so they give the same numbers. Where the library
would take further nodes, a row is NaN. Operations are those that onnxruntime has in float64 (see
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
from ssla.predictive.class_integrals import make_softmax_nodes, multiply_root_by_nodes

NODES_AT_ONCE = 64  # of a softmax integral: arrays (N, C, 64); a guess
TINY = 1e-300  # a divisor is at least this


class Levels(NamedTuple):
    """Probabilities of quantiles, and the quantiles of N(0, 1) at them: constants of the graph."""

    q: Tensor  # (k,)
    scores: Tensor  # (k,)


@dataclass(frozen=True, eq=False)
class GaussianLaw:
    """The law of y under Gaussian noise, each target by itself: moments (N,), or (N, D)."""

    mean: Tensor
    variance: Tensor

    def icdf(self, levels: Levels) -> Tensor:
        """Return the quantiles at k levels: (N, k), or (N, D, k) for several targets."""
        scale = self.variance.sqrt().unsqueeze(-1)
        return self.mean.unsqueeze(-1) + scale * levels.scores


def make_gaussian_law(f: Tensor, K: Tensor, noise: Tensor) -> GaussianLaw:
    """Return the law of y under Gaussian noise, whose covariance is noise + K.

    f (N, D) is the mean, and K and noise are covariances (N, D, D).
    """
    variance = (noise + K).diagonal(dim1=-2, dim2=-1)
    return GaussianLaw(f[:, 0], variance[:, 0]) if f.shape[1] == 1 else GaussianLaw(f, variance)


def compute_binary_probabilities(f: Tensor, K: Tensor) -> Tensor:
    """Return the probabilities (N, 2) of two classes, for logits f ~ N(f̂, K).

    f (N, C), K (N, C, C). C = 1: one logit of the second class. C = 2: one logit of each class, of
    which only the difference matters.
    """
    if f.shape[1] == 1:
        m = f[:, 0]
        variance = K[:, 0, 0]
    else:
        m = f[:, 1] - f[:, 0]
        variance = K[:, 1, 1] + K[:, 0, 0] - 2 * K[:, 0, 1]
    log_one, log_zero, _ = logistic_normal(m, variance.clamp_min(0).sqrt(), log_ndtr)
    # The softmax makes the sum of both exactly one.
    return torch.softmax(torch.stack([log_zero, log_one], 1), 1)


def compute_softmax_probabilities(f: Tensor, root: Root) -> Tensor:
    """Return the mean (N, C) of softmax(f̂ + R z) over the nodes z of the library.

    f: f̂ (N, C). root: R, with R Rᵀ = K.
    """
    total = torch.zeros_like(f)
    for moves in _iterate_moves_of_nodes(root, make_softmax_nodes(f.shape[1])):
        total = total + torch.softmax(f.unsqueeze(-1) + moves, 1).sum(-1)
    return total / total.sum(1, keepdim=True)


def _iterate_moves_of_nodes(root: Root, z: Tensor) -> Iterator[Tensor]:
    """Yield the moves R z (N, C, s) of the outputs, for s of the nodes z (C, S) at a time.

    root: R, with R Rᵀ = K.
    """
    if z.shape[1] < 4 * z.shape[0]:
        # So few nodes are rescaled together. The limit is that of `whitened` in
        # `ssla.predictive.class_integrals`.
        yield multiply_root_by_nodes(root, z)
        return
    for nodes in z.split(NODES_AT_ONCE, 1):
        yield root.multiply(nodes)


def compute_covariance_root(operator: Operator, J: Features) -> Root:
    """Return the root R of K = J H⁻¹ Jᵀ, with R Rᵀ = K, that the library uses for this operator.

    operator: H⁻¹. J: the Jacobian at N inputs. Kronecker factors and a diagonal have a root without
    steps. Others take an unrolled Cholesky decomposition.
    """
    if isinstance(operator, KfacOperator | DiagonalOperator):
        return operator.root(J)
    return FullRoot(_factorise_unrolled(operator.covariance(J)))


def _factorise_unrolled(K: Tensor) -> Tensor:
    """Return the lower Cholesky factor (N, C, C) of K (N, C, C), in C unrolled steps.

    A column without a positive pivot is zero, so a singular K is allowed. Up to three outputs have
    the library's closed form.
    """
    size = K.shape[-1]
    if size <= linalg.CLOSED_FORM_LIMIT:
        return linalg.covariance_root(K)
    columns: list[Tensor] = []  # (N, C)
    for j in range(size):
        column = K[:, :, j]
        if columns:
            # Column j of K, less the product of the columns before with their row j.
            before = torch.stack(columns, -1)
            column = column - (before * before[:, j : j + 1]).sum(-1)
        pivot = column[:, j : j + 1].clamp_min(0).sqrt()
        column = torch.where(pivot > 0, column / pivot.clamp_min(TINY), 0.0)
        columns.append(column * (torch.arange(size) >= j))  # zeros above the diagonal

    return torch.stack(columns, -1)
