"""Turns data into batches of (inputs, targets, row weights), and reads rows in chunks.

Data may be loaders, arrays and iterables. Inputs may be a tensor or array, a tuple of them, or a
dict. A batch is

  * (x, y) or (x, y, weights), where x may itself be a tuple or a dict, or
  * a dict with a key "y" (or "labels", "target"), optionally "weights"; all other keys are inputs.

A row is one observation: x has the same number of rows in each of its tensors. Row weights are
frequencies. A source is data that can be read batch by batch, and a pass reads all of it once. Rows
are counted while they are read. The length of a loader is used only for a progress bar.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.forward_ad import unpack_dual
from torch.masked import MaskedTensor
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset, default_collate

from ssla._checks import (
    callers_device,
    copy_if_inference,
    is_inside_vmap,
    outside_transforms,
    refuse_masked,
    wrapped_tensors,
)

Inputs = Any
"""Tensor | tuple of Tensors | dict of Tensors."""

T = TypeVar("T")
"""An item of an iterable, or a prepared chunk of rows."""
TARGET_KEYS = ("y", "labels", "target", "targets")
WEIGHT_KEYS = ("weights", "weight", "sample_weight")
ARRAY_ROWS = 8192  # of arrays in one batch. A guess
GOLDEN = (5**0.5 - 1) / 2  # the golden ratio, less one
MASKED = (
    "The numbers behind a mask are not data. Leave out these rows, or fill the gaps. The "
    "estimators of ssla.sklearn accept masked inputs as gaps."
)
EXPECTED = (
    "Give a DataLoader, a tuple (X, y) or (X, y, weights) of tensors or arrays, or an iterable of "
    "such batches."
)


class Batch(NamedTuple):
    """One batch of n rows, as tensors in their original dtypes."""

    x: Inputs  # each tensor (n, …)
    y: Tensor  # (n,) or (n, …)
    weights: Tensor | None  # (n,); None: every row has the weight one


@dataclass(frozen=True)
class Source:
    """Batches that can be iterated once, or repeatedly if `repeatable`."""

    iterate: Callable[[], Iterator[Batch]]  # starts a pass
    repeatable: bool  # whether a second pass has the batches too
    length: int | None  # the number of batches; None: not known
    # The number of rows as the loader states it, for the estimate of memory; None: not known.
    rows: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Start a pass over the batches; a second one is empty unless the source is repeatable."""
        return self.iterate()

    def followed_by(self, other: Source) -> Source:
        """Return a source with the batches of this one, then those of another, without a copy.

        The stated number of rows is not known there.
        """
        length = None if self.length is None or other.length is None else self.length + other.length
        return Source(lambda: chain(self, other), self.repeatable and other.repeatable, length)


def open_source(data: Any) -> Source:
    """Return the Source of the user's data; raise TypeError if its type is not supported.

    data: a Source, a TensorDataset, (X, y) or (X, y, weights) of arrays, or an iterable of batches.
    Arrays are checked here, as by `as_batch`; batches are checked when they are read.
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, tuple | list) and len(data) in (2, 3):
        columns = data[1:]
        # In a tuple the targets may be a plain list; a list of lists may be batches.
        if isinstance(data, tuple) and all(map(_is_list_of_numbers, columns)):
            columns = tuple(map(as_tensor, columns))
        if all(map(_is_array, columns)):
            return _make_array_source(as_batch((data[0], *columns)))

    if isinstance(data, str | bytes | Mapping) or _is_array(data) or not isinstance(data, Iterable):
        raise TypeError(
            f"data is a {type(data).__name__}, which does not separate inputs from targets. "
            f"{EXPECTED}"
        )

    try:
        length: int | None = len(data)  # type: ignore[arg-type]
    except TypeError:
        length = None

    # Where one index cannot select a batch, the iterable itself yields it.
    iterate = _make_batch_iterator(data) or (lambda: map(as_batch, _iterate_items(data)))

    # An iterator is used up after one pass; other iterables start again.
    repeatable = not isinstance(data, Iterator)
    return Source(iterate, repeatable, length, _get_stated_row_count(data))


def _make_array_source(arrays: Batch) -> Source:
    """Return the source of rows that are in memory, in batches of ARRAY_ROWS rows."""
    rows = row_count(arrays.x)

    def yield_batches() -> Iterator[Batch]:
        """Yield the rows in order; nothing for zero rows."""
        if rows:
            yield from split_batch(arrays, ARRAY_ROWS)

    return Source(yield_batches, repeatable=True, length=math.ceil(rows / ARRAY_ROWS), rows=rows)


def split_off_validation(data: Any, validation: Any) -> tuple[Source, Source | None]:
    """Return the training rows, and the validation rows (None if there are none).

    validation: None, rows, or a share of the data. A share is taken evenly over the order in which
    the data are read, and the training rows are the others. Raises ValueError for a share that is
    not between 0 and 1, or of data without a fixed order, and TypeError for a whole number.
    """
    source = open_source(data)
    if validation is None:
        return source, None
    if not isinstance(validation, float):
        if isinstance(validation, bool | int):
            raise TypeError(
                "validation must be rows, (X, y) or a loader, or a share of the data such as 0.2, "
                f"but is {validation!r}."
            )
        return source, open_source(validation)

    if not 0 < validation < 1:
        raise ValueError(
            "validation as a share of the data must lie between 0 and 1, for example 0.2, but is "
            f"{validation!r}."
        )

    if not source.repeatable or isinstance(getattr(data, "sampler", None), RandomSampler):
        obstacle = (
            "the loader shuffles them in each pass"
            if source.repeatable
            else "they can be read only once"
        )
        raise ValueError(
            f"validation={validation} holds out a share of the data, which must come in the same "
            f"order each time, but {obstacle}. Give arrays, a loader with shuffle=False, or the "
            "validation rows themselves."
        )

    training = _select_share(source, validation, held_out=False)
    return training, _select_share(source, validation, held_out=True)


def pick_batch_rows(batch: Batch, rows: Tensor | slice) -> Batch:
    """Return some rows of a batch, by a slice or by their numbers (m,), with their weights."""
    weights = None if batch.weights is None else batch.weights[rows]
    return Batch(take_rows(batch.x, rows), batch.y[rows], weights)


def _select_share(source: Source, share: float, held_out: bool) -> Source:
    """Return the rows of a share of the source if held_out, and the other rows otherwise.

    share: between 0 and 1. Row i = 1, 2, … is held out if the fractional part of i times the golden
    ratio is below the share: these numbers are spread evenly over [0, 1) and over the order of the
    rows.
    """

    def yield_batches() -> Iterator[Batch]:
        """Yield the selected rows of each batch."""
        start = 1
        for batch in source:
            count = batch.y.shape[0]
            multiples = torch.arange(start, start + count, dtype=torch.float64) * GOLDEN
            start += count
            selected = ((multiples % 1) < share) == held_out
            yield pick_batch_rows(batch, selected.nonzero().squeeze(1))

    rows = source.rows
    if rows is not None:
        rows = math.ceil(rows * (share if held_out else 1 - share))
    return Source(yield_batches, repeatable=True, length=source.length, rows=rows)


def _get_stated_row_count(data: Any) -> int | None:
    """Return the number of rows that a DataLoader states; None if it states none, or for others."""
    try:
        return len(data.sampler) if isinstance(data, DataLoader) else None  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _make_batch_iterator(loader: Any) -> Callable[[], Iterator[Batch]] | None:
    """Return a function that yields the batches of a loader over tensors.

    Each batch is selected by one index. This is faster than the loader itself, which collates
    batches row by row. The result is None for anything else, and for a loader with workers or
    settings that change its batches: the caller then iterates over the loader.
    """
    if (
        type(loader) is not DataLoader
        or loader.num_workers
        or loader.batch_sampler is None
        or loader.pin_memory
        or loader.collate_fn is not default_collate
    ):
        return None

    dataset = loader.dataset
    subsets: list[Tensor] = []

    # Subclasses may select other rows, so only the classes themselves are unwrapped.
    while type(dataset) is Subset:
        subsets.append(torch.as_tensor(dataset.indices))
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or len(dataset.tensors) not in (2, 3):
        return None
    sampler = loader.batch_sampler
    tensors = dataset.tensors

    def yield_batches() -> Iterator[Batch]:
        """Yield a batch for the row numbers of each step of the sampler."""
        for numbers in _iterate_items(sampler):
            index = torch.as_tensor(numbers)
            # The outermost subset comes first; each maps its numbers to those of the next.
            for indices in subsets:
                index = indices[index]
            yield as_batch(tuple(tensor[index] for tensor in tensors))

    return yield_batches


def _iterate_items(data: Iterable[T]) -> Iterator[T]:
    """Yield the items of the user's iterable, each made with the user's own default device.

    A sampler's generator may need that device. The device is not set while the item is used.
    """
    with callers_device():
        items = iter(data)
    exhausted = object()  # None may be an item
    while True:
        with callers_device():
            item = next(items, exhausted)
        if item is exhausted:
            return
        yield item  # type: ignore[misc]


def as_batch(item: Any) -> Batch:
    """Return the Batch of one item of the user's iterable.

    The forms of an item are those of the module's docstring. Raises TypeError for another form, and
    ValueError unless x, y and weights have the same number of rows, and the weights are finite and
    not negative. Errors of values are those of `as_tensor`.
    """
    x, y, weights = _split_columns(item)
    with torch.no_grad():  # rows are constants, even if they carry an autograd graph
        x = as_inputs(x)
        y = as_tensor(y)
        weights = None if weights is None else as_tensor(weights)

    rows = row_count(x)
    if y.dim() == 0 or y.shape[0] != rows:
        raise ValueError(
            f"x has {rows} rows, but y has shape {tuple(y.shape)}. Both need one row for each "
            "observation."
        )

    if weights is not None:
        weights = _check_weights(weights, rows)
    return Batch(x, y, weights)


def _split_columns(item: Any) -> tuple[Any, Any, Any]:
    """Return the inputs, targets and weights (None without any) of the user's batch.

    Raises TypeError unless it is (x, y), (x, y, weights) or a dict with a key for the targets.
    """
    if isinstance(item, Mapping):
        target = next((key for key in TARGET_KEYS if key in item), None)
        if target is None:
            raise TypeError(
                "A dict batch needs the key 'y' (or 'labels', 'target'), but has "
                f"{', '.join(map(repr, item))}."
            )

        weight = next((key for key in WEIGHT_KEYS if key in item), None)
        inputs = {key: value for key, value in item.items() if key not in (target, weight)}
        x = inputs["x"] if set(inputs) == {"x"} else inputs
        weights = None if weight is None else item[weight]
        return x, item[target], weights

    if isinstance(item, tuple | list):
        if len(item) in (2, 3):
            weights = item[2] if len(item) == 3 else None
            return item[0], item[1], weights
        form = f"a {type(item).__name__} of {len(item)}"
    else:
        form = f"a {type(item).__name__}"

    raise TypeError(f"Each batch must be (x, y) or (x, y, weights), but is {form}. {EXPECTED}")


def _check_weights(weights: Tensor, rows: int) -> Tensor:
    """Return row weights (n,), given as (n,) or (n, 1).

    Raises ValueError unless there is one for each row, finite and not negative.
    """
    weights = squeeze_column(weights)
    if weights.shape != (rows,):
        raise ValueError(
            f"Row weights must have shape ({rows},), one for each row, but have "
            f"{tuple(weights.shape)}."
        )

    if not bool((torch.isfinite(weights) & (weights >= 0)).all()):
        raise ValueError(
            "Row weights must be finite and not negative. A row of weight 2 counts as two equal "
            "rows."
        )

    return weights


def as_inputs(x: Any, differentiable: bool = False) -> Inputs:
    """Return the user's x as a tensor, a tuple of tensors or a dict of tensors.

    differentiable: whether the tensors may carry a graph. Errors are those of `as_tensor`.
    """
    if isinstance(x, Mapping):
        return {key: as_tensor(value, differentiable) for key, value in x.items()}
    # A list of arrays is taken as a tuple; a list of numbers is one array.
    if isinstance(x, tuple) or (isinstance(x, list) and x and _is_array(x[0])):
        return tuple(as_tensor(value, differentiable) for value in x)
    return as_tensor(x, differentiable)


def as_tensor(value: Any, differentiable: bool = False) -> Tensor:
    """Return a tensor, array, data frame or list of numbers as a Tensor.

    Memory is shared if possible, and the dtype stays. differentiable: whether the user may
    differentiate the answer; a tensor then keeps its graph. Raises ValueError for a tensor that
    requires a gradient which the answer will not have, for masked values and for a tensor on
    "meta", and TypeError for what is not numbers.
    """
    refuse_masked("An array", value, MASKED)
    if isinstance(value, Tensor):
        if value.is_meta:
            raise ValueError(
                "Expected numbers, but got a tensor on the device 'meta', which has a shape "
                f"{tuple(value.shape)} and no values. Make it on a real device: torch.tensor(…, "
                "device='cpu')."
            )

        _refuse_layout(value)
        if differentiable:
            _refuse_transform(value)
            return copy_if_inference(value)
        _refuse_gradient(value)
        return copy_if_inference(value.detach())

    if _is_sparse(value):
        raise TypeError(
            f"Expected a dense array, but got the sparse {type(value).__name__}. Give "
            "value.toarray()."
        )

    try:
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":  # booleans, integers, unsigned integers, floats
            raise TypeError(f"dtype {array.dtype}")
        # torch warns of arrays that cannot be written, and cannot hold negative strides.
        return torch.from_numpy(
            array if array.flags.writeable and array.flags.c_contiguous else array.copy()
        )
    except (TypeError, ValueError) as error:
        raise TypeError(
            "Expected numbers (a tensor, an array or a data frame of numbers), but got "
            f"{type(value).__name__}: {error}. Encode text and categories as numbers first."
        ) from None


def _refuse_layout(value: Tensor) -> None:
    """Raise TypeError for a tensor that is sparse, nested, quantised or masked.

    The entries of such a tensor are not all stored as plain numbers.
    """
    if isinstance(value, MaskedTensor):
        raise TypeError(f"Expected a plain tensor, but got a masked tensor. {MASKED}")
    if value.is_nested:
        raise TypeError(
            "Expected a dense tensor, but got a nested tensor. Pad its rows to one length: "
            "x.to_padded_tensor(0.0)."
        )

    if value.layout != torch.strided:
        name = str(value.layout).removeprefix("torch.")
        raise TypeError(
            f"Expected a dense tensor, but got one with the layout {name}. Give x.to_dense()."
        )

    if value.is_quantized:
        raise TypeError("Expected plain numbers, but got a quantised tensor. Give x.dequantize().")


def _refuse_gradient(value: Tensor) -> None:
    """Raise ValueError for a tensor with which the user differentiates: the gradient would be zero.

    Such a tensor requires a gradient while gradients are enabled, has a forward-mode tangent, or is
    inside a torch.func transform.
    """
    if (value.requires_grad and torch.is_grad_enabled()) or unpack_dual(value).tangent is not None:
        offender = "a tensor that requires a gradient"
    elif is_functorch_wrapped_tensor(value):
        offender = "a tensor inside a torch.func transform (grad, jacrev, jvp, vmap, …)"
    else:
        return

    raise ValueError(
        f"Expected plain numbers, but got {offender}. Its gradient would be zero here. Gradients "
        "need differentiable=True, as in posterior.predict(x, differentiable=True). Without them "
        "give x.detach(), or call under torch.no_grad() or outside the transform."
    )


def _refuse_transform(value: Tensor) -> None:
    """Raise ValueError for a tensor with a derivative in forward mode (jvp, jacfwd)."""
    if any(unpack_dual(layer).tangent is not None for layer in wrapped_tensors(value)):
        raise ValueError(
            "differentiable=True supports reverse mode (backward, torch.autograd.grad, "
            "torch.func.grad, jacrev, vjp), but x or y carries a forward-mode tangent "
            "(torch.func.jvp, jacfwd, hessian, make_dual). Use jacrev in place of jacfwd, and "
            "jacrev(grad(…)) in place of hessian."
        )


def values_outside_transforms(value: Tensor) -> Tensor:
    """Return the numbers of a tensor without its graph, also inside torch.func.grad or jacrev.

    Raises ValueError inside torch.func.vmap, where numbers of single rows cannot be read.
    """
    if is_inside_vmap(value):
        raise ValueError(
            "This predictive has adaptive nodes, and torch.func.vmap cannot run steps that depend "
            "on the values of rows. Rows do not depend on each other: give all rows in one call, "
            "as in torch.func.grad(lambda x: post.predict(x, differentiable=True).mean.sum())(x), "
            "which has the gradient of each row."
        )
    with outside_transforms():
        return wrapped_tensors(value)[-1].detach()


def input_tensors(x: Inputs) -> list[Tensor]:
    """Return the tensors of an input as a list, in its order."""
    if isinstance(x, Tensor):
        return [x]
    return list(x.values()) if isinstance(x, Mapping) else list(x)


def map_inputs(function: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """Return the input with a function applied to each of its tensors."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, Mapping):
        return {key: function(value) for key, value in x.items()}
    return tuple(function(value) for value in x)


def row_count(x: Inputs) -> int:
    """Return the number of rows that all tensors of an input share.

    Raises ValueError if the tensors have no rows, or different numbers of them.
    """
    tensors = input_tensors(x)
    if not tensors or any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(
            "x must have at least one dimension, the rows. A single input needs a leading "
            "dimension: x[None]."
        )

    counts = {tensor.shape[0] for tensor in tensors}
    if len(counts) > 1:
        raise ValueError(
            f"The parts of x have different numbers of rows: {sorted(counts)}. Each needs one row "
            "for each observation."
        )

    return counts.pop()


def take_rows(x: Inputs, rows: slice | Tensor) -> Inputs:
    """Return some rows of inputs, by a slice or by their numbers (m,)."""
    return map_inputs(lambda tensor: tensor[rows], x)


def split_batch(batch: Batch, size: int) -> Iterator[Batch]:
    """Yield a batch in pieces of at most `size` rows; a batch that fits is yielded unchanged."""
    rows = row_count(batch.x)
    if rows <= size:
        yield batch
        return
    for start in range(0, rows, size):
        yield pick_batch_rows(batch, slice(start, start + size))


def squeeze_column(y: Tensor) -> Tensor:
    """Return a tensor (n, 1) as (n,), and any other tensor unchanged."""
    return y.squeeze(1) if y.dim() == 2 and y.shape[1] == 1 else y


class Targets(Protocol):
    """Which targets are allowed: the part of a likelihood's support that `check_batch` needs."""

    @property
    def kind(self) -> str:
        """Return the kind of target, such as "vector" (D numbers in a row) or "class"."""

    def check(self, y: Tensor, outputs: int) -> None:
        """Raise ValueError for targets outside the support; y (n,) or (n, D), C = outputs."""


def check_batch(batch: Batch, targets: Targets, outputs: int) -> Batch:
    """Check the targets of a batch, and return it with y and the weights on the CPU.

    Classes become integers, and all else float64. y (n, 1) becomes (n,), unless targets are
    vectors. x is unchanged. Raises ValueError for targets that are not allowed for C = outputs.
    """
    y = batch.y if targets.kind == "vector" else squeeze_column(batch.y)
    targets.check(y, outputs)
    y = y.to("cpu").long() if targets.kind == "class" else y.to("cpu").double()
    weights = None if batch.weights is None else batch.weights.to("cpu").double()
    return Batch(batch.x, y, weights)


@dataclass(eq=False)
class Rows(Generic[T]):
    """The data in prepared chunks, which can be iterated any number of times.

    A chunk is what `prepare` makes of the rows of a batch. The chunks are kept in memory if all of
    them fit the budget, and are otherwise read again in each pass, for which the source must be
    repeatable. A complete pass sets `kept`, which is the only state that changes.
    """

    source: Iterable[Batch]
    rows_at_once: Callable[[Batch], int]  # the most rows of a chunk, for a batch
    prepare: Callable[[Batch], T]  # makes a chunk
    size: Callable[[T], int | None]  # bytes of a chunk; None: do not keep the chunks
    budget: int  # bytes of all chunks
    kept: list[T] | None = None  # after a complete pass; None before it, and if they do not fit

    def __iter__(self) -> Iterator[T]:
        """Start a pass over the chunks, from memory if they are kept."""
        if self.kept is not None:
            return iter(self.kept)
        return (chunk for chunk, _ in self.read_chunks())

    def read_chunks(self) -> Iterator[tuple[T, Inputs]]:
        """Yield the chunks of a pass over the source, each with its inputs x as they came.

        Batches without rows are left out. At the end of a complete pass, `kept` is set: to the
        chunks if all of them fit the budget, else to None.
        """
        kept: list[T] | None = []
        total = 0
        for batch in self.source:
            if batch.y.shape[0] == 0:
                continue
            for piece in split_batch(batch, self.rows_at_once(batch)):
                chunk = self.prepare(piece)
                size = None if kept is None else self.size(chunk)
                # If one chunk is too many, none is kept, and the next pass reads all of them again.
                if kept is None or size is None or total + size > self.budget:
                    kept = None
                else:
                    kept.append(chunk)
                    total += size
                yield chunk, piece.x

        self.kept = kept

    def map_chunks(self, function: Callable[[T], T]) -> Rows[T]:
        """Return the same rows with a function applied to each chunk, kept or still to be read."""
        prepare = self.prepare
        kept = None if self.kept is None else [function(chunk) for chunk in self.kept]
        return replace(self, prepare=lambda batch: function(prepare(batch)), kept=kept)


def _is_list_of_numbers(value: Any) -> bool:
    """Return whether a value is a plain list of numbers.

    Only its first eight items are looked at (a guess): `as_tensor` refuses what is not numbers.
    """
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int | float) for item in value[:8])
    )


def _is_array(value: Any) -> bool:
    """Return whether a value is a tensor, an array or a data frame, dense or sparse."""
    by_interface = hasattr(value, "__array__") and not isinstance(value, type)
    return isinstance(value, Tensor | np.ndarray) or by_interface or _is_sparse(value)


def _is_sparse(value: Any) -> bool:
    """Return whether a value is a sparse matrix or array of SciPy, which is not imported here."""
    return hasattr(value, "toarray") and hasattr(value, "nnz")
