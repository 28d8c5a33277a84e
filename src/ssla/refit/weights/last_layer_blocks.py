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
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ssla.likelihoods import Likelihood
from ssla.refit.increments import FISHER
from ssla.refit.weights.last_layer_sketch import Estimate, from_products
from ssla.refit.weights.refit_rows import Block

MOST_VECTORS, LEAST_VECTORS = 64, 8  # guesses
ITERATIONS = 60  # a guess: of conjugate gradients
RESIDUAL = 1e-3  # a guess: √(rᵀS⁻¹r) over that of the right side, where they end
ROWS_AT_ONCE = 1024  # a guess
NUMBERS_AT_ONCE = 1 << 21  # a guess: in each tensor over sampled rows, 16 MiB in float64
NO_PART = 1e-4  # a guess: an eigenvalue of G over the largest one, below which it has no part
SEED = 37


@dataclass(frozen=True, eq=False)
class SharedBlocks:
    """S⁻¹ at θ̂, an F×F matrix for each output (C, F, F), and vectors with E z uᵀ = H⁻¹ on all
    rows.
    """

    inverse: Tensor
    rows: Block  # all of them
    z: Tensor  # (S, P)
    u: Tensor  # (S, P)
    at_z: Tensor  # J_i z_s (n, C, S)
    at_u: Tensor  # J_i u_s (n, C, S)
    variances: Tensor  # φ_iᵀ S_c⁻¹ φ_i (n, C)
    curvature_kind: str
    residual: float  # of the worst solve

    @property
    def outputs(self) -> int:
        """Return the number of outputs C."""
        return len(self.inverse)

    def solve(self, values: Tensor) -> Tensor:
        """Return S⁻¹v for each row v of values (m, P): (m, P)."""
        return solve_blocks(self.inverse, values)

    def take(self, rows: Tensor) -> Block:
        """Return some of the training rows (b,)."""
        x, f, y, weights = self.rows
        return Block(x[rows], f[rows], y[rows], None if weights is None else weights[rows])

    def estimate(
        self,
        likelihood: Likelihood,
        rows: Tensor,
        probability: Tensor,
        step: Tensor,
        phi: Tensor,
        explained: Tensor,
    ) -> Estimate:
        """Estimate what one task adds to log|I + ΛK| + tr S⁻¹ΔH.

        rows: the sampled rows (b,), with the probability that each was sampled (b,). step: the
        task's step (C, F). phi, explained: the new row's φ (F,) and G (C, C).
        """
        values, vectors = torch.linalg.eigh(explained)
        keep = values.abs() > NO_PART * values.abs().amax()
        new = _NewRow(
            (self.inverse @ phi).mT,
            vectors[:, keep].to(self.z.dtype),
            values[keep].to(self.z.dtype),
        )
        at_once = rows_at_once(self.outputs, len(self.z))
        parts = [
            self._row_sums(likelihood, chunk, probability[positions], step, new)
            for positions, chunk in zip(
                torch.arange(len(rows)).split(at_once), rows.split(at_once), strict=True
            )
        ]
        sums = _RowSums(*(torch.stack(column).sum(0) for column in zip(*parts, strict=True)))
        # (u − z)ᵀ ΔH₁ z of each vector: the training rows, and the new row through G.
        u_at_x, z_at_x = (
            (w.reshape(len(w), self.outputs, -1) @ phi).double() for w in (self.u, self.z)
        )  # (S, C)
        first_order = ((u_at_x - z_at_x) @ explained * z_at_x).sum(1) + sums.first
        controls = torch.stack([sums.plain, sums.inside], 1)
        remainder = from_products(sums.products, controls, float(sums.added))
        error = float(first_order.var() / len(first_order) + sums.sampling) + remainder.error**2
        return Estimate(float(first_order.mean() - sums.taken) + remainder.value, error**0.5)

    def _row_sums(
        self,
        likelihood: Likelihood,
        rows: Tensor,
        probability: Tensor,
        step: Tensor,
        new: _NewRow,
    ) -> _RowSums:
        """Sum over some sampled rows (b,), each divided by its probability (b,)."""
        part, fisher = self.take(rows), self.curvature_kind == FISHER
        f = part.f + part.x @ step.mT
        weight = 1 / probability if part.weights is None else part.weights / probability
        missing = 1 - probability  # what sampling adds to the variance of a row's term

        def times_change(v: Tensor) -> Tensor:
            """Multiply v (b, C, k) by ΔΛ_i of each row."""
            along = v.permute(2, 0, 1)
            after = likelihood.precision_times(part.y, f, along, fisher)
            before = likelihood.precision_times(part.y, part.f, along, fisher)
            return (after - before).permute(1, 2, 0)

        z, u, variances = self.at_z[rows], self.at_u[rows], self.variances[rows]
        changed = times_change(z)
        # What the new row explains: tr(G c_iΔΛ_ic_iᵀ) with c_i the diagonal of J_iS⁻¹Jᵀ.
        across = (part.x @ new.across).unsqueeze(-1) * new.vectors  # (b, C, k)
        taken = ((across * times_change(across)).sum(1) * new.values).sum(1)
        # (u − z)ᵀΔH z of each vector (b, S)
        first = ((u - z) * changed).sum(1)
        by_row = first.mean(1) - taken
        # The sketch of the remainder, with the control variates of S in place of H.
        b, C, S = z.shape
        weighted = changed * weight[:, None, None]
        products = u.reshape(b * C, S).mT @ weighted.reshape(b * C, S)
        diagonal = likelihood.precision_diagonal(part.y, f, fisher)
        diagonal = diagonal - likelihood.precision_diagonal(part.y, part.f, fisher)
        squares = self._squares(likelihood, part, f, variances, fisher)
        plain = (z * weighted).sum(1).sum(0, dtype=torch.float64)
        inside = (weighted * (variances.unsqueeze(-1) * changed)).sum(1).sum(0, dtype=torch.float64)
        return _RowSums(
            first=(weight.unsqueeze(1) * first).sum(0, dtype=torch.float64),
            taken=(weight * taken).sum(dtype=torch.float64),
            sampling=((weight * by_row).square() * missing).sum(dtype=torch.float64),
            products=products.double(),
            plain=plain - (weight * (variances * diagonal).sum(1)).sum(dtype=torch.float64),
            inside=inside - (weight * squares).sum(dtype=torch.float64),
            added=(weight.square() * missing * squares).sum(dtype=torch.float64),
        )

    def _squares(
        self, likelihood: Likelihood, part: Block, f: Tensor, variances: Tensor, fisher: bool
    ) -> Tensor:
        """Return tr K_iΔΛ_iK_iΔΛ_i with a diagonal K_i (b,): Σ_cd k_c k_d ΔΛ_cd²."""
        after, before = (
            likelihood.fisher(at) if fisher else likelihood.precision(part.y, at)
            for at in (f, part.f)
        )
        entries = (after - before).square()
        return torch.einsum("bc,bcd,bd->b", variances, entries, variances)


class _NewRow(NamedTuple):
    """The new row of a task, as it enters the sums over training rows."""

    across: Tensor  # S⁻¹φ of each output (F, C)
    vectors: Tensor  # eigenvectors of G that have a part (C, k)
    values: Tensor  # their eigenvalues (k,)


class _RowSums(NamedTuple):
    """Sums over sampled rows, for one task."""

    first: Tensor  # (u − z)ᵀΔH z of each vector (S,)
    taken: Tensor  # tr G Σ c_iΔΛ_ic_iᵀ
    sampling: Tensor  # the variance that the sample of rows adds to the first-order term
    products: Tensor  # uᵀΔH z of all pairs of vectors (S, S)
    plain: Tensor  # zᵀΔH z of each vector, less its expectation (S,)
    inside: Tensor  # zᵀ Σ J_iᵀΔΛ_iK_iΔΛ_iJ_i z of each vector, less its expectation (S,)
    added: Tensor  # what the sample of rows adds to the expected squares of the products


def rows_at_once(outputs: int, vectors: int) -> int:
    """Return how many sampled rows are worked on together, at least one.

    Several tensors (b, C, C) and (b, C, S) are held at a time.
    """
    return max(NUMBERS_AT_ONCE // (outputs * max(outputs, vectors)), 1)


def solve_blocks(inverse: Tensor, values: Tensor) -> Tensor:
    """Return S⁻¹v for each row v of values (m, P), with the blocks of S⁻¹ (C, F, F): (m, P)."""
    parts = values.reshape(len(values), len(inverse), -1).movedim(1, 0)
    return (parts @ inverse).movedim(0, 1).reshape(values.shape)


def vectors_that_fit(n: int, outputs: int, width: int, itemsize: int, budget: int) -> int:
    """Return how many vectors the budget allows beside the blocks; 0 where they do not fit."""
    blocks = 3 * itemsize * outputs * width**2  # S, its factor and its inverse
    each = 2 * itemsize * outputs * (n + 6 * width)
    count = min((budget // 2 - blocks) // each, MOST_VECTORS)
    return int(count) if count >= LEAST_VECTORS else 0


def shared_blocks(
    blocks: Iterable[Block], likelihood: Likelihood, prior: Tensor, curvature_kind: str, count: int
) -> SharedBlocks | None:
    """Sum S over rows of whitened features, and solve for `count` vectors.

    prior (C, F, F): its precision in the basis. None where S is not positive definite.
    """
    rows, fisher = _join_blocks(list(blocks)), curvature_kind == FISHER
    C, F = prior.shape[:2]
    level = rows.apply_weights(likelihood.precision_diagonal(rows.y, rows.f, fisher))
    S = prior.clone()
    for c in range(C):
        S[c] += (rows.x * level[:, c, None]).mT @ rows.x
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
    times = curvature_times(rows, likelihood, prior, fisher)
    u, residual = conjugate_gradients(times, lambda r: solve_blocks(inverse, r), right, z)
    variances = _variances(rows.x, inverse)

    def push(vectors: Tensor) -> Tensor:
        """Return J_i w_s of all rows (n, C, S), for vectors w (S, P)."""
        by_output: Tensor = rows.x @ vectors.reshape(count, C, F).permute(2, 1, 0).flatten(1)
        return by_output.reshape(-1, C, count)

    return SharedBlocks(inverse, rows, z, u, push(z), push(u), variances, curvature_kind, residual)


def _join_blocks(parts: list[Block]) -> Block:
    """Return all blocks of rows as one; their weights are all given, or all None."""
    weights = [part.weights for part in parts if part.weights is not None]
    return Block(
        torch.cat([part.x for part in parts]),
        torch.cat([part.f for part in parts]),
        torch.cat([part.y for part in parts]),
        torch.cat(weights) if weights else None,
    )


def _variances(features: Tensor, inverse: Tensor) -> Tensor:
    """Compute φ_iᵀ S_c⁻¹ φ_i of rows φ (n, F) under the blocks of S⁻¹ (C, F, F): (n, C).

    One product is kept and overwritten: C new ones are not reused by the allocator, and together
    take as much memory as all refits.
    """
    variances = features.new_empty(len(features), len(inverse))
    product = torch.empty_like(features)
    for c, block in enumerate(inverse):
        torch.mm(features, block, out=product)
        variances[:, c] = product.mul_(features).sum(-1)
    return variances


def curvature_times(
    rows: Block, likelihood: Likelihood, prior: Tensor, fisher: bool
) -> Callable[[Tensor], Tensor]:
    """Return the function w (m, P) -> H w (m, P), which multiplies with the features.

    prior (C, F, F): its precision in the basis.
    """
    C = len(prior)

    def times_curvature(w: Tensor) -> Tensor:
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

    return times_curvature


def conjugate_gradients(
    times: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    right: Tensor,
    start: Tensor,
) -> tuple[Tensor, float]:
    """Solve H x = right for each row (m, P) by conjugate gradients, all at once.

    times applies H, precondition S⁻¹. Ends at RESIDUAL, or after ITERATIONS. Returns x (m, P) and
    the worst √(rᵀS⁻¹r) over that of the right side.
    """
    x = start.clone()
    scale = (right * precondition(right)).sum(-1)
    r = right - times(x)
    white = precondition(r)
    rho = (r * white).sum(-1)
    direction = white
    for _ in range(ITERATIONS):
        if bool((rho <= RESIDUAL**2 * scale).all()):
            break
        H_direction = times(direction)
        # The bounds keep rows that are solved exactly from a division by zero.
        curvature = (direction * H_direction).sum(-1).clamp_min(1e-30)
        alpha = (rho / curvature).unsqueeze(-1)
        x = x + alpha * direction
        r = r - alpha * H_direction
        white = precondition(r)
        previous_rho = rho
        rho = (r * white).sum(-1)
        direction = white + (rho / previous_rho.clamp_min(1e-30)).unsqueeze(-1) * direction
    return x, float((rho.clamp_min(0) / scale).max()) ** 0.5
