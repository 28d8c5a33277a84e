"""Digests of values, to compare them in this process or with another: equal content gives equal
digests.
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
    """Equal for values of equal content: settings, tensors bit by bit, functions by their code and
    closure.

    Numbers are compared as numbers (1 and 1.0 are the same), dicts and sets regardless of order.
    Cached properties are ignored, and so is the code of functions that a function calls by name.
    """
    return _digest(value, ())


def _digest(value: Any, above: tuple[int, ...]) -> str:
    if id(value) in above:
        return "again"  # a value that contains itself
    kind, own, parts = _opened(value)
    mark = hashlib.sha256(f"{kind}|{own!r}".encode())
    inside = [_digest(part, (*above, id(value))) for part in parts]
    for part in sorted(inside) if isinstance(value, Mapping | set | frozenset) else inside:
        mark.update(part.encode())
    return mark.hexdigest()


def _opened(value: Any) -> tuple[str, Any, list[Any]]:
    """The type of a value, its own content, and its parts."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, np.generic):
        return _opened(value.item())
    if value is None or isinstance(value, str | bytes | torch.dtype | torch.device):
        return kind, value, []
    if isinstance(value, int | float):
        exact = isinstance(value, int) and abs(value) >= 2**53
        return "number", value if exact else float(value), []
    if isinstance(value, Tensor):
        bits = value.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy()
        return (
            "tensor",
            (str(value.dtype), tuple(value.shape), hashlib.sha256(bits.tobytes()).digest()),
            [],
        )
    if isinstance(value, np.ndarray):
        return (
            "array",
            (str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).digest()),
            [],
        )
    if isinstance(value, Mapping):
        return "mapping", None, list(value.items())
    if isinstance(value, tuple | list | set | frozenset):
        return kind, None, list(value)
    if isinstance(value, types.CodeType):
        return kind, (value.co_code, value.co_names), list(value.co_consts)
    if isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        seen = {name: value.__globals__.get(name) for name in value.__code__.co_names}
        constants = {name: item for name, item in seen.items() if isinstance(item, PLAIN)}
        return (
            kind,
            None,
            [value.__code__, value.__defaults__, value.__kwdefaults__, cells, constants],
        )
    if isinstance(value, types.MethodType):
        return kind, None, [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return kind, None, [value.func, value.args, value.keywords]
    if hasattr(value, "__qualname__"):  # a class, or a function that is not written in Python
        return kind, (getattr(value, "__module__", ""), value.__qualname__), []
    if dataclasses.is_dataclass(value):
        return (
            kind,
            None,
            [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)],
        )
    held = vars(value) if hasattr(value, "__dict__") else {}
    return kind, None, [{name: item for name, item in held.items() if not _cached(value, name)}]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _cached(value: Any, name: str) -> bool:
    """Whether an attribute is the cached result of a property (functools.cached_property,
    lazy_property of torch).
    """
    return hasattr(inspect.getattr_static(type(value), name, None), "__get__")
