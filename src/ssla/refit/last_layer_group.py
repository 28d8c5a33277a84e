"""A group of last-layer refits: gradients, steps, increments and curvatures of m tasks by products over the features."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla import linalg
from ssla.expansion import FISHER, at_mode
from ssla.posterior import AS_IS
from ssla.refit.ascent import Slope
from ssla.refit.solved import FROZEN, at_once, own_increment, own_pull
from ssla.refit.training import Block

if TYPE_CHECKING:
    from ssla.refit.last_layer import LastLayerRefit

MANY_FEATURES = 24  # from here on the products over all rows are worth single precision
LARGE_CHANGE = 4.0


@dataclass(frozen=True, eq=False)
class Base:
    """The curvature at θ̂ of one kind, in the basis: H = L Lᵀ (P, P)."""

    kind: str
    factor: Tensor
    outputs: int

    @cached_property
    def matrix(self) -> Tensor:
        return self.factor @ self.factor.mT

    @cached_property
    def least(self) -> float:
        """The smallest eigenvalue of H."""
        return float(torch.linalg.eigvalsh(self.matrix)[0])

    @cached_property
    def packed_inverse(self) -> Tensor:
        """H⁻¹ (pairs, v) so that its product with a packed ΔH is tr H⁻¹ΔH."""
        C, F = self.outputs, self.factor.shape[0] // self.outputs
        blocks = torch.cholesky_inverse(self.factor).reshape(C, F, C, F)
        upper = torch.triu_indices(F, F)
        twice = torch.where(upper[0] == upper[1], 1.0, 2.0)
        rows = []
        for a, b in pairs(C):
            block = (blocks[a, :, b, :] + blocks[a, :, b, :].mT) / 2
            rows.append((1 + (a != b)) * twice * block[upper[0], upper[1]])
        return torch.stack(rows)


@dataclass(frozen=True, eq=False)
class Group:
    """m tasks that are solved together. Points are δ' (m, P) in the basis of `LastLayerRefit`."""

    refit: LastLayerRefit
    base: Base
    where: Tensor
    y: Tensor

    def take(self, rows: Tensor) -> Group:
        return Group(self.refit, self.base, self.where[rows], self.y[rows])

    @cached_property
    def phi(self) -> Tensor:
        return self.refit.features[self.where]

    @cached_property
    def f(self) -> Tensor:
        return self.refit.f[self.where]

    @cached_property
    def pulled(self) -> Tensor:
        """H⁻¹Jᵀ of each task's input (m, P, C)."""
        C = self.refit.outputs
        places, index = self.where.unique(return_inverse=True)
        phi = self.refit.features[places]
        right = torch.einsum("nf,ac->afnc", phi, torch.eye(C, dtype=phi.dtype)).reshape(-1, len(places) * C)
        solved = torch.cholesky_solve(right, self.base.factor).reshape(-1, len(places), C)
        return solved.movedim(0, 1)[index]

    def push(self, point: Tensor) -> Tensor:
        """J δ at each task's own input (m, C)."""
        return torch.einsum("mcf,mf->mc", point.reshape(len(point), self.refit.outputs, -1), self.phi)

    @cached_property
    def root(self) -> Tensor:
        """R with R Rᵀ = K = J H⁻¹ Jᵀ (m, C, C)."""
        m, C = self.f.shape
        K = torch.einsum("mafc,mf->mac", self.pulled.reshape(m, C, -1, C), self.phi)
        return linalg.root((K + K.mT) / 2)

    def start(self) -> Tensor:
        """The refit of the linearised model, θ̂ + H⁻¹Jᵀu, with the curvature of these data."""
        if not self.refit.law.linear_domain:
            return torch.zeros(len(self.y), self.refit.gradient.numel(), dtype=torch.float64)
        pull = at_mode(self.refit.law, self.y, self.f, self.root).pull
        return (self.pulled @ pull.unsqueeze(-1)).squeeze(-1)

    def evaluate(self, point: Tensor, tasks: Tensor) -> Slope:
        """The gradient of ℓ_D + log p(y|x,·) + log π − g₀ᵀ(θ−θ̂), by differences from θ̂ row by row; and (H + JᵀΛJ)⁻¹ of it."""
        group = self if len(tasks) == len(self.y) else self.take(tasks)
        return group._evaluate(point)

    def _evaluate(self, point: Tensor) -> Slope:
        refit, law = self.refit, self.refit.law
        m, C = self.f.shape
        likelihood = refit.posterior.likelihood
        total = torch.zeros(C, m, self.phi.shape[1], dtype=torch.float64)
        outside = torch.zeros(m, dtype=torch.bool)
        for block, f in self._blocks(point):
            score = likelihood.score(block.targets, f) - likelihood.score(block.y, block.f).unsqueeze(1)
            if not likelihood.linear_domain:
                outside |= ~torch.isfinite(likelihood.log_prob(block.targets, f)).all(0)
            total += block.weighted(score).movedim(-1, 0).mT @ block.x
        own = self.f + self.push(point)
        score = law.score(self.y, own)
        total += score.mT.unsqueeze(-1) * self.phi
        gradient = total.movedim(0, 1).reshape(m, -1)
        gradient = gradient + refit.to_basis(refit.prior.gradient(refit.original(point)))
        if refit.posterior.report.mode == AS_IS:
            gradient = gradient + refit.to_basis(refit.gradient.unsqueeze(0))
        if not law.linear_domain:
            outside |= ~torch.isfinite(law.log_prob(self.y, own))
            gradient = torch.where(outside.unsqueeze(-1), torch.nan, gradient)
        return Slope(gradient, self._step(gradient, own))

    def _step(self, gradient: Tensor, own: Tensor) -> Tensor:
        """(H + JᵀΛJ)⁻¹g = z − H⁻¹Jᵀ(I + ΛK)⁻¹ΛJz with z = H⁻¹g."""
        z = torch.cholesky_solve(gradient.mT, self.base.factor).mT
        u = own_pull(self.refit.law, self.y, own, self.root, self.push(z))
        return z - (self.pulled @ u.unsqueeze(-1)).squeeze(-1)

    def _blocks(self, point: Tensor) -> Iterator[tuple[Block, Tensor]]:
        """Each block of training rows with the outputs of all tasks on it: (b, m, C), stored component-major."""
        step = point.reshape(len(point), self.refit.outputs, -1).permute(1, 2, 0).contiguous()  # (C, F, m)
        for block in self.refit.rows:
            yield block, (block.f.mT.unsqueeze(-1) + block.x @ step).movedim(0, -1)

    def values(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Likelihood and prior increments (m,), the former with the tilt."""
        refit = self.refit
        likelihood = refit.posterior.likelihood
        step = refit.original(point)
        total = refit.law.log_prob(self.y, self.f + self.push(point))
        for block, f in self._blocks(point):
            change = likelihood.log_prob_difference(block.targets, f, block.f.unsqueeze(1))
            total = total + block.weighted(change).sum(0)
        if refit.posterior.report.mode != AS_IS:
            total = total - step @ refit.gradient
        return total, refit.prior.value(step)

    def curvature(self, point: Tensor, base: Base) -> tuple[Tensor, Tensor]:
        """−½[log|H̃(θ̃)| − log|H(θ̂)|] (m,), and where H̃ is positive definite."""
        own = self.f + self.push(point)
        precision = self.refit.law.fisher(own) if base.kind == FISHER else self.refit.law.precision(self.y, own)
        if self.refit.options.logdet == FROZEN:
            return own_increment(self.root, precision)
        size = at_once(self.refit.posterior.memory_budget, self.refit.gradient.numel())
        parts = [self.take(rows)._exact(point[rows], precision[rows], base) for rows in torch.arange(len(point)).split(size)]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _exact(self, point: Tensor, precision: Tensor, base: Base) -> tuple[Tensor, Tensor]:
        """By Cholesky of H + ΔH + JᵀΛJ. With many features ΔH, a product over all rows, is formed in single precision and its
        trace with H⁻¹, to which the log determinant is proportional to first order, in double; the rest is off by at most
        1e-7·‖H⁻¹ΔH‖². Where that norm is large, double precision throughout.
        """
        if self.phi.shape[1] < MANY_FEATURES:
            change, trace = self._change(point, base, torch.float64)
            half, positive = self._half_logdet(change, point, precision, base)
            return -half, positive
        change, trace = self._change(point, base, torch.float32)
        large = (change.square().sum((0, -1)) * (2 / base.least**2) > LARGE_CHANGE).nonzero().squeeze(-1)
        if large.numel():
            change = change.double()
            change[:, large], trace[large] = self.take(large)._change(point[large], base, torch.float64)
        missing = trace - torch.einsum("pmv,pv->m", change.double(), base.packed_inverse)
        half, positive = self._half_logdet(change, point, precision, base)
        return -half - 0.5 * missing, positive

    def _half_logdet(self, change: Tensor, point: Tensor, precision: Tensor, base: Base) -> tuple[Tensor, Tensor]:
        """½ log|H + ΔH + JᵀΛJ| − ½ log|H| (m,) by ratios of pivots; and where it is positive definite."""
        m, C = self.f.shape
        F = self.phi.shape[1]
        H = base.matrix.reshape(C, F, C, F).repeat(m, 1, 1, 1, 1)
        outer = self.phi.unsqueeze(-1) * self.phi.unsqueeze(-2)
        place = places(F).flatten()
        for (b, a), part in zip(pairs(C), change, strict=True):  # Cholesky reads the lower triangle: blocks a ≥ b
            block = part.index_select(1, place).reshape(m, F, F)
            H[:, a, :, b, :].add_(block).addcmul_(precision[:, a, b, None, None], outer)
        H = H.reshape(m, C * F, C * F)
        believed = self.refit.prior.precision(self.refit.original(point))
        if believed is not None:
            H += congruent(believed, self.refit.basis)
        factor, info = torch.linalg.cholesky_ex(H)
        ratio = factor.diagonal(dim1=-2, dim2=-1) / base.factor.diagonal()
        return ratio.log().sum(-1), info == 0

    def _change(self, point: Tensor, base: Base, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """ΔH = Σ_i (Λ(f̃_i) − Λ(f̂_i)) ⊗ φφᵀ, packed: for each pair of outputs a ≤ b and task, the upper triangle (pairs, m, v).

        A product of the tasks' ΔΛ with the rows' shared vech(φφᵀ). Also tr H⁻¹ΔH = Σ_i tr K_iΔΛ_i (m,), in double precision.
        """
        m, C = self.f.shape
        F = self.phi.shape[1]
        total = torch.zeros(len(pairs(C)), m, F * (F + 1) // 2, dtype=dtype)
        trace = torch.zeros(m, dtype=torch.float64)
        likelihood = self.refit.posterior.likelihood
        for block, f in self._blocks(point):
            if base.kind == FISHER:
                change = likelihood.fisher(f) - likelihood.fisher(block.f).unsqueeze(1)
            else:
                change = likelihood.precision(block.targets, f) - likelihood.precision(block.y, block.f).unsqueeze(1)
            if not bool(change.any()):
                continue
            change = block.weighted(change)
            K = self.refit.covariances(block, base)
            for a, b in pairs(C):
                trace += (1 + (a != b)) * (K[:, a, b] @ change[..., a, b])
            total += torch.stack([change[..., a, b] for a, b in pairs(C)]).to(dtype).mT @ self.refit.squares(block, dtype)
        return total, trace


def pairs(size: int) -> list[tuple[int, int]]:
    """(a, b) with a ≤ b < size."""
    return [(a, b) for a in range(size) for b in range(a, size)]


@lru_cache(maxsize=8)
def places(size: int) -> Tensor:
    """Where entry (f, g) of a symmetric matrix sits in its upper triangle by rows (F, F)."""
    upper = torch.triu_indices(size, size)
    place = torch.empty(size, size, dtype=torch.long)
    place[upper[0], upper[1]] = place[upper[1], upper[0]] = torch.arange(upper.shape[1])
    return place


def congruent(H: Tensor, basis: Tensor) -> Tensor:
    """T⁻¹ H T⁻ᵀ with T = I ⊗ L_B, for H (…, P, P)."""
    F, P = basis.shape[0], H.shape[-1]

    def left(matrix: Tensor) -> Tensor:
        parts = matrix.reshape(*matrix.shape[:-2], P // F, F, P)
        solved: Tensor = torch.linalg.solve_triangular(basis.expand(*parts.shape[:-2], F, F), parts, upper=False)
        return solved.reshape(matrix.shape)

    return left(left(H).mT)
