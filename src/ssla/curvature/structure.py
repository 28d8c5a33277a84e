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
    """Statistics of Σ_i J_iᵀ Λ_i J_i.

    A new structure is a class `MyStructure(Structure)` in one file. The abstract members are
    required. The others have a default here, which a class overrides where it is not so.
    """

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def materialises(self) -> bool:
        """Whether it needs the entries of a Jacobian, which must then fit the memory budget."""
        ...

    @property
    @abstractmethod
    def whole(self) -> bool:
        """Whether it holds the curvature between all parameters, up to a tail that is reported."""
        ...

    @abstractmethod
    def zero(self, size: int) -> Structure:
        """The statistics of no data, for P = size parameters."""
        ...

    @abstractmethod
    def add(self, J: Jacobian, precision: Tensor, weights: Tensor | None = None) -> Structure:
        """Statistics with one more batch; precision (B, C, C) includes the row weights, which
        are also passed separately (B,).
        """
        ...

    @abstractmethod
    def merge(self, other: Structure) -> Structure:
        """Statistics of both data sets."""
        ...

    @abstractmethod
    def mixed(self, other: Structure, share: float) -> Structure:
        """(1 − share) of these statistics and `share` of others of the same rows."""
        ...

    @abstractmethod
    def positive_part(self) -> Structure:
        """Without the directions of negative curvature, which sums of an indefinite Λ may have."""
        ...

    @abstractmethod
    def scaled(self, factors: Tensor) -> Structure:
        """D S D for a positive diagonal D = diag(factors) (P,): another noise level without
        another pass.
        """
        ...

    @abstractmethod
    def push(self, direction: Tensor) -> Tensor:
        """S d.  (P,) -> (P,)."""
        ...

    @abstractmethod
    def trace(self, operator: Operator) -> float:
        """tr(S H⁻¹), for an operator of the same kind of structure."""
        ...

    @abstractmethod
    def with_prior(self, precision: Tensor) -> Operator:
        """Factorise S + prior; precision (P,) or (P, P)."""
        ...

    @abstractmethod
    def memory(self, extent: Extent) -> int:
        """Bytes of the statistics, those of a batch, and their factorisation."""
        ...

    # --- what kind of statistics they are, with defaults -----------------------------------

    @property
    def exact(self) -> bool:
        """Whether every entry of S is held: `as_matrix` has them."""
        return False

    def as_matrix(self) -> Tensor:
        """S (P, P) of `exact` statistics."""
        raise TypeError(f"Statistics of structure={self.name!r} do not hold every entry of S.")

    @property
    def exact_for_one_precision(self) -> bool:
        """Whether the sums of a last layer are exact where Λ is the same for all rows."""
        return self.exact

    @property
    def by_layers(self) -> bool:
        """Whether it holds Kronecker factors of each layer, with one prior precision for each.

        Of a last layer the sum of Λ over rows is enough for it.
        """
        return False

    @property
    def diagonal_outputs(self) -> bool:
        """Whether the diagonal of the sum of Λ over rows is enough for a last layer."""
        return False

    @property
    def positive_only(self) -> bool:
        """Whether it takes no indefinite Λ."""
        return False

    @property
    def grows(self) -> bool:
        """Whether a fit widens it, with a pass over the data each time (see `LowRank.wider`)."""
        return False

    def for_many_classes(self) -> Structure:
        """The form that a fit takes by default for a last layer of very many classes."""
        return self

    def accumulate(
        self, J: Jacobian, precision: Tensor, weights: Tensor | None = None, inputs: bool = True
    ) -> Structure:
        """As `add`, but matrices are changed in place: for a sum that belongs to the caller alone.

        inputs: whether the input factors of a last layer are summed too, where there are such.
        """
        return self.add(J, precision, weights)

    def with_inputs_of(self, other: Structure) -> Structure:
        """With the input factors of another sum over the same rows, where there are such."""
        return self

    def eigenbasis(self, precisions: Tensor) -> Eigenbasis | None:
        """S = Q diag(λ) Qᵀ in a basis that is kept, if every block of it has one precision;
        None otherwise.

        precisions (k, P): what is to be the same inside a block.
        """
        return None

    def note(self, least: float) -> str:
        """What is left out, for a report, under a prior whose smallest precision is `least`;
        empty: nothing that is measured.
        """
        return ""

    def check_layers(self, shapes: tuple[tuple[int, int], ...]) -> None:
        """ValueError unless the statistics can be those of layers (inputs, outputs)."""
        return


@dataclass(frozen=True, eq=False)
class Eigenbasis:
    """S = Q diag(values) Qᵀ. Coordinates stay inside their block."""

    values: Tensor  # (P,)
    # positions (out, in), Q_in, Q_out (None: the identity) of blocks that are not diagonal already
    parts: tuple[tuple[Tensor, Tensor, Tensor | None], ...]

    def rotated(self, v: Tensor) -> Tensor:
        """Qᵀv.  (…, P) -> (…, P); v itself where S is diagonal."""
        if not self.parts:
            return v
        out = v.clone()
        for positions, inner, outer in self.parts:
            part = v[..., positions]
            out[..., positions] = (part if outer is None else outer.mT @ part) @ inner
        return out

    def restored(self, v: Tensor) -> Tensor:
        """Qv.  (…, P) -> (…, P)."""
        out = v.clone()
        for positions, inner, outer in self.parts:
            part = v[..., positions]
            out[..., positions] = (part if outer is None else outer @ part) @ inner.mT
        return out


def constant(values: Tensor) -> bool:
    """Whether all columns of values (k, n) are the same."""
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
