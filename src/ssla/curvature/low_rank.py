"""The leading directions of the curvature, computed without building it.

The statistics are a sketch Y = S Ω of S = Σ JᵀΛJ on a fixed random orthonormal Ω (P, l): a sum over
rows, so it streams and merges like the other structures, in one pass, without building J. The
Nyström formula gives S:

    Ŝ = Y (ΩᵀY)⁺ Yᵀ ⪯ S,        exact where rank S ≤ l,

of which the k leading eigenpairs are kept. tr S is summed exactly, so the dropped curvature d = tr
S − tr Ŝ_k ≥ 0 is known, and it bounds the error. With the smallest prior precision τ, H ⪯ (1 + d/τ)
Ĥ, so that

    K ⪯ K̂ ⪯ (1 + d/τ) K

Variances are never too small, and too large by a share of at most d/τ.

Without a rank all directions of the sketch are kept, and `fit` doubles l, with one more pass each
time, until d/τ ≤ `tail`. Where the data determine every direction, l approaches P: then use another
structure.

Other terms and symbols are those of `ssla.curvature`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ssla.curvature.jacobians import Jacobian
from ssla.curvature.structure import Extent, Operator, Structure, make_mismatch_text
from ssla.curvature.woodbury import WoodburyOperator, factorise_by_woodbury

FIRST_COLUMNS = 64  # of a sketch without a rank. A guess
NEGLIGIBLE = 1e-12  # of the largest eigenvalue of ΩᵀSΩ: smaller values are rounding error
EMPTY = torch.zeros(0, 0, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class LowRank(Structure):
    """S ≈ U diag(λ) Uᵀ, k directions.

    rank: k, or None for as many as keep every variance from being overstated by more than the share
    `tail`.  seed: of Ω; statistics merge only with the same seed.  columns: l, the columns of the
    sketch (2 k + 10, or doubled from 64 until `tail` is reached).
    """

    rank: int | None = None
    tail: float = 0.1
    seed: int = 0
    columns: int | None = None
    probe: Tensor = EMPTY  # Ω (P, l)
    sketch: Tensor = EMPTY  # S Ω (P, l)
    diagonal: Tensor = EMPTY  # of S (P,)

    name = "low_rank"
    needs_jacobian_entries = False
    couples_all_parameters = True
    positive_only = True

    @property
    def is_widened_by_fit(self) -> bool:
        """Return whether a fit may widen the sketch, which it does if no rank is given."""
        return self.rank is None

    def __post_init__(self) -> None:
        """Check rank, columns and tail; raise ValueError for one that is out of range."""
        for name, value in (("rank", self.rank), ("columns", self.columns)):
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                raise ValueError(
                    f"LowRank({name}=…) must be a positive integer or None, but is {value!r}."
                )
        if not 0 < self.tail < 1:
            raise ValueError(
                "LowRank(tail=…) must be between 0 and 1 (the share by which variances may be "
                f"overstated), but is {self.tail!r}."
            )

    def _choose_sketch_width(self, size: int) -> int:
        """Return the number l of columns of the sketch for P = size parameters."""
        default = FIRST_COLUMNS if self.rank is None else 2 * self.rank + 10
        return min(size, self.columns or default)

    def zero(self, size: int) -> LowRank:
        """Return the statistics of no data, for P = size parameters, with Ω drawn by the seed."""
        generator = torch.Generator().manual_seed(self.seed)
        normals = torch.randn(
            size, self._choose_sketch_width(size), dtype=torch.float64, generator=generator
        )
        probe, _ = torch.linalg.qr(normals)
        diagonal = torch.zeros(size, dtype=torch.float64)
        return replace(self, probe=probe, sketch=torch.zeros_like(probe), diagonal=diagonal)

    def add(self, J: Jacobian, precision: Tensor, weights: Tensor | None = None) -> LowRank:
        """Return the statistics with one more batch; precision Λ (B, C, C), weights not used."""
        sketch = self.sketch + J.pull_many(precision @ J.push_many(self.probe))
        return replace(self, sketch=sketch, diagonal=self.diagonal + J.gram_diagonal(precision))

    def merge(self, other: Structure) -> LowRank:
        """Return the statistics of both data sets.

        Raises ValueError unless the other sketch has the same parameters, seed, width, rank and
        tail.
        """
        if (
            not isinstance(other, LowRank)
            or other.seed != self.seed
            or len(other.diagonal) != len(self.diagonal)
        ):
            raise ValueError(make_mismatch_text("low_rank", other))
        if other.sketch.shape != self.sketch.shape:
            pair = f"{self.sketch.shape[1]} and {other.sketch.shape[1]} columns"
            raise ValueError(
                f"Only low_rank sketches of one width can be merged, but these have {pair}. Give "
                "both LowRank(rank=…)."
            )
        if (other.rank, other.tail) != (self.rank, self.tail):
            pair = f"rank={self.rank}, tail={self.tail} and rank={other.rank}, tail={other.tail}"
            raise ValueError(
                "Only low_rank statistics of the same settings can be merged, but these have "
                f"{pair}."
            )

        return replace(
            self, sketch=self.sketch + other.sketch, diagonal=self.diagonal + other.diagonal
        )

    def mix_with(self, other: Structure, share: float) -> LowRank:
        """Return (1 − share) of these statistics plus `share` of others of the same rows.

        Raises ValueError unless the other sketch has the same width, parameters and seed.
        """
        if (
            not isinstance(other, LowRank)
            or other.seed != self.seed
            or other.sketch.shape != self.sketch.shape
        ):
            raise ValueError(make_mismatch_text("low_rank", other))
        sketch = (1 - share) * self.sketch + share * other.sketch
        diagonal = (1 - share) * self.diagonal + share * other.diagonal
        return replace(self, sketch=sketch, diagonal=diagonal)

    def positive_part(self) -> LowRank:
        """Return the statistics themselves, because `positive_only` refuses an indefinite Λ."""
        return self

    def scale_both_sides(self, factors: Tensor) -> LowRank:
        """Return the statistics of D S D for D = diag(factors), factors (P,).

        This is exact for equal factors. For others, Ŝ is used in place of S.
        """
        diagonal = self.diagonal * factors**2
        if bool((factors == factors[0]).all()):
            return replace(self, sketch=self.sketch * factors[0] ** 2, diagonal=diagonal)
        root = self._sketch_root * factors
        return replace(self, sketch=root.mT @ (root @ self.probe), diagonal=diagonal)

    @cached_property
    def _sketch_root(self) -> Tensor:
        """Return W (r, P) with Ŝ = WᵀW and orthogonal rows, the longest first."""
        core = self.probe.mT @ self.sketch  # ΩᵀY
        # With core = V diag(values) Vᵀ, Ŝ = Y core⁺ Yᵀ = F Fᵀ for F = Y V diag(values)^-½. An SVD
        # of F orders its directions.
        values, vectors = torch.linalg.eigh((core + core.mT) / 2)
        keep = values > NEGLIGIBLE * values.max().clamp_min(0)
        factor = self.sketch @ (vectors[:, keep] / values[keep].sqrt())
        U, singular, _ = torch.linalg.svd(factor, full_matrices=False)
        root: Tensor = (U * singular).mT
        return root

    @cached_property
    def _dropped_curvature(self) -> Tensor:
        """Return the dropped curvature d = tr S − tr Ŝ_k, a scalar."""
        return (self.diagonal.sum() - (self._leading_root**2).sum()).clamp_min(0)

    @property
    def _leading_root(self) -> Tensor:
        """Return W (k, P) with Ŝ_k = WᵀW: the k longest rows of `_sketch_root`."""
        return self._sketch_root[: self.rank]

    @property
    def directions(self) -> int:
        """Return the number k of directions: `rank`, or all of the sketch."""
        return len(self._leading_root)

    def largest_variance_excess(self, smallest_precision: float) -> float:
        """Return d/τ, the largest share by which a variance may be too large.

        d is the dropped curvature. smallest_precision: that of the prior, τ > 0.
        """
        return float(self._dropped_curvature) / smallest_precision

    def describe_omission(self, smallest_precision: float) -> str:
        """Return a sentence for the report on the size of the dropped part.

        smallest_precision: that of the prior.
        """
        return (
            f"low_rank: {self.directions:,} of {len(self.diagonal):,} directions; no variance is "
            f"more than {100 * self.largest_variance_excess(smallest_precision):.2g}% too large"
        )

    def widen_sketch(self, smallest_precision: float, max_columns: int) -> LowRank | None:
        """Return empty statistics with a sketch twice as wide, of at most `max_columns`.

        The statistics have no data: the caller adds all of them again. smallest_precision: that of
        the prior. None if the variances are accurate to `tail` under it, if the rank is fixed, or
        if the sketch cannot be wider.
        """
        size, columns = self.sketch.shape
        if (
            self.rank is not None
            or self.largest_variance_excess(smallest_precision) <= self.tail
            or columns >= min(size, max_columns)
        ):
            return None
        return LowRank(None, self.tail, self.seed, min(2 * columns, size, max_columns))

    def push(self, direction: Tensor) -> Tensor:
        """Compute the product Ŝ_k d with a direction d.  (P,) -> (P,)."""
        root = self._leading_root
        return root.mT @ (root @ direction)

    def trace(self, operator: Operator) -> float:
        """Compute tr(Ŝ_k H⁻¹) by one solve for each direction."""
        root = self._leading_root
        return float((root.mT * operator.solve_many(root.mT)).sum())

    def with_prior(self, precision: Tensor) -> WoodburyOperator:
        """Factorise H = Ŝ_k + the prior's precision (P,) by Woodbury's formula.

        Raises ValueError for a precision (P, P), and NoFactorError unless every precision is
        positive.
        """
        if precision.dim() != 1:
            raise ValueError(
                "structure='low_rank' needs a prior whose curvature is diagonal, but this prior "
                "couples parameters. Use structure='dense'."
            )
        return factorise_by_woodbury(self._leading_root, precision)

    def memory(self, extent: Extent) -> int:
        """Estimate the bytes that a fit needs: five matrices of the sketch's size (P, l)."""
        # Five is a guess: Ω, the sketch, its root, and workspace.
        # A number in float64 has 8 bytes.
        return 5 * 8 * extent.size * self._choose_sketch_width(extent.size)
