"""Tensors that depend on numbers only, computed once."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar, cast

from ssla._checks import outside_transforms

P = ParamSpec("P")
T = TypeVar("T")


def cached_constant(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function of numbers, so that its last 64 results are kept and not computed again.

    All callers get the same tensors, so they must not change them. A caller may be inside
    `torch.func`. A kept tensor must not belong to its transform, so the function runs outside all
    transforms.
    """

    @lru_cache(maxsize=64)
    @wraps(function)
    def compute(*args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function outside all transforms of `torch.func`."""
        with outside_transforms():
            return function(*args, **kwargs)

    return cast(Callable[P, T], compute)
