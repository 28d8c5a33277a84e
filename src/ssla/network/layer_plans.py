"""Plans of a module's layers: which free parameters have a Kronecker form, and their positions in
θ.

A plan is made from the calls of one forward pass (`ssla.network.watch.Probe`) and is validated
against plain backpropagation on a few rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssla.data import Inputs, map_inputs, row_count, take_rows
from ssla.network.any_parameters import AnyParameters, LayerPlan, NormPlan, collect_fixed_tensors
from ssla.network.frozen import FORWARD_ERRORS, Frozen
from ssla.network.layout import Layout, make_contiguous_layout
from ssla.network.watch import CONVOLUTION, LINEAR, NORM, Call, Probe, find_row_axis

CHECKED_ROWS = 4  # rows on which a plan is validated; a guess
# Difference from backpropagation, as a share of the largest entry, beyond which a plan is wrong. A
# guess: a wrong plan differs by much more.
LARGEST_DIFFERENCE = 1e-3
TINY = 1e-12  # is added to the largest entry; a guess
UNLIKE_LAYERS = (
    "derivatives layer by layer do not agree with backpropagation through the whole network, so no "
    "layer uses the Kronecker form (structure='kfac' is a diagonal)"
)
UNLIKE_SOME = (
    "derivatives layer by layer do not agree with backpropagation through the whole network for "
    "{names}, which have no Kronecker form (structure='kfac' is a diagonal there)"
)


def open_any_parameters(
    frozen: Frozen,
    names: tuple[str, ...],
    x: Inputs,
    f: Tensor,
    probe: Probe,
    materialise: bool,
    note: str | None,
    head: tuple[str, ...] = (),
) -> AnyParameters:
    """Return the network of the free parameters `names`, with a validated plan of its layers.

    x are the rows of the probe's forward pass and f (B, C) their outputs. materialise: whether the
    structure needs the entries of J. note: a note for the report, or None. head: the free
    parameters of the layer that computes the outputs. Raises ValueError if no gradient reaches the
    free parameters.
    """
    parameters = dict(frozen.module.named_parameters())
    layout = make_contiguous_layout({name: parameters[name].shape for name in names})
    theta = layout.pack({name: parameters[name] for name in names})
    uses = _find_layer_uses(probe, parameters, _find_row_axes(frozen, x, probe))
    network = AnyParameters(
        frozen,
        layout,
        theta,
        outputs=f.shape[1],
        fixed_tensors=collect_fixed_tensors(frozen.module, names),
        layers=_make_layer_plans(uses, layout),
        without_kronecker=names,
        extra_per_row=0,  # set below, as the names before it
        notes=() if note is None else (note,),
        head=head,
        norms=_make_norm_plans(uses, layout),
    )
    network = replace(network, without_kronecker=_list_unplanned_names(network))
    network = _drop_wrong_plans(network, frozen.cast(take_rows(x, slice(0, CHECKED_ROWS))))
    jacobian, extra = _count_bytes_per_row(network, probe, row_count(x), materialise)
    return replace(network, jacobian_per_row=jacobian, extra_per_row=extra)


def _drop_wrong_plans(network: AnyParameters, x: Inputs) -> AnyParameters:
    """Return the network without the plans that backpropagation on cast rows x contradicts.

    A note in the network names what was dropped. If the remaining plans are wrong too, all are
    dropped. Raises ValueError if the gradient is zero.
    """
    names = network.layout.names
    wrong = _find_disagreements(network, x)
    if not bool(wrong.any()):
        return network
    positions = network.layout.positions
    right = {name for name, index in positions.items() if not bool(wrong[index].any())}
    layers = tuple(plan for plan in network.layers if not bool(wrong[plan.positions].any()))

    # Of a norm, scale or shift may be frozen: only the free ones must be right.
    norms = tuple(plan for plan in network.norms if {plan.weight, plan.bias} & set(names) <= right)
    reduced = replace(network, layers=_keep_fully_covered(layers, network.layout), norms=norms)
    reduced = replace(reduced, without_kronecker=_list_unplanned_names(reduced))
    if bool(_find_disagreements(reduced, x).any()):
        notes = (*network.notes, UNLIKE_LAYERS)
        return replace(reduced, layers=(), norms=(), without_kronecker=names, notes=notes)
    dropped = ", ".join(name for name in names if name not in right)
    return replace(reduced, notes=(*network.notes, UNLIKE_SOME.format(names=dropped)))


def _list_unplanned_names(network: AnyParameters) -> tuple[str, ...]:
    """Return the free parameters of which some entry belongs to no layer with a Kronecker form."""
    planned = _mark_planned_entries(network.layers, network.layout)
    positions = network.layout.positions
    return tuple(name for name, index in positions.items() if not bool(planned[index].all()))


def _mark_planned_entries(plans: Iterable[LayerPlan], layout: Layout) -> Tensor:
    """Return a mask (P,) of the entries of θ that belong to a planned layer."""
    planned = torch.zeros(layout.size, dtype=torch.bool)
    for plan in plans:
        planned[plan.positions] = True
    return planned


def _count_bytes_per_row(
    network: AnyParameters, probe: Probe, rows: int, materialise: bool
) -> tuple[int, int]:
    """Return the bytes of one row's Jacobian, and of all that a row needs beside the network.

    rows: the number of rows of the probe's forward pass. materialise: whether the structure needs
    the entries of J.
    """
    outputs = network.outputs
    item = torch.finfo(network.dtype).bits // 8
    parameters = dict(network.frozen.module.named_parameters())
    planned = {id(parameters[plan.weight]) for plan in network.layers}
    calls = [call for call in probe.calls if id(call.weight) in planned]
    results = [call.result.numel() // rows for call in calls]

    # Inputs a, and one gradient δ for each output.
    sizes = [
        _count_input_entries(call) // rows + outputs * result
        for call, result in zip(calls, results, strict=True)
    ]
    positions = network.layout.positions
    columns_size = sum(positions[name].numel() for name in network.without_kronecker)

    # 8 below: bytes of a float64.
    jacobian = item * sum(sizes) + 8 * outputs * columns_size
    # Results, zeros and gradients of one output (3 arrays), and one layer at a time in float64,
    # with the product of its gradients and Λ (2 arrays).
    layers = 3 * item * sum(results) + 8 * 2 * max(sizes, default=0)

    # All outputs of a row are differentiated together for columns of other parameters.
    activations = outputs * network.frozen.bytes_per_row if network.unplanned_names else 0
    # Three arrays of the entries of J: J, its product with Λ, and one in between. A guess.
    entries = 3 * network.layout.size if materialise else 0
    return jacobian, jacobian + layers + activations + 8 * outputs * (columns_size + entries)


def _count_input_entries(call: Call) -> int:
    """Return how many numbers `arrange_inputs_by_position` returns for a planned layer's call."""
    if call.operation == LINEAR:
        return call.input.numel()
    # A convolution: its number of positions, times the entries of a window.
    return call.result.numel() // call.weight.shape[0] * call.weight[0].numel()


@dataclass(frozen=True)
class _LayerUse:
    """The first call of some rows of a weight (and bias), which stands for all their calls."""

    call: Call
    weight: str
    bias: str | None
    axis: int  # the dimension of the input that holds the rows


def _find_row_axes(frozen: Frozen, x: Inputs, probe: Probe) -> list[int | None]:
    """Return the dimension of each call's input that holds the rows; None if there is none.

    x: the rows of the probe's forward pass. The dimension is found by a second forward pass with
    another number of rows. If that pass fails or makes other calls, it is the first dimension where
    its size is the number of rows.
    """
    rows = row_count(x)
    first_axis = [0 if call.input.shape[:1] == (rows,) else None for call in probe.calls]
    # The first row, two or three times: any number but that of x.
    repeated = [0] * (3 if rows == 2 else 2)
    inputs = frozen.cast(map_inputs(lambda values: values[repeated], x))
    try:
        with torch.no_grad(), Probe() as second:
            frozen.call_module(frozen.module, inputs)
    except FORWARD_ERRORS:
        return first_axis
    calls = [(call.operation, call.rows_key) for call in probe.calls]
    if calls != [(call.operation, call.rows_key) for call in second.calls]:
        return first_axis

    return [
        find_row_axis(call, rows, other, len(repeated))
        for call, other in zip(probe.calls, second.calls, strict=True)
    ]


def _find_layer_uses(
    probe: Probe, parameters: Mapping[str, Tensor], axes: list[int | None]
) -> list[_LayerUse]:
    """Return the uses in layers on batches of those parameters that are used nowhere else.

    parameters: those of the module, by name. axes: the dimension of each call's input that holds
    the rows. Parameters that are tied in part are left out: they need plain differentiation.
    """
    names = {id(p): name for name, p in parameters.items()}
    # All calls with the same rows of a weight.
    groups: dict[tuple[int, int], list[tuple[Call, int | None]]] = {}
    for call, axis in zip(probe.calls, axes, strict=True):
        groups.setdefault(call.rows_key, []).append((call, axis))

    first_calls = [group[0][0] for group in groups.values()]
    uses = []
    for group in groups.values():
        call, axis = group[0]
        same = all(
            _are_of_same_layer(call, other) and other_axis == axis for other, other_axis in group
        )
        is_shared = any(
            _share_entries(call, other) for other in first_calls if other.rows_key != call.rows_key
        )
        is_parameter = id(call.weight) in names
        if (
            axis is not None
            and same
            and is_parameter
            and not is_shared
            and _is_used_only_in_layers(call, probe)
        ):
            bias = None if call.bias is None else names.get(id(call.bias))
            uses.append(_LayerUse(call, names[id(call.weight)], bias, axis))

    return uses


def _is_used_only_in_layers(call: Call, probe: Probe) -> bool:
    """Return whether the weight and the bias of a call are used in layers of its kind only.

    Linear layers and convolutions are of one kind, and norms of another.
    """
    allowed = {NORM} if call.operation == NORM else {LINEAR, CONVOLUTION}
    tensors = [tensor for tensor in (call.weight, call.bias) if tensor is not None]
    return all(set(probe.uses.get(id(tensor), ())) <= allowed for tensor in tensors)


def _are_of_same_layer(call: Call, other: Call) -> bool:
    """Return whether two calls from the same row of a weight on are of the same layer.

    Two such calls have the same operation, rows and bias.
    """
    return (
        call.operation == other.operation
        and call.bias is other.bias
        and call.bias_first == other.bias_first
        and call.output_count == other.output_count
    )


def _share_entries(call: Call, other: Call) -> bool:
    """Return whether two calls have entries of a weight or a bias in common."""
    same_weight = call.weight is other.weight
    same_bias = call.bias is not None and call.bias is other.bias

    def overlap(first: int, other_first: int) -> bool:
        """Return whether the rows of the two calls from these first ones on have one in common."""
        return first < other_first + other.output_count and other_first < first + call.output_count

    if same_weight and overlap(call.first, other.first):
        return True
    return same_bias and overlap(call.bias_first, other.bias_first)


def _make_layer_plans(uses: Iterable[_LayerUse], layout: Layout) -> tuple[LayerPlan, ...]:
    """Return the plans of layers with a Kronecker form of which the weight or the bias is free.

    A plan is left out if it covers a parameter in part only (see `_keep_fully_covered`).
    """
    plans = []
    for use in uses:
        call = use.call
        bias = use.bias
        weight_free = use.weight in layout.positions
        bias_free = bias is not None and bias in layout.positions
        if call.operation == NORM or not (weight_free or bias_free):
            continue
        columns = []
        if weight_free:
            weight_rows = slice(call.first, call.first + call.output_count)
            columns.append(layout.positions[use.weight][weight_rows].flatten(1))
        if bias_free and bias is not None:
            bias_rows = slice(call.bias_first, call.bias_first + call.output_count)
            columns.append(layout.positions[bias][bias_rows].unsqueeze(1))
        positions = torch.cat(columns, 1)  # (out, in), with the bias as a last column
        plans.append(LayerPlan(use.weight, positions, weight_free, bias_free, call.first, use.axis))
    return _keep_fully_covered(tuple(plans), layout)


def _keep_fully_covered(plans: tuple[LayerPlan, ...], layout: Layout) -> tuple[LayerPlan, ...]:
    """Return the plans all of whose parameters are covered by the returned plans in every entry.

    A weight with three projections, for example, needs the plans of all three.
    """
    # Dropping one plan may leave another parameter partly covered, so this repeats.
    while True:
        planned = _mark_planned_entries(plans, layout)
        partly = torch.zeros_like(planned)
        for index in layout.positions.values():
            partly[index] = not bool(planned[index].all())
        kept = tuple(plan for plan in plans if not bool(partly[plan.positions].any()))
        if len(kept) == len(plans):
            return kept
        plans = kept


def _make_norm_plans(uses: Iterable[_LayerUse], layout: Layout) -> tuple[NormPlan, ...]:
    """Return the plans of norms whose scale or shift is free."""
    plans = []
    for use in uses:
        bias = use.bias if use.bias in layout.positions else None
        if use.call.operation == NORM and (use.weight in layout.positions or bias is not None):
            plans.append(NormPlan(use.weight, bias, use.axis))
    return tuple(plans)


def _find_disagreements(network: AnyParameters, x: Inputs) -> Tensor:
    """Return a mask (P,) of the entries at which Jᵀg by layers differs from Jᵀg by backpropagation.

    x are cast rows, and g (B, C) is fixed. All entries differ if the layers cannot be computed.
    Raises ValueError if the gradient is zero.
    """
    g, expected = _compute_by_backpropagation(network, x)
    try:
        _, J = network.linearise(x, network.theta)
        by_layers = J.double().pull(g.to("cpu", torch.float64))
    except (RuntimeError, KeyError):  # shapes or calls that are not those of the plan
        return torch.ones_like(expected, dtype=torch.bool)
    # Half precision has a larger rounding error in one product.
    tolerance = max(LARGEST_DIFFERENCE, 4 * torch.finfo(network.dtype).eps)
    # Negated, so that NaN differs.
    return ~((by_layers - expected).abs() <= tolerance * (TINY + expected.abs().max()))


def _compute_by_backpropagation(network: AnyParameters, x: Inputs) -> tuple[Tensor, Tensor]:
    """Return one g (B, C) and Jᵀg (P,) by backpropagation through the whole network, for cast x.

    Its graph, which takes as much memory as a Jacobian, is freed on return. Raises ValueError if
    the gradient is zero.
    """
    free = {
        name: value.requires_grad_(True)
        for name, value in network.split_into_parameters(network.theta).items()
    }

    with torch.enable_grad():
        f = network.compute_outputs(free, x)
        if not f.requires_grad:
            # A forward under no_grad: all gradients are zero, and autograd needs some graph.
            f = f + 0 * sum(value.sum() for value in free.values())
        # Distinct weights, so that errors of different outputs and rows do not cancel.
        g = torch.linspace(-1, 1, f.numel(), dtype=f.dtype, device=f.device).reshape(f.shape) + 0.1
        gradients = torch.autograd.grad((f * g).sum(), list(free.values()), allow_unused=True)

    if all(gradient is None or not bool(gradient.any()) for gradient in gradients):
        raise ValueError(
            "The gradient of the network's outputs in its free parameters is zero, so they would "
            "have no uncertainty. Remove torch.no_grad() and .detach() from its forward, or select "
            "other parameters."
        )
    by_name = {
        name: torch.zeros_like(free[name]) if gradient is None else gradient
        for name, gradient in zip(free, gradients, strict=True)
    }
    return g, network.layout.pack(by_name)
