"""Ctrl-C during many refits.

The first one ends the work and keeps what is done, the second one is a KeyboardInterrupt.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted:
    """Whether the user has asked to stop."""

    def __init__(self) -> None:
        """Start without a request to stop."""
        self.asked = False

    def __call__(self) -> bool:
        """Return whether the user has asked to stop."""
        return self.asked

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Set `asked` on Ctrl-C, within this context.

        Only the main thread receives signals, and a handler of the user's own is left alone:
        elsewhere nothing changes.
        """
        before = signal.getsignal(signal.SIGINT)
        if (
            threading.current_thread() is not threading.main_thread()
            or before is not signal.default_int_handler
        ):
            yield
            return

        def note_interrupt(number: int, frame: FrameType | None) -> None:
            """Note the first Ctrl-C, and raise a KeyboardInterrupt on the second one."""
            if self.asked:
                raise KeyboardInterrupt
            self.asked = True

        signal.signal(signal.SIGINT, note_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
