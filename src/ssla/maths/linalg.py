"""Small dense mathematics: roots of C×C covariances, determinants of I + S, safeguarded Newton
ascent.

All functions are vectorised over a leading batch M (test points × candidate y) and works on
C×C matrices. For C ≤ 3 the factorisations are written by components: a vector (M, C) is stored
as C contiguous tensors of length M, so each step is elementwise over the batch. For larger C the
batched LAPACK routines are used. Both give the same results; tests compare them.

No inverse, no `det` and no jitter is used. `log|I + S|` is Σ log1p(·), so a tiny S keeps its
digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CLOSED_FORM_LIMIT = 3
SHORTEST_STEP = 1e-11  # relative to 1 + ‖point‖: shorter steps are rounding error
# a squared Newton decrement below which gains are rounding error and the full step is safe
TRUSTED_SLOPE = 1e-8


def stack_last(parts: list[Tensor]) -> Tensor:
    """Components -> (..., C), stored component-major so that `v[..., i]` is contiguous."""
    return torch.stack(parts, 0).movedim(0, -1)


def stack_square(rows: list[list[Tensor]]) -> Tensor:
    """Entries -> (..., C, C), stored component-major."""
    size = len(rows)
    flat = torch.stack([entry for row in rows for entry in row], 0)
    return flat.reshape(size, size, *flat.shape[1:]).movedim((0, 1), (-2, -1))


def symmetric_product(A: Tensor, B: Tensor) -> Tensor:
    """A Bᵀ of factors whose product is symmetric (B = A, or A diag(w)), equal to its transpose bit
    by bit.

    A product computes its entries (i, j) and (j, i) by two sums, which differ by rounding errors:
    1e-7 of their size in float32. Here the entries below the diagonal, which factorisations read,
    stand on both sides.  (..., C, P) twice -> (..., C, C).
    """
    product = A @ B.mT
    size = product.shape[-1]
    if size == 1:
        return product
    below = torch.ones(size, size, dtype=torch.bool, device=product.device).tril()
    return torch.where(below, product, product.mT)


def root(K: Tensor) -> Tensor:
    """R with R Rᵀ = K for positive semi-definite K; singular and zero K are allowed.

    (..., C, C) -> same.

    C ≤ 3: Cholesky with pivots clamped at zero. Otherwise Q √max(λ, 0) from eigh.
    Rounding may leave K with eigenvalues of −ε‖K‖; they count as zero.
    """
    size = K.shape[-1]
    if size > CLOSED_FORM_LIMIT:
        values, vectors = torch.linalg.eigh(K)
        scaled: Tensor = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        return scaled
    zero = torch.zeros_like(K[..., 0, 0])
    R: list[list[Tensor]] = [[zero] * size for _ in range(size)]
    for j in range(size):
        pivot = K[..., j, j]
        for k in range(j):
            pivot = pivot - R[j][k] * R[j][k]
        R[j][j] = pivot.clamp_min(0).sqrt()
        scale = torch.where(R[j][j] > 0, 1 / R[j][j], zero)
        for i in range(j + 1, size):
            entry = K[..., i, j]
            for k in range(j):
                entry = entry - R[i][k] * R[j][k]
            R[i][j] = entry * scale
    return stack_square(R)


@dataclass(frozen=True)
class IdentityPlus:
    """A = I + RᵀΛR, factorised.

    `positive`: where A is positive definite (with the requested margin).
    """

    positive: Tensor  # (M,) bool
    logdet: Callable[[], Tensor]  # () -> (M,)
    solve: Callable[[Tensor], Tensor]  # b (M, C) -> A⁻¹ b


def identity_plus(R: Tensor, precision: Tensor, margin: float = 0.0) -> IdentityPlus:
    """Factorise I + RᵀΛR.  R, Λ (M, C, C); for C ≤ 3, R must be lower triangular (as from `root`).

    Where A is not positive definite, `solve` and `logdet` are invalid. With a margin, all pivots
    must exceed it.
    """
    if R.shape[-1] > CLOSED_FORM_LIMIT:
        return _identity_plus_batched(R, precision, margin)
    return _identity_plus_closed(R, precision, margin)


def _identity_plus_closed(R: Tensor, precision: Tensor, margin: float) -> IdentityPlus:
    """LDLᵀ by components.

    Pivots are stored as d_j − 1, so that log1p gets them without rounding.
    """
    size = R.shape[-1]
    span = range(size)
    S: list[list[Tensor]] = [[R[..., 0, 0]] * size for _ in span]
    for j in span:  # column j of ΛR, then the upper triangle of RᵀΛR
        column = [
            sum_products(
                [precision[..., a, b] for b in range(j, size)],
                [R[..., b, j] for b in range(j, size)],
            )
            for a in span
        ]
        for i in range(j + 1):
            S[i][j] = S[j][i] = sum_products([R[..., a, i] for a in range(i, size)], column[i:])
    L: list[list[Tensor | None]] = [[None] * size for _ in span]
    excess: list[Tensor] = []
    pivots: list[Tensor] = []
    for j in span:
        # S[i][j] becomes L_ij d_j in place; entries are fresh tensors, shared only by the two
        # places of a symmetric pair.
        for k in range(j):
            for i in range(j, size):
                S[i][j].addcmul_(_entry(L, i, k), S[j][k], value=-1)
        excess.append(S[j][j])
        pivots.append(1 + S[j][j])
        for i in range(j + 1, size):
            L[i][j] = S[i][j] / pivots[j]
    positive = pivots[0] > margin
    for pivot in pivots[1:]:
        positive = positive & (pivot > margin)

    def logdet() -> Tensor:  # Π(1 + e_j) − 1, computed without adding the one
        product = excess[0]
        for e in excess[1:]:
            product = (product + e).addcmul_(product, e)
        return torch.log1p(product)

    def solve(b: Tensor) -> Tensor:
        z = [b[..., j] for j in span]
        for j in span:
            for k in range(j):
                z[j] = torch.addcmul(z[j], _entry(L, j, k), z[k], value=-1)
        z = [z[j] / pivots[j] for j in span]
        for j in reversed(span):
            for k in range(j + 1, size):
                z[j] = torch.addcmul(z[j], _entry(L, k, j), z[k], value=-1)
        return stack_last(z)

    return IdentityPlus(positive, logdet, solve)


def _entry(L: list[list[Tensor | None]], i: int, j: int) -> Tensor:
    value = L[i][j]
    assert value is not None
    return value


def _identity_plus_batched(R: Tensor, precision: Tensor, margin: float) -> IdentityPlus:
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


def take(v: Tensor, rows: Tensor) -> Tensor:
    """v[rows] for v (M, C), kept component-major."""
    return v.mT.index_select(1, rows).mT


def sum_products(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """Σ_i left_i · right_i by components."""
    total = left[0] * right[0]
    for a, b in zip(left[1:], right[1:], strict=True):
        total.addcmul_(a, b)
    return total


def lower_times(R: Tensor, v: Tensor) -> Tensor:
    """R v.  (M, C, C), (M, C) -> (M, C); by components for C ≤ 3, where R is lower triangular."""
    size = R.shape[-1]
    if size > CLOSED_FORM_LIMIT:
        return (R @ v.unsqueeze(-1)).squeeze(-1)
    out = v.new_empty(size, v.shape[0])
    for i in range(size):
        torch.mul(R[..., i, 0], v[..., 0], out=out[i])
        for j in range(1, i + 1):
            out[i].addcmul_(R[..., i, j], v[..., j])
    return out.mT


def upper_times(R: Tensor, g: Tensor) -> Tensor:
    """Rᵀ g, as `lower_times`."""
    size = R.shape[-1]
    if size > CLOSED_FORM_LIMIT:
        return (R.mT @ g.unsqueeze(-1)).squeeze(-1)
    out = g.new_empty(size, g.shape[0])
    for j in range(size):
        torch.mul(R[..., j, j], g[..., j], out=out[j])
        for i in range(j + 1, size):
            out[j].addcmul_(R[..., i, j], g[..., i])
    return out.mT


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Σ_c a_c b_c.  (M, C), (M, C) -> (M,)."""
    size = a.shape[-1]
    if size > CLOSED_FORM_LIMIT:
        return (a * b).sum(-1)
    return sum_products([a[..., i] for i in range(size)], [b[..., i] for i in range(size)])


@dataclass(frozen=True)
class Evaluation:
    """An objective at a point, one row for each task: value (M,), gradient (M, C), ascent
    direction's solver.
    """

    value: Tensor
    gradient: Tensor
    solve: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Ascent:
    """The result of the ascent: point (M, C), whether each task converged, and the number of
    rounds.
    """

    point: Tensor
    converged: Tensor
    rounds: int


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

    A step that does not gain at least 1e-4 of its linear prediction (or gives a non-finite value)
    is halved until it does; a task ends when its Newton decrement √(gᵀA⁻¹g) ≤ tolerance, after two
    full steps from a decrement below 1e-4, or when no step above rounding error helps. Finished
    tasks are removed from the batch as soon as a quarter of it is finished, so a few hard tasks do
    not slow down the others.

    Fails (converged = False, point is the best so far) after `max_rounds` accepted steps.
    """
    point = start.clone()
    converged = torch.zeros(start.shape[0], dtype=torch.bool, device=start.device)
    rows: Tensor | None = None
    here = start
    now = objective(here, None)
    trusted = torch.zeros_like(now.value, dtype=torch.int8)
    for used in range(max_rounds + 1):
        step = now.solve(now.gradient)
        slope = dot(now.gradient, step)
        # Newton converges quadratically: two full steps reach rounding accuracy
        done = (slope <= tolerance * tolerance) | (trusted >= 2)
        trusted = trusted + (slope <= TRUSTED_SLOPE)
        count = int(done.sum())
        if used == max_rounds or count == done.numel():
            _write(point, here, rows)
            _mark(converged, done, rows)
            return Ascent(point, converged, used)
        if count * 4 >= done.numel():
            _write(point, here, rows)
            _mark(converged, done, rows)
            keep = (~done).nonzero().squeeze(-1)
            rows = keep if rows is None else rows[keep]
            here, step, slope, trusted = (
                take(here, keep),
                take(step, keep),
                slope[keep],
                trusted[keep],
            )
            value = now.value[keep]
        else:
            value = now.value
        here, now, stuck = _line_search(objective, rows, here, value, step, slope)
        if bool(stuck.any()):  # no step helps: the optimum up to rounding
            _write(point, here, rows)
            _mark(converged, stuck & (slope <= 1e-6 * (1 + value.abs())), rows)
            keep = (~stuck).nonzero().squeeze(-1)
            if keep.numel() == 0:
                return Ascent(point, converged, used + 1)
            rows = keep if rows is None else rows[keep]
            here, trusted = take(here, keep), trusted[keep]
            now = objective(here, rows)
    raise AssertionError("unreachable")


def _line_search(
    objective: Objective,
    rows: Tensor | None,
    here: Tensor,
    value: Tensor,
    step: Tensor,
    slope: Tensor,
) -> tuple[Tensor, Evaluation, Tensor]:
    """The first of the steps 1, ½, ¼ … that gains enough, for each task; `stuck` where no step
    above rounding error does.
    """
    close = slope <= TRUSTED_SLOPE
    slack = 4 * torch.finfo(value.dtype).eps * (1 + value.abs())
    trial = here + step
    there = objective(trial, rows)
    good = (there.value >= value + 1e-4 * slope - slack) | (close & torch.isfinite(there.value))
    if bool(good.all()):
        return trial, there, torch.zeros_like(good)
    factor = torch.ones_like(value)
    length = dot(step, step).sqrt()
    shortest = SHORTEST_STEP * (1 + dot(here, here).sqrt())
    while True:
        factor = torch.where(good, factor, factor / 2)
        stuck = ~good & ~(factor * length >= shortest)  # also where the step is not a number
        trial = here + torch.where(stuck, torch.zeros_like(factor), factor).unsqueeze(-1) * step
        there = objective(trial, rows)
        good = good | (there.value >= value + 1e-4 * factor * slope - slack)
        if bool((good | stuck).all()):
            return trial, there, stuck


def _write(target: Tensor, values: Tensor, rows: Tensor | None) -> None:
    if rows is None:
        target.copy_(values)
    else:
        target[rows] = values


def _mark(flags: Tensor, values: Tensor, rows: Tensor | None) -> None:
    if rows is None:
        flags |= values
    else:
        flags[rows] |= values
