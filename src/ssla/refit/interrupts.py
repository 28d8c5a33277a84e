"""Ctrl-C during many refits: the first one ends the work and keeps what is done, the second one
is a KeyboardInterrupt.
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
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Ctrl-C sets `asked`. Only the main thread receives signals: elsewhere nothing changes."""
        before = signal.getsignal(signal.SIGINT)
        if (
            threading.current_thread() is not threading.main_thread()
            or before is not signal.default_int_handler
        ):
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            if self.asked:
                raise KeyboardInterrupt
            self.asked = True

        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
