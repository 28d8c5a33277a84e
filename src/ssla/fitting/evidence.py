"""The log evidence as a function of prior precisions and noise, with its gradient, from the sums
alone.

With precisions τ = e^a·pattern (one a for each group of parameters) and noise e^t times what it
was, H = S/e^2t + diag(τ) and

    log Z = ℓ(θ̂; t) + ½ Σ log τ − ½ Σ τ (θ̂ − m)² − ½ log|H|
    ∂/∂a_g = ½ [P_g − Σ_g τ (θ̂ − m)² − Σ_g τ diag(H⁻¹)]
    ∂/∂t   = RSS/e^2t − nC + tr(S/e^2t H⁻¹)

in both cases: where θ̂ moves with the prior (a Gaussian last layer, where log Z is exact) its own
derivative vanishes at the mode, and where it stays there is none. In an eigenbasis of S whose
blocks share one τ everything is a sum over P eigenvalues. Where moreover θ̂ stays, those between
groups are zero and, with h = λ/e^2t + τ,

    −∂²/∂a_g² = ½ Σ_g [τ (θ̂ − m)² + (τ/h) (1 − τ/h)]
    −∂²/∂t²   = 2 RSS/e^2t + 2 Σ (τ/h) (1 − τ/h)
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
    """The statistics as functions of θ and noise, with the θ and the noise at which they were
    summed.
    """

    curvature: Structure  # S
    gradient: Tensor  # ∇ℓ (P,)
    offset: Tensor  # θ − m (P,)
    log_likelihood: float
    squares: (
        float  # residual sum of squares in units of the noise; 0 where there is no noise to tune
    )
    rows: float  # n·C (weighted)
    pattern: Tensor  # (P,) precisions at a = 0
    groups: Tensor  # (P,) long: which a
    moves: bool  # whether θ̂ follows the prior


class Evidence(Protocol):
    """log Z at any (a_1 … a_G, t), and its derivatives."""

    def __call__(self, point: Tensor) -> Value: ...


@dataclass(frozen=True, eq=False)
class ThinBasis:
    """S = E diag(λ) Eᵀ with fewer directions k than parameters P, for one precision on all of them.

    A vector has k coordinates along E, with eigenvalues λ, then the P entries of its rest, with
    eigenvalue zero: products of vectors are those of their coordinates, and nothing of size P×P is
    built.
    """

    values: Tensor  # (k + P,)
    directions: Tensor  # E (P, k)

    def rotated(self, v: Tensor) -> Tensor:
        """(…, P) -> (…, k + P)."""
        along = v @ self.directions
        return torch.cat([along, v - along @ self.directions.mT], -1)

    def restored(self, v: Tensor) -> Tensor:
        """(…, k + P) -> (…, P)."""
        count = self.directions.shape[1]
        return v[..., :count] @ self.directions.mT + v[..., count:]


def thin_basis(structure: Structure, size: int) -> ThinBasis | None:
    """Of a structure that holds fewer directions than parameters (rows in place of a matrix,
    low rank); None for another.
    """
    unit = structure.with_prior(torch.ones(size, dtype=torch.float64))
    if not isinstance(unit, WoodburyOperator):
        return None
    return ThinBasis(torch.cat([unit.spectrum, torch.zeros(size, dtype=torch.float64)]), unit.basis)


def eigenbasis(structure: Structure, pattern: Tensor, groups: Tensor) -> Eigenbasis | None:
    """The kept eigenbasis of S, if every block of it has one precision; None otherwise."""
    return structure.eigenbasis(torch.stack([pattern, groups.double()]))


class _Part(NamedTuple):
    """Sums over some entries of θ in the eigenbasis, and derivatives of each by log precision."""

    gain: float
    terms: Tensor
    each: Tensor
    bends: Tensor
    both: float
    used: float


@dataclass(frozen=True, eq=False)
class SpectralEvidence:
    """By eigenvalues: O(P) for each evaluation, in parts, so that its memory does not grow with
    P.
    """

    problem: Problem
    values: Tensor  # λ
    gradient: Tensor  # Qᵀ∇ℓ
    offset: Tensor  # Qᵀ(θ − m)

    def __call__(self, point: Tensor) -> Value:
        p, size = self.problem, len(self.values)
        gain, terms, used, both = 0.0, torch.zeros((), dtype=torch.float64), 0.0, 0.0
        by_group = torch.zeros(len(point) - 1, dtype=torch.float64)
        bends = torch.zeros_like(by_group)
        for start in range(0, size, ENTRIES_AT_ONCE):
            part = slice(start, start + ENTRIES_AT_ONCE)
            more = self._part(point, part)
            gain, terms, used = gain + more.gain, terms + more.terms, used + more.used
            by_group = by_group.index_add(0, p.groups[part], more.each)
            bends = bends.index_add(0, p.groups[part], more.bends)
            both += more.both
        found = _value(p, point, p.squares - 2 * gain, gain, terms, by_group, used)
        if p.moves:
            return found
        of_noise = 2 * float((-2 * point[-1]).exp()) * p.squares + 2 * both if p.rows else 0.0
        return found._replace(
            curvature=torch.cat([bends, torch.tensor([of_noise], dtype=torch.float64)])
        )

    def _part(self, point: Tensor, part: slice) -> _Part:
        """What some of the entries contribute."""
        p, values = self.problem, self.values[part]
        tau = p.pattern[part] * point[:-1].exp()[p.groups[part]]
        c = float((-2 * point[-1]).exp())
        data = c * values
        h = data + tau
        q, gain = self.offset[part], 0.0
        if p.moves:
            step = (c * self.gradient[part] - tau * q) / h
            gain = float((step * self.gradient[part]).sum() - 0.5 * (values * step * step).sum())
            q = q + step
        terms = 0.5 * (tau.log() - tau * q * q - h.log())
        each = 0.5 * (1 - tau * q * q - tau / h)
        both = (tau / h) * (data / h)
        bends = 0.5 * (tau * q * q + both)
        return _Part(gain, terms.sum(), each, bends, float(both.sum()), float((data / h).sum()))


@dataclass(frozen=True, eq=False)
class OperatorEvidence:
    """By factorising H anew each time: any structure, any pattern of precisions."""

    problem: Problem

    def __call__(self, point: Tensor) -> Value:
        p = self.problem
        tau = p.pattern * point[:-1].exp()[p.groups]
        c = float((-2 * point[-1]).exp())
        operator = p.curvature.scaled(torch.full_like(tau, c**0.5)).with_prior(tau)
        q, squares, gain = p.offset, p.squares, 0.0
        if p.moves:
            step = operator.solve(c * p.gradient - tau * q)
            gain = float(step @ p.gradient) - 0.5 * float(step @ p.curvature.push(step))
            q, squares = q + step, squares - 2 * gain
        share = tau * operator.variances()
        terms = 0.5 * (tau.log().sum() - (tau * q * q).sum() - operator.logdet())
        each = 0.5 * (1 - tau * q * q - share)
        by_group = torch.zeros(len(point) - 1, dtype=torch.float64).index_add(0, p.groups, each)
        return _value(p, point, squares, gain, terms, by_group, len(tau) - float(share.sum()))


def _value(
    p: Problem,
    point: Tensor,
    squares: float,
    gain: float,
    terms: Tensor,
    by_group: Tensor,
    used: float,
) -> Value:
    """ℓ at the noise e^t, the prior's and the determinant's terms, and the gradient."""
    t = float(point[-1])
    c = float((-2 * point[-1]).exp())
    log_likelihood = (
        p.log_likelihood + 0.5 * (p.squares - c * squares) - p.rows * t
        if p.rows
        else p.log_likelihood + gain
    )
    of_noise = torch.tensor([c * squares - p.rows + used if p.rows else 0.0], dtype=torch.float64)
    return Value(log_likelihood + float(terms), torch.cat([by_group, of_noise]))


def evidence_of(problem: Problem) -> Evidence:
    """By eigenvalues where the structure has them under this pattern, else by factorisation."""
    basis = eigenbasis(problem.curvature, problem.pattern, problem.groups)
    if basis is None:
        return OperatorEvidence(problem)
    return SpectralEvidence(
        problem, basis.values, basis.rotated(problem.gradient), basis.rotated(problem.offset)
    )
