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
from ssla.network.attention import compute_attention, compute_projection, read_attention
from ssla.network.recurrence import compute_recurrence, read_recurrence

# Operations of a `Call`, and uses of a parameter: OTHER is a use outside these layers.
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
LINKS = {  # names of torch's functions, and the link of a likelihood that they compute
    "softmax": SOFTMAX,
    "special_softmax": SOFTMAX,
    "sigmoid": SIGMOID,
    "special_expit": SIGMOID,
    "exp": EXP,
    "softplus": SOFTPLUS,
}
ARGUMENTS = {  # names of the arguments, in their order
    LINEAR: ("input", "weight", "bias"),
    CONVOLUTION: ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
}


class Call(NamedTuple):
    """One linear or convolutional call, a product inside an attention or a recurrent layer, or
    the scale and shift of a norm.
    """

    operation: str  # LINEAR, CONVOLUTION or NORM
    input: Tensor  # of a norm read with `before_scale`: the values before its scale and shift
    weight: Tensor
    bias: Tensor | None
    result: Tensor
    options: dict[str, Any]  # of a convolution
    # Spatial dimensions of a convolution; for a norm over the last dimensions, how many these are;
    # 0 for a norm over channels and for a linear call.
    dimensions: int
    # The first rows of weight and bias that are used: an attention has three projections in one
    # weight.
    first: int = 0
    bias_first: int = 0

    @property
    def rows_key(self) -> tuple[int, int]:
        """Return what identifies the rows of the weight: its id, and the first row that is used."""
        return id(self.weight), self.first

    @property
    def output_count(self) -> int:
        """Return the number of rows of the weight that are used, one for each output."""
        # A linear call inside an attention may use some rows of its weight.
        return self.result.shape[-1] if self.operation == LINEAR else self.weight.shape[0]


def read_layer(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> Call | None:
    """Return the call of a linear or convolutional layer; None for any other call.

    func, args, kwargs, result: the call and its result. The answer is also None for a grouped
    convolution, which has no Kronecker form.
    """
    if func is F.linear:
        operation = LINEAR
    elif func in CONVOLUTIONS:
        operation = CONVOLUTION
    else:
        return None
    given = dict(zip(ARGUMENTS[operation], args, strict=False)) | dict(kwargs)
    if not isinstance(result, Tensor) or given.get("groups", 1) != 1:
        return None
    names = ("stride", "padding", "dilation")
    options: dict[str, Any] = {name: given[name] for name in names if name in given}
    return Call(
        operation,
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
    before_scale: bool = False,
) -> Call | None:
    """Return the call of a norm with a scale; None for any other call.

    func, args, kwargs, result: the call and its result. before_scale: whether `Call.input` holds
    the values before scale and shift, which takes a second call of the norm, or the norm's input.
    """
    if func not in NORMS or not isinstance(result, Tensor):
        return None
    given = dict(zip(NORMS[func], args, strict=False)) | dict(kwargs)
    weight = given.pop("weight", None)
    bias = given.pop("bias", None)
    if weight is None:
        return None
    # Without its weight and bias, the norm returns the values before scale and shift.
    values = func(**given) if before_scale else given["input"]
    last_dimensions = weight.dim() if func is F.layer_norm else 0
    return Call(NORM, values, weight, bias, result, {}, last_dimensions)


class Probe(TorchFunctionMode):
    """A context that records one forward pass."""

    def __init__(self) -> None:
        """Start an empty record."""
        super().__init__()
        self.calls: list[Call] = []
        # Functions that a likelihood may apply itself (values of LINKS), with their results.
        self.links: list[tuple[str, Tensor]] = []
        self.uses: dict[int, list[str]] = {}  # operations that use a parameter, by its id
        self.bytes = 0  # of the results of all calls

    @property
    def linears(self) -> list[Call]:
        """Return the linear calls in their order, also those inside attentions."""
        return [call for call in self.calls if call.operation == LINEAR]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the result of the function, and record the call.

        Attention and recurrent layers are computed step by step, so that their products are
        recorded. types is part of the protocol of torch.
        """
        kwargs = kwargs or {}
        attention = read_attention(func, args, kwargs)
        if attention is not None:
            self._record_attention(attention)
            return compute_attention(attention, self._project_and_record)
        recurrence = read_recurrence(func, args, kwargs)
        if recurrence is not None:
            return compute_recurrence(recurrence, self._project_and_record)
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
        """Record how a function uses each parameter among its arguments.

        call: the function's call if it is a layer's; None for any other function.
        """
        for index, argument in enumerate(arguments):
            for tensor in argument if isinstance(argument, tuple | list) else (argument,):
                if isinstance(tensor, torch.nn.Parameter):
                    # The first argument of a layer is its input: it is not used as a weight there.
                    use = call.operation if call is not None and index > 0 else OTHER
                    self.uses.setdefault(id(tensor), []).append(use)

    def _record_attention(self, given: Mapping[str, Any]) -> None:
        """Record the bytes of an attention, and its parameters outside the projections.

        given: the arguments of the attention by name.
        """
        for name in ("bias_k", "bias_v"):
            if given[name] is not None:
                self.uses.setdefault(id(given[name]), []).append(OTHER)
        length, rows, _ = given["query"].shape
        scores = rows * given["num_heads"] * length * len(given["key"])  # how many numbers
        # Three arrays of that size: scores, attention, and one for the products.
        self.bytes += 3 * scores * given["query"].element_size()

    def _project_and_record(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        first: int,
        bias_first: int,
        count: int,
    ) -> Tensor:
        """Return a product inside an attention or a recurrent layer, recorded as a linear call.

        The arguments are those of `Projection`.
        """
        result = compute_projection(x, weight, bias, first, bias_first, count)
        self.calls.append(Call(LINEAR, x, weight, bias, result, {}, 0, first, bias_first))
        for tensor in (weight, bias):
            self.uses.setdefault(id(tensor), []).append(LINEAR)
        # Four arrays: gates and states of a recurrent layer, or q, k and v.
        self.bytes += 4 * result.numel() * result.element_size()
        return result


class InputWatch(TorchFunctionMode):
    """A context that keeps the input of the linear call with one weight."""

    def __init__(self, weight: Tensor) -> None:
        """Watch one weight."""
        super().__init__()
        self.weight = weight
        self.input: Tensor | None = None  # of the last call with the weight; None before it

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the result of the function; keep its input if it is a linear call with the weight.

        types is part of the protocol of torch.
        """
        result = func(*args, **(kwargs or {}))
        if func is F.linear:
            call = read_layer(func, args, kwargs or {}, result)
            if call is not None and call.weight is self.weight:
                self.input = call.input
        return result


class LayerWatch(TorchFunctionMode):
    """A context that keeps the calls with the given weights and makes their results differentiable.

    The context adds a zero to each result. The gradient with respect to this zero is the gradient
    in the result, also where nothing before the result requires a gradient.
    """

    def __init__(self, weights: Mapping[int, str]) -> None:
        """Watch the weights with these ids; the values are their names."""
        super().__init__()
        self.weights = weights
        self.calls: list[tuple[str, Call, Tensor]] = []  # name of the weight, call, zero

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the result of the function, plus a zero if it uses one of the weights.

        Such a call is kept. Attention and recurrent layers are computed step by step, so that their
        products are kept. types is part of the protocol of torch.
        """
        kwargs = kwargs or {}
        attention = read_attention(func, args, kwargs)
        if attention is not None:
            return compute_attention(attention, self._project_and_watch)
        recurrence = read_recurrence(func, args, kwargs)
        if recurrence is not None:
            return compute_recurrence(recurrence, self._project_and_watch)
        result = func(*args, **kwargs)
        call = read_layer(func, args, kwargs, result) or read_norm(func, args, kwargs, result)
        if call is None or id(call.weight) not in self.weights:
            return result

        # The values before scale and shift take a second call of the norm, so they are computed
        # only for norms that are watched.
        if call.operation == NORM:
            call = read_norm(func, args, kwargs, result, before_scale=True)
        assert call is not None
        return self._add_zero(call)

    def _project_and_watch(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        first: int,
        bias_first: int,
        count: int,
    ) -> Tensor:
        """Return a product inside an attention or a recurrent layer, plus a zero if it is watched.

        The arguments are those of `Projection`.
        """
        result = compute_projection(x, weight, bias, first, bias_first, count)
        if id(weight) not in self.weights:
            return result
        return self._add_zero(Call(LINEAR, x, weight, bias, result, {}, 0, first, bias_first))

    def _add_zero(self, call: Call) -> Tensor:
        """Keep the call and return its result plus a zero that requires a gradient."""
        zero = torch.zeros_like(call.result, requires_grad=True)
        self.calls.append((self.weights[id(call.weight)], call, zero))
        return call.result + zero


def find_row_axis(call: Call, rows: int, other: Call, other_rows: int) -> int | None:
    """Return the dimension of the call's input that holds the rows; None if there is none.

    other: the same call of a forward pass with another number of rows. The dimension is the only
    one whose size differs, in proportion to the rows: it may hold several places for each
    row (windows, frames), with the places of one row beside each other. The result is also None if
    the layer itself works on that dimension.
    """
    shape, other_shape = call.input.shape, other.input.shape
    if len(shape) != len(other_shape) or call.result.dim() != call.input.dim():
        return None
    sizes = zip(shape, other_shape, strict=True)
    different = [axis for axis, (size, other_size) in enumerate(sizes) if size != other_size]
    if len(different) != 1:
        return None
    axis = different[0]
    is_proportional = shape[axis] * other_rows == other_shape[axis] * rows
    if shape[axis] % rows or not is_proportional:
        return None

    # Linear layers, and norms over the last dimensions, may have rows in any other dimension.
    # Convolutions and norms over channels have them first.
    trailing = call.dimensions if call.operation == NORM else 1
    over_last = call.operation == LINEAR or (call.operation == NORM and trailing > 0)
    allowed_axes = len(shape) - trailing if over_last else 1

    # A convolution also takes an input without a dimension for rows.
    has_rows = call.operation != CONVOLUTION or len(shape) == call.dimensions + 2
    return axis if axis < allowed_axes and has_rows else None


def arrange_inputs_by_position(call: Call, rows: int, axis: int = 0, graph: bool = False) -> Tensor:
    """Return the inputs that the weight multiplies at each position: (rows, T, F).

    A position is a place of a sequence, or a window of a convolution, with its F entries. axis: the
    dimension of the call's input that holds the rows. graph: whether the result keeps the autograd
    graph of the input.
    """
    x = call.input if graph else call.input.detach()
    if call.operation != CONVOLUTION:
        return arrange_values_by_position(call, x, rows, axis)
    n = call.dimensions
    kernel = call.weight.shape[2:]
    stride = _expand_option(call.options.get("stride", 1), n)
    dilation = _expand_option(call.options.get("dilation", 1), n)
    x = F.pad(x, _list_padding_sides(call, dilation))

    # Each `unfold` appends the windows along one dimension: (B, C, spatial…) becomes
    # (B, C, positions…, kernel…).
    for k in range(n):
        reach = dilation[k] * (kernel[k] - 1) + 1
        x = x.unfold(2 + k, reach, stride[k])[..., :: dilation[k]]

    # In the order of the weight's entries: (B, positions…, C, kernel…).
    positions = range(2, 2 + n)
    windows = range(2 + n, 2 + 2 * n)
    x = x.permute(0, *positions, 1, *windows)
    return x.reshape(rows, -1, call.weight[0].numel())


def _list_padding_sides(call: Call, dilation: list[int]) -> list[int]:
    """Return the padding of a convolution before and after each dimension, last dimension first.

    This is the order that `F.pad` needs. dilation: one number for each dimension.
    """
    padding = call.options.get("padding", 0)
    if padding == "same":
        kernel = call.weight.shape[2:]
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        # As in torch, the larger half of an odd total comes after.
        return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    sizes = _expand_option(0 if padding == "valid" else padding, call.dimensions)
    return [size for size in reversed(sizes) for _ in range(2)]


def arrange_values_by_position(call: Call, values: Tensor, rows: int, axis: int = 0) -> Tensor:
    """Return values at each position: (rows, T, out).

    values: of the shape of the call's result, such as gradients in it, or of its input for a linear
    call or a norm. axis: their dimension that holds the rows.
    """
    if call.operation == LINEAR:
        return values.movedim(axis, 0).reshape(rows, -1, values.shape[-1])
    if call.dimensions and call.operation == NORM:
        return values.movedim(axis, 0).reshape(rows, -1, call.weight.numel())
    # A convolution or a norm over channels: (B, C) or (B, C, places…), with the rows first.
    channels = values.unsqueeze(2) if values.dim() == 2 else values.flatten(2)
    return channels.mT.reshape(rows, -1, values.shape[1])


def _expand_option(value: Any, n: int) -> list[int]:
    """Return an option of a convolution as one number for each of its n dimensions.

    value: one number for all of them, or a sequence of n numbers.
    """
    return [int(value)] * n if isinstance(value, int) else [int(v) for v in value]
