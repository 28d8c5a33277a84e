"""Intercepts torch calls, without hooks and without changes to the module.

`Probe` records one forward pass: the linear calls, the uses of each parameter, and the bytes of the results.
`Inputs` keeps the input of one layer. `Layers` keeps the inputs of many layers and makes their outputs differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

LINEAR = "linear"
CONVOLUTION = "convolution"
OTHER = "other"
CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
SOFTMAX, SIGMOID, EXP, SOFTPLUS = "softmax", "sigmoid", "exp", "softplus"
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
    """One linear or convolutional call."""

    kind: str
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    result: Tensor
    options: dict[str, Any]  # of a convolution
    dimensions: int


def read(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Call | None:
    """The call, if it has a Kronecker form (a grouped convolution has none)."""
    kind = LINEAR if func is F.linear else CONVOLUTION if func in CONVOLUTIONS else None
    if kind is None or not isinstance(result, Tensor):
        return None
    given = dict(zip(ARGUMENTS[kind], args, strict=False)) | dict(kwargs)
    options: dict[str, Any] = {key: given[key] for key in ("stride", "padding", "dilation") if key in given}
    if given.get("groups", 1) != 1:
        return None
    return Call(kind, given["input"], given["weight"], given.get("bias"), result, options, CONVOLUTIONS.get(func, 0))


class Probe(TorchFunctionMode):
    """A record of one forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.links: list[tuple[str, Tensor]] = []  # results of functions that a likelihood may apply itself
        self.uses: dict[int, list[str]] = {}  # by id of a tensor
        self.bytes = 0

    @property
    def linears(self) -> list[Call]:
        return [call for call in self.calls if call.kind == LINEAR]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__":  # shape, dtype, …
            return result
        call = read(func, args, kwargs, result)
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


class Inputs(TorchFunctionMode):
    """Keeps the input of the linear call with one weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.input: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.linear:
            call = read(func, args, kwargs or {}, result)
            if call is not None and call.weight is self.weight:
                self.input = call.input
        return result


class Layers(TorchFunctionMode):
    """Keeps the calls with the given weights, and adds to each result a zero, with respect to which gradients are taken."""

    def __init__(self, weights: Mapping[int, str]) -> None:
        super().__init__()
        self.weights = weights  # id of a weight -> its name
        self.calls: list[tuple[str, Call, Tensor]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not F.linear and func not in CONVOLUTIONS:
            return result
        call = read(func, args, kwargs or {}, result)
        if call is None or id(call.weight) not in self.weights:
            return result
        zero = torch.zeros_like(result, requires_grad=True)
        self.calls.append((self.weights[id(call.weight)], call, zero))
        return result + zero


def patches(call: Call, graph: bool = False) -> Tensor:
    """The inputs that the weight multiplies, a row for each position: (B, T, F). graph: with their autograd graph."""
    x = call.input if graph else call.input.detach()
    if call.kind == LINEAR:
        return x.reshape(x.shape[0], -1, x.shape[-1])
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
    for axis in range(n):  # (B, C, spatial…) -> windows appended: (B, C, positions…, kernel…)
        reach = dilation[axis] * (kernel[axis] - 1) + 1
        x = x.unfold(2 + axis, reach, stride[axis])[..., :: dilation[axis]]
    places, windows = list(range(2, 2 + n)), list(range(2 + n, 2 + 2 * n))
    x = x.permute(0, *places, 1, *windows)
    return x.reshape(x.shape[0], -1, call.weight[0].numel())


def by_place(call: Call, gradient: Tensor) -> Tensor:
    """Gradients of a call's result, a row for each position: (B, T, out)."""
    if call.kind == LINEAR:
        return gradient.reshape(gradient.shape[0], -1, gradient.shape[-1])
    return gradient.flatten(2).mT


def _spread(value: Any, n: int) -> list[int]:
    return [int(value)] * n if isinstance(value, int) else [int(v) for v in value]
