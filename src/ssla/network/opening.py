"""Opening a module: copy it, check it on the first batch, find its free parameters.

The head is the linear layer that computes the outputs. A probe records the calls of one forward
pass (`ssla.network.watch`). A parameter is tied if it has several names or uses. A link is a
function such as softmax that a likelihood applies to the outputs itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ssla._checks import check_finite, unknown_name
from ssla.data import Inputs, input_tensors, row_count, take_rows
from ssla.likelihoods.likelihood import SOFTMAX
from ssla.network.copying import copy_privately
from ssla.network.frozen import (
    FORWARD_ERRORS,
    Frozen,
    Output,
    call_by_keyword,
    call_by_position,
    call_with_one_argument,
    check_inputs_finite,
    list_integer_dtypes,
    list_row_shapes,
)
from ssla.network.head import LastLayer
from ssla.network.layer_plans import open_any_parameters
from ssla.network.layout import make_last_layer_layout
from ssla.network.network import Network
from ssla.network.watch import Call, Probe

# Rows of the first batch that open the module: inputs and results of all its layers are kept for
# them. A guess.
OPENING_ROWS = 16
# Guesses, which allow for rounding: how far sums of probabilities may be from one; and how much
# the outputs of a row alone may differ from those in a batch, relative to themselves and to the
# largest output.
SUM_ERROR = 1e-2
ROW_ERROR, SMALL_ROW_ERROR = 1e-2, 1e-3
POSITIVE = 1e-30  # is added to the largest output, which may be zero
LAST_LAYER = "last_layer"
ALL = "all"
RANDOM_IN_TRAINING = (nn.modules.dropout._DropoutNd, nn.RReLU)
BATCH_DEPENDENT = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


def open_network(
    model: nn.Module,
    weights: str | list[str] | tuple[str, ...],
    x: Inputs,
    materialise: bool = True,
    output: Output = None,
    links: tuple[str, ...] = (),
) -> Network:
    """Return the network of a private, checked copy of the module, with these free parameters.

    x: the first batch, on whose first rows the module is checked. weights: "last_layer", "all", the
    name of a part of the module, or a list of parameter names. materialise: whether the structure
    needs the entries of J (this limits the number of rows in a chunk). output: the part of the
    module's result that holds the outputs (see `ssla.fit`). links: functions that the likelihood
    applies itself; the network must not end with them.

    Raises TypeError or ValueError if the module, its inputs or the choice of weights is not
    supported.
    """
    first_rows = take_rows(x, slice(0, OPENING_ROWS))
    frozen, probe, f = _freeze_and_check(model, x, first_rows, output)
    head = _find_head(probe, f, dict(frozen.module.named_parameters()))
    names = _select_free_names(model, weights, head)
    _refuse_links(probe, f, links)
    note = describe_frozen_parameters(model) if weights == ALL else None
    if isinstance(head, _Head) and head.covers(names) and not _find_tied_names(model, head.weight):
        return _make_last_layer(frozen, head, head.bias in names, f.shape[1], note)
    head_names = _select_free_head_names(model, head, names)
    return open_any_parameters(frozen, names, first_rows, f, probe, materialise, note, head_names)


def list_trainable_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters that weights="all" selects.

    These are the floating-point parameters that are not frozen (requires_grad=False), or all of
    them if all are frozen.
    """
    floating = {
        name: p.requires_grad for name, p in model.named_parameters() if p.is_floating_point()
    }
    return tuple(name for name, free in floating.items() if free or not any(floating.values()))


def describe_frozen_parameters(model: nn.Module) -> str | None:
    """Return the note about frozen parameters with weights="all"; None if there are none.

    The report shows it.
    """
    fixed = {
        name: p.numel()
        for name, p in model.named_parameters()
        if p.is_floating_point() and not p.requires_grad
    }
    if not fixed:
        return None
    if set(list_trainable_names(model)) & set(fixed):
        return (
            "weights='all': every parameter is frozen (requires_grad=False), so all of them are "
            "used as free"
        )
    shown = ", ".join(list(fixed)[:4]) + (", …" if len(fixed) > 4 else "")
    return (
        f"weights='all': {sum(fixed.values()):,} frozen parameters (requires_grad=False: {shown}) "
        "were left out and have no uncertainty; name them in weights=[…] to include them"
    )


def _equals_outputs(result: Tensor, f: Tensor) -> bool:
    """Return whether the result of a call, of any shape, has the values of the outputs f (N, C)."""
    return result.numel() == f.numel() and torch.equal(result.reshape(f.shape), f)


def _refuse_links(probe: Probe, f: Tensor, links: tuple[str, ...]) -> None:
    """Raise ValueError if the outputs f (N, C) have already passed one of the links.

    links: functions that the likelihood applies itself. Outputs after them are probabilities or
    rates. probe: the record of the forward pass that returned f.
    """
    applied = [link for link, result in probe.links if _equals_outputs(result, f)]
    if _looks_like_probabilities(f):
        applied.append(SOFTMAX)
    applied_twice = next((link for link in applied if link in links), None)
    if applied_twice is not None:
        raise ValueError(
            f"The network's output has already passed through a {applied_twice}, and this "
            "likelihood applies its own. Return the raw outputs from before it (logits, log rates)."
        )


def _looks_like_probabilities(f: Tensor) -> bool:
    """Return whether outputs f (N, C) look like those of a softmax.

    A softmax may be computed without torch's function, such as an average of several. One row or
    one output that sums to one may be a coincidence, so the answer is then False.
    """
    sums = f.double().sum(1)
    return (
        f.shape[0] > 1
        and f.shape[1] > 1
        and bool((f >= 0).all())
        # Rounding, as that of half precision, is allowed for.
        and bool(((sums - 1).abs() <= SUM_ERROR).all())
    )


def _freeze_and_check(
    model: nn.Module, batch: Inputs, x: Inputs, output: Output
) -> tuple[Frozen, Probe, Tensor]:
    """Return a checked copy of the module, the record of its first forward pass, and f (N, C).

    x: the rows of the batch on which that pass is made. The whole batch must be finite. Raises
    TypeError or ValueError for a module that has no posterior.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, but is a {type(model).__name__}.")
    check_evaluation_mode(model)
    module = copy_privately(model)
    floating = next((p for p in module.parameters() if p.is_floating_point()), None)
    if floating is None:
        raise ValueError(
            "The network has no floating-point parameters, so it cannot have a posterior."
        )
    _check_values(module)

    # How to call the module and the bytes of a row are not known yet: these are placeholders.
    draft = Frozen(
        module,
        floating.dtype,
        floating.device,
        call_module=call_with_one_argument,
        keep_integers=True,
        bytes_per_row=1,
        output=output,
    )
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    check_inputs_finite(batch)
    frozen, probe, f = _run_first_forward(draft, x, batch)
    _check_repeatable(frozen, x, buffers)
    check_finite(
        "The network's output", f, "Check the scale of the inputs and the trained weights."
    )
    _check_independent_rows(frozen, x, f)
    return frozen, probe, f


def _check_repeatable(frozen: Frozen, x: Inputs, buffers: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the module repeats its outputs for the rows x and keeps its buffers.

    buffers: their values from before the first forward pass, by name.
    """
    inputs = frozen.cast(x)
    # Both calls are made without the probe: under it some modules take another path (a transformer
    # its unfused one).
    if not torch.equal(frozen.forward(inputs), frozen.forward(inputs)):
        raise ValueError(
            "The network gives different outputs for the same input, so it is random. Call "
            "model.eval() first, and remove random layers (functional dropout, noise) from its "
            "forward."
        )
    changed = [
        name
        for name, value in frozen.module.named_buffers()
        if not torch.equal(value, buffers[name])
    ]
    if changed:
        raise ValueError(
            f"The network changes its buffers in forward ({', '.join(changed)}). Call model.eval() "
            "first."
        )


def _check_values(module: nn.Module) -> None:
    """Raise ValueError for parameters and buffers that a trained module cannot have.

    These are NaN in any of them, infinite parameters, infinite statistics of norms, and parameters
    on the device "meta", which have no values.
    """
    diverged = "The network has diverged: train it again."
    for name, value in module.named_parameters():
        if value.is_meta:
            raise ValueError(
                f"Parameter {name!r} is on the device 'meta', which has shapes and no values. Load "
                "the trained weights first: model.to_empty(device='cpu'), then "
                "model.load_state_dict(…)."
            )
        check_finite(f"Parameter {name!r}", value, diverged)

    # Other buffers may be infinite: masks, bounds.
    statistics = {
        id(buffer)
        for layer in module.modules()
        if isinstance(layer, BATCH_DEPENDENT)
        for buffer in layer.buffers()
    }

    for name, buffer in module.named_buffers():
        if id(buffer) in statistics:
            check_finite(f"Buffer {name!r}", buffer, diverged)
        elif bool(buffer.isnan().any()):
            raise ValueError(
                f"Buffer {name!r} must not have NaN, but {int(buffer.isnan().sum())} of its values "
                f"are. {diverged}"
            )


def check_evaluation_mode(model: nn.Module) -> None:
    """Raise ValueError if a layer in training mode would make outputs random or batch-dependent."""
    for name, layer in model.named_modules():
        is_random = isinstance(layer, RANDOM_IN_TRAINING) or (
            isinstance(layer, nn.RNNBase) and layer.dropout > 0
        )
        if layer.training and (is_random or isinstance(layer, BATCH_DEPENDENT)):
            cause = "dropout" if is_random else "batch norm"
            effect = "outputs are random" if is_random else "outputs depend on the batch"
            raise ValueError(
                f"The network is in training mode and has {cause} "
                f"({name or type(layer).__name__}), so its {effect}. Call model.eval() first."
            )


def _list_ways_to_call(x: Inputs) -> tuple[Callable[[nn.Module, Inputs], Any], ...]:
    """Return the ways to pass inputs to a module, in the order in which they are tried.

    A tuple or a dict is unpacked at first, and then passed as one argument.
    """
    if isinstance(x, Tensor):
        return (call_with_one_argument,)
    call_unpacked = call_by_keyword if isinstance(x, Mapping) else call_by_position
    return call_unpacked, call_with_one_argument


def _run_first_forward(draft: Frozen, x: Inputs, batch: Inputs) -> tuple[Frozen, Probe, Tensor]:
    """Find out how the module takes its inputs: unpacked or as one argument, integers kept or cast.

    Returns the draft with this knowledge, the record of the forward pass on the rows x of the
    batch, and the outputs f (N, C). Raises the error of `extract_outputs` if the module returns no
    outputs, and ValueError with the first failure if every way fails.
    """
    first_error: Exception | None = None
    has_integers = any(not tensor.is_floating_point() for tensor in input_tensors(x))
    # Integers are kept at first: an embedding needs them. A linear layer needs them cast.
    for keep_integers in (True, False) if has_integers else (True,):
        for call_module in _list_ways_to_call(x):
            frozen = replace(draft, call_module=call_module, keep_integers=keep_integers)
            inputs = frozen.cast(x)
            try:
                with Probe() as probe:
                    result = call_module(frozen.module, inputs)
            except FORWARD_ERRORS as error:
                # Another way may suit the module. The first one is the most usual, so its error is
                # reported if all fail.
                first_error = first_error or error
                continue
            f = frozen.extract_outputs(result, row_count(inputs))
            opened = replace(
                frozen,
                bytes_per_row=max(probe.bytes // row_count(inputs), 8),  # at least one float64
                shapes=list_row_shapes(inputs),
                integers=list_integer_dtypes(inputs),
            )
            return opened, probe, f

    shapes = [tuple(tensor.shape) for tensor in input_tensors(batch)]
    raise ValueError(
        f"The network failed on the inputs (shapes {shapes}): {first_error}. Check the number of "
        "columns and how the forward takes its arguments: a tuple is passed as model(*x), a dict "
        "as model(**x)."
    ) from first_error


def _check_independent_rows(frozen: Frozen, x: Inputs, f: Tensor) -> None:
    """Raise ValueError if the first row alone has other outputs than in the batch x, f (N, C).

    A batch of one row is not checked.
    """
    if f.shape[0] < 2:
        return
    f_alone = frozen.forward(frozen.cast(take_rows(x, slice(0, 1))))
    largest = float(f.abs().max()) + POSITIVE

    # Kernels for one row may round differently, in half precision by much.
    rounding = 4 * torch.finfo(f.dtype).eps
    rtol, atol = max(ROW_ERROR, rounding), max(SMALL_ROW_ERROR, rounding) * largest
    if not torch.allclose(f_alone, f[:1], rtol=rtol, atol=atol):
        raise ValueError(
            "The network's output for a row depends on the other rows of its batch, so a row has "
            "no predictive of its own. Remove batch statistics from its forward (model.eval() for "
            "norms)."
        )


@dataclass(frozen=True)
class _Head:
    """The linear layer that computes the output."""

    weight: str  # the name of its weight
    bias: str | None  # that of its bias; None: it has none, or one that is not a parameter
    tensor: nn.Parameter  # the weight itself
    bias_tensor: Tensor | None
    inputs: int  # the number of features

    def covers(self, names: tuple[str, ...]) -> bool:
        """Return whether the names are this layer's weight, with or without its bias."""
        return self.weight in names and set(names) <= {self.weight, self.bias}


def _find_head(probe: Probe, f: Tensor, parameters: Mapping[str, nn.Parameter]) -> _Head | str:
    """Return the linear layer that computes the outputs f (N, C), or why there is none.

    The reason is a clause for an error. probe: the record of the forward pass that returned f.
    parameters: those of the module, by name.
    """
    if not probe.linears:
        return "no linear layer was called in its forward"
    # Linear layers of other parts of the result may be called later than the head.
    calls: list[Call] = [call for call in probe.linears if _equals_outputs(call.result, f)]
    if not calls:
        return (
            "its output is not the output of its last linear layer (something comes after it: a "
            "softmax, an exp, a scale?)"
        )
    phi, weight, bias = calls[-1].input, calls[-1].weight, calls[-1].bias
    if phi.dim() != 2:
        return (
            f"its last linear layer has inputs of shape {tuple(phi.shape)}, not one row for each "
            "observation"
        )
    names = {id(p): name for name, p in parameters.items()}
    if id(weight) not in names:
        return (
            "the weight of its last linear layer is computed from other parameters (weight norm or "
            "a parametrization)"
        )
    uses = sum(call.weight is weight for call in probe.linears)
    if uses > 1:
        return (
            f"the weight {names[id(weight)]!r} of its last linear layer is used {uses} times (tied)"
        )
    bias_name = None if bias is None else names.get(id(bias))
    assert isinstance(weight, nn.Parameter)
    return _Head(names[id(weight)], bias_name, weight, bias, phi.shape[1])


def _select_free_head_names(
    model: nn.Module, head: _Head | str, names: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the free parameters of the head whose rows change one output only.

    names: the free parameters. Nothing is returned without a head, which is then the reason (text),
    or with a head whose weight is tied to another parameter: that one may change other outputs.
    """
    if isinstance(head, str) or _find_tied_names(model, head.weight):
        return ()
    return tuple(name for name in (head.weight, head.bias) if name is not None and name in names)


def _find_tied_names(model: nn.Module, name: str) -> list[str]:
    """Return the other names that the parameter `name` has in the module."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [other for other, p in parameters.items() if p is parameters[name] and other != name]


def _select_free_names(
    model: nn.Module,
    weights: str | list[str] | tuple[str, ...],
    head: _Head | str,
) -> tuple[str, ...]:
    """Return the names of the free parameters, in the model's order.

    weights: see `open_network`. head: the last layer, or why there is none. Raises ValueError if
    weights='last_layer' has none to use, or if its weight is tied to another parameter, and for an
    unknown name or an empty list.
    """
    if weights == ALL:
        return list_trainable_names(model)
    if weights == LAST_LAYER:
        if isinstance(head, str):
            raise ValueError(
                f"The network has no last layer that weights='last_layer' could use: {head}. "
                "Return the raw outputs of a final nn.Linear (the likelihood applies links such "
                "as softmax and exp itself), or use weights='all' or a list of parameter names."
            )
        tied = _find_tied_names(model, head.weight)
        if tied:
            raise ValueError(
                f"The last layer's weight {head.weight!r} is tied to {', '.join(map(repr, tied))}, "
                "so the features would change with it. Untie them, or use weights='all'."
            )
        return tuple(name for name in (head.weight, head.bias) if name is not None)
    return select_parameter_names(model, weights)


def select_parameter_names(
    model: nn.Module, weights: str | list[str] | tuple[str, ...]
) -> tuple[str, ...]:
    """Return the names of the parameters in a part of the model, or of a list, in model order.

    weights: the name of the part, or the list. Raises ValueError for an unknown name, for the name
    of a parameter that is not in a list, or for an empty list.
    """
    parameters = [name for name, _ in model.named_parameters()]
    if isinstance(weights, str):
        if weights in parameters:
            raise ValueError(
                f"weights={weights!r} names a parameter. For that parameter alone write "
                f"weights=[{weights!r}]."
            )
        in_module = tuple(name for name in parameters if name.startswith(weights + "."))
        if not in_module:
            modules = [name for name, _ in model.named_modules() if name]
            raise ValueError(unknown_name("weights", weights, [LAST_LAYER, ALL, *modules]))
        return in_module
    if not weights:
        raise ValueError(
            "weights is an empty list. Name at least one parameter, or use 'last_layer' or 'all'."
        )

    for name in weights:
        if name not in parameters:
            raise ValueError(unknown_name("parameter", name, parameters))
    return tuple(name for name in parameters if name in set(weights))


def _make_last_layer(
    frozen: Frozen, head: _Head, bias_free: bool, outputs: int, note: str | None
) -> LastLayer:
    """Return the network whose free parameters are those of its head.

    bias_free: whether they include its bias. outputs: C. note: a note for the report, or None.
    """
    bias_name = head.bias if bias_free else None
    layout = make_last_layer_layout(head.weight, bias_name, outputs, head.inputs)
    values: dict[str, Tensor] = {head.weight: head.tensor}
    offset: Tensor | None = None

    # A bias that is not free is a constant that is added to the outputs.
    if bias_name is not None:
        assert head.bias_tensor is not None
        values[bias_name] = head.bias_tensor
    elif head.bias_tensor is not None:
        offset = head.bias_tensor.detach().to("cpu", torch.float64)
    theta = layout.pack(values)
    notes = () if note is None else (note,)
    return LastLayer(
        frozen,
        head.tensor,
        layout,
        theta,
        outputs,
        fold_bias=bias_name is not None,
        offset=offset,
        notes=notes,
    )
