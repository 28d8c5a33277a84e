"""H = D + WᵀW for fewer rows of W than parameters: nothing of size P×P is built.

Terms and symbols are those of `ssla.curvature`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ssla.curvature.jacobians import Jacobian
from ssla.curvature.structure import NoFactorError, make_factorisation_error_text
from ssla.maths.linalg import symmetric_product
from ssla.maths.roots import FullRoot, full_root

# Share of the largest singular value of W D^-½ below which a direction is rounding error.
NEGLIGIBLE = 1e-15


@dataclass(frozen=True, eq=False)
class WoodburyOperator:
    """H = D^½ (I + E diag(s) Eᵀ) D^½ with orthonormal columns E (P, k), so that

        H⁻¹ = D⁻¹ − N diag(s / (1 + s)) Nᵀ,   N = D^-½ E,

    is the prior variance minus its reduction by the k directions of the data. The difference, in
    float64, loses as many digits as the data reduce the variance by, as a Cholesky factor of H
    would.
    """

    prior: Tensor  # diagonal D (P,)
    basis: Tensor  # E (P, k)
    spectrum: Tensor  # s (k,)

    @cached_property
    def _reductions(self) -> Tensor:
        """Return the share s / (1 + s) by which the data reduce each direction's variance (k,)."""
        return self.spectrum / (1 + self.spectrum)

    @cached_property
    def _directions(self) -> Tensor:
        """Return N = D^-½ E (P, k)."""
        return self.basis / self.prior.sqrt()[:, None]

    def covariance(self, J: Jacobian) -> Tensor:
        """Compute K = J H⁻¹ Jᵀ in float64 for J (B, C, P).  -> (B, C, C)."""
        J = J.double()
        JN = J.push_many(self._directions)  # (B, C, k)
        return J.quadratic_diagonal(1 / self.prior) - symmetric_product(JN * self._reductions, JN)

    def root(self, J: Jacobian) -> FullRoot:
        """Compute R (B, C, C) with R Rᵀ = K."""
        return full_root(self.covariance(J))

    def sandwich_covariance(self, J: Jacobian, precisions: Tensor) -> Tensor:
        """Compute J H⁻¹ diag(m) H⁻¹ Jᵀ for precisions m ≥ 0.  (P,) -> (B, C, C)."""
        # With M = diag(m), B = D⁻¹MN and G = diag(s/(1+s)),
        #     H⁻¹MH⁻¹ = D⁻¹MD⁻¹ − BGNᵀ − NGBᵀ + NG(NᵀMN)GNᵀ.
        J = J.double()
        N, G = self._directions, self._reductions
        JN = J.push_many(N)
        JB = J.push_many(N * (precisions / self.prior)[:, None])
        cross = (JB * G) @ JN.mT
        inner = G[:, None] * (N.mT @ (N * precisions[:, None])) * G
        prior_term = J.quadratic_diagonal(precisions / self.prior**2)
        return prior_term - cross - cross.mT + JN @ inner @ JN.mT

    def logdet(self) -> float:
        """Compute log |H| = Σ log D + Σ log(1 + s)."""
        return float(self.prior.log().sum() + self.spectrum.log1p().sum())

    def solve(self, v: Tensor) -> Tensor:
        """Compute H⁻¹ v.  (P,) -> (P,)."""
        N = self._directions
        return v / self.prior - N @ (self._reductions * (N.mT @ v))

    def solve_many(self, V: Tensor) -> Tensor:
        """Compute H⁻¹ V.  (P, k) -> (P, k)."""
        N = self._directions
        return V / self.prior[:, None] - N @ (self._reductions[:, None] * (N.mT @ V))

    def variances(self) -> Tensor:
        """Compute the diagonal of H⁻¹ (P,)."""
        return (1 - self.basis**2 @ self._reductions) / self.prior

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n vectors D^-½ (I + E diag(s) Eᵀ)^-½ z from N(0, H⁻¹), z ~ N(0, I).  -> (n, P)."""
        white = torch.randn(n, len(self.prior), dtype=torch.float64, generator=generator)
        # Along E the standard deviation falls from 1 to (1 + s)^-½: by this difference.
        shrinkage = -torch.expm1(-0.5 * self.spectrum.log1p())
        return (white - ((white @ self.basis) * shrinkage) @ self.basis.mT) / self.prior.sqrt()


def factorise_by_woodbury(rows: Tensor, precision: Tensor) -> WoodburyOperator:
    """Factorise H = diag(precision) + WᵀW for rows W (m, P) and a precision (P,).

    A QR decomposition of (W D^-½)ᵀ and an SVD of its small factor give E and s. So E stays
    orthonormal even if the directions have very unequal lengths. Raises NoFactorError unless every
    precision is positive.
    """
    if not bool((precision > 0).all()):
        detail = f" ({len(rows)} directions of data for {len(precision)} parameters)"
        raise NoFactorError(make_factorisation_error_text(precision, detail))
    Q, R = torch.linalg.qr((rows / precision.sqrt()).mT)
    U, singular, _ = torch.linalg.svd(R, full_matrices=False)
    # Without rows there is no largest singular value, and the empty comparison keeps none.
    keep = singular > NEGLIGIBLE * singular.max() if singular.numel() else singular > 0
    return WoodburyOperator(precision, Q @ U[:, keep], singular[keep] ** 2)
