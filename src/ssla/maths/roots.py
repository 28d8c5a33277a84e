"""Roots of output covariances: R with R Rᵀ = K for each row, possibly implicit.

K (B, C, C) are the covariances of C outputs at B inputs, the rows. Nodes z are fixed points in C
dimensions, at which expectations under N(0, I) are taken; R z are then nodes of N(0, K). An
implicit root can be multiplied, but is never stored as a (B, C, C) tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ssla._checks import is_inside_vmap
from ssla.maths import linalg


class Root(Protocol):
    """R (B, C, C) with R Rᵀ = K, for B rows and C outputs, possibly implicit."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of R."""

    def multiply(self, z: Tensor) -> Tensor:
        """Compute R z.  (C, S) -> (B, C, S)."""

    def multiply_outputs_last(self, z: Tensor) -> Tensor:
        """Compute z Rᵀ, the same product with the outputs last.  (S, C) -> (B, S, C)."""

    def variances(self) -> Tensor:
        """Compute the diagonal of K (B, C)."""

    def select_rows(self, rows: slice | Tensor) -> Root:
        """Return the root of some rows, given by a slice or by their numbers (m,)."""

    def scale_by(self, factor: float) -> Root:
        """Return the root of factor² · K."""


@dataclass(frozen=True, eq=False)
class FullRoot:
    """R with its entries."""

    values: Tensor  # (B, C, C)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of R."""
        return self.values.dtype

    def multiply(self, z: Tensor) -> Tensor:
        """Compute R z.  (C, S) -> (B, C, S)."""
        return self.values @ z

    def multiply_outputs_last(self, z: Tensor) -> Tensor:
        """Compute z Rᵀ.  (S, C) -> (B, S, C)."""
        return z @ self.values.mT

    def variances(self) -> Tensor:
        """Compute the diagonal of K (B, C)."""
        return (self.values**2).sum(-1)

    def select_rows(self, rows: slice | Tensor) -> FullRoot:
        """Return the root of some rows, given by a slice or by their numbers (m,)."""
        return FullRoot(self.values[rows])

    def scale_by(self, factor: float) -> FullRoot:
        """Return the root of factor² · K."""
        return FullRoot(factor * self.values)


@dataclass(frozen=True, eq=False)
class ScaledRoot:
    """R = Q diag(s), with one Q for all rows: nothing of size (B, C, C) is stored."""

    scale: Tensor  # s (B, C)
    basis: Tensor | None = None  # Q (C, C); None: the identity
    # A function that computes orthonormal rows (r, C), of which the scales of all inputs are
    # combinations: see `SharedNodes`. None: there are no such rows.
    profiles: Callable[[], Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of R."""
        return self.scale.dtype

    def multiply(self, z: Tensor) -> Tensor:
        """Compute R z.  (C, S) -> (B, C, S)."""
        if self.basis is None:
            return self.scale.unsqueeze(-1) * z
        # All rows in one product: Q (C, C) times diag(s) z of all rows (C, B·S).
        scaled = self.scale.mT.unsqueeze(-1) * z.unsqueeze(1)  # (C, B, S)
        return (self.basis @ scaled.flatten(1)).view_as(scaled).movedim(0, 1)

    def multiply_outputs_last(self, z: Tensor) -> Tensor:
        """Compute z Rᵀ.  (S, C) -> (B, S, C)."""
        scaled = self.scale.unsqueeze(1) * z
        return scaled if self.basis is None else scaled @ self.basis.mT

    def variances(self) -> Tensor:
        """Compute the diagonal of K (B, C)."""
        squares = self.scale**2
        return squares if self.basis is None else squares @ (self.basis**2).mT

    def select_rows(self, rows: slice | Tensor) -> ScaledRoot:
        """Return the root of some rows, given by a slice or by their numbers (m,)."""
        return ScaledRoot(self.scale[rows], self.basis, self.profiles)

    def scale_by(self, factor: float) -> ScaledRoot:
        """Return the root of factor² · K."""
        return ScaledRoot(factor * self.scale, self.basis, self.profiles)


@dataclass(frozen=True, eq=False)
class SharedNodes:
    """The products R z of every row from products that are made once for all rows.

    R z = Q (s ∘ z) = Σ_k c_k Q (u_k ∘ z), where s = Σ_k c_k u_k.

    This is exact for scales s in the span of the profiles u_k: `find_covered_rows` says which rows
    have such a scale. A row then costs r·C·S multiplications in place of C²·S.
    """

    root: ScaledRoot  # a root with this basis Q and these profiles, of any rows
    profiles: Tensor  # u (r, C), orthonormal
    products: Tensor  # Q (u_k ∘ z) (r, S, C)
    squares: Tensor  # mean over the nodes of the products of pairs of `products` (r·r, C)

    def has_basis_of(self, root: Root) -> bool:
        """Return whether a root has the basis and the profiles of these products."""
        if not isinstance(root, ScaledRoot):
            return False
        return root.basis is self.root.basis and root.profiles == self.root.profiles

    def coefficients(self, root: ScaledRoot) -> Tensor:
        """Compute the coefficients c (B, r) of a root's scales (B, C) in the profiles.

        The coefficients are exact for the rows of `find_covered_rows`, and a projection for others.
        """
        return root.scale @ self.profiles.mT

    def find_covered_rows(self, root: ScaledRoot, tolerance: float) -> Tensor:
        """Return for each row whether its scale is a combination of the profiles (B,) bool.

        tolerance: the largest error, as a share of the row's largest entry.
        """
        error = (root.scale - self.coefficients(root) @ self.profiles).abs().amax(1)
        return error <= tolerance * root.scale.amax(1)

    def combine_products(self, coefficients: Tensor, nodes: slice) -> Tensor:
        """Compute R z at s of the nodes from `coefficients`.  (B, r) -> (B, s, C)."""
        products = self.products[:, nodes]
        return (coefficients @ products.flatten(1)).view(len(coefficients), *products.shape[1:])

    def mean_squares(self, coefficients: Tensor) -> Tensor:
        """Compute the mean of (R z)² over all nodes from `coefficients`.  (B, r) -> (B, C)."""
        pairs = coefficients.unsqueeze(-1) * coefficients.unsqueeze(-2)
        return pairs.flatten(1) @ self.squares


def build_shared_nodes(root: ScaledRoot, z: Tensor) -> SharedNodes:
    """Compute the products that all rows of a root share, at nodes z (S, C).

    The products cost as much as R z of r rows, for r profiles. Raises AssertionError for a root
    that has no basis or no profiles.
    """
    assert root.basis is not None
    assert root.profiles is not None
    profiles = root.profiles().to(z.dtype)
    products = (profiles.unsqueeze(1) * z) @ root.basis.mT  # (r, S, C)
    by_output = products.permute(2, 0, 1)  # (C, r, S)
    squares = (by_output @ by_output.mT).flatten(1).mT / len(z)  # (r·r, C)
    return SharedNodes(root.select_rows(slice(0)), profiles, products, squares.contiguous())


def full_root(K: Tensor) -> FullRoot:
    """Compute a root of K (B, C, C) by Cholesky, for positive semi-definite K.

    Rows whose K is singular take `linalg.covariance_root`, as do all rows for few outputs. Inside
    torch.func.vmap such rows of many outputs are NaN, because no step may depend on values there.
    """
    if K.shape[-1] <= linalg.CLOSED_FORM_LIMIT:
        return FullRoot(linalg.covariance_root(K))
    factor, info = torch.linalg.cholesky_ex(K)
    singular = info != 0
    if is_inside_vmap(K):
        return FullRoot(torch.where(singular[..., None, None], torch.nan, factor))
    if bool(singular.any()):
        factor[singular] = linalg.covariance_root(K[singular])
    return FullRoot(factor)
