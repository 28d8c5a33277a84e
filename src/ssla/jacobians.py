"""J = ∂f/∂θ of a batch, by what can be done with it.

Structures do not ask for the entries of J. They ask for contractions, and each kind of J answers in the cheapest way it has: a
last layer's J is φ ⊗ I and is never built; a layer's J = Σ_t δ_t ⊗ a_t is built a few of its rows at a time, and only where its
weight is used in several places. The dual form of the dense curvature keeps the entries by design (`dense`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

ENTRIES_AT_ONCE = 1 << 22  # of anything larger than the layer's own inputs and gradients


class Jacobian(Protocol):
    """J (B, C, P), perhaps implicit."""

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
        """All of J, built."""
        ...

    def gram(self, precision: Tensor) -> Tensor:
        """Σ_i J_iᵀ Λ_i J_i.  (B, C, C) -> (P, P)."""
        ...

    def gram_diagonal(self, precision: Tensor) -> Tensor:
        """The diagonal of `gram`.  (B, C, C) -> (P,)."""
        ...

    def quadratic(self, whitener: Tensor) -> Tensor:
        """J WᵀW Jᵀ for lower triangular W (P, P).  -> (B, C, C)."""
        ...

    def quadratic_diagonal(self, variances: Tensor) -> Tensor:
        """J diag(v) Jᵀ.  (P,) -> (B, C, C)."""
        ...


@dataclass(frozen=True)
class Features:
    """J = φᵀ ⊗ I: outputs are linear in θ (C, F), φ (B, F).

    With `bias`, φ ends in a column of ones that is not stored.
    """

    phi: Tensor  # (B, F), or (B, F − 1) with bias
    outputs: int
    bias: bool = False

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
        """φ (B, F), its column of ones included."""
        return torch.cat([self.phi, torch.ones_like(self.phi[:, :1])], 1) if self.bias else self.phi

    def double(self) -> Features:
        return Features(Features(self.phi.double(), self.outputs, self.bias).with_ones(), self.outputs)

    def _times(self, matrix: Tensor) -> Tensor:
        """φ Mᵀ for M (·, F)."""
        return torch.addmm(matrix[:, -1], self.phi, matrix[:, :-1].mT) if self.bias else self.phi @ matrix.mT

    def push(self, direction: Tensor) -> Tensor:
        return self._times(direction.view(self.outputs, -1).to(self.phi.dtype))

    def pull(self, g: Tensor) -> Tensor:
        weights = g.mT @ self.phi
        return (torch.cat([weights, g.sum(0)[:, None]], 1) if self.bias else weights).flatten()

    def push_many(self, directions: Tensor) -> Tensor:
        D = directions.to(self.phi.dtype).view(self.outputs, self.width, -1).movedim(1, -1)  # (C, k, F)
        return self._times(D.reshape(-1, self.width)).view(-1, self.outputs, directions.shape[1])

    def pull_many(self, g: Tensor) -> Tensor:
        phi = self.with_ones()
        return (phi.mT @ g.flatten(1)).view(self.width, self.outputs, -1).movedim(0, 1).reshape(self.size, -1)

    def dense(self) -> DenseJacobian:
        phi = self.with_ones()
        eye = torch.eye(self.outputs, dtype=phi.dtype)
        return DenseJacobian((eye[None, :, :, None] * phi[:, None, None, :]).reshape(phi.shape[0], self.outputs, -1))

    def gram(self, precision: Tensor) -> Tensor:
        phi = self.double().phi
        C, F = self.outputs, self.width
        out = torch.empty(C, F, C, F, dtype=phi.dtype)
        for a in range(C):
            for b in range(a + 1):
                block = (phi * precision[:, a, b, None]).mT @ phi
                out[a, :, b, :] = block
                out[b, :, a, :] = block.mT
        return out.reshape(C * F, C * F)

    def gram_diagonal(self, precision: Tensor) -> Tensor:
        phi = self.double().phi
        return (precision.diagonal(dim1=-2, dim2=-1).mT @ (phi * phi)).flatten()

    def quadratic(self, whitener: Tensor) -> Tensor:
        # Output a's weights are the columns of block a of W, which is lower triangular: rows from a·F on.
        C, F = self.outputs, self.width
        W = whitener.to(self.phi.dtype)
        white = [self._times(W[a * F :, a * F : (a + 1) * F]) for a in range(C)]
        K = torch.empty(C, C, self.phi.shape[0], dtype=self.phi.dtype)
        for a in range(C):
            for b in range(a):
                K[a, b] = K[b, a] = torch.linalg.vecdot(white[a], white[b][:, (a - b) * F :])
            K[a, a] = torch.linalg.vecdot(white[a], white[a])
        return K.movedim(-1, 0)

    def quadratic_diagonal(self, variances: Tensor) -> Tensor:
        v = variances.view(self.outputs, -1).to(self.phi.dtype)
        return torch.diag_embed(Features(self.phi * self.phi, self.outputs, self.bias)._times(v))


@dataclass(frozen=True)
class LayerBlock:
    """One layer's part: J = Σ_t δ_t ⊗ a_t over the places t where its weight is used.

    positions (out, in) are its entries' places in θ; a bias is folded in as an input of one.
    """

    positions: Tensor
    a: Tensor  # (B, T, in)
    delta: Tensor  # (B, C, T, out)

    @property
    def single(self) -> bool:
        """Whether the weight is used in one place: then J has rank one for each output, and squares factorise."""
        return self.a.shape[1] == 1

    def double(self) -> LayerBlock:
        return LayerBlock(self.positions, self.a.double(), self.delta.double())

    def values(self) -> Tensor:
        """(B, C, out, in), built."""
        return torch.einsum("bcto,bti->bcoi", self.delta, self.a)

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """`values` for some of the weight's rows at a time: (rows of the weight, (B, C, some, in))."""
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
        """Columns in pieces: a piece takes B·T·out entries for each."""
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
            out[rows] = (J.flatten(2) * (precision @ J.flatten(2))).sum((0, 1)).view(-1, out.shape[1])
        return out

    def weighted_covariance(self, weights: Tensor) -> Tensor:
        """J diag(w) Jᵀ with w (out, in).  -> (B, C, C)."""
        w = weights.to(self.a.dtype)
        if self.single:
            d = self.delta[:, :, 0]
            return (d * (self.a[:, 0] ** 2 @ w.mT).unsqueeze(1)) @ d.mT
        B, C = self.delta.shape[:2]
        K = torch.zeros(B, C, C, dtype=self.a.dtype)
        for rows, J in self.pieces():
            K += (J * w[rows]).flatten(2) @ J.flatten(2).mT
        return K


@dataclass(frozen=True)
class RestBlock:
    """Columns of J held as they are, for parameters of layers without a Kronecker form."""

    positions: Tensor  # (P_r,)
    values: Tensor  # (B, C, P_r)


@dataclass(frozen=True)
class LayerJacobian:
    """J by layers."""

    size: int
    outputs: int
    rows: int
    layers: tuple[LayerBlock, ...]
    rest: RestBlock | None

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].a.dtype if self.layers else self._rest.values.dtype

    @property
    def _rest(self) -> RestBlock:
        assert self.rest is not None
        return self.rest

    def double(self) -> LayerJacobian:
        rest = None if self.rest is None else RestBlock(self.rest.positions, self.rest.values.double())
        return replace(self, layers=tuple(block.double() for block in self.layers), rest=rest)

    def dense(self) -> DenseJacobian:
        """All of J, built."""
        J = torch.zeros(self.rows, self.outputs, self.size, dtype=self.dtype)
        for block in self.layers:
            J[:, :, block.positions.flatten()] = block.values().flatten(2)
        if self.rest is not None:
            J[:, :, self.rest.positions] = self.rest.values
        return DenseJacobian(J)

    def push(self, direction: Tensor) -> Tensor:
        out = torch.zeros(self.rows, self.outputs, dtype=self.dtype)
        for block in self.layers:
            out = out + block.push(direction)
        return out if self.rest is None else out + self.rest.values @ direction[self.rest.positions].to(self.dtype)

    def pull(self, g: Tensor) -> Tensor:
        out = torch.zeros(self.size, dtype=self.dtype)
        for block in self.layers:
            out[block.positions] = block.pull(g)
        if self.rest is not None:
            out[self.rest.positions] = self.rest.values.flatten(0, 1).mT @ g.flatten()
        return out

    def push_many(self, directions: Tensor) -> Tensor:
        out = torch.zeros(self.rows, self.outputs, directions.shape[1], dtype=self.dtype)
        for block in self.layers:
            out += block.push_many(directions)
        return out if self.rest is None else out + self.rest.values @ directions[self.rest.positions].to(self.dtype)

    def pull_many(self, g: Tensor) -> Tensor:
        out = torch.zeros(self.size, g.shape[-1], dtype=self.dtype)
        for block in self.layers:
            out[block.positions] = block.pull_many(g)
        if self.rest is not None:
            out[self.rest.positions] = self.rest.values.flatten(0, 1).mT @ g.flatten(0, 1)
        return out

    def gram(self, precision: Tensor) -> Tensor:
        return self.dense().gram(precision)

    def gram_diagonal(self, precision: Tensor) -> Tensor:
        out = torch.zeros(self.size, dtype=self.dtype)
        for block in self.layers:
            out[block.positions] = block.square_sum(precision)
        if self.rest is not None:
            out[self.rest.positions] = DenseJacobian(self.rest.values).gram_diagonal(precision)
        return out

    def quadratic(self, whitener: Tensor) -> Tensor:
        return self.dense().quadratic(whitener)

    def quadratic_diagonal(self, variances: Tensor) -> Tensor:
        out = torch.zeros(self.rows, self.outputs, self.outputs, dtype=self.dtype)
        for block in self.layers:
            out = out + block.weighted_covariance(variances[block.positions])
        if self.rest is not None:
            out = out + DenseJacobian(self.rest.values).quadratic_diagonal(variances[self.rest.positions])
        return out


@dataclass(frozen=True)
class DenseJacobian:
    """J held as it is."""

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

    def gram_diagonal(self, precision: Tensor) -> Tensor:
        return (self.values * (precision @ self.values)).sum((0, 1))

    def quadratic(self, whitener: Tensor) -> Tensor:
        white = self.values @ whitener.to(self.values.dtype).mT
        return white @ white.mT

    def quadratic_diagonal(self, variances: Tensor) -> Tensor:
        return (self.values * variances.to(self.values.dtype)) @ self.values.mT
