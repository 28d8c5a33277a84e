"""Limits torch to one thread for small work.

A second thread hardly helps there. If the other core is busy, it can make torch ten times slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def limit_threads(small: bool) -> Iterator[None]:
    """Let torch use one thread while the block runs, and restore the number of threads after it.

    small: whether the work is small; otherwise the number of threads stays.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1 if small else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
