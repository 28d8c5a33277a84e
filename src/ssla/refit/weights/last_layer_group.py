"""A group of last-layer refits: gradients, steps, increments and curvatures of m tasks by
products over the features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ssla.curvature.dense import DenseOperator
from ssla.curvature.jacobians import Features
from ssla.maths import linalg
from ssla.refit.increments import FISHER, at_mode
from ssla.refit.weights.anderson import Slope
from ssla.refit.weights.contrasts import Contrasts
from ssla.refit.weights.refit_rows import Block
from ssla.refit.weights.solved import FROZEN, at_once, own_increment, own_pull
from ssla.report import AS_IS

if TYPE_CHECKING:
    from ssla.refit.weights.last_layer import LastLayerRefit

SHORTER = 0.7  # of the linearised step (measured: fewest gradients)
MANY_FEATURES = 24  # from here on the products over all rows are worth single precision
LARGE_CHANGE = 10.0
SINGLE_TOLERANCE = 1e-6  # from this tolerance on determinants may be in single precision
SMALL_STEP = 0.02  # posterior standard deviations
CACHED_TASKS = 8  # whose ΔΛ are formed together
SMALL_ERROR = 1e-4  # in log density: of the trace alone, where ΔH is small
# by which the square of the bound on ‖H⁻¹ΔH‖ exceeds that error (measured: 140 and more, ten
# classes)
LOOSE = 50.0
CACHE_BYTES = 1 << 20  # of matrices factorised together: more fall out of the processor's cache


@dataclass(frozen=True, eq=False)
class Base:
    """The curvature at θ̂ of one kind, in the basis: H = L Lᵀ (P, P).

    contrasts: the outputs are contrasts of classes, Qᵀf (see `ssla.refit.weights.contrasts`); None:
    they are f.
    """

    kind: str
    factor: Tensor
    outputs: int
    contrasts: Contrasts | None = None

    @cached_property
    def matrix(self) -> Tensor:
        return self.factor @ self.factor.mT

    @cached_property
    def operator(self) -> DenseOperator:
        return DenseOperator(self.factor)

    @cached_property
    def single_inverse(self) -> Tensor:
        """H⁻¹ in single precision: it steers steps."""
        return torch.cholesky_inverse(self.factor).float()

    def solve(self, values: Tensor) -> Tensor:
        """H⁻¹ of each row (m, P), in its precision."""
        if values.dtype == torch.float32:
            return values @ self.single_inverse
        return torch.cholesky_solve(values.mT, self.factor).mT

    @cached_property
    def least(self) -> float:
        """The smallest eigenvalue of H."""
        return float(torch.linalg.eigvalsh(self.matrix)[0])

    @cached_property
    def packed_inverse(self) -> Tensor:
        """H⁻¹ (pairs · v,) so that its product with a packed ΔH is tr H⁻¹ΔH."""
        C, F = self.outputs, self.factor.shape[0] // self.outputs
        blocks = torch.cholesky_inverse(self.factor).reshape(C, F, C, F)
        triangle = torch.triu_indices(F, F)
        twice = torch.where(triangle[0] == triangle[1], 1.0, 2.0)
        rows = []
        for a, b in pairs(C):
            block = (blocks[a, :, b, :] + blocks[a, :, b, :].mT) / 2
            rows.append((1 + (a != b)) * twice * block[triangle[0], triangle[1]])
        return torch.cat(rows)


class Change(NamedTuple):
    """ΔH of m tasks: of each the upper triangles of its pairs a ≤ b of outputs (m, pairs · v);
    and tr H⁻¹ΔH (m,).
    """

    packed: Tensor
    trace: Tensor


@dataclass(frozen=True, eq=False)
class Group:
    """m tasks that are solved together. Points are δ' (m, P) in the basis of `LastLayerRefit`."""

    refit: LastLayerRefit
    base: Base
    where: Tensor
    y: Tensor

    def take(self, rows: Tensor) -> Group:
        """Some of the tasks, with what was computed of them."""
        if len(rows) == len(self.y):
            return self
        part = Group(self.refit, self.base, self.where[rows], self.y[rows])
        part.__dict__.update(
            {
                name: self.__dict__[name][rows]
                for name in ("phi", "f", "root")
                if name in self.__dict__
            }
        )
        return part

    @cached_property
    def phi(self) -> Tensor:
        return self.refit.features[self.where]

    @cached_property
    def f(self) -> Tensor:
        return self.refit.f[self.where]

    def push(self, point: Tensor) -> Tensor:
        """J δ at each task's own input (m, C)."""
        return torch.einsum(
            "mcf,mf->mc",
            point.reshape(len(point), self.refit.outputs, -1),
            self.phi.to(point.dtype),
        )

    def pull(self, u: Tensor) -> Tensor:
        """Jᵀu at each task's own input (m, P)."""
        return (u.unsqueeze(-1) * self.phi.to(u.dtype).unsqueeze(1)).flatten(1)

    @cached_property
    def root(self) -> Tensor:
        """R with R Rᵀ = K = J H⁻¹ Jᵀ (m, C, C)."""
        places, index = self.where.unique(return_inverse=True)
        K = self.base.operator.covariance(Features(self.refit.features[places], self.refit.outputs))
        return linalg.root((K + K.mT) / 2)[index]

    def start(self) -> Tensor:
        """SHORTER times the step to the refit of the linearised model, H⁻¹Jᵀu: on the way there
        the curvature mostly grows.
        """
        if not self.refit.law.linear_domain:
            return torch.zeros(len(self.y), self.refit.gradient.numel(), dtype=torch.float64)
        return SHORTER * self.base.solve(
            self.pull(at_mode(self.refit.law, self.y, self.f, self.root).pull)
        )

    def evaluate(self, point: Tensor, tasks: Tensor) -> Slope:
        """The gradient of ℓ_D + log p(y|x,·) + log π − g₀ᵀ(θ−θ̂), by differences from θ̂ row by
        row; and (H + JᵀΛJ)⁻¹ of it.
        """
        return self.take(tasks)._evaluate(point)

    def _evaluate(self, point: Tensor) -> Slope:
        """In the precision of `point`."""
        refit, law, kind = self.refit, self.refit.law, point.dtype
        m, C = self.f.shape
        likelihood = refit.posterior.likelihood
        total = torch.zeros(C, m, self.phi.shape[1], dtype=kind)
        outside = torch.zeros(m, dtype=torch.bool)
        for _, block, f in self._blocks(point):
            if likelihood.softmax:  # y cancels
                score = likelihood.score_change(block.targets, f, block.f.unsqueeze(1))
            else:  # the scores before are those of the rows alone, once for all tasks
                before = likelihood.score(block.y, block.f).unsqueeze(1)
                score = likelihood.score(block.targets, f) - before
            if not likelihood.linear_domain:
                outside |= ~torch.isfinite(likelihood.log_prob(block.targets, f)).all(0)
            total += block.weighted(score).to(kind).movedim(-1, 0).mT @ block.x
        y, own = _of_kind(self.y, kind), self.f.to(kind) + self.push(point)
        gradient = total.movedim(0, 1).reshape(m, -1) + self.pull(law.score(y, own).to(kind))
        gradient = gradient + refit.prior_gradient(point)
        if refit.posterior.mode == AS_IS:
            gradient = gradient + refit.to_basis(refit.gradient.unsqueeze(0)).to(kind)
        if not law.linear_domain:
            outside |= ~torch.isfinite(law.log_prob(y, own))
            gradient = torch.where(outside.unsqueeze(-1), torch.nan, gradient)
        return Slope(gradient, self._step(gradient, y, own))

    def evaluate_newton(self, point: Tensor, tasks: Tensor) -> Slope:
        """The gradient, and each task's own H̃(θ)⁻¹ of it: Newton, for those that the shared H
        brings on too slowly.
        """
        group = self.take(tasks)
        size = at_once(self.refit.posterior.memory_budget, self.refit.gradient.numel())
        parts = [
            group.take(rows)._newton(point[rows]) for rows in torch.arange(len(point)).split(size)
        ]
        return Slope(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def _newton(self, point: Tensor) -> Slope:
        """Where H̃ is not positive definite, or not finite, the shared step."""
        now, own = self._evaluate(point), self.f + self.push(point)
        law, base = self.refit.law, self.base
        precision = law.fisher(own) if base.kind == FISHER else law.precision(self.y, own)
        change, _ = self._change(point, base, torch.float64)
        steps, gradients = [], now.gradient.split(self._matrices_at_once)
        for H, gradient, shared in zip(
            self._matrices(change, point, precision, base),
            gradients,
            now.step.split(self._matrices_at_once),
            strict=True,
        ):
            factor, info = torch.linalg.cholesky_ex(H)
            step = torch.cholesky_solve(gradient.unsqueeze(-1), factor).squeeze(-1)
            good = (info == 0) & torch.isfinite(step).all(-1)
            steps.append(torch.where(good.unsqueeze(-1), step, shared))
        return Slope(now.gradient, torch.cat(steps))

    def _step(self, gradient: Tensor, y: Tensor, own: Tensor) -> Tensor:
        """(H + JᵀΛJ)⁻¹g = z − H⁻¹Jᵀ(I + ΛK)⁻¹ΛJz with z = H⁻¹g."""
        z = self.base.solve(gradient)
        u = own_pull(self.refit.law, y, own, self.root.to(gradient.dtype), self.push(z))
        return z - self.base.solve(self.pull(u))

    def _blocks(self, point: Tensor) -> Iterator[tuple[Block, Block, Tensor]]:
        """Each block of training rows, also in the precision of `point`, with the outputs of all
        tasks on it: (b, m, C), stored component-major.
        """
        # Steps have the shape (C, F, m) here.
        step = point.reshape(len(point), self.refit.outputs, -1).permute(1, 2, 0).contiguous()
        for whole in self.refit.rows:
            block = self.refit.in_kind(whole, point.dtype)
            yield whole, block, (block.x @ step).add_(block.f.mT.unsqueeze(-1)).movedim(0, -1)

    def values(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Likelihood and prior increments (m,), the former with the tilt."""
        refit = self.refit
        likelihood = refit.posterior.likelihood
        step = refit.original(point)
        total = refit.law.log_prob(self.y, self.f + self.push(point))
        # differences do not cancel
        single = refit.options.tolerance >= SINGLE_TOLERANCE and not self.y.is_floating_point()
        for _, block, f in self._blocks(point.float() if single else point):
            change = likelihood.log_prob_difference(block.targets, f, block.f.unsqueeze(1))
            total = total + block.weighted(change).sum(0, dtype=torch.float64)
        if refit.posterior.mode != AS_IS:
            total = total - step @ refit.gradient
        return total, refit.prior.value(step)

    def curvature(self, point: Tensor, base: Base) -> tuple[Tensor, Tensor]:
        """−½[log|H̃(θ̃)| − log|H(θ̂)|] (m,), and where H̃ is positive definite."""
        own = self.f + self.push(point)
        precision = (
            self.refit.law.fisher(own)
            if base.kind == FISHER
            else self.refit.law.precision(self.y, own)
        )
        if self.refit.options.logdet == FROZEN:
            return own_increment(self.root, precision)
        size = at_once(self.refit.posterior.memory_budget, self.refit.gradient.numel())
        parts = [
            self.take(rows)._exact(point[rows], precision[rows], base)
            for rows in torch.arange(len(point)).split(size)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _exact(self, point: Tensor, precision: Tensor, base: Base) -> tuple[Tensor, Tensor]:
        """By Cholesky of H + ΔH + JᵀΛJ. With many features ΔH, a product over all rows, is formed
        in single precision and its trace with H⁻¹, to which the log determinant is proportional to
        first order, in double; the rest is off by less than 1e-7·‖ΔH‖/λ, λ the least eigenvalue of
        H (measured: 2e-10). Where ‖ΔH‖ > 10 λ, double precision throughout.

        A tolerance that single precision meets has all of it in single precision, but for the
        trace's sum, and no more than the trace where that is enough.
        """
        if self.phi.shape[1] < MANY_FEATURES or not self.refit.holds_in_single:
            half, positive = self._half_logdet(
                self._change(point, base, torch.float64).packed, point, precision, base
            )
            return -half, positive
        if self.refit.options.tolerance >= SINGLE_TOLERANCE:
            return self._in_single(point, precision, base)
        change, trace = self._change(point, base, torch.float32)
        large = (
            ((2 * change.square().sum(-1)).sqrt() > LARGE_CHANGE * base.least).nonzero().squeeze(-1)
        )
        change = change.double()
        if large.numel():
            change[large], trace[large] = self.take(large)._change(
                point[large], base, torch.float64
            )
        return self._with_trace(Change(change, trace), point, precision, base)

    def _in_single(self, point: Tensor, precision: Tensor, base: Base) -> tuple[Tensor, Tensor]:
        single, few = point.float(), (point.norm(dim=-1) < SMALL_STEP).nonzero().squeeze(-1)
        value, positive = (
            torch.empty(len(point), dtype=torch.float64),
            torch.zeros(len(point), dtype=torch.bool),
        )
        if few.numel() and self.refit.prior.gaussian:
            part = self.take(few)
            trace, bound = part._first_order(single[few], base)
            own, good = own_increment(part.root, precision[few])
            value[few], positive[few] = (
                own - 0.5 * trace,
                good & (bound.square() <= LOOSE * SMALL_ERROR),
            )
        for rest in (~positive).nonzero().squeeze(-1).split(CACHED_TASKS):
            if not rest.numel():  # `split` gives one empty part of nothing
                continue
            part = self.take(rest)
            change = part._change(single[rest], base, torch.float32)
            value[rest], positive[rest] = part._with_trace(
                change, point[rest], precision[rest], base
            )
        return value, positive

    def _with_trace(
        self, change: Change, point: Tensor, precision: Tensor, base: Base
    ) -> tuple[Tensor, Tensor]:
        missing = change.trace - change.packed.double() @ base.packed_inverse
        half, positive = self._half_logdet(change.packed, point, precision, base)
        return -half - 0.5 * missing, positive

    def _half_logdet(
        self, change: Tensor, point: Tensor, precision: Tensor, base: Base
    ) -> tuple[Tensor, Tensor]:
        """½ log|H + ΔH + JᵀΛJ| − ½ log|H| (m,) by ratios of pivots, in the precision of ΔH; and
        where it is positive definite.
        """
        pivots, infos = [], []
        for H in self._matrices(change, point, precision, base):
            factor, info = torch.linalg.cholesky_ex(H)
            pivots.append(factor.diagonal(dim1=-2, dim2=-1))
            infos.append(info)
        return (torch.cat(pivots).double() / base.factor.diagonal()).log().sum(-1), torch.cat(
            infos
        ) == 0

    @property
    def _matrices_at_once(self) -> int:
        return max(CACHE_BYTES // (8 * self.refit.gradient.numel() ** 2), 1)

    def _matrices(
        self, change: Tensor, point: Tensor, precision: Tensor, base: Base
    ) -> Iterator[Tensor]:
        """H + ΔH + JᵀΛJ of some tasks after others (k, P, P), in the precision of ΔH."""
        m, C, F, kind = len(self.y), base.outputs, self.phi.shape[1], change.dtype
        precision = precision if base.contrasts is None else base.contrasts.of_matrices(precision)
        own = torch.stack([precision[:, a, b] for a, b in pairs(C)], 1).unsqueeze(-1) * squared(
            self.phi
        ).unsqueeze(1)
        packed, prior_precision = (
            own.flatten(1).to(kind) + change,
            self.refit.prior.precision(self.refit.original(point)),
        )
        for part in torch.arange(m).split(self._matrices_at_once):
            H = (
                packed[part]
                .index_select(1, places(C, F))
                .reshape(-1, C * F, C * F)
                .add_(base.matrix.to(kind))
            )
            if prior_precision is not None:
                H += congruent(prior_precision[part], self.refit.basis).to(kind)
            yield H

    def _changes(self, point: Tensor, base: Base) -> Iterator[tuple[Block, Tensor]]:
        """Each block with Λ(f̃_i) − Λ(f̂_i) of its rows under all tasks: of the pairs a ≤ b
        (pairs, b, m).
        """
        if base.contrasts is not None:
            yield from self._class_changes(point, base.contrasts)
            return
        likelihood = self.refit.posterior.likelihood
        for whole, block, f in self._blocks(point):
            if base.kind == FISHER:
                change = likelihood.fisher(f) - likelihood.fisher(block.f).unsqueeze(1)
            else:
                change = likelihood.precision(block.targets, f) - likelihood.precision(
                    block.y, block.f
                ).unsqueeze(1)
            if bool(change.any()):
                yield (
                    whole,
                    block.weighted(change)
                    .movedim((-2, -1), (0, 1))
                    .flatten(0, 1)[upper(self.refit.outputs)],
                )

    def _class_changes(self, point: Tensor, contrasts: Contrasts) -> Iterator[tuple[Block, Tensor]]:
        for whole, block, f in self._blocks(point):
            before = self.refit.remember(
                whole, f"pairs {f.dtype}", partial(contrasts.pairs, block.f.mT)
            )
            change = contrasts.pairs(f.movedim(-1, 0)).sub_(before.unsqueeze(-1))
            yield whole, change if block.weights is None else change * block.weights.unsqueeze(-1)

    def _change(self, point: Tensor, base: Base, dtype: torch.dtype) -> Change:
        """ΔH = Σ_i (Λ(f̃_i) − Λ(f̂_i)) ⊗ φφᵀ: a product of the tasks' ΔΛ with the rows' shared
        vech(φφᵀ).
        """
        m, F, count = len(point), self.phi.shape[1], len(pairs(base.outputs))
        total = torch.zeros(m * count, F * (F + 1) // 2, dtype=dtype)
        trace = torch.zeros(m, dtype=torch.float64)
        for block, change in self._changes(point, base):
            trace += torch.einsum(
                "pb,pbm->m", self.refit.covariances(block, base).to(change.dtype), change
            )
            total.addmm_(
                change.to(dtype).movedim(-1, 0).reshape(m * count, -1),
                self.refit.squares(block, dtype),
            )
        return Change(total.reshape(m, -1), trace)

    def _first_order(self, point: Tensor, base: Base) -> tuple[Tensor, Tensor]:
        """tr H⁻¹ΔH = Σ_i tr K_iΔΛ_i (m,), and Σ_i Σ_ab |K_i||ΔΛ_i| (m,), which bounds the norm
        of H⁻¹ΔH.
        """
        trace, bound = (
            torch.zeros(len(point), dtype=torch.float64),
            torch.zeros(len(point), dtype=torch.float64),
        )
        for block, change in self._changes(point, base):
            K = self.refit.covariances(block, base).to(change.dtype)
            trace += torch.einsum("pb,pbm->m", K, change)
            bound += torch.einsum("pb,pbm->m", K.abs(), change.abs())
        return trace, bound


def _of_kind(y: Tensor, kind: torch.dtype) -> Tensor:
    """y in a precision; whole numbers (classes) as they are."""
    return y.to(kind) if y.is_floating_point() else y


def pairs(size: int) -> list[tuple[int, int]]:
    """(a, b) with a ≤ b < size."""
    return [(a, b) for a in range(size) for b in range(a, size)]


@lru_cache(maxsize=8)
def upper(size: int) -> Tensor:
    """Where the pairs sit in a flat size × size matrix."""
    return torch.tensor([a * size + b for a, b in pairs(size)])


def squared(phi: Tensor) -> Tensor:
    """vech(φφᵀ), upper triangles by rows: (b, F) -> (b, F(F + 1)/2)."""
    triangle = torch.triu_indices(phi.shape[1], phi.shape[1])
    return phi[:, triangle[0]] * phi[:, triangle[1]]


@lru_cache(maxsize=8)
def places(outputs: int, size: int) -> Tensor:
    """Where each entry of a P×P matrix of symmetric blocks sits among the packed triangles of
    its pairs of outputs (P²,).
    """
    triangle = torch.triu_indices(size, size)
    place = torch.empty(size, size, dtype=torch.long)
    place[triangle[0], triangle[1]] = place[triangle[1], triangle[0]] = torch.arange(
        triangle.shape[1]
    )
    whole = torch.empty(outputs, size, outputs, size, dtype=torch.long)
    for k, (a, b) in enumerate(pairs(outputs)):
        whole[a, :, b, :] = whole[b, :, a, :] = k * triangle.shape[1] + place
    return whole.flatten()


def congruent(H: Tensor, basis: Tensor) -> Tensor:
    """T⁻¹ H T⁻ᵀ with T = I ⊗ L_B, for H (…, P, P)."""
    F, P = basis.shape[0], H.shape[-1]

    def left(matrix: Tensor) -> Tensor:
        parts = matrix.reshape(*matrix.shape[:-2], P // F, F, P)
        solved: Tensor = torch.linalg.solve_triangular(
            basis.expand(*parts.shape[:-2], F, F), parts, upper=False
        )
        return solved.reshape(matrix.shape)

    return left(left(H).mT)
