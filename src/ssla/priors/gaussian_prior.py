"""Gaussian and flat priors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ssla._checks import finite, in_plain_torch, positive
from ssla.network.layout import Layout
from ssla.priors.prior import Setting, resolve, values_of


@dataclass(frozen=True)
class BoundGaussian:
    """N(mean, diag(1/scale_precision)) over θ; a precision of zero means a flat prior for that
    coordinate.
    """

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

    `precision` and `mean` are each a number for all parameters, a dict by layer ("head") or
    parameter name ("head.weight") whose values are numbers or tensors of the parameter's shape, or
    a tensor (P,) in the order of the parameter names. A dict must cover every free parameter.
    """

    precision: Setting = 1.0
    mean: Setting = 0.0

    @in_plain_torch
    def __post_init__(self) -> None:
        for value in values_of(self.precision):
            positive("prior precision", value, "For no prior use priors.Flat().")
        for value in values_of(self.mean):
            finite("prior mean", value, "Give finite numbers.")

    def bind(self, layout: Layout) -> BoundGaussian:
        return BoundGaussian(
            resolve("mean", self.mean, layout), resolve("precision", self.precision, layout)
        )


def trained_scale(layout: Layout, theta: Tensor, outputs: Tensor | None = None) -> Gaussian:
    """The prior from which one is chosen by the evidence: each layer's weights have precision 1 /
    mean(w²) around zero.

    A bias has the precision of its layer, around its trained value: it holds the targets' offset,
    which is no evidence of scale. outputs: the output of a parameter that changes this output only,
    −1 for others (P,). The parameters of one output are then a group of their own in place of their
    layer, because another unit of a target changes their scale and no other.
    """
    if outputs is None:
        return _trained_scale_of_layers(layout, theta)
    precision, mean = torch.empty_like(theta), torch.zeros_like(theta)
    free = torch.ones_like(theta, dtype=torch.bool)  # of those that have no offset
    groups = torch.empty_like(theta, dtype=torch.long)
    for i, names in enumerate(layout.layers().values()):
        for name in names:
            index = layout.positions[name]
            groups[index] = i
            if _is_offset(name, names):
                free[index], mean[index] = False, theta[index]
    groups = torch.where(outputs < 0, groups, len(layout.layers()) + outputs)
    for group in groups.unique():
        own = groups == group
        precision[own] = _precision_around_zero(theta[own & free])
    named = {name: precision[index] for name, index in layout.positions.items()}
    return Gaussian(
        {
            name: float(v.flatten()[0]) if bool((v == v.flatten()[0]).all()) else v
            for name, v in named.items()
        },
        {
            name: mean[index] if bool(mean[index].any()) else 0.0
            for name, index in layout.positions.items()
        },
    )


def _trained_scale_of_layers(layout: Layout, theta: Tensor) -> Gaussian:
    """The same, one layer after another: with millions of weights each vector (P,) counts."""
    precision: dict[str, float | Tensor] = {}
    mean: dict[str, float | Tensor] = {}
    for names in layout.layers().values():
        own = {name: theta[layout.positions[name]] for name in names}
        weights = [value.flatten() for name, value in own.items() if not _is_offset(name, names)]
        scale = _precision_around_zero(torch.cat(weights))
        for name, value in own.items():
            precision[name] = scale
            mean[name] = value if _is_offset(name, names) and bool(value.any()) else 0.0
    return Gaussian(precision, mean)


def _is_offset(name: str, layer: tuple[str, ...]) -> bool:
    """Whether a parameter is the bias of a layer that has other parameters."""
    return name.rpartition(".")[2] == "bias" and len(layer) > 1


def _precision_around_zero(weights: Tensor) -> float:
    """1 / mean(w²), in any unit of the weights; 1 where there is no weight that is not zero."""
    square = float((weights**2).mean()) if weights.numel() else 0.0
    smallest = torch.finfo(torch.float64).tiny  # the inverse of a smaller number is infinite
    return 1 / min(square, 1 / smallest) if square >= smallest else 1.0


@dataclass(frozen=True)
class Flat:
    """π(θ) ∝ 1: maximum likelihood. log π is 0, so the evidence is undefined up to a constant."""

    def bind(self, layout: Layout) -> BoundGaussian:
        zero = torch.zeros(layout.size, dtype=torch.float64)
        return BoundGaussian(zero, zero)
