"""The only room that sees `nn.Module`.

The user's module is copied once and the copy is frozen, so nothing that happens here, or in the
module's own forward, reaches the original; training it further does not change a posterior either.
Features are read by watching `linear` calls pass by, without hooks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.overrides import TorchFunctionMode

from ssla._checks import finite, unknown_name
from ssla.batches import Inputs, leaves, map_inputs, row_count, slice_inputs
from ssla.jacobians import DenseJacobian, Features, Jacobian
from ssla.parameters import Layout, contiguous_layout, last_layer_layout

LAST_LAYER = "last_layer"
ALL = "all"
RANDOM_IN_TRAINING = (nn.modules.dropout._DropoutNd, nn.RReLU)
BATCH_DEPENDENT = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


class Network(Protocol):
    """f_θ(x) and its Jacobian in the free parameters, for any θ (P,) in float64."""

    @property
    def layout(self) -> Layout: ...

    @property
    def theta(self) -> Tensor:
        """The free parameters as trained (P,)."""
        ...

    @property
    def outputs(self) -> int:
        """C."""
        ...

    @property
    def linear(self) -> bool:
        """Whether f is linear in θ, so that J does not depend on θ."""
        ...

    @property
    def offset(self) -> Tensor | None:
        """What a linear f adds to J θ: a bias that is not free (C,)."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The model's floating dtype: results are given back in it."""
        ...

    @property
    def device(self) -> torch.device: ...

    def cast(self, x: Inputs) -> Inputs:
        """The model's dtype and device; finite, or ValueError."""
        ...

    def chunks(self, x: Inputs, budget: int) -> Iterator[Inputs]:
        """Rows in pieces whose intermediate results fit the budget (bytes)."""
        ...

    def rows_at_once(self, budget: int) -> int: ...

    def expand(self, x: Inputs, theta: Tensor) -> tuple[Tensor, Jacobian]:
        """f (B, C) and J at θ, on the CPU, for cast x."""
        ...

    def evaluate(self, x: Inputs, theta: Tensor) -> Tensor:
        """f (B, C) at θ, for cast x."""
        ...


class _Watch(TorchFunctionMode):
    """Sees every torch call: keeps the linear ones, adds up the bytes of all results."""

    def __init__(self, only: Tensor | None = None) -> None:
        super().__init__()
        self.only = only
        self.linears: list[tuple[Tensor, Tensor, Tensor | None, Tensor]] = []
        self.bytes = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is nn.functional.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
            if self.only is None or given["weight"] is self.only:
                self.linears.append((given["input"], given["weight"], given.get("bias"), result))
        if self.only is None and isinstance(result, Tensor):
            self.bytes += result.numel() * result.element_size()
        return result


@dataclass(frozen=True, eq=False)
class _Frozen:
    """A private copy of the user's module and how to call it."""

    module: nn.Module
    dtype: torch.dtype
    device: torch.device
    call: Callable[[nn.Module, Inputs], Any]
    keep_integers: bool
    bytes_per_row: int

    def cast(self, x: Inputs) -> Inputs:
        if row_count(x) == 0:
            raise ValueError("x has no rows. Give at least one input.")
        for part in leaves(x):
            finite("x", part, "Drop or impute those rows; a network cannot answer for them.")
        return map_inputs(self._cast, x)

    def _cast(self, part: Tensor) -> Tensor:
        keep = part.dtype == torch.bool or (self.keep_integers and not part.is_floating_point())
        return part.to(self.device) if keep else part.to(self.device, self.dtype)

    def forward(self, x: Inputs) -> Tensor:
        with torch.no_grad():
            return as_outputs(self.call(self.module, x), row_count(x))

    def rows_at_once(self, budget: int, extra_per_row: int) -> int:
        return max(min(budget // (self.bytes_per_row + extra_per_row), 65536), 1)


def _chunks(x: Inputs, rows: int) -> Iterator[Inputs]:
    for start in range(0, row_count(x), rows):
        yield slice_inputs(x, slice(start, start + rows))


@dataclass(frozen=True, eq=False)
class LastLayer:
    """f = φ(x) Wᵀ (+ b): linear in θ, with features φ that the rest of the network computes."""

    frozen: _Frozen
    weight: nn.Parameter
    layout: Layout
    theta: Tensor
    outputs: int
    fold_bias: bool
    offset: Tensor | None  # a bias that is not free (C,)

    linear = True

    @property
    def dtype(self) -> torch.dtype:
        return self.frozen.dtype

    @property
    def device(self) -> torch.device:
        return self.frozen.device

    def cast(self, x: Inputs) -> Inputs:
        return self.frozen.cast(x)

    def rows_at_once(self, budget: int) -> int:
        width = self.layout.size // self.outputs
        return self.frozen.rows_at_once(budget, 8 * (width * (self.outputs + 2) + 4 * self.outputs**2))

    def chunks(self, x: Inputs, budget: int) -> Iterator[Inputs]:
        return _chunks(x, self.rows_at_once(budget))

    def expand(self, x: Inputs, theta: Tensor) -> tuple[Tensor, Jacobian]:
        with _Watch(self.weight) as watch:
            self.frozen.forward(x)
        J = Features(watch.linears[-1][0].to("cpu"), self.outputs, self.fold_bias)
        f = J.push(theta)
        return (f if self.offset is None else f + self.offset.to(f.dtype)), J

    def evaluate(self, x: Inputs, theta: Tensor) -> Tensor:
        return self.expand(x, theta)[0]


@dataclass(frozen=True, eq=False)
class AnyParameters:
    """f_θ for an arbitrary set of parameters; J by reverse-mode differentiation, row by row at once."""

    frozen: _Frozen
    layout: Layout
    theta: Tensor
    outputs: int
    rest: Mapping[str, Tensor] = field(repr=False)

    linear = False
    offset = None

    @property
    def dtype(self) -> torch.dtype:
        return self.frozen.dtype

    @property
    def device(self) -> torch.device:
        return self.frozen.device

    def cast(self, x: Inputs) -> Inputs:
        return self.frozen.cast(x)

    def rows_at_once(self, budget: int) -> int:
        return self.frozen.rows_at_once(budget, 3 * 8 * self.outputs * self.layout.size)

    def chunks(self, x: Inputs, budget: int) -> Iterator[Inputs]:
        return _chunks(x, self.rows_at_once(budget))

    def _free(self, theta: Tensor) -> dict[str, Tensor]:
        named = self.layout.unpack(theta)
        return {name: value.to(self.frozen.device, self.frozen.dtype) for name, value in named.items()}

    def _run(self, free: Mapping[str, Tensor], x: Inputs) -> Tensor:
        wrapped = lambda *a, **k: functional_call(self.frozen.module, {**self.rest, **free}, a, k)  # noqa: E731
        return as_outputs(self.frozen.call(wrapped, x), row_count(x))  # type: ignore[arg-type]

    def evaluate(self, x: Inputs, theta: Tensor) -> Tensor:
        with torch.no_grad():
            return self._run(self._free(theta), x).to("cpu")

    def expand(self, x: Inputs, theta: Tensor) -> tuple[Tensor, Jacobian]:
        free = self._free(theta)

        def one(parameters: Mapping[str, Tensor], row: Inputs) -> tuple[Tensor, Tensor]:
            f = self._run(parameters, map_inputs(lambda part: part.unsqueeze(0), row)).squeeze(0)
            return f, f

        try:
            blocks, f = vmap(jacrev(one, has_aux=True), in_dims=(None, 0))(free, x)
        except RuntimeError as error:
            raise ValueError(
                "The Jacobian of this network could not be taken: a layer does not support batched differentiation "
                f"({str(error).splitlines()[0][:160]}). Use weights='last_layer', or name parameters behind that layer."
            ) from error
        J = torch.cat([blocks[name].flatten(2) for name in self.layout.names], 2)
        return f.detach().to("cpu"), DenseJacobian(J.detach().to("cpu"))


# --- opening a module ------------------------------------------------------------------------


def open_network(model: nn.Module, weights: str | list[str] | tuple[str, ...], x: Inputs) -> Network:
    """Copy the module, check it on the first batch x, and choose how to see its free parameters."""
    frozen, watch, f = _freeze(model, x)
    parameters = dict(frozen.module.named_parameters())
    head = _head(watch, f, parameters)
    names = _scope(model, weights, parameters, head)
    if isinstance(head, _Head) and head.covers(names) and not _tied(model, head.weight):
        return _last_layer(frozen, head, head.bias in names, f.shape[1])
    shapes = {name: parameters[name].shape for name in names}
    layout = contiguous_layout(shapes)
    theta = layout.pack({name: parameters[name] for name in names})
    rest = {name: p.detach() for name, p in parameters.items() if name not in shapes} | dict(frozen.module.named_buffers())
    return AnyParameters(frozen, layout, theta, f.shape[1], rest)


def as_outputs(result: Any, rows: int) -> Tensor:
    """The module's result -> f (N, C)."""
    if not isinstance(result, Tensor):
        raise TypeError(
            f"The network must return one tensor of outputs, but returned {type(result).__name__}. "
            "Wrap it in a module that picks the tensor (for example `.logits`)."
        )
    if result.dim() == 1 and result.shape[0] == rows:
        return result.unsqueeze(1)
    if result.dim() != 2 or result.shape[0] != rows:
        raise ValueError(
            f"The network must return outputs of shape (N, C), here ({rows}, C), but returned {tuple(result.shape)}. "
            "Flatten or pool its output to one row for each input."
        )
    return result


def _freeze(model: nn.Module, x: Inputs) -> tuple[_Frozen, _Watch, Tensor]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, but is a {type(model).__name__}.")
    _check_mode(model)
    try:
        module = copy.deepcopy(model)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ValueError(
            f"The network could not be copied ({error}), and ssla never works on the original. Remove tensors with "
            "gradients from its attributes, or use torch.nn.utils.parametrizations for weight norm."
        ) from error
    module.requires_grad_(False)
    floating = [p for p in module.parameters() if p.is_floating_point()]
    if not floating:
        raise ValueError("The network has no floating-point parameters, so there is nothing to be uncertain about.")
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        finite(f"Parameter or buffer {name!r}", value, "The network has diverged: train it again.")
    # the opening forward writes to a second copy of the buffers: what changes there is found below
    probe = _Frozen(module, floating[0].dtype, floating[0].device, _call_style(x, 0), True, 1)
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    frozen, watch, f = _first_forward(probe, x)
    again = frozen.forward(frozen.cast(x))
    if not torch.equal(f, again):
        raise ValueError(
            "The network gives different outputs for the same input, so it is random. Call model.eval() first, and take "
            "random layers (functional dropout, noise) out of its forward."
        )
    changed = [name for name, value in module.named_buffers() if not torch.equal(value, buffers[name])]
    if changed:
        raise ValueError(f"The network changes its buffers in forward ({', '.join(changed)}). Call model.eval() first.")
    finite("The network's output", f, "Check the scale of the inputs and the trained weights.")
    _check_rows(frozen, x, f)
    return frozen, watch, f


def _check_mode(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        random = isinstance(layer, RANDOM_IN_TRAINING) or (isinstance(layer, nn.RNNBase) and layer.dropout > 0)
        if layer.training and (random or isinstance(layer, BATCH_DEPENDENT)):
            what = "dropout" if random else "batch norm"
            why = "outputs are random" if random else "outputs depend on the batch"
            raise ValueError(
                f"The network is in training mode and has {what} ({name or type(layer).__name__}), so its {why}. "
                "Call model.eval() first."
            )


def _call_style(x: Inputs, attempt: int) -> Callable[[nn.Module, Inputs], Any]:
    """How inputs are handed over: spread first, as one argument second."""
    if isinstance(x, Tensor) or attempt == 1:
        return lambda module, inputs: module(inputs)
    if isinstance(x, Mapping):
        return lambda module, inputs: module(**inputs)
    return lambda module, inputs: module(*inputs)


def _first_forward(probe: _Frozen, x: Inputs) -> tuple[_Frozen, _Watch, Tensor]:
    """Find how the module wants its inputs: spread or whole, integers kept or cast."""
    first: Exception | None = None
    integers = any(not part.is_floating_point() for part in leaves(x))
    for keep in (True, False) if integers else (True,):
        for attempt in (0,) if isinstance(x, Tensor) else (0, 1):
            frozen = _Frozen(probe.module, probe.dtype, probe.device, _call_style(x, attempt), keep, 1)
            inputs = frozen.cast(x)
            try:
                with _Watch() as watch:
                    result = frozen.call(frozen.module, inputs)
            except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError) as error:
                first = first or error
                continue
            f = as_outputs(result, row_count(inputs))
            per_row = max(watch.bytes // row_count(inputs), 8)
            return _Frozen(frozen.module, frozen.dtype, frozen.device, frozen.call, keep, per_row), watch, f
    shapes = [tuple(part.shape) for part in leaves(x)]
    raise ValueError(
        f"The network refused the inputs (shapes {shapes}): {first}. Check the number of columns and how the forward takes "
        "its arguments: a tuple is passed as model(*x), a dict as model(**x)."
    ) from first


def _check_rows(frozen: _Frozen, x: Inputs, f: Tensor) -> None:
    if f.shape[0] < 2:
        return
    alone = frozen.forward(frozen.cast(slice_inputs(x, slice(0, 1))))
    size = float(f.abs().max()) + 1e-30
    if not torch.allclose(alone, f[:1], rtol=1e-2, atol=1e-3 * size):
        raise ValueError(
            "The network's output for a row depends on the other rows of its batch, so rows have no predictive of their "
            "own. Take batch statistics out of its forward (model.eval() for norms)."
        )


@dataclass(frozen=True)
class _Head:
    """The linear layer that makes the output."""

    weight: str
    bias: str | None
    tensor: nn.Parameter
    bias_tensor: Tensor | None
    inputs: int

    def covers(self, names: tuple[str, ...]) -> bool:
        """Whether the names are this layer's weight, with or without its bias."""
        return self.weight in names and set(names) <= {self.weight, self.bias}


def _head(watch: _Watch, f: Tensor, parameters: Mapping[str, nn.Parameter]) -> _Head | str:
    """The last linear layer, or the reason why there is none."""
    if not watch.linears:
        return "no linear layer was called in its forward"
    phi, weight, bias, result = watch.linears[-1]
    if result.numel() != f.numel() or not torch.equal(result.reshape(f.shape), f):
        return "its output is not the output of its last linear layer (something comes after it: a softmax, an exp, a scale?)"
    if phi.dim() != 2:
        return f"its last linear layer sees inputs of shape {tuple(phi.shape)}, not one row for each observation"
    names = {id(p): name for name, p in parameters.items()}
    if id(weight) not in names:
        return "the weight of its last linear layer is computed from other parameters (weight norm or a parametrization)"
    uses = sum(w is weight for _, w, _, _ in watch.linears)
    if uses > 1:
        return f"the weight {names[id(weight)]!r} of its last linear layer is used {uses} times (tied)"
    bias_name = None if bias is None else names.get(id(bias))
    assert isinstance(weight, nn.Parameter)
    return _Head(names[id(weight)], bias_name, weight, bias, phi.shape[1])


def _tied(model: nn.Module, name: str) -> list[str]:
    """Other names of the same parameter."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return [other for other, p in named.items() if p is named[name] and other != name]


def _scope(
    model: nn.Module, weights: str | list[str] | tuple[str, ...], parameters: Mapping[str, nn.Parameter], head: _Head | str
) -> tuple[str, ...]:
    """The names of the free parameters."""
    if weights == ALL:
        return tuple(name for name, p in parameters.items() if p.is_floating_point())
    if weights == LAST_LAYER:
        if isinstance(head, str):
            raise ValueError(
                f"The network has no last layer that weights='last_layer' could use: {head}. Return the raw outputs of a "
                "final nn.Linear (the likelihood applies links such as softmax and exp itself), or use weights='all' or a "
                "list of parameter names."
            )
        tied = _tied(model, head.weight)
        if tied:
            raise ValueError(
                f"The last layer's weight {head.weight!r} is tied to {', '.join(map(repr, tied))}, so the features would change "
                "with it. Untie them, or use weights='all'."
            )
        return tuple(name for name in (head.weight, head.bias) if name is not None)
    if isinstance(weights, str):
        inside = tuple(name for name in parameters if name.startswith(weights + "."))
        if not inside:
            modules = [name for name, _ in model.named_modules() if name]
            raise ValueError(unknown_name("weights", weights, [LAST_LAYER, ALL, *modules]))
        return inside
    if not weights:
        raise ValueError("weights is an empty list. Name at least one parameter, or use 'last_layer' or 'all'.")
    for name in weights:
        if name not in parameters:
            raise ValueError(unknown_name("parameter", name, parameters))
    return tuple(name for name in parameters if name in set(weights))


def _last_layer(frozen: _Frozen, head: _Head, bias_free: bool, outputs: int) -> LastLayer:
    bias_name = head.bias if bias_free else None
    layout = last_layer_layout(head.weight, bias_name, outputs, head.inputs)
    values: dict[str, Tensor] = {head.weight: head.tensor}
    offset: Tensor | None = None
    if bias_name is not None:
        assert head.bias_tensor is not None
        values[bias_name] = head.bias_tensor
    elif head.bias_tensor is not None:
        offset = head.bias_tensor.detach().to("cpu", torch.float64)
    return LastLayer(frozen, head.tensor, layout, layout.pack(values), outputs, bias_name is not None, offset)
