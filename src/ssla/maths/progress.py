"""What a user sees of work that takes long: a bar, or one line of text.

progress=None, the default, shows it by itself after two seconds, on a terminal only. True always
shows a bar (it needs tqdm), False never.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
DELAY = 2.0  # seconds without a bar
EVERY = 0.5  # seconds between two texts


def on_terminal() -> bool:
    """Whether a person can see what is written to stderr."""
    stream = sys.stderr
    return stream is not None and stream.isatty()


def wanted(show: bool | None) -> bool:
    """Whether anything may be shown at all."""
    return on_terminal() if show is None else show


def tqdm_class(required: bool) -> Any:
    """tqdm's bar; None where it is not installed, or ImportError if it is required."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        if required:
            raise ImportError("progress=True needs tqdm: pip install 'ssla[progress]'.") from None
        return None
    return tqdm


def delay_of(show: bool | None) -> float:
    return DELAY if show is None else 0.0


def progress_bar(
    items: Iterable[T], length: int | None, show: bool | None, label: str, unit: str
) -> Iterable[T]:
    """The items, with a bar if it is to be shown."""
    if not wanted(show):
        return items
    tqdm = tqdm_class(required=show is True)
    if tqdm is None:
        return _with_text(items, Text(label, show))
    shown: Iterable[T] = tqdm(
        items, total=length, desc=label, unit=unit, delay=delay_of(show), leave=show is True
    )
    return shown


def _with_text(items: Iterable[T], text: Text) -> Iterator[T]:
    try:
        for number, item in enumerate(items):
            text.show(f"{number:,} done")
            yield item
    finally:
        text.close()


@dataclass(eq=False)
class Text:
    """One line on stderr that is written again and again, and removed at the end."""

    label: str
    shown: bool | None = None  # as `progress`
    started: float = field(default_factory=time.monotonic)
    last: float = -1e9
    width: int = 0  # of what is written now

    def show(self, words: str) -> None:
        now = time.monotonic()
        if (
            not wanted(self.shown)
            or now - self.started < delay_of(self.shown)
            or now - self.last < EVERY
        ):
            return
        line = f"{self.label}: {words}, {now - self.started:.0f} s"
        sys.stderr.write(f"\r{line:<{self.width}}")
        sys.stderr.flush()
        self.last, self.width = now, len(line)

    def close(self) -> None:
        if self.width:
            sys.stderr.write(f"\r{'':<{self.width}}\r")
            sys.stderr.flush()
        self.width = 0
