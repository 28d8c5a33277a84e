"""Mixtures: one predictive from several models of the same target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ssla._checks import check_finite, in_plain_torch
from ssla.data import as_tensor
from ssla.predictive.mixture_laws import (
    ClassMixtureLaw,
    MixtureLaw,
    ScalarMixtureLaw,
    VectorMixtureLaw,
)
from ssla.predictive.predictive import FLAGS, Diagnostics, Predictive, choose_widest_like

LAWS: dict[str, type[MixtureLaw]] = {
    "scalar": ScalarMixtureLaw,
    "count": ScalarMixtureLaw,
    "vector": VectorMixtureLaw,
    "class": ClassMixtureLaw,
}


@in_plain_torch
def mixture(predictives: Sequence[Predictive], weights: Any = None) -> Predictive:
    """Return the mixture p(y) = Σ w_m p_m(y) of predictives at the same inputs.

    They may be those of several models, for example of an ensemble. All members must describe the
    same kind of target (a number, D numbers, counts, classes) at the same number of inputs.
    weights: M numbers ≥ 0, one for each member, or (M, N), one for each member and input. They are
    divided by their sum; None: equal weights. Members without weight are left out.

    Raises TypeError for an argument that is not a list of predictives, and for predictives of
    angles. Raises ValueError for an empty list, for a member with differentiable=True, for members
    with different kinds of target or different inputs, and for weights of another shape or that are
    not finite, are negative or are all zero.

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
    w = _normalise_weights(weights, len(predictives), predictives[0].law.rows)
    has_weight = (w > 0).reshape(len(w), -1).any(1)

    # Members answer in float64, so that averages of them are rounded only at the end.
    members = [
        replace(member, like=member.like.double())
        for member, is_used in zip(predictives, has_weight.tolist(), strict=True)
        if is_used
    ]
    law = LAWS[predictives[0].kind](tuple(member.law for member in members), w[has_weight])
    diagnostics = _merge_diagnostics(members)

    # `Diagnostics.off_centre` compares the mean of the mixture with its median, when it is asked.
    if law.has_median:
        diagnostics = replace(diagnostics, mixed=law)
    return Predictive(law, choose_widest_like(predictives), diagnostics, tuple(members))


def _merge_diagnostics(members: Sequence[Predictive]) -> Diagnostics:
    """Return the diagnostics of a mixture of these members.

    A row is flagged if any member flags it. The rungs and conventions of all members are named,
    each once.
    """
    flags = [member.diagnostics for member in members]
    fallback, unconverged, inaccurate = (
        torch.stack([getattr(diagnostics, name) for diagnostics in flags]).any(0) for name in FLAGS
    )
    rungs = ", ".join(dict.fromkeys(diagnostics.refit for diagnostics in flags))
    conventions = ", ".join(dict.fromkeys(diagnostics.convention for diagnostics in flags))
    merged = Diagnostics(rungs, fallback, unconverged, inaccurate, conventions)
    return merged.with_extreme(
        torch.stack([diagnostics.extreme_rows for diagnostics in flags]).any(0)
    )


def _check_alike(predictives: Sequence[Predictive]) -> None:
    """Raise ValueError unless the predictives are of one kind of target and of the same inputs.

    Of the inputs, only the number is compared. Raises TypeError for angles.
    """
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


def _normalise_weights(weights: Any, count: int, rows: int) -> Tensor:
    """Return the weights of `count` members as (count,) or (count, rows), with sum 1 over members.

    None gives equal weights. Raises ValueError for other shapes, and for weights that are not
    finite, are negative or are all zero.
    """
    if weights is None:
        return torch.full((count,), 1 / count, dtype=torch.float64)
    w = as_tensor(weights).to("cpu", torch.float64)
    if w.shape not in ((count,), (count, rows)):
        raise ValueError(
            f"weights must be one number for each of the {count} predictives, or ({count}, {rows}) "
            f"with one for each input too, but have shape {tuple(w.shape)}."
        )
    check_finite("weights", w, "Give finite numbers.")
    if bool((w < 0).any()) or bool((w.sum(0) <= 0).any()):
        raise ValueError(
            f"weights must not be negative, and one must be positive, but they are {w.tolist()}."
        )
    return w / w.sum(0)
