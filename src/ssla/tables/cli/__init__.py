"""The command `ssla`: from a table to intervals without code.

torch is imported when a command needs it, not for --help.
"""

from __future__ import annotations

import sys
from typing import Any


def main() -> None:
    """Run the console script. It ends with SystemExit, which has the exit code of the command.

    Ctrl-C prints one line and gives the exit code 130, also during the imports.
    """
    try:
        app = _import_app()
        app()
    except (KeyboardInterrupt, SystemExit) as error:
        # Outside of a command, typer turns a KeyboardInterrupt into the exit code 130 without a
        # message. Any other SystemExit is passed on.
        cause = getattr(error.__context__, "__cause__", None)
        if isinstance(error, SystemExit) and not isinstance(cause, KeyboardInterrupt):
            raise
        sys.stderr.write("Interrupted. Nothing was written.\n")
        raise SystemExit(130) from None


def _import_app() -> Any:
    """Return the application of typer, which is imported here.

    Prints the remedy and exits with code 1 if typer or rich is not installed. Raises any other
    ImportError.
    """
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
