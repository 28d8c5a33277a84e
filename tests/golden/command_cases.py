"""Answers of the command `ssla`, run in this process: files, printed tables and JSON."""

from __future__ import annotations

import contextlib
import csv
import io
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from digests import Answers, asked, files_in, masked, page_parts

from ssla.tables.cli import main

COMMANDS = ("train", "predict", "evaluate", "sensitivity", "report", "cost", "demo", "reproduce")
ROWS, TESTS = 80, 9


def run(*arguments: Any) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with (
        mock.patch.object(sys, "argv", ["ssla", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code
    return code or 0, printed(out), printed(err)


def printed(stream: io.StringIO) -> str:
    """Without times and paths, nor the spaces behind them that fill a table."""
    return "\n".join(line.rstrip() for line in masked(stream.getvalue()).splitlines())


def write_table(path: Path, rows: int, seed: int, colours: Sequence[str]) -> None:
    """A number with gaps, a category, yes or no, a text, and targets of each kind."""
    rng = np.random.default_rng(seed)
    size, colour = rng.normal(size=rows), rng.choice(list(colours), rows)
    sold = rng.choice(["yes", "no"], rows)
    price = 10 + 3 * size + 2 * (colour == "red") + 0.3 * rng.normal(size=rows)
    kind = np.array(["low", "middle", "high"])[np.digitize(price, [9, 12])]
    visits = rng.poisson(np.exp(0.5 * size))
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["id", "size", "colour", "sold", "price", "kind", "visits"])
        for i in range(rows):
            number = "" if i % 11 == 5 else f"{size[i]:.4f}"
            cells = [f"row number {i}", number, colour[i], sold[i]]
            out.writerow([*cells, f"{price[i]:.4f}", kind[i], visits[i]])


def columns_of(path: Path) -> dict[str, Any]:
    """The columns of a CSV: numbers as such, other cells as texts."""
    with path.open(newline="") as file:
        head, *rows = csv.reader(file)
    found: dict[str, Any] = {}
    for name, cells in zip(head, zip(*rows, strict=True), strict=True):
        try:
            found[name] = np.array([float(cell) for cell in cells])
        except ValueError:
            found[name] = list(cells)
    return found


def whole(model: Path, folder: Path, target: str, *options: Any) -> Answers:
    """Train on one target, and use the model with each command."""
    case = f"{target}{''.join(f' {option}' for option in options)}"
    others = [name for name in ("price", "kind", "visits") if name != target]
    drops = [part for name in others for part in ("--drop", name)]
    fixed = ["-t", target, *drops]
    data, new, out = folder / "data.csv", folder / "new.csv", folder / f"{model.name}.out.csv"
    fast = ["--members", 2, "--max-epochs", 6, "--quiet"]

    def predicted(*given: Any) -> tuple[Any, ...]:
        told = run("predict", model, new, "-o", out, *given)
        return (*told, columns_of(out))

    def paged() -> tuple[Any, ...]:
        page = folder / f"{model.name}.html"
        told = run("report", model, data, "-o", page)
        return (*told, page_parts(page.read_text()))

    yield from asked(
        f"command, {case}",
        {
            "train": lambda: run("train", data, *fixed, "-o", model, *fast, *options),
            "files": lambda: files_in(model),
            "predict": predicted,
            "predict levels": lambda: predicted("--level", 0.5, "--level", 0.9, "--keep", "id"),
            "evaluate": lambda: run("evaluate", model, data),
            "evaluate json": lambda: run("evaluate", model, new, "--json"),
            "sensitivity": lambda: run("sensitivity", model, new),
            "sensitivity json": lambda: run("sensitivity", model, new, "--json"),
            "report": lambda: run("report", model),
            "report json": lambda: run("report", model, "--json"),
            "page": paged,
        },
    )
    if "gaussian" in options:  # the others take ten seconds
        plain = ["--refit", "newton", "--json"]
        yield f"command, {case}: predict newton", predicted(*plain)
        yield f"command, {case}: evaluate newton", run("evaluate", model, new, *plain)


def costs(data: Path) -> Answers:
    """Sizes are computed; times are measured, and masked."""
    for weights, structure in (("last_layer", "dense"), ("all", "kfac"), ("all", "dense")):
        options = ["-t", "price", "--weights", weights, "--structure", structure]
        yield f"command, cost: {weights} {structure}", run("cost", data, *options)
        yield f"command, cost: {weights} {structure} json", run("cost", data, *options, "--json")


def cases() -> Answers:
    """All of the command."""
    with tempfile.TemporaryDirectory(prefix="golden") as place:
        folder = Path(place)
        write_table(folder / "data.csv", ROWS, 1, ("red", "green", "blue"))
        write_table(folder / "new.csv", TESTS, 2, ("red", "green", "violet"))
        yield from whole(folder / "prices", folder, "price")
        yield from whole(folder / "corrected", folder, "price", "--conformal")
        yield from whole(folder / "gaussian", folder, "price", "--likelihood", "gaussian", "--json")
        yield from whole(folder / "kinds", folder, "kind")
        yield from whole(folder / "visits", folder, "visits", "--likelihood", "poisson")
        yield from costs(folder / "data.csv")
        data, model = folder / "data.csv", folder / "prices"
        yield from asked(
            "command, wrong",
            {
                "target": lambda: run("train", data, "-t", "prize", "-o", folder / "none"),
                "file": lambda: run("predict", model, folder / "no.csv", "-o", folder / "o.csv"),
                "model": lambda: run("evaluate", folder / "no", data),
                "refit": lambda: run("evaluate", model, data, "--refit", "outputs", "--json"),
                "option": lambda: run("evaluate", model, data, "--levels", "2"),
            },
        )
        yield from asked("command, help", {"ssla": lambda: run("--help")})
        for command in COMMANDS:
            yield f"command, help: {command}", run(command, "--help")
