"""Digests of the source that produces a record: from a task's function to all that it uses.

A record depends on the function of its task, and on the functions, classes and constants of
`ssla_paper` that the function uses, directly or through others. `digest_sources` finds them by
reading the files, without running them, and returns one digest for each module. It does not follow
other packages: of `ssla` the version counts, and torch is pinned in constraints.txt.

Comments, docstrings, annotations and layout do not change a digest. Neither does the code of
reports (tables, figures, claims): a page is always made by the present reports, so only changed
results can make it wrong.

Names are resolved as Python does it: what a function assigns itself is not the module's name. Where
the use cannot be resolved (a module passed as a value), all of that module counts. A statement of a
module that is neither a definition nor an import counts whenever the module is used. Not seen are
names that are only in strings: of `getattr`, `importlib`, and of code that another process runs.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import symtable
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = "ssla_paper"
FOLDER = Path(__file__).parent
DIGITS = 16  # of a SHA-256 in hexadecimal; 64 bits exclude a chance agreement
# Annotations do not run, `ctx` follows from the position, and the rest is layout or typing.
IGNORED = ("annotation", "returns", "ctx", "type_comment", "type_params", "kind")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Key = tuple[str, str]  # module and name


@dataclass(frozen=True)
class Module:
    """The statements of a module by the names that they define."""

    name: str
    is_package: bool
    definitions: dict[str, list[ast.stmt]]  # also by assignment; a name can be assigned twice
    imports: dict[str, Key | str]  # a name -> (module, name) of the package, or a module of it
    others: list[ast.stmt]  # statements that run at import and define nothing


def digest_sources(function: Callable[..., Any]) -> dict[str, str]:
    """Return module -> digest of its definitions that `function` uses, sorted by module.

    The function is at the top level of a module that has a file. ValueError otherwise.
    """
    path = getattr(sys.modules.get(function.__module__), "__file__", None)
    if path is None or "." in function.__qualname__:
        raise ValueError(
            f"{function.__qualname__!r} of {function.__module__!r} is not a function at the top "
            "level of a module with a file. A task needs one, so that other processes find it."
        )
    return dict(_digest(function.__module__, Path(path), function.__name__))


@cache
def _digest(name: str, path: Path, function: str) -> tuple[tuple[str, str], ...]:
    reached = _reach(_read(name, path), function)
    modules = sorted({module for module, _ in reached})
    return tuple(
        (module, _hash([(key, reached[key]) for key in sorted(reached) if key[0] == module]))
        for module in modules
    )


def _reach(start: Module, function: str) -> dict[Key, list[ast.stmt]]:
    """Return the statements that define `function` and everything that it uses."""
    reached: dict[Key, list[ast.stmt]] = {}
    waiting: list[tuple[Module, str]] = [(start, function)]
    while waiting:
        module, name = waiting.pop()
        if (module.name, name) in reached:
            continue
        if name in module.imports:  # another module of the package defines it
            waiting += _follow(module.imports[name], set())
            continue
        if name not in module.definitions:  # a builtin, or a name of another package
            continue
        statements = module.definitions[name]
        reached[module.name, name] = statements
        if module.others:
            reached[module.name, ""] = module.others
            statements = [*statements, *module.others]
        for statement in statements:
            waiting += _used(module, statement)
    return reached


def _used(module: Module, statement: ast.stmt) -> Iterator[tuple[Module, str]]:
    """Yield the definitions of the package that a statement refers to."""
    stripped = _strip(statement)
    for name in _global_names(stripped):
        target = module.imports.get(name)
        if isinstance(target, str):  # a module: its attributes
            yield from _follow(target, _attributes(stripped, name))
        else:
            yield module, name
    for node in ast.walk(stripped):  # imports inside a function
        if isinstance(node, ast.Import | ast.ImportFrom):
            for target in _targets(node, module.name, module.is_package).values():
                attributes = set() if isinstance(target, str) else {target[1]}
                yield from _follow(target, attributes)


def _follow(target: Key | str, attributes: set[str]) -> Iterator[tuple[Module, str]]:
    """Yield the named definitions of a module of the package; all of it without names."""
    module, names = (target, attributes) if isinstance(target, str) else (target[0], {target[1]})
    found = _read(module, _locate(module))
    for name in names or {*found.definitions, *found.imports}:
        yield found, name


def _attributes(node: ast.AST, module: str) -> set[str]:
    """Return the attributes that are read of the module; none if it is also used as a value."""
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == module]
    uses = [
        n.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == module
    ]
    return set(uses) if len(uses) == len(names) else set()


def _global_names(statement: ast.stmt) -> set[str]:
    """Return the names of the module, or builtins, that a statement refers to."""
    top = symtable.symtable(ast.unparse(statement), "statement", "exec")
    found: set[str] = set()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        found |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (table is top or symbol.is_global())
        }
    return found


@cache
def _read(name: str, path: Path) -> Module:
    """Read a module of the package, or the one of a task's function."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    module = Module(name, path.name == "__init__.py", {}, {}, [])
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            module.imports.update(_targets(statement, name, module.is_package))
        elif defined := _defined(statement):
            for each in defined:
                module.definitions.setdefault(each, []).append(statement)
        elif not _is_text(statement):
            module.others.append(statement)
    return module


def _defined(statement: ast.stmt) -> list[str]:
    """Return the names that a definition or an assignment at the top level defines."""
    if isinstance(statement, Definition):
        return [statement.name]
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return [
            node.id
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ]
    return []


def _targets(node: ast.Import | ast.ImportFrom, name: str, is_package: bool) -> dict[str, Any]:
    """Return the names that an import binds to modules of the package or to their names."""
    if isinstance(node, ast.Import):
        return {
            alias.asname or alias.name.partition(".")[0]: alias.name
            for alias in node.names
            if _is_ours(alias.name)
        }
    source = node.module or ""
    if node.level:  # relative: from the package of this module
        package = name.split(".")
        package = package[: len(package) - node.level + is_package]
        source = ".".join([*package, *([source] if source else [])])
    if not _is_ours(source):
        return {}
    found: dict[str, Key | str] = {}
    for alias in node.names:
        inner = f"{source}.{alias.name}"
        found[alias.asname or alias.name] = inner if _exists(inner) else (source, alias.name)
    return found


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == PACKAGE


def _locate(module: str) -> Path:
    """Return the file of a module of the package."""
    base = FOLDER.joinpath(*module.split(".")[1:])
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def _exists(module: str) -> bool:
    return _locate(module).exists()


def _is_text(statement: ast.stmt) -> bool:
    """Whether a statement is a docstring, or a string below a definition that documents it."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _strip(statement: ast.stmt) -> ast.stmt:
    """Return a copy without docstrings and annotations."""
    copied = copy.deepcopy(statement)
    for node in ast.walk(copied):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(value=None)
        if isinstance(node, Definition):
            node.body = [each for each in node.body if not _is_text(each)] or [ast.Pass()]
    return ast.fix_missing_locations(copied)


def _hash(parts: list[tuple[Key, list[ast.stmt]]]) -> str:
    text = repr([(key[1], [_describe(_strip(each)) for each in found]) for key, found in parts])
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def _describe(node: Any) -> Any:
    """Return a syntax tree as nested tuples, the same on every Python from 3.10 on.

    `ast.dump` is not: it lists new empty fields in newer versions.
    """
    if isinstance(node, ast.AST):
        fields = [
            (name, _describe(value))
            for name, value in ast.iter_fields(node)
            if name not in IGNORED and value is not None and value != []
        ]
        return (type(node).__name__, *fields)
    return [_describe(each) for each in node] if isinstance(node, list) else node
