"""Mixtures: one predictive from several models of the same target.

    p(y) = Σ_m w_m p_m(y)

Densities, probabilities and distribution functions average; quantiles and regions do not and are searched for. By the law of
total variance the members' disagreement, Var_m E_m[y], is added to the epistemic part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ssla._checks import finite
from ssla.data import as_tensor
from ssla.predictive.predictive import Diagnostics, Predictive, kind_of
from ssla.refit.increments import Increments


@dataclass(frozen=True, eq=False)
class Blend:
    """Members of the same kind and rows, in float64, with weights (M,) or (M, N) that sum to one over the members."""

    members: tuple[Any, ...]
    weights: Tensor
    like: Tensor  # answers are given in its dtype and on its device

    def out(self, value: Tensor) -> Tensor:
        return value.to(self.like)

    @property
    def rows(self) -> int:
        return int(self.members[0].mass.shape[0])

    def each(self, ask: Callable[[Any], Tensor]) -> Tensor:
        """One answer a member, stacked in front: (M, …)."""
        return torch.stack([ask(member).to("cpu", torch.float64) for member in self.members])

    def average(self, ask: Callable[[Any], Tensor]) -> Tensor:
        """Σ w_m a_m."""
        return self.weigh(self.each(ask))

    def weigh(self, values: Tensor) -> Tensor:
        """(M, N, …) -> (N, …)."""
        return (self._beside(values) * values).sum(0)

    def _beside(self, values: Tensor) -> Tensor:
        """The weights in a shape that goes with values (M, N, …)."""
        by_row = self.weights if self.weights.dim() == 2 else self.weights[:, None]
        return by_row.reshape(*by_row.shape, *[1] * (values.dim() - 2))

    def log_average(self, ask: Callable[[Any], Tensor]) -> Tensor:
        """log Σ w_m exp(a_m)."""
        values = self.each(ask)
        return (values + self._beside(values).log()).logsumexp(0)

    @property
    def mean(self) -> Tensor:
        return self.average(lambda m: m.mean)

    @property
    def disagreement(self) -> Tensor:
        """Var_m E_m[y], of the mean's shape."""
        means = self.each(lambda m: m.mean)
        return self.weigh((means - self.mean) ** 2)

    @property
    def epistemic(self) -> Tensor:
        return self.average(lambda m: m.epistemic) + self.disagreement

    @property
    def aleatoric(self) -> Tensor:
        return self.average(lambda m: m.aleatoric)

    @property
    def mass(self) -> Tensor:
        """The average of the members' integrals before they were normalised."""
        return self.average(lambda m: m.mass)

    @property
    def diagnostics(self) -> Diagnostics:
        """A row is flagged where any member's is. Different rungs or conventions are all named."""
        parts = [member.diagnostics for member in self.members]

        def any_of(flag: str) -> Tensor:
            return torch.stack([getattr(part, flag) for part in parts]).any(0)

        names, conventions = (", ".join(dict.fromkeys(getattr(part, what) for part in parts)) for what in ("refit", "convention"))
        return Diagnostics(names, any_of("fallback"), any_of("unconverged"), any_of("inaccurate"), conventions)

    def choose(self, n: int, draw: Callable[[Any], Tensor], generator: torch.Generator | None) -> Tensor:
        """n draws a row, each from a member taken with its weight: (n, N, …)."""
        if self.weights.dim() == 2:
            picks = torch.multinomial(self.weights.mT, n, replacement=True, generator=generator).mT
        else:
            count = n * self.rows
            picks = torch.multinomial(self.weights, max(count, 1), replacement=True, generator=generator)  # not less than one
            picks = picks[:count].reshape(n, self.rows)
        draws = torch.stack([draw(member) for member in self.members])  # (M, n, N, …)
        index = picks.reshape(1, n, self.rows, *[1] * (draws.dim() - 3)).expand(1, *draws.shape[1:])
        return draws.gather(0, index.to(draws.device)).squeeze(0)

    def increments(self, y: Any) -> Increments:
        """Of the only member with any weight; several have increments each, but not together."""
        if len(self.members) == 1:
            parts: Increments = self.members[0].increments(y)
            return parts
        raise TypeError(
            "The log of a mixture is not a sum of increments. Ask its members one by one: "
            "[member.increments(y) for member in predictive.members]."
        )


def mixture(predictives: Sequence[Predictive], weights: Any = None) -> Predictive:
    """p(y) = Σ w_m p_m(y): the predictive of several models at the same inputs, for example an ensemble.

    All members must describe the same kind of target (a number, D numbers, counts, classes) at the same number of inputs.
    weights: one number ≥ 0 for each member, in any unit; equal if not given. Or (M, N): one for each member and input. Members
    without weight are left out.

    >>> ssla.mixture([post.predict(x) for post in posteriors]).interval(0.95)      # doctest: +SKIP
    """
    from ssla.predictive.mixture_classes import ClassMixture
    from ssla.predictive.mixture_scalar import ScalarMixture
    from ssla.predictive.mixture_vector import VectorMixture

    if isinstance(predictives, Predictive) or not isinstance(predictives, Sequence):
        raise TypeError(f"mixture needs a list of predictives, as predict returns them, but got {type(predictives).__name__}.")
    for member in predictives:
        if not isinstance(member, Predictive):
            raise TypeError(f"mixture needs predictives, as predict returns them, but got a {type(member).__name__}.")
    if not predictives:
        raise ValueError("mixture needs at least one predictive, but the list is empty.")
    _check_alike(predictives)
    w = _checked_weights(weights, len(predictives), int(predictives[0].mass.shape[0]))
    used = (w > 0).reshape(len(w), -1).any(1)
    like = max((member.mass for member in predictives), key=lambda mass: mass.dtype.itemsize).new_empty(0)
    members = tuple(in_double(member) for member, one in zip(predictives, used.tolist(), strict=True) if one)
    blend = Blend(members, w[used], like)
    kind = kind_of(predictives[0])
    if kind == "class":
        return ClassMixture(blend)
    return VectorMixture(blend) if kind == "vector" else ScalarMixture(blend, kind)


def _check_alike(predictives: Sequence[Predictive]) -> None:
    kinds = [kind_of(member) for member in predictives]
    if len(set(kinds)) > 1:
        raise ValueError(f"Only predictives of the same kind of target can be mixed, but these are {', '.join(kinds)}.")
    if kinds[0] == "circular":
        raise TypeError("Predictives of angles cannot be mixed: the mean of a mixture of angles is not that of their means.")
    shapes = {tuple(m.probs.shape if kinds[0] == "class" else m.mean.shape) for m in predictives}  # type: ignore[attr-defined]
    if len(shapes) > 1:
        raise ValueError(f"The predictives must be at the same inputs, but their shapes differ: {sorted(shapes)}.")


def _checked_weights(weights: Any, count: int, rows: int) -> Tensor:
    if weights is None:
        return torch.full((count,), 1 / count, dtype=torch.float64)
    w = as_tensor(weights).to("cpu", torch.float64)
    if w.shape not in ((count,), (count, rows)):
        raise ValueError(
            f"weights must be one number for each of the {count} predictives, or ({count}, {rows}) with one for each input "
            f"too, but have shape {tuple(w.shape)}."
        )
    finite("weights", w, "Give finite numbers.")
    if bool((w < 0).any()) or bool((w.sum(0) <= 0).any()):
        raise ValueError(f"weights must not be negative, and one must be positive, but they are {w.tolist()}.")
    return w / w.sum(0)


def in_double(member: Any) -> Any:
    """The same predictive, answering in float64: averages of rounded probabilities would lose the tails."""
    if hasattr(member, "blend"):
        return replace(member, blend=replace(member.blend, like=member.blend.like.double()))
    if hasattr(member, "base"):
        return replace(member, base=in_double(member.base))
    log_density = getattr(member, "log_density", None)
    if is_dataclass(member) and is_dataclass(log_density) and hasattr(log_density, "like"):
        return replace(member, log_density=_answeringin_double(log_density))  # type: ignore[type-var]
    return member


def _answeringin_double(log_density: Any) -> Any:
    """A refit of weights answers in the dtype of the rung below, which it holds."""
    for below in ("weights", "output"):
        if hasattr(log_density, below):
            return replace(log_density, **{below: _answeringin_double(getattr(log_density, below))})
    return replace(log_density, like=log_density.like.double())
