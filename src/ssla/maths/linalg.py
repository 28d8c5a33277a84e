"""Small dense matrices: roots of covariances, determinants of I + S, and Newton ascent.

All functions are vectorised over a leading batch M (test points × candidate y) and work on
C×C matrices. For C ≤ 3 the factorisations are written by components: a vector (M, C) is stored
as C contiguous tensors of length M, so each step is elementwise over the batch. For larger C the
batched LAPACK routines are used. Both give the same results; tests compare them.

No inverse, no `det` and no jitter is used. `log|I + S|` is Σ log1p(·), so a tiny S keeps its
digits.

K (C, C) is a covariance of C outputs, R a root of it with R Rᵀ = K, and Λ (C, C) a precision of
these outputs. A task is one of the M objectives of a Newton ascent. A tensor (M, C) is stored
component-major if each of its C columns is contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

CLOSED_FORM_LIMIT = 3
# Guesses, not measured, as are the numbers in `newton_ascent`.
SHORTEST_STEP = 1e-11  # relative to 1 + ‖point‖: shorter steps are rounding error
# Squared Newton decrement below which gains are rounding error and the full step is safe
TRUSTED_SLOPE = 1e-8
SUFFICIENT_GAIN = 1e-4  # share of the linear prediction that a step must gain (Armijo)
# Slope, relative to 1 + |value|, below which a task that no step improves counts as converged
FLAT_SLOPE = 1e-6


def stack_last(components: list[Tensor]) -> Tensor:
    """Stack C components (...) to v (..., C), component-major: `v[..., i]` is contiguous."""
    return torch.stack(components, 0).movedim(0, -1)


def stack_square(rows: list[list[Tensor]]) -> Tensor:
    """Stack C rows of C entries (...) to (..., C, C), stored component-major."""
    size = len(rows)
    flat = torch.stack([entry for row in rows for entry in row], 0)
    return flat.reshape(size, size, *flat.shape[1:]).movedim((0, 1), (-2, -1))


def symmetric_product(A: Tensor, B: Tensor) -> Tensor:
    """Compute A Bᵀ, exactly symmetric, for factors whose product is symmetric in theory.

    (..., C, P) twice -> (..., C, C). Such factors are B = A or B = A diag(w). A plain product
    computes its entries (i, j) and (j, i) by two sums, which differ by rounding errors: 1e-7 of
    their size in float32. Here the entries below the diagonal, which factorisations read, are
    copied to the other side.
    """
    product = A @ B.mT
    size = product.shape[-1]
    if size == 1:
        return product
    below = torch.ones(size, size, dtype=torch.bool, device=product.device).tril()
    return torch.where(below, product, product.mT)


def covariance_root(K: Tensor) -> Tensor:
    """Compute R with R Rᵀ = K for positive semi-definite K.  (..., C, C) -> same.

    Singular and zero K are allowed. For C ≤ 3 R is lower triangular, by Cholesky with pivots
    clamped at zero. For more it is Q √max(λ, 0) from the eigendecomposition, which is not
    triangular. Rounding may leave K with eigenvalues of −ε‖K‖, which count as zero.
    """
    size = K.shape[-1]
    if size > CLOSED_FORM_LIMIT:
        values, vectors = torch.linalg.eigh(K)
        R_by_eigh: Tensor = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        return R_by_eigh

    zero = torch.zeros_like(K[..., 0, 0])
    R: list[list[Tensor]] = [[zero] * size for _ in range(size)]
    for j in range(size):
        pivot = K[..., j, j]
        for k in range(j):
            pivot = pivot - R[j][k] * R[j][k]
        R[j][j] = pivot.clamp_min(0).sqrt()

        # Below a pivot of zero the column is zero too.
        scale = torch.where(R[j][j] > 0, 1 / R[j][j], zero)
        for i in range(j + 1, size):
            entry = K[..., i, j]
            for k in range(j):
                entry = entry - R[i][k] * R[j][k]
            R[i][j] = entry * scale

    return stack_square(R)


@dataclass(frozen=True)
class IdentityPlus:
    """A factorisation of A = I + RᵀΛR (M, C, C)."""

    positive: Tensor  # (M,) bool: where A is positive definite, with the requested margin
    logdet: Callable[[], Tensor]  # () -> (M,)
    solve: Callable[[Tensor], Tensor]  # b (M, C) -> A⁻¹ b


def factorise_identity_plus(R: Tensor, precision: Tensor, margin: float = 0.0) -> IdentityPlus:
    """Factorise A = I + RᵀΛR.  R, Λ (M, C, C).

    R: a root of K. precision: Λ. For C ≤ 3 R must be lower triangular, as from `covariance_root`.
    Where A is not positive definite, `positive` is false, and `solve` and `logdet` are invalid.
    margin: what all pivots must exceed for `positive`.
    """
    if R.shape[-1] > CLOSED_FORM_LIMIT:
        return _factorise_by_lapack(R, precision, margin)
    return _factorise_by_components(R, precision, margin)


def _factorise_by_components(R: Tensor, precision: Tensor, margin: float) -> IdentityPlus:
    """Factorise A = I + RᵀΛR = LDLᵀ by components, for C ≤ 3.  R, Λ (M, C, C).

    The pivots d_j are also held as e_j = d_j − 1, so that log1p gets them without rounding.
    precision: Λ. margin: as in `factorise_identity_plus`.
    """
    span = range(R.shape[-1])
    L, excess, pivots = _factorise_unit_lower(_compute_congruence_entries(R, precision))
    positive = pivots[0] > margin
    for pivot in pivots[1:]:
        positive = positive & (pivot > margin)

    def logdet() -> Tensor:
        """Compute log |A| = log Π(1 + e_j) (M,), by log1p of the product minus one."""
        product_minus_one = excess[0]
        for e in excess[1:]:
            # (1 + p)(1 + e) − 1 = p + e + pe
            product_minus_one = (product_minus_one + e).addcmul_(product_minus_one, e)
        return torch.log1p(product_minus_one)

    def solve(b: Tensor) -> Tensor:
        """Compute A⁻¹ b for b (M, C) by forward substitution, division, backward substitution."""
        z = [b[..., j] for j in span]
        for j in span:
            for k in range(j):
                z[j] = torch.addcmul(z[j], L[j][k], z[k], value=-1)
        z = [z[j] / pivots[j] for j in span]
        for j in reversed(span):
            for k in range(j + 1, len(span)):
                z[j] = torch.addcmul(z[j], L[k][j], z[k], value=-1)
        return stack_last(z)

    return IdentityPlus(positive, logdet, solve)


def _compute_congruence_entries(R: Tensor, precision: Tensor) -> list[list[Tensor]]:
    """Compute the entries (M,) of S = RᵀΛR for a lower triangular R.  R, Λ (M, C, C).

    Both entries of a symmetric pair are one tensor, so a change of one changes the other.
    precision: Λ.
    """
    size = R.shape[-1]
    S: list[list[Tensor]] = [[R[..., 0, 0]] * size for _ in range(size)]
    for j in range(size):
        # Column j of ΛR, then column j of the upper triangle of S. R_bj is zero for b < j.
        column = [
            sum_products(
                [precision[..., a, b] for b in range(j, size)],
                [R[..., b, j] for b in range(j, size)],
            )
            for a in range(size)
        ]
        for i in range(j + 1):
            S[i][j] = S[j][i] = sum_products([R[..., a, i] for a in range(i, size)], column[i:])

    return S


def _factorise_unit_lower(
    S: list[list[Tensor]],
) -> tuple[list[list[Tensor]], list[Tensor], list[Tensor]]:
    """Factorise I + S = LDLᵀ and return L, the pivots minus one d_j − 1, and the pivots d_j.

    S is symmetric, with entries (M,), and is overwritten, as are tensors that it shares. L is unit
    lower triangular: only its entries below the diagonal have a meaning.
    """
    size = len(S)
    L = [row.copy() for row in S]
    pivots: list[Tensor] = []
    for j in range(size):
        # S[i][j] becomes L_ij d_j in place, and S[j][j] becomes d_j − 1.
        for k in range(j):
            for i in range(j, size):
                S[i][j].addcmul_(L[i][k], S[j][k], value=-1)
        pivots.append(1 + S[j][j])
        for i in range(j + 1, size):
            L[i][j] = S[i][j] / pivots[j]

    return L, [S[j][j] for j in range(size)], pivots


def _factorise_by_lapack(R: Tensor, precision: Tensor, margin: float) -> IdentityPlus:
    """Factorise A = I + RᵀΛR by LAPACK's batched routines, for C > 3.  R, Λ (M, C, C).

    The pivots are the squares of the Cholesky factor's diagonal. log |A| is taken from the
    eigenvalues of RᵀΛR, so that small ones keep their digits. precision: Λ. margin: as in
    `factorise_identity_plus`.
    """
    S = R.mT @ precision @ R
    S = (S + S.mT) / 2
    factor, info = torch.linalg.cholesky_ex(
        S + torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
    )
    return IdentityPlus(
        positive=(info == 0) & (factor.diagonal(dim1=-2, dim2=-1).square().amin(-1) > margin),
        logdet=lambda: torch.log1p(torch.linalg.eigvalsh(S)).sum(-1),
        solve=lambda b: torch.cholesky_solve(b.unsqueeze(-1), factor).squeeze(-1),
    )


def select_rows(v: Tensor, rows: Tensor) -> Tensor:
    """Return v[rows] (m, C) for v (M, C) and row numbers (m,), component-major."""
    # The transpose of v is selected along its last dimension, so that each component is contiguous.
    return v.mT.index_select(1, rows).mT


def sum_products(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """Compute Σ_i left_i · right_i from C components (M,) of two vectors.  -> (M,)."""
    total = left[0] * right[0]
    for a, b in zip(left[1:], right[1:], strict=True):
        total.addcmul_(a, b)
    return total


def multiply_root(R: Tensor, v: Tensor) -> Tensor:
    """Compute R v.  R (M, C, C), v (M, C) -> (M, C).

    For C ≤ 3 R must be lower triangular, and the product is computed by components.
    """
    size = R.shape[-1]
    if size > CLOSED_FORM_LIMIT:
        return (R @ v.unsqueeze(-1)).squeeze(-1)
    product = v.new_empty(size, v.shape[0])
    for i in range(size):
        torch.mul(R[..., i, 0], v[..., 0], out=product[i])
        for j in range(1, i + 1):
            product[i].addcmul_(R[..., i, j], v[..., j])
    return product.mT


def multiply_root_transposed(R: Tensor, g: Tensor) -> Tensor:
    """Compute Rᵀ g.  R (M, C, C), g (M, C) -> (M, C).

    For C ≤ 3 R must be lower triangular, and the product is computed by components.
    """
    size = R.shape[-1]
    if size > CLOSED_FORM_LIMIT:
        return (R.mT @ g.unsqueeze(-1)).squeeze(-1)
    product = g.new_empty(size, g.shape[0])
    for j in range(size):
        torch.mul(R[..., j, j], g[..., j], out=product[j])
        for i in range(j + 1, size):
            product[j].addcmul_(R[..., i, j], g[..., i])
    return product.mT


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Compute the inner products Σ_c a_c b_c of rows.  (M, C), (M, C) -> (M,)."""
    size = a.shape[-1]
    if size > CLOSED_FORM_LIMIT:
        return (a * b).sum(-1)
    return sum_products([a[..., i] for i in range(size)], [b[..., i] for i in range(size)])


@dataclass(frozen=True)
class Evaluation:
    """An objective at a point, one row for each task."""

    value: Tensor  # (M,)
    gradient: Tensor  # (M, C)
    # g (M, C) -> ascent direction A⁻¹ g (M, C), with A near minus the Hessian, positive definite
    solve: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Ascent:
    """The points at which the tasks of an ascent ended."""

    point: Tensor  # (M, C)
    converged: Tensor  # (M,) bool
    rounds: int  # steps of the task that needed most


Objective = Callable[[Tensor, "Tensor | None"], Evaluation]
"""(point (m, C), rows (m,) or None for all) -> Evaluation of those tasks."""


def newton_ascent(
    objective: Objective,
    start: Tensor,
    *,
    tolerance: float = 1e-7,
    max_rounds: int = 200,
) -> Ascent:
    """Maximise M independent, nearly concave objectives at once, each monotonically.

    start (M, C): finite points. objective: evaluates some of the tasks; `solve` of its result must
    give a direction in which the task ascends.

    A step that gains less than 1e-4 of its linear prediction, or gives a value that is not finite,
    is halved until it gains enough. A task ends when its Newton decrement √(gᵀA⁻¹g)
    ≤ tolerance, after two full steps from a decrement below 1e-4, or when no step above rounding
    error gains. It has converged = False after `max_rounds` steps, and where no step gains although
    the slope is large. Finished tasks leave the batch as soon as they are a quarter of it, so a few
    hard tasks do not slow down the others.
    """
    best = start.clone()
    converged = torch.zeros(start.shape[0], dtype=torch.bool, device=start.device)
    current = objective(start, None)
    tasks = _Tasks(None, start, torch.zeros_like(current.value, dtype=torch.int8))
    for rounds in range(max_rounds + 1):
        step = current.solve(current.gradient)
        slope = dot(current.gradient, step)

        # Newton converges quadratically: two full steps reach rounding accuracy.
        done = (slope <= tolerance * tolerance) | (tasks.trusted_steps >= 2)
        tasks = tasks._replace(trusted_steps=tasks.trusted_steps + (slope <= TRUSTED_SLOPE))
        finished = int(done.sum())
        if rounds == max_rounds or finished == done.numel():
            _record_tasks(best, converged, tasks, done)
            return Ascent(best, converged, rounds)

        # Removing tasks copies the others, so it waits for a quarter of them.
        value = current.value
        if finished * 4 >= done.numel():
            _record_tasks(best, converged, tasks, done)
            keep = (~done).nonzero().squeeze(-1)
            tasks = tasks.select(keep)
            step = select_rows(step, keep)
            slope = slope[keep]
            value = value[keep]

        point, current, stuck = _search_line(objective, tasks, value, step, slope)
        tasks = tasks._replace(point=point)

        # Where no step gains, the point is the maximum up to rounding if the slope is small.
        if bool(stuck.any()):
            flat = slope <= FLAT_SLOPE * (1 + value.abs())
            _record_tasks(best, converged, tasks, stuck & flat)
            keep = (~stuck).nonzero().squeeze(-1)
            if keep.numel() == 0:
                return Ascent(best, converged, rounds + 1)
            tasks = tasks.select(keep)
            current = objective(tasks.point, tasks.rows)

    raise AssertionError("unreachable")  # the last round returns


class _Tasks(NamedTuple):
    """The m tasks that are still in the batch."""

    rows: Tensor | None  # their numbers among all tasks (m,); None: all tasks
    point: Tensor  # (m, C)
    trusted_steps: Tensor  # full steps since the slope fell below TRUSTED_SLOPE (m,)

    def select(self, keep: Tensor) -> _Tasks:
        """Return the tasks at the places `keep` (k,) in the batch."""
        return _Tasks(
            keep if self.rows is None else self.rows[keep],
            select_rows(self.point, keep),
            self.trusted_steps[keep],
        )


def _search_line(
    objective: Objective, tasks: _Tasks, value: Tensor, step: Tensor, slope: Tensor
) -> tuple[Tensor, Evaluation, Tensor]:
    """Take the first of the steps 1, ½, ¼ … that gains enough, for each of m tasks.

    step (m, C). value, slope (m,): those at the point of each task, with slope = gᵀstep. Returns
    the new points (m, C), their evaluation, and `stuck` (m,) bool: where no step above rounding
    error gains enough, so that the point is the old one.
    """
    rows, point = tasks.rows, tasks.point

    # Near the maximum gains are rounding errors: any full step with a finite value is taken.
    is_near_maximum = slope <= TRUSTED_SLOPE
    slack = 4 * torch.finfo(value.dtype).eps * (1 + value.abs())
    trial = point + step
    evaluation = objective(trial, rows)
    enough = evaluation.value >= value + SUFFICIENT_GAIN * slope - slack
    gains = enough | (is_near_maximum & torch.isfinite(evaluation.value))
    if bool(gains.all()):
        return trial, evaluation, torch.zeros_like(gains)
    factor = torch.ones_like(value)
    length = dot(step, step).sqrt()
    shortest = SHORTEST_STEP * (1 + dot(point, point).sqrt())
    while True:
        factor = torch.where(gains, factor, factor / 2)
        stuck = ~gains & ~(factor * length >= shortest)  # also where the step is not a number
        trial = point + torch.where(stuck, torch.zeros_like(factor), factor).unsqueeze(-1) * step
        evaluation = objective(trial, rows)
        gains = gains | (evaluation.value >= value + SUFFICIENT_GAIN * factor * slope - slack)
        if bool((gains | stuck).all()):
            return trial, evaluation, stuck


def _record_tasks(best: Tensor, converged: Tensor, tasks: _Tasks, done: Tensor) -> None:
    """Write the points and the convergence of some tasks to the results of all, in place.

    best (M, C) and converged (M,) are changed. done (m,): which of the tasks have converged; the
    others keep their flag.
    """
    if tasks.rows is None:
        best.copy_(tasks.point)
        converged |= done
    else:
        best[tasks.rows] = tasks.point
        converged[tasks.rows] |= done
