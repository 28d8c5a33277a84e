"""The Network protocol, and the private copy of the user's module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ssla._checks import callers_device, finite
from ssla.curvature.jacobians import Jacobian
from ssla.data import Inputs, leaves, map_inputs, row_count, slice_inputs
from ssla.network.layout import Layout

Output = str | int | Callable[[Any], Any] | None
"""The part of a module's result that is f: a key or attribute, an index, or a function of it;
None if the result is f.
"""


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
        """f − J θ for a linear f: a bias that is not free (C,)."""
        ...

    @property
    def kronecker(self) -> frozenset[str]:
        """The free parameters of layers with a Kronecker form."""
        ...

    @property
    def parameter_outputs(self) -> Tensor:
        """The output of each parameter that changes one output only (P,); −1 for the others."""
        ...

    @property
    def layer_shapes(self) -> tuple[tuple[int, int], ...]:
        """(inputs including the bias, outputs) of those layers."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the report, from opening the module."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The model's floating dtype: results are returned in it."""
        ...

    @property
    def device(self) -> torch.device: ...

    def cast(self, x: Inputs) -> Inputs:
        """x in the model's dtype and on its device; ValueError if it is not finite."""
        ...

    def chunks(self, x: Inputs, budget: int) -> Iterator[Inputs]:
        """Chunks of rows whose intermediate results fit the budget (bytes)."""
        ...

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one row of a chunk."""
        ...

    @property
    def jacobian_per_row(self) -> int:
        """Bytes of J for one row, as `linearise` returns it; 0: not known."""
        ...

    def rows_at_once(self, budget: int) -> int: ...

    def linearise(self, x: Inputs, theta: Tensor, graph: bool = False) -> tuple[Tensor, Jacobian]:
        """f (B, C) and J at θ, on the CPU, for cast x. graph: both are differentiable in x."""
        ...

    def evaluate(self, x: Inputs, theta: Tensor) -> Tensor:
        """f (B, C) at θ, for cast x."""
        ...


@dataclass(frozen=True, eq=False)
class Frozen:
    """A private copy of the user's module and how to call it."""

    module: nn.Module
    dtype: torch.dtype
    device: torch.device
    call: Callable[[nn.Module, Inputs], Any]
    keep_integers: bool
    bytes_per_row: int
    shapes: Mapping[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # of one row, by part, in the first batch
    integers: Mapping[str, str] | None = None  # dtype of each integer part; None: not known
    output: Output = None

    def cast(self, x: Inputs) -> Inputs:
        rows = row_count(x)
        if self.shapes and row_shapes(x).keys() != self.shapes.keys():
            seen, given = ", ".join(self.shapes), ", ".join(row_shapes(x))
            raise ValueError(f"x must have the parts it had at fit ({seen}), but has ({given}).")
        for name, shape in row_shapes(x).items():
            self._check_shape(name, shape)
        if rows:
            self.check_finite(x)
        names = iter(row_shapes(x))
        return map_inputs(lambda part: self._cast(part, next(names)), x)

    @staticmethod
    def check_finite(x: Inputs) -> None:
        for part in leaves(x):
            finite("x", part, "Drop or impute those rows; a network has no output for them.")

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """ValueError unless shapes are as at fit.

        Lengths may differ: the module itself refuses those that it does not support.

        Columns are not a length: (N, D) numbers keep their D. A single column would be broadcast
        silently.
        """
        seen = self.shapes.get(name, shape)
        same = len(shape) == len(seen)
        columns = len(seen) == 1 and name not in (self.integers or ())
        if not same or (shape[-1:] != seen[-1:] and (columns or shape[-1:] == (1,))):
            free = (
                " For inputs with more dimensions, such as (N, 1, length), the length may vary."
                if same and columns
                else ""
            )
            raise ValueError(
                f"{name} must have shape {_rows_of(seen)} as at fit, but one row of it is {shape}. "
                f"Check its columns.{free}"
            )

    def _cast(self, part: Tensor, name: str) -> Tensor:
        """Numbers in the model's dtype.

        Parts that were integers at fit stay integers, also if they are now whole floats.
        """
        if self.integers is None:  # the first batch, or a file of an older version
            keep = self.keep_integers and not part.is_floating_point()
            return part.to(self.device) if keep else part.to(self.device, self.dtype)
        kept = self.integers.get(name)
        if kept is not None:
            whole = part.to(getattr(torch, kept))
            if torch.equal(whole.to(part.dtype), part):
                return whole.to(self.device)
        return part.to(self.device, self.dtype)

    def outputs(self, result: Any, rows: int) -> Tensor:
        """The module's result -> f (N, C)."""
        return as_outputs(picked(result, self.output), rows)

    def forward(self, x: Inputs, graph: bool = False) -> Tensor:
        with torch.set_grad_enabled(graph):
            with self.worded(x):
                result = self.call(self.module, x)
            return self.outputs(result, row_count(x))

    @contextmanager
    def worded(self, x: Inputs) -> Iterator[None]:
        """The error if the module fails on x: what it was given, and what it was given at fit."""
        try:
            yield
        except (torch.OutOfMemoryError, ValueError):
            raise
        except (RuntimeError, TypeError, IndexError, AttributeError, KeyError) as error:
            given = ", ".join(
                f"{name} {_rows_of(part.shape[1:])} of {part.dtype}"
                for name, part in named_parts(x)
            )
            seen = ", ".join(f"{name} {_rows_of(shape)}" for name, shape in self.shapes.items())
            raise ValueError(
                f"The network failed on the inputs {given}: {error}. At fit they were "
                f"{seen or 'others'}. Check the shapes, and that indices are whole numbers within "
                "the range of their embedding."
            ) from error


def rows_within(budget: int, bytes_per_row: int) -> int:
    """The largest number of rows of a chunk."""
    return max(min(budget // bytes_per_row, 65536), 1)


def whole(module: nn.Module, inputs: Inputs) -> Any:
    with callers_device():
        return module(inputs)


def by_position(module: nn.Module, inputs: Inputs) -> Any:
    with callers_device():
        return module(*inputs)


def by_keyword(module: nn.Module, inputs: Inputs) -> Any:
    with callers_device():
        return module(**inputs)


CALLS: dict[str, Callable[[nn.Module, Inputs], Any]] = {
    "whole": whole,
    "by_position": by_position,
    "by_keyword": by_keyword,
}
"""Ways to pass inputs to a module: named functions, so that they can be pickled and saved."""


def named_parts(x: Inputs) -> list[tuple[str, Tensor]]:
    """The tensors of an input, with names for errors."""
    if isinstance(x, Tensor):
        return [("x", x)]
    parts = x.items() if isinstance(x, Mapping) else enumerate(x)
    return [(f"x[{key!r}]", part) for key, part in parts]


def _rows_of(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, ('N', *shape)))})"


def row_shapes(x: Inputs) -> dict[str, tuple[int, ...]]:
    return {name: tuple(part.shape[1:]) for name, part in named_parts(x)}


def in_chunks(x: Inputs, rows: int) -> Iterator[Inputs]:
    for start in range(0, row_count(x), rows):
        yield slice_inputs(x, slice(start, start + rows))


def kept_integers(x: Inputs) -> dict[str, str]:
    """The dtypes of the parts that hold integers (or booleans)."""
    return {
        name: str(part.dtype).removeprefix("torch.")
        for name, part in named_parts(x)
        if not part.is_floating_point()
    }


def checked_output(output: Any) -> Output:
    """Validate `output=`."""
    if isinstance(output, bool) or not (
        output is None or isinstance(output, str | int) or callable(output)
    ):
        raise TypeError(
            "output must name the part of the network's result that holds the outputs: a key or "
            f"attribute ('logits'), an index (0), or a function of the result, but is {output!r}."
        )
    part: Output = output
    return part


def picked(result: Any, output: Output) -> Any:
    """The part of the module's result that holds the outputs."""
    if output is None:
        return result
    if callable(output):
        try:
            return output(result)
        except (LookupError, AttributeError, TypeError) as error:
            raise ValueError(
                f"The function output= failed on the network's result, {described(result)}: "
                f"{error!r}."
            ) from error
    if isinstance(result, Tensor):
        raise ValueError(
            f"The network returns one tensor, which has no part {output!r}. Omit output=, or give "
            "a function."
        )
    parts = parts_of(result)
    if output in parts:
        return parts[output]
    if (
        isinstance(output, int)
        and isinstance(result, tuple | list)
        and -len(result) <= output < len(result)
    ):
        return result[output]
    raise ValueError(
        f"The network's result has no part {output!r}: it is {described(result)}. Name one of "
        "these as output=."
    )


def parts_of(result: Any) -> dict[Any, Any]:
    """The parts of the result, by key, field or index."""
    if isinstance(result, Mapping):
        return dict(result)
    if isinstance(result, tuple | list):
        return dict(zip(getattr(result, "_fields", range(len(result))), result, strict=True))
    if is_dataclass(result):
        return {part.name: getattr(result, part.name) for part in fields(result)}
    return {} if isinstance(result, Tensor) else dict(getattr(result, "__dict__", {}))


def described(result: Any) -> str:
    """A description of the result, with the parts that hold tensors."""
    parts = [key for key, value in parts_of(result).items() if isinstance(value, Tensor)]
    return f"a {type(result).__name__}" + (
        f" with the tensors {', '.join(map(repr, parts))}" if parts else " without tensors"
    )


def as_outputs(result: Any, rows: int) -> Tensor:
    """The outputs as f (N, C)."""
    if not isinstance(result, Tensor):
        parts = [key for key, value in parts_of(result).items() if isinstance(value, Tensor)]
        example = repr(parts[0]) if parts else "lambda result: …"
        raise TypeError(
            f"The network must return one tensor of outputs, but returned {described(result)}. "
            f"Name the part that holds the outputs: output={example} (a key, an attribute, an "
            "index, or a function of the result)."
        )
    if result.dim() == 1 and result.shape[0] == rows:
        return result.unsqueeze(1)
    if (
        rows == 1 and result.dim() < 2
    ):  # a forward that ends in squeeze() removes the dimension of a single row
        return result.reshape(1, -1)
    if result.dim() != 2 or result.shape[0] != rows:
        raise ValueError(
            f"The network must return outputs of shape (N, C), here ({rows}, C), but returned "
            f"{tuple(result.shape)}. Flatten or pool its output to one row for each input."
        )
    return result
