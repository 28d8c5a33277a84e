"""Curvature of the data: statistics that add and merge, and the operators that they give.

Terms and symbols of all these modules:

J           the Jacobian ∂f/∂θ of the outputs of a batch in the free parameters (B, C, P)
Λ           the curvature −∇²log p(y|f) of each row in its outputs (B, C, C), called its precision.
            It includes the row's weight, and mostly it is the Fisher information
S           the curvature of the data, Σ_i J_iᵀ Λ_i J_i (P, P)
structure   the form in which S is stored: dense, kfac, low_rank or diag
statistics  a structure with the sums of some rows. Those of two data sets can be merged
H           S + the prior's precision (P, P)
operator    H⁻¹ in a factorised form, for products with it
K           J H⁻¹ Jᵀ, the covariance of the outputs of each row (B, C, C)
position    a place at which a layer's weight is used in one row: of a sequence, or a window of a
            convolution; T of them
B, C, P     the numbers of rows of a batch, of outputs, and of free parameters θ
F, n        the numbers of features of a last layer (with the column of ones), and of all rows
in, out     the numbers of inputs of a layer (with that of the bias), and of its outputs

A docstring that ends in "(P,) -> (B, C)" states the shapes of the argument and of the result.
"""

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
