"""Output of the command: text or one JSON object, errors in one sentence, exit codes.

0 success, 1 a reported error, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

out, err = (
    Console(highlight=False, soft_wrap=True),
    Console(stderr=True, highlight=False, soft_wrap=True),
)
REPORTED = (ValueError, TypeError, OSError, ImportError, FloatingPointError, MemoryError)

Command = TypeVar("Command", bound=Callable[..., Any])


def reports_errors(command: Command) -> Command:
    """Prints errors as one sentence and sets the exit code; prints warnings as notes."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        notes: list[warnings.WarningMessage] = []
        try:
            with warnings.catch_warnings(record=True) as notes:
                warnings.simplefilter("always", UserWarning)
                return command(*arguments, **options)
        except KeyboardInterrupt:
            err.print("Interrupted. Nothing was written.", style="red")
            raise typer.Exit(130) from None
        except REPORTED as error:
            text = str(error) or type(error).__name__
            if options.get("as_json"):
                _print_json({"error": text})
            else:
                err.print(f"Error: {text}", style="red", markup=False)
            raise typer.Exit(1) from None
        finally:
            for text in dict.fromkeys(
                str(w.message) for w in notes if issubclass(w.category, UserWarning)
            ):
                err.print(f"note: {text}", style="yellow", markup=False)

    return run  # type: ignore[return-value]


def show(values: dict[str, Any], as_json: bool, title: str = "") -> None:
    """Print values as a table, or as JSON."""
    if as_json:
        _print_json(values)
        return
    table = Table(title=title or None, show_header=False, box=None, title_justify="left")
    for name, value in values.items():
        if isinstance(value, dict):
            text = ", ".join(f"{k}: {_short(v)}" for k, v in value.items()) or "none"
        else:
            text = _short(value)
        table.add_row(Text(name.replace("_", " ")), Text(text))
    out.print(table)


def _print_json(values: dict[str, Any]) -> None:
    """One object on standard output, without colours; NaN and infinity become null."""
    typer.echo(json.dumps(_plain(values), indent=2, default=str, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def progress(total: int, label: str, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr; call the result with the number of finished steps."""
    if quiet:
        yield lambda done: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)
