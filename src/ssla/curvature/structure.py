"""Sufficient statistics of the curvature, and the operator that they give with a prior.

A structure is a commutative monoid: `zero`, `add`, `merge`. It depends on the data only, so the
prior can be changed: `with_prior` factorises H = statistics + prior precision once.
"""

from __future__ import annotations

from abc import abstractmethod
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
    # (inputs, outputs) of each layer with a Kronecker form
    layers: tuple[tuple[int, int], ...] = ()
    rows: int | None = None  # n, if known
    # whether a variational Gaussian is fitted: its rounds hold two Gaussians and the sums of each
    averages: bool = False

    @property
    def parameters_outside_layers(self) -> int:
        """Return the number of parameters outside the layers with a Kronecker form."""
        return self.size - sum(inside * out for inside, out in self.layers)


class Operator(Protocol):
    """H⁻¹, factorised. All in float64."""

    def covariance(self, J: Jacobian) -> Tensor:
        """Compute K = J H⁻¹ Jᵀ, exactly symmetric.  -> (B, C, C)."""

    def root(self, J: Jacobian) -> Root:
        """Compute R with R Rᵀ = K, for B rows and C outputs."""

    def sandwich_covariance(self, J: Jacobian, precisions: Tensor) -> Tensor:
        """Compute J H⁻¹ diag(m) H⁻¹ Jᵀ for precisions m ≥ 0.  (P,) -> (B, C, C)."""

    def logdet(self) -> float:
        """Compute log |H|."""

    def solve(self, v: Tensor) -> Tensor:
        """Compute H⁻¹ v.  (P,) -> (P,)."""

    def solve_many(self, V: Tensor) -> Tensor:
        """Compute H⁻¹ V.  (P, k) -> (P, k)."""

    def variances(self) -> Tensor:
        """Compute the diagonal of H⁻¹ (P,)."""

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n vectors from N(0, H⁻¹).  -> (n, P)."""


class Structure(Protocol):
    """Statistics of S = Σ_i J_iᵀ Λ_i J_i.

    A new structure is a class `MyStructure(Structure)` in one file. The abstract members are
    required. The others have a default here, which a class overrides where it is not so.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name of the structure in options, reports and errors."""

    @property
    @abstractmethod
    def needs_jacobian_entries(self) -> bool:
        """Return whether it needs the entries of J, which must then fit the memory budget."""

    @property
    @abstractmethod
    def couples_all_parameters(self) -> bool:
        """Return whether it holds the curvature between all parameters.

        A tail may be left out, if it is reported.
        """

    @abstractmethod
    def zero(self, size: int) -> Structure:
        """Return the statistics of no data, for P = size parameters."""

    @abstractmethod
    def add(self, J: Jacobian, precision: Tensor, weights: Tensor | None = None) -> Structure:
        """Return the statistics with one more batch.

        precision: Λ (B, C, C), which includes the row weights. weights: these row weights (B,),
        for structures that count rows; None: all one.
        """

    @abstractmethod
    def merge(self, other: Structure) -> Structure:
        """Return the statistics of both data sets.

        ValueError if the other structure has another kind, size or settings.
        """

    @abstractmethod
    def mix_with(self, other: Structure, share: float) -> Structure:
        """Return (1 − share) of these statistics plus `share` of others of the same rows.

        ValueError if the other structure has another kind or size.
        """

    @abstractmethod
    def positive_part(self) -> Structure:
        """Return S without its directions of negative curvature, which an indefinite Λ may add."""

    @abstractmethod
    def scale_both_sides(self, factors: Tensor) -> Structure:
        """Return D S D for a positive diagonal D = diag(factors), factors (P,).

        This gives the statistics for another noise level without another pass.
        """

    @abstractmethod
    def push(self, direction: Tensor) -> Tensor:
        """Compute S d.  (P,) -> (P,)."""

    @abstractmethod
    def trace(self, operator: Operator) -> float:
        """Compute tr(S H⁻¹), for an operator of the same kind of structure."""

    @abstractmethod
    def with_prior(self, precision: Tensor) -> Operator:
        """Factorise H = S + prior; precision (P,) or (P, P).

        NoFactorError if H is not positive definite in double precision.
        """

    @abstractmethod
    def memory(self, extent: Extent) -> int:
        """Estimate the bytes of the statistics, those of a batch, and their factorisation."""

    # --- properties of the statistics, with defaults ---------------------------------------

    @property
    def exact(self) -> bool:
        """Return whether every entry of S is held: `as_matrix` has them."""
        return False

    def as_matrix(self) -> Tensor:
        """Return S (P, P) if the statistics are `exact`; TypeError otherwise."""
        raise TypeError(f"Statistics of structure={self.name!r} do not hold every entry of S.")

    @property
    def exact_for_one_precision(self) -> bool:
        """Return whether the sums of a last layer are exact where Λ is the same for all rows."""
        return self.exact

    @property
    def by_layers(self) -> bool:
        """Return whether it holds Kronecker factors of layers, with one prior precision each.

        For a last layer it then needs only the sum of Λ over rows.
        """
        return False

    @property
    def diagonal_outputs(self) -> bool:
        """Return whether the structure needs only the diagonal of the sum of Λ for a last layer."""
        return False

    @property
    def positive_only(self) -> bool:
        """Return whether the structure refuses an indefinite Λ."""
        return False

    @property
    def is_widened_by_fit(self) -> bool:
        """Return whether a fit widens it, with a pass each time (see `LowRank.widen_sketch`)."""
        return False

    def for_many_classes(self) -> Structure:
        """Return the form that a fit uses by default for a last layer of very many classes."""
        return self

    def accumulate(
        self, J: Jacobian, precision: Tensor, weights: Tensor | None = None, inputs: bool = True
    ) -> Structure:
        """Add a batch as `add` does, but change matrices in place.

        Only the owner of the sum may call it. inputs: whether the input factors of a last layer
        are summed too, if the structure has them.
        """
        return self.add(J, precision, weights)

    def with_inputs_of(self, other: Structure) -> Structure:
        """Return the statistics with the input factors of another sum over the same rows."""
        return self

    def eigenbasis(self, precisions: Tensor) -> Eigenbasis | None:
        """Return S = Q diag(λ) Qᵀ in a basis that is kept; None if there is no such basis.

        precisions (k, P): k prior precisions. Each must be constant inside every block of Q.
        """
        return None

    def describe_omission(self, least: float) -> str:
        """Return a sentence for the report on what the structure leaves out; empty if nothing.

        least: the smallest precision of the prior.
        """
        return ""

    def check_layers(self, shapes: tuple[tuple[int, int], ...]) -> None:
        """Raise ValueError unless the statistics can be those of layers (inputs, outputs)."""
        return


@dataclass(frozen=True, eq=False)
class Eigenbasis:
    """S = Q diag(values) Qᵀ, with a block-diagonal Q."""

    values: Tensor  # (P,)
    # positions (out, in), Q_in, Q_out (None: the identity) of blocks that are not diagonal already
    parts: tuple[tuple[Tensor, Tensor, Tensor | None], ...]

    def to_eigenbasis(self, v: Tensor) -> Tensor:
        """Return Qᵀv.  (…, P) -> (…, P); v itself where S is diagonal."""
        if not self.parts:
            return v
        out = v.clone()
        for positions, inner, outer in self.parts:
            block = v[..., positions]
            out[..., positions] = (block if outer is None else outer.mT @ block) @ inner
        return out

    def from_eigenbasis(self, v: Tensor) -> Tensor:
        """Return Qv.  (…, P) -> (…, P)."""
        out = v.clone()
        for positions, inner, outer in self.parts:
            block = v[..., positions]
            out[..., positions] = (block if outer is None else outer @ block) @ inner.mT
        return out


def rows_are_constant(values: Tensor) -> bool:
    """Return whether each row of values (k, n) holds a single number."""
    return bool((values == values[:, :1]).all())


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


def factorisation_error_text(precision: Tensor, detail: str) -> str:
    """Return the error text for S + prior without a factorisation.

    precision: of the prior, (P,) or (P, P). If the prior is proper, it is neither the cause nor
    the remedy. detail: words that say which parameter or factor fails.
    """
    least = float((precision if precision.dim() == 1 else torch.linalg.eigvalsh(precision)).min())
    if least > 0:
        return ILL_CONDITIONED.format(detail=detail, least=least)
    return SINGULAR.format(detail=detail)


def mismatch_text(name: str, other: object) -> str:
    """Return the error text for a merge of two different structures.

    name: the structure that was asked to merge. other: what it was given.
    """
    return (
        f"Only {name} statistics of the same parameters can be merged into {name} ones, but got "
        f"{type(other).__name__}."
    )
