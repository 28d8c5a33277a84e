"""The diagonal of the curvature."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssla.curvature.jacobians import Features, Jacobian
from ssla.curvature.structure import (
    Eigenbasis,
    Extent,
    NoFactorError,
    Operator,
    Structure,
    mismatch,
    no_factor,
)
from ssla.maths.roots import Root, ScaledRoot, full_root

# Vectors (P,) that a fit needs which chooses its prior: two thirds of its peak, which is measured
# (tests/fitting/test_memory.py, benchmarks/all_weights.py). Averages need more of them.
VECTORS, VECTORS_OF_AVERAGES = 12, 20


@dataclass(frozen=True, eq=False)
class DiagonalOperator:
    """H = diag(h)."""

    h: Tensor  # (P,)

    def covariance(self, J: Jacobian) -> Tensor:
        return J.quadratic_diagonal(1 / self.h)

    def root(self, J: Jacobian) -> Root:
        """Of a last layer K is diagonal."""
        if isinstance(J, Features):
            return ScaledRoot(J.weighted_squares(1 / self.h).sqrt())
        return full_root(self.covariance(J))

    def response(self, J: Jacobian, middle: Tensor) -> Tensor:
        return J.quadratic_diagonal(middle / self.h**2)

    def logdet(self) -> float:
        return float(self.h.log().sum())

    def solve(self, v: Tensor) -> Tensor:
        return v / self.h

    def solve_many(self, V: Tensor) -> Tensor:
        return V / self.h[:, None]

    def variances(self) -> Tensor:
        return 1 / self.h

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.randn(n, len(self.h), dtype=torch.float64, generator=generator) / self.h.sqrt()


@dataclass(frozen=True, eq=False)
class Diagonal(Structure):
    """s = diag(Σ JᵀΛJ) (P,) in float64."""

    diagonal: Tensor | None = None

    name = "diag"
    materialises = False
    whole = False

    def zero(self, size: int) -> Diagonal:
        return Diagonal(torch.zeros(size, dtype=torch.float64))

    @property
    def _diagonal(self) -> Tensor:
        assert self.diagonal is not None
        return self.diagonal

    def add(self, J: Jacobian, precision: Tensor, weights: Tensor | None = None) -> Diagonal:
        return Diagonal(self._diagonal + J.gram_diagonal(precision))

    def merge(self, other: Structure) -> Diagonal:
        if not isinstance(other, Diagonal) or other._diagonal.shape != self._diagonal.shape:
            raise ValueError(mismatch("diag", other))
        return Diagonal(self._diagonal + other._diagonal)

    def mixed(self, other: Structure, share: float) -> Diagonal:
        if not isinstance(other, Diagonal) or other._diagonal.shape != self._diagonal.shape:
            raise ValueError(mismatch("diag", other))
        return Diagonal((1 - share) * self._diagonal + share * other._diagonal)

    def positive_part(self) -> Diagonal:
        return Diagonal(self._diagonal.clamp_min(0))

    def eigenbasis(self, precisions: Tensor) -> Eigenbasis:
        return Eigenbasis(self._diagonal, ())

    def scaled(self, factors: Tensor) -> Diagonal:
        return replace(self, diagonal=self._diagonal * factors**2)

    def push(self, direction: Tensor) -> Tensor:
        return self._diagonal * direction

    def trace(self, operator: Operator) -> float:
        return float(self._diagonal @ operator.variances())

    def with_prior(self, precision: Tensor) -> DiagonalOperator:
        h = self._diagonal + (precision if precision.dim() == 1 else precision.diagonal())
        if not bool((h > 0).all()):
            raise NoFactorError(
                no_factor(
                    precision, f" (parameter {int(h.argmin()) + 1} of {len(h)} is not determined)"
                )
            )
        return DiagonalOperator(h)

    def memory(self, extent: Extent) -> int:
        return (VECTORS_OF_AVERAGES if extent.averages else VECTORS) * 8 * extent.size
