"""Gaussian and flat priors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ssla._checks import check_finite, check_positive, in_plain_torch
from ssla.network.layout import Layout
from ssla.priors.prior import Setting, convert_setting_to_tensors, resolve_setting


@dataclass(frozen=True)
class BoundGaussian:
    """The prior N(mean, diag(1/scale_precision)) over flat θ.

    A precision of zero means a flat prior for that coordinate.
    """

    mean: Tensor  # (P,)
    scale_precision: Tensor  # the precision of each coordinate (P,)

    def log_prob(self, theta: Tensor) -> Tensor:
        """Return log π(θ), a scalar, for θ (P,); coordinates with a flat prior add nothing."""
        tau = self.scale_precision
        proper = tau > 0
        constant = 0.5 * (tau[proper].log() - math.log(2 * math.pi)).sum()
        return constant - 0.5 * (tau * (theta - self.mean) ** 2).sum()

    def gradient(self, theta: Tensor) -> Tensor:
        """Return ∇ log π (P,) at θ (P,)."""
        return -self.scale_precision * (theta - self.mean)

    def precision(self, theta: Tensor) -> Tensor:
        """Return the diagonal of −∇² log π (P,), which is the same for every θ.

        The argument is part of the protocol of bound priors. Callers must not change the result.
        """
        return self.scale_precision


@dataclass(frozen=True, eq=False)
class Gaussian:
    """A prior of independent θ ~ N(mean, 1/precision).

    `precision` and `mean` are each a number for all parameters, a dict by layer ("head") or
    parameter name ("head.weight") whose values are numbers or tensors of the parameter's shape, or
    a tensor (P,) in the order of the parameter names. A dict must cover every free parameter.
    """

    precision: Setting = 1.0
    mean: Setting = 0.0

    @in_plain_torch
    def __post_init__(self) -> None:
        """Raise ValueError if a precision is not positive or a mean is not finite."""
        for value in convert_setting_to_tensors(self.precision):
            check_positive("prior precision", value, "For no prior use priors.Flat().")
        for value in convert_setting_to_tensors(self.mean):
            check_finite("prior mean", value, "Give finite numbers.")

    def bind(self, layout: Layout) -> BoundGaussian:
        """Return the prior over flat θ; raise ValueError if a setting does not fit the layout."""
        return BoundGaussian(
            resolve_setting("mean", self.mean, layout),
            resolve_setting("precision", self.precision, layout),
        )


def trained_scale(layout: Layout, theta: Tensor, outputs: Tensor | None = None) -> Gaussian:
    """Return the prior from which a search by the evidence starts, for the trained θ (P,).

    Each layer's weights w have the precision 1 / mean(w²) around zero. A bias has the precision of
    its layer, around its trained value: it holds the targets' offset, which says nothing about the
    scale of the weights.

    outputs: (P,), the number of the output that each parameter changes, and −1 for a parameter that
    changes several; None: every layer is a group with one precision. With `outputs`, the parameters
    of one output are a group in place of their layer, because another unit of its target changes
    the scale of these parameters alone.
    """
    if outputs is None:
        return _make_trained_scale_of_layers(layout, theta)
    precision = torch.empty_like(theta)
    mean = torch.zeros_like(theta)
    is_weight = torch.ones_like(theta, dtype=torch.bool)
    groups = torch.empty_like(theta, dtype=torch.long)
    for layer, names in enumerate(layout.names_by_layer.values()):
        for name in names:
            index = layout.positions[name]
            groups[index] = layer
            if _is_offset(name, names):
                is_weight[index] = False
                mean[index] = theta[index]

    groups = torch.where(outputs < 0, groups, len(layout.names_by_layer) + outputs)
    for group in groups.unique():
        members = groups == group
        precision[members] = _compute_precision_around_zero(theta[members & is_weight])
    precisions = {name: _as_number(value) for name, value in layout.unpack(precision).items()}

    # Means of zero are written as a number, so that the prior prints well.
    means = {
        name: value if bool(value.any()) else 0.0 for name, value in layout.unpack(mean).items()
    }
    return Gaussian(precisions, means)


def _as_number(value: Tensor) -> float | Tensor:
    """Return a tensor of equal values as one number, and any other tensor unchanged."""
    first = value.flatten()[0]
    return float(first) if bool((value == first).all()) else value


def _make_trained_scale_of_layers(layout: Layout, theta: Tensor) -> Gaussian:
    """Return the prior of `trained_scale` without outputs, for θ (P,).

    Layers are taken one after another: with millions of weights, each vector (P,) needs much
    memory.
    """
    precision: dict[str, float | Tensor] = {}
    mean: dict[str, float | Tensor] = {}
    for names in layout.names_by_layer.values():
        trained = {name: theta[layout.positions[name]] for name in names}
        weights = [
            value.flatten() for name, value in trained.items() if not _is_offset(name, names)
        ]
        layer_precision = _compute_precision_around_zero(torch.cat(weights))
        for name, value in trained.items():
            precision[name] = layer_precision
            mean[name] = value if _is_offset(name, names) and bool(value.any()) else 0.0
    return Gaussian(precision, mean)


def _is_offset(name: str, layer: tuple[str, ...]) -> bool:
    """Return whether a parameter is the bias of a layer that has other parameters."""
    return name.rpartition(".")[2] == "bias" and len(layer) > 1


def _compute_precision_around_zero(weights: Tensor) -> float:
    """Return 1 / mean(w²) of weights w (n,); 1 where all weights are zero or there are none.

    The result is at most 1 / tiny and at least tiny, with tiny the smallest normal float64.
    """
    mean_square = float((weights**2).mean()) if weights.numel() else 0.0
    smallest = torch.finfo(torch.float64).tiny  # the inverse of a smaller number is infinite
    return 1 / min(mean_square, 1 / smallest) if mean_square >= smallest else 1.0


@dataclass(frozen=True)
class Flat:
    """The flat prior π(θ) ∝ 1: maximum likelihood.

    log π is 0, so the evidence is undefined up to a constant.
    """

    def bind(self, layout: Layout) -> BoundGaussian:
        """Return the prior over flat θ, as a Gaussian of precision zero."""
        zero = torch.zeros(layout.size, dtype=torch.float64)
        return BoundGaussian(zero, zero)
