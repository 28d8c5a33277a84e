"""Any layers: J = Σ_t δ_t ⊗ a_t for each layer with a Kronecker form, columns for the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssla.curvature.jacobians.jacobian import DenseJacobian
from ssla.maths.linalg import symmetric_product

ENTRIES_AT_ONCE = 1 << 22  # limit for arrays larger than the layer's own inputs and gradients


@dataclass(frozen=True)
class LayerBlock:
    """One layer's part: J = Σ_t δ_t ⊗ a_t over the positions t at which its weight is used.

    positions (out, in) are the indices of its entries in θ; a bias is an input that is always one.
    """

    positions: Tensor
    a: Tensor  # (B, T, in)
    delta: Tensor  # (B, C, T, out)

    @property
    def single(self) -> bool:
        """Whether the weight is used once: then J has rank one for each output, and squares
        factorise.
        """
        return self.a.shape[1] == 1

    def double(self) -> LayerBlock:
        return LayerBlock(self.positions, self.a.double(), self.delta.double())

    def values(self) -> Tensor:
        """J as (B, C, out, in)."""
        return torch.einsum("bcto,bti->bcoi", self.delta, self.a)

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """`values` in blocks of rows of the weight: (rows, (B, C, some, in))."""
        B, C, _, out = self.delta.shape
        some = max(ENTRIES_AT_ONCE // (B * C * self.a.shape[2]), 1)
        for start in range(0, out, some):
            part = slice(start, start + some)
            yield part, torch.einsum("bcto,bti->bcoi", self.delta[..., part], self.a)

    def push(self, direction: Tensor) -> Tensor:
        D = direction[self.positions].to(self.a.dtype)
        return torch.einsum("bcto,bto->bc", self.delta, self.a @ D.mT)

    def pull(self, g: Tensor) -> Tensor:
        """(out, in)."""
        weighted = torch.einsum("bc,bcto->bto", g, self.delta)
        return weighted.flatten(0, 1).mT @ self.a.flatten(0, 1)

    def _columns(self, count: int) -> list[slice]:
        """Slices of columns; each column takes B·T·out entries."""
        B, _, T, out = self.delta.shape
        some = max(ENTRIES_AT_ONCE // (B * T * out), 1)
        return [slice(start, start + some) for start in range(0, count, some)]

    def push_many(self, directions: Tensor) -> Tensor:
        """(P, k) -> (B, C, k)."""
        B, _, T, out = self.delta.shape
        parts = []
        for some in self._columns(directions.shape[1]):
            D = directions[:, some][self.positions].to(self.a.dtype)  # (out, in, k)
            moved = self.a.flatten(0, 1) @ D.movedim(1, 0).flatten(1)  # (B·T, out·k)
            parts.append(self.delta.flatten(2) @ moved.view(B, T * out, -1))
        return torch.cat(parts, -1)

    def pull_many(self, g: Tensor) -> Tensor:
        """(B, C, k) -> (out, in, k)."""
        B, _, T, out = self.delta.shape
        parts = []
        for some in self._columns(g.shape[-1]):
            weighted = self.delta.flatten(2).mT @ g[..., some]  # (B, T·out, k)
            pulled = self.a.flatten(0, 1).mT @ weighted.view(B * T, -1)  # (in, out·k)
            parts.append(pulled.view(self.a.shape[2], out, -1).movedim(1, 0))
        return torch.cat(parts, -1)

    def square_sum(self, precision: Tensor) -> Tensor:
        """Diagonal of Σ JᵀΛJ as (out, in)."""
        if self.single:
            d = self.delta[:, :, 0]
            return torch.einsum("bco,bcd,bdo->bo", d, precision, d).mT @ self.a[:, 0] ** 2
        out = torch.empty(self.positions.shape, dtype=self.a.dtype)
        for rows, J in self.pieces():
            out[rows] = (
                (J.flatten(2) * (precision @ J.flatten(2))).sum((0, 1)).view(-1, out.shape[1])
            )
        return out

    def weighted_covariance(self, weights: Tensor) -> Tensor:
        """J diag(w) Jᵀ with w (out, in), exactly symmetric.  -> (B, C, C)."""
        w = weights.to(self.a.dtype)
        if self.single:
            d = self.delta[:, :, 0]
            return symmetric_product(d * (self.a[:, 0] ** 2 @ w.mT).unsqueeze(1), d)
        B, C = self.delta.shape[:2]
        K = torch.zeros(B, C, C, dtype=self.a.dtype)
        for rows, J in self.pieces():
            K += symmetric_product((J * w[rows]).flatten(2), J.flatten(2))
        return K


@dataclass(frozen=True)
class RestBlock:
    """Stored columns of J, for parameters of layers without a Kronecker form."""

    positions: Tensor  # (P_r,)
    values: Tensor  # (B, C, P_r)


@dataclass(frozen=True)
class LayerJacobian:
    """J by layers.

    With `wide`, products are taken in float64, but the layers are stored in the dtype that they
    came in and converted one at a time: those of a deep network in float64 would take most of the
    memory of a chunk.
    """

    size: int
    outputs: int
    rows: int
    layers: tuple[LayerBlock, ...]  # as stored; see `blocks`
    rest: RestBlock | None
    wide: bool = False

    @property
    def dtype(self) -> torch.dtype:
        if self.wide:
            return torch.float64
        return self.layers[0].a.dtype if self.layers else self._rest.values.dtype

    def blocks(self) -> Iterator[LayerBlock]:
        """The layers in `dtype`."""
        for block in self.layers:
            yield block.double() if self.wide else block

    @property
    def _rest(self) -> RestBlock:
        assert self.rest is not None
        return self.rest

    def double(self) -> LayerJacobian:
        rest = (
            None if self.rest is None else RestBlock(self.rest.positions, self.rest.values.double())
        )
        return replace(self, rest=rest, wide=True)

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors in which J is linear (B, …): the layers' inputs, and the columns of the
        others.
        """
        return [block.a for block in self.layers] + (
            [] if self.rest is None else [self.rest.values]
        )

    def with_inputs(self, inputs: Iterable[Tensor]) -> LayerJacobian:
        """J with other `inputs`, in float64."""
        given = list(inputs)
        blocks = zip(self.layers, given, strict=False)
        layers = tuple(
            LayerBlock(block.positions, a.double(), block.delta.double()) for block, a in blocks
        )
        rest = None if self.rest is None else RestBlock(self.rest.positions, given[-1].double())
        return replace(self, layers=layers, rest=rest)

    def dense(self) -> DenseJacobian:
        """J with its entries."""
        J = torch.zeros(self.rows, self.outputs, self.size, dtype=self.dtype)
        for block in self.blocks():
            J[:, :, block.positions.flatten()] = block.values().flatten(2)
        if self.rest is not None:
            J[:, :, self.rest.positions] = self.rest.values
        return DenseJacobian(J)

    def push(self, direction: Tensor) -> Tensor:
        out = torch.zeros(self.rows, self.outputs, dtype=self.dtype)
        for block in self.blocks():
            out = out + block.push(direction)
        return (
            out
            if self.rest is None
            else out + self.rest.values @ direction[self.rest.positions].to(self.dtype)
        )

    def pull(self, g: Tensor) -> Tensor:
        out = torch.zeros(self.size, dtype=self.dtype)
        for block in self.blocks():
            out[block.positions] = block.pull(g)
        if self.rest is not None:
            out[self.rest.positions] = self.rest.values.flatten(0, 1).mT @ g.flatten()
        return out

    def push_many(self, directions: Tensor) -> Tensor:
        out = torch.zeros(self.rows, self.outputs, directions.shape[1], dtype=self.dtype)
        for block in self.blocks():
            out += block.push_many(directions)
        return (
            out
            if self.rest is None
            else out + self.rest.values @ directions[self.rest.positions].to(self.dtype)
        )

    def pull_many(self, g: Tensor) -> Tensor:
        out = torch.zeros(self.size, g.shape[-1], dtype=self.dtype)
        for block in self.blocks():
            out[block.positions] = block.pull_many(g)
        if self.rest is not None:
            out[self.rest.positions] = self.rest.values.flatten(0, 1).mT @ g.flatten(0, 1)
        return out

    def gram(self, precision: Tensor) -> Tensor:
        return self.dense().gram(precision)

    def add_gram(self, total: Tensor, precision: Tensor) -> Tensor:
        return self.dense().add_gram(total, precision)

    def gram_diagonal(self, precision: Tensor) -> Tensor:
        out = torch.zeros(self.size, dtype=self.dtype)
        for block in self.blocks():
            out[block.positions] = block.square_sum(precision)
        if self.rest is not None:
            out[self.rest.positions] = DenseJacobian(self.rest.values).gram_diagonal(precision)
        return out

    def quadratic(self, whitener: Tensor) -> Tensor:
        return self.dense().quadratic(whitener)

    def quadratic_diagonal(self, variances: Tensor) -> Tensor:
        out = torch.zeros(self.rows, self.outputs, self.outputs, dtype=self.dtype)
        for block in self.blocks():
            out = out + block.weighted_covariance(variances[block.positions])
        if self.rest is not None:
            out = out + DenseJacobian(self.rest.values).quadratic_diagonal(
                variances[self.rest.positions]
            )
        return out
