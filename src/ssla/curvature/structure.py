"""Sufficient statistics of the curvature, and the operator that they give with a prior.

A structure is a commutative monoid: `zero`, `add`, `merge`. It depends on the data only, so the
prior can be changed: `with_prior` factorises H = statistics + prior precision once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ssla.curvature.jacobians import Jacobian
from ssla.maths.roots import Root


@dataclass(frozen=True)
class Extent:
    """The size of a problem, from which its memory follows."""

    size: int  # P
    outputs: int  # C
    layers: tuple[
        tuple[int, int], ...
    ] = ()  # (inputs, outputs) of each layer with a Kronecker form
    rows: int | None = None  # n, if known
    # whether a variational Gaussian is found: its rounds hold two Gaussians and the sums of each
    averages: bool = False

    @property
    def rest(self) -> int:
        """The number of parameters outside those layers."""
        return self.size - sum(inside * out for inside, out in self.layers)


class Operator(Protocol):
    """H⁻¹, factorised. All in float64."""

    def covariance(self, J: Jacobian) -> Tensor:
        """K = J H⁻¹ Jᵀ, exactly symmetric.  -> (B, C, C)."""
        ...

    def root(self, J: Jacobian) -> Root:
        """R with R Rᵀ = K."""
        ...

    def response(self, J: Jacobian, middle: Tensor) -> Tensor:
        """J H⁻¹ diag(m) H⁻¹ Jᵀ (m ≥ 0).  (P,) -> (B, C, C)."""
        ...

    def logdet(self) -> float:
        """log |H|."""
        ...

    def solve(self, v: Tensor) -> Tensor:
        """H⁻¹ v.  (P,) -> (P,)."""
        ...

    def solve_many(self, V: Tensor) -> Tensor:
        """H⁻¹ V.  (P, k) -> (P, k)."""
        ...

    def variances(self) -> Tensor:
        """The diagonal of H⁻¹ (P,)."""
        ...

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws from N(0, H⁻¹): (n, P)."""
        ...


class Structure(Protocol):
    """Statistics of Σ_i J_iᵀ Λ_i J_i."""

    @property
    def name(self) -> str: ...

    @property
    def materialises(self) -> bool:
        """Whether it needs the entries of a Jacobian, which must then fit the memory budget."""
        ...

    @property
    def whole(self) -> bool:
        """Whether it holds the curvature between all parameters, up to a tail that is reported."""
        ...

    def zero(self, size: int) -> Structure:
        """The statistics of no data, for P = size parameters."""
        ...

    def add(self, J: Jacobian, precision: Tensor, weights: Tensor | None = None) -> Structure:
        """Statistics with one more batch; precision (B, C, C) includes the row weights, which
        are also passed separately (B,).
        """
        ...

    def merge(self, other: Structure) -> Structure:
        """Statistics of both data sets."""
        ...

    def mixed(self, other: Structure, share: float) -> Structure:
        """(1 − share) of these statistics and `share` of others of the same rows."""
        ...

    def positive_part(self) -> Structure:
        """Without the directions of negative curvature, which sums of an indefinite Λ may have."""
        ...

    def scaled(self, factors: Tensor) -> Structure:
        """D S D for a positive diagonal D = diag(factors) (P,): another noise level without
        another pass.
        """
        ...

    def push(self, direction: Tensor) -> Tensor:
        """S d.  (P,) -> (P,)."""
        ...

    def trace(self, operator: Operator) -> float:
        """tr(S H⁻¹), for an operator of the same kind of structure."""
        ...

    def with_prior(self, precision: Tensor) -> Operator:
        """Factorise S + prior; precision (P,) or (P, P)."""
        ...

    def memory(self, extent: Extent) -> int:
        """Bytes of the statistics, those of a batch, and their factorisation."""
        ...


SINGULAR = (
    "The curvature of the log posterior is not positive definite{detail}. Likely causes: (a) a "
    "flat prior with fewer independent rows than parameters; (b) a flat prior with a constant or "
    "repeated input column; (c) row weights of zero. Remedy: give a proper prior, for example "
    "prior=ssla.priors.Gaussian(precision=1.0)."
)
ILL_CONDITIONED = (
    "The curvature of the log posterior cannot be factorised in double precision{detail}: its "
    "largest part exceeds 1e14 times the prior's precision, which is proper (at least "
    "{least:.3g}). Likely causes: (a) inputs or features of very unequal scale; (b) a noise far "
    "too small for the targets. Remedy: standardise the inputs and targets, or give a prior "
    "precision nearer to the data's."
)


class NoFactorError(ValueError):
    """A curvature that cannot be factorised in double precision."""


def no_factor(precision: Tensor, detail: str) -> str:
    """The error text if S + prior cannot be factorised.

    If the prior is proper, it is neither the cause nor the remedy.
    """
    least = float((precision if precision.dim() == 1 else torch.linalg.eigvalsh(precision)).min())
    return (
        ILL_CONDITIONED.format(detail=detail, least=least)
        if least > 0
        else SINGULAR.format(detail=detail)
    )


def mismatch(kind: str, other: object) -> str:
    """The error text if two different structures are merged."""
    return (
        f"Only {kind} statistics of the same parameters can be merged into {kind} ones, but got "
        f"{type(other).__name__}."
    )
