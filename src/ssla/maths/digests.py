"""Digests of values, to compare them in this process or with another.

Equal content gives equal digests.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

PLAIN = (str, bytes, int, float, complex, Tensor, np.ndarray, np.generic)


def digest(value: Any) -> str:
    """Return a digest (64 hexadecimal digits) that is equal for values of equal content.

    Tensors are compared bit by bit, functions by their code and closure, dataclasses by their
    fields, and other objects by their attributes. Numbers are compared as numbers (1 and 1.0 are
    the same), dicts and sets without regard to order. Cached properties are ignored, and so is the
    code of functions that a function calls by name.
    """
    return _digest_part(value, ())


def _digest_part(value: Any, above: tuple[int, ...]) -> str:
    """Return the digest of a value that is a part of other values.

    above: the `id` of each of those values. A value that contains itself has a fixed digest, so
    that the recursion ends.
    """
    if id(value) in above:
        return "again"
    type_name, content, contained_values = _take_apart(value)
    hashed = hashlib.sha256(f"{type_name}|{content!r}".encode())
    digests = [_digest_part(part, (*above, id(value))) for part in contained_values]

    # The order of these containers does not count.
    if isinstance(value, Mapping | set | frozenset):
        digests.sort()
    for part_digest in digests:
        hashed.update(part_digest.encode())
    return hashed.hexdigest()


def _take_apart(value: Any) -> tuple[str, Any, list[Any]]:
    """Return the type of a value as text, its own content, and the values that it contains.

    The content is compared by its `repr`, and the contained values by their own digests. Order of
    the branches: special types come before the general ones, of which they are instances too.
    """
    type_name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, np.generic):
        return _take_apart(value.item())
    if value is None or isinstance(value, str | bytes | torch.dtype | torch.device):
        return type_name, value, []
    if isinstance(value, int | float):
        # Up to 2⁵³ every integer is a float too, so that 1 and 1.0 have one content.
        exact = isinstance(value, int) and abs(value) >= 2**53
        return "number", value if exact else float(value), []

    if isinstance(value, Tensor | np.ndarray):
        return _describe_array(value)
    if isinstance(value, Mapping):
        return "mapping", None, list(value.items())
    if isinstance(value, tuple | list | set | frozenset):
        return type_name, None, list(value)
    if isinstance(value, types.CodeType):
        return type_name, (value.co_code, value.co_names), list(value.co_consts)
    if isinstance(value, types.FunctionType):
        return type_name, None, _list_function_parts(value)
    if isinstance(value, types.MethodType):
        return type_name, None, [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return type_name, None, [value.func, value.args, value.keywords]
    if hasattr(value, "__qualname__"):  # a class, or a function that is not written in Python
        return type_name, (getattr(value, "__module__", ""), value.__qualname__), []
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return type_name, None, [(name, getattr(value, name)) for name in names]
    attributes = vars(value) if hasattr(value, "__dict__") else {}
    kept = {name: item for name, item in attributes.items() if not _is_cached(value, name)}
    return type_name, None, [kept]


def _describe_array(array: Tensor | np.ndarray) -> tuple[str, Any, list[Any]]:
    """Return what `_take_apart` does for a tensor or array.

    The content is the dtype, the shape and a hash of the bytes; there are no contained values.
    """
    if isinstance(array, Tensor):
        type_name = "tensor"
        data = array.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().tobytes()
    else:
        type_name = "array"
        data = array.tobytes()
    return type_name, (str(array.dtype), tuple(array.shape), hashlib.sha256(data).digest()), []


def _list_function_parts(function: types.FunctionType) -> list[Any]:
    """Return what a function depends on: code, defaults, closure and plain global values."""
    cells = [_read_cell(cell) for cell in function.__closure__ or ()]
    used = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    constants = {name: item for name, item in used.items() if isinstance(item, PLAIN)}
    return [function.__code__, function.__defaults__, function.__kwdefaults__, cells, constants]


def _read_cell(cell: types.CellType) -> Any:
    """Return the value of a closure's variable; None if the variable has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _is_cached(value: Any, name: str) -> bool:
    """Return whether an attribute of a value is the kept result of a property of that name.

    Such properties are functools.cached_property and torch's lazy_property. They are descriptors of
    the class: objects with `__get__`.
    """
    return hasattr(inspect.getattr_static(type(value), name, None), "__get__")
