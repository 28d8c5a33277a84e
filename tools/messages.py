"""Warnings and errors that the library raises, read from its source: for the page on failures and
for its test.

python tools/messages.py          # all of them, by module
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[1] / "src" / "ssla"
GAP = "…"


class Message(NamedTuple):
    """One `warn(...)` or `raise ...(...)`.

    text: its constant parts, with … for values; empty if it is made elsewhere.
    """

    module: str
    line: int
    kind: str  # "warning", or the name of the exception
    text: str


def messages() -> Iterator[Message]:
    for path in sorted(SOURCE.rglob("*.py")):
        name = (
            path.relative_to(SOURCE)
            .with_suffix("")
            .as_posix()
            .replace("/", ".")
            .removesuffix(".__init__")
        )
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = _assigned(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                yield Message(name, node.lineno, _called(node.exc), _text(node.exc, texts))
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and _called(node) == "warn"
            ):
                yield Message(name, node.lineno, "warning", _text(node, texts))


def _assigned(tree: ast.Module) -> dict[str, list[tuple[int, ast.expr]]]:
    """Variable -> (line, text) of its assignments, for messages that are made before they are
    raised.
    """
    found: dict[str, list[tuple[int, ast.expr]]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(
            node.value, ast.JoinedStr | ast.Constant | ast.BinOp
        ):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append((node.lineno, node.value))
    return found


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _text(call: ast.Call, texts: dict[str, list[tuple[int, ast.expr]]]) -> str:
    first: ast.expr | None = call.args[0] if call.args else None
    if isinstance(first, ast.Name):  # the last assignment above
        above = [
            value
            for line, value in sorted(texts.get(first.id, []), key=lambda pair: pair[0])
            if line < call.lineno
        ]
        first = above[-1] if above else first
    text = "".join(_parts(first)) if first is not None else ""
    while GAP + GAP in text:
        text = text.replace(GAP + GAP, GAP)
    return "" if text.strip(f"{GAP} .:") == "" else " ".join(text.split())


def _parts(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            yield from _parts(value)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _parts(node.left)
        yield from _parts(node.right)
    else:
        yield GAP


def main() -> int:
    for found in messages():
        print(f"{found.module}:{found.line}: {found.kind}: {found.text or '(made elsewhere)'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
