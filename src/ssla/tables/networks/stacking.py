"""Stacking: the weights with which a mixture of predictives predicts held-out rows best.

With L (n, K) the log densities of K models at n rows that they have not seen, and row weights c
with sum one,

    w = argmax over the simplex of  F(w) = Σ_i c_i log p_i,   p_i = Σ_k w_k e^(L_ik)

F is concave. Its gradient g_k = Σ_i c_i e^(L_ik) / p_i has Σ_k w_k g_k = 1. At the maximum g_k = 1
where w_k > 0, and g_k ≤ 1 elsewhere. At every w, max_k g_k − 1 bounds the distance of F from its
maximum. An EM step w_k ← w_k g_k never lowers F. Steps w_k ∝ w_k g_k^η with a growing η are faster.
Where such a step would lower F, η returns to 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ssla._checks import check_positive, warn
from ssla.data import as_tensor

STEPS = 5000  # at most; a guess
TOLERANCE = 1e-7  # of F, in nats for each row; a guess
GROWTH = 1.3  # factor on η after a step; a guess


def stacking_weights(log_densities: Any, row_weights: Any = None, steps: int = STEPS) -> Tensor:
    """Return the weights w (K,), ≥ 0 with sum one, that maximise Σ_i c_i log Σ_k w_k e^(L_ik).

    The result is deterministic. Raises ValueError for wrong shapes or values.

    log_densities: L (n, K), log densities of each model at rows that it was not fitted on
    (out-of-fold, held-out or leave-one-out); −∞ is allowed where another model has a positive
    density.  row_weights: c (n,); equal if not given.  steps: the largest number of EM steps; a
    result that is not within 1e-7 nats of the maximum is warned about.

    >>> w = stacking_weights(torch.stack([a.log_prob(y), b.log_prob(y)], 1))      # doctest: +SKIP
    >>> ssla.mixture([a_new, b_new], w)                                           # doctest: +SKIP
    """
    L, c = _read_rows(log_densities, row_weights)
    densities = (L - L.amax(1, keepdim=True)).exp()  # a factor for each row does not change w
    w = torch.full((L.shape[1],), 1 / L.shape[1], dtype=torch.float64)
    value, gradient = _evaluate_objective(densities, c, w)
    power = 1.0  # η
    for _ in range(steps):
        if float(gradient.max()) - 1 <= TOLERANCE:
            return w
        proposal = w * gradient**power
        proposal = proposal / proposal.sum()
        new_value, new_gradient = _evaluate_objective(densities, c, proposal)
        # A step with η > 1 may lower F. Then an EM step (η = 1), which never does, takes its place.
        if power > 1 and not new_value >= value:
            power = 1.0
            continue
        w, value, gradient = proposal, new_value, new_gradient
        power *= GROWTH

    warn(
        f"The stacking weights did not converge in {steps} steps: the mean log density is up to "
        f"{float(gradient.max()) - 1:.2g} below its maximum. Give more steps, or leave out one of "
        "two similar models."
    )
    return w


def fit_model_shares(log_densities: Tensor, weights: Tensor, pseudo: Tensor) -> Tensor:
    """Return the stacking weights (K,) of models, with pseudo rows as prior knowledge.

    log_densities (n, K), weights (n,): of the rows. Rows with NaN, or where all densities are zero,
    are ignored.  pseudo (K,): for each model the positive weight of one more row, at which all
    other models have density zero. So no model gets the weight zero.
    """
    is_usable = log_densities.amax(1) > -torch.inf  # False for NaN
    # Row k has log density 0 by model k, and −∞ by all others.
    pseudo_rows = torch.eye(len(pseudo), dtype=torch.float64).log()
    return stacking_weights(
        torch.cat([log_densities[is_usable], pseudo_rows]), torch.cat([weights[is_usable], pseudo])
    )


def _evaluate_objective(densities: Tensor, c: Tensor, w: Tensor) -> tuple[float, Tensor]:
    """Return F(w), up to a constant, and its gradient (K,).

    densities (n, K): e^L up to a factor for each row.  c (n,): row weights.  w (K,): model weights.
    """
    p = densities @ w
    return float(c @ p.log()), (c / p) @ densities


def _read_rows(log_densities: Any, row_weights: Any) -> tuple[Tensor, Tensor]:
    """Return log densities (n, K) and row weights (n,) with sum one, both in float64 on the CPU.

    row_weights None: equal weights. Raises ValueError for wrong shapes, negative weights or weights
    without a positive sum, for NaN and +∞, and for rows where all densities are zero.
    """
    L = as_tensor(log_densities).to("cpu", torch.float64)
    if L.dim() != 2 or not L.numel():
        raise ValueError(
            f"log_densities must have shape (rows, models), but has {tuple(L.shape)}. Stack them "
            "with dim=1."
        )

    impossible = L.amax(1) == -torch.inf
    if bool(torch.isnan(L).any()) or bool(torch.isposinf(L).any()):
        raise ValueError(
            "log_densities must be numbers below infinity, but some are NaN or +inf. Leave out "
            "these models."
        )
    if bool(impossible.any()):
        raise ValueError(
            f"All models give density zero to {int(impossible.sum())} rows (first: "
            f"{int(impossible.nonzero()[0])}), so no mixture can predict them. Leave out these "
            "rows, or add a model with a wider predictive."
        )

    if row_weights is None:
        return L, torch.full((len(L),), 1 / len(L), dtype=torch.float64)
    c = as_tensor(row_weights).to("cpu", torch.float64)
    if c.shape != (len(L),):
        raise ValueError(
            f"row_weights must have shape ({len(L)},), one for each row, but has {tuple(c.shape)}."
        )
    if bool((c < 0).any()):
        raise ValueError("row_weights must not be negative. Rows of weight 0 are ignored.")
    check_positive("the sum of row_weights", c.sum())
    return L, c / c.sum()
