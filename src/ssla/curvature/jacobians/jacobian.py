"""The Jacobian protocol, and the Jacobian that stores its entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ssla.maths.linalg import symmetric_product


class Jacobian(Protocol):
    """J (B, C, P), possibly implicit."""

    @property
    def outputs(self) -> int:
        """C."""
        ...

    @property
    def size(self) -> int:
        """P."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    def double(self) -> Jacobian:
        """The same in float64."""
        ...

    def push(self, direction: Tensor) -> Tensor:
        """J d.  (P,) -> (B, C)."""
        ...

    def pull(self, g: Tensor) -> Tensor:
        """Σ_i J_iᵀ g_i.  (B, C) -> (P,)."""
        ...

    def push_many(self, directions: Tensor) -> Tensor:
        """J D.  (P, k) -> (B, C, k)."""
        ...

    def pull_many(self, g: Tensor) -> Tensor:
        """Σ_i J_iᵀ G_i.  (B, C, k) -> (P, k)."""
        ...

    def dense(self) -> DenseJacobian:
        """J with its entries."""
        ...

    def gram(self, precision: Tensor) -> Tensor:
        """Σ_i J_iᵀ Λ_i J_i.  (B, C, C) -> (P, P)."""
        ...

    def add_gram(self, total: Tensor, precision: Tensor) -> Tensor:
        """`gram` added to total (P, P) in place; returns total."""
        ...

    def gram_diagonal(self, precision: Tensor) -> Tensor:
        """The diagonal of `gram`.  (B, C, C) -> (P,)."""
        ...

    def quadratic(self, whitener: Tensor) -> Tensor:
        """J WᵀW Jᵀ for lower triangular W (P, P), exactly symmetric.  -> (B, C, C)."""
        ...

    def quadratic_diagonal(self, variances: Tensor) -> Tensor:
        """J diag(v) Jᵀ, exactly symmetric.  (P,) -> (B, C, C)."""
        ...


@dataclass(frozen=True)
class DenseJacobian:
    """J with its entries."""

    values: Tensor  # (B, C, P)

    @property
    def outputs(self) -> int:
        return self.values.shape[1]

    @property
    def size(self) -> int:
        return self.values.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def double(self) -> DenseJacobian:
        return DenseJacobian(self.values.double())

    def push(self, direction: Tensor) -> Tensor:
        return self.values @ direction.to(self.values.dtype)

    def pull(self, g: Tensor) -> Tensor:
        return self.values.flatten(0, 1).mT @ g.flatten()

    def push_many(self, directions: Tensor) -> Tensor:
        return self.values @ directions.to(self.values.dtype)

    def pull_many(self, g: Tensor) -> Tensor:
        return self.values.flatten(0, 1).mT @ g.flatten(0, 1)

    def dense(self) -> DenseJacobian:
        return self

    def gram(self, precision: Tensor) -> Tensor:
        weighted = precision @ self.values
        return self.values.flatten(0, 1).mT @ weighted.flatten(0, 1)

    def add_gram(self, total: Tensor, precision: Tensor) -> Tensor:
        return total.add_(self.gram(precision))

    def gram_diagonal(self, precision: Tensor) -> Tensor:
        return (self.values * (precision @ self.values)).sum((0, 1))

    def quadratic(self, whitener: Tensor) -> Tensor:
        white = self.values @ whitener.to(self.values.dtype).mT
        return symmetric_product(white, white)

    def quadratic_diagonal(self, variances: Tensor) -> Tensor:
        return symmetric_product(self.values * variances.to(self.values.dtype), self.values)
