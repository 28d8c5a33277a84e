"""The log evidence as a function of prior precisions and noise, with its gradient.

Both are computed from the sums alone. With precisions τ = e^a·pattern (one a for each group of
parameters) and noise e^t times what it was, H = S/e^2t + diag(τ) and

    log Z = ℓ(θ̂; t) + ½ Σ log τ − ½ Σ τ (θ̂ − m)² − ½ log|H|
    ∂/∂a_g = ½ [P_g − Σ_g τ (θ̂ − m)² − Σ_g τ diag(H⁻¹)]
    ∂/∂t   = RSS/e^2t − nC + tr(S/e^2t H⁻¹)

These derivatives hold in two cases: where θ̂ moves with the prior (a Gaussian last layer, where
log Z is exact), because log Z is stationary in θ̂ at the mode; and where θ̂ stays. In an eigenbasis
of S whose blocks share one τ, everything is a sum over P eigenvalues λ. If θ̂ stays as well, the
second derivatives between groups are zero and, with h = λ/e^2t + τ,

    −∂²/∂a_g² = ½ Σ_g [τ (θ̂ − m)² + (τ/h) (1 − τ/h)]
    −∂²/∂t²   = 2 RSS/e^2t + 2 Σ (τ/h) (1 − τ/h)

S is the curvature Σ JᵀΛJ of the data, m the prior's mean, RSS the residual sum of squares in units
of the noise, P_g the number of parameters in group g, and nC the number of residuals. A point
(G + 1,) is (a_1 … a_G, t).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ssla.curvature import Structure, WoodburyOperator
from ssla.curvature.structure import Eigenbasis
from ssla.maths.bfgs import Value

# of θ in one part of a sum: a guess, for about ten vectors in the processor's cache
ENTRIES_AT_ONCE = 1 << 18


class Problem(NamedTuple):
    """What the evidence is computed from: the sums at one θ and noise, and the prior's pattern."""

    curvature: Structure  # S
    gradient: Tensor  # ∇ℓ (P,)
    offset: Tensor  # θ − m (P,)
    log_likelihood: float
    # residual sum of squares in units of the noise; 0 where there is no noise to tune
    squares: float
    rows: float  # n·C (weighted); 0 where there is no noise to tune
    pattern: Tensor  # (P,) precisions at a = 0
    groups: Tensor  # (P,) long: which a
    moves: bool  # whether θ̂ follows the prior


class Evidence(Protocol):
    """The function (a_1 … a_G, t) -> log Z, with its derivatives."""

    def __call__(self, point: Tensor) -> Value:
        """Compute log Z at a point (G + 1,); raise ValueError where H is not positive definite."""
        ...


@dataclass(frozen=True, eq=False)
class ThinBasis:
    """S = E diag(λ) Eᵀ with fewer directions k than parameters P, for one precision on all of them.

    A vector has k coordinates along E, with eigenvalues λ, then the P entries of its rest, with
    eigenvalue zero. The product of two vectors is that of their coordinates. Nothing of size P×P is
    built.
    """

    values: Tensor  # (k + P,)
    directions: Tensor  # E (P, k)

    def to_eigenbasis(self, v: Tensor) -> Tensor:
        """Return the coordinates (…, k + P) of vectors (…, P): those along E, then the rest."""
        along = v @ self.directions
        return torch.cat([along, v - along @ self.directions.mT], -1)

    def from_eigenbasis(self, v: Tensor) -> Tensor:
        """Return the vectors (…, P) of coordinates (…, k + P)."""
        count = self.directions.shape[1]
        return v[..., :count] @ self.directions.mT + v[..., count:]


def make_thin_basis(structure: Structure, size: int) -> ThinBasis | None:
    """Return the thin basis of a structure that holds fewer directions than its `size` parameters.

    Such structures hold rows in place of a matrix, or have a low rank. None for another structure.
    """
    # Under a prior of precision one, such a structure is factorised by the Woodbury identity.
    unit = structure.with_prior(torch.ones(size, dtype=torch.float64))
    if not isinstance(unit, WoodburyOperator):
        return None
    return ThinBasis(torch.cat([unit.spectrum, torch.zeros(size, dtype=torch.float64)]), unit.basis)


def eigenbasis(structure: Structure, pattern: Tensor, groups: Tensor) -> Eigenbasis | None:
    """Return the eigenbasis of S that a structure keeps, if the prior is simple enough for it.

    All parameters of a block of the basis must have one precision at every point. Otherwise, or if
    the structure keeps no eigenbasis, the result is None. pattern: precisions (P,) at a = 0.
    groups: the group (P,) of each parameter; one factor scales the precisions of a group.
    """
    # Precisions at any point are equal inside a block if patterns and groups are.
    return structure.eigenbasis(torch.stack([pattern, groups.double()]))


class _Contribution(NamedTuple):
    """What b entries of θ in the eigenbasis add to the evidence."""

    gain: float  # in log likelihood, where θ̂ moves
    terms: Tensor  # the sum of what prior and determinant add to log Z
    slopes: Tensor  # ∂/∂ log τ of each entry (b,)
    bends: Tensor  # −∂²/∂ log τ² of each entry (b,)
    bend_of_noise: float  # Σ (τ/h) (1 − τ/h)
    determined: float  # how many parameters the data determine: tr(S/e^2t H⁻¹)


@dataclass(frozen=True, eq=False)
class SpectralEvidence:
    """The evidence by eigenvalues, in O(P) for each evaluation.

    Entries of θ are summed in parts, so that an evaluation needs no further vectors of size P.
    """

    problem: Problem
    values: Tensor  # λ (P,)
    gradient: Tensor  # Qᵀ∇ℓ (P,)
    offset: Tensor  # Qᵀ(θ − m) (P,)

    def __call__(self, point: Tensor) -> Value:
        """Compute log Z at a point (G + 1,), and its derivatives; second ones where θ̂ stays."""
        p = self.problem
        gain = 0.0
        determined = 0.0
        bend_of_noise = 0.0
        terms = torch.zeros((), dtype=torch.float64)
        slopes = torch.zeros(len(point) - 1, dtype=torch.float64)
        bends = torch.zeros_like(slopes)
        for start in range(0, len(self.values), ENTRIES_AT_ONCE):
            entries = slice(start, start + ENTRIES_AT_ONCE)
            sums = self._sum_entries(point, entries)
            gain += sums.gain
            terms = terms + sums.terms
            determined += sums.determined
            slopes = slopes.index_add(0, p.groups[entries], sums.slopes)
            bends = bends.index_add(0, p.groups[entries], sums.bends)
            bend_of_noise += sums.bend_of_noise

        # ℓ is −½ of the squares plus constants, so a gain of ℓ takes twice as much off the squares.
        squares = p.squares - 2 * gain
        value = _compute_evidence_at_noise(p, point, squares, gain, terms, slopes, determined)
        if p.moves:  # θ̂ then adds second derivatives between groups
            return value
        curvature_of_noise = 0.0
        if p.rows:
            curvature_of_noise = 2 * float((-2 * point[-1]).exp()) * p.squares + 2 * bend_of_noise
        curvature = torch.cat([bends, torch.tensor([curvature_of_noise], dtype=torch.float64)])
        return value._replace(curvature=curvature)

    def _sum_entries(self, point: Tensor, entries: slice) -> _Contribution:
        """Compute what the given entries of θ contribute at a point (G + 1,).

        The letters are those of the module's docstring; q is an entry of θ̂ − m in the eigenbasis,
        and c = e^−2t.
        """
        p = self.problem
        values = self.values[entries]
        tau = p.pattern[entries] * point[:-1].exp()[p.groups[entries]]
        c = float((-2 * point[-1]).exp())  # e^−2t: the sums are those at t = 0
        data = c * values
        h = data + tau
        q = self.offset[entries]
        gain = 0.0
        if p.moves:  # by a Newton step, entry by entry
            gradient = self.gradient[entries]
            step = (c * gradient - tau * q) / h
            gain = float((step * gradient).sum() - 0.5 * (values * step * step).sum())
            q = q + step
        share_product = (tau / h) * (data / h)  # (τ/h) (1 − τ/h)

        return _Contribution(
            gain,
            (0.5 * (tau.log() - tau * q * q - h.log())).sum(),
            slopes=0.5 * (1 - tau * q * q - tau / h),
            bends=0.5 * (tau * q * q + share_product),
            bend_of_noise=float(share_product.sum()),
            determined=float((data / h).sum()),
        )


@dataclass(frozen=True, eq=False)
class OperatorEvidence:
    """The evidence by factorising H anew each time: any structure, any pattern of precisions."""

    problem: Problem

    def __call__(self, point: Tensor) -> Value:
        """Compute log Z at a point (G + 1,), and its gradient.

        q is θ̂ − m (P,), and c = e^−2t. Raises ValueError where H is not positive definite.
        """
        p = self.problem
        tau = p.pattern * point[:-1].exp()[p.groups]
        c = float((-2 * point[-1]).exp())  # e^−2t: the sums are those at t = 0
        operator = p.curvature.scale_both_sides(torch.full_like(tau, c**0.5)).with_prior(tau)
        q = p.offset
        squares = p.squares
        gain = 0.0
        if p.moves:  # θ̂ is one Newton step away
            step = operator.solve(c * p.gradient - tau * q)
            gain = float(step @ p.gradient) - 0.5 * float(step @ p.curvature.push(step))
            q = q + step
            squares = squares - 2 * gain
        compute_prior_share = tau * operator.variances()
        terms = 0.5 * (tau.log().sum() - (tau * q * q).sum() - operator.logdet())
        slopes_of_entries = 0.5 * (1 - tau * q * q - compute_prior_share)
        zeros = torch.zeros(len(point) - 1, dtype=torch.float64)
        slopes = zeros.index_add(0, p.groups, slopes_of_entries)
        determined = len(tau) - float(compute_prior_share.sum())
        return _compute_evidence_at_noise(p, point, squares, gain, terms, slopes, determined)


def _compute_evidence_at_noise(
    p: Problem,
    point: Tensor,
    squares: float,
    gain: float,
    terms: Tensor,
    slopes: Tensor,
    determined: float,
) -> Value:
    """Return log Z and its gradient (G + 1,) at a point (G + 1,), from its terms.

    p: the problem. squares: the residual squares of θ̂ at the point. gain: of ℓ there, at the noise
    of the sums. terms: what prior and determinant add to log Z. slopes: derivatives by log
    precision (G,). determined: how many parameters the data determine.
    """
    if not p.rows:  # there is no noise to tune
        log_likelihood = p.log_likelihood + gain
        slope_of_noise = 0.0
    else:
        t = float(point[-1])
        c = float((-2 * point[-1]).exp())
        log_likelihood = p.log_likelihood + 0.5 * (p.squares - c * squares) - p.rows * t
        slope_of_noise = c * squares - p.rows + determined
    gradient = torch.cat([slopes, torch.tensor([slope_of_noise], dtype=torch.float64)])
    return Value(log_likelihood + float(terms), gradient)


def make_evidence(problem: Problem) -> Evidence:
    """Return the evidence of a problem as a function of the point.

    By eigenvalues where the structure keeps them under this pattern, else by factorisation.
    """
    basis = eigenbasis(problem.curvature, problem.pattern, problem.groups)
    if basis is None:
        return OperatorEvidence(problem)
    return SpectralEvidence(
        problem,
        basis.values,
        basis.to_eigenbasis(problem.gradient),
        basis.to_eigenbasis(problem.offset),
    )
