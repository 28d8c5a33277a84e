"""Intercepts torch calls, without hooks and without changes to the module.

`Probe` records one forward pass: the linear calls, the uses of each parameter, and the bytes of the
results. `Inputs` keeps the input of one layer. `Layers` keeps the inputs of many layers and makes
their outputs differentiable. The products inside an attention or a recurrent layer count as linear
calls, and the scales and shifts of norms as calls of their own kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ssla.likelihoods.likelihood import EXP, SIGMOID, SOFTMAX, SOFTPLUS
from ssla.network.attention import attend, project, read_attention
from ssla.network.recurrence import read_recurrence, recur

LINEAR = "linear"
CONVOLUTION = "convolution"
NORM = "norm"
OTHER = "other"
CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
NORMS = {  # with the names of their first arguments
    F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
    F.batch_norm: (
        "input",
        "running_mean",
        "running_var",
        "weight",
        "bias",
        "training",
        "momentum",
        "eps",
    ),
}
LINKS = {
    "softmax": SOFTMAX,
    "special_softmax": SOFTMAX,
    "sigmoid": SIGMOID,
    "special_expit": SIGMOID,
    "exp": EXP,
    "softplus": SOFTPLUS,
}
ARGUMENTS = {
    LINEAR: ("input", "weight", "bias"),
    CONVOLUTION: ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
}


class Call(NamedTuple):
    """One linear or convolutional call, a product inside an attention or a recurrent layer, or
    the scale and shift of a norm.
    """

    kind: str
    input: Tensor  # of a norm: before its scale and shift, if `read_norm` was asked for it
    weight: Tensor
    bias: Tensor | None
    result: Tensor
    options: dict[str, Any]  # of a convolution
    # of a convolution; of the weight of a norm over the last dimensions, and 0 for one over
    # channels
    dimensions: int
    first: int = (
        0  # the first row of the weight that is used: attention has three projections in one weight
    )
    bias_first: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """Identifies the rows of the weight."""
        return id(self.weight), self.first

    @property
    def out(self) -> int:
        """The number of rows of the weight that are used."""
        return self.result.shape[-1] if self.kind == LINEAR else self.weight.shape[0]


def read(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> Call | None:
    """The call, if it has a Kronecker form (a grouped convolution has none)."""
    kind = LINEAR if func is F.linear else CONVOLUTION if func in CONVOLUTIONS else None
    if kind is None or not isinstance(result, Tensor):
        return None
    given = dict(zip(ARGUMENTS[kind], args, strict=False)) | dict(kwargs)
    options: dict[str, Any] = {
        key: given[key] for key in ("stride", "padding", "dilation") if key in given
    }
    if given.get("groups", 1) != 1:
        return None
    return Call(
        kind,
        given["input"],
        given["weight"],
        given.get("bias"),
        result,
        options,
        CONVOLUTIONS.get(func, 0),
    )


def read_norm(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Any,
    plain: bool = False,
) -> Call | None:
    """The call, if it is a norm with a scale.

    plain: with its values before scale and shift as its input.
    """
    if func not in NORMS or not isinstance(result, Tensor):
        return None
    given = dict(zip(NORMS[func], args, strict=False)) | dict(kwargs)
    weight, bias = given.pop("weight", None), given.pop("bias", None)
    if weight is None:
        return None
    values = func(**given) if plain else given["input"]
    return Call(NORM, values, weight, bias, result, {}, weight.dim() if func is F.layer_norm else 0)


class Probe(TorchFunctionMode):
    """A record of one forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.links: list[
            tuple[str, Tensor]
        ] = []  # results of functions that a likelihood may apply itself
        self.uses: dict[int, list[str]] = {}  # by id of a tensor
        self.bytes = 0

    @property
    def linears(self) -> list[Call]:
        return [call for call in self.calls if call.kind == LINEAR]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        attention = read_attention(func, args, kwargs)
        if attention is not None:
            return self._attend(attention)
        recurrence = read_recurrence(func, args, kwargs)
        if recurrence is not None:
            return recur(recurrence, self._project)
        result = func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__":  # shape, dtype, …
            return result
        call = read(func, args, kwargs, result) or read_norm(func, args, kwargs, result)
        if call is not None:
            self.calls.append(call)
        link = LINKS.get(getattr(func, "__name__", ""))
        if link is not None and isinstance(result, Tensor):
            self.links.append((link, result))
        for place, value in enumerate([*args, *kwargs.values()]):
            for tensor in value if isinstance(value, tuple | list) else (value,):
                if isinstance(tensor, torch.nn.Parameter):
                    role = call.kind if call is not None and place > 0 else OTHER
                    self.uses.setdefault(id(tensor), []).append(role)
        if isinstance(result, Tensor):
            self.bytes += result.numel() * result.element_size()
        return result

    def _attend(self, given: Mapping[str, Any]) -> Any:
        for extra in ("bias_k", "bias_v"):
            if given[extra] is not None:
                self.uses.setdefault(id(given[extra]), []).append(OTHER)
        length, rows, _ = given["query"].shape
        scores = rows * given["num_heads"] * length * len(given["key"])
        # scores, attention, and one for the products
        self.bytes += 3 * scores * given["query"].element_size()
        return attend(given, self._project)

    def _project(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        first: int,
        bias_first: int,
        count: int,
    ) -> Tensor:
        result = project(x, weight, bias, first, bias_first, count)
        self.calls.append(Call(LINEAR, x, weight, bias, result, {}, 0, first, bias_first))
        for tensor in (weight, bias):
            self.uses.setdefault(id(tensor), []).append(LINEAR)
        # gates and states of a recurrent layer, or q, k and v
        self.bytes += 4 * result.numel() * result.element_size()
        return result


class Inputs(TorchFunctionMode):
    """Keeps the input of the linear call with one weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.input: Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.linear:
            call = read(func, args, kwargs or {}, result)
            if call is not None and call.weight is self.weight:
                self.input = call.input
        return result


class Layers(TorchFunctionMode):
    """Keeps the calls with the given weights, and adds to each result a zero, with respect to
    which gradients are taken.
    """

    def __init__(self, weights: Mapping[int, str]) -> None:
        super().__init__()
        self.weights = weights  # id of a weight -> its name
        self.calls: list[tuple[str, Call, Tensor]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        attention = read_attention(func, args, kwargs)
        if attention is not None:
            return attend(attention, self._project)
        recurrence = read_recurrence(func, args, kwargs)
        if recurrence is not None:
            return recur(recurrence, self._project)
        result = func(*args, **kwargs)
        if func is not F.linear and func not in CONVOLUTIONS and func not in NORMS:
            return result
        call = read(func, args, kwargs, result)
        if call is None and id(_weight_of_norm(func, args, kwargs)) in self.weights:
            call = read_norm(func, args, kwargs, result, plain=True)
        return result if call is None else self._watched(call)

    def _project(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        first: int,
        bias_first: int,
        count: int,
    ) -> Tensor:
        result = project(x, weight, bias, first, bias_first, count)
        return self._watched(Call(LINEAR, x, weight, bias, result, {}, 0, first, bias_first))

    def _watched(self, call: Call) -> Tensor:
        if id(call.weight) not in self.weights:
            return call.result
        zero = torch.zeros_like(call.result, requires_grad=True)
        self.calls.append((self.weights[id(call.weight)], call, zero))
        return call.result + zero


def _weight_of_norm(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    return (
        (dict(zip(NORMS.get(func, ()), args, strict=False)) | dict(kwargs)).get("weight")
        if func in NORMS
        else None
    )


def row_axis(call: Call, rows: int, other: Call, other_rows: int) -> int | None:
    """The dimension of the call's input that holds the rows, by the same call for another number of
    rows.

    It may hold a fixed number of places for each row (windows, frames), with the places of one row
    beside each other. None where no dimension does, or one that the layer works on.
    """
    shape, other_shape = call.input.shape, other.input.shape
    if len(shape) != len(other_shape) or call.result.dim() != call.input.dim():
        return None
    different = [
        axis for axis, (one, two) in enumerate(zip(shape, other_shape, strict=True)) if one != two
    ]
    if len(different) != 1:
        return None
    axis = different[0]
    if shape[axis] % rows or shape[axis] * other_rows != other_shape[axis] * rows:
        return None
    trailing = call.dimensions if call.kind == NORM else 1
    last_dimensions = call.kind == LINEAR or (call.kind == NORM and trailing > 0)
    # convolutions and norms over channels have rows first
    own = len(shape) - trailing if last_dimensions else 1
    whole = call.kind != CONVOLUTION or len(shape) == call.dimensions + 2
    return axis if axis < own and whole else None


def patches(call: Call, rows: int, axis: int = 0, graph: bool = False) -> Tensor:
    """The inputs that the weight multiplies, for each position: (rows, T, F).

    graph: with their autograd graph.
    """
    x = call.input if graph else call.input.detach()
    if call.kind != CONVOLUTION:
        return by_place(call, x, rows, axis)
    n = call.dimensions
    kernel = call.weight.shape[2:]
    stride, dilation = (_spread(call.options.get(key, 1), n) for key in ("stride", "dilation"))
    padding = call.options.get("padding", 0)
    if padding == "valid":
        padding = 0
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        pads = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    else:
        pads = [p for p in reversed(_spread(padding, n)) for _ in range(2)]
    x = F.pad(x, pads)
    for along in range(n):  # (B, C, spatial…) -> windows appended: (B, C, positions…, kernel…)
        reach = dilation[along] * (kernel[along] - 1) + 1
        x = x.unfold(2 + along, reach, stride[along])[..., :: dilation[along]]
    places, windows = list(range(2, 2 + n)), list(range(2 + n, 2 + 2 * n))
    x = x.permute(0, *places, 1, *windows)
    return x.reshape(rows, -1, call.weight[0].numel())


def by_place(call: Call, values: Tensor, rows: int, axis: int = 0) -> Tensor:
    """Values or gradients of a call's result, or the input of a linear call or norm, for each
    position: (rows, T, out).
    """
    if call.kind == LINEAR:
        return values.movedim(axis, 0).reshape(rows, -1, values.shape[-1])
    if call.dimensions and call.kind == NORM:
        return values.movedim(axis, 0).reshape(rows, -1, call.weight.numel())
    channels = values.unsqueeze(2) if values.dim() == 2 else values.flatten(2)
    return channels.mT.reshape(rows, -1, values.shape[1])


def _spread(value: Any, n: int) -> list[int]:
    return [int(value)] * n if isinstance(value, int) else [int(v) for v in value]
