"""log|I + ΔΛ K₁| of refits of a linearised network, from the directions in which the curvature
changes.

ΔΛ is the change of the training rows' curvatures at a task's mode, and K₁ the covariance of their
outputs under the curvature at θ̂ and of the new row. Few directions of ΔΛ matter: rows that the
network has learnt well have hardly any curvature before or after. The eigenvectors e_j of all
ΔΛ_i = Σ_j s_j e_j e_jᵀ are in two parts, those that are kept, E, and those that are left out. With
K₂ the covariance after the kept changes and A the symmetric form of ΔΛ_left K₂,

    log|I + ΔΛ K₁| = log|I + S EᵀK₁E| + tr A − ½ tr A² + …

The first two terms are exact. The third is estimated from random rows of A, with a standard error;
the next one is bounded by ⅓ (tr A²)^{3/2}. Fewer directions are left out where the error is too
large.

Terms and symbols are those of `ssla.refit.weights` and `ssla.refit.weights.linearised`. Here too: a
direction is an eigenvector e (c,) of one row's ΔΛ_i, with the eigenvalue s. There are n·c of them,
numbered by row. E (R, k) has the kept directions as columns, and S = diag(s) their eigenvalues. The
size of a direction is |s| eᵀK₁e.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ssla.refit.increments import FISHER
from ssla.refit.weights.last_layer_sketch import compute_row_precisions

if TYPE_CHECKING:
    from ssla.refit.weights.linearised import LinearisedRefit

# Guesses: Σ |s_j| e_jᵀK₁e_j of the directions that are left out, at first and where that is too
# inaccurate.
LEFT_OUT = (2.0, 0.7, 0.2)
SAMPLES = 64  # a guess: random rows of A
SEED = 37


class HalfLogdet(NamedTuple):
    """½ log|I + ΔΛ K₁|, an estimate of its error, and whether it exists."""

    value: float
    error: float
    exists: bool


class Kept(NamedTuple):
    """The k directions that are kept, whose changes are part of the curvature."""

    products: Tensor  # EᵀK₁ (k, R)
    solved: Tensor  # (I + S EᵀK₁E)⁻¹ S EᵀK₁ (k, R)
    half: float  # ½ log|I + S EᵀK₁E|
    exists: bool


class _Inverse(NamedTuple):
    """The inverse of I + S EᵀK₁E, for k directions E with changes S, and its determinant."""

    X: Tensor  # (I + S EᵀK₁E)⁻¹S (k, k), in float64
    half: float  # ½ log|I + S EᵀK₁E|
    exists: bool


class TaskCurvature(NamedTuple):
    """Changes of the curvature in k directions, which a task's own preconditioner includes.

    With them (H₁ + JᵀESEᵀJ)⁻¹Jᵀr = H₁⁻¹Jᵀ(r − E X EᵀK₁r), X = (I + S EᵀK₁E)⁻¹S.
    """

    rows: Tensor  # the training row of each direction (k,)
    directions: Tensor  # e of each (k, c): the entries of E that are not zero
    X: Tensor  # (k, k)

    def correct_gradient(self, r: Tensor, moved: Tensor) -> Tensor:
        """Return r − E X Eᵀ(K₁r), for r and moved, which is K₁r: all (n, c).

        With the result in place of r, H₁⁻¹Jᵀr becomes the step under the task's own curvature.
        """
        along = (moved[self.rows] * self.directions).sum(-1)
        taken = (self.X @ along).unsqueeze(-1) * self.directions
        return r.index_add(0, self.rows, taken, alpha=-1)


@dataclass(frozen=True, eq=False)
class CurvatureChange:
    """The change of the curvature of the training rows in one task, from θ̂ to one point.

    K₁ = K − B G Bᵀ, with B = J H⁻¹ J_xᵀ and G = (I + ΛK_x)⁻¹Λ of the new row.
    """

    refit: LinearisedRefit
    f: Tensor  # the outputs of the training rows at the point (n, C)
    cross_covariance: Tensor  # B (R, c)
    explained: Tensor  # G (c, c), in float64

    def compute_half_logdet(self, allowed_error: float) -> HalfLogdet:
        """Compute ½ log|I + ΔΛ K₁| with an error of at most `allowed_error`, if possible.

        With 0 it is exact. Otherwise more directions are kept until the error is small enough, as
        LEFT_OUT sets. The last attempt is returned with its error, however large.
        """
        if allowed_error == 0:
            # In rising order, the directions without a change come first.
            changing = self.direction_sizes.argsort()[int((self.direction_sizes == 0).sum()) :]
            return self._compute_half_logdet_with_kept(changing, allowed_error)
        for left_out in LEFT_OUT:
            order = self.direction_sizes.argsort()
            left_out_count = int((self.direction_sizes[order].cumsum(0) <= left_out).sum())
            half_logdet = self._compute_half_logdet_with_kept(order[left_out_count:], allowed_error)
            if half_logdet.error <= allowed_error:
                break
        return half_logdet

    def select_task_curvature(self) -> TaskCurvature:
        """Select the directions in which the curvature grows most, for a task's preconditioner.

        Directions in which it shrinks are left out, so that H₁ with these changes is positive
        definite. There may be none.
        """
        c = self.eigenpairs[0].shape[1]
        sizes = torch.where(self.eigenpairs[0].flatten() > 0, self.direction_sizes, 0.0)
        order = sizes.argsort()
        kept = order[int((sizes[order].cumsum(0) <= LEFT_OUT[0]).sum()) :]
        e = self.eigenpairs[1].flatten(0, 1)[kept].to(self.refit.dtype)
        X = torch.zeros(0, 0, dtype=e.dtype)
        if len(kept):
            X = self._invert_kept(kept, self._compute_covariances_of(kept)).X.to(e.dtype)
        return TaskCurvature(kept // c, e, X)

    @cached_property
    def row_changes(self) -> Tensor:
        """Return ΔΛ_i of each row in contrasts, times the row's weight (n, c, c), in float64."""
        rows, likelihood = self.refit.rows, self.refit.posterior.likelihood
        fisher = self.refit.curvature_kind == FISHER
        after = compute_row_precisions(likelihood, rows.y, self.f.double(), fisher)
        change = after - compute_row_precisions(likelihood, rows.y, rows.f, fisher)
        if rows.weights is not None:
            change = change * rows.weights[:, None, None]
        return self.refit.project_to_contrasts(change)

    @cached_property
    def eigenpairs(self) -> tuple[Tensor, Tensor]:
        """Return eigenvalues s of each ΔΛ_i (n, c), and its eigenvectors e as rows (n, c, c)."""
        values, vectors = torch.linalg.eigh(self.row_changes)
        return values, vectors.mT.contiguous()

    @cached_property
    def direction_variances(self) -> Tensor:
        """Return eᵀK₁e of each direction (n, c)."""
        n, c = self.eigenpairs[0].shape
        cross_covariance = self.cross_covariance.double().reshape(n, c, -1)
        blocks = self.refit.covariance.blocks.double()
        return self._compute_quadratic_forms(
            blocks - cross_covariance @ self.explained @ cross_covariance.mT
        )

    @cached_property
    def direction_sizes(self) -> Tensor:
        """Return the size |s_j| e_jᵀK₁e_j of each direction (n·c,)."""
        return (self.eigenpairs[0].abs() * self.direction_variances.clamp_min(0)).flatten()

    def _compute_quadratic_forms(self, matrices: Tensor) -> Tensor:
        """Compute eᵀMe of each direction (n, c), for a matrix M of each row (n, c, c)."""
        vectors = self.eigenpairs[1]
        return ((vectors @ matrices) * vectors).sum(-1)

    def _compute_covariances_of(self, chosen: Tensor) -> Tensor:
        """Compute eᵀK₁ of some directions: their covariances with all outputs (k, R).

        chosen (k,): the numbers of the directions.
        """
        refit = self.refit
        n, c = self.eigenpairs[0].shape
        rows = chosen // c
        e = self.eigenpairs[1].flatten(0, 1)[chosen].to(refit.dtype)
        along = (e.unsqueeze(1) @ self.cross_covariance.reshape(n, c, -1)[rows]).squeeze(1)
        covariances = refit.covariance.compute_covariances_of_directions(rows, e)
        return covariances.addmm_(
            along @ self.explained.to(e.dtype), self.cross_covariance.mT, alpha=-1
        )

    def _project_to_directions(self, products: Tensor) -> Tensor:
        """Compute covariances with all directions (k, n·c), from those with all outputs (k, R)."""
        n, c = self.eigenpairs[0].shape
        vectors = self.eigenpairs[1].to(products.dtype)
        by_row = products.reshape(len(products), n, c).movedim(1, 0) @ vectors.mT
        return by_row.movedim(0, 1).flatten(1)

    def _compute_half_logdet_with_kept(self, kept: Tensor, allowed_error: float) -> HalfLogdet:
        """Compute ½ log|I + ΔΛ K₁|: some directions exactly, the others to second order.

        kept (k,): the numbers of the former; k may be zero. The second order is estimated from
        random directions, unless a bound on it is at most `allowed_error`.
        """
        s = self.eigenpairs[0].flatten()
        left_out = torch.ones(len(s), dtype=torch.bool)
        left_out[kept] = False
        left_out &= self.direction_sizes > 0
        condition = self._condition_on_kept(kept) if len(kept) else None
        half = condition.half if condition is not None else 0.0
        exists = condition.exists if condition is not None else True
        if not bool(left_out.any()):
            return HalfLogdet(half, 0.0, exists)
        variances = self.direction_variances
        if condition is not None:
            variances = variances - self._compute_explained_variances(condition)
        diagonal = torch.where(left_out, s * variances.flatten(), 0.0)
        half += 0.5 * float(diagonal.sum())

        # ½ log|I + A| = ½ tr A − ¼ tr A² + …, and tr A² is at most the square of the sum of |A_jj|:
        # often that is small enough.
        total = float(diagonal.abs().sum())
        if 0.25 * total**2 <= allowed_error:
            return HalfLogdet(half, 0.25 * total**2, exists)
        second, deviation = self._estimate_second_order(condition, left_out, diagonal)
        third = max(second, 0.0) ** 1.5 / 6  # half of the bound on the next term
        return HalfLogdet(half - 0.25 * second, 0.25 * deviation + third, exists)

    def _invert_kept(self, kept: Tensor, products: Tensor) -> _Inverse:
        """Compute (I + S EᵀK₁E)⁻¹S of kept directions (k,), and ½ log|I + S EᵀK₁E|.

        products: EᵀK₁ (k, R). The logarithm exists if the determinant is positive: if the number of
        negative pivots of the LU factors and of swapped rows together is even.
        """
        s = self.eigenpairs[0].flatten()[kept]
        matrix = s.unsqueeze(-1) * self._project_to_directions(products)[:, kept].double()
        matrix.diagonal().add_(1.0)
        factor, pivots, info = torch.linalg.lu_factor_ex(matrix)
        diagonal = factor.diagonal()
        swaps = int((pivots != torch.arange(1, len(pivots) + 1)).sum())
        negative = int((diagonal < 0).sum()) + swaps
        X = torch.linalg.lu_solve(factor, pivots, torch.diag(s))
        half = 0.5 * float(diagonal.abs().log().sum())
        return _Inverse(X, half, int(info) == 0 and negative % 2 == 0)

    def _condition_on_kept(self, kept: Tensor) -> Kept:
        """Compute what the changes of the kept directions, by number (k,), do to covariances."""
        products = self._compute_covariances_of(kept)
        X, half, exists = self._invert_kept(kept, products)
        # A solve of k columns and a product are faster than a solve of all R columns.
        return Kept(products, X.to(products.dtype) @ products, half, exists)

    def _compute_explained_variances(self, kept: Kept) -> Tensor:
        """Compute eᵀ(K₁ − K₂)e of each direction (n, c), in float64.

        It is the part of the variances that the changes of the kept directions remove.
        """
        n, c = self.eigenpairs[0].shape
        by_row = kept.products.reshape(-1, n, c).permute(1, 2, 0)
        explained = by_row @ kept.solved.reshape(-1, n, c).movedim(1, 0)
        return self._compute_quadratic_forms(explained.double())

    def _estimate_second_order(
        self,
        kept: Kept | None,
        left_out: Tensor,
        diagonal: Tensor,
    ) -> tuple[float, float]:
        """Estimate tr A² = Σ_jl s_j s_l (e_jᵀK₂e_l)², and its standard error, from random j.

        kept: the kept directions; None: there are none. left_out (n·c,): whether a direction is
        part of A. diagonal (n·c,): that of A, zero outside it. A direction j is drawn with a
        probability in proportion to |A_jj|, and its term is divided by that. The draws are the same
        at each call (SEED).
        """
        generator = torch.Generator().manual_seed(SEED)
        share = diagonal.abs() / diagonal.abs().sum()
        drawn = torch.multinomial(share, SAMPLES, replacement=True, generator=generator)
        products = self._compute_covariances_of(drawn)
        if kept is not None:
            vectors = self.eigenpairs[1].flatten(0, 1)[drawn].to(products.dtype).unsqueeze(-1)
            by_row = kept.products.reshape(len(kept.products), *self.eigenpairs[0].shape)
            rows = drawn // by_row.shape[2]
            along = (by_row[:, rows].movedim(1, 0) @ vectors).squeeze(-1)  # (q, k)
            products = products - along @ kept.solved
        squares = self._project_to_directions(products).double().square()
        s = self.eigenpairs[0].flatten()
        sums = s[drawn] * (squares * torch.where(left_out, s, 0.0)).sum(-1) / share[drawn]
        return float(sums.mean()), float(sums.std() / SAMPLES**0.5)
