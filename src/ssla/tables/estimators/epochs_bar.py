"""A bar of the epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ssla.maths.progress import progress_bar


@contextmanager
def epochs_bar(verbose: int | bool, epochs: int) -> Iterator[Callable[[int], None] | None]:
    """The function to call with the number of each finished epoch; None if verbose is 0."""
    if not verbose:
        yield None
        return
    bar: Any = progress_bar(range(epochs), epochs, True, "training", "epoch")
    try:
        yield lambda done: bar.update(done - bar.n)
    finally:
        bar.close()
