"""The full P×P curvature, or its rows while n·C < P.

S = Σ JᵀΛJ = WᵀW with a row Λ^½J for each observation and output. Fewer rows than parameters are
stored as rows (the dual or kernel form: memory n·C·P, factorised by Woodbury); more are summed to
P×P. Both forms are exact and can be merged. Terms and symbols are those of `ssla.curvature`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ssla.curvature.jacobians import Features, Jacobian
from ssla.curvature.seconds import estimate_dense_seconds
from ssla.curvature.structure import (
    Eigenbasis,
    Extent,
    NoFactorError,
    Operator,
    Structure,
    has_constant_rows,
    make_factorisation_error_text,
    make_mismatch_text,
)
from ssla.curvature.woodbury import WoodburyOperator, factorise_by_woodbury
from ssla.maths.roots import FullRoot, full_root

# Ratio of pivots up to which K is taken from H⁻¹: its relative error is then below 1e-8. The error
# is compared in tests/fitting/test_many_rows.py.
WIDEST_PIVOTS = 1e3
# Share of a parameter's own curvature below which its pivot is rounding error, where the prior does
# not bound pivots from below. A guess.
LEAST_PIVOT = 1e-7


@dataclass(frozen=True, eq=False)
class DenseOperator:
    """H = L Lᵀ; K = (L⁻¹Jᵀ)ᵀ(L⁻¹Jᵀ) is positive semi-definite by construction."""

    factor: Tensor  # L (P, P)

    @cached_property
    def _whitener(self) -> Tensor:
        """Return L⁻¹ (P, P), so that each batch needs a product and not a solve."""
        # Stored by columns, as LAPACK needs it: no copy is made.
        inverse = torch.eye(self.factor.shape[0], dtype=torch.float64).mT
        torch.linalg.solve_triangular(self.factor, inverse, upper=False, out=inverse)
        return inverse

    @cached_property
    def _single_whitener(self) -> Tensor:
        """Return L⁻¹ (P, P) in float32, for Jacobians of that dtype."""
        return self._whitener.float()

    @cached_property
    def _inverse(self) -> Tensor:
        """Return H⁻¹ (P, P)."""
        return torch.cholesky_inverse(self.factor)

    @property
    def _inverse_is_accurate(self) -> bool:
        """Return whether products with H⁻¹ itself are accurate, by the range of the pivots of L."""
        pivots = self.factor.diagonal()
        return float(pivots.max()) <= WIDEST_PIVOTS * float(pivots.min())

    def drop_inverses(self) -> None:
        """Free the memory of L⁻¹ and H⁻¹, each as large as L, but keep the variances.

        The inverses are computed again when they are needed.
        """
        # The variances are computed now if a dropped matrix would be needed for them.
        if "_inverse" in self.__dict__ or not self._inverse_is_accurate:
            _ = self._variances
        for name in ("_whitener", "_single_whitener", "_inverse"):
            self.__dict__.pop(name, None)

    def covariance(self, J: Jacobian) -> Tensor:
        """Compute K = J H⁻¹ Jᵀ in the dtype of J (B, C, P).  -> (B, C, C)."""
        return J.quadratic(self._single_whitener if J.dtype == torch.float32 else self._whitener)

    def root(self, J: Jacobian) -> FullRoot:
        """Compute R (B, C, C) with R Rᵀ = K."""
        return full_root(self.covariance(J))

    def root_for_sums(self, J: Jacobian) -> FullRoot:
        """Compute the root of K as `root` does, but faster for the many rows of a fit.

        K is computed from H⁻¹ itself where that is accurate, and the root otherwise by `root`.
        """
        if (
            isinstance(J, Features)
            and (J.pairs_are_faster or J.blocks_are_faster)
            and self._inverse_is_accurate
        ):
            return full_root(J.congruence(self._inverse))
        return self.root(J)

    def sandwich_covariance(self, J: Jacobian, precisions: Tensor) -> Tensor:
        """Compute J H⁻¹ diag(m) H⁻¹ Jᵀ for precisions m ≥ 0.  (P,) -> (B, C, C)."""
        # H⁻¹MH⁻¹ = BᵀB with B = √M H⁻¹. J.quadratic needs a lower triangular factor of it, which a
        # QR decomposition gives.
        eye = torch.eye(len(precisions), dtype=torch.float64)
        B = precisions.sqrt()[:, None] * torch.cholesky_solve(eye, self.factor)
        # With F the flip of columns, BF = QR  =>  BᵀB = F RᵀR F, and FRF is lower triangular.
        upper = torch.linalg.qr(B.flip(1), mode="r").R
        return J.quadratic(upper.flip(0, 1).contiguous())

    def logdet(self) -> float:
        """Compute log |H| = 2 Σ log L_ii."""
        return 2 * float(self.factor.diagonal().log().sum())

    def solve(self, v: Tensor) -> Tensor:
        """Compute H⁻¹ v.  (P,) -> (P,)."""
        return torch.cholesky_solve(v.unsqueeze(-1), self.factor).squeeze(-1)

    def solve_many(self, V: Tensor) -> Tensor:
        """Compute H⁻¹ V.  (P, k) -> (P, k)."""
        return torch.cholesky_solve(V, self.factor)

    def variances(self) -> Tensor:
        """Return the diagonal of H⁻¹ (P,)."""
        return self._variances

    @cached_property
    def _variances(self) -> Tensor:
        """Return the diagonal of H⁻¹ (P,), from L⁻¹ where H⁻¹ itself is not accurate."""
        if not self._inverse_is_accurate:
            return (self._whitener**2).sum(0)
        # A cached inverse is used. Otherwise it is computed but not cached: it is as large as L.
        inverse = self.__dict__.get("_inverse")
        if inverse is None:
            inverse = torch.cholesky_inverse(self.factor)
        return inverse.diagonal().clone()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n vectors L⁻ᵀz from N(0, H⁻¹), with z ~ N(0, I).  -> (n, P)."""
        white = torch.randn(n, self.factor.shape[0], dtype=torch.float64, generator=generator)
        draws: Tensor = torch.linalg.solve_triangular(self.factor.mT, white.mT, upper=True).mT
        return draws


@dataclass(frozen=True, eq=False)
class Dense(Structure):
    """S = Σ JᵀΛJ in float64: as a matrix (P, P), or as rows W (m, P) with S = WᵀW while m < P.

    dual: whether rows may be stored; this needs a positive semi-definite Λ.
    """

    dual: bool = True
    matrix: Tensor | None = None
    rows: tuple[Tensor, ...] = ()
    size: int = 0

    name = "dense"
    needs_jacobian_entries = True
    couples_all_parameters = True
    exact = True

    @property
    def positive_only(self) -> bool:
        """Return whether an indefinite Λ is refused: stored rows would need a real root of Λ."""
        return self.dual

    def zero(self, size: int) -> Dense:
        """Return the statistics of no data, for P = size parameters."""
        if self.dual:
            return Dense(size=size)
        return self._with_matrix(torch.zeros(size, size, dtype=torch.float64), size)

    def for_indefinite_rows(self) -> Dense:
        """Return the form that is always a matrix, which takes any symmetric Λ."""
        return Dense(dual=False)

    def _with_matrix(self, matrix: Tensor, size: int) -> Dense:
        """Return statistics that are stored as a matrix (P, P), with P = size."""
        return Dense(self.dual, matrix, (), size)

    @property
    def row_count(self) -> int:
        """Return the number m of stored rows."""
        return sum(len(rows) for rows in self.rows)

    def as_matrix(self) -> Tensor:
        """Return S (P, P), computed if it is not stored."""
        if self.matrix is not None:
            return self.matrix
        W = self._stacked_rows
        return W.mT @ W

    @cached_property
    def _stacked_rows(self) -> Tensor:
        """Return the stored rows as one tensor W (m, P)."""
        return torch.cat(self.rows) if self.rows else torch.zeros(0, self.size, dtype=torch.float64)

    def add(self, J: Jacobian, precision: Tensor, weights: Tensor | None = None) -> Dense:
        """Return the statistics with one more batch; precision Λ (B, C, C), weights not used."""
        if self._stays_in_rows(J, precision):
            W = (_factorise_precision(precision) @ J.to_dense().values.double()).flatten(0, 1)
            return replace(self, rows=(*self.rows, W))
        return self._with_matrix(J.gram(precision).add_(self.as_matrix()), self.size)

    def accumulate(
        self, J: Jacobian, precision: Tensor, weights: Tensor | None = None, inputs: bool = True
    ) -> Dense:
        """Return the statistics with one more batch, as `add` does, but change them in place.

        The old statistics must not be used afterwards. weights and inputs are part of the protocol
        and are not used.
        """
        if self.matrix is not None:
            J.add_gram(self.matrix, precision)
            return self
        if self._stays_in_rows(J, precision):
            return self.add(J, precision, weights)
        # The rows become a matrix now. They are freed before the batch is added, so that the matrix
        # takes their place in memory. The dataclass is frozen: object.__setattr__ gets round that.
        W = self._stacked_rows
        object.__setattr__(self, "rows", ())
        del self.__dict__["_stacked_rows"]
        total = W.mT @ W
        del W
        return self._with_matrix(J.add_gram(total, precision), self.size)

    def _stays_in_rows(self, J: Jacobian, precision: Tensor) -> bool:
        """Return whether the statistics are rows, and still fewer than P with those of a batch.

        precision: Λ of the batch (B, C, C).
        """
        return self.matrix is None and self.row_count + precision.shape[0] * J.outputs < self.size

    def _require_same_kind(self, other: Structure) -> Dense:
        """Return the other statistics.

        Raises ValueError if they are not dense or of another size.
        """
        if not isinstance(other, Dense) or other.size != self.size:
            raise ValueError(make_mismatch_text("dense", other))
        return other

    def merge(self, other: Structure) -> Dense:
        """Return the statistics of both data sets, as rows while these are fewer than P.

        Raises ValueError if the others are not dense or of another size.
        """
        other = self._require_same_kind(other)
        if (
            self.matrix is None
            and other.matrix is None
            and self.row_count + other.row_count < self.size
        ):
            return replace(self, rows=self.rows + other.rows)
        return self._with_matrix(self.as_matrix() + other.as_matrix(), self.size)

    def mix_with(self, other: Structure, share: float) -> Dense:
        """Return (1 − share) of these statistics plus `share` of others of the same rows.

        Raises ValueError if the others are not dense or of another size.
        """
        other = self._require_same_kind(other)
        if self.matrix is not None or other.matrix is not None:
            mixture = torch.lerp(self.as_matrix(), other.as_matrix(), share)
            return self._with_matrix(mixture, self.size)
        # The rows of both are in the span of the same Jacobians. So the rank of the mixture is at
        # most the number of rows of the longer one, and so many leading directions are kept.
        both = torch.cat(
            [(1 - share) ** 0.5 * self._stacked_rows, share**0.5 * other._stacked_rows]
        )
        Q, R = torch.linalg.qr(both.mT)
        U, singular, _ = torch.linalg.svd(R)
        leading = slice(max(self.row_count, other.row_count))
        return replace(self, rows=((Q @ (U * singular)[:, leading]).mT,))

    def positive_part(self) -> Dense:
        """Return the statistics without directions of negative curvature; rows have none."""
        if self.matrix is None or int(torch.linalg.cholesky_ex(self.matrix).info) == 0:
            return self
        # Eigenvalues are taken in units in which the diagonal is one. In the parameters' own units
        # they may have very unequal sizes, and rounding errors of the large ones hide the small.
        diagonal = self.matrix.diagonal().abs()
        unit = torch.where(diagonal > 0, diagonal, 1.0).sqrt()
        values, vectors = torch.linalg.eigh(self.matrix / unit[:, None] / unit)
        positive = (vectors * values.clamp_min(0)) @ vectors.mT
        return replace(self, matrix=positive * unit[:, None] * unit)

    def eigenbasis(self, precisions: Tensor) -> Eigenbasis | None:
        """Return the eigenbasis of the matrix S for precisions (k, P).

        None for stored rows, and for precisions that vary over the parameters.
        """
        if self.matrix is None or not has_constant_rows(precisions):
            return None
        values, vectors = torch.linalg.eigh(self.matrix)
        # θ is one block of a single output (1, P), so Q_out is 1×1.
        positions = torch.arange(len(values)).unsqueeze(0)
        outer = torch.ones(1, 1, dtype=torch.float64)
        return Eigenbasis(values.clamp_min(0), ((positions, vectors, outer),))

    def scale_both_sides(self, factors: Tensor) -> Dense:
        """Return the statistics of D S D for D = diag(factors), factors (P,)."""
        if self.matrix is None:
            return replace(self, rows=(self._stacked_rows * factors,))
        return replace(self, matrix=(self.matrix * factors[:, None]).mul_(factors[None, :]))

    def push(self, direction: Tensor) -> Tensor:
        """Compute the product S d with a direction d.  (P,) -> (P,)."""
        if self.matrix is None:
            return self._stacked_rows.mT @ (self._stacked_rows @ direction)
        return self.matrix @ direction

    def trace(self, operator: Operator) -> float:
        """Compute tr(S H⁻¹) by one solve for each stored row, or for each column of the matrix."""
        if self.matrix is None:
            columns = self._stacked_rows.mT
            return float((columns * operator.solve_many(columns)).sum())
        return float(operator.solve_many(self.matrix).diagonal().sum())

    def with_prior(self, precision: Tensor) -> DenseOperator | WoodburyOperator:
        """Factorise H = S + the prior's precision, which is a diagonal (P,) or a matrix (P, P).

        Stored rows with a positive diagonal take Woodbury's formula, all others Cholesky. Raises
        NoFactorError if H is not positive definite in double precision.
        """
        if self.matrix is None and precision.dim() == 1 and bool((precision > 0).all()):
            return factorise_by_woodbury(self._stacked_rows, precision)
        S = self.as_matrix()

        # H is stored by columns, as LAPACK needs it, so that it is factorised in place.
        H = torch.empty_like(S).mT.copy_(S)
        (H.diagonal() if precision.dim() == 1 else H).add_(precision)
        scale = H.diagonal().sqrt()
        factor, info = torch.linalg.cholesky_ex(H, out=(H, torch.empty((), dtype=torch.int32)))
        pivots = factor.diagonal()

        # Under a prior without curvature somewhere, a small pivot is rounding error.
        improper = precision.dim() == 1 and bool((precision <= 0).any())
        if int(info) != 0 or (improper and bool((pivots < LEAST_PIVOT * scale).any())):
            # info is the number of the first pivot that failed, from one; zero means none.
            undetermined = int(info) or int((pivots / scale).argmin()) + 1
            detail = f" (parameter {undetermined} of {len(H)} is not determined)"
            raise NoFactorError(make_factorisation_error_text(precision, detail))

        return DenseOperator(factor)

    def memory(self, extent: Extent) -> int:
        """Estimate the bytes that a fit needs: copies of a matrix (P, P), or of rows (n·C, P)."""
        width = extent.size
        if self.dual and extent.rows is not None:
            width = min(width, extent.rows * extent.outputs)
        # Counted in fits (tests/fitting/test_memory.py): the sums before and after a step, and
        # their factors. With averages: the sums at the mode, and for each of two Gaussians the
        # precision, its factor and inverse, and the sums.
        copies = 8 if extent.averages else 4
        return copies * 8 * width * extent.size  # 8 bytes of a number in float64

    def estimate_seconds(self, extent: Extent) -> float:
        """Estimate the seconds of a fit on one core, as in the protocol."""
        return estimate_dense_seconds(extent)


def _factorise_precision(precision: Tensor) -> Tensor:
    """Compute R with RᵀR = Λ (B, C, C) for a positive semi-definite Λ.  -> (B, C, C).

    Λ may be singular, as it is for classes.
    """
    if precision.shape[-1] == 1:
        return precision.sqrt()
    values, vectors = torch.linalg.eigh(precision)
    root: Tensor = values.clamp_min(0).sqrt().unsqueeze(-1) * vectors.mT
    return root
