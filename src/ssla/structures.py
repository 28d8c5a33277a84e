"""The public path of the structures of the curvature, which are in `ssla.curvature`."""

from ssla.curvature import (
    Dense,
    Diagonal,
    Kfac,
    LowRank,
    Operator,
    Structure,
)

__all__ = ["Dense", "Diagonal", "Kfac", "LowRank", "Operator", "Structure"]
