"""The command `ssla`: from a table to intervals without code.

torch is imported when a command needs it, not for --help.
"""

from __future__ import annotations

import sys
from typing import Any


def main() -> None:
    """Run the console script; Ctrl-C prints one line also during the imports."""
    try:
        _import_app()()
    except (KeyboardInterrupt, SystemExit) as error:
        # outside of a command typer turns a KeyboardInterrupt into exit code 130 without a message
        if isinstance(error, SystemExit) and not isinstance(
            getattr(error.__context__, "__cause__", None), KeyboardInterrupt
        ):
            raise
        sys.stderr.write("Interrupted. Nothing was written.\n")
        raise SystemExit(130) from None


def _import_app() -> Any:
    """Import and return the application; exit with code 1 if typer or rich is not installed."""
    try:
        from ssla.tables.cli.app import app
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich", "click"):
            raise
        sys.stderr.write("The command needs typer and rich: pip install 'ssla[cli]'.\n")
        raise SystemExit(1) from None
    return app


if __name__ == "__main__":
    main()
