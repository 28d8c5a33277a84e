"""Products with the curvature Λ of an observation, without a C×C matrix for each where there is
none to form.

Λ is −∂² log p/∂f², or its expectation over y where `fisher` is asked for. f is (..., C); all
arguments broadcast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssla.likelihoods.classes import Categorical
from ssla.likelihoods.likelihood import Likelihood
from ssla.likelihoods.tempered import Tempered


def shift_invariant(likelihood: Likelihood) -> bool:
    """Whether adding a number to all outputs changes nothing: Λ then has no part along (1, …,
    1).
    """
    base = likelihood.base if isinstance(likelihood, Tempered) else likelihood
    return isinstance(base, Categorical)


def score_change(likelihood: Likelihood, y: Tensor, f: Tensor, before: Tensor) -> Tensor:
    """g(y, f) − g(y, before).  (..., C). Of classes y cancels."""
    if isinstance(likelihood, Tempered):
        return likelihood.beta * score_change(likelihood.base, y, f, before)
    if isinstance(likelihood, Categorical):
        return likelihood.logits((likelihood.mean(f) - likelihood.mean(before)).neg_())
    return likelihood.score(y, f) - likelihood.score(y, before)


def precision_times(
    likelihood: Likelihood, y: Tensor, f: Tensor, v: Tensor, fisher: bool = False
) -> Tensor:
    """Λ(y, f) v.  v (..., C) -> (..., C).

    Of classes p∘v − p(pᵀv), over the square of the temperature.
    """
    if isinstance(likelihood, Tempered):
        return likelihood.beta * precision_times(likelihood.base, y, f, v, fisher)
    if isinstance(likelihood, Categorical):
        p = likelihood.mean(f)
        along = p * v
        return likelihood.logits(likelihood.logits(along - p * along.sum(-1, keepdim=True)))
    precision = likelihood.fisher(f) if fisher else likelihood.precision(y, f)
    return (precision @ v.unsqueeze(-1)).squeeze(-1)


def precision_trace(
    likelihood: Likelihood, y: Tensor, f: Tensor, K: Tensor, fisher: bool = False
) -> Tensor:
    """tr(K Λ(y, f)) of m outputs in each of b rows.

    y (b, ...), f (m, b, C), K (b, C, C) symmetric -> (m, b).
    """
    if isinstance(likelihood, Tempered):
        return likelihood.beta * precision_trace(likelihood.base, y, f, K, fisher)
    if isinstance(likelihood, Categorical):
        p = likelihood.mean(f)
        through = (p.movedim(0, 1) @ K).movedim(1, 0)
        variances = K.diagonal(dim1=-2, dim2=-1)
        return likelihood.logits(likelihood.logits((p * (variances - through)).sum(-1)))
    precision = likelihood.fisher(f) if fisher else likelihood.precision(y, f)
    return torch.einsum("bcd,mbcd->mb", K, precision.expand(*f.shape, f.shape[-1]))


def precision_change_along(
    likelihood: Likelihood,
    y: Tensor,
    f: Tensor,
    before: Tensor,
    directions: Tensor,
    weights: Tensor | None = None,
    fisher: bool = False,
) -> Tensor:
    """Σ_i w_i d_i ΔΛ_i d_iᵀ of m outputs in b rows, ΔΛ_i = Λ(y_i, f_i) − Λ(y_i, before_i).

    f (m, b, C), before (b, C), directions dᵀ (b, C, r), weights (b,) -> (m, r, r).
    """
    if isinstance(likelihood, Tempered):
        inside = precision_change_along(likelihood.base, y, f, before, directions, weights, fisher)
        return likelihood.beta * inside
    scaled = directions if weights is None else directions * weights[:, None, None]
    if isinstance(likelihood, Categorical):
        # dΛdᵀ = d diag(p) dᵀ − (dp)(dp)ᵀ. With p̂ before, the change of the last term is the
        # symmetric part of (dΔp)(d(p + p̂))ᵀ: nothing cancels.
        m, r = len(f), directions.shape[-1]
        old = likelihood.mean(before)
        probabilities = torch.cat([likelihood.mean(f) - old, old.unsqueeze(0)])  # Δp, and p̂
        along = probabilities.movedim(0, 1) @ directions  # (b, m + 1, r)
        change, total = along[:, :m], along[:, :m] + 2 * along[:, m:]
        change = change if weights is None else change * weights[:, None, None]
        crossed = change.permute(1, 2, 0) @ total.movedim(0, 1)
        pairs = scaled.unsqueeze(-1) * directions.unsqueeze(-2)  # (b, C, r, r)
        spread = probabilities[:m].flatten(1) @ pairs.flatten(0, 1).flatten(1)
        inside = spread.reshape(m, r, r) - (crossed + crossed.mT) / 2
        return likelihood.logits(likelihood.logits(inside))
    shape = (*f.shape, f.shape[-1])
    after = likelihood.fisher(f) if fisher else likelihood.precision(y, f)
    first = likelihood.fisher(before) if fisher else likelihood.precision(y, before)
    change = after.expand(shape) - first.expand(shape[1:])
    return torch.einsum("bcr,mbcd,bds->mrs", scaled, change, directions)
