"""H(θ̂) of a last layer as all refits share it: one factor of it, in single precision for classes.

The dense engine forms a P×P matrix for each task. Here there is one for all of them, so a last
layer of 512 features and 10 classes fits: 85 MB and a few seconds once.

Terms and symbols are those of `ssla.refit.weights`; contrasts are those of
`ssla.refit.weights.contrasts`. Here too: C' is the number of contrasts, or of outputs without them,
and P' = C'·F. Features are whitened: φ' = L_B⁻¹φ, as in `last_layer`. A probe is a random vector of
weights from which a trace is estimated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ssla.curvature import Operator
from ssla.curvature.jacobians import Features
from ssla.likelihoods import Likelihood
from ssla.refit.increments import FISHER
from ssla.refit.weights.contrasts import Contrasts
from ssla.refit.weights.last_layer_group import list_index_pairs
from ssla.refit.weights.refit_rows import Block
from ssla.refit.weights.solved import compute_row_curvature

COPIES = 4  # P×P matrices at the peak: H, its factor, its inverse and what LAPACK needs
FEW_PROBES = 64  # a guess: the number of probes that any problem may have
WORK = 3e9  # a guess: rows × parameters × probes of a task
VECTORS = 64  # a guess: random vectors of a sketch
SEED = 31
RESIDUAL = 1e-3  # a guess: ‖H H⁻¹v − v‖/‖v‖: above it single precision is not enough


@dataclass(frozen=True, eq=False)
class SharedFactor:
    """H⁻¹ at θ̂, in the coordinates Qᵀδ of the outputs and whitened features.

    Q (C, C') are contrasts of classes if the direction (1, …, 1) has the prior's curvature only, so
    that it cancels in every ratio of determinants; otherwise Q is the identity.
    """

    inverse: Tensor  # (P', P')
    # H^{-½} of orthogonal directions of length √P' (S, P), in the outputs' own coordinates
    probes: Tensor
    vectors: Tensor  # of N(0, H⁻¹) (S, P), for `last_layer_sketch`
    Q: Tensor  # (C, C')
    curvature_kind: str

    @property
    def outputs(self) -> int:
        """Return the number of outputs C."""
        return self.Q.shape[0]

    def compute_missing_error(self, used: int) -> float:
        """Return the standard error with `used` orthogonal probes, over that of independent ones.

        It is zero if all P' of them are used, which give a trace exactly.
        """
        return float(max(1 - used / len(self.inverse), 0) ** 0.5)

    @cached_property
    def width(self) -> int:
        """Return the number of features F."""
        return self.inverse.shape[0] // self.Q.shape[1]

    def solve(self, values: Tensor) -> Tensor:
        """Return H⁻¹v for each row v of values (m, P): (m, P)."""
        in_contrasts = self.Q.mT @ values.reshape(len(values), self.outputs, self.width)
        solved = in_contrasts.flatten(1) @ self.inverse
        return (self.Q @ solved.reshape(in_contrasts.shape)).flatten(1)

    def compute_covariances(self, x: Tensor) -> Tensor:
        """Compute K = J H⁻¹ Jᵀ of rows with whitened features x (b, F): (b, C, C).

        Entries are computed for pairs a ≤ b of the outputs Qᵀf.
        """
        count = self.Q.shape[1]
        blocks = self.inverse.reshape(count, self.width, count, self.width)
        in_contrasts = torch.empty(count, count, len(x), dtype=x.dtype)
        for a, b in list_index_pairs(count):
            in_contrasts[a, b] = in_contrasts[b, a] = ((x @ blocks[a, :, b, :]) * x).sum(-1)
        return self.Q @ in_contrasts.movedim(-1, 0) @ self.Q.mT


@dataclass(frozen=True, eq=False)
class SharedStructure:
    """The fitted structure S in place of H, where no P×P matrix fits the memory budget.

    S⁻¹ steers the steps, and determinants are log|S + ΔH + JᵀΛJ| − log|S|. The mode θ̃ and the
    increments of likelihood and prior do not depend on S. The error of the determinant is that of
    the structure; it is not known.
    """

    operator: Operator
    probes: Tensor  # of N(0, S⁻¹) (S, P)
    outputs: int
    curvature_kind: str = FISHER

    def compute_missing_error(self, used: int) -> float:
        """Return one: the probes are independent, so `used` does not matter."""
        return 1.0

    def solve(self, values: Tensor) -> Tensor:
        """Return S⁻¹v for each row v of values (m, P): (m, P)."""
        return self.operator.solve_many(values.double().mT).mT.to(values.dtype)

    def compute_covariances(self, x: Tensor) -> Tensor:
        """Compute J S⁻¹ Jᵀ of rows with features x (b, F), not whitened: (b, C, C)."""
        return self.operator.covariance(Features(x.double(), self.outputs)).to(x.dtype)


def sample_structure(
    operator: Operator, outputs: int, curvature_kind: str, dtype: torch.dtype
) -> SharedStructure:
    """Return the fitted structure with FEW_PROBES probes of N(0, S⁻¹), in `dtype`.

    operator: S⁻¹. outputs: C. curvature_kind: OBSERVED or FISHER. More probes would be too slow for
    a last layer of this size.
    """
    probes = operator.sample(FEW_PROBES, torch.Generator().manual_seed(SEED))
    return SharedStructure(operator, probes.to(dtype), outputs, curvature_kind)


def count_factor_bytes(outputs: int, width: int, dtype: torch.dtype) -> int:
    """Return the most bytes that `factorise_shared` needs for C outputs and `width` features."""
    return COPIES * dtype.itemsize * (outputs * width) ** 2


def factorise_shared(
    rows: Iterable[Block],
    likelihood: Likelihood,
    prior: Tensor,
    curvature_kind: str,
    contrasts: Contrasts | None,
) -> SharedFactor | None:
    """Sum H over training rows with whitened features, factorise it, and draw random vectors.

    prior: its precision in the basis (C, F, F), in whose dtype H is. curvature_kind: OBSERVED or
    FISHER. contrasts: those in which H is formed; None: the outputs themselves. None is returned if
    H is not positive definite in this dtype, or if its inverse is not accurate in it.
    """
    outputs, width, dtype = prior.shape[0], prior.shape[1], prior.dtype
    Q = torch.eye(outputs, dtype=dtype) if contrasts is None else contrasts.matrix.to(dtype)
    H, n = _sum_curvature(rows, likelihood, prior, curvature_kind, Q)
    generator = torch.Generator().manual_seed(SEED)
    factor, info = torch.linalg.cholesky_ex(H)
    if int(info):
        return None

    # All P' orthogonal probes would give a trace exactly, and fewer have a smaller error than
    # independent draws. WORK limits them for large problems.
    probe_count = min(len(H), max(int(WORK / (n * outputs * width)), FEW_PROBES))
    noise = torch.randn(len(H), probe_count, dtype=dtype, generator=generator)
    directions = torch.linalg.qr(noise)[0] * len(H) ** 0.5
    draws: Tensor = torch.linalg.solve_triangular(factor.mT, directions, upper=True)
    lower = H.tril_()
    inverse = torch.cholesky_inverse(factor)
    if not _is_inverse(lower, inverse, noise[:, 0]):
        return None

    gaussian = torch.randn(len(H), VECTORS, dtype=dtype, generator=generator)
    vectors: Tensor = torch.linalg.solve_triangular(factor.mT, gaussian, upper=True)

    def to_outputs(columns: Tensor) -> Tensor:
        """Return S columns in the outputs Qᵀf (P', S) as rows in the outputs f (S, P)."""
        return (Q @ columns.mT.reshape(-1, Q.shape[1], width)).flatten(1)

    return SharedFactor(inverse, to_outputs(draws), to_outputs(vectors), Q, curvature_kind)


def _sum_curvature(
    rows: Iterable[Block], likelihood: Likelihood, prior: Tensor, curvature_kind: str, Q: Tensor
) -> tuple[Tensor, int]:
    """Sum H of the outputs Qᵀf, of which only the lower triangle is correct.

    prior: its precision (C, F, F). curvature_kind: OBSERVED or FISHER. Q (C, C'). Returns
    H (P', P') and the number of rows.
    """
    width, count = prior.shape[1], Q.shape[1]
    H = torch.zeros(count, width, count, width, dtype=prior.dtype)
    n = 0
    for block in rows:
        n += len(block.f)
        precision = compute_row_curvature(likelihood, curvature_kind, block.y, block.f)
        in_contrasts = Q.mT @ block.apply_weights(precision) @ Q
        for a, b in list_index_pairs(count):
            H[b, :, a, :] += (block.x * in_contrasts[:, a, b, None]).mT @ block.x
    for a in range(count):
        for b in range(a + 1):
            H[a, :, b, :] += torch.einsum("c,cfg->fg", Q[:, a] * Q[:, b], prior)
    return H.reshape(count * width, -1), n


def _is_inverse(lower: Tensor, inverse: Tensor, v: Tensor) -> bool:
    """Return whether `inverse` is H⁻¹ to RESIDUAL, by its product with one vector v (P',).

    lower: the lower triangle of the symmetric H (P', P'). The error is that of H H⁻¹v, over ‖v‖.
    """
    w = inverse @ v
    # H w, from the lower triangle, its transpose, and the diagonal, which both have.
    residual = lower @ w + lower.mT @ w - lower.diagonal() * w - v
    return float(residual.norm()) <= RESIDUAL * float(v.norm())
