"""Opening the same module again without data, from what `fit` stored about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ssla.network.any_parameters import AnyParameters, LayerPlan, NormPlan, collect_fixed_tensors
from ssla.network.copying import copy_privately
from ssla.network.frozen import CALLS, Frozen, Output
from ssla.network.head import LastLayer
from ssla.network.layout import make_contiguous_layout, make_last_layer_layout
from ssla.network.network import Network
from ssla.network.row_scale import RowScale

MOST_DIMENSIONS = 8  # of an input, in a file; a guess
# Names of dtypes that files may hold for integer inputs.
INTEGERS = {"bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"}


@dataclass(frozen=True, eq=False)
class Opening:
    """What `fit` stores about how a network was opened.

    A last layer is the weight (and bias) in `names`; other free parameters need a plan. The names
    of the fields are those in files.
    """

    linear: bool  # whether the network is a LastLayer
    names: tuple[str, ...]  # free parameters
    outputs: int
    call: str  # a key of `CALLS`
    keep_integers: bool
    bytes_per_row: int
    shapes: Mapping[str, tuple[int, ...]]
    offset: Tensor | None = None
    layers: tuple[LayerPlan, ...] = ()
    others: tuple[str, ...] = ()  # free parameters without a Kronecker form
    extra_per_row: int = 0
    integers: Mapping[str, str] | None = None  # not known in older files
    head: tuple[str, ...] = ()  # not known in older files
    # Not known in older files: their columns are computed in another way.
    norms: tuple[NormPlan, ...] = ()
    row_scale: RowScale | None = None


def describe_opening(network: Network) -> Opening:
    """Return what `reopen_network` needs in addition to the module.

    Raises TypeError for a network that was not opened from a module.
    """
    if not isinstance(network, LastLayer | AnyParameters):
        raise TypeError(f"A {type(network).__name__} cannot be saved.")
    frozen = network.frozen
    opening = Opening(
        linear=network.linear,
        names=network.layout.names,
        outputs=network.outputs,
        call=next(name for name, call in CALLS.items() if call is frozen.call_module),
        keep_integers=frozen.keep_integers,
        bytes_per_row=frozen.bytes_per_row,
        shapes=frozen.shapes,
        integers=frozen.integers,
    )
    if isinstance(network, LastLayer):
        return replace(opening, offset=network.offset, row_scale=network.row_scale)

    return replace(
        opening,
        layers=network.layers,
        others=network.without_kronecker,
        extra_per_row=network.extra_per_row,
        head=network.head,
        norms=network.norms,
    )


def _check_opening(opening: Opening, parameters: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the opening is possible for a module with these parameters, by name.

    The opening may come from a forged file, so that nothing in it is certain but the types of its
    fields.
    """
    names = set(opening.names)
    weights = (plan.weight for plan in opening.layers)
    unknown = [
        name for name in (*opening.names, *opening.others, *weights) if name not in parameters
    ]
    repeated = len(names) < len(opening.names)
    if unknown or not names or repeated or not names.issuperset(opening.others):
        raise ValueError(f"the free parameters {opening.names} are not those of the network")
    rows = {len(parameters[name]) for name in opening.head if name in names}
    if not names.issuperset(opening.head) or not rows <= {opening.outputs}:
        raise ValueError("the last layer is not one of the network with a row for each output")
    if not set((opening.integers or {}).values()) <= INTEGERS:
        raise ValueError("the integer inputs have no integer type")

    # The first two are at least 1, and the third at least 0.
    sizes = (opening.outputs, opening.bytes_per_row, opening.extra_per_row + 1)
    if min(sizes) < 1 or max(sizes) >= 1 << 63:
        raise ValueError("sizes must be positive and fit 64 bits")
    scale = opening.row_scale
    if scale is not None and not (
        scale.strength >= 0 and scale.mean > 0 and scale.least >= 0 and opening.linear
    ):
        raise ValueError("the scale of rows is not one")
    _check_positions(opening, parameters)
    _check_layers(opening, parameters)
    _check_norms(opening, parameters)


def _check_positions(opening: Opening, parameters: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless planned layers and other parameters cover each entry of θ once."""
    if opening.linear or not opening.layers:
        return
    size = sum(parameters[name].numel() for name in set(opening.names))
    for plan in opening.layers:
        if (
            plan.positions.dtype != torch.long
            or not plan.positions.numel()
            or int(plan.positions.min()) < 0
            or int(plan.positions.max()) >= size
        ):
            raise ValueError("the positions of a layer are outside the parameters")

    positions = torch.cat([plan.positions.flatten() for plan in opening.layers])
    elsewhere = sum(parameters[name].numel() for name in opening.others)
    not_covered = size - elsewhere - positions.numel()

    # A repeated position would make up for a missing one, so distinct positions are counted too.
    if positions.unique().numel() + not_covered != positions.numel():
        raise ValueError("the layers do not cover the free parameters once each")


def _check_layers(opening: Opening, parameters: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the plan of each layer fits the shape of its weight."""
    for plan in opening.layers:
        weight = parameters[plan.weight]
        width = (weight[0].numel() if plan.weight_free else 0) + plan.bias_free
        out = plan.positions.shape[0]
        has_all_rows = plan.first == 0 and out == weight.shape[0]
        # A projection of an attention has a third of the rows.
        has_third = 3 * out == weight.shape[0] and plan.first in (0, out, 2 * out)
        fits = plan.positions.shape[1:] == (width,) and (has_all_rows or has_third)
        if not fits or not 0 <= plan.axis < MOST_DIMENSIONS:
            raise ValueError(f"the plan of {plan.weight!r} does not fit its shape")


def _check_norms(opening: Opening, parameters: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless each norm is one of the module and has free parameters."""
    for norm in opening.norms:
        free = {norm.weight, norm.bias} & set(opening.others)
        if (
            norm.weight not in parameters
            or not free
            or norm.bias not in (None, *opening.others)
            or not 0 <= norm.axis < MOST_DIMENSIONS
        ):
            raise ValueError(
                f"the norm with the scale {norm.weight!r} is not one of the network with free "
                "parameters"
            )


def get_module(network: Network) -> nn.Module:
    """Return the private copy of the module; raise TypeError for a network without a module."""
    if not isinstance(network, LastLayer | AnyParameters):
        raise TypeError(f"A {type(network).__name__} has no module.")
    return network.frozen.module


def get_output_argument(network: Network) -> Output:
    """Return the argument output= with which a network was opened.

    The argument names the part of the module's result that is f; None if the whole result is f, and
    for a network without a module.
    """
    return network.frozen.output if isinstance(network, LastLayer | AnyParameters) else None


def describe_output_argument(network: Network) -> str:
    """Return the argument output= as text for a report: 'logits', 0, or a function's name.

    The text is empty without this argument.
    """
    output = get_output_argument(network)
    if output is None:
        return ""
    if callable(output):
        return getattr(output, "__qualname__", type(output).__name__)
    return repr(output)


def reopen_network(model: nn.Module, opening: Opening, output: Output = None) -> Network:
    """Return the network as it was at fit, on a private copy of the module.

    opening: from `describe_opening`. output: the part of the module's result that is f, as at fit.
    Raises ValueError if the opening does not fit the module, and KeyError for an unknown way to
    call it.
    """
    module = copy_privately(model)
    first = next(p for p in module.parameters() if p.is_floating_point())
    frozen = Frozen(
        module,
        first.dtype,
        first.device,
        call_module=CALLS[opening.call],
        keep_integers=opening.keep_integers,
        bytes_per_row=opening.bytes_per_row,
        shapes=opening.shapes,
        integers=opening.integers,
        output=output,
    )
    parameters = dict(module.named_parameters())
    _check_opening(opening, parameters)
    if opening.linear:
        return _reopen_last_layer(frozen, opening, parameters)
    layout = make_contiguous_layout({name: parameters[name].shape for name in opening.names})
    return AnyParameters(
        frozen,
        layout,
        layout.pack(parameters),
        outputs=opening.outputs,
        fixed_tensors=collect_fixed_tensors(module, opening.names),
        layers=opening.layers,
        without_kronecker=opening.others,
        extra_per_row=opening.extra_per_row,
        head=opening.head,
        norms=opening.norms,
    )


def _reopen_last_layer(
    frozen: Frozen, opening: Opening, parameters: Mapping[str, nn.Parameter]
) -> LastLayer:
    """Return the last layer as it was at fit, from the module's parameters by name.

    Raises ValueError if its weight has another shape.
    """
    weight = parameters[opening.names[0]]
    bias = opening.names[1] if len(opening.names) == 2 else None
    if weight.dim() != 2 or weight.shape[0] != opening.outputs:
        raise ValueError(
            f"{opening.names[0]!r} is not the weight of a last layer with {opening.outputs} "
            "outputs."
        )
    layout = make_last_layer_layout(opening.names[0], bias, opening.outputs, weight.shape[1])
    return LastLayer(
        frozen,
        weight,
        layout,
        layout.pack(parameters),
        outputs=opening.outputs,
        fold_bias=bias is not None,
        offset=None if opening.offset is None else opening.offset.to(torch.float64),
        row_scale=opening.row_scale,
    )
