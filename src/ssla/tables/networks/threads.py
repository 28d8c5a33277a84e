"""One thread for small work: a second one hardly helps, and where the other core is busy it can
make torch ten times slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread_if(small: bool) -> Iterator[None]:
    """torch uses one thread if the work is small. The number of threads is set back at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if small else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
