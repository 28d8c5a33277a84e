"""Refuses a fit that exceeds the memory budget before any pass, and names structures that fit."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from ssla.curvature import STRUCTURES, Extent, Kfac, Structure
from ssla.curvature.kfac import DIAGONAL
from ssla.curvature.structure import MANY_CLASSES

DEFAULT_BUDGET = 1 << 30
BY_ACCURACY = ("dense", "kfac", "low_rank", "diag")  # as in docs/choosing.md


def refuse_beyond_budget(
    structure: Structure, extent: Extent, bytes_per_row: int, budget: int
) -> None:
    """Raise ValueError if the statistics or the results of a single row exceed the budget.

    bytes_per_row: those of a row's intermediate results in the network. budget: bytes. The error
    names what to use instead.
    """
    need = structure.memory(extent)
    if need > budget:
        instead = describe_affordable_structures(structure.name, extent, budget)
        if len(extent.layers) > 1 and not instead.startswith("fewer weights"):
            instead += ", or fewer weights (weights='last_layer', or a list of parameter names)"
        raise ValueError(
            f"structure={structure.name!r} with {extent.size:,} free parameters needs "
            f"{describe_bytes(need)}, more than the memory budget of {describe_bytes(budget)}. Use "
            f"{instead}, or a larger memory_budget."
        )
    if bytes_per_row > budget:
        # For a last layer kfac holds less for each row than the other structures.
        kfac_helps = extent.is_last_layer and structure.name != "kfac"
        raise ValueError(
            "One row of the network's intermediate results takes "
            f"{describe_bytes(bytes_per_row)} with structure={structure.name!r}, more than the "
            f"memory budget of {describe_bytes(budget)}. "
            "Give several times that, or select fewer weights"
            + (", or, for classes, use structure='kfac'." if kfac_helps else ".")
        )


def count_tensor_bytes(value: Any) -> int:
    """Return the bytes of all tensors in a value.

    The value is a tensor, a dataclass, or a list or tuple of such values. Any other value has 0.
    """
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if is_dataclass(value):
        value = [getattr(value, field.name) for field in fields(value)]
    return sum(map(count_tensor_bytes, value)) if isinstance(value, list | tuple) else 0


def describe_affordable_structures(name: str, extent: Extent, budget: int) -> str:
    """Return in words the other structures that fit the budget, the most accurate first.

    name: the structure that does not fit. The words include the memory of each. If none fits, they
    advise fewer weights.
    """
    sizes = {
        other: (make_default_kfac(extent) if other == "kfac" else STRUCTURES[other]).memory(extent)
        for other in BY_ACCURACY
        if other != name
    }
    affordable = [
        f"structure={other!r} ({describe_bytes(size)})"
        for other, size in sizes.items()
        if size <= budget
    ]
    return " or ".join(affordable) or "fewer weights, such as weights='last_layer'"


def make_default_kfac(extent: Extent) -> Kfac:
    """Return the Kronecker factors that a fit uses by default.

    A last layer of very many classes has a diagonal output factor.
    """
    many = extent.is_last_layer and extent.outputs > MANY_CLASSES
    return Kfac(output_factor=DIAGONAL if many else None)


def describe_bytes(size: int) -> str:
    """Return a number of bytes as text with three digits and a unit, such as "1.5 GiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    value = float(size)
    while value >= 1024 and power < len(units) - 1:
        value /= 1024
        power += 1
    # From 1000 to 1023, three digits would be written as a power of ten.
    return f"{value:.0f} {units[power]}" if value >= 1000 else f"{value:.3g} {units[power]}"
