"""The full P×P curvature."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ssla.jacobians import Jacobian
from ssla.structures.base import SINGULAR, Structure, mismatch


@dataclass(frozen=True, eq=False)
class DenseOperator:
    """H = L Lᵀ; K = (L⁻¹Jᵀ)ᵀ(L⁻¹Jᵀ) is positive semi-definite by form."""

    factor: Tensor  # L (P, P)

    @cached_property
    def _whitener(self) -> Tensor:
        """L⁻¹, once, so that each batch is a product and not a solve."""
        eye = torch.eye(self.factor.shape[0], dtype=torch.float64)
        inverse: Tensor = torch.linalg.solve_triangular(self.factor, eye, upper=False)
        return inverse

    @cached_property
    def _single_whitener(self) -> Tensor:
        return self._whitener.float()

    def covariance(self, J: Jacobian) -> Tensor:
        return J.quadratic(self._single_whitener if J.dtype == torch.float32 else self._whitener)

    def response(self, J: Jacobian, middle: Tensor) -> Tensor:
        # H⁻¹MH⁻¹ = BᵀB with B = √M H⁻¹; J.quadratic wants a lower triangular factor, so take B's R by QR.
        B = middle.sqrt()[:, None] * torch.cholesky_solve(torch.eye(len(middle), dtype=torch.float64), self.factor)
        upper = torch.linalg.qr(B.flip(1), mode="r").R  # BF = QR  =>  BᵀB = F RᵀR F, and FRF is lower triangular
        return J.quadratic(upper.flip(0, 1).contiguous())

    def logdet(self) -> float:
        return 2 * float(self.factor.diagonal().log().sum())

    def solve(self, v: Tensor) -> Tensor:
        return torch.cholesky_solve(v.unsqueeze(-1), self.factor).squeeze(-1)

    def variances(self) -> Tensor:
        return (self._whitener**2).sum(0)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        white = torch.randn(n, self.factor.shape[0], dtype=torch.float64, generator=generator)
        draws: Tensor = torch.linalg.solve_triangular(self.factor.mT, white.mT, upper=True).mT
        return draws


@dataclass(frozen=True, eq=False)
class Dense:
    """S = Σ JᵀΛJ (P, P) in float64."""

    matrix: Tensor | None = None

    name = "dense"
    materialises = True

    def zero(self, size: int) -> Dense:
        return Dense(torch.zeros(size, size, dtype=torch.float64))

    @property
    def _matrix(self) -> Tensor:
        assert self.matrix is not None
        return self.matrix

    def add(self, J: Jacobian, precision: Tensor, weights: Tensor | None = None) -> Dense:
        return Dense(self._matrix + J.gram(precision))

    def merge(self, other: Structure) -> Dense:
        if not isinstance(other, Dense) or other._matrix.shape != self._matrix.shape:
            raise ValueError(mismatch("dense", other))
        return Dense(self._matrix + other._matrix)

    def scaled(self, factors: Tensor) -> Dense:
        return replace(self, matrix=self._matrix * factors[:, None] * factors[None, :])

    def push(self, direction: Tensor) -> Tensor:
        return self._matrix @ direction

    def with_prior(self, precision: Tensor) -> DenseOperator:
        H = self._matrix + (torch.diag(precision) if precision.dim() == 1 else precision)
        factor, info = torch.linalg.cholesky_ex(H)
        pivots = factor.diagonal()
        scale = H.diagonal().sqrt()
        improper = precision.dim() == 1 and bool((precision <= 0).any())  # then a small pivot is rounding, not information
        if int(info) != 0 or (improper and bool((pivots < 1e-7 * scale).any())):
            raise ValueError(
                SINGULAR.format(
                    detail=f" (parameter {int(info) or int((pivots / scale).argmin()) + 1} of {len(H)} is not determined)"
                )
            )
        return DenseOperator(factor)

    def memory(self, size: int) -> int:
        return 4 * 8 * size * size
