"""One thread for small work: a second one hardly helps, and where the other core is busy it can
make torch ten times slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def limit_threads(small: bool) -> Iterator[None]:
    """Let torch use one thread while small work is done; then restore the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if small else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
