"""Loaders, arrays, iterables -> batches of (inputs, targets, row weights), and the one reader of
training rows.

Inputs may be a tensor or array, a tuple of them, or a dict. A batch is

  * (x, y) or (x, y, weights), where x may itself be a tuple or a dict, or
  * a dict with a key "y" (or "labels", "target"), optionally "weights"; all other keys are inputs.

Rows are counted while they are read. The length of a loader is used only for a progress bar.
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
    batched,
    callers_device,
    layers_of,
    outside_transforms,
    recorded,
    refuse_masked,
)

Inputs = Any
"""Tensor | tuple of Tensors | dict of Tensors."""

T = TypeVar("T")
TARGET_KEYS = ("y", "labels", "target", "targets")
WEIGHT_KEYS = ("weights", "weight", "sample_weight")
ARRAY_ROWS = 8192
GOLDEN = (5**0.5 - 1) / 2
MASKED = (
    "The numbers behind a mask are not data. Leave out these rows, or fill the gaps. The "
    "estimators of ssla.sklearn accept masked inputs as gaps."
)
EXPECTED = (
    "Give a DataLoader, a tuple (X, y) or (X, y, weights) of tensors or arrays, or an iterable of "
    "such batches."
)


class Batch(NamedTuple):
    """One batch of tensors, in their original dtypes."""

    x: Inputs
    y: Tensor
    weights: Tensor | None


@dataclass(frozen=True)
class Source:
    """Batches that can be iterated once, or repeatedly if `repeatable`."""

    iterate: Callable[[], Iterator[Batch]]
    repeatable: bool
    length: int | None  # batches, if known
    rows: int | None = None  # as the loader states, not as counted: for the estimate of memory

    def __iter__(self) -> Iterator[Batch]:
        return self.iterate()

    def then(self, other: Source) -> Source:
        """The batches of both, one source after the other; nothing is copied."""
        length = None if self.length is None or other.length is None else self.length + other.length
        return Source(lambda: chain(self, other), self.repeatable and other.repeatable, length)


def open_source(data: Any) -> Source:
    """The Source of the user's data; TypeError if its type is not supported."""
    if isinstance(data, Source):
        return data
    if isinstance(data, TensorDataset):
        data = data.tensors
    if (
        isinstance(data, tuple)
        and len(data) in (2, 3)
        and all(_is_numbers(part) for part in data[1:])
    ):
        data = (data[0], *(as_tensor(part) for part in data[1:]))
    if (
        isinstance(data, tuple | list)
        and len(data) in (2, 3)
        and all(_is_array(part) for part in data[1:])
    ):
        whole = as_batch(tuple(data))
        rows = row_count(whole.x)
        return Source(lambda: _slices(whole, rows), True, -(-rows // ARRAY_ROWS), rows)
    if isinstance(data, str | bytes | Mapping) or _is_array(data) or not isinstance(data, Iterable):
        raise TypeError(
            f"data is a {type(data).__name__}, which does not separate inputs from targets. "
            f"{EXPECTED}"
        )
    try:
        length: int | None = len(data)  # type: ignore[arg-type]
    except TypeError:
        length = None
    iterate = _by_index(data) or (lambda: (as_batch(item) for item in _items(data)))
    return Source(iterate, not isinstance(data, Iterator), length, _announced(data))


def held_out(data: Any, validation: Any) -> tuple[Source, Source | None]:
    """The training rows, and the validation rows (None without any).

    validation: rows, or a share of the data: then every row is in one of both, evenly spread over
    the order in which the data are read.
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
    sampler = getattr(data, "sampler", None)
    if not source.repeatable or isinstance(sampler, RandomSampler):
        why = (
            "they can be read only once"
            if not source.repeatable
            else "the loader shuffles them in each pass"
        )
        raise ValueError(
            f"validation={validation} holds out a share of the data, which must come in the same "
            f"order each time, but {why}. Give arrays, a loader with shuffle=False, or the "
            "validation rows themselves."
        )
    return _share(source, validation, False), _share(source, validation, True)


def pick_rows(batch: Batch, rows: Tensor) -> Batch:
    """Some rows of a batch, by their numbers."""
    weights = None if batch.weights is None else batch.weights[rows]
    return Batch(take_rows(batch.x, rows), batch.y[rows], weights)


def take_rows(x: Inputs, rows: Tensor) -> Inputs:
    """Some rows of inputs, by their numbers."""
    return map_inputs(lambda part: part[rows], x)


def _share(source: Source, share: float, wanted: bool) -> Source:
    """The rows of a share (or the others). Multiples of the golden ratio are spread evenly."""

    def batches() -> Iterator[Batch]:
        start = 1
        for batch in source:
            count = batch.y.shape[0]
            places = torch.arange(start, start + count, dtype=torch.float64) * GOLDEN
            start += count
            yield pick_rows(batch, (((places % 1) < share) == wanted).nonzero().squeeze(1))

    rows = (
        None if source.rows is None else math.ceil(source.rows * (share if wanted else 1 - share))
    )
    return Source(batches, True, source.length, rows)


def _announced(data: Any) -> int | None:
    """The number of rows that a loader states."""
    try:
        return len(data.sampler) if isinstance(data, DataLoader) else None  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _by_index(loader: Any) -> Callable[[], Iterator[Batch]] | None:
    """The batches of a loader over tensors, selected by index at once instead of row by row;
    None for other loaders.
    """
    if (
        type(loader) is not DataLoader
        or loader.num_workers
        or loader.batch_sampler is None
        or loader.pin_memory
    ):
        return None
    sampler, dataset, chosen = loader.batch_sampler, loader.dataset, []
    while type(dataset) is Subset:
        chosen.append(torch.as_tensor(dataset.indices))
        dataset = dataset.dataset
    if (
        type(dataset) is not TensorDataset
        or loader.collate_fn is not default_collate
        or len(dataset.tensors) not in (2, 3)
    ):
        return None
    tensors = dataset.tensors

    def batches() -> Iterator[Batch]:
        for picked in _items(sampler):
            index = torch.as_tensor(picked)
            for inside in chosen:
                index = inside[index]
            yield as_batch(tuple(part[index] for part in tensors))

    return batches


def _items(data: Iterable[T]) -> Iterator[T]:
    """The items of the user's iterable, each made with the user's own default device: a
    sampler's generator may need it.
    """
    with callers_device():
        items = iter(data)
    end = object()
    while True:
        with callers_device():
            item = next(items, end)
        if item is end:
            return
        yield item  # type: ignore[misc]


def as_batch(item: Any) -> Batch:
    """One item of the user's iterable -> Batch; x, y and weights must have the same number of
    rows.
    """
    if isinstance(item, Mapping):
        target = next((key for key in TARGET_KEYS if key in item), None)
        if target is None:
            raise TypeError(
                "A dict batch needs the key 'y' (or 'labels', 'target'), but has "
                f"{', '.join(map(repr, item))}."
            )
        weight = next((key for key in WEIGHT_KEYS if key in item), None)
        rest = {key: value for key, value in item.items() if key not in (target, weight)}
        x: Any = rest["x"] if set(rest) == {"x"} else rest
        parts: tuple[Any, ...] = (
            (x, item[target]) if weight is None else (x, item[target], item[weight])
        )
    elif isinstance(item, tuple | list) and len(item) in (2, 3):
        parts = tuple(item)
    else:
        what = (
            f"a {type(item).__name__} of {len(item)}"
            if isinstance(item, tuple | list)
            else f"a {type(item).__name__}"
        )
        raise TypeError(f"Each batch must be (x, y) or (x, y, weights), but is {what}. {EXPECTED}")
    with torch.no_grad():  # rows are constants, even if they carry an autograd graph
        x = as_inputs(parts[0])
        y = as_tensor(parts[1])
        weights = as_tensor(parts[2]) if len(parts) == 3 and parts[2] is not None else None
    rows = row_count(x)
    if y.dim() == 0 or y.shape[0] != rows:
        raise ValueError(
            f"x has {rows} rows, but y has shape {tuple(y.shape)}. Both need one row for each "
            "observation."
        )
    if weights is not None:
        weights = _checked_weights(weights, rows)
    return Batch(x, y, weights)


def _checked_weights(weights: Tensor, rows: int) -> Tensor:
    weights = column(weights)
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
    """The user's x -> tensors in the same nesting."""
    if isinstance(x, Mapping):
        return {key: as_tensor(value, differentiable) for key, value in x.items()}
    if isinstance(x, tuple) or (isinstance(x, list) and x and _is_array(x[0])):
        return tuple(as_tensor(value, differentiable) for value in x)
    return as_tensor(x, differentiable)


def as_tensor(value: Any, differentiable: bool = False) -> Tensor:
    """A tensor, array, data frame or list of numbers -> Tensor (shares memory if possible).

    ValueError for a tensor that requires a gradient, unless the answer is differentiable: the
    gradient would be lost.
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
            return recorded(value)
        _refuse_gradient(value)
        return recorded(value.detach())
    if _is_sparse(value):
        raise TypeError(
            f"Expected a dense array, but got the sparse {type(value).__name__}. Give "
            "value.toarray()."
        )
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"dtype {array.dtype}")
        return torch.from_numpy(
            array if array.flags.writeable and array.flags.c_contiguous else array.copy()
        )
    except (TypeError, ValueError) as error:
        raise TypeError(
            "Expected numbers (a tensor, an array or a data frame of numbers), but got "
            f"{type(value).__name__}: {error}. Encode text and categories as numbers first."
        ) from None


def _refuse_layout(value: Tensor) -> None:
    """TypeError for a tensor whose entries are not all stored as plain numbers: sparse, nested,
    quantised or masked.
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
    """ValueError if `value` requires a gradient or is batched by torch.func: its gradient would
    be zero.
    """
    if (value.requires_grad and torch.is_grad_enabled()) or unpack_dual(value).tangent is not None:
        given = "a tensor that requires a gradient"
    elif is_functorch_wrapped_tensor(value):
        given = "a tensor inside a torch.func transform (grad, jacrev, jvp, vmap, …)"
    else:
        return
    raise ValueError(
        f"Expected plain numbers, but got {given}. Its gradient would be zero here. Gradients need "
        "differentiable=True, as in posterior.predict(x, differentiable=True). Without them give "
        "x.detach(), or call under torch.no_grad() or outside the transform."
    )


def _refuse_transform(value: Tensor) -> None:
    """ValueError for derivatives in forward mode: jvp, jacfwd."""
    if any(unpack_dual(layer).tangent is not None for layer in layers_of(value)):
        raise ValueError(
            "differentiable=True supports reverse mode (backward, torch.autograd.grad, "
            "torch.func.grad, jacrev, vjp), but x or y carries a forward-mode tangent "
            "(torch.func.jvp, jacfwd, hessian, make_dual). Use jacrev in place of jacfwd, and "
            "jacrev(grad(…)) in place of hessian."
        )


def plain(value: Tensor) -> Tensor:
    """The numbers of a tensor inside torch.func.grad or jacrev, without their graph.

    ValueError inside vmap.
    """
    if batched(value):
        raise ValueError(
            "This predictive has adaptive nodes, and torch.func.vmap cannot run steps that depend "
            "on the values of rows. Rows do not depend on each other: give all rows in one call, "
            "as in torch.func.grad(lambda x: post.predict(x, differentiable=True).mean.sum())(x), "
            "which has the gradient of each row."
        )
    with outside_transforms():
        return layers_of(value)[-1].detach()


def leaves(x: Inputs) -> list[Tensor]:
    """The tensors of an input."""
    if isinstance(x, Tensor):
        return [x]
    return list(x.values()) if isinstance(x, Mapping) else list(x)


def map_inputs(function: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """Apply `function` to every tensor and keep the nesting."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, Mapping):
        return {key: function(value) for key, value in x.items()}
    return tuple(function(value) for value in x)


def row_count(x: Inputs) -> int:
    """The number of rows that all tensors of an input share."""
    parts = leaves(x)
    if not parts or any(part.dim() == 0 for part in parts):
        raise ValueError(
            "x must have at least one dimension, the rows. A single input needs a leading "
            "dimension: x[None]."
        )
    counts = {part.shape[0] for part in parts}
    if len(counts) > 1:
        raise ValueError(
            f"The parts of x have different numbers of rows: {sorted(counts)}. Each needs one row "
            "for each observation."
        )
    return counts.pop()


def slice_inputs(x: Inputs, rows: slice) -> Inputs:
    return map_inputs(lambda part: part[rows], x)


def split(batch: Batch, size: int) -> Iterator[Batch]:
    """A batch in pieces of at most `size` rows."""
    rows = row_count(batch.x)
    if rows <= size:
        yield batch
        return
    for start in range(0, rows, size):
        part = slice(start, start + size)
        yield Batch(
            slice_inputs(batch.x, part),
            batch.y[part],
            None if batch.weights is None else batch.weights[part],
        )


def column(y: Tensor) -> Tensor:
    """(n, 1) -> (n,); all else as it is."""
    return y.squeeze(1) if y.dim() == 2 and y.shape[1] == 1 else y


class Targets(Protocol):
    """What is allowed as a target: the part of a likelihood's support that reading needs."""

    @property
    def kind(self) -> str: ...

    def check(self, y: Tensor, outputs: int) -> None: ...


def checked(batch: Batch, targets: Targets, outputs: int) -> Batch:
    """The batch with y checked, and y and the weights on the CPU: classes as integers, all else
    in float64. x is unchanged.
    """
    y = batch.y if targets.kind == "vector" else column(batch.y)
    targets.check(y, outputs)
    y = y.to("cpu").long() if targets.kind == "class" else y.to("cpu").double()
    return Batch(batch.x, y, None if batch.weights is None else batch.weights.to("cpu").double())


@dataclass(eq=False)
class Rows(Generic[T]):
    """The data in prepared chunks, any number of times: kept while they all fit the budget,
    read again where they do not.
    """

    source: Iterable[Batch]
    rows_at_once: Callable[[Batch], int]  # the most rows of a chunk
    prepare: Callable[[Batch], T]
    size: Callable[[T], int | None]  # bytes of a chunk; None: do not keep the chunks
    budget: int  # bytes of all chunks
    kept: list[T] | None = None  # after a whole pass

    def __iter__(self) -> Iterator[T]:
        return iter(self.kept) if self.kept is not None else (chunk for chunk, _ in self.read())

    def read(self) -> Iterator[tuple[T, Inputs]]:
        """A pass over the source: the chunks, with their inputs as they came."""
        kept: list[T] | None = []
        total = 0
        for batch in self.source:
            if batch.y.shape[0] == 0:
                continue
            for part in split(batch, self.rows_at_once(batch)):
                chunk = self.prepare(part)
                size = None if kept is None else self.size(chunk)
                if kept is None or size is None or total + size > self.budget:
                    kept = None
                else:
                    kept.append(chunk)
                    total += size
                yield chunk, part.x
        self.kept = kept

    def changed(self, function: Callable[[T], T]) -> Rows[T]:
        """The same rows, with a function applied to each chunk."""
        prepare = self.prepare
        kept = None if self.kept is None else [function(chunk) for chunk in self.kept]
        return replace(self, prepare=lambda part: function(prepare(part)), kept=kept)


def _slices(whole: Batch, rows: int) -> Iterator[Batch]:
    if rows:
        yield from split(whole, ARRAY_ROWS)


def _is_numbers(value: Any) -> bool:
    """A plain list of numbers."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int | float) for item in value[:8])
    )


def _is_array(value: Any) -> bool:
    by_interface = hasattr(value, "__array__") and not isinstance(value, type)
    return isinstance(value, Tensor | np.ndarray) or by_interface or _is_sparse(value)


def _is_sparse(value: Any) -> bool:
    """Whether a value is a sparse matrix or array of SciPy, which is not imported here."""
    return hasattr(value, "toarray") and hasattr(value, "nnz")
