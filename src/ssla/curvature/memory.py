"""Raises an error before any pass if a fit exceeds the memory budget, and names structures that
fit.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from ssla.curvature import STRUCTURES, Extent, Kfac, Structure
from ssla.curvature.kfac import DIAGONAL, MANY_CLASSES

DEFAULT_BUDGET = 1 << 30
BY_ACCURACY = ("dense", "kfac", "low_rank", "diag")  # as in docs/choosing.md


def refuse_beyond_budget(
    structure: Structure, extent: Extent, bytes_per_row: int, budget: int
) -> None:
    """ValueError if the statistics, or a single row's intermediate results, are larger than the
    budget.
    """
    need = structure.memory(extent)
    if need > budget:
        instead = alternatives(structure.name, extent, budget)
        if len(extent.layers) > 1 and not instead.startswith("fewer weights"):
            instead += ", or fewer weights (weights='last_layer', or a list of parameter names)"
        raise ValueError(
            f"structure={structure.name!r} with {extent.size:,} free parameters needs "
            f"{in_words(need)}, more than the memory budget of {in_words(budget)}. Use {instead}, "
            "or a larger memory_budget."
        )
    if bytes_per_row > budget:
        raise ValueError(
            f"One row of the network's intermediate results takes {in_words(bytes_per_row)} with "
            f"structure={structure.name!r}, more than the memory budget of {in_words(budget)}. "
            "Give several times that, or select fewer weights"
            + (
                ", or, for classes, use structure='kfac'."
                if is_last_layer(extent) and structure.name != "kfac"
                else "."
            )
        )


def bytes_of(value: Any) -> int:
    """Bytes of the tensors in a value: a tensor, a dataclass or a sequence of them."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    parts = [getattr(value, part.name) for part in fields(value)] if is_dataclass(value) else value
    return sum(map(bytes_of, parts)) if isinstance(parts, list | tuple) else 0


def alternatives(name: str, extent: Extent, budget: int) -> str:
    """The other structures that fit, with their memory; the most accurate first."""
    known: dict[str, Structure] = dict(STRUCTURES)
    if is_last_layer(extent) and extent.outputs > MANY_CLASSES:
        known["kfac"] = Kfac(output_factor=DIAGONAL)
    sizes = {other: known[other].memory(extent) for other in BY_ACCURACY if other != name}
    good = [
        f"structure={other!r} ({in_words(size)})" for other, size in sizes.items() if size <= budget
    ]
    return " or ".join(good) or "fewer weights, such as weights='last_layer'"


def is_last_layer(extent: Extent) -> bool:
    """Whether the parameters are those of one layer that ends in the outputs."""
    return extent.rest == 0 and [out for _, out in extent.layers] == [extent.outputs]


def in_words(size: int) -> str:
    """A number of bytes as text."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    for unit in units:
        if value < 1024 or unit == units[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"
