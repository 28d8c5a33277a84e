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

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)
# Errors that a user can cause; any other is a bug, and shows its traceback.
REPORTED = (ValueError, TypeError, OSError, ImportError, FloatingPointError, MemoryError)

Command = TypeVar("Command", bound=Callable[..., Any])


def report_errors(command: Command) -> Command:
    """Return the command with errors printed as one sentence, exit codes, and warnings as notes.

    Errors are printed as JSON if the option `as_json` is set. Only errors in REPORTED are printed;
    others are raised.
    """

    @functools.wraps(command)
    def run_command(*arguments: Any, **options: Any) -> Any:
        """Run the command, and return what it returns.

        Raises typer.Exit with the exit code 1 for an error, and 130 if it is interrupted.
        """
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
            # Each text is printed once, in the order of the warnings, also after an error.
            texts = [str(note.message) for note in notes if issubclass(note.category, UserWarning)]
            for text in dict.fromkeys(texts):
                err.print(f"note: {text}", style="yellow", markup=False)

    return run_command  # type: ignore[return-value]


def print_values(values: dict[str, Any], as_json: bool, title: str = "") -> None:
    """Print values by their names, as a table with two columns or as one JSON object.

    values: a dictionary in it is written in one cell.  as_json: whether JSON is printed.  title:
    the line above the table; empty: no title. JSON has none.
    """
    if as_json:
        _print_json(values)
        return

    table = Table(title=title or None, show_header=False, box=None, title_justify="left")
    for name, value in values.items():
        if isinstance(value, dict):
            entries = [f"{key}: {_format_value(entry)}" for key, entry in value.items()]
            text = ", ".join(entries) or "none"
        else:
            text = _format_value(value)
        # As Text, so that brackets in it are not read as markup.
        table.add_row(Text(name.replace("_", " ")), Text(text))

    out.print(table)


def _print_json(values: dict[str, Any]) -> None:
    """Print one object on standard output, without colours; NaN and infinity become null."""
    typer.echo(json.dumps(_replace_non_finite(values), indent=2, default=str, allow_nan=False))


def _replace_non_finite(value: Any) -> Any:
    """Return nested values for JSON: NaN and infinity become None, and keys become texts."""
    if isinstance(value, dict):
        return {str(name): _replace_non_finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _format_value(value: Any) -> str:
    """Return a value as text; a float has four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def show_progress(total: int, label: str, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr during the block, and yield the function that moves it.

    That function takes the number of finished steps, of which there are `total`.  label: the text
    before the bar.  quiet: whether there is no bar; the function does nothing then.
    """
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
