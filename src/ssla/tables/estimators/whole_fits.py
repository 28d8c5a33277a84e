"""Restores an estimator when its fit fails, so that a fit is complete or leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

Self = TypeVar("Self", bound=Any)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def restore_on_failure(
    fit: Callable[Concatenate[Self, Arguments], Result],
) -> Callable[Concatenate[Self, Arguments], Result]:
    """Decorate a `fit` so that it restores the estimator's attributes if it raises an exception.

    Otherwise a second fit that ends early would leave the classes or columns of the new rows beside
    the model of the old rows, and predictions would be wrong without an error. Attributes are
    restored, but not copied: a fit must not change their values in place.
    """

    @wraps(fit)
    def fit_or_restore(self: Self, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Call the fit, and restore the attributes after any exception."""
        before = dict(vars(self))
        try:
            return fit(self, *args, **kwargs)
        except BaseException:  # also KeyboardInterrupt
            vars(self).clear()
            vars(self).update(before)
            raise

    return fit_or_restore
