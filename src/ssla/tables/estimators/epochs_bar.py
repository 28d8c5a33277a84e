"""The bar of finished epochs that `verbose=1` shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ssla.maths.progress import progress_bar


@contextmanager
def show_epochs(verbose: int | bool, epochs: int) -> Iterator[Callable[[int], None] | None]:
    """Show a bar of the epochs while the block runs, and yield the function that moves it.

    The function is called with the number of each finished epoch. If verbose is 0, there is no bar,
    and None is yielded. Raises ImportError if there is to be a bar and tqdm is not installed.
    """
    if not verbose:
        yield None
        return
    bar: Any = progress_bar(range(epochs), epochs, show=True, label="training", unit="epoch")
    try:
        # tqdm takes the number of new steps, and not that of all.
        yield lambda done: bar.update(done - bar.n)
    finally:
        bar.close()
