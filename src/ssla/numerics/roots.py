"""Roots of output covariances: R with R Rᵀ = K for each row, possibly implicit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ssla._checks import batched
from ssla.numerics import linalg


class Root(Protocol):
    """R with R Rᵀ = K, for B rows and C outputs."""

    @property
    def dtype(self) -> torch.dtype: ...

    def times(self, z: Tensor) -> Tensor:
        """R z.  (C, S) -> (B, C, S)."""
        ...

    def variances(self) -> Tensor:
        """The diagonal of K (B, C)."""
        ...

    def take(self, rows: slice) -> Root:
        """Of some rows only."""
        ...

    def scaled(self, factor: float) -> Root:
        """factor · R."""
        ...


@dataclass(frozen=True, eq=False)
class FullRoot:
    """R with its entries."""

    values: Tensor  # (B, C, C)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def times(self, z: Tensor) -> Tensor:
        return self.values @ z

    def variances(self) -> Tensor:
        return (self.values**2).sum(-1)

    def take(self, rows: slice) -> FullRoot:
        return FullRoot(self.values[rows])

    def scaled(self, factor: float) -> FullRoot:
        return FullRoot(factor * self.values)


@dataclass(frozen=True, eq=False)
class ScaledRoot:
    """R = Q diag(s), with one Q for all rows: nothing of size (B, C, C) is formed."""

    scale: Tensor  # s (B, C)
    basis: Tensor | None = None  # Q (C, C); None: the identity

    @property
    def dtype(self) -> torch.dtype:
        return self.scale.dtype

    def times(self, z: Tensor) -> Tensor:
        if self.basis is None:
            return self.scale.unsqueeze(-1) * z
        scaled = self.scale.mT.unsqueeze(-1) * z.unsqueeze(1)  # (C, B, S): one product for all rows
        return (self.basis @ scaled.flatten(1)).view_as(scaled).movedim(0, 1)

    def variances(self) -> Tensor:
        squares = self.scale**2
        return squares if self.basis is None else squares @ (self.basis**2).mT

    def take(self, rows: slice) -> ScaledRoot:
        return ScaledRoot(self.scale[rows], self.basis)

    def scaled(self, factor: float) -> ScaledRoot:
        return ScaledRoot(factor * self.scale, self.basis)


def full_root(K: Tensor) -> FullRoot:
    """Cholesky; `linalg.root` for the rows whose K is singular (NaN there inside torch.func.vmap).  (B, C, C)."""
    if K.shape[-1] <= linalg.CLOSED_FORM_LIMIT:
        return FullRoot(linalg.root(K))
    factor, info = torch.linalg.cholesky_ex(K)
    singular = info != 0
    if batched(K):  # no step may depend on values
        return FullRoot(torch.where(singular[..., None, None], torch.nan, factor))
    if bool(singular.any()):
        factor[singular] = linalg.root(K[singular])
    return FullRoot(factor)
