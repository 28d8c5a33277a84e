"""The diagonal of the curvature. Terms and symbols are those of `ssla.curvature`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssla.curvature.jacobians import Features, Jacobian
from ssla.curvature.structure import (
    Eigenbasis,
    Extent,
    NoFactorError,
    Operator,
    Structure,
    make_factorisation_error_text,
    make_mismatch_text,
)
from ssla.maths.roots import Root, ScaledRoot, full_root

# How many vectors (P,) a fit holds that chooses its prior, without and with averages. They are two
# thirds of its peak, by tests/fitting/test_memory.py and benchmarks/speed/all_weights.py.
VECTORS, VECTORS_OF_AVERAGES = 12, 20


@dataclass(frozen=True, eq=False)
class DiagonalOperator:
    """H = diag(h)."""

    h: Tensor  # (P,)

    def covariance(self, J: Jacobian) -> Tensor:
        """Compute K = J diag(1/h) Jᵀ for J (B, C, P).  -> (B, C, C)."""
        return J.quadratic_diagonal(1 / self.h)

    def root(self, J: Jacobian) -> Root:
        """Compute a root R of K = R Rᵀ; for a last layer K is diagonal, and so is R."""
        if isinstance(J, Features):
            return ScaledRoot(J.weighted_squares(1 / self.h).sqrt())
        return full_root(self.covariance(J))

    def sandwich_covariance(self, J: Jacobian, precisions: Tensor) -> Tensor:
        """Compute J diag(m/h²) Jᵀ for precisions m ≥ 0.  (P,) -> (B, C, C)."""
        return J.quadratic_diagonal(precisions / self.h**2)

    def logdet(self) -> float:
        """Compute log |H| = Σ log h."""
        return float(self.h.log().sum())

    def solve(self, v: Tensor) -> Tensor:
        """Compute H⁻¹ v.  (P,) -> (P,)."""
        return v / self.h

    def solve_many(self, V: Tensor) -> Tensor:
        """Compute H⁻¹ V.  (P, k) -> (P, k)."""
        return V / self.h[:, None]

    def variances(self) -> Tensor:
        """Compute the diagonal of H⁻¹ (P,)."""
        return 1 / self.h

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n vectors z/√h from N(0, H⁻¹), with z ~ N(0, I).  -> (n, P)."""
        return torch.randn(n, len(self.h), dtype=torch.float64, generator=generator) / self.h.sqrt()


@dataclass(frozen=True, eq=False)
class Diagonal(Structure):
    """s = diag(Σ JᵀΛJ) (P,) in float64."""

    diagonal: Tensor | None = None  # None: `zero` has not been called yet

    name = "diag"
    needs_jacobian_entries = False
    couples_all_parameters = False

    def zero(self, size: int) -> Diagonal:
        """Return the statistics of no data, for P = size parameters."""
        return Diagonal(torch.zeros(size, dtype=torch.float64))

    @property
    def _diagonal(self) -> Tensor:
        """Return the diagonal s (P,); raise AssertionError if `zero` has not been called yet."""
        assert self.diagonal is not None
        return self.diagonal

    def add(self, J: Jacobian, precision: Tensor, weights: Tensor | None = None) -> Diagonal:
        """Return the statistics with one more batch; precision Λ (B, C, C), weights not used."""
        return Diagonal(self._diagonal + J.gram_diagonal(precision))

    def _require_diagonal(self, other: Structure) -> Tensor:
        """Return the other statistics' diagonal (P,).

        Raises ValueError if they are not diagonal or of another size.
        """
        if not isinstance(other, Diagonal) or other._diagonal.shape != self._diagonal.shape:
            raise ValueError(make_mismatch_text("diag", other))
        return other._diagonal

    def merge(self, other: Structure) -> Diagonal:
        """Return the statistics of both data sets; raise ValueError if they cannot be merged."""
        return Diagonal(self._diagonal + self._require_diagonal(other))

    def mix_with(self, other: Structure, share: float) -> Diagonal:
        """Return (1 − share) of these statistics plus `share` of others of the same rows."""
        return Diagonal((1 - share) * self._diagonal + share * self._require_diagonal(other))

    def positive_part(self) -> Diagonal:
        """Return the statistics with zeros in place of negative entries."""
        return Diagonal(self._diagonal.clamp_min(0))

    def eigenbasis(self, precisions: Tensor) -> Eigenbasis:
        """Return the identity as the basis: S is diagonal, so any precisions (k, P) suit it."""
        return Eigenbasis(self._diagonal, ())

    def scale_both_sides(self, factors: Tensor) -> Diagonal:
        """Return the statistics of D S D for D = diag(factors), factors (P,)."""
        return replace(self, diagonal=self._diagonal * factors**2)

    def push(self, direction: Tensor) -> Tensor:
        """Compute the product S d with a direction d.  (P,) -> (P,)."""
        return self._diagonal * direction

    def trace(self, operator: Operator) -> float:
        """Compute tr(S H⁻¹) from the diagonals of both, for any operator."""
        return float(self._diagonal @ operator.variances())

    def with_prior(self, precision: Tensor) -> DiagonalOperator:
        """Return the operator of h = s + the diagonal of the prior's precision (P,) or (P, P).

        Raises NoFactorError unless every entry of h is above zero.
        """
        h = self._diagonal + (precision if precision.dim() == 1 else precision.diagonal())
        if not bool((h > 0).all()):
            undetermined = int(h.argmin()) + 1
            detail = f" (parameter {undetermined} of {len(h)} is not determined)"
            raise NoFactorError(make_factorisation_error_text(precision, detail))
        return DiagonalOperator(h)

    def memory(self, extent: Extent) -> int:
        """Estimate the bytes that a fit needs: a counted number of vectors (P,) in float64."""
        vectors = VECTORS_OF_AVERAGES if extent.averages else VECTORS
        return vectors * 8 * extent.size  # 8 bytes of a number in float64
