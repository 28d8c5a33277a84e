"""K = J H⁻¹ Jᵀ of the outputs of all training rows together, for refits of a linearised network.

With the prior's precision T, the curvature H = T + JᵀΛJ at θ̂ and R outputs of all rows there are
two ways to form it, both in float64:

    from outputs (R ≤ P):  G = J T⁻¹ Jᵀ,  LLᵀ = I + Λ^½ G Λ^½,  W = L⁻¹ Λ^½ G,  K = G − WᵀW
    from weights (P < R):  FFᵀ = I + T^-½ JᵀΛJ T^-½,  V = J T^-½ F^-T,  K = VVᵀ,  V (R × P)

J itself is not kept in the first way: G is a sum over groups of weights, and the Jacobians of a
group are computed when their turn comes. The assumptions are a Gaussian prior with T > 0 for every
weight, and curvatures Λ that are positive semi-definite.

Terms and symbols are those of `ssla.refit.weights` and `ssla.refit.weights.linearised`: R = n·c
outputs of n training rows, P weights, N new rows, and J_x their Jacobians.
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

    Large parts are in the dtype of the refits, values of new rows alone are in float64.
    """

    # one of the two: K, or V with K = VVᵀ
    matrix: Tensor | None  # (R, R)
    factor: Tensor | None  # (R, P)
    blocks: Tensor  # K_i of each training row (n, c, c)
    cross_covariance: Tensor  # J H⁻¹ J_xᵀ (N, R, c)
    new_covariance: Tensor  # J_x H⁻¹ J_xᵀ (N, c, c)
    slope: Tensor  # J H⁻¹ ∇log π(θ̂) (R,)
    new_slope: Tensor  # J_x H⁻¹ ∇log π(θ̂) (N, c)

    def multiply(self, values: Tensor) -> Tensor:
        """Return K v for each row v of values (m, R): (m, R)."""
        if self.matrix is not None:
            return values @ self.matrix
        assert self.factor is not None
        return (values @ self.factor) @ self.factor.mT

    def compute_covariances_of_directions(self, rows: Tensor, directions: Tensor) -> Tensor:
        """Compute the covariances eᵀK of combinations eᵀf_i with all outputs (k, R).

        rows (k,): the training rows i. directions (k, c): the vectors e. Chunks bound the memory.
        """
        n, c, _ = self.blocks.shape
        source = self.factor if self.matrix is None else self.matrix
        assert source is not None
        covariances = []
        for chunk in torch.arange(len(rows)).split(PANEL // 8):
            e = directions[chunk].unsqueeze(1)
            at_rows = (e @ source.reshape(n, c, -1)[rows[chunk]]).squeeze(1)
            # With a factor V, eᵀK is eᵀV Vᵀ.
            covariances.append(at_rows if self.matrix is not None else at_rows @ source.mT)
        return torch.cat(covariances)


def is_from_outputs(R: int, P: int) -> bool:
    """Return whether K is formed from G (R × R), of all outputs, and not from H (P × P)."""
    return R <= P


def keeps_matrix(R: int, P: int) -> bool:
    """Return whether a product with K (R × R) costs less than two with its factor (R × P)."""
    return R <= 2 * P


def count_covariance_bytes(R: int, P: int, new_outputs: int, itemsize: int) -> int:
    """Return the bytes that forming K needs at its peak.

    new_outputs: the number of outputs of all new rows. itemsize: bytes of a number in the products
    with K.
    """
    # Covariances with the new outputs and with the prior's gradient, in three copies: a guess.
    sides = 3 * 8 * R * (new_outputs + 1)
    if is_from_outputs(R, P):
        return 8 * (COPIES * R * R + R * min(P, LEAST_WEIGHTS)) + sides
    matrix = itemsize * R * R if keeps_matrix(R, P) else 0
    return max(8 * FACTOR_COPIES * P * P, matrix) + itemsize * R * P + sides


Columns = Callable[[int, int], Iterable[Tensor]]
"""(first, last) -> Jacobians J T^-½ of blocks of rows in these weights (b·c, last − first)."""


@dataclass(frozen=True, eq=False)
class Jacobians:
    """The Jacobians that K is formed from. Rows are in blocks, in the same order at every pass."""

    training: Columns
    new: Columns
    P: int  # weights
    R: int  # outputs of all training rows
    new_outputs: int  # outputs of all new rows
    root: Tensor  # Λ_i^½ (n, c, c), with the weights of rows
    prior_gradient: Tensor  # T^-½ ∇log π(θ̂) (P,)

    def multiply_by_root(self, values: Tensor) -> Tensor:
        """Return Λ^½ times each column of values (R, k): (R, k)."""
        by_row = values.reshape(*self.root.shape[:2], values.shape[1])
        return (self.root @ by_row).reshape(values.shape)


def form_output_covariance(
    jacobians: Jacobians,
    dtype: torch.dtype,
    budget: int,
) -> OutputCovariance:
    """Form K from the Jacobians, in the way that is cheaper for their shapes.

    dtype: that of products with K. budget: the memory budget in bytes.
    """
    if is_from_outputs(jacobians.R, jacobians.P):
        return _form_from_outputs(jacobians, dtype, budget)
    return _form_from_weights(jacobians, dtype)


def _form_from_outputs(jacobians: Jacobians, dtype: torch.dtype, budget: int) -> OutputCovariance:
    """Form K from G = J T⁻¹ Jᵀ of all outputs, by the first way of the module's docstring.

    Arrays of R × R are changed in place, and deleted as soon as they are not needed: COPIES counts
    them. dtype, budget: see `form_output_covariance`.
    """
    n, c, _ = jacobians.root.shape
    R, N = jacobians.R, jacobians.new_outputs // c
    G, sides, new, new_slope = _sum_prior_covariances(jacobians, budget)
    W = jacobians.multiply_by_root(G)
    B = jacobians.multiply_by_root(W.mT)  # I + Λ^½GΛ^½, once one is added to the diagonal
    B.diagonal().add_(1.0)
    L = torch.linalg.cholesky(B)
    del B
    W = torch.linalg.solve_triangular(L, W, upper=False, out=W)

    # Covariances with the new outputs lose what the data explain, like K itself.
    white = torch.linalg.solve_triangular(L, jacobians.multiply_by_root(sides), upper=False)
    del L
    sides -= W.mT @ white
    add_gram(G, W, sign=-1.0)
    del W
    by_row = white[:, :-1].reshape(R, N, c).movedim(1, 0)
    new -= by_row.mT @ by_row
    new_slope -= white[:, :-1].mT @ white[:, -1]
    blocks = torch.stack([G[i * c : (i + 1) * c, i * c : (i + 1) * c] for i in range(n)])
    return OutputCovariance(
        matrix=G.to(dtype),
        factor=None,
        blocks=blocks.to(dtype),
        cross_covariance=sides[:, :-1].reshape(R, N, c).movedim(1, 0).to(dtype).contiguous(),
        new_covariance=(new + new.mT) / 2,
        slope=sides[:, -1].clone(),
        new_slope=new_slope.reshape(N, c),
    )


def _sum_prior_covariances(
    jacobians: Jacobians, budget: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum the covariances under the prior alone over groups of weights, in float64.

    Returns G (R, R); those with the new outputs, with J T⁻¹ ∇log π as the last column (R, N·c + 1);
    those of each new row (N, c, c); and J_x T⁻¹ ∇log π (N·c,). Groups bound the memory: Jacobians
    of a group take 1/SHARE of the budget, and have at least LEAST_WEIGHTS weights.
    """
    P, R, c = jacobians.P, jacobians.R, jacobians.root.shape[1]
    N = jacobians.new_outputs // c
    G = torch.zeros(R, R, dtype=torch.float64)
    sides = torch.zeros(R, jacobians.new_outputs + 1, dtype=torch.float64)
    new = torch.zeros(N, c, c, dtype=torch.float64)
    new_slope = torch.zeros(jacobians.new_outputs, dtype=torch.float64)
    width = min(max(budget // SHARE // (8 * R), LEAST_WEIGHTS), P)

    for first in range(0, P, width):
        last = min(first + width, P)
        J = torch.empty(R, last - first, dtype=torch.float64)
        fill_rows(J, jacobians.training(first, last))
        J_new = torch.empty(jacobians.new_outputs, last - first, dtype=torch.float64)
        fill_rows(J_new, jacobians.new(first, last))
        gradient = jacobians.prior_gradient[first:last]
        add_gram(G, J.mT, sign=1.0)
        sides[:, :-1] += J @ J_new.mT
        sides[:, -1] += J @ gradient
        new_slope += J_new @ gradient
        by_row = J_new.reshape(N, c, -1)
        new += by_row @ by_row.mT
        del J, J_new, by_row  # before the next group is computed

    return G, sides, new, new_slope


def _form_from_weights(jacobians: Jacobians, dtype: torch.dtype) -> OutputCovariance:
    """Form V with K = VVᵀ, by the second way of the module's docstring.

    K itself takes its place if products with K are cheaper. dtype: see `form_output_covariance`.
    """
    P, R, root = jacobians.P, jacobians.R, jacobians.root
    n, c, _ = root.shape
    N = jacobians.new_outputs // c
    H = torch.eye(P, dtype=torch.float64)
    V = torch.empty(R, P, dtype=dtype)  # J T^-½ at first
    first = 0

    for J in jacobians.training(0, P):
        last = first + len(J)
        V[first:last] = J.to(dtype)
        roots = root[first // c : last // c]
        # H = I + T^-½ JᵀΛJ T^-½ is a sum over blocks of (Λ^½ J T^-½)ᵀ(Λ^½ J T^-½).
        scaled = (roots @ J.reshape(len(roots), c, P)).reshape(J.shape)
        add_gram(H, scaled, sign=1.0)
        first = last

    F = torch.linalg.cholesky(H)
    del H

    def whiten(values: Tensor) -> Tensor:
        """Return F⁻¹ times each row of values (k, P), in float64."""
        solved: Tensor = torch.linalg.solve_triangular(F, values.double().mT, upper=False)
        return solved.mT

    # V = J T^-½ F^-T, in place and in panels, which bounds the memory.
    for panel in torch.arange(R).split(PANEL):
        V[panel] = whiten(V[panel]).to(dtype)
    V_new = torch.cat([whiten(J) for J in jacobians.new(0, P)])
    gradient = whiten(jacobians.prior_gradient.unsqueeze(0)).squeeze(0)
    by_row = V.reshape(n, c, P)
    new_by_row = V_new.reshape(N, c, P)
    matrix = V @ V.mT if keeps_matrix(R, P) else None
    return OutputCovariance(
        matrix=matrix,
        factor=None if matrix is not None else V,
        blocks=by_row @ by_row.mT,
        cross_covariance=(V @ V_new.to(dtype).mT).reshape(R, N, c).movedim(1, 0).contiguous(),
        new_covariance=new_by_row @ new_by_row.mT,
        slope=(V @ gradient.to(dtype)).double(),
        new_slope=(V_new @ gradient).reshape(N, c),
    )


def fill_rows(total: Tensor, blocks: Iterable[Tensor]) -> None:
    """Write blocks of rows (b, k) into `total` (r, k), one below the other, in place."""
    first = 0
    for block in blocks:
        total[first : first + len(block)] = block
        first += len(block)


def add_gram(total: Tensor, factor: Tensor, sign: float) -> None:
    """Add sign · factorᵀ factor to the symmetric `total` (k, k) in place, for factor (r, k).

    One triangle is computed, in panels of rows, and copied to the other.
    """
    for first in range(0, len(total), PANEL):
        last = min(first + PANEL, len(total))
        total[first:last, :last].addmm_(factor[:, first:last].mT, factor[:, :last], alpha=sign)
        total[:first, first:last] = total[first:last, :first].mT
