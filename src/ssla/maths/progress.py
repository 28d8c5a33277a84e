"""The progress of work that takes long, as the user sees it: a bar, or one line of text.

The user's `progress` decides: None, the default, shows it after two seconds, on a terminal only.
True always shows a bar (it needs tqdm), and False never. Without tqdm, None shows a line of text.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
DELAY = 2.0  # seconds without a bar
EVERY = 0.5  # seconds between two lines of text


def is_stderr_terminal() -> bool:
    """Return whether stderr is a terminal, so that a person can see what is written to it."""
    stream = sys.stderr
    return stream is not None and stream.isatty()


def is_progress_wanted(show: bool | None) -> bool:
    """Return whether progress may be shown at all.

    show: the user's `progress`, where None means on a terminal only.
    """
    return is_stderr_terminal() if show is None else show


def choose_tqdm_class(required: bool) -> Any:
    """Return tqdm's class of bars.

    Without tqdm, raises ImportError if it is required, and returns None otherwise.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError:
        if required:
            raise ImportError("progress=True needs tqdm: pip install 'ssla[progress]'.") from None
        return None
    return tqdm


def choose_bar_delay(show: bool | None) -> float:
    """Return the seconds after which a bar appears: 0 if the user asked for it, else DELAY.

    show: the user's `progress`.
    """
    return DELAY if show is None else 0.0


def progress_bar(
    items: Iterable[T], length: int | None, show: bool | None, label: str, unit: str
) -> Iterable[T]:
    """Return the items, with a bar or a line of text if progress is shown.

    length: how many items, None if unknown. show: the user's `progress`. label, unit: words for the
    bar. Raises ImportError if the user asked for a bar and tqdm is not installed.
    """
    if not is_progress_wanted(show):
        return items
    tqdm = choose_tqdm_class(required=show is True)
    if tqdm is None:
        return _show_as_text(items, ProgressText(label, show))
    bar: Iterable[T] = tqdm(
        items, total=length, desc=label, unit=unit, delay=choose_bar_delay(show), leave=show is True
    )
    return bar


def _show_as_text(items: Iterable[T], text: ProgressText) -> Iterator[T]:
    """Yield the items, and show how many are done as a line of text, removed at the end."""
    try:
        for number, item in enumerate(items):
            text.show(f"{number:,} done")
            yield item
    finally:
        text.close()


@dataclass(eq=False)
class ProgressText:
    """One line on stderr that is written again and again, and removed at the end."""

    label: str
    shown: bool | None = None  # as `progress`
    started: float = field(default_factory=time.monotonic)
    last: float = -1e9  # time at which the line was last written; -1e9 means never
    width: int = 0  # number of characters of the line that is shown now

    def show(self, words: str) -> None:
        """Write the words and the seconds since the start in place of the line that is shown.

        Nothing is written before `choose_bar_delay`, nor within EVERY seconds after the last line.
        """
        now = time.monotonic()
        if (
            not is_progress_wanted(self.shown)
            or now - self.started < choose_bar_delay(self.shown)
            or now - self.last < EVERY
        ):
            return

        line = f"{self.label}: {words}, {now - self.started:.0f} s"

        # A carriage return starts the line again. Blanks overwrite the end of a longer one.
        sys.stderr.write(f"\r{line:<{self.width}}")
        sys.stderr.flush()
        self.last = now
        self.width = len(line)

    def close(self) -> None:
        """Remove the line, if one is shown, by blanks over it."""
        if self.width:
            sys.stderr.write(f"\r{'':<{self.width}}\r")
            sys.stderr.flush()
        self.width = 0
