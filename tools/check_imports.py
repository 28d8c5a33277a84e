"""Imports point downward: each room may see the rooms listed for it, and no other. Run by `make lint`."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

GROUND = {"_checks", "digests", "linalg", "quadrature", "parameters", "jacobians", "batches", "trace", "replacing"}
MIDDLE = {"likelihoods", "priors", "structures", "network"}  # none of these sees another
CORE = GROUND | MIDDLE | {"posterior"}
ANSWERS = CORE | {"expansion", "refit", "predictive"}

ALLOWED: dict[str, set[str]] = {
    "_checks": set(),
    "digests": set(),
    "linalg": set(),
    "quadrature": set(),
    "parameters": set(),
    "jacobians": set(),
    "batches": set(),
    "trace": set(),
    "replacing": set(),
    "ascent": set(),
    "likelihoods": {"_checks", "linalg", "quadrature"},
    "priors": {"_checks", "parameters"},
    "structures": {"_checks", "jacobians"},
    "network": {"_checks", "batches", "digests", "jacobians", "parameters"},
    "posterior": GROUND | MIDDLE,
    "fitting": CORE,
    "cost": CORE | {"fitting"},
    "distributed": CORE | {"fitting"},
    "modularity": CORE | {"fitting"},
    "evidence": {"structures"},
    "expansion": {"likelihoods", "linalg"},
    "refit": CORE | {"expansion"},
    "predictive": CORE | {"expansion", "refit"},
    "persistence": CORE,
    "training": {"_checks", "likelihoods"},
    "ensemble": ANSWERS | {"fitting", "training"},
    "sklearn": ANSWERS | {"ensemble", "persistence", "training"},
    "metrics": ANSWERS,
    "tuning": ANSWERS | {"fitting", "modularity", "evidence", "ascent", "metrics"},
    "expectation": {"predictive"},
    "sensitivities": ANSWERS | {"evidence", "expectation"},
    "explicit": GROUND | {"priors", "expansion"},
    "credal_sets": ANSWERS | {"evidence", "expectation", "sensitivities"},
    "plots": ANSWERS | {"sensitivities", "expectation", "credal_sets"},
    "demo": ANSWERS | {"fitting", "metrics", "plots", "__init__"},
    "tables": {"_checks", "replacing"},
    "cli": ANSWERS | {"__init__", "demo", "ensemble", "metrics", "persistence", "sklearn", "tables", "training"},
    "_public": ANSWERS | {"fitting", "cost", "distributed", "metrics", "persistence", "sensitivities", "credal_sets", "explicit"},
    "__init__": {"_public", "sklearn"},
}

# A method of a lower room that hands over to a higher one imports it inside the method, and is named here.
DOORS = {
    ("posterior", "predictive"),
    ("posterior", "refit"),
    ("posterior", "fitting"),
    ("posterior", "modularity"),
    ("posterior", "persistence"),
    ("posterior", "tuning"),
}


def room_of(module: str) -> str:
    """ssla.likelihoods.gaussian -> likelihoods; ssla itself -> __init__."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(tree: ast.Module, rooms: set[str]) -> list[tuple[str, int, bool]]:
    """(room, line, whether at the top of the file) of every import from this package."""
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                found.append(("a relative import", node.lineno, True))
            elif node.module == "ssla":
                for alias in node.names:
                    found.append((alias.name if alias.name in rooms else "__init__", node.lineno, id(node) in top))
            elif node.module and node.module.startswith("ssla."):
                found.append((room_of(node.module), node.lineno, id(node) in top))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "ssla":
                    found.append((room_of(alias.name), node.lineno, id(node) in top))
    return found


def check(source: Path) -> list[str]:
    """Every import that points the wrong way."""
    faults = []
    for path in sorted(source.rglob("*.py")):
        room = path.relative_to(source).parts[0].removesuffix(".py")
        if room not in ALLOWED:
            faults.append(f"{path}: the room {room!r} is not in tools/check_imports.py: say what it may see")
            continue
        for target, line, top in imports(ast.parse(path.read_text()), set(ALLOWED)):
            if target == room or target in ALLOWED[room]:
                continue
            if not top and (room, target) in DOORS:
                continue
            faults.append(f"{path}:{line}: {room} must not import {target}")
    return faults


if __name__ == "__main__":
    problems = check(Path(sys.argv[1] if len(sys.argv) > 1 else "src/ssla"))
    print("\n".join(problems) or "imports point downward")
    sys.exit(bool(problems))
