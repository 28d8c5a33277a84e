"""What is believed about θ before the data: log density, gradient, curvature.

A prior is written in the user's terms (a number, layer names, tensors) and bound to a layout once;
the bound prior speaks of flat θ only. Any twice-differentiable log density fits the interface:
`precision` returns −∇² log π as a diagonal (P,) or a full matrix (P, P).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ssla._checks import finite, positive, unknown_name
from ssla.parameters import Layout

Setting = float | Tensor | Mapping[str, "float | Tensor"]
"""One number, a tensor (P,) in the order of the parameter names, or a dict by layer or parameter name."""


class BoundPrior(Protocol):
    """π over flat θ (P,)."""

    def log_prob(self, theta: Tensor) -> Tensor:
        """log π(θ), a scalar."""
        ...

    def gradient(self, theta: Tensor) -> Tensor:
        """∇ log π (P,)."""
        ...

    def precision(self, theta: Tensor) -> Tensor:
        """−∇² log π: (P,) if diagonal, else (P, P)."""
        ...


class Prior(Protocol):
    """What the user writes."""

    def bind(self, layout: Layout) -> BoundPrior: ...


@dataclass(frozen=True)
class BoundGaussian:
    """N(mean, diag(1/scale_precision)) over θ; a zero precision leaves that coordinate flat."""

    mean: Tensor
    scale_precision: Tensor

    def log_prob(self, theta: Tensor) -> Tensor:
        tau = self.scale_precision
        proper = tau > 0
        constant = 0.5 * (tau[proper].log() - math.log(2 * math.pi)).sum()
        return constant - 0.5 * (tau * (theta - self.mean) ** 2).sum()

    def gradient(self, theta: Tensor) -> Tensor:
        return -self.scale_precision * (theta - self.mean)

    def precision(self, theta: Tensor) -> Tensor:
        return self.scale_precision


@dataclass(frozen=True, eq=False)
class Gaussian:
    """θ ~ N(mean, 1/precision), independent.

    `precision` and `mean` are each a number for all parameters, a dict by layer ("head") or parameter
    name ("head.weight") whose values are numbers or tensors of the parameter's shape, or a tensor (P,) in
    the order of the parameter names. A dict must cover every free parameter.
    """

    precision: Setting = 1.0
    mean: Setting = 0.0

    def __post_init__(self) -> None:
        for value in _values(self.precision):
            positive("prior precision", value, "For no prior use priors.Flat().")
        for value in _values(self.mean):
            finite("prior mean", value, "Give finite numbers.")

    def bind(self, layout: Layout) -> BoundGaussian:
        return BoundGaussian(_resolve("mean", self.mean, layout), _resolve("precision", self.precision, layout))


@dataclass(frozen=True)
class Flat:
    """π(θ) ∝ 1: maximum likelihood. log π is 0, so the evidence is undefined up to a constant."""

    def bind(self, layout: Layout) -> BoundGaussian:
        zero = torch.zeros(layout.size, dtype=torch.float64)
        return BoundGaussian(zero, zero)


def _values(setting: Setting) -> list[Tensor]:
    items = setting.values() if isinstance(setting, Mapping) else [setting]
    return [torch.as_tensor(item, dtype=torch.float64) for item in items]


def _resolve(what: str, setting: Setting, layout: Layout) -> Tensor:
    """A setting -> (P,) in the order of θ."""
    if isinstance(setting, Mapping):
        return _resolve_names(what, setting, layout)
    value = torch.as_tensor(setting, dtype=torch.float64)
    if value.dim() == 0:
        return value.expand(layout.size).clone()
    if value.numel() != layout.size:
        raise ValueError(
            f"prior {what} must be one number, a tensor with one value for each of the {layout.size} free parameters, or "
            f"a dict by layer or parameter name, but has {value.numel()} values."
        )
    return layout.from_named_order(value.flatten())


def _resolve_names(what: str, setting: Mapping[str, float | Tensor], layout: Layout) -> Tensor:
    layers = layout.layers()
    theta = torch.full((layout.size,), math.nan, dtype=torch.float64)
    for key in sorted(setting, key=lambda name: name in layout.positions):  # a parameter overrules its layer
        names = (key,) if key in layout.positions else layers.get(key)
        if names is None:
            raise ValueError(unknown_name("layer or parameter in the prior", key, [*layers, *layout.names]))
        value = torch.as_tensor(setting[key], dtype=torch.float64)
        for name in names:
            index = layout.positions[name]
            try:
                theta[index] = value.expand(index.shape)
            except RuntimeError:
                raise ValueError(
                    f"prior {what} for {name!r} must be a number or a tensor of shape {tuple(index.shape)}, "
                    f"but has shape {tuple(value.shape)}."
                ) from None
    missing = [name for name, index in layout.positions.items() if bool(theta[index].isnan().any())]
    if missing:
        raise ValueError(f"prior {what} has no value for {', '.join(missing)}. Add those names, or their layers, to the dict.")
    return theta
