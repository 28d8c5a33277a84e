"""tr[log(I + A) − A] of many refits from one set of random vectors that all of them share.

A = H₁^{-½} ΔH H₁^{-½} is the change of the training rows' curvature at a task's own mode (see
`last_layer_products`). With vectors w_s ~ N(0, H₁⁻¹) the products Q_st = w_sᵀ ΔH w_t of different s
and t have

    E Q_st² = tr A²,   E Q_st Q_tu Q_us = tr A³,   E Q_st Q_tu Q_uv Q_vs = tr A⁴.

The outputs J_i w_s of all training rows are computed once. A task then costs a product of S × S
over its rows, and neither a product with the features nor a solve. Three things make it accurate or
cheap:

- rows are sampled in proportion to how much they change. That adds Σ_i (1/π_i − 1)
  tr(K_iΔΛ_iK_iΔΛ_i) to E Q_st², which is subtracted (estimated from the same rows);
- w_sᵀΔHw_s and Σ_i w_sᵀJ_iᵀ ΔΛ_iK_iΔΛ_i J_iw_s have known expectations: they are control variates
  of tr A²;
- the vectors are the same for all tasks.

It fails where A has eigenvalues that are not small beside one. The stated error is then large.

Terms and symbols are those of `ssla.refit.weights`; H₁ and G are those of `last_layer_products`. S
is the number of vectors, π_i the probability with which row i is sampled, and K_i = J_i H₁⁻¹ J_iᵀ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ssla.likelihoods import Likelihood
from ssla.refit.weights.refit_rows import Block

# A guess: the least size of a row for sampling, over the mean size.
FLOOR = 0.1
ROUNDS = 8  # a guess: rounds in which what certain rows leave over is divided among the others
SMALL = 1e-3  # a guess: below it (log(1 + t) − t)/t² is computed by its series


class Estimate(NamedTuple):
    """An estimated value, and its standard error."""

    value: float
    error: float


@dataclass(frozen=True, eq=False)
class SharedVectors:
    """The random vectors of a sketch, with their outputs on all training rows.

    All tasks share them.
    """

    f: Tensor  # outputs at θ̂ (n, C)
    y: Tensor  # targets (n, …)
    weights: Tensor | None  # of rows (n,); None: all one
    w: Tensor  # of N(0, H⁻¹) (S, P)
    v: Tensor  # J_i w_s (n, C, S)
    K: Tensor  # J_i H⁻¹ J_iᵀ (n, C, C)


def compute_shared_vectors(
    blocks: list[Block], w: Tensor, covariances: list[Tensor]
) -> SharedVectors:
    """Compute the outputs of vectors w (S, P) on the training rows of all blocks.

    covariances: J_i H⁻¹ J_iᵀ of the rows of each block (b, C, C). Either all blocks have weights,
    or none has.
    """
    f = torch.cat([block.f for block in blocks])
    y = torch.cat([block.y for block in blocks])
    weights = [block.weights for block in blocks if block.weights is not None]
    step = w.reshape(len(w), f.shape[1], -1).permute(2, 1, 0).flatten(1)  # (F, C · S)
    v = torch.cat([block.x @ step for block in blocks]).unflatten(1, (f.shape[1], len(w)))
    all_weights = torch.cat(weights) if weights else None
    return SharedVectors(f, y, all_weights, w, v, torch.cat(covariances))


class Sampled(NamedTuple):
    """Sampled training rows (b of them), and what one task does to them."""

    y: Tensor  # (b, …)
    before: Tensor  # f̂ (b, C)
    f: Tensor  # the task's own outputs (b, C)
    weight: Tensor  # 1/π_i times the row's own weight (b,)
    inverse: Tensor  # 1/π_i (b,)
    v: Tensor  # J_i w_s (b, C, S)
    K: Tensor  # J_i H₁⁻¹ J_iᵀ (b, C, C)


def compute_sampling_probabilities(size: Tensor, count: int) -> Tensor:
    """Compute the probabilities π (n,) with which rows are sampled: at most one, of sum `count`.

    They are in proportion to the sizes (n,) plus a floor: the size of a row is how much it changes.
    If there are not more rows than `count`, all are one.
    """
    n = len(size)
    if count >= n:
        return torch.ones_like(size)
    share = size + FLOOR * size.mean()
    pi = share * (count / share.sum())
    # A probability above one becomes one, and the rest of the count is divided among the others.
    for _ in range(ROUNDS):
        if not bool((pi > 1).any()):
            break
        certain = pi >= 1
        uncertain = torch.where(certain, 0.0, pi)
        pi = torch.where(certain, 1.0, pi * ((count - certain.sum()) / uncertain.sum()))
    return pi.clamp(max=1)


def sample_systematically(pi: Tensor, offset: float) -> Tensor:
    """Choose rows (b,), by number, with inclusion probabilities π (n,), by systematic sampling.

    A row is chosen if the cumulated sum of π passes a whole number at it. The sum begins at
    `offset`, in [0, 1). Nothing is random here: the offset decides.
    """
    after = pi.double().cumsum(0) + offset
    before = after - pi.double()
    return (after.floor() > before.floor()).nonzero().squeeze(-1)


def estimate_remainder(likelihood: Likelihood, sampled: Sampled, fisher: bool) -> Estimate:
    """Estimate tr[log(I + A) − A] of one task from sampled rows, with the standard error.

    fisher: ΔΛ is the change of the Fisher information; False: of the observed curvature.
    """
    y, before, f, weight, inverse, v, K = sampled
    b, C, S = v.shape
    change = compute_row_precisions(likelihood, y, f, fisher) - compute_row_precisions(
        likelihood, y, before, fisher
    )
    scaled = change * weight[:, None, None]
    pushed = scaled @ v
    Q = (v.reshape(b * C, S).mT @ pushed.reshape(b * C, S)).double()
    K_change = K @ change

    # What sampling rows adds to E Q_st Q_ts (see the module's docstring).
    squares = (K_change * K_change.mT).sum((-2, -1))  # tr K_iΔΛ_iK_iΔΛ_i, the row weights apart
    added = (weight * weight * (1 - 1 / inverse) * squares).sum(dtype=torch.float64)

    # Both controls have the expectation zero, given the rows.
    trace_control = Q.diagonal() - (weight * K_change.diagonal(dim1=-2, dim2=-1).sum(-1)).sum(
        dtype=torch.float64
    )

    # `pushed` is not needed any more, so its memory is used again.
    torch.matmul(scaled @ K_change, v, out=pushed)
    quadratic = pushed.mul_(v).sum(1).sum(0, dtype=torch.float64)
    square_control = quadratic - (weight * squares).sum(dtype=torch.float64)
    return compute_remainder_from_products(
        Q, torch.stack([trace_control, square_control], 1), float(added)
    )


def compute_row_precisions(likelihood: Likelihood, y: Tensor, f: Tensor, fisher: bool) -> Tensor:
    """Compute Λ_i of rows with targets y (b, …) and outputs f (b, C): (b, C, C).

    fisher: the Fisher information; False: the observed curvature.
    """
    precision = likelihood.fisher(f) if fisher else likelihood.precision(y, f)
    return precision.expand(*f.shape, f.shape[-1])


def compute_remainder_from_products(Q: Tensor, controls: Tensor, added: float = 0.0) -> Estimate:
    """Estimate tr[log(I + A) − A] from products Q (S, S) of the vectors, with the standard error.

    Q_st = u_sᵀ ΔH z_t, where E z_s u_sᵀ = H⁻¹, need not be symmetric. controls (S, k): control
    variates with the expectation zero. added: what the sampling of rows adds to E Q_st Q_ts. The
    error is infinite if the mean eigenvalue of A, under the weights λ², is at most −½.
    """
    S = len(Q)
    off_diagonal = Q - torch.diag(Q.diagonal())
    squared = off_diagonal @ off_diagonal
    pairs = off_diagonal * off_diagonal.mT  # Q_st Q_ts
    second, error = _estimate_second_moment(pairs, controls, added)

    # Estimates of tr A³ and tr A⁴ from triples and quadruples of distinct vectors. The diagonal is
    # zero, so neighbours in a cycle differ; quadruples whose opposite vectors are the same are
    # taken out.
    third = float((squared * off_diagonal.mT).sum()) / (S * (S - 1) * (S - 2))
    fourth = float(
        (squared * squared.mT).sum() - 2 * squared.diagonal().square().sum() + pairs.square().sum()
    )
    fourth /= S * (S - 1) * (S - 2) * (S - 3)
    if not second > 0:
        return Estimate(-0.5 * second, error)

    # With h(λ) = (log(1 + λ) − λ)/λ² the remainder is Σ λ² h(λ), the mean of h under the weights λ²
    # times their sum. h is expanded at the mean of λ to second order, with ½|h″| ≈ ¼/(1 + λ)².
    mean = third / second
    if not mean > -0.5:
        return Estimate(-0.5 * second, math.inf)
    variance = max(fourth - third * mean, 0.0)  # of λ under the weights λ², times their sum
    second_order = 0.25 * variance / (1 + mean) ** 2
    return Estimate(
        second * compute_scaled_remainder(mean) - second_order,
        math.hypot(0.5 * error, second_order),
    )


def _estimate_second_moment(pairs: Tensor, controls: Tensor, added: float) -> tuple[float, float]:
    """Estimate tr A² from the products Q_st Q_ts (S, S), and return it with its standard error.

    The diagonal of `pairs` is zero. controls (S, k), added: see `compute_remainder_from_products`.
    """
    S = len(pairs)
    means = pairs.sum(1) / (S - 1) - added  # of each vector s, over all other vectors t
    # The means are regressed on the control variates, which leaves less of their variance.
    centred = controls - controls.mean(0)
    beta = torch.linalg.lstsq(centred, (means - means.mean()).unsqueeze(1)).solution.squeeze(1)
    residuals = means - means.mean() - centred @ beta
    # Each pair belongs to two vectors, so a vector's own deviation counts twice.
    second = float(means.mean() - 2 * controls.mean(0) @ beta)
    error = 2 * float(residuals.square().sum() / (S - 1 - len(beta)) / S) ** 0.5
    return second, error


def compute_scaled_remainder(t: float) -> float:
    """Compute (log(1 + t) − t)/t² for t > −1, by its series near zero."""
    if abs(t) < SMALL:
        return -0.5 + t / 3 - t * t / 4
    return (math.log1p(t) - t) / t**2
