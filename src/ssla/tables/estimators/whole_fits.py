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
    """Return a `fit` that restores the estimator's attributes where it fails or is interrupted.

    Otherwise a second fit that ends early would leave the classes or columns of the new rows beside
    the model of the old ones, and predictions would be wrong without an error.
    """

    @wraps(fit)
    def fit_or_restore(self: Self, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Fit, and restore the attributes after any exception."""
        before = dict(vars(self))
        try:
            return fit(self, *args, **kwargs)
        except BaseException:  # also KeyboardInterrupt
            vars(self).clear()
            vars(self).update(before)
            raise

    return fit_or_restore
