"""Opening a module: copy it, check it on the first batch, find its free parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ssla._checks import finite, unknown_name
from ssla.data import Inputs, leaves, row_count, slice_inputs
from ssla.likelihoods.likelihood import SOFTMAX
from ssla.network.any_parameters import open_any
from ssla.network.copying import private_copy
from ssla.network.frozen import (
    Frozen,
    Network,
    Output,
    by_keyword,
    by_position,
    kept_integers,
    row_shapes,
    whole,
)
from ssla.network.head import LastLayer
from ssla.network.layout import last_layer_layout
from ssla.network.watch import Probe

# of the first batch: inputs and results of all layers of these rows are kept while the module is
# opened
OPENING_ROWS = 16
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
    """Copy the module, check it on the first rows of the first batch x, and choose how to represent
    its free parameters.

    materialise: whether the structure needs the entries of J (this limits the number of rows in a
    chunk). output: the part of the module's result that holds the outputs (see `ssla.fit`). links:
    functions that the likelihood applies itself; the network must not end with them.
    """
    few = slice_inputs(x, slice(0, OPENING_ROWS))
    frozen, watch, f = _freeze(model, x, few, output)
    parameters = dict(frozen.module.named_parameters())
    head = _head(watch, f, parameters)
    names = _free_names(model, weights, head)
    _refuse_links(watch, f, links)
    note = frozen_note(model) if weights == ALL else None
    if isinstance(head, _Head) and head.covers(names) and not _tied(model, head.weight):
        return _last_layer(frozen, head, head.bias in names, f.shape[1], note)
    return open_any(
        frozen, names, few, f, watch, materialise, note, _head_names(model, head, names)
    )


def trainable(model: nn.Module) -> tuple[str, ...]:
    """The parameters of weights="all": those that are not frozen, or all of them if all are
    frozen.
    """
    floating = {
        name: p.requires_grad for name, p in model.named_parameters() if p.is_floating_point()
    }
    return tuple(name for name, free in floating.items() if free or not any(floating.values()))


def frozen_note(model: nn.Module) -> str | None:
    """The report's note about frozen parameters with weights="all"."""
    fixed = {
        name: p.numel()
        for name, p in model.named_parameters()
        if p.is_floating_point() and not p.requires_grad
    }
    if not fixed:
        return None
    if set(trainable(model)) & set(fixed):
        return (
            "weights='all': every parameter is frozen (requires_grad=False), so all of them are "
            "used as free"
        )
    shown = ", ".join(list(fixed)[:4]) + (", …" if len(fixed) > 4 else "")
    return (
        f"weights='all': {sum(fixed.values()):,} frozen parameters (requires_grad=False: {shown}) "
        "were left out and have no uncertainty; name them in weights=[…] to include them"
    )


def _refuse_links(watch: Probe, f: Tensor, links: tuple[str, ...]) -> None:
    """ValueError if the output has already passed the likelihood's link function:
    probabilities, rates.
    """
    found = [
        link
        for link, result in watch.links
        if result.numel() == f.numel() and torch.equal(result.reshape(f.shape), f)
    ]
    sums = f.double().sum(1)
    if (
        f.shape[0] > 1
        and f.shape[1] > 1
        and bool((f >= 0).all())
        and bool(((sums - 1).abs() <= 1e-2).all())
    ):
        found.append(SOFTMAX)  # computed in another way, such as an average of several
    twice = next((link for link in found if link in links), None)
    if twice is not None:
        raise ValueError(
            f"The network's output has already passed through a {twice}, and this likelihood "
            "applies its own. Return the raw outputs from before it (logits, log rates)."
        )


def _freeze(
    model: nn.Module, whole_batch: Inputs, x: Inputs, output: Output
) -> tuple[Frozen, Probe, Tensor]:
    """The copy, its first forward pass on the rows x of the batch, and their outputs."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, but is a {type(model).__name__}.")
    check_mode(model)
    module = private_copy(model)
    floating = [p for p in module.parameters() if p.is_floating_point()]
    if not floating:
        raise ValueError(
            "The network has no floating-point parameters, so it cannot have a posterior."
        )
    _check_values(module)
    probe = Frozen(
        module, floating[0].dtype, floating[0].device, _call_style(x, 0), True, 1, output=output
    )
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    probe.check_finite(whole_batch)
    frozen, watch, f = _first_forward(probe, x, whole_batch)
    inputs = frozen.cast(x)
    # both calls without the probe: with it, some modules take another path (a transformer's fused
    # one)
    if not torch.equal(frozen.forward(inputs), frozen.forward(inputs)):
        raise ValueError(
            "The network gives different outputs for the same input, so it is random. Call "
            "model.eval() first, and remove random layers (functional dropout, noise) from its "
            "forward."
        )
    changed = [
        name for name, value in module.named_buffers() if not torch.equal(value, buffers[name])
    ]
    if changed:
        raise ValueError(
            f"The network changes its buffers in forward ({', '.join(changed)}). Call model.eval() "
            "first."
        )
    finite("The network's output", f, "Check the scale of the inputs and the trained weights.")
    _check_rows(frozen, x, f)
    return frozen, watch, f


def _check_values(module: nn.Module) -> None:
    """ValueError for NaN, and for infinite parameters and statistics of norms.

    Other buffers may be infinite: masks, bounds.
    """
    diverged = "The network has diverged: train it again."
    for name, value in module.named_parameters():
        if value.is_meta:
            raise ValueError(
                f"Parameter {name!r} is on the device 'meta', which has shapes and no values. Load "
                "the trained weights first: model.to_empty(device='cpu'), then "
                "model.load_state_dict(…)."
            )
        finite(f"Parameter {name!r}", value, diverged)
    statistics = {
        id(b)
        for layer in module.modules()
        if isinstance(layer, BATCH_DEPENDENT)
        for b in layer.buffers()
    }
    for name, buffer in module.named_buffers():
        if id(buffer) in statistics:
            finite(f"Buffer {name!r}", buffer, diverged)
        elif bool(buffer.isnan().any()):
            raise ValueError(
                f"Buffer {name!r} must not have NaN, but {int(buffer.isnan().sum())} of its values "
                f"are. {diverged}"
            )


def check_mode(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        random = isinstance(layer, RANDOM_IN_TRAINING) or (
            isinstance(layer, nn.RNNBase) and layer.dropout > 0
        )
        if layer.training and (random or isinstance(layer, BATCH_DEPENDENT)):
            what = "dropout" if random else "batch norm"
            why = "outputs are random" if random else "outputs depend on the batch"
            raise ValueError(
                f"The network is in training mode and has {what} ({name or type(layer).__name__}), "
                f"so its {why}. Call model.eval() first."
            )


def _call_style(x: Inputs, attempt: int) -> Callable[[nn.Module, Inputs], Any]:
    """Ways to pass inputs: unpacked first, as one argument second."""
    if isinstance(x, Tensor) or attempt == 1:
        return whole
    return by_keyword if isinstance(x, Mapping) else by_position


def _first_forward(probe: Frozen, x: Inputs, whole_batch: Inputs) -> tuple[Frozen, Probe, Tensor]:
    """How the module takes its inputs: unpacked or as one argument, integers kept or cast.

    x: rows of the batch.
    """
    first: Exception | None = None
    integers = any(not part.is_floating_point() for part in leaves(x))
    for keep in (True, False) if integers else (True,):
        for attempt in (0,) if isinstance(x, Tensor) else (0, 1):
            frozen = replace(probe, call=_call_style(x, attempt), keep_integers=keep)
            inputs = frozen.cast(x)
            try:
                with Probe() as watch:
                    result = frozen.call(frozen.module, inputs)
            except (
                RuntimeError,
                TypeError,
                ValueError,
                IndexError,
                AttributeError,
                KeyError,
            ) as error:
                first = first or error
                continue
            f = frozen.outputs(result, row_count(inputs))
            per_row = max(watch.bytes // row_count(inputs), 8)
            known = replace(
                frozen,
                bytes_per_row=per_row,
                shapes=row_shapes(inputs),
                integers=kept_integers(inputs),
            )
            return known, watch, f
    given = [tuple(part.shape) for part in leaves(whole_batch)]
    raise ValueError(
        f"The network failed on the inputs (shapes {given}): {first}. Check the number of columns "
        "and how the forward takes its arguments: a tuple is passed as model(*x), a dict as "
        "model(**x)."
    ) from first


def _check_rows(frozen: Frozen, x: Inputs, f: Tensor) -> None:
    if f.shape[0] < 2:
        return
    alone = frozen.forward(frozen.cast(slice_inputs(x, slice(0, 1))))
    size, rounding = float(f.abs().max()) + 1e-30, 4 * torch.finfo(f.dtype).eps
    if not torch.allclose(alone, f[:1], rtol=max(1e-2, rounding), atol=max(1e-3, rounding) * size):
        raise ValueError(
            "The network's output for a row depends on the other rows of its batch, so a row has "
            "no predictive of its own. Remove batch statistics from its forward (model.eval() for "
            "norms)."
        )


@dataclass(frozen=True)
class _Head:
    """The linear layer that computes the output."""

    weight: str
    bias: str | None
    tensor: nn.Parameter
    bias_tensor: Tensor | None
    inputs: int

    def covers(self, names: tuple[str, ...]) -> bool:
        """Whether the names are this layer's weight, with or without its bias."""
        return self.weight in names and set(names) <= {self.weight, self.bias}


def _head(watch: Probe, f: Tensor, parameters: Mapping[str, nn.Parameter]) -> _Head | str:
    """The last linear layer, or the reason why there is none."""
    if not watch.linears:
        return "no linear layer was called in its forward"
    made = [
        c
        for c in watch.linears
        if c.result.numel() == f.numel() and torch.equal(c.result.reshape(f.shape), f)
    ]
    if not made:
        return (
            "its output is not the output of its last linear layer (something comes after it: a "
            "softmax, an exp, a scale?)"
        )
    _, phi, weight, bias, *_ = made[
        -1
    ]  # linear layers of other parts of the result may be called later
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
    uses = sum(call.weight is weight for call in watch.linears)
    if uses > 1:
        return (
            f"the weight {names[id(weight)]!r} of its last linear layer is used {uses} times (tied)"
        )
    bias_name = None if bias is None else names.get(id(bias))
    assert isinstance(weight, nn.Parameter)
    return _Head(names[id(weight)], bias_name, weight, bias, phi.shape[1])


def _head_names(model: nn.Module, head: _Head | str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The free parameters of the last linear layer: a row changes one output only, unless it is
    tied.
    """
    if isinstance(head, str) or _tied(model, head.weight):
        return ()
    return tuple(name for name in (head.weight, head.bias) if name is not None and name in names)


def _tied(model: nn.Module, name: str) -> list[str]:
    """Other names of the same parameter."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return [other for other, p in named.items() if p is named[name] and other != name]


def _free_names(
    model: nn.Module,
    weights: str | list[str] | tuple[str, ...],
    head: _Head | str,
) -> tuple[str, ...]:
    """The names of the free parameters.

    head: the last layer, or why there is none. ValueError if weights='last_layer' has none to use,
    or its weight is tied to another parameter.
    """
    if weights == ALL:
        return trainable(model)
    if weights == LAST_LAYER:
        if isinstance(head, str):
            raise ValueError(
                f"The network has no last layer that weights='last_layer' could use: {head}. "
                "Return the raw outputs of a final nn.Linear (the likelihood applies links such "
                "as softmax and exp itself), or use weights='all' or a list of parameter names."
            )
        tied = _tied(model, head.weight)
        if tied:
            raise ValueError(
                f"The last layer's weight {head.weight!r} is tied to {', '.join(map(repr, tied))}, "
                "so the features would change with it. Untie them, or use weights='all'."
            )
        return tuple(name for name in (head.weight, head.bias) if name is not None)
    return named_parameters(model, weights)


def named_parameters(
    model: nn.Module, weights: str | list[str] | tuple[str, ...]
) -> tuple[str, ...]:
    """The parameters of a module's name, or of a list of their own names, in the model's order."""
    parameters = [name for name, _ in model.named_parameters()]
    if isinstance(weights, str):
        if weights in parameters:
            raise ValueError(
                f"weights={weights!r} names a parameter. For that parameter alone write "
                f"weights=[{weights!r}]."
            )
        inside = tuple(name for name in parameters if name.startswith(weights + "."))
        if not inside:
            modules = [name for name, _ in model.named_modules() if name]
            raise ValueError(unknown_name("weights", weights, [LAST_LAYER, ALL, *modules]))
        return inside
    if not weights:
        raise ValueError(
            "weights is an empty list. Name at least one parameter, or use 'last_layer' or 'all'."
        )
    for name in weights:
        if name not in parameters:
            raise ValueError(unknown_name("parameter", name, parameters))
    return tuple(name for name in parameters if name in set(weights))


def _last_layer(
    frozen: Frozen, head: _Head, bias_free: bool, outputs: int, note: str | None
) -> LastLayer:
    bias_name = head.bias if bias_free else None
    layout = last_layer_layout(head.weight, bias_name, outputs, head.inputs)
    values: dict[str, Tensor] = {head.weight: head.tensor}
    offset: Tensor | None = None
    if bias_name is not None:
        assert head.bias_tensor is not None
        values[bias_name] = head.bias_tensor
    elif head.bias_tensor is not None:
        offset = head.bias_tensor.detach().to("cpu", torch.float64)
    notes = () if note is None else (note,)
    return LastLayer(
        frozen,
        head.tensor,
        layout,
        layout.pack(values),
        outputs,
        bias_name is not None,
        offset,
        notes,
    )
