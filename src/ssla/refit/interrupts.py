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
    """A flag: whether the user has asked to stop. Calling the object returns the flag.

    The flag is never taken back.
    """

    def __init__(self) -> None:
        """Start without a request to stop."""
        self.asked = False

    def __call__(self) -> bool:
        """Return whether the user has asked to stop."""
        return self.asked

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Set `asked` on the first Ctrl-C in this context; the second is a KeyboardInterrupt.

        The earlier handler is restored on leaving. Nothing changes outside the main thread, which
        alone receives signals, or if the user has set another handler for Ctrl-C.
        """
        previous_handler = signal.getsignal(signal.SIGINT)
        if (
            threading.current_thread() is not threading.main_thread()
            or previous_handler is not signal.default_int_handler
        ):
            yield
            return

        def handle_interrupt(number: int, frame: FrameType | None) -> None:
            """Set the flag on the first Ctrl-C, and raise a KeyboardInterrupt on the second one.

            `number` and `frame` are part of the protocol of signal handlers.
            """
            if self.asked:
                raise KeyboardInterrupt
            self.asked = True

        signal.signal(signal.SIGINT, handle_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous_handler)
