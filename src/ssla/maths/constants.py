"""Tensors that depend on numbers only, computed once."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar, cast

from ssla._checks import outside_transforms

P = ParamSpec("P")
T = TypeVar("T")


def cached_constant(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function of numbers, so that each result is computed once and kept.

    The caller may be inside `torch.func`: a tensor that is kept must not belong to a transform.
    """

    @lru_cache(maxsize=64)
    @wraps(function)
    def compute(*args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function outside all transforms."""
        with outside_transforms():
            return function(*args, **kwargs)

    return cast(Callable[P, T], compute)
