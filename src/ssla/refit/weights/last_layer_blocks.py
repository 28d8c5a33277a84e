"""Determinants of refits of a last layer so large that no P×P matrix fits: classes in blocks,
corrected by a few exact solves.

S is H(θ̂) without what joins different outputs: an F×F matrix for each output. It steers the steps.
With the factor S = L Lᵀ and random signs ε, the vectors z = L⁻ᵀε and u = H⁻¹Lε, solved by conjugate
gradients, have E z uᵀ = H⁻¹. So

    log|H̃(θ̃)| − log|H(θ̂)| ≈ log|I + ΛK| + tr S₁⁻¹ΔH
                              + E[(u − z)ᵀ(JᵀGJ + ΔH) z] + tr[log(I + A) − A],   K = J S⁻¹ Jᵀ,

with G = (I + ΛK)⁻¹Λ, S₁ = S + JᵀΛJ, and the last term by a sketch (`last_layer_sketch`). Only the
difference of H⁻¹ and S⁻¹ is left to the vectors: it is small, and so is their error, which is
stated. Exact to first order in H⁻¹ − S⁻¹ as there are more vectors. The vectors are the same for
all tasks.

Terms and symbols are those of `ssla.refit.weights`. Here too: S is also the number of vectors in
shapes; a row is sampled with a known probability, and its terms are divided by that; the new row
explains G, the part of H⁻¹ that it removes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ssla.likelihoods import Likelihood
from ssla.refit.increments import FISHER
from ssla.refit.weights.last_layer_sketch import Estimate, compute_remainder_from_products
from ssla.refit.weights.refit_rows import Block

MOST_VECTORS, LEAST_VECTORS = 64, 8  # guesses: random vectors, and the fewest that are of use
MOST_ITERATIONS = 60  # a guess: iterations of conjugate gradients
RESIDUAL = 1e-3  # a guess: they end at this √(rᵀS⁻¹r) over that of the right side
ROWS_AT_ONCE = 1024  # a guess: rows in one product with the curvature
TINY = 1e-30  # keeps rows that are solved exactly from a division by zero
NUMBERS_AT_ONCE = 1 << 21  # a guess: in each tensor over sampled rows, 16 MiB in float64
NO_PART = 1e-4  # a guess: eigenvalues of G below this part of the largest one are left out
SEED = 37


@dataclass(frozen=True, eq=False)
class SharedBlocks:
    """S⁻¹ at θ̂, and vectors with E z uᵀ = H⁻¹ with their outputs on all training rows."""

    inverse: Tensor  # S⁻¹, a matrix for each output (C, F, F)
    rows: Block  # all training rows, with whitened features
    z: Tensor  # (S, P)
    u: Tensor  # (S, P)
    at_z: Tensor  # J_i z_s (n, C, S)
    at_u: Tensor  # J_i u_s (n, C, S)
    variances: Tensor  # φ_iᵀ S_c⁻¹ φ_i (n, C)
    curvature_kind: str  # of H and ΔH: OBSERVED or FISHER
    residual: float  # of the worst solve, see `solve_by_conjugate_gradients`

    @property
    def outputs(self) -> int:
        """Return the number of outputs C."""
        return len(self.inverse)

    def solve(self, values: Tensor) -> Tensor:
        """Return S⁻¹v for each row v of values (m, P): (m, P)."""
        return solve_blocks(self.inverse, values)

    def select_rows(self, rows: Tensor) -> Block:
        """Return some of the training rows (b,), by their numbers, as a block."""
        x, f, y, weights = self.rows
        return Block(x[rows], f[rows], y[rows], None if weights is None else weights[rows])

    def estimate_correction(
        self,
        likelihood: Likelihood,
        rows: Tensor,
        probability: Tensor,
        step: Tensor,
        phi: Tensor,
        explained: Tensor,
    ) -> Estimate:
        """Estimate what one task adds to log|I + ΛK| + tr S⁻¹ΔH, with the standard error.

        The first two terms of the module's formula differ from these by S₁ in place of S in the
        trace: that difference is part of the estimate, and so are the last two terms. rows: the
        sampled rows (b,), by number. probability: that with which each was sampled (b,). step: the
        task's step δ' by output (C, F). phi: φ of the new row (F,), explained: its G (C, C).
        """
        values, vectors = torch.linalg.eigh(explained)
        keep = values.abs() > NO_PART * values.abs().amax()  # the others have no part in G
        new_row = _NewRow(
            solved_features=(self.inverse @ phi).mT,
            vectors=vectors[:, keep].to(self.z.dtype),
            values=values[keep].to(self.z.dtype),
        )
        at_once = count_sampled_rows_at_once(self.outputs, len(self.z))
        sums_of_chunks = [
            self._sum_over_rows(likelihood, chunk, probability[positions], step, new_row)
            for positions, chunk in zip(
                torch.arange(len(rows)).split(at_once), rows.split(at_once), strict=True
            )
        ]
        columns = zip(*sums_of_chunks, strict=True)
        sums = _RowSums(*(torch.stack(column).sum(0) for column in columns))

        # (u − z)ᵀ ΔH₁ z of each vector: the training rows, and the new row through G.
        u_at_x = (self.u.reshape(len(self.u), self.outputs, -1) @ phi).double()  # (S, C)
        z_at_x = (self.z.reshape(len(self.z), self.outputs, -1) @ phi).double()
        first_order = ((u_at_x - z_at_x) @ explained * z_at_x).sum(1) + sums.first_order
        controls = torch.stack([sums.trace_control, sums.square_control], 1)
        remainder = compute_remainder_from_products(
            sums.products, controls, float(sums.added_square)
        )

        # The variances of the vectors, of the sample of rows and of the sketch add up.
        variance = float(first_order.var() / len(first_order) + sums.sampling_variance)
        variance += remainder.error**2
        value = float(first_order.mean() - sums.explained) + remainder.value
        return Estimate(value, variance**0.5)

    def _sum_over_rows(
        self,
        likelihood: Likelihood,
        rows: Tensor,
        probability: Tensor,
        step: Tensor,
        new_row: _NewRow,
    ) -> _RowSums:
        """Sum over some sampled rows (b,), whose terms are divided by their probability (b,).

        step: the task's step by output (C, F). new_row: the row that the task adds. Products are in
        the dtype of the vectors, sums in float64.
        """
        block, fisher = self.select_rows(rows), self.curvature_kind == FISHER
        f = block.f + block.x @ step.mT
        weight = 1 / probability if block.weights is None else block.weights / probability

        # The sample of rows adds about Σ (1 − π)(t/π)² to the variance of a sum of terms t/π.
        left_out = 1 - probability

        def multiply_by_change(v: Tensor) -> Tensor:
            """Return ΔΛ_i v_i of each row (b, C, k), for v (b, C, k)."""
            along = v.permute(2, 0, 1)
            after = likelihood.precision_times(block.y, f, along, fisher)
            before = likelihood.precision_times(block.y, block.f, along, fisher)
            return (after - before).permute(1, 2, 0)

        z, u, variances = self.at_z[rows], self.at_u[rows], self.variances[rows]
        change_z = multiply_by_change(z)
        # What the new row explains: tr(G c_iΔΛ_ic_iᵀ) with c_i the diagonal of J_iS⁻¹Jᵀ.
        across = (block.x @ new_row.solved_features).unsqueeze(-1) * new_row.vectors  # (b, C, k)
        explained = ((across * multiply_by_change(across)).sum(1) * new_row.values).sum(1)

        # (u − z)ᵀΔH z of each vector (b, S)
        first_order = ((u - z) * change_z).sum(1)
        by_row = first_order.mean(1) - explained

        # The sketch of the remainder, with the control variates of S in place of H.
        b, C, S = z.shape
        weighted = change_z * weight[:, None, None]
        products = u.reshape(b * C, S).mT @ weighted.reshape(b * C, S)
        diagonal = likelihood.precision_diagonal(block.y, f, fisher)
        diagonal = diagonal - likelihood.precision_diagonal(block.y, block.f, fisher)
        squares = self._compute_traces_of_squares(likelihood, block, f, variances, fisher)
        trace_form = (z * weighted).sum(1).sum(0, dtype=torch.float64)
        K_change_z = variances.unsqueeze(-1) * change_z
        square_form = (weighted * K_change_z).sum(1).sum(0, dtype=torch.float64)
        trace = (weight * (variances * diagonal).sum(1)).sum(dtype=torch.float64)

        return _RowSums(
            first_order=(weight.unsqueeze(1) * first_order).sum(0, dtype=torch.float64),
            explained=(weight * explained).sum(dtype=torch.float64),
            sampling_variance=((weight * by_row).square() * left_out).sum(dtype=torch.float64),
            products=products.double(),
            trace_control=trace_form - trace,
            square_control=square_form - (weight * squares).sum(dtype=torch.float64),
            added_square=(weight.square() * left_out * squares).sum(dtype=torch.float64),
        )

    def _compute_traces_of_squares(
        self, likelihood: Likelihood, block: Block, f: Tensor, variances: Tensor, fisher: bool
    ) -> Tensor:
        """Compute tr K_iΔΛ_iK_iΔΛ_i of the rows of a block (b,), for diagonal K_i.

        It is Σ_cd k_c k_d ΔΛ_cd². f (b, C): the outputs at the mode. variances: the diagonals
        k (b, C). fisher: Λ is the Fisher information; False: the observed curvature.
        """
        after = likelihood.curvature(block.y, f, fisher)
        before = likelihood.curvature(block.y, block.f, fisher)
        entries = (after - before).square()
        return torch.einsum("bc,bcd,bd->b", variances, entries, variances)


class _NewRow(NamedTuple):
    """The new row of one task, as the sums over training rows need it."""

    solved_features: Tensor  # S⁻¹φ of each output (F, C)
    vectors: Tensor  # eigenvectors of G that have a part (C, k)
    values: Tensor  # their eigenvalues (k,)


class _RowSums(NamedTuple):
    """Sums over sampled rows, for one task."""

    first_order: Tensor  # (u − z)ᵀΔH z of each vector (S,)
    explained: Tensor  # tr G Σ c_iΔΛ_ic_iᵀ ()
    sampling_variance: Tensor  # what the sample of rows adds to that of the first order ()
    products: Tensor  # uᵀΔH z of all pairs of vectors (S, S)
    trace_control: Tensor  # zᵀΔH z of each vector, less its expectation (S,)
    square_control: Tensor  # zᵀ Σ J_iᵀΔΛ_iK_iΔΛ_iJ_i z of each vector, less its expectation (S,)
    added_square: Tensor  # what the sample of rows adds to the expected squares of the products ()


def count_sampled_rows_at_once(outputs: int, vectors: int) -> int:
    """Return how many sampled rows are worked on together, at least one.

    Several tensors (b, C, C) and (b, C, S) are held at a time.
    """
    return max(NUMBERS_AT_ONCE // (outputs * max(outputs, vectors)), 1)


def solve_blocks(inverse: Tensor, values: Tensor) -> Tensor:
    """Return S⁻¹v for each row v of values (m, P): (m, P).

    inverse: the blocks of S⁻¹, one for each output (C, F, F).
    """
    by_output = values.reshape(len(values), len(inverse), -1).movedim(1, 0)
    return (by_output @ inverse).movedim(0, 1).reshape(values.shape)


def count_vectors_that_fit(n: int, outputs: int, width: int, itemsize: int, budget: int) -> int:
    """Return how many random vectors fit the memory budget beside the blocks, at most MOST_VECTORS.

    It is 0 if fewer than LEAST_VECTORS fit. n: training rows. outputs: C. width: the number of
    features F. itemsize: bytes of a number. budget: in bytes; half of it is for blocks and vectors.
    """
    block_bytes = 3 * itemsize * outputs * width**2  # S, its factor and its inverse
    # z and u on all rows, and six vectors of weights each in the conjugate gradients: a guess.
    vector_bytes = 2 * itemsize * outputs * (n + 6 * width)
    count = min((budget // 2 - block_bytes) // vector_bytes, MOST_VECTORS)
    return int(count) if count >= LEAST_VECTORS else 0


def open_shared_blocks(
    blocks: Iterable[Block], likelihood: Likelihood, prior: Tensor, curvature_kind: str, count: int
) -> SharedBlocks | None:
    """Sum S over training rows with whitened features, and solve for `count` random vectors.

    blocks: the rows. prior: its precision in the basis (C, F, F). curvature_kind: OBSERVED or
    FISHER. None if S is not positive definite.
    """
    rows, fisher = _join_blocks(list(blocks)), curvature_kind == FISHER
    C, F = prior.shape[:2]
    precisions = rows.apply_weights(likelihood.precision_diagonal(rows.y, rows.f, fisher))
    S = prior.clone()

    for c in range(C):
        S[c] += (rows.x * precisions[:, c, None]).mT @ rows.x
    factor, info = torch.linalg.cholesky_ex(S)
    if bool(info.any()):
        return None
    del S

    inverse = torch.cholesky_inverse(factor)
    generator = torch.Generator().manual_seed(SEED)
    signs = torch.randint(2, (count, C, F), generator=generator).to(prior.dtype) * 2 - 1
    right = torch.einsum("cfg,scg->scf", factor, signs).flatten(1)
    z = solve_blocks(inverse, right)
    del factor
    times = make_curvature_product(rows, likelihood, prior, fisher)
    u, residual = solve_by_conjugate_gradients(times, lambda r: solve_blocks(inverse, r), right, z)
    variances = _compute_block_variances(rows.x, inverse)

    def compute_outputs_of_vectors(vectors: Tensor) -> Tensor:
        """Return J_i w_s of all rows (n, C, S), for vectors w (S, P)."""
        by_output: Tensor = rows.x @ vectors.reshape(count, C, F).permute(2, 1, 0).flatten(1)
        return by_output.reshape(-1, C, count)

    return SharedBlocks(
        inverse,
        rows,
        z,
        u,
        compute_outputs_of_vectors(z),
        compute_outputs_of_vectors(u),
        variances,
        curvature_kind,
        residual,
    )


def _join_blocks(blocks: list[Block]) -> Block:
    """Return all blocks of rows as one; either all blocks have weights, or none has."""
    weights = [block.weights for block in blocks if block.weights is not None]
    return Block(
        torch.cat([block.x for block in blocks]),
        torch.cat([block.f for block in blocks]),
        torch.cat([block.y for block in blocks]),
        torch.cat(weights) if weights else None,
    )


def _compute_block_variances(features: Tensor, inverse: Tensor) -> Tensor:
    """Compute φ_iᵀ S_c⁻¹ φ_i of rows (n, C), for features φ (n, F).

    inverse: the blocks of S⁻¹ (C, F, F). One product is kept and overwritten: C new ones are not
    reused by the allocator, and together take as much memory as all refits.
    """
    variances = features.new_empty(len(features), len(inverse))
    product = torch.empty_like(features)
    for c, block in enumerate(inverse):
        torch.mm(features, block, out=product)
        variances[:, c] = product.mul_(features).sum(-1)
    return variances


def make_curvature_product(
    rows: Block, likelihood: Likelihood, prior: Tensor, fisher: bool
) -> Callable[[Tensor], Tensor]:
    """Return the function that multiplies each row of a tensor (m, P) by H, without forming H.

    rows: the training rows, with whitened features. prior: its precision in the basis (C, F, F).
    fisher: H has the Fisher information; False: the observed curvature.
    """
    C = len(prior)

    def multiply_by_curvature(w: Tensor) -> Tensor:
        """Return H w for each row of w (m, P)."""
        step = w.reshape(len(w), C, -1)
        total = (step.movedim(1, 0) @ prior).movedim(0, 1).contiguous()
        by_output = step.movedim(1, 0).flatten(0, 1)  # (C · m, F)
        for chunk in torch.arange(len(rows.f)).split(ROWS_AT_ONCE):
            x, f, y = rows.x[chunk], rows.f[chunk], rows.y[chunk]
            # (m, b, C), stored by output
            v = (by_output @ x.mT).unflatten(0, (C, len(w))).movedim(0, -1)
            change = likelihood.precision_times(y, f, v, fisher)
            if rows.weights is not None:
                change = change * rows.weights[chunk, None]
            pulled = change.movedim(-1, 0).flatten(0, 1) @ x  # (C · m, F)
            total += pulled.unflatten(0, (C, len(w))).movedim(0, 1)
        return total.reshape(w.shape)

    return multiply_by_curvature


def solve_by_conjugate_gradients(
    times: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    right: Tensor,
    start: Tensor,
) -> tuple[Tensor, float]:
    """Solve H x = b for each row b of `right` (m, P) by conjugate gradients, all at once.

    times and precondition multiply each row of a tensor (m, P) by H and by S⁻¹. start (m, P): the
    first x. With the residual r = b − Hx, it ends where √(rᵀS⁻¹r) is at most RESIDUAL times
    √(bᵀS⁻¹b) in all rows, or after MOST_ITERATIONS. Returns x (m, P), and the largest of these
    ratios, which shows whether RESIDUAL was reached.
    """
    x = start.clone()
    scale = (right * precondition(right)).sum(-1)
    r = right - times(x)
    white = precondition(r)
    rho = (r * white).sum(-1)
    direction = white

    for _ in range(MOST_ITERATIONS):
        if bool((rho <= RESIDUAL**2 * scale).all()):
            break
        H_direction = times(direction)
        curvature = (direction * H_direction).sum(-1).clamp_min(TINY)
        alpha = (rho / curvature).unsqueeze(-1)
        x = x + alpha * direction
        r = r - alpha * H_direction
        white = precondition(r)
        previous_rho = rho
        rho = (r * white).sum(-1)
        direction = white + (rho / previous_rho.clamp_min(TINY)).unsqueeze(-1) * direction

    return x, float((rho.clamp_min(0) / scale).max()) ** 0.5
