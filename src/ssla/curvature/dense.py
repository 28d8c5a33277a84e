"""The full P×P curvature, or its rows while n·C < P.

S = Σ JᵀΛJ = WᵀW with a row Λ^½J for each observation and output. Fewer rows than parameters are
stored as rows (the dual or kernel form: memory n·C·P, factorised by Woodbury); more are summed to
P×P. Both forms are exact and can be merged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ssla.curvature.jacobians import Features, Jacobian
from ssla.curvature.structure import (
    Eigenbasis,
    Extent,
    NoFactorError,
    Operator,
    Structure,
    constant,
    mismatch,
    no_factor,
)
from ssla.curvature.woodbury import WoodburyOperator, woodbury
from ssla.maths.roots import FullRoot, full_root

WIDEST_PIVOTS = (
    1e3  # ratio of pivots up to which K is taken from H⁻¹: its relative error is then below 1e-8
)


@dataclass(frozen=True, eq=False)
class DenseOperator:
    """H = L Lᵀ; K = (L⁻¹Jᵀ)ᵀ(L⁻¹Jᵀ) is positive semi-definite by construction."""

    factor: Tensor  # L (P, P)

    @cached_property
    def _whitener(self) -> Tensor:
        """L⁻¹, computed once, so that each batch needs a product and not a solve."""
        inverse = torch.eye(
            self.factor.shape[0], dtype=torch.float64
        ).mT  # by columns, as LAPACK needs it: no copy is made
        torch.linalg.solve_triangular(self.factor, inverse, upper=False, out=inverse)
        return inverse

    @cached_property
    def _single_whitener(self) -> Tensor:
        return self._whitener.float()

    def forget(self) -> None:
        """Drop L⁻¹ and H⁻¹, each as large as L, but keep the variances.

        The others are computed again where they are needed.
        """
        if "_inverse" in self.__dict__ or not self._benign:
            _ = self._variances
        for name in ("_whitener", "_single_whitener", "_inverse"):
            self.__dict__.pop(name, None)

    def covariance(self, J: Jacobian) -> Tensor:
        return J.quadratic(self._single_whitener if J.dtype == torch.float32 else self._whitener)

    def root(self, J: Jacobian) -> FullRoot:
        return full_root(self.covariance(J))

    def root_for_sums(self, J: Jacobian) -> FullRoot:
        """The same from H⁻¹ itself, which is faster for the rows of a fit, where rounding
        errors of H⁻¹ are small enough.
        """
        if isinstance(J, Features) and (J.by_pairs or J.by_blocks) and self._benign:
            return full_root(J.form(self._inverse))
        return self.root(J)

    @cached_property
    def _inverse(self) -> Tensor:
        """H⁻¹."""
        return torch.cholesky_inverse(self.factor)

    @property
    def _benign(self) -> bool:
        pivots = self.factor.diagonal()
        return float(pivots.max()) <= WIDEST_PIVOTS * float(pivots.min())

    def response(self, J: Jacobian, middle: Tensor) -> Tensor:
        # H⁻¹MH⁻¹ = BᵀB with B = √M H⁻¹; J.quadratic needs a lower triangular factor, which a QR of
        # B gives.
        B = middle.sqrt()[:, None] * torch.cholesky_solve(
            torch.eye(len(middle), dtype=torch.float64), self.factor
        )
        upper = torch.linalg.qr(
            B.flip(1), mode="r"
        ).R  # BF = QR  =>  BᵀB = F RᵀR F, and FRF is lower triangular
        return J.quadratic(upper.flip(0, 1).contiguous())

    def logdet(self) -> float:
        return 2 * float(self.factor.diagonal().log().sum())

    def solve(self, v: Tensor) -> Tensor:
        return torch.cholesky_solve(v.unsqueeze(-1), self.factor).squeeze(-1)

    def solve_many(self, V: Tensor) -> Tensor:
        return torch.cholesky_solve(V, self.factor)

    def variances(self) -> Tensor:
        return self._variances

    @cached_property
    def _variances(self) -> Tensor:
        if not self._benign:
            return (self._whitener**2).sum(0)
        inverse = self.__dict__.get("_inverse")  # not kept for this: it is as large as L
        return (
            (torch.cholesky_inverse(self.factor) if inverse is None else inverse).diagonal().clone()
        )

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
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
    materialises = True
    whole = True
    exact = True

    @property
    def positive_only(self) -> bool:
        """Rows in place of a matrix hold a root of Λ."""
        return self.dual

    def zero(self, size: int) -> Dense:
        return Dense(
            self.dual, None if self.dual else torch.zeros(size, size, dtype=torch.float64), (), size
        )

    @property
    def count(self) -> int:
        """Rows kept."""
        return sum(len(part) for part in self.rows)

    def as_matrix(self) -> Tensor:
        """S (P, P), computed if it is not stored."""
        if self.matrix is not None:
            return self.matrix
        W = self._stacked
        return W.mT @ W

    @cached_property
    def _stacked(self) -> Tensor:
        return torch.cat(self.rows) if self.rows else torch.zeros(0, self.size, dtype=torch.float64)

    def add(self, J: Jacobian, precision: Tensor, weights: Tensor | None = None) -> Dense:
        if self._stays_in_rows(J, precision):
            W = (_root(precision) @ J.dense().values.double()).flatten(0, 1)
            return replace(self, rows=(*self.rows, W))
        return Dense(self.dual, J.gram(precision).add_(self.as_matrix()), (), self.size)

    def accumulate(
        self, J: Jacobian, precision: Tensor, weights: Tensor | None = None, inputs: bool = True
    ) -> Dense:
        """As `add`, but a matrix is changed in place: for a sum that belongs to the caller
        alone.
        """
        if self.matrix is not None:
            J.add_gram(self.matrix, precision)
            return self
        if self._stays_in_rows(J, precision):
            return self.add(J, precision, weights)
        rows = self._stacked
        # the rows as they came are not needed any more: without them the matrix takes their place
        # in memory
        object.__setattr__(self, "rows", ())
        del self.__dict__["_stacked"]
        total = rows.mT @ rows
        del rows
        return Dense(self.dual, J.add_gram(total, precision), (), self.size)

    def _stays_in_rows(self, J: Jacobian, precision: Tensor) -> bool:
        """Whether the rows of another batch are fewer than the parameters, together with those
        kept.
        """
        return self.matrix is None and self.count + precision.shape[0] * J.outputs < self.size

    def merge(self, other: Structure) -> Dense:
        if not isinstance(other, Dense) or other.size != self.size:
            raise ValueError(mismatch("dense", other))
        if self.matrix is None and other.matrix is None and self.count + other.count < self.size:
            return replace(self, rows=self.rows + other.rows)
        return Dense(self.dual, self.as_matrix() + other.as_matrix(), (), self.size)

    def mixed(self, other: Structure, share: float) -> Dense:
        if not isinstance(other, Dense) or other.size != self.size:
            raise ValueError(mismatch("dense", other))
        if (
            self.matrix is None and other.matrix is None
        ):  # both lie in the span of the same Jacobians: no rank is added
            both = torch.cat([(1 - share) ** 0.5 * self._stacked, share**0.5 * other._stacked])
            Q, R = torch.linalg.qr(both.mT)
            U, singular, _ = torch.linalg.svd(R)
            kept = slice(max(self.count, other.count))
            return replace(self, rows=((Q @ (U * singular)[:, kept]).mT,))
        return Dense(
            self.dual, torch.lerp(self.as_matrix(), other.as_matrix(), share), (), self.size
        )

    def positive_part(self) -> Dense:
        if self.matrix is None or int(torch.linalg.cholesky_ex(self.matrix).info) == 0:
            return self
        # In units in which the diagonal is one: parameters of very unequal units have eigenvalues
        # of very unequal size, and the small ones would be rounding errors of the large ones.
        diagonal = self.matrix.diagonal().abs()
        unit = torch.where(diagonal > 0, diagonal, 1.0).sqrt()
        values, vectors = torch.linalg.eigh(self.matrix / unit[:, None] / unit)
        kept = (vectors * values.clamp_min(0)) @ vectors.mT
        return replace(self, matrix=kept * unit[:, None] * unit)

    def eigenbasis(self, precisions: Tensor) -> Eigenbasis | None:
        """Of a matrix; rows in place of one keep no basis."""
        if self.matrix is None or not constant(precisions):
            return None
        values, vectors = torch.linalg.eigh(self.matrix)
        whole = torch.arange(len(values)).unsqueeze(0)  # one row: Q_out is 1×1
        one = torch.ones(1, 1, dtype=torch.float64)
        return Eigenbasis(values.clamp_min(0), ((whole, vectors, one),))

    def scaled(self, factors: Tensor) -> Dense:
        if self.matrix is None:
            return replace(self, rows=(self._stacked * factors,))
        return replace(self, matrix=(self.matrix * factors[:, None]).mul_(factors[None, :]))

    def push(self, direction: Tensor) -> Tensor:
        return (
            self._stacked.mT @ (self._stacked @ direction)
            if self.matrix is None
            else self.matrix @ direction
        )

    def trace(self, operator: Operator) -> float:
        if self.matrix is None:
            rows = self._stacked.mT
            return float((rows * operator.solve_many(rows)).sum())
        return float(operator.solve_many(self.matrix).diagonal().sum())

    def with_prior(self, precision: Tensor) -> DenseOperator | WoodburyOperator:
        if self.matrix is None and precision.dim() == 1 and bool((precision > 0).all()):
            return woodbury(self._stacked, precision)
        S = self.as_matrix()
        H = torch.empty_like(S).mT.copy_(
            S
        )  # by columns, as LAPACK needs it: H is factorised in place
        (H.diagonal() if precision.dim() == 1 else H).add_(precision)
        scale = H.diagonal().sqrt()
        factor, info = torch.linalg.cholesky_ex(H, out=(H, torch.empty((), dtype=torch.int32)))
        pivots = factor.diagonal()
        improper = precision.dim() == 1 and bool(
            (precision <= 0).any()
        )  # then a small pivot is rounding error
        if int(info) != 0 or (improper and bool((pivots < 1e-7 * scale).any())):
            which = int(info) or int((pivots / scale).argmin()) + 1
            raise NoFactorError(
                no_factor(precision, f" (parameter {which} of {len(H)} is not determined)")
            )
        return DenseOperator(factor)

    def memory(self, extent: Extent) -> int:
        width = extent.size
        if self.dual and extent.rows is not None:
            width = min(width, extent.rows * extent.outputs)
        # Counted in fits (tests/fitting/test_memory.py): sums before and after a step and their
        # factor; for averages the sums at the mode, and of two Gaussians each the precision, its
        # factor and inverse, and the sums.
        copies = 8 if extent.averages else 4
        return copies * 8 * width * extent.size


def _root(precision: Tensor) -> Tensor:
    """B with BᵀB = Λ, also where Λ is singular (as for classes).  (B, C, C) -> (B, C, C)."""
    if precision.shape[-1] == 1:
        return precision.sqrt()
    values, vectors = torch.linalg.eigh(precision)
    root: Tensor = values.clamp_min(0).sqrt().unsqueeze(-1) * vectors.mT
    return root
