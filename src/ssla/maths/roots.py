"""Roots of output covariances: R with R Rᵀ = K for each row, possibly implicit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ssla._checks import batched
from ssla.maths import linalg


class Root(Protocol):
    """R with R Rᵀ = K, for B rows and C outputs."""

    @property
    def dtype(self) -> torch.dtype: ...

    def times(self, z: Tensor) -> Tensor:
        """R z.  (C, S) -> (B, C, S)."""
        ...

    def at_nodes(self, z: Tensor) -> Tensor:
        """The same product with the outputs last: z Rᵀ.  (S, C) -> (B, S, C)."""
        ...

    def variances(self) -> Tensor:
        """The diagonal of K (B, C)."""
        ...

    def take(self, rows: slice | Tensor) -> Root:
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

    def at_nodes(self, z: Tensor) -> Tensor:
        return z @ self.values.mT

    def variances(self) -> Tensor:
        return (self.values**2).sum(-1)

    def take(self, rows: slice | Tensor) -> FullRoot:
        return FullRoot(self.values[rows])

    def scaled(self, factor: float) -> FullRoot:
        return FullRoot(factor * self.values)


@dataclass(frozen=True, eq=False)
class ScaledRoot:
    """R = Q diag(s), with one Q for all rows: nothing of size (B, C, C) is formed."""

    scale: Tensor  # s (B, C)
    basis: Tensor | None = None  # Q (C, C); None: the identity
    # Orthonormal rows (r, C) that span the scales of all inputs; found when asked for: see
    # `SharedNodes`.
    profiles: Callable[[], Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.scale.dtype

    def times(self, z: Tensor) -> Tensor:
        if self.basis is None:
            return self.scale.unsqueeze(-1) * z
        scaled = self.scale.mT.unsqueeze(-1) * z.unsqueeze(1)  # (C, B, S): one product for all rows
        return (self.basis @ scaled.flatten(1)).view_as(scaled).movedim(0, 1)

    def at_nodes(self, z: Tensor) -> Tensor:
        scaled = self.scale.unsqueeze(1) * z
        return scaled if self.basis is None else scaled @ self.basis.mT

    def variances(self) -> Tensor:
        squares = self.scale**2
        return squares if self.basis is None else squares @ (self.basis**2).mT

    def take(self, rows: slice | Tensor) -> ScaledRoot:
        return ScaledRoot(self.scale[rows], self.basis, self.profiles)

    def scaled(self, factor: float) -> ScaledRoot:
        return ScaledRoot(factor * self.scale, self.basis, self.profiles)


@dataclass(frozen=True, eq=False)
class SharedNodes:
    """R z of every row from products that are made once: R z = Q (s ∘ z) = Σ_k c_k Q (u_k ∘ z),
    where s = Σ_k c_k u_k.

    Exact for scales s in the span of the profiles u_k; `covers` says which rows have such a scale.
    A row then costs r·C·S multiplications in place of C²·S.
    """

    root: ScaledRoot  # a root with this basis Q and these profiles, of any rows
    profiles: Tensor  # u (r, C), orthonormal
    products: Tensor  # Q (u_k ∘ z) (r, S, C)
    squares: Tensor  # mean over the nodes of the products of pairs of `products` (r·r, C)

    def serves(self, root: Root) -> bool:
        """Whether the root has this basis and these profiles."""
        if not isinstance(root, ScaledRoot):
            return False
        return root.basis is self.root.basis and root.profiles == self.root.profiles

    def coefficients(self, root: ScaledRoot) -> Tensor:
        """c (B, r)."""
        return root.scale @ self.profiles.mT

    def covers(self, root: ScaledRoot, tolerance: float) -> Tensor:
        """Whether the scale of a row is the combination of profiles, to a share of its largest
        entry (B,) bool.
        """
        off = (root.scale - self.coefficients(root) @ self.profiles).abs().amax(1)
        return off <= tolerance * root.scale.amax(1)

    def at_nodes(self, coefficients: Tensor, nodes: slice) -> Tensor:
        """R z at some of the nodes.  (B, r) -> (B, s, C)."""
        some = self.products[:, nodes]
        return (coefficients @ some.flatten(1)).view(len(coefficients), *some.shape[1:])

    def mean_squares(self, coefficients: Tensor) -> Tensor:
        """The mean of (R z)² over all nodes (B, C)."""
        pairs = coefficients.unsqueeze(-1) * coefficients.unsqueeze(-2)
        return pairs.flatten(1) @ self.squares


def shared_nodes(root: ScaledRoot, z: Tensor) -> SharedNodes:
    """The products for the rows of a root with profiles: as many as r rows take without them.

    z (S, C).
    """
    assert root.basis is not None
    assert root.profiles is not None
    profiles = root.profiles().to(z.dtype)
    products = (profiles.unsqueeze(1) * z) @ root.basis.mT  # (r, S, C)
    by_output = products.permute(2, 0, 1)
    squares = (by_output @ by_output.mT).flatten(1).mT / len(z)  # (r·r, C)
    return SharedNodes(root.take(slice(0)), profiles, products, squares.contiguous())


def full_root(K: Tensor) -> FullRoot:
    """Cholesky; `linalg.root` for the rows whose K is singular (NaN there inside torch.func.vmap).

    (B, C, C).
    """
    if K.shape[-1] <= linalg.CLOSED_FORM_LIMIT:
        return FullRoot(linalg.root(K))
    factor, info = torch.linalg.cholesky_ex(K)
    singular = info != 0
    if batched(K):  # no step may depend on values
        return FullRoot(torch.where(singular[..., None, None], torch.nan, factor))
    if bool(singular.any()):
        factor[singular] = linalg.root(K[singular])
    return FullRoot(factor)
