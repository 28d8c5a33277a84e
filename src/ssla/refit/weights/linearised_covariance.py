"""K = J H⁻¹ Jᵀ of the outputs of all training rows together, for refits of a linearised network.

With the prior's precision T, the curvature H = T + JᵀΛJ at θ̂ and R outputs of all rows there are
two ways to form it, both in float64:

    from outputs (R ≤ P):  G = J T⁻¹ Jᵀ,  LLᵀ = I + Λ^½ G Λ^½,  W = L⁻¹ Λ^½ G,  K = G − WᵀW  (R ×
    R); from weights (P < R):  FFᵀ = I + T^-½ JᵀΛJ T^-½,  V = J T^-½ F^-T,  K = VVᵀ,  V (R × P).

J itself is not kept in the first way: G is a sum over groups of weights, and the Jacobians of a
group are computed when their turn comes. The assumptions are a Gaussian prior with T > 0 for every
weight, and curvatures Λ that are positive semi-definite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

COPIES = 5  # R×R matrices at the peak: G, Λ^½G, I + Λ^½GΛ^½, its factor, and what LAPACK needs
FACTOR_COPIES = 3  # P×P matrices at the peak
SHARE = 8  # a guess: the part of the memory budget that Jacobians of a group of weights may take
LEAST_WEIGHTS = 256  # a guess: of a group; fewer would mean too many passes of Jacobians
PANEL = 1024  # a guess: rows of a product whose other triangle is its mirror image


@dataclass(frozen=True, eq=False)
class OutputCovariance:
    """K of the R = n·c outputs of the training rows, and between them and those of N new rows.

    Large parts are in the dtype of the refits, what belongs to a new row alone is in float64.
    """

    matrix: Tensor | None  # K (R, R), or
    factor: Tensor | None  # V (R, P) with K = VVᵀ
    blocks: Tensor  # K_i of each training row (n, c, c)
    across: Tensor  # J H⁻¹ J_xᵀ (N, R, c)
    new: Tensor  # J_x H⁻¹ J_xᵀ (N, c, c)
    slope: Tensor  # J H⁻¹ ∇log π(θ̂) (R,)
    new_slope: Tensor  # J_x H⁻¹ ∇log π(θ̂) (N, c)

    def times(self, values: Tensor) -> Tensor:
        """K v for each row v of values (m, R)."""
        if self.matrix is not None:
            return values @ self.matrix
        assert self.factor is not None
        return (values @ self.factor) @ self.factor.mT

    def of_directions(self, rows: Tensor, directions: Tensor) -> Tensor:
        """Covariances of eᵀf_i, for k rows i (k,) and directions e (k, c), with all outputs (k,
        R).
        """
        n, c, _ = self.blocks.shape
        parts = []
        for which in torch.arange(len(rows)).split(PANEL // 8):
            e = directions[which].unsqueeze(1)
            if self.matrix is not None:
                parts.append((e @ self.matrix.reshape(n, c, -1)[rows[which]]).squeeze(1))
            else:
                assert self.factor is not None
                at_rows = (e @ self.factor.reshape(n, c, -1)[rows[which]]).squeeze(1)
                parts.append(at_rows @ self.factor.mT)
        return torch.cat(parts)


def from_outputs(R: int, P: int) -> bool:
    """Whether K is formed from G, of all outputs, and not from H, of all weights."""
    return R <= P


def keeps_matrix(R: int, P: int) -> bool:
    """Whether products with K (R × R) cost less than two with its factor (R × P)."""
    return R <= 2 * P


def bytes_needed(R: int, P: int, new_outputs: int, itemsize: int) -> int:
    """Bytes at the peak for R training outputs and the outputs of all new rows."""
    sides = 3 * 8 * R * (new_outputs + 1)
    if from_outputs(R, P):
        return 8 * (COPIES * R * R + R * min(P, LEAST_WEIGHTS)) + sides
    matrix = itemsize * R * R if keeps_matrix(R, P) else 0
    return max(8 * FACTOR_COPIES * P * P, matrix) + itemsize * R * P + sides


Columns = Callable[[int, int], Iterable[Tensor]]
"""(first, last) -> Jacobians J T^-½ of blocks of rows in these weights (b·c, last − first)."""


@dataclass(frozen=True, eq=False)
class Jacobians:
    """What K is formed from. Rows are in blocks, in the same order at every pass."""

    training: Columns
    new: Columns
    P: int
    R: int
    new_outputs: int
    root: Tensor  # Λ_i^½ (n, c, c), with the weights of rows
    prior_gradient: Tensor  # T^-½ ∇log π(θ̂) (P,)

    def times_root(self, values: Tensor) -> Tensor:
        """Λ^½ of the columns of values (R, k)."""
        by_row = values.reshape(*self.root.shape[:2], values.shape[1])
        return (self.root @ by_row).reshape(values.shape)


def output_covariance(
    jacobians: Jacobians,
    dtype: torch.dtype,
    budget: int,
) -> OutputCovariance:
    """K from the Jacobians, by the cheaper way; products with it are in `dtype`."""
    if from_outputs(jacobians.R, jacobians.P):
        return _from_outputs(jacobians, dtype, budget)
    return _from_weights(jacobians, dtype)


def _from_outputs(jacobians: Jacobians, dtype: torch.dtype, budget: int) -> OutputCovariance:
    """By G = J T⁻¹ Jᵀ, then conditioned on the data."""
    P, R, root = jacobians.P, jacobians.R, jacobians.root
    n, c, _ = root.shape
    N = jacobians.new_outputs // c
    G = torch.zeros(R, R, dtype=torch.float64)
    # Columns: the outputs of new rows, then the prior's gradient.
    sides = torch.zeros(R, jacobians.new_outputs + 1, dtype=torch.float64)
    new = torch.zeros(N, c, c, dtype=torch.float64)
    new_slope = torch.zeros(jacobians.new_outputs, dtype=torch.float64)
    width = min(max(budget // SHARE // (8 * R), LEAST_WEIGHTS), P)
    for first in range(0, P, width):
        last = min(first + width, P)
        J = torch.empty(R, last - first, dtype=torch.float64)
        fill(J, jacobians.training(first, last))
        J_new = torch.empty(jacobians.new_outputs, last - first, dtype=torch.float64)
        fill(J_new, jacobians.new(first, last))
        gradient = jacobians.prior_gradient[first:last]
        add_gram(G, J.mT, 1.0)
        sides[:, :-1] += J @ J_new.mT
        sides[:, -1] += J @ gradient
        new_slope += J_new @ gradient
        by_row = J_new.reshape(N, c, -1)
        new += by_row @ by_row.mT
        del J, J_new, by_row
    W = jacobians.times_root(G)
    B = jacobians.times_root(W.mT)
    B.diagonal().add_(1.0)
    L = torch.linalg.cholesky(B)
    del B
    W = torch.linalg.solve_triangular(L, W, upper=False, out=W)
    white = torch.linalg.solve_triangular(L, jacobians.times_root(sides), upper=False)
    del L
    sides -= W.mT @ white
    add_gram(G, W, -1.0)
    del W
    by_row = white[:, :-1].reshape(R, N, c).movedim(1, 0)
    new -= by_row.mT @ by_row
    new_slope -= white[:, :-1].mT @ white[:, -1]
    blocks = torch.stack([G[i * c : (i + 1) * c, i * c : (i + 1) * c] for i in range(n)])
    return OutputCovariance(
        matrix=G.to(dtype),
        factor=None,
        blocks=blocks.to(dtype),
        across=sides[:, :-1].reshape(R, N, c).movedim(1, 0).to(dtype).contiguous(),
        new=(new + new.mT) / 2,
        slope=sides[:, -1].clone(),
        new_slope=new_slope.reshape(N, c),
    )


def _from_weights(jacobians: Jacobians, dtype: torch.dtype) -> OutputCovariance:
    """By the Cholesky factor of H in the weights."""
    P, R, root = jacobians.P, jacobians.R, jacobians.root
    n, c, _ = root.shape
    N = jacobians.new_outputs // c
    H = torch.eye(P, dtype=torch.float64)
    V = torch.empty(R, P, dtype=dtype)
    place = 0
    for J in jacobians.training(0, P):
        V[place : place + len(J)] = J.to(dtype)
        here = root[place // c : (place + len(J)) // c]
        scaled = (here @ J.reshape(len(here), c, P)).reshape(J.shape)
        add_gram(H, scaled, 1.0)
        place += len(J)
    F = torch.linalg.cholesky(H)
    del H

    def whitened(values: Tensor) -> Tensor:
        solved: Tensor = torch.linalg.solve_triangular(F, values.double().mT, upper=False)
        return solved.mT

    for part in torch.arange(R).split(PANEL):
        V[part] = whitened(V[part]).to(dtype)
    V_new = torch.cat([whitened(J) for J in jacobians.new(0, P)])
    gradient = whitened(jacobians.prior_gradient.unsqueeze(0)).squeeze(0)
    by_row = V.reshape(n, c, P)
    new_by_row = V_new.reshape(N, c, P)
    matrix = V @ V.mT if keeps_matrix(R, P) else None
    return OutputCovariance(
        matrix=matrix,
        factor=None if matrix is not None else V,
        blocks=by_row @ by_row.mT,
        across=(V @ V_new.to(dtype).mT).reshape(R, N, c).movedim(1, 0).contiguous(),
        new=new_by_row @ new_by_row.mT,
        slope=(V @ gradient.to(dtype)).double(),
        new_slope=(V_new @ gradient).reshape(N, c),
    )


def fill(total: Tensor, blocks: Iterable[Tensor]) -> None:
    """Blocks of rows, one below the other, into `total`."""
    place = 0
    for block in blocks:
        total[place : place + len(block)] = block
        place += len(block)


def add_gram(total: Tensor, factor: Tensor, sign: float) -> None:
    """total += sign · factorᵀ factor in place, with one triangle computed and the other copied.

    total (k, k) symmetric, factor (r, k).
    """
    for first in range(0, len(total), PANEL):
        last = min(first + PANEL, len(total))
        total[first:last, :last].addmm_(factor[:, first:last].mT, factor[:, :last], alpha=sign)
        total[:first, first:last] = total[first:last, :first].mT
