"""Sufficient statistics of the curvature, and the operator that they give with a prior.

A structure is a commutative monoid: `zero`, `add`, `merge`. It depends on the data only, so the
prior can be changed: `with_prior` factorises H = statistics + prior precision once.

Terms and symbols are those of `ssla.curvature`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ssla.curvature.jacobians import Jacobian
from ssla.maths.roots import Root

MANY_CLASSES = 1000  # beyond, a fit takes a diagonal output factor for a last layer by default


@dataclass(frozen=True)
class Extent:
    """The size of a problem, from which the memory and the seconds of a fit follow."""

    size: int  # P
    outputs: int  # C
    # (inputs, outputs) of each layer with a Kronecker form
    layers: tuple[tuple[int, int], ...] = ()
    rows: int | None = None  # n, if known
    # whether a variational Gaussian is fitted: its rounds hold two Gaussians and the sums of each
    averages: bool = False

    @property
    def parameters_outside_layers(self) -> int:
        """Return the number of parameters that are outside the layers with a Kronecker form."""
        return self.size - sum(inputs * outputs for inputs, outputs in self.layers)

    @property
    def is_last_layer(self) -> bool:
        """Return whether the parameters are those of one layer that ends in the outputs."""
        layer_outputs = [outputs for _, outputs in self.layers]
        return self.parameters_outside_layers == 0 and layer_outputs == [self.outputs]


class Operator(Protocol):
    """H⁻¹ (P, P), factorised in float64, and the products with it that the library needs."""

    def covariance(self, J: Jacobian) -> Tensor:
        """Compute K = J H⁻¹ Jᵀ, exactly symmetric.  J (B, C, P) -> (B, C, C)."""

    def root(self, J: Jacobian) -> Root:
        """Compute a root R of K = R Rᵀ, possibly implicit, for the B rows and C outputs of J."""

    def sandwich_covariance(self, J: Jacobian, precisions: Tensor) -> Tensor:
        """Compute J H⁻¹ diag(m) H⁻¹ Jᵀ for precisions m ≥ 0.  J, (P,) -> (B, C, C).

        For the prior's precisions m it is the covariance that the prior contributes.
        """

    def logdet(self) -> float:
        """Compute log |H|."""

    def solve(self, v: Tensor) -> Tensor:
        """Compute H⁻¹ v.  (P,) -> (P,)."""

    def solve_many(self, V: Tensor) -> Tensor:
        """Compute H⁻¹ V.  (P, k) -> (P, k)."""

    def variances(self) -> Tensor:
        """Compute the diagonal of H⁻¹ (P,)."""

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n vectors from N(0, H⁻¹), as a tensor (n, P).

        Without a generator, torch's global one is used.
        """


class Structure(Protocol):
    """Statistics of S = Σ_i J_iᵀ Λ_i J_i, the curvature (P, P) of the data.

    A new structure is a class `MyStructure(Structure)` in one file. The abstract members are
    required. The others have a default here, which a class overrides where it is wrong for it.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name of the structure in options, reports and errors."""

    @property
    @abstractmethod
    def needs_jacobian_entries(self) -> bool:
        """Return whether `add` needs the entries of J, which must then fit the memory budget."""

    @property
    @abstractmethod
    def couples_all_parameters(self) -> bool:
        """Return whether the statistics hold the curvature between all parameters.

        False means that entries between some parameters are left out, as in a diagonal. A sum with
        fewer directions than S counts as true, if `describe_omission` reports the rest.
        """

    @abstractmethod
    def zero(self, size: int) -> Structure:
        """Return the statistics of no data, for P = size parameters."""

    @abstractmethod
    def add(self, J: Jacobian, precision: Tensor, weights: Tensor | None = None) -> Structure:
        """Return the statistics with one more batch of B rows.

        J: the Jacobian of the batch. precision: Λ (B, C, C), which includes the row weights.
        weights: these row weights (B,), for structures that count rows; None: all one.
        """

    @abstractmethod
    def merge(self, other: Structure) -> Structure:
        """Return the statistics of both data sets.

        Raises ValueError if the other structure has another kind, size or settings.
        """

    @abstractmethod
    def mix_with(self, other: Structure, share: float) -> Structure:
        """Return (1 − share) of these statistics plus `share` of others of the same rows.

        Raises ValueError if the other structure has another kind or size.
        """

    @abstractmethod
    def positive_part(self) -> Structure:
        """Return the statistics without directions of negative curvature.

        An indefinite Λ may have added such directions.
        """

    @abstractmethod
    def scale_both_sides(self, factors: Tensor) -> Structure:
        """Return the statistics of D S D for D = diag(factors), with positive factors (P,).

        This gives the statistics for another noise level without another pass over data.
        """

    @abstractmethod
    def push(self, direction: Tensor) -> Tensor:
        """Compute the product S d with a direction d.  (P,) -> (P,)."""

    @abstractmethod
    def trace(self, operator: Operator) -> float:
        """Compute tr(S H⁻¹) for an H⁻¹ that a structure of the same kind made."""

    @abstractmethod
    def with_prior(self, precision: Tensor) -> Operator:
        """Factorise H = S + the prior's precision, which is a diagonal (P,) or a matrix (P, P).

        Raises NoFactorError if H is not positive definite in double precision.
        """

    @abstractmethod
    def memory(self, extent: Extent) -> int:
        """Estimate the bytes that a fit of this extent needs at its peak.

        The bytes include those of the statistics, of a batch, and of the factorisation.
        """

    def estimate_seconds(self, extent: Extent) -> float:
        """Estimate the seconds of a fit of this extent on one core.

        The seconds do not include the network's own forward passes. A source of unknown length
        counts as `ssla.curvature.seconds.UNKNOWN_ROWS` rows. The default is NaN, for structures
        without an estimate; dense and kfac have one.
        """
        return math.nan

    # --- properties of the statistics, with defaults ---------------------------------------

    @property
    def exact(self) -> bool:
        """Return whether every entry of S is held, so that `as_matrix` can return them."""
        return False

    def as_matrix(self) -> Tensor:
        """Return S (P, P) if the statistics are `exact`; raise TypeError otherwise."""
        raise TypeError(f"Statistics of structure={self.name!r} do not hold every entry of S.")

    @property
    def exact_for_one_precision(self) -> bool:
        """Return whether the sums of a last layer are exact if Λ is the same for all rows."""
        return self.exact

    @property
    def by_layers(self) -> bool:
        """Return whether the statistics are Kronecker factors of layers.

        Each layer then needs one prior precision for all its parameters, and for a last layer `add`
        needs only the sum of Λ over rows.
        """
        return False

    @property
    def diagonal_outputs(self) -> bool:
        """Return whether `add` needs only the diagonal of the sum of Λ for a last layer."""
        return False

    @property
    def positive_only(self) -> bool:
        """Return whether the structure refuses an indefinite Λ."""
        return False

    @property
    def is_widened_by_fit(self) -> bool:
        """Return whether a fit may widen the statistics, with one more pass over data each time.

        `LowRank.widen_sketch` does it.
        """
        return False

    def for_many_classes(self) -> Structure:
        """Return the form that a fit uses by default for a last layer of very many classes.

        The default is this structure itself; a class with a cheaper form overrides it.
        """
        return self

    def for_indefinite_rows(self) -> Structure:
        """Return the form of this structure that can sum the Λ of rows where they are indefinite.

        It is the structure itself, unless that is `positive_only`: then a ValueError, or another
        form where a class has one.
        """
        if self.positive_only:
            raise ValueError(
                f"structure={self.name!r} cannot sum an observed curvature, which may be "
                "indefinite in some rows. Fit with structure='dense', 'kfac' or 'diag'."
            )
        return self

    @property
    def drops_negative_curvature(self) -> bool:
        """Return whether `with_prior` would leave out directions in which S is negative.

        The default is for structures whose `with_prior` factorises S as it is.
        """
        return False

    def accumulate(
        self, J: Jacobian, precision: Tensor, weights: Tensor | None = None, inputs: bool = True
    ) -> Structure:
        """Return the statistics with one more batch, as `add` does, but change them in place.

        The old statistics must not be used afterwards. inputs: whether the input factors of a last
        layer are summed too; a structure without such factors ignores it. The default calls `add`.
        """
        return self.add(J, precision, weights)

    def with_inputs_of(self, other: Structure) -> Structure:
        """Return the statistics with the input factors of `other`, a sum over the same rows.

        The default is for structures without such factors, so it returns the statistics unchanged.
        """
        return self

    def eigenbasis(self, precisions: Tensor) -> Eigenbasis | None:
        """Return a basis Q with S = Q diag(λ) Qᵀ that suits some prior precisions.

        precisions (k, P): k vectors over the parameters, such as prior precisions. Each must be
        constant inside every block of Q, so that it is diagonal in both bases. None, the default,
        means that there is no such basis.
        """
        return None

    def describe_omission(self, smallest_precision: float) -> str:
        """Return a sentence for the report on what the structure leaves out of S.

        smallest_precision: that of the prior. The default, an empty text, means nothing.
        """
        return ""

    def check_layers(self, shapes: tuple[tuple[int, int], ...]) -> None:
        """Raise ValueError unless the statistics fit layers with these (inputs, outputs).

        The default refuses nothing: it is for structures that do not depend on layers.
        """
        return


@dataclass(frozen=True, eq=False)
class Eigenbasis:
    """S = Q diag(values) Qᵀ, with a block-diagonal Q."""

    values: Tensor  # (P,)
    # positions (out, in), Q_in, Q_out (None: the identity) of blocks that are not diagonal already
    parts: tuple[tuple[Tensor, Tensor, Tensor | None], ...]

    def to_eigenbasis(self, v: Tensor) -> Tensor:
        """Return Qᵀv, the coordinates of vectors v in the eigenbasis.  (…, P) -> (…, P).

        The result is v itself, not a copy, where Q is the identity.
        """
        if not self.parts:
            return v
        out = v.clone()
        for positions, inner, outer in self.parts:
            block = v[..., positions]  # (…, out, in)
            # With V the block as a matrix, Qᵀv is Q_outᵀ V Q_in.
            out[..., positions] = (block if outer is None else outer.mT @ block) @ inner
        return out

    def from_eigenbasis(self, v: Tensor) -> Tensor:
        """Return Qv, the vectors with the coordinates v in the eigenbasis.  (…, P) -> (…, P)."""
        out = v.clone()
        for positions, inner, outer in self.parts:
            block = v[..., positions]  # (…, out, in)
            # With V the block as a matrix, Qv is Q_out V Q_inᵀ.
            out[..., positions] = (block if outer is None else outer @ block) @ inner.mT
        return out


def has_constant_rows(values: Tensor) -> bool:
    """Return whether all n entries of each row of values (k, n) are equal."""
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


def make_factorisation_error_text(precision: Tensor, detail: str) -> str:
    """Return the text of the error that S + the prior's precision cannot be factorised.

    precision: that of the prior, (P,) or (P, P). If it is positive definite, the prior is not the
    cause, so the text names other causes. detail: words that say which parameter or factor fails.
    """
    eigenvalues = precision if precision.dim() == 1 else torch.linalg.eigvalsh(precision)
    smallest = float(eigenvalues.min())
    if smallest > 0:
        return ILL_CONDITIONED.format(detail=detail, least=smallest)
    return SINGULAR.format(detail=detail)


def make_mismatch_text(name: str, other: object) -> str:
    """Return the text of the error that two different structures cannot be merged.

    name: the name of the structure that merges. other: the object that it was given.
    """
    return (
        f"Only {name} statistics of the same parameters can be merged into {name} ones, but got "
        f"{type(other).__name__}."
    )
