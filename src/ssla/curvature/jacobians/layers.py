"""Any layers: J = Σ_t δ_t ⊗ a_t for each layer with a Kronecker form, columns for the others.

Terms and symbols are those of `ssla.curvature`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssla.curvature.jacobians.jacobian import DenseJacobian
from ssla.maths.linalg import symmetric_product

# Limit for arrays larger than the layer's own inputs and gradients: 32 MiB in float64. A guess.
ENTRIES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class LayerBlock:
    """One layer's part: J = Σ_t δ_t ⊗ a_t over the positions t at which its weight is used.

    positions (out, in) are the indices of the weight's entries in θ. A bias is an input that is
    always one. Directions are those of all parameters (P,), and results of `pull` are (out, in).
    """

    positions: Tensor
    a: Tensor  # (B, T, in)
    delta: Tensor  # (B, C, T, out)

    @property
    def used_once(self) -> bool:
        """Return whether the weight is used at one position only (T = 1).

        J is then a matrix δ aᵀ of rank one for each row and output.
        """
        return self.a.shape[1] == 1

    def double(self) -> LayerBlock:
        """Return the same block in float64."""
        return LayerBlock(self.positions, self.a.double(), self.delta.double())

    def entries(self) -> Tensor:
        """Compute J (B, C, out, in)."""
        return torch.einsum("bcto,bti->bcoi", self.delta, self.a)

    def yield_entries_by_rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows, J (B, C, r, in)) for r rows of the weight at a time, to bound memory."""
        B, C, _, out = self.delta.shape
        for rows in _make_bounded_slices(out, B * C * self.a.shape[2]):
            yield rows, torch.einsum("bcto,bti->bcoi", self.delta[..., rows], self.a)

    def push(self, direction: Tensor) -> Tensor:
        """Compute the product J d with a direction d.  (P,) -> (B, C)."""
        D = direction[self.positions].to(self.a.dtype)
        return torch.einsum("bcto,bto->bc", self.delta, self.a @ D.mT)

    def pull(self, g: Tensor) -> Tensor:
        """Compute Σ_i J_iᵀ g_i.  (B, C) -> (out, in)."""
        weighted = torch.einsum("bc,bcto->bto", g, self.delta)
        return weighted.flatten(0, 1).mT @ self.a.flatten(0, 1)

    def push_many(self, directions: Tensor) -> Tensor:
        """Compute the products J D with k directions.  (P, k) -> (B, C, k)."""
        B, _, T, out = self.delta.shape
        products = []
        for columns in _make_bounded_slices(directions.shape[1], B * T * out):
            D = directions[:, columns][self.positions].to(self.a.dtype)  # (out, in, k)
            aD = self.a.flatten(0, 1) @ D.movedim(1, 0).flatten(1)  # (B·T, out·k)
            products.append(self.delta.flatten(2) @ aD.view(B, T * out, -1))
        return torch.cat(products, -1)

    def pull_many(self, g: Tensor) -> Tensor:
        """Compute Σ_i J_iᵀ G_i.  (B, C, k) -> (out, in, k)."""
        B, _, T, out = self.delta.shape
        products = []
        for columns in _make_bounded_slices(g.shape[-1], B * T * out):
            weighted = self.delta.flatten(2).mT @ g[..., columns]  # (B, T·out, k)
            pulled = self.a.flatten(0, 1).mT @ weighted.view(B * T, -1)  # (in, out·k)
            products.append(pulled.view(self.a.shape[2], out, -1).movedim(1, 0))
        return torch.cat(products, -1)

    def square_sum(self, precision: Tensor) -> Tensor:
        """Compute the diagonal of Σ_i J_iᵀ Λ_i J_i for Λ.  (B, C, C) -> (out, in)."""
        if self.used_once:
            # The squares of the entries δ_o a_i are products δ_o² a_i².
            d = self.delta[:, :, 0]
            return torch.einsum("bco,bcd,bdo->bo", d, precision, d).mT @ self.a[:, 0] ** 2
        out = torch.empty(self.positions.shape, dtype=self.a.dtype)
        for rows, J in self.yield_entries_by_rows():
            flat = J.flatten(2)
            out[rows] = (flat * (precision @ flat)).sum((0, 1)).view(-1, out.shape[1])
        return out

    def weighted_covariance(self, weights: Tensor) -> Tensor:
        """Compute J diag(w) Jᵀ with w (out, in), exactly symmetric.  -> (B, C, C)."""
        w = weights.to(self.a.dtype)
        if self.used_once:
            d = self.delta[:, :, 0]
            return symmetric_product(d * (self.a[:, 0] ** 2 @ w.mT).unsqueeze(1), d)
        B, C = self.delta.shape[:2]
        K = torch.zeros(B, C, C, dtype=self.a.dtype)
        for rows, J in self.yield_entries_by_rows():
            K += symmetric_product((J * w[rows]).flatten(2), J.flatten(2))
        return K


@dataclass(frozen=True)
class RestBlock:
    """Stored columns of J, for parameters of layers without a Kronecker form.

    It has the products of a LayerBlock, with entries (P_r,) in place of (out, in).
    """

    positions: Tensor  # (P_r,)
    values: Tensor  # (B, C, P_r)

    @property
    def _as_jacobian(self) -> DenseJacobian:
        """Return the columns as a Jacobian of P_r parameters."""
        return DenseJacobian(self.values)

    def double(self) -> RestBlock:
        """Return the same block in float64."""
        return RestBlock(self.positions, self.values.double())

    def entries(self) -> Tensor:
        """Return J (B, C, P_r)."""
        return self.values

    def push(self, direction: Tensor) -> Tensor:
        """Compute the product J d with a direction d.  (P,) -> (B, C)."""
        return self._as_jacobian.push(direction[self.positions])

    def pull(self, g: Tensor) -> Tensor:
        """Compute Σ_i J_iᵀ g_i.  (B, C) -> (P_r,)."""
        return self._as_jacobian.pull(g)

    def push_many(self, directions: Tensor) -> Tensor:
        """Compute the products J D with k directions.  (P, k) -> (B, C, k)."""
        return self._as_jacobian.push_many(directions[self.positions])

    def pull_many(self, g: Tensor) -> Tensor:
        """Compute Σ_i J_iᵀ G_i.  (B, C, k) -> (P_r, k)."""
        return self._as_jacobian.pull_many(g)

    def square_sum(self, precision: Tensor) -> Tensor:
        """Compute the diagonal of Σ_i J_iᵀ Λ_i J_i for Λ.  (B, C, C) -> (P_r,)."""
        return self._as_jacobian.gram_diagonal(precision)

    def weighted_covariance(self, weights: Tensor) -> Tensor:
        """Compute J diag(w) Jᵀ with w (P_r,), exactly symmetric.  -> (B, C, C)."""
        return self._as_jacobian.quadratic_diagonal(weights)


@dataclass(frozen=True)
class LayerJacobian:
    """J of a whole network, as one block for each layer and one for all other parameters.

    No two blocks hold the same entry of θ (`ssla.network.layer_plans` plans no entry that several
    layers share). So `pull` and the like assign the results of each block, and need not add them.

    With `wide`, products are in float64, but the layers are stored in their own dtype and converted
    one at a time: those of a deep network in float64 would take most of the memory of a chunk.
    """

    size: int  # P
    outputs: int  # C
    rows: int  # B
    layers: tuple[LayerBlock, ...]  # as stored; see `blocks`
    rest: RestBlock | None  # of the parameters outside these layers; None: there are none
    wide: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of all products."""
        if self.wide:
            return torch.float64
        return self.inputs[0].dtype

    def blocks(self) -> Iterator[LayerBlock]:
        """Yield the blocks of the layers, converted to `dtype` one at a time."""
        for block in self.layers:
            yield block.double() if self.wide else block

    def _yield_all_blocks(self) -> Iterator[LayerBlock | RestBlock]:
        """Yield the blocks of the layers, then that of the other parameters if there are any."""
        yield from self.blocks()
        if self.rest is not None:
            yield self.rest

    def double(self) -> LayerJacobian:
        """Return the same J with products in float64."""
        return replace(self, rest=None if self.rest is None else self.rest.double(), wide=True)

    @property
    def inputs(self) -> list[Tensor]:
        """Return the tensors (B, …) in which J is linear.

        These tensors are the inputs of each layer, then the columns of the other parameters, if
        any.
        """
        columns = [] if self.rest is None else [self.rest.values]
        return [block.a for block in self.layers] + columns

    def with_inputs(self, inputs: Iterable[Tensor]) -> LayerJacobian:
        """Return J with other tensors in place of `inputs`, in their order, in float64."""
        layer_inputs = list(inputs)
        rest = None
        if self.rest is not None:
            rest = RestBlock(self.rest.positions, layer_inputs.pop().double())
        layers = tuple(
            LayerBlock(block.positions, a.double(), block.delta.double())
            for block, a in zip(self.layers, layer_inputs, strict=True)
        )
        return replace(self, layers=layers, rest=rest)

    def to_dense(self) -> DenseJacobian:
        """Compute all entries of J (B, C, P), which take 8·B·C·P bytes in float64."""
        J = torch.zeros(self.rows, self.outputs, self.size, dtype=self.dtype)
        for block in self._yield_all_blocks():
            J[:, :, block.positions.flatten()] = block.entries().flatten(2)
        return DenseJacobian(J)

    def push(self, direction: Tensor) -> Tensor:
        """Compute the product J d with a direction d.  (P,) -> (B, C)."""
        out = torch.zeros(self.rows, self.outputs, dtype=self.dtype)
        for block in self._yield_all_blocks():
            out = out + block.push(direction)
        return out

    def pull(self, g: Tensor) -> Tensor:
        """Compute Σ_i J_iᵀ g_i.  (B, C) -> (P,)."""
        out = torch.zeros(self.size, dtype=self.dtype)
        for block in self._yield_all_blocks():
            out[block.positions] = block.pull(g)
        return out

    def push_many(self, directions: Tensor) -> Tensor:
        """Compute the products J D with k directions.  (P, k) -> (B, C, k)."""
        out = torch.zeros(self.rows, self.outputs, directions.shape[1], dtype=self.dtype)
        for block in self._yield_all_blocks():
            out = out + block.push_many(directions)
        return out

    def pull_many(self, g: Tensor) -> Tensor:
        """Compute Σ_i J_iᵀ G_i.  (B, C, k) -> (P, k)."""
        out = torch.zeros(self.size, g.shape[-1], dtype=self.dtype)
        for block in self._yield_all_blocks():
            out[block.positions] = block.pull_many(g)
        return out

    def gram(self, precision: Tensor) -> Tensor:
        """Compute Σ_i J_iᵀ Λ_i J_i for Λ, from all entries of J.  (B, C, C) -> (P, P)."""
        return self.to_dense().gram(precision)

    def add_gram(self, total: Tensor, precision: Tensor) -> Tensor:
        """Add `gram` to total (P, P) in place, and return total; precision Λ (B, C, C)."""
        return self.to_dense().add_gram(total, precision)

    def gram_diagonal(self, precision: Tensor) -> Tensor:
        """Compute the diagonal of `gram`.  (B, C, C) -> (P,)."""
        out = torch.zeros(self.size, dtype=self.dtype)
        for block in self._yield_all_blocks():
            out[block.positions] = block.square_sum(precision)
        return out

    def quadratic(self, whitener: Tensor) -> Tensor:
        """Compute J WᵀW Jᵀ, exactly symmetric, for lower triangular W (P, P).  -> (B, C, C)."""
        return self.to_dense().quadratic(whitener)

    def quadratic_diagonal(self, variances: Tensor) -> Tensor:
        """Compute J diag(v) Jᵀ for v (P,), exactly symmetric.  -> (B, C, C)."""
        out = torch.zeros(self.rows, self.outputs, self.outputs, dtype=self.dtype)
        for block in self._yield_all_blocks():
            out = out + block.weighted_covariance(variances[block.positions])
        return out


def _make_bounded_slices(count: int, entries: int) -> list[slice]:
    """Return slices of `count` items, so that each holds at most ENTRIES_AT_ONCE numbers.

    entries: how many numbers one item has. A slice has at least one item.
    """
    size = max(ENTRIES_AT_ONCE // entries, 1)
    return [slice(start, start + size) for start in range(0, count, size)]
