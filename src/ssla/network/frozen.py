"""The private copy of the user's module, and how it is called.

An input x is one tensor, or a tuple or dict of tensors; each tensor is a part of it and has a row
for each observation. To cast x is to check it and to move it to the module's dtype and device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ssla._checks import callers_device, check_finite
from ssla.data import Inputs, input_tensors, map_inputs, row_count, take_rows

# What a module's forward raises on inputs that it does not support.
FORWARD_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError)
MOST_ROWS = 65536  # of a chunk, for any budget; a guess

Output = str | int | Callable[[Any], Any] | None
"""The part of a module's result that is f: a key or attribute, an index, or a function of it;
None if the result is f.
"""


@dataclass(frozen=True, eq=False)
class Frozen:
    """A private copy of the user's module and how to call it."""

    module: nn.Module
    dtype: torch.dtype
    device: torch.device
    call_module: Callable[[nn.Module, Inputs], Any]  # one of `CALLS`
    keep_integers: bool  # whether integer parts of the first batch stay integers
    bytes_per_row: int  # of the results of all layers
    # The shape of one row of each part of the first batch.
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    integers: Mapping[str, str] | None = None  # dtype of each integer part; None: not known
    output: Output = None

    def cast(self, x: Inputs) -> Inputs:
        """Return x on the model's device and in its dtype, after checking it.

        Parts that were integers at fit stay integers. Raises ValueError if the parts or shapes of x
        are not those of the fit, or if a number is not finite.
        """
        rows = row_count(x)
        given_shapes = list_row_shapes(x)
        if self.shapes and given_shapes.keys() != self.shapes.keys():
            seen, given = ", ".join(self.shapes), ", ".join(given_shapes)
            raise ValueError(f"x must have the parts it had at fit ({seen}), but has ({given}).")
        for name, shape in given_shapes.items():
            self._check_shape(name, shape)
        if rows:
            check_inputs_finite(x)
        names = iter(given_shapes)
        return map_inputs(lambda tensor: self._cast_tensor(tensor, next(names)), x)

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless the shape of one row of the part `name` is that of the fit.

        Lengths, as of a sequence or an image, may differ: the module itself refuses those that it
        does not support. A part that is not known from the fit is not checked.
        """
        seen = self.shapes.get(name, shape)
        same_dimensions = len(shape) == len(seen)
        # (N, D) numbers have D columns, which are not a length. (N, T) integers are sequences.
        has_columns = len(seen) == 1 and name not in (self.integers or ())

        # A single column would be broadcast without an error.
        wrong_size = shape[-1:] != seen[-1:] and (has_columns or shape[-1:] == (1,))
        if not same_dimensions or wrong_size:
            hint = (
                " For inputs with more dimensions, such as (N, 1, length), the length may vary."
                if same_dimensions and has_columns
                else ""
            )
            raise ValueError(
                f"{name} must have shape {_describe_batch_shape(seen)} as at fit, but one row of "
                f"it is {shape}. Check its columns.{hint}"
            )

    def _cast_tensor(self, tensor: Tensor, name: str) -> Tensor:
        """Return the part `name` of x, of any shape, in the model's dtype and on its device.

        Parts that were integers at fit stay integers, even if they are given as whole floats.
        """
        # The dtypes at fit are not known for the first batch, and for a file of an older version.
        if self.integers is None:
            keep = self.keep_integers and not tensor.is_floating_point()
            return tensor.to(self.device) if keep else tensor.to(self.device, self.dtype)
        integer_dtype = self.integers.get(name)
        if integer_dtype is not None:
            integers = tensor.to(getattr(torch, integer_dtype))
            # Fractions would be lost: these numbers are cast to the model's dtype.
            if torch.equal(integers.to(tensor.dtype), tensor):
                return integers.to(self.device)
        return tensor.to(self.device, self.dtype)

    def extract_outputs(self, result: Any, rows: int) -> Tensor:
        """Return f (N, C) from the module's result for N = rows.

        Raises TypeError or ValueError if the result does not hold such outputs.
        """
        return to_outputs(select_output(result, self.output), rows)

    def forward(self, x: Inputs, graph: bool = False) -> Tensor:
        """Return f (N, C) of the module for cast x, with its autograd graph if `graph` is true.

        Raises ValueError if the module fails on x, and TypeError if it returns no tensor.
        """
        with torch.set_grad_enabled(graph):
            with self.explain_failures(x):
                result = self.call_module(self.module, x)
            return self.extract_outputs(result, row_count(x))

    @contextmanager
    def explain_failures(self, x: Inputs) -> Iterator[None]:
        """Raise ValueError if the module fails inside the context.

        The error names the shapes of x and those at fit.
        """
        try:
            yield
        # Running out of memory is a RuntimeError, but no fault of the inputs; a ValueError already
        # says what is wrong.
        except (torch.OutOfMemoryError, ValueError):
            raise
        except FORWARD_ERRORS as error:
            given = ", ".join(
                f"{name} {_describe_batch_shape(tensor.shape[1:])} of {tensor.dtype}"
                for name, tensor in list_named_tensors(x)
            )
            seen = ", ".join(
                f"{name} {_describe_batch_shape(shape)}" for name, shape in self.shapes.items()
            )
            raise ValueError(
                f"The network failed on the inputs {given}: {error}. At fit they were "
                f"{seen or 'others'}. Check the shapes, and that indices are whole numbers within "
                "the range of their embedding."
            ) from error


def count_rows_within(budget: int, bytes_per_row: int) -> int:
    """Return the largest number of rows of a chunk within a budget in bytes.

    The number is at least one, also beyond the budget, and at most `MOST_ROWS`.
    """
    return max(min(budget // bytes_per_row, MOST_ROWS), 1)


def check_inputs_finite(x: Inputs) -> None:
    """Raise ValueError if a part of x has NaN or an infinite number."""
    for tensor in input_tensors(x):
        check_finite("x", tensor, "Drop or impute those rows; a network has no output for them.")


def call_with_one_argument(module: nn.Module, inputs: Inputs) -> Any:
    """Return module(inputs), under the caller's default device."""
    with callers_device():
        return module(inputs)


def call_by_position(module: nn.Module, inputs: Inputs) -> Any:
    """Return module(*inputs), under the caller's default device."""
    with callers_device():
        return module(*inputs)


def call_by_keyword(module: nn.Module, inputs: Inputs) -> Any:
    """Return module(**inputs), under the caller's default device."""
    with callers_device():
        return module(**inputs)


CALLS: dict[str, Callable[[nn.Module, Inputs], Any]] = {
    "whole": call_with_one_argument,
    "by_position": call_by_position,
    "by_keyword": call_by_keyword,
}
"""Ways to pass inputs to a module, by their names in files.

They are functions of a module, and not lambdas, so that they can be pickled.
"""


def list_named_tensors(x: Inputs) -> list[tuple[str, Tensor]]:
    """Return the tensors of an input, with the names that errors use: x, x['key'] or x[0]."""
    if isinstance(x, Tensor):
        return [("x", x)]
    items = x.items() if isinstance(x, Mapping) else enumerate(x)
    return [(f"x[{key!r}]", tensor) for key, tensor in items]


def _describe_batch_shape(row_shape: Sequence[int]) -> str:
    """Return the text of a batch's shape, "(N, …)", from the shape of one row."""
    return f"({', '.join(map(str, ('N', *row_shape)))})"


def list_row_shapes(x: Inputs) -> dict[str, tuple[int, ...]]:
    """Return the shape of one row of each tensor of an input, by its name."""
    return {name: tuple(tensor.shape[1:]) for name, tensor in list_named_tensors(x)}


def split_into_chunks(x: Inputs, rows: int) -> Iterator[Inputs]:
    """Yield x in chunks of `rows` rows; the last may have fewer."""
    for start in range(0, row_count(x), rows):
        yield take_rows(x, slice(start, start + rows))


def list_integer_dtypes(x: Inputs) -> dict[str, str]:
    """Return the dtype of each tensor of x that holds integers or booleans, by its name.

    The dtype is text, such as "int64", because it is stored in files.
    """
    return {
        name: str(tensor.dtype).removeprefix("torch.")
        for name, tensor in list_named_tensors(x)
        if not tensor.is_floating_point()
    }


def check_output_argument(output: Any) -> Output:
    """Return the argument `output=` unchanged; raise TypeError if it has no valid type."""
    if isinstance(output, bool) or not (
        output is None or isinstance(output, str | int) or callable(output)
    ):
        raise TypeError(
            "output must name the part of the network's result that holds the outputs: a key or "
            f"attribute ('logits'), an index (0), or a function of the result, but is {output!r}."
        )
    checked: Output = output
    return checked


def select_output(result: Any, output: Output) -> Any:
    """Return the part of the module's result that the argument output= names.

    Raises ValueError if there is no such part, or if a function `output` fails.
    """
    if output is None:
        return result
    if callable(output):
        try:
            return output(result)
        except (LookupError, AttributeError, TypeError) as error:
            raise ValueError(
                f"The function output= failed on the network's result, {describe_result(result)}: "
                f"{error!r}."
            ) from error
    if isinstance(result, Tensor):
        raise ValueError(
            f"The network returns one tensor, which has no part {output!r}. Omit output=, or give "
            "a function."
        )
    parts_by_key = list_result_parts(result)
    if output in parts_by_key:
        return parts_by_key[output]

    # Fields of a named tuple may also be given by index, and an index may be negative.
    if (
        isinstance(output, int)
        and isinstance(result, tuple | list)
        and -len(result) <= output < len(result)
    ):
        return result[output]
    raise ValueError(
        f"The network's result has no part {output!r}: it is {describe_result(result)}. Name one "
        "of these as output=."
    )


def list_result_parts(result: Any) -> dict[Any, Any]:
    """Return the parts of a module's result, by key, field, index or attribute.

    A tensor has no parts.
    """
    if isinstance(result, Mapping):
        return dict(result)
    if isinstance(result, tuple | list):
        return dict(zip(getattr(result, "_fields", range(len(result))), result, strict=True))
    if is_dataclass(result):
        return {item.name: getattr(result, item.name) for item in fields(result)}
    return {} if isinstance(result, Tensor) else dict(getattr(result, "__dict__", {}))


def _list_tensor_keys(result: Any) -> list[str]:
    """Return the keys of the parts of a result that are tensors, as Python would write them."""
    return [
        repr(key) for key, value in list_result_parts(result).items() if isinstance(value, Tensor)
    ]


def describe_result(result: Any) -> str:
    """Return a description of the result, with the parts that hold tensors."""
    keys = _list_tensor_keys(result)
    tensors = f"with the tensors {', '.join(keys)}" if keys else "without tensors"
    return f"a {type(result).__name__} {tensors}"


def to_outputs(result: Any, rows: int) -> Tensor:
    """Return the module's result for N = rows as outputs f (N, C).

    (N,) becomes (N, 1). Of a single row, (C,) becomes (1, C) and a scalar becomes (1, 1). Raises
    TypeError if the result is not a tensor, and ValueError if it has another shape.
    """
    if not isinstance(result, Tensor):
        example = next(iter(_list_tensor_keys(result)), "lambda result: …")
        raise TypeError(
            f"The network must return one tensor of outputs, but returned "
            f"{describe_result(result)}. Name the part that holds the outputs: output={example} "
            "(a key, an attribute, an index, or a function of the result)."
        )
    if result.dim() == 1 and result.shape[0] == rows:
        return result.unsqueeze(1)

    # A forward that ends in squeeze() removes the dimension of a single row.
    if rows == 1 and result.dim() < 2:
        return result.reshape(1, -1)
    if result.dim() != 2 or result.shape[0] != rows:
        raise ValueError(
            f"The network must return outputs of shape (N, C), here ({rows}, C), but returned "
            f"{tuple(result.shape)}. Flatten or pool its output to one row for each input."
        )

    return result
