"""H = D + WᵀW for fewer rows of W than parameters: nothing of size P×P is built."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ssla.curvature.jacobians import Jacobian
from ssla.curvature.structure import NoFactorError, no_factor
from ssla.maths.linalg import symmetric_product
from ssla.maths.roots import FullRoot, full_root


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
    def _learned(self) -> Tensor:
        """s / (1 + s) (k,)."""
        return self.spectrum / (1 + self.spectrum)

    @cached_property
    def _directions(self) -> Tensor:
        """N (P, k)."""
        return self.basis / self.prior.sqrt()[:, None]

    def covariance(self, J: Jacobian) -> Tensor:
        J = J.double()
        along = J.push_many(self._directions)
        return J.quadratic_diagonal(1 / self.prior) - symmetric_product(
            along * self._learned, along
        )

    def root(self, J: Jacobian) -> FullRoot:
        return full_root(self.covariance(J))

    def response(self, J: Jacobian, middle: Tensor) -> Tensor:
        # H⁻¹MH⁻¹ = D⁻¹MD⁻¹ − BGNᵀ − NGBᵀ + NG(NᵀMN)GNᵀ with B = D⁻¹MN and G = diag(s/(1+s))
        J = J.double()
        N, G = self._directions, self._learned
        along, turned = J.push_many(N), J.push_many(N * (middle / self.prior)[:, None])
        cross = (turned * G) @ along.mT
        inner = G[:, None] * (N.mT @ (N * middle[:, None])) * G
        return (
            J.quadratic_diagonal(middle / self.prior**2)
            - cross
            - cross.mT
            + along @ inner @ along.mT
        )

    def logdet(self) -> float:
        return float(self.prior.log().sum() + self.spectrum.log1p().sum())

    def solve(self, v: Tensor) -> Tensor:
        N = self._directions
        return v / self.prior - N @ (self._learned * (N.mT @ v))

    def solve_many(self, V: Tensor) -> Tensor:
        N = self._directions
        return V / self.prior[:, None] - N @ (self._learned[:, None] * (N.mT @ V))

    def variances(self) -> Tensor:
        return (1 - self.basis**2 @ self._learned) / self.prior

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        white = torch.randn(n, len(self.prior), dtype=torch.float64, generator=generator)
        shrink = -torch.expm1(-0.5 * self.spectrum.log1p())  # 1 − (1 + s)^-½
        return (white - ((white @ self.basis) * shrink) @ self.basis.mT) / self.prior.sqrt()


def woodbury(rows: Tensor, precision: Tensor) -> WoodburyOperator:
    """The operator of diag(precision) + WᵀW.  rows W (m, P), precision (P,) positive.

    By a QR of (W D^-½)ᵀ and an SVD of its small factor: E stays orthonormal even for very unequal
    directions.
    """
    if not bool((precision > 0).all()):
        raise NoFactorError(
            no_factor(
                precision, f" ({len(rows)} directions of data for {len(precision)} parameters)"
            )
        )
    Q, R = torch.linalg.qr((rows / precision.sqrt()).mT)
    U, singular, _ = torch.linalg.svd(R, full_matrices=False)
    keep = singular > 1e-15 * singular.max() if singular.numel() else singular > 0
    return WoodburyOperator(precision, Q @ U[:, keep], singular[keep] ** 2)
