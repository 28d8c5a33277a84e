"""Intercepts torch calls, without hooks and without changes to the module.

`Probe` records one forward pass: the linear calls, the uses of each parameter, and the bytes of the
results. `InputWatch` keeps the input of one layer. `LayerWatch` keeps the inputs of many layers and
makes their outputs differentiable. The products inside an attention or a recurrent layer count as
linear calls, and the scales and shifts of norms as calls of their own kind.
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
CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}  # spatial dimensions
NORMS = {  # functions, with the names of their first arguments
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
    # Spatial dimensions of a convolution; dimensions of the weight of a norm over the last ones,
    # and 0 for a norm over channels.
    dimensions: int
    # The first rows of weight and bias that are used: an attention has three projections in one
    # weight.
    first: int = 0
    bias_first: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """Return what identifies the rows of the weight."""
        return id(self.weight), self.first

    @property
    def out(self) -> int:
        """Return the number of rows of the weight that are used."""
        return self.result.shape[-1] if self.kind == LINEAR else self.weight.shape[0]


def read_layer(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> Call | None:
    """Return the call of a linear or convolutional layer; None if it is another one.

    Grouped convolutions count as others, because they have no Kronecker form.
    """
    if func is F.linear:
        kind = LINEAR
    elif func in CONVOLUTIONS:
        kind = CONVOLUTION
    else:
        return None
    given = dict(zip(ARGUMENTS[kind], args, strict=False)) | dict(kwargs)
    # A grouped convolution has no Kronecker form.
    if not isinstance(result, Tensor) or given.get("groups", 1) != 1:
        return None
    names = ("stride", "padding", "dilation")
    options: dict[str, Any] = {name: given[name] for name in names if name in given}
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
    """Return the call of a norm with a scale; None if it is another one.

    plain: compute the values before scale and shift as its input, in place of the norm's own input.
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
        """Start an empty record."""
        super().__init__()
        self.calls: list[Call] = []
        # Results of functions that a likelihood may apply itself.
        self.links: list[tuple[str, Tensor]] = []
        self.uses: dict[int, list[str]] = {}  # kinds of the calls, by the id of a parameter
        self.bytes = 0

    @property
    def linears(self) -> list[Call]:
        """Return the linear calls."""
        return [call for call in self.calls if call.kind == LINEAR]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function and record what is needed of it.

        Attention and recurrent layers are computed step by step, so that their products are
        recorded.
        """
        kwargs = kwargs or {}
        attention = read_attention(func, args, kwargs)
        if attention is not None:
            self._record_attention(attention)
            return attend(attention, self._project)
        recurrence = read_recurrence(func, args, kwargs)
        if recurrence is not None:
            return recur(recurrence, self._project)
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":  # shape, dtype, …
            return result
        call = read_layer(func, args, kwargs, result) or read_norm(func, args, kwargs, result)
        if call is not None:
            self.calls.append(call)
        if name in LINKS and isinstance(result, Tensor):
            self.links.append((LINKS[name], result))
        self._record_uses(call, [*args, *kwargs.values()])
        if isinstance(result, Tensor):
            self.bytes += result.numel() * result.element_size()
        return result

    def _record_uses(self, call: Call | None, arguments: list[Any]) -> None:
        """Record the kind of the call for each parameter among its arguments."""
        for index, argument in enumerate(arguments):
            for tensor in argument if isinstance(argument, tuple | list) else (argument,):
                if isinstance(tensor, torch.nn.Parameter):
                    # The first argument of a layer is its input, which is no use as a weight.
                    use = call.kind if call is not None and index > 0 else OTHER
                    self.uses.setdefault(id(tensor), []).append(use)

    def _record_attention(self, given: Mapping[str, Any]) -> None:
        """Record the parameters of an attention that are used outside its projections, and its
        bytes.
        """
        for name in ("bias_k", "bias_v"):
            if given[name] is not None:
                self.uses.setdefault(id(given[name]), []).append(OTHER)
        length, rows, _ = given["query"].shape
        scores = rows * given["num_heads"] * length * len(given["key"])
        # Scores, attention, and one array for the products.
        self.bytes += 3 * scores * given["query"].element_size()

    def _project(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        first: int,
        bias_first: int,
        count: int,
    ) -> Tensor:
        """Compute a product inside an attention or a recurrent layer, and record it as a linear
        call.
        """
        result = project(x, weight, bias, first, bias_first, count)
        self.calls.append(Call(LINEAR, x, weight, bias, result, {}, 0, first, bias_first))
        for tensor in (weight, bias):
            self.uses.setdefault(id(tensor), []).append(LINEAR)
        # Four arrays: gates and states of a recurrent layer, or q, k and v.
        self.bytes += 4 * result.numel() * result.element_size()
        return result


class InputWatch(TorchFunctionMode):
    """A context that keeps the input of the linear call with one weight."""

    def __init__(self, weight: Tensor) -> None:
        """Watch one weight; `input` is None until it is used."""
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
        """Call the function, and keep its input if it is the linear call with the weight."""
        result = func(*args, **(kwargs or {}))
        if func is F.linear:
            call = read_layer(func, args, kwargs or {}, result)
            if call is not None and call.weight is self.weight:
                self.input = call.input
        return result


class LayerWatch(TorchFunctionMode):
    """A context that keeps the calls with the given weights and makes their results differentiable.

    It adds a zero to each result, and gradients are taken with respect to this zero.
    """

    def __init__(self, weights: Mapping[int, str]) -> None:
        """Watch the weights with these ids; values are their names."""
        super().__init__()
        self.weights = weights  # id of a weight -> its name
        self.calls: list[tuple[str, Call, Tensor]] = []  # name of the weight, call, zero

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function, and add a zero to its result if it uses one of the weights.

        Attention and recurrent layers are computed step by step, so that their products are kept.
        """
        kwargs = kwargs or {}
        attention = read_attention(func, args, kwargs)
        if attention is not None:
            return attend(attention, self._project)
        recurrence = read_recurrence(func, args, kwargs)
        if recurrence is not None:
            return recur(recurrence, self._project)
        result = func(*args, **kwargs)
        call = read_layer(func, args, kwargs, result) or read_norm(func, args, kwargs, result)
        if call is None or id(call.weight) not in self.weights:
            return result
        # The values before scale and shift take a second call of the norm, so they are computed
        # only for norms that are watched.
        if call.kind == NORM:
            call = read_norm(func, args, kwargs, result, plain=True)
        assert call is not None
        return self._add_zero(call)

    def _project(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        first: int,
        bias_first: int,
        count: int,
    ) -> Tensor:
        """Compute a product inside an attention or a recurrent layer, with a zero added if it is
        watched.
        """
        result = project(x, weight, bias, first, bias_first, count)
        if id(weight) not in self.weights:
            return result
        return self._add_zero(Call(LINEAR, x, weight, bias, result, {}, 0, first, bias_first))

    def _add_zero(self, call: Call) -> Tensor:
        """Keep the call and return its result plus a zero that requires a gradient."""
        zero = torch.zeros_like(call.result, requires_grad=True)
        self.calls.append((self.weights[id(call.weight)], call, zero))
        return call.result + zero


def row_axis(call: Call, rows: int, other: Call, other_rows: int) -> int | None:
    """Return the dimension of the call's input that holds the rows, or None.

    It is the one that differs from the input of the same call for another number of rows. It may
    hold a fixed number of places for each row (windows, frames), with the places of one row beside
    each other. The result is None where no dimension holds the rows, or one that the layer works
    on.
    """
    shape, other_shape = call.input.shape, other.input.shape
    if len(shape) != len(other_shape) or call.result.dim() != call.input.dim():
        return None
    sizes = zip(shape, other_shape, strict=True)
    different = [axis for axis, (size, other_size) in enumerate(sizes) if size != other_size]
    if len(different) != 1:
        return None
    axis = different[0]
    if shape[axis] % rows or shape[axis] * other_rows != other_shape[axis] * rows:
        return None
    # Linear layers, and norms over the last dimensions, may have rows in any other dimension.
    # Convolutions and norms over channels have them first.
    trailing = call.dimensions if call.kind == NORM else 1
    over_last = call.kind == LINEAR or (call.kind == NORM and trailing > 0)
    allowed_axes = len(shape) - trailing if over_last else 1
    # A convolution also takes an input without a dimension for rows.
    has_rows = call.kind != CONVOLUTION or len(shape) == call.dimensions + 2
    return axis if axis < allowed_axes and has_rows else None


def inputs_by_position(call: Call, rows: int, axis: int = 0, graph: bool = False) -> Tensor:
    """Return the inputs that the weight multiplies, for each position: (rows, T, F).

    graph: keep their autograd graph.
    """
    x = call.input if graph else call.input.detach()
    if call.kind != CONVOLUTION:
        return values_by_position(call, x, rows, axis)
    n = call.dimensions
    kernel = call.weight.shape[2:]
    stride = _for_each_dimension(call.options.get("stride", 1), n)
    dilation = _for_each_dimension(call.options.get("dilation", 1), n)
    x = F.pad(x, _padding_sides(call, dilation))
    # Each `unfold` appends the windows along one dimension: (B, C, spatial…) becomes
    # (B, C, positions…, kernel…).
    for k in range(n):
        reach = dilation[k] * (kernel[k] - 1) + 1
        x = x.unfold(2 + k, reach, stride[k])[..., :: dilation[k]]
    positions = range(2, 2 + n)
    windows = range(2 + n, 2 + 2 * n)
    x = x.permute(0, *positions, 1, *windows)
    return x.reshape(rows, -1, call.weight[0].numel())


def _padding_sides(call: Call, dilation: list[int]) -> list[int]:
    """Return the padding of a convolution before and after each dimension, last dimension first."""
    padding = call.options.get("padding", 0)
    if padding == "same":
        kernel = call.weight.shape[2:]
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    sizes = _for_each_dimension(0 if padding == "valid" else padding, call.dimensions)
    return [size for size in reversed(sizes) for _ in range(2)]


def values_by_position(call: Call, values: Tensor, rows: int, axis: int = 0) -> Tensor:
    """Return values of a call's result for each position: (rows, T, out).

    They may be gradients in the result, or the input of a linear call or norm.
    """
    if call.kind == LINEAR:
        return values.movedim(axis, 0).reshape(rows, -1, values.shape[-1])
    if call.dimensions and call.kind == NORM:
        return values.movedim(axis, 0).reshape(rows, -1, call.weight.numel())
    channels = values.unsqueeze(2) if values.dim() == 2 else values.flatten(2)
    return channels.mT.reshape(rows, -1, values.shape[1])


def _for_each_dimension(value: Any, n: int) -> list[int]:
    """Return an option of a convolution as one number for each of its n dimensions."""
    return [int(value)] * n if isinstance(value, int) else [int(v) for v in value]
