"""The Jacobian protocol, and the Jacobian that stores its entries.

Terms and symbols are those of `ssla.curvature`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ssla.maths.linalg import symmetric_product


class Jacobian(Protocol):
    """J (B, C, P) of B rows, C outputs and P parameters, possibly implicit.

    The names are those of differential geometry: `push` maps directions of θ to outputs by J, and
    `pull` maps output gradients to θ by Jᵀ.
    """

    @property
    def outputs(self) -> int:
        """Return the number of outputs C."""

    @property
    def size(self) -> int:
        """Return the number of parameters P."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of all products."""

    def double(self) -> Jacobian:
        """Return the same J in float64."""

    def push(self, direction: Tensor) -> Tensor:
        """Compute the product J d with a direction d.  (P,) -> (B, C)."""

    def pull(self, g: Tensor) -> Tensor:
        """Compute Σ_i J_iᵀ g_i for output gradients g.  (B, C) -> (P,)."""

    def push_many(self, directions: Tensor) -> Tensor:
        """Compute the products J D with k directions.  (P, k) -> (B, C, k)."""

    def pull_many(self, g: Tensor) -> Tensor:
        """Compute Σ_i J_iᵀ G_i for k output gradients in each row.  (B, C, k) -> (P, k)."""

    def to_dense(self) -> DenseJacobian:
        """Compute all entries of J (B, C, P), which take 8·B·C·P bytes in float64."""

    def gram(self, precision: Tensor) -> Tensor:
        """Compute Σ_i J_iᵀ Λ_i J_i for Λ.  (B, C, C) -> (P, P)."""

    def add_gram(self, total: Tensor, precision: Tensor) -> Tensor:
        """Add `gram` to total (P, P) in place, and return total; precision Λ (B, C, C)."""

    def gram_diagonal(self, precision: Tensor) -> Tensor:
        """Compute the diagonal of `gram`.  (B, C, C) -> (P,)."""

    def quadratic(self, whitener: Tensor) -> Tensor:
        """Compute J WᵀW Jᵀ, exactly symmetric, for lower triangular W (P, P).  -> (B, C, C)."""

    def quadratic_diagonal(self, variances: Tensor) -> Tensor:
        """Compute J diag(v) Jᵀ for v (P,), exactly symmetric.  -> (B, C, C)."""


@dataclass(frozen=True)
class DenseJacobian:
    """J with its entries stored."""

    values: Tensor  # (B, C, P)

    @property
    def outputs(self) -> int:
        """Return the number of outputs C."""
        return self.values.shape[1]

    @property
    def size(self) -> int:
        """Return the number of parameters P."""
        return self.values.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of all products."""
        return self.values.dtype

    def double(self) -> DenseJacobian:
        """Return the same J in float64."""
        return DenseJacobian(self.values.double())

    def push(self, direction: Tensor) -> Tensor:
        """Compute the product J d with a direction d.  (P,) -> (B, C)."""
        return self.values @ direction.to(self.values.dtype)

    def pull(self, g: Tensor) -> Tensor:
        """Compute Σ_i J_iᵀ g_i for output gradients g.  (B, C) -> (P,)."""
        return self.values.flatten(0, 1).mT @ g.flatten()

    def push_many(self, directions: Tensor) -> Tensor:
        """Compute the products J D with k directions.  (P, k) -> (B, C, k)."""
        return self.values @ directions.to(self.values.dtype)

    def pull_many(self, g: Tensor) -> Tensor:
        """Compute Σ_i J_iᵀ G_i for k output gradients in each row.  (B, C, k) -> (P, k)."""
        return self.values.flatten(0, 1).mT @ g.flatten(0, 1)

    def to_dense(self) -> DenseJacobian:
        """Return this J itself, which has its entries."""
        return self

    def gram(self, precision: Tensor) -> Tensor:
        """Compute Σ_i J_iᵀ Λ_i J_i for Λ.  (B, C, C) -> (P, P)."""
        weighted = precision @ self.values
        return self.values.flatten(0, 1).mT @ weighted.flatten(0, 1)

    def add_gram(self, total: Tensor, precision: Tensor) -> Tensor:
        """Add `gram` to total (P, P) in place, and return total; precision Λ (B, C, C)."""
        return total.add_(self.gram(precision))

    def gram_diagonal(self, precision: Tensor) -> Tensor:
        """Compute the diagonal of `gram`.  (B, C, C) -> (P,)."""
        return (self.values * (precision @ self.values)).sum((0, 1))

    def quadratic(self, whitener: Tensor) -> Tensor:
        """Compute J WᵀW Jᵀ, exactly symmetric, for W (P, P).  -> (B, C, C)."""
        white = self.values @ whitener.to(self.values.dtype).mT
        return symmetric_product(white, white)

    def quadratic_diagonal(self, variances: Tensor) -> Tensor:
        """Compute J diag(v) Jᵀ for v (P,), exactly symmetric.  -> (B, C, C)."""
        return symmetric_product(self.values * variances.to(self.values.dtype), self.values)
