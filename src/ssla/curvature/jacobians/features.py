"""A last layer: J = φᵀ ⊗ I, never built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ssla.curvature.jacobians.jacobian import DenseJacobian
from ssla.maths.constants import constant
from ssla.maths.linalg import stack_square, symmetric_product

FEW_OUTPUTS = 4  # up to these many, K entry by entry
CACHED = 1 << 17  # numbers worked on together: more fall out of the processor's cache
SEVERAL_OUTPUTS, WIDEST = (
    6,
    128,
)  # from so many outputs on, and up to so many features, sums over pairs are faster


@constant
def pairs(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs i ≥ j of 0 … size−1 (m,) (m,), and the number of the pair of each i and j
    (size, size).
    """
    i, j = torch.tril_indices(size, size)
    number = torch.empty(size, size, dtype=torch.long)
    number[i, j] = number[j, i] = torch.arange(len(i))
    return i, j, number


@dataclass(frozen=True)
class Features:
    """J = φᵀ ⊗ I: outputs are linear in θ (C, F), φ (B, F).

    With `bias`, φ ends in a column of ones that is not stored.
    """

    phi: Tensor  # (B, F), or (B, F − 1) with bias
    outputs: int
    bias: bool = False
    # whether the squares in one basis are kept: for features that stay in memory between passes
    remembers: bool = False

    @property
    def size(self) -> int:
        return self.outputs * self.width

    @property
    def width(self) -> int:
        """F."""
        return self.phi.shape[1] + self.bias

    @property
    def dtype(self) -> torch.dtype:
        return self.phi.dtype

    def with_ones(self) -> Tensor:
        """φ (B, F), with its column of ones."""
        return torch.cat([self.phi, torch.ones_like(self.phi[:, :1])], 1) if self.bias else self.phi

    def double(self) -> Features:
        return Features(
            Features(self.phi.double(), self.outputs, self.bias).with_ones(), self.outputs
        )

    def rotated_squares(self, basis: Tensor) -> Tensor:
        """(φ Q)², entry by entry, for a basis Q (F, F).  -> (B, F)."""
        kept: tuple[Tensor, Tensor] | None = self.__dict__.get("_squares")
        if kept is not None and kept[0] is basis:
            known: Tensor = kept[1]
            return known
        squares = (self.with_ones() @ basis.to(self.dtype)).square()
        if self.remembers:
            self.__dict__["_squares"] = basis, squares
        return squares

    def second_moment(self, weights: Tensor) -> Tensor:
        """Σ_i w_i φ_i φ_iᵀ (F, F), in float64."""
        phi = self.double().phi
        return (phi * weights[:, None]).mT @ phi

    def _times(self, matrix: Tensor) -> Tensor:
        """φ Mᵀ for M (·, F)."""
        return (
            torch.addmm(matrix[:, -1], self.phi, matrix[:, :-1].mT)
            if self.bias
            else self.phi @ matrix.mT
        )

    def push(self, direction: Tensor) -> Tensor:
        return self._times(direction.view(self.outputs, -1).to(self.phi.dtype))

    def pull(self, g: Tensor) -> Tensor:
        weights = g.mT @ self.phi
        return (torch.cat([weights, g.sum(0)[:, None]], 1) if self.bias else weights).flatten()

    def push_many(self, directions: Tensor) -> Tensor:
        # Directions have the shape (C, k, F) here.
        D = directions.to(self.phi.dtype).view(self.outputs, self.width, -1).movedim(1, -1)
        return self._times(D.reshape(-1, self.width)).view(-1, self.outputs, directions.shape[1])

    def pull_many(self, g: Tensor) -> Tensor:
        phi = self.with_ones()
        return (
            (phi.mT @ g.flatten(1))
            .view(self.width, self.outputs, -1)
            .movedim(0, 1)
            .reshape(self.size, -1)
        )

    def dense(self) -> DenseJacobian:
        phi = self.with_ones()
        eye = torch.eye(self.outputs, dtype=phi.dtype)
        return DenseJacobian(
            (eye[None, :, :, None] * phi[:, None, None, :]).reshape(phi.shape[0], self.outputs, -1)
        )

    @property
    def by_pairs(self) -> bool:
        """Whether sums over the pairs of features are the fastest: both matrices of outputs and
        of features are symmetric.
        """
        return self.outputs >= SEVERAL_OUTPUTS and self.width <= WIDEST

    def _products(self) -> Iterator[tuple[slice, Tensor]]:
        """φ_i φ_j of all pairs i ≥ j, in float64, some rows after others.  -> (rows, (m, b))."""
        i, j, _ = pairs(self.width)
        some = max(CACHED // len(i), 1)
        for start in range(0, len(self.phi), some):
            rows = slice(start, start + some)
            phi = Features(self.phi[rows], self.outputs, self.bias).double().phi.mT.contiguous()
            yield rows, phi[i].mul_(phi[j])

    def _blocks_by_pairs(self, precision: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """The blocks a ≥ b of `gram`, from sums over pairs of features."""
        a, b, _ = pairs(self.outputs)
        i, _, features = pairs(self.width)
        of_rows = precision[:, a, b].mT.double()
        total = torch.zeros(len(a), len(i), dtype=torch.float64)
        for rows, products in self._products():
            total.addmm_(of_rows[:, rows], products.mT)
        for number, (first, second) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
            yield first, second, total[number, features]

    def _blocks(self, precision: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """The blocks a ≥ b of `gram`: a, b, Σ Λ_ab φφᵀ (F, F)."""
        if self.by_pairs:
            yield from self._blocks_by_pairs(precision)
            return
        phi = self.double().phi
        for a in range(self.outputs):
            for b in range(a + 1):
                yield a, b, (phi * precision[:, a, b, None]).mT @ phi

    @property
    def by_blocks(self) -> bool:
        """Whether `form` is faster by the blocks of S than by a factor of it: wide features of
        several outputs.
        """
        return self.outputs > FEW_OUTPUTS and self.width > WIDEST

    def _form_by_blocks(self, S: Tensor) -> Tensor:
        """K_ab = ((φ S_ab) ∘ φ) 1: a product B × F × F for each pair of outputs, where a factor
        takes C of them.
        """
        C, F = self.outputs, self.width
        phi = self.double().phi
        K = torch.empty(len(phi), C, C, dtype=torch.float64)
        for a in range(C):
            for b in range(a + 1):
                K[:, a, b] = K[:, b, a] = torch.linalg.vecdot(
                    phi @ S.view(C, F, C, F)[a, :, b, :], phi
                )
        return K

    def form(self, S: Tensor) -> Tensor:
        """J S Jᵀ for a symmetric S (P, P), in float64.  -> (B, C, C)."""
        if self.by_blocks:
            return self._form_by_blocks(S)
        C, F = self.outputs, self.width
        a, b, outputs = pairs(C)
        i, j, _ = pairs(F)
        both = torch.empty(len(a), len(i), dtype=S.dtype)
        for number, (first, second) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
            block = S.view(C, F, C, F)[first, :, second, :]  # (F, F)
            both[number] = (block + block.mT)[i, j]
        both[:, i == j] /= 2
        K = torch.cat([both @ products for _, products in self._products()], 1)
        return K[outputs].movedim(2, 0).contiguous()

    def gram(self, precision: Tensor) -> Tensor:
        return self.add_gram(torch.zeros(self.size, self.size, dtype=torch.float64), precision)

    def add_gram(self, total: Tensor, precision: Tensor) -> Tensor:
        """Block by block, so that no second matrix (P, P) is held."""
        C, F = self.outputs, self.width
        by_outputs = total.view(C, F, C, F)
        for a, b, block in self._blocks(precision):
            by_outputs[b, :, a, :] += block.mT
            if a != b:
                by_outputs[a, :, b, :] += block
        return total

    def gram_diagonal(self, precision: Tensor) -> Tensor:
        phi = self.double().phi
        return (precision.diagonal(dim1=-2, dim2=-1).mT @ (phi * phi)).flatten()

    def quadratic(self, whitener: Tensor) -> Tensor:
        # Output a's weights are the columns of block a of W, which is lower triangular: rows from
        # a·F on.
        C, F = self.outputs, self.width
        W = whitener.to(self.phi.dtype)
        if C > FEW_OUTPUTS:
            return self._quadratic_of_many(W)
        white = [self._times(W[a * F :, a * F : (a + 1) * F]) for a in range(C)]
        K: list[list[Tensor]] = [[white[0]] * C for _ in range(C)]
        for a in range(C):
            for b in range(a):
                K[a][b] = K[b][a] = torch.linalg.vecdot(white[a], white[b][:, (a - b) * F :])
            K[a][a] = torch.linalg.vecdot(white[a], white[a])
        return stack_square(K)

    def _quadratic_of_many(self, W: Tensor) -> Tensor:
        """Some rows after others, so that L⁻¹Jᵀ of them stays in the processor's cache."""
        C, F = self.outputs, self.width
        columns = W.view(-1, C, F).permute(2, 1, 0).reshape(F, -1)
        phi = self.with_ones()
        # An exported graph takes any number of rows, so it cannot be cut into parts.
        rows = (phi,) if torch.compiler.is_compiling() else phi.split(max(CACHED // (C * C * F), 1))
        parts = []
        for some in rows:
            white = (some @ columns).view(some.shape[0], C, -1)
            parts.append(symmetric_product(white, white))
        return torch.cat(parts)

    def quadratic_diagonal(self, variances: Tensor) -> Tensor:
        return torch.diag_embed(self.weighted_squares(variances))

    def weighted_squares(self, variances: Tensor) -> Tensor:
        """The diagonal of J diag(v) Jᵀ, which has no other entries.  (P,) -> (B, C)."""
        v = variances.view(self.outputs, -1).to(self.phi.dtype)
        return Features(self.phi * self.phi, self.outputs, self.bias)._times(v)
