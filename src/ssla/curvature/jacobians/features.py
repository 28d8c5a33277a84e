"""A last layer: J = φᵀ ⊗ I, never built.

Terms and symbols are those of `ssla.curvature`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ssla.curvature.jacobians.jacobian import DenseJacobian
from ssla.maths.constants import cached_constant
from ssla.maths.linalg import stack_square, symmetric_product

FEW_OUTPUTS = 4  # up to this number K is computed entry by entry. A guess
CACHED = 1 << 17  # numbers worked on together: more do not fit the processor's cache. A guess
# Sums over pairs of features are taken from this number of outputs on, and up to this number of
# features. Guesses.
SEVERAL_OUTPUTS, WIDEST = 6, 128


@cached_constant
def index_pairs(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the m pairs i ≥ j of 0 … size − 1, and the number of each pair.

    -> i (m,), j (m,), and number (size, size), whose entries (i, j) and (j, i) are the same.
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
    # whether `rotated_squares` keeps its result: for features that stay in memory between passes
    keeps_squares: bool = False

    @property
    def size(self) -> int:
        """Return the number of parameters P = C·F."""
        return self.outputs * self.width

    @property
    def width(self) -> int:
        """Return the number of features F, which counts the column of ones."""
        return self.phi.shape[1] + self.bias

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of φ."""
        return self.phi.dtype

    def with_ones(self) -> Tensor:
        """Return φ (B, F), with its column of ones if there is a bias."""
        return torch.cat([self.phi, torch.ones_like(self.phi[:, :1])], 1) if self.bias else self.phi

    def _convert_phi_to_double(self) -> Tensor:
        """Return φ (B, F) in float64, with its column of ones if there is a bias."""
        return Features(self.phi.double(), self.outputs, self.bias).with_ones()

    def double(self) -> Features:
        """Return the same J in float64; its column of ones, if any, is stored in φ."""
        return Features(self._convert_phi_to_double(), self.outputs)

    def rotated_squares(self, basis: Tensor) -> Tensor:
        """Compute (φ Q)², entry by entry, for a basis Q (F, F).  -> (B, F).

        With `keeps_squares` the result for the last basis is kept in this object.
        """
        kept: tuple[Tensor, Tensor] | None = self.__dict__.get("_squares")
        if kept is not None and kept[0] is basis:
            return kept[1]
        squares = (self.with_ones() @ basis.to(self.dtype)).square()
        # The dataclass is frozen, so the result is kept in its __dict__. Each pass asks for the
        # same basis object.
        if self.keeps_squares:
            self.__dict__["_squares"] = basis, squares
        return squares

    def second_moment(self, weights: Tensor) -> Tensor:
        """Compute Σ_i w_i φ_i φ_iᵀ in float64 for weights w.  (B,) -> (F, F)."""
        phi = self._convert_phi_to_double()
        return (phi * weights[:, None]).mT @ phi

    def _multiply_phi(self, matrix: Tensor) -> Tensor:
        """Compute φ Mᵀ for a matrix M.  (m, F) -> (B, m)."""
        # The last column of M multiplies the column of ones, which is not stored.
        if self.bias:
            return torch.addmm(matrix[:, -1], self.phi, matrix[:, :-1].mT)
        return self.phi @ matrix.mT

    def push(self, direction: Tensor) -> Tensor:
        """Compute the product J d with a direction d.  (P,) -> (B, C)."""
        return self._multiply_phi(direction.view(self.outputs, -1).to(self.phi.dtype))

    def pull(self, g: Tensor) -> Tensor:
        """Compute Σ_i J_iᵀ g_i.  (B, C) -> (P,)."""
        weights = g.mT @ self.phi
        return (torch.cat([weights, g.sum(0)[:, None]], 1) if self.bias else weights).flatten()

    def push_many(self, directions: Tensor) -> Tensor:
        """Compute the products J D with k directions.  (P, k) -> (B, C, k)."""
        # D has the shape (C, k, F) here: φ multiplies each of its rows.
        D = directions.to(self.phi.dtype).view(self.outputs, self.width, -1).movedim(1, -1)
        return self._multiply_phi(D.reshape(-1, self.width)).view(
            -1, self.outputs, directions.shape[1]
        )

    def pull_many(self, g: Tensor) -> Tensor:
        """Compute Σ_i J_iᵀ G_i.  (B, C, k) -> (P, k)."""
        products = (self.with_ones().mT @ g.flatten(1)).view(self.width, self.outputs, -1)
        return products.movedim(0, 1).reshape(self.size, -1)

    def to_dense(self) -> DenseJacobian:
        """Compute all entries of J (B, C, P), which take 8·B·C·P bytes in float64."""
        phi = self.with_ones()
        eye = torch.eye(self.outputs, dtype=phi.dtype)
        entries = eye[None, :, :, None] * phi[:, None, None, :]  # (B, C, C, F)
        return DenseJacobian(entries.reshape(phi.shape[0], self.outputs, -1))

    @property
    def pairs_are_faster(self) -> bool:
        """Return whether `gram` and `congruence` are faster by pairs of features than by products.

        This is so for several outputs and few features. Both matrices are symmetric in outputs and
        in features, so the pairs i ≥ j suffice.
        """
        return self.outputs >= SEVERAL_OUTPUTS and self.width <= WIDEST

    @property
    def blocks_are_faster(self) -> bool:
        """Return whether `congruence` is faster by the blocks of S than `quadratic` by a factor.

        This is so for many features and several outputs.
        """
        return self.outputs > FEW_OUTPUTS and self.width > WIDEST

    def _yield_feature_products(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows, φ_i φ_j (m, b)) of all m pairs of features i ≥ j, for b rows at a time.

        The products are float64.
        """
        i, j, _ = index_pairs(self.width)
        rows_at_once = max(CACHED // len(i), 1)
        for start in range(0, len(self.phi), rows_at_once):
            rows = slice(start, start + rows_at_once)
            phi = Features(self.phi[rows], self.outputs, self.bias)._convert_phi_to_double()
            phi = phi.mT.contiguous()  # (F, b)
            yield rows, phi[i].mul_(phi[j])

    def _yield_gram_blocks_by_pairs(self, precision: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield what `_yield_gram_blocks` does, from sums over pairs of features.

        precision: Λ (B, C, C). The sums of all pairs of outputs and all pairs of features are one
        matrix product.
        """
        a, b, _ = index_pairs(self.outputs)
        i, _, feature_pair_numbers = index_pairs(self.width)
        precision_pairs = precision[:, a, b].mT.double()
        total = torch.zeros(len(a), len(i), dtype=torch.float64)
        for rows, products in self._yield_feature_products():
            total.addmm_(precision_pairs[:, rows], products.mT)
        for number, (first, second) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
            yield first, second, total[number, feature_pair_numbers]

    def _yield_gram_blocks(self, precision: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (a, b, Σ_i Λ_iab φ_i φ_iᵀ (F, F)), the blocks of `gram` for outputs a ≥ b.

        precision: Λ (B, C, C).
        """
        if self.pairs_are_faster:
            yield from self._yield_gram_blocks_by_pairs(precision)
            return
        phi = self._convert_phi_to_double()
        for a in range(self.outputs):
            for b in range(a + 1):
                yield a, b, (phi * precision[:, a, b, None]).mT @ phi

    def congruence(self, S: Tensor) -> Tensor:
        """Compute J S Jᵀ for a symmetric S (P, P), in float64.  -> (B, C, C)."""
        return (
            self._compute_congruence_by_blocks(S)
            if self.blocks_are_faster
            else self._compute_congruence_by_pairs(S)
        )

    def _compute_congruence_by_blocks(self, S: Tensor) -> Tensor:
        """Compute J S Jᵀ from K_ab = ((φ S_ab) ∘ φ) 1 in float64.  (P, P) -> (B, C, C).

        This takes one product B × F × F for each pair of outputs, and a factor of S takes C of
        them. Only the pairs a ≥ b are computed.
        """
        C, F = self.outputs, self.width
        phi = self._convert_phi_to_double()
        K = torch.empty(len(phi), C, C, dtype=torch.float64)
        for a in range(C):
            for b in range(a + 1):
                block = S.view(C, F, C, F)[a, :, b, :]  # (F, F)
                K[:, a, b] = K[:, b, a] = torch.linalg.vecdot(phi @ block, phi)
        return K

    def _compute_congruence_by_pairs(self, S: Tensor) -> Tensor:
        """Compute J S Jᵀ from products of pairs of features, in float64.  (P, P) -> (B, C, C)."""
        C, F = self.outputs, self.width
        a, b, output_pair_numbers = index_pairs(C)
        i, j, _ = index_pairs(F)

        # A pair i > j stands for (i, j) and (j, i): its coefficient is the sum of both entries.
        coefficients = torch.empty(len(a), len(i), dtype=S.dtype)
        for number, (first, second) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
            block = S.view(C, F, C, F)[first, :, second, :]  # (F, F)
            coefficients[number] = (block + block.mT)[i, j]

        coefficients[:, i == j] /= 2
        K = torch.cat(
            [coefficients @ products for _, products in self._yield_feature_products()], 1
        )
        # From (pairs of outputs, B) to (B, C, C), by the number of the pair of each two outputs.
        return K[output_pair_numbers].movedim(2, 0).contiguous()

    def gram(self, precision: Tensor) -> Tensor:
        """Compute Σ_i J_iᵀ Λ_i J_i in float64 for Λ.  (B, C, C) -> (P, P)."""
        return self.add_gram(torch.zeros(self.size, self.size, dtype=torch.float64), precision)

    def add_gram(self, total: Tensor, precision: Tensor) -> Tensor:
        """Add `gram` to total (P, P) in place, and return total; precision Λ (B, C, C).

        This goes block by block, so that no second matrix (P, P) is held.
        """
        C, F = self.outputs, self.width
        total_blocks = total.view(C, F, C, F)
        for a, b, block in self._yield_gram_blocks(precision):
            total_blocks[b, :, a, :] += block.mT
            if a != b:
                total_blocks[a, :, b, :] += block
        return total

    def gram_diagonal(self, precision: Tensor) -> Tensor:
        """Compute the diagonal of `gram`.  (B, C, C) -> (P,)."""
        phi = self._convert_phi_to_double()
        return (precision.diagonal(dim1=-2, dim2=-1).mT @ (phi * phi)).flatten()

    def quadratic(self, whitener: Tensor) -> Tensor:
        """Compute J WᵀW Jᵀ, exactly symmetric, for lower triangular W (P, P).  -> (B, C, C)."""
        C, F = self.outputs, self.width
        W = whitener.to(self.phi.dtype)
        if C > FEW_OUTPUTS:
            return self._compute_quadratic_by_chunks(W)
        # The columns a·F … (a + 1)·F of W belong to output a. W is lower triangular, so they are
        # zero above row a·F: white[a] starts at that row.
        white = [self._multiply_phi(W[a * F :, a * F : (a + 1) * F]) for a in range(C)]
        K: list[list[Tensor]] = [[white[0]] * C for _ in range(C)]
        for a in range(C):
            for b in range(a):
                K[a][b] = K[b][a] = torch.linalg.vecdot(white[a], white[b][:, (a - b) * F :])
            K[a][a] = torch.linalg.vecdot(white[a], white[a])
        return stack_square(K)

    def _compute_quadratic_by_chunks(self, W: Tensor) -> Tensor:
        """Compute J WᵀW Jᵀ for many outputs.  W (P, P) -> (B, C, C).

        This takes a few rows at a time, so that W Jᵀ of these rows stays in the processor's cache.
        """
        C, F = self.outputs, self.width
        # For each feature, the columns of W of all outputs: φ @ columns is (W Jᵀ)ᵀ for J = φᵀ ⊗ I.
        columns = W.view(-1, C, F).permute(2, 1, 0).reshape(F, -1)
        phi = self.with_ones()
        # An exported graph takes any number of rows, so it cannot be cut into parts.
        chunks = (
            (phi,) if torch.compiler.is_compiling() else phi.split(max(CACHED // (C * C * F), 1))
        )
        covariances = []
        for rows in chunks:
            white = (rows @ columns).view(rows.shape[0], C, -1)
            covariances.append(symmetric_product(white, white))
        return torch.cat(covariances)

    def quadratic_diagonal(self, variances: Tensor) -> Tensor:
        """Compute J diag(v) Jᵀ for v (P,), which is diagonal here.  -> (B, C, C)."""
        return torch.diag_embed(self.weighted_squares(variances))

    def weighted_squares(self, variances: Tensor) -> Tensor:
        """Compute the diagonal of J diag(v) Jᵀ for variances v.  (P,) -> (B, C)."""
        v = variances.view(self.outputs, -1).to(self.phi.dtype)
        # The column of ones is its own square, so the bias stays implicit.
        return Features(self.phi * self.phi, self.outputs, self.bias)._multiply_phi(v)
