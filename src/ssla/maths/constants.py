"""Tensors that depend on numbers only, computed once."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar, cast

from ssla._checks import outside_transforms

P = ParamSpec("P")
T = TypeVar("T")


def constant(function: Callable[P, T]) -> Callable[P, T]:
    """A cached function.

    The caller may be inside `torch.func`: a tensor that is kept must not belong to a transform.
    """

    @lru_cache(maxsize=64)
    @wraps(function)
    def kept(*args: P.args, **kwargs: P.kwargs) -> T:
        with outside_transforms():
            return function(*args, **kwargs)

    return cast(Callable[P, T], kept)
