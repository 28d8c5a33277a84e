"""Opening the same module again without data, from what `fit` stored about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ssla.network.any_parameters import AnyParameters, LayerPlan, NormPlan, rest_of
from ssla.network.copying import private_copy
from ssla.network.frozen import CALLS, Frozen, Network, Output
from ssla.network.head import LastLayer
from ssla.network.layout import contiguous_layout, last_layer_layout
from ssla.network.row_scale import RowScale

INTEGERS = {"bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"}


@dataclass(frozen=True, eq=False)
class Opening:
    """How a network was opened.

    A last layer is the weight (and bias) in `names`; other free parameters need a plan.
    """

    linear: bool
    names: tuple[str, ...]  # free parameters
    outputs: int
    call: str
    keep_integers: bool
    bytes_per_row: int
    shapes: Mapping[str, tuple[int, ...]]
    offset: Tensor | None = None
    layers: tuple[LayerPlan, ...] = ()
    others: tuple[str, ...] = ()
    extra_per_row: int = 0
    integers: Mapping[str, str] | None = None  # not known in older files
    head: tuple[str, ...] = ()  # not known in older files
    norms: tuple[
        NormPlan, ...
    ] = ()  # not known in older files: their columns are computed in another way
    row_scale: RowScale | None = None


def describe(network: Network) -> Opening:
    """What `reopen` needs in addition to the module."""
    if not isinstance(network, LastLayer | AnyParameters):
        raise TypeError(f"A {type(network).__name__} cannot be saved.")
    frozen = network.frozen
    call = next(name for name, style in CALLS.items() if style is frozen.call)
    common = (
        network.linear,
        network.layout.names,
        network.outputs,
        call,
        frozen.keep_integers,
        frozen.bytes_per_row,
        frozen.shapes,
    )
    if isinstance(network, LastLayer):
        return Opening(
            *common, offset=network.offset, integers=frozen.integers, row_scale=network.row_scale
        )
    return Opening(
        *common,
        layers=network.layers,
        others=network.others,
        extra_per_row=network.extra_per_row,
        integers=frozen.integers,
        head=network.head,
        norms=network.norms,
    )


def _check(opening: Opening, parameters: Mapping[str, Tensor]) -> None:
    """ValueError unless the plan is possible for these parameters."""
    names, plans = set(opening.names), opening.layers
    missing = [
        name
        for name in (*opening.names, *opening.others, *(plan.weight for plan in plans))
        if name not in parameters
    ]
    if (
        missing
        or not names
        or len(names) < len(opening.names)
        or not names.issuperset(opening.others)
    ):
        raise ValueError(f"the free parameters {opening.names} are not those of the network")
    rows = {len(parameters[name]) for name in opening.head if name in names}
    if not names.issuperset(opening.head) or not rows <= {opening.outputs}:
        raise ValueError("the last layer is not one of the network with a row for each output")
    if not set((opening.integers or {}).values()) <= INTEGERS:
        raise ValueError("the integer inputs have no integer type")
    sizes = (opening.outputs, opening.bytes_per_row, opening.extra_per_row + 1)
    if min(sizes) < 1 or max(sizes) >= 1 << 63:
        raise ValueError("sizes must be positive and fit 64 bits")
    scale = opening.row_scale
    if scale is not None and not (
        scale.strength >= 0 and scale.mean > 0 and scale.least >= 0 and opening.linear
    ):
        raise ValueError("the scale of rows is not one")
    size = sum(parameters[name].numel() for name in names)
    planned = [plan.positions.flatten() for plan in plans] if not opening.linear else []
    covered = sum(parameters[name].numel() for name in opening.others) + sum(
        part.numel() for part in planned
    )
    for part in planned:
        if (
            part.dtype != torch.long
            or not part.numel()
            or int(part.min()) < 0
            or int(part.max()) >= size
        ):
            raise ValueError("the positions of a layer are outside the parameters")
    if (
        planned
        and torch.cat(planned).unique().numel() + size - covered != torch.cat(planned).numel()
    ):
        raise ValueError("the layers do not cover the free parameters once each")
    for plan in plans:
        weight = parameters[plan.weight]
        width = (weight[0].numel() if plan.weight_free else 0) + plan.bias_free
        out = plan.positions.shape[0]
        whole = plan.first == 0 and out == weight.shape[0]
        # A projection of an attention has a third of the rows.
        third = 3 * out == weight.shape[0] and plan.first in (0, out, 2 * out)
        if plan.positions.shape[1:] != (width,) or not (whole or third) or not 0 <= plan.axis < 8:
            raise ValueError(f"the plan of {plan.weight!r} does not fit its shape")
    for norm in opening.norms:
        free = {norm.weight, norm.bias} & set(opening.others)
        if (
            norm.weight not in parameters
            or not free
            or norm.bias not in (None, *opening.others)
            or not 0 <= norm.axis < 8
        ):
            raise ValueError(
                f"the norm with the scale {norm.weight!r} is not one of the network with free "
                "parameters"
            )


def module_of(network: Network) -> nn.Module:
    """The private copy."""
    if not isinstance(network, LastLayer | AnyParameters):
        raise TypeError(f"A {type(network).__name__} has no module.")
    return network.frozen.module


def output_of(network: Network) -> Output:
    """The part of the module's result that is f."""
    return network.frozen.output if isinstance(network, LastLayer | AnyParameters) else None


def output_words(network: Network) -> str:
    """The same for a report: 'logits', 0, a function's name; empty if the result is f."""
    output = output_of(network)
    if output is None:
        return ""
    return (
        getattr(output, "__qualname__", type(output).__name__) if callable(output) else repr(output)
    )


def reopen(model: nn.Module, opening: Opening, output: Output = None) -> Network:
    """The network as it was at fit, on a private copy of the module."""
    module = private_copy(model)
    first = next(p for p in module.parameters() if p.is_floating_point())
    frozen = Frozen(
        module,
        first.dtype,
        first.device,
        CALLS[opening.call],
        opening.keep_integers,
        opening.bytes_per_row,
        opening.shapes,
        opening.integers,
        output,
    )
    parameters = dict(module.named_parameters())
    _check(opening, parameters)
    if not opening.linear:
        layout = contiguous_layout({name: parameters[name].shape for name in opening.names})
        theta = layout.pack(parameters)
        rest = rest_of(module, opening.names)
        plans, others, extra = opening.layers, opening.others, opening.extra_per_row
        head, norms = opening.head, opening.norms
        return AnyParameters(
            frozen,
            layout,
            theta,
            opening.outputs,
            rest,
            plans,
            others,
            extra,
            head=head,
            norms=norms,
        )
    weight = parameters[opening.names[0]]
    bias = opening.names[1] if len(opening.names) == 2 else None
    if weight.dim() != 2 or weight.shape[0] != opening.outputs:
        raise ValueError(
            f"{opening.names[0]!r} is not the weight of a last layer with {opening.outputs} "
            "outputs."
        )
    layout = last_layer_layout(opening.names[0], bias, opening.outputs, weight.shape[1])
    offset = None if opening.offset is None else opening.offset.to(torch.float64)
    theta, scale = layout.pack(parameters), opening.row_scale
    return LastLayer(
        frozen, weight, layout, theta, opening.outputs, bias is not None, offset, row_scale=scale
    )
