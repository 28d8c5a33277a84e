"""Contrasts of classes: C − 1 outputs in place of C.

A softmax does not see what is added to all of its C outputs, so its curvature has no part along (1,
…, 1). Under a prior that is the same for every class that direction of the weights keeps the
prior's curvature, and leaves every ratio of determinants.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Contrasts:
    """Qᵀf with Q (C, C − 1) orthonormal and orthogonal to (1, …, 1)."""

    classes: int
    temperature: float = 1.0

    @cached_property
    def matrix(self) -> Tensor:
        """Helmert's: class k against the mean of those before it."""
        k = torch.arange(1, self.classes, dtype=torch.float64)
        whole = torch.triu(torch.ones(self.classes, self.classes - 1, dtype=torch.float64))
        whole[torch.arange(1, self.classes), torch.arange(self.classes - 1)] = -k
        return whole / (k * (k + 1)).sqrt()

    def of_matrices(self, values: Tensor) -> Tensor:
        """QᵀΛQ of (m, C, C)."""
        Q = self.matrix.to(values.dtype)
        return Q.mT @ values @ Q

    def of_blocks(self, H: Tensor) -> Tensor:
        """(Q ⊗ I)ᵀ H (Q ⊗ I) of a matrix of C × C blocks."""
        C, F = self.classes, H.shape[0] // self.classes
        blocks = torch.einsum("afbg,ac,bd->cfdg", H.reshape(C, F, C, F), self.matrix, self.matrix)
        return blocks.reshape((C - 1) * F, (C - 1) * F)

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor]:
        return tuple(torch.triu_indices(self.classes - 1, self.classes - 1))

    def pairs(self, f: Tensor) -> Tensor:
        """Of QᵀΛQ with Λ = (diag(p) − ppᵀ)/T², p = softmax(f/T), the pairs a ≤ b: f (C, …) ->
        (pairs, …).
        """
        a, b = self._pairs
        Q, p = (
            self.matrix.to(f.dtype) / self.temperature,
            (f / self.temperature).softmax(0).flatten(1),
        )
        along = Q.mT @ p
        found = ((Q[:, a] * Q[:, b]).mT @ p).addcmul_(along[a], along[b], value=-1)
        return found.reshape(len(a), *f.shape[1:])
