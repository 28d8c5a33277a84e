"""The bar of finished epochs that `verbose=1` shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ssla.maths.progress import progress_bar


@contextmanager
def show_epochs(verbose: int | bool, epochs: int) -> Iterator[Callable[[int], None] | None]:
    """Show a bar of the epochs, and yield the function to call with the number of each finished
    epoch; None if verbose is 0. Raises ImportError if tqdm is not installed.
    """
    if not verbose:
        yield None
        return
    bar: Any = progress_bar(range(epochs), epochs, True, "training", "epoch")
    try:
        # tqdm counts steps, not their number.
        yield lambda done: bar.update(done - bar.n)
    finally:
        bar.close()
