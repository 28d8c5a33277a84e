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
from ssla.refit.weights.last_layer_sketch import from_products
from ssla.refit.weights.refit_rows import Block

MOST_VECTORS, LEAST_VECTORS = 64, 8  # guesses
ITERATIONS = 60  # a guess: of conjugate gradients
RESIDUAL = 1e-3  # a guess: √(rᵀS⁻¹r) over that of the right side, where they end
ROWS_AT_ONCE = 1024  # a guess
SEED = 37


class Estimate(NamedTuple):
    """What a task adds to log|I + ΛK| + tr S⁻¹ΔH, and its standard error."""

    value: float
    error: float


@dataclass(frozen=True, eq=False)
class SharedBlocks:
    """S⁻¹ at θ̂, an F×F matrix for each output (C, F, F); and vectors with E z uᵀ = H⁻¹ on all
    rows.
    """

    inverse: Tensor
    rows: Block  # all of them
    z: Tensor  # (S, P)
    u: Tensor  # (S, P)
    at_z: Tensor  # J_i z_s (n, C, S)
    at_u: Tensor
    variances: Tensor  # φ_iᵀ S_c⁻¹ φ_i (n, C)
    kind: str
    residual: float  # of the worst solve

    @property
    def outputs(self) -> int:
        return len(self.inverse)

    def solve(self, values: Tensor) -> Tensor:
        """S⁻¹ of each row (m, P)."""
        return solve_blocks(self.inverse, values)

    def take(self, rows: Tensor) -> Block:
        x, f, y, weights = self.rows
        return Block(x[rows], f[rows], y[rows], None if weights is None else weights[rows])

    def estimate(
        self,
        likelihood: Likelihood,
        rows: Tensor,
        pi: Tensor,
        step: Tensor,
        phi: Tensor,
        explained: Tensor,
    ) -> Estimate:
        """Of one task: from sampled rows (b,) with their probabilities π (b,), its step (C, F),
        the new row's φ (F,) and G.
        """
        part, fisher = self.take(rows), self.kind == FISHER
        f = part.f + part.x @ step.mT
        inverse = 1 / pi
        weight = inverse if part.weights is None else inverse * part.weights

        def change(v: Tensor) -> Tensor:
            """ΔΛ_i v_i of v (b, C, k)."""
            along = v.permute(2, 0, 1)
            after = likelihood.precision_times(part.y, f, along, fisher)
            return (after - likelihood.precision_times(part.y, part.f, along, fisher)).permute(
                1, 2, 0
            )

        z, u, variances = self.at_z[rows], self.at_u[rows], self.variances[rows]
        changed = change(z)
        # What the new row explains: − tr(G c_iΔΛ_ic_iᵀ) with c_i the diagonal of J_iS⁻¹Jᵀ.
        across = part.x @ (self.inverse @ phi).mT
        values, vectors = torch.linalg.eigh(explained)
        keep = values.abs() > 1e-4 * values.abs().amax()
        own = across.unsqueeze(-1) * vectors[:, keep].to(across.dtype)  # (b, C, k)
        taken = ((own * change(own)).sum(1) * values[keep].to(own.dtype)).sum(1)
        # (u − z)ᵀΔHz of each vector, by rows, and the same at the new row.
        by_rows = ((u - z) * changed).sum(1)  # (b, S)
        at_x = [
            (w.reshape(len(w), self.outputs, -1) @ phi).double() for w in (self.u, self.z)
        ]  # (S, C)
        first = ((at_x[0] - at_x[1]) @ explained * at_x[1]).sum(1)
        first = first + (weight.unsqueeze(1) * by_rows).sum(0, dtype=torch.float64)
        cross = (weight * taken).sum(dtype=torch.float64)
        # Sampling rows has an error of its own.
        each = by_rows.mean(1) - taken
        sampling = ((weight * each).square() * (1 - pi)).sum(dtype=torch.float64)
        # The sketch, with the control variates of S in place of H.
        b, C, S = z.shape
        weighted = changed * weight[:, None, None]
        Q = (u.reshape(b * C, S).mT @ weighted.reshape(b * C, S)).double()
        spread = variances.unsqueeze(-1)
        plain = (z * weighted).sum(1).sum(0, dtype=torch.float64)
        diagonal = likelihood.precision_diagonal(part.y, f, fisher)
        diagonal = diagonal - likelihood.precision_diagonal(part.y, part.f, fisher)
        plain = plain - (weight * (variances * diagonal).sum(1)).sum(dtype=torch.float64)
        squares = self._squares(likelihood, part, f, variances, fisher)
        inside = (weighted * (spread * changed)).sum(1).sum(0, dtype=torch.float64)
        inside = inside - (weight * squares).sum(dtype=torch.float64)
        added = float((weight.square() * (1 - pi) * squares).sum(dtype=torch.float64))
        rest = from_products(Q, torch.stack([plain, inside], 1), added)
        error = float(first.var() / S + sampling) + rest.error**2
        return Estimate(float(first.mean() - cross) + rest.value, error**0.5)

    def _squares(
        self, likelihood: Likelihood, part: Block, f: Tensor, variances: Tensor, fisher: bool
    ) -> Tensor:
        """tr K_iΔΛ_iK_iΔΛ_i with a diagonal K_i (b,): Σ_cd k_c k_d ΔΛ_cd²."""
        after, before = (
            likelihood.fisher(at) if fisher else likelihood.precision(part.y, at)
            for at in (f, part.f)
        )
        entries = (after - before).square()
        return torch.einsum("bc,bcd,bd->b", variances, entries, variances)


def solve_blocks(inverse: Tensor, values: Tensor) -> Tensor:
    """S⁻¹ of each row (m, P), with the blocks of S⁻¹ (C, F, F)."""
    parts = values.reshape(len(values), len(inverse), -1).movedim(1, 0)
    return (parts @ inverse).movedim(0, 1).reshape(values.shape)


def vectors_that_fit(n: int, outputs: int, width: int, itemsize: int, budget: int) -> int:
    """How many vectors the budget allows beside the blocks; 0 where they do not fit."""
    blocks = 4 * itemsize * outputs * width**2
    each = 2 * itemsize * outputs * (n + 6 * width)
    count = min((budget // 2 - blocks) // each, MOST_VECTORS)
    return int(count) if count >= LEAST_VECTORS else 0


def shared_blocks(
    blocks: Iterable[Block], likelihood: Likelihood, prior: Tensor, kind: str, count: int
) -> SharedBlocks | None:
    """Sum S over rows of whitened features, and solve for `count` vectors; None where S is not
    positive definite.

    prior: its precision in the basis (C, F, F).
    """
    parts, fisher = list(blocks), kind == FISHER
    weights = [part.weights for part in parts if part.weights is not None]
    rows = Block(
        torch.cat([part.x for part in parts]),
        torch.cat([part.f for part in parts]),
        torch.cat([part.y for part in parts]),
        torch.cat(weights) if weights else None,
    )
    C, F = prior.shape[:2]
    level = rows.weighted(likelihood.precision_diagonal(rows.y, rows.f, fisher))
    S = prior.clone()
    for c in range(C):
        S[c] += (rows.x * level[:, c, None]).mT @ rows.x
    factor, info = torch.linalg.cholesky_ex(S)
    if bool(info.any()):
        return None
    del S
    inverse = torch.cholesky_inverse(factor)
    noise = (
        torch.randint(2, (count, C, F), generator=torch.Generator().manual_seed(SEED)).to(
            prior.dtype
        )
        * 2
        - 1
    )
    right = torch.einsum("cfg,scg->scf", factor, noise).flatten(1)
    z = solve_blocks(inverse, right)
    del factor
    times = curvature_times(rows, likelihood, prior, fisher)
    u, residual = conjugate_gradients(times, lambda r: solve_blocks(inverse, r), right, z)
    variances = torch.stack([((rows.x @ block) * rows.x).sum(-1) for block in inverse], 1)

    def outputs(w: Tensor) -> Tensor:
        """J_i w_s (n, C, S)."""
        found: Tensor = rows.x @ w.reshape(count, C, F).permute(2, 1, 0).flatten(1)
        return found.reshape(-1, C, count)

    return SharedBlocks(inverse, rows, z, u, outputs(z), outputs(u), variances, kind, residual)


def curvature_times(
    rows: Block, likelihood: Likelihood, prior: Tensor, fisher: bool
) -> Callable[[Tensor], Tensor]:
    """w (m, P) -> H w, by products with the features."""
    C = len(prior)

    def times(w: Tensor) -> Tensor:
        step = w.reshape(len(w), C, -1)
        total = (step.movedim(1, 0) @ prior).movedim(0, 1).contiguous()
        by_output = step.movedim(1, 0).flatten(0, 1)  # (C · m, F)
        for place in torch.arange(len(rows.f)).split(ROWS_AT_ONCE):
            x, f, y = rows.x[place], rows.f[place], rows.y[place]
            # (m, b, C), stored by output
            v = (by_output @ x.mT).unflatten(0, (C, len(w))).movedim(0, -1)
            pushed = likelihood.precision_times(y, f, v, fisher)
            if rows.weights is not None:
                pushed = pushed * rows.weights[place, None]
            total += (
                (pushed.movedim(-1, 0).flatten(0, 1) @ x).unflatten(0, (C, len(w))).movedim(0, 1)
            )
        return total.reshape(w.shape)

    return times


def conjugate_gradients(
    times: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    right: Tensor,
    start: Tensor,
) -> tuple[Tensor, float]:
    """x with H x = right for each row (m, P), all at once; and the worst relative residual
    √(rᵀS⁻¹r).
    """
    x = start.clone()
    scale = (right * precondition(right)).sum(-1)
    r = right - times(x)
    y = precondition(r)
    rho = (r * y).sum(-1)
    p = y
    for _ in range(ITERATIONS):
        if bool((rho <= RESIDUAL**2 * scale).all()):
            break
        Hp = times(p)
        alpha = (rho / (p * Hp).sum(-1).clamp_min(1e-30)).unsqueeze(-1)
        x, r = x + alpha * p, r - alpha * Hp
        y = precondition(r)
        rho, before = (r * y).sum(-1), rho
        p = y + (rho / before.clamp_min(1e-30)).unsqueeze(-1) * p
    return x, float((rho.clamp_min(0) / scale).max()) ** 0.5
