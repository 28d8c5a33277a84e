"""What a network offers, and the private copy of the user's module behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ssla._checks import finite
from ssla.batches import Inputs, leaves, map_inputs, row_count, slice_inputs
from ssla.jacobians import Jacobian
from ssla.parameters import Layout


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
    def kronecker(self) -> frozenset[str]:
        """The free parameters of layers with a Kronecker form."""
        ...

    @property
    def layer_shapes(self) -> tuple[tuple[int, int], ...]:
        """(inputs with the bias folded in, outputs) of those layers."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found at opening that a report should say."""
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

    @property
    def bytes_per_row(self) -> int:
        """What one row of a chunk takes."""
        ...

    def rows_at_once(self, budget: int) -> int: ...

    def expand(self, x: Inputs, theta: Tensor) -> tuple[Tensor, Jacobian]:
        """f (B, C) and J at θ, on the CPU, for cast x."""
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
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of one row, by part, as first seen

    def cast(self, x: Inputs) -> Inputs:
        if self.shapes and row_shapes(x).keys() != self.shapes.keys():
            seen, came = ", ".join(self.shapes), ", ".join(row_shapes(x))
            raise ValueError(f"x must have the parts it had at fit ({seen}), but has ({came}).")
        for name, shape in row_shapes(x).items():
            if len(shape) != len(self.shapes.get(name, shape)) or shape[-1:] != self.shapes.get(name, shape)[-1:]:
                expected = ", ".join(map(str, ("N", *self.shapes[name])))
                raise ValueError(
                    f"{name} must have shape ({expected}) as at fit, but one row of it is {shape}. Check its columns."
                )
        if row_count(x) == 0:
            raise ValueError("x has no rows. Give at least one input.")
        for part in leaves(x):
            finite("x", part, "Drop or impute those rows; a network cannot answer for them.")
        return map_inputs(self._cast, x)

    def _cast(self, part: Tensor) -> Tensor:
        keep = self.keep_integers and not part.is_floating_point()
        return part.to(self.device) if keep else part.to(self.device, self.dtype)

    def forward(self, x: Inputs) -> Tensor:
        with torch.no_grad():
            return as_outputs(self.call(self.module, x), row_count(x))


def rows_within(budget: int, bytes_per_row: int) -> int:
    """How many rows a chunk may have."""
    return max(min(budget // bytes_per_row, 65536), 1)


def whole(module: nn.Module, inputs: Inputs) -> Any:
    return module(inputs)


def by_position(module: nn.Module, inputs: Inputs) -> Any:
    return module(*inputs)


def by_keyword(module: nn.Module, inputs: Inputs) -> Any:
    return module(**inputs)


CALLS: dict[str, Callable[[nn.Module, Inputs], Any]] = {
    "whole": whole,
    "by_position": by_position,
    "by_keyword": by_keyword,
}
"""How inputs are handed to a module. Functions with names, so that they can be pickled and written down."""


def row_shapes(x: Inputs) -> dict[str, tuple[int, ...]]:
    if isinstance(x, Tensor):
        return {"x": tuple(x.shape[1:])}
    parts = x.items() if isinstance(x, Mapping) else enumerate(x)
    return {f"x[{key!r}]": tuple(part.shape[1:]) for key, part in parts}


def in_chunks(x: Inputs, rows: int) -> Iterator[Inputs]:
    for start in range(0, row_count(x), rows):
        yield slice_inputs(x, slice(start, start + rows))


def as_outputs(result: Any, rows: int) -> Tensor:
    """The module's result -> f (N, C)."""
    if not isinstance(result, Tensor):
        raise TypeError(
            f"The network must return one tensor of outputs, but returned {type(result).__name__}. "
            "Wrap it in a module that picks the tensor (for example `.logits`)."
        )
    if result.dim() == 1 and result.shape[0] == rows:
        return result.unsqueeze(1)
    if rows == 1 and result.dim() < 2:  # a forward that ends in squeeze() drops the row when there is one
        return result.reshape(1, -1)
    if result.dim() != 2 or result.shape[0] != rows:
        raise ValueError(
            f"The network must return outputs of shape (N, C), here ({rows}, C), but returned {tuple(result.shape)}. "
            "Flatten or pool its output to one row for each input."
        )
    return result
