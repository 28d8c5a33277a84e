"""Fits that are complete or did not happen."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

Self = TypeVar("Self", bound=Any)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def all_or_nothing(
    fit: Callable[Concatenate[Self, Arguments], Result],
) -> Callable[Concatenate[Self, Arguments], Result]:
    """A `fit` that restores the estimator's attributes where it fails or is interrupted.

    Otherwise a second fit that ends early would leave the classes or columns of the new rows beside
    the model of the old ones, and predictions would be wrong without an error.
    """

    @wraps(fit)
    def whole(self: Self, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        before, done = dict(vars(self)), False
        try:
            result = fit(self, *args, **kwargs)
            done = True
        finally:
            if not done:
                vars(self).clear()
                vars(self).update(before)
        return result

    return whole
