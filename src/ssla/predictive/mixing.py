"""Mixtures: one predictive from several models of the same target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ssla._checks import finite, in_plain_torch
from ssla.data import as_tensor
from ssla.predictive.mixture_laws import (
    ClassMixtureLaw,
    MixtureLaw,
    ScalarMixtureLaw,
    VectorMixtureLaw,
)
from ssla.predictive.predictive import FLAGS, Diagnostics, Predictive, widest

LAWS: dict[str, type[MixtureLaw]] = {
    "scalar": ScalarMixtureLaw,
    "count": ScalarMixtureLaw,
    "vector": VectorMixtureLaw,
    "class": ClassMixtureLaw,
}


@in_plain_torch
def mixture(predictives: Sequence[Predictive], weights: Any = None) -> Predictive:
    """p(y) = Σ w_m p_m(y): the predictive of several models at the same inputs, for example an
    ensemble.

    All members must describe the same kind of target (a number, D numbers, counts, classes) at the
    same number of inputs. weights: one number ≥ 0 for each member, in any unit; equal if not given.
    Or (M, N): one for each member and input. Members without weight are left out.

    >>> ssla.mixture([post.predict(x) for post in posteriors]).interval(0.95)      # doctest: +SKIP
    """
    if isinstance(predictives, Predictive) or not isinstance(predictives, Sequence):
        raise TypeError(
            "mixture needs a list of predictives, as predict returns them, but got "
            f"{type(predictives).__name__}."
        )
    for member in predictives:
        if not isinstance(member, Predictive):
            raise TypeError(
                "mixture needs predictives, as predict returns them, but got a "
                f"{type(member).__name__}."
            )
    if not predictives:
        raise ValueError("mixture needs at least one predictive, but the list is empty.")
    if any(member.differentiable for member in predictives):
        raise ValueError(
            "Mixtures carry no gradients, but a member was made with differentiable=True. Mix the "
            "answers yourself (means, probabilities), or predict without differentiable=True."
        )
    _check_alike(predictives)
    w = _checked_weights(weights, len(predictives), predictives[0].law.rows)
    used = (w > 0).reshape(len(w), -1).any(1)
    members = [
        replace(p, like=p.like.double())
        for p, one in zip(predictives, used.tolist(), strict=True)
        if one
    ]
    law = LAWS[predictives[0].kind](tuple(member.law for member in members), w[used])
    diagnostics = replace(
        _diagnostics(members), mixed=law if isinstance(law, ScalarMixtureLaw) else None
    )
    return Predictive(law, widest(predictives), diagnostics, tuple(members))


def _diagnostics(members: Sequence[Predictive]) -> Diagnostics:
    """A row is flagged where any member's is. Different rungs or conventions are all named."""
    parts = [member.diagnostics for member in members]
    fallback, unconverged, inaccurate = (
        torch.stack([getattr(part, flag) for part in parts]).any(0) for flag in FLAGS
    )
    names, conventions = (
        ", ".join(dict.fromkeys(getattr(part, what) for part in parts))
        for what in ("refit", "convention")
    )
    found = Diagnostics(names, fallback, unconverged, inaccurate, conventions)
    return found.with_extreme(torch.stack([part.extreme_rows for part in parts]).any(0))


def _check_alike(predictives: Sequence[Predictive]) -> None:
    kinds = [member.kind for member in predictives]
    if len(set(kinds)) > 1:
        raise ValueError(
            "Only predictives of the same kind of target can be mixed, but these are "
            f"{', '.join(kinds)}."
        )
    if kinds[0] == "circular":
        raise TypeError(
            "Predictives of angles cannot be mixed: the mean of a mixture of angles is not that of "
            "their means."
        )
    shapes = {
        tuple((m.law.probs if kinds[0] == "class" else m.law.mean).shape) for m in predictives
    }
    if len(shapes) > 1:
        raise ValueError(
            "The predictives must be at the same inputs, but their shapes differ: "
            f"{sorted(shapes)}."
        )


def _checked_weights(weights: Any, count: int, rows: int) -> Tensor:
    if weights is None:
        return torch.full((count,), 1 / count, dtype=torch.float64)
    w = as_tensor(weights).to("cpu", torch.float64)
    if w.shape not in ((count,), (count, rows)):
        raise ValueError(
            f"weights must be one number for each of the {count} predictives, or ({count}, {rows}) "
            f"with one for each input too, but have shape {tuple(w.shape)}."
        )
    finite("weights", w, "Give finite numbers.")
    if bool((w < 0).any()) or bool((w.sum(0) <= 0).any()):
        raise ValueError(
            f"weights must not be negative, and one must be positive, but they are {w.tolist()}."
        )
    return w / w.sum(0)
