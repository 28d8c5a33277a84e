"""Contrasts of classes: C − 1 outputs in place of C.

A softmax does not see what is added to all of its C outputs, so its curvature has no part along
(1, …, 1). Under a prior that is the same for every class, that direction of the weights keeps the
prior's curvature, and cancels in every ratio of determinants.

A contrast of classes is a combination of their outputs whose coefficients sum to zero. C classes
have C − 1 orthogonal contrasts, the columns of Q (C, C − 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Contrasts:
    """The contrasts Qᵀf of C classes, with Q (C, C − 1) orthonormal and orthogonal to (1, …, 1)."""

    classes: int  # C
    temperature: float = 1.0  # T of the softmax of f/T; for `project_softmax_curvature` only

    @cached_property
    def matrix(self) -> Tensor:
        """Return Helmert's contrasts Q (C, C − 1) in float64.

        Column k compares class k + 1 with the mean of the classes before it, and has length one.
        """
        k = torch.arange(1, self.classes, dtype=torch.float64)
        unscaled = torch.triu(torch.ones(self.classes, self.classes - 1, dtype=torch.float64))
        unscaled[torch.arange(1, self.classes), torch.arange(self.classes - 1)] = -k
        return unscaled / (k * (k + 1)).sqrt()

    def project_matrices(self, values: Tensor) -> Tensor:
        """Compute QᵀΛQ (m, C − 1, C − 1) for matrices Λ (m, C, C)."""
        Q = self.matrix.to(values.dtype)
        return Q.mT @ values @ Q

    def project_blocks(self, H: Tensor) -> Tensor:
        """Compute (Q ⊗ I)ᵀ H (Q ⊗ I) for a matrix H (C·F, C·F) of C × C blocks.

        It is H in the contrasts of the outputs: ((C − 1)·F, (C − 1)·F).
        """
        C, F = self.classes, H.shape[0] // self.classes
        blocks = torch.einsum("afbg,ac,bd->cfdg", H.reshape(C, F, C, F), self.matrix, self.matrix)
        return blocks.reshape((C - 1) * F, (C - 1) * F)

    @cached_property
    def _pair_indices(self) -> tuple[Tensor, Tensor]:
        """Return the indices a and b of the pairs a ≤ b of contrasts, each (pairs,)."""
        return tuple(torch.triu_indices(self.classes - 1, self.classes - 1))

    def project_softmax_curvature(self, f: Tensor) -> Tensor:
        """Compute the entries a ≤ b of QᵀΛQ (pairs, …) for outputs f (C, …).

        Λ = (diag(p) − ppᵀ)/T² with p = softmax(f/T) is the curvature of a softmax. The C(C − 1)/2
        pairs of contrasts are in the order of `_pair_indices`.
        """
        a, b = self._pair_indices
        Q = self.matrix.to(f.dtype) / self.temperature
        p = (f / self.temperature).softmax(0).flatten(1)
        Qp = Q.mT @ p
        # Entry (a, b) is Σ_c Q_ca Q_cb p_c − (Qᵀp)_a (Qᵀp)_b, with 1/T in each Q.
        entries = ((Q[:, a] * Q[:, b]).mT @ p).addcmul_(Qp[a], Qp[b], value=-1)
        return entries.reshape(len(a), *f.shape[1:])
