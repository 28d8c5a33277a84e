"""Curvature of the data: statistics that add and merge -> operator (K, logdet, solve, sample)."""

from __future__ import annotations

from ssla._checks import unknown_name
from ssla.curvature.dense import Dense
from ssla.curvature.diagonal import Diagonal
from ssla.curvature.kfac import Kfac
from ssla.curvature.low_rank import LowRank
from ssla.curvature.structure import Extent, Operator, Structure
from ssla.curvature.woodbury import WoodburyOperator

__all__ = [
    "STRUCTURES",
    "Dense",
    "Diagonal",
    "Extent",
    "Kfac",
    "LowRank",
    "Operator",
    "Structure",
    "WoodburyOperator",
    "resolve_structure",
]

STRUCTURES: dict[str, Structure] = {
    "dense": Dense(),
    "diag": Diagonal(),
    "kfac": Kfac(),
    "low_rank": LowRank(),
}


def resolve_structure(structure: str | Structure) -> Structure:
    """Return the structure of a name ("dense", "diag", "kfac", "low_rank").

    A structure object is returned as it is. Raises ValueError for an unknown name, and TypeError
    for a value that is neither a name nor a structure object.
    """
    if isinstance(structure, str):
        if structure not in STRUCTURES:
            raise ValueError(unknown_name("structure", structure, STRUCTURES))
        return STRUCTURES[structure]
    # A class in place of its object has the method too.
    if isinstance(structure, type) or not hasattr(structure, "with_prior"):
        raise TypeError(
            f"structure must be one of {', '.join(map(repr, STRUCTURES))} or a structure "
            f"object, but is {structure!r}."
        )
    return structure
