"""Refits of a large last layer: many tasks at once by products with the features, and no P×P matrix
for a task.

As in `ssla.refit.weights.last_layer` the outputs of n rows under m tasks are one product with the
features, and so are the gradients. What differs is the determinant. With H₁ = H(θ̂) + JᵀΛ(f̃)J, the
curvature at θ̂ and of the new row,

    log|H̃(θ̃)| − log|H(θ̂)| = log|I + ΛK| + tr A + tr[log(I + A) − A],
    A = H₁^{-½} ΔH H₁^{-½},   ΔH = Σ_i J_iᵀ ΔΛ_i J_i.

The first two terms are exact: tr A = Σ_i tr(K_i ΔΛ_i) less what the new row explains. The last one,
about −½ tr A², is estimated with random vectors, the same for all tasks: of a large problem by a
sketch (`last_layer_sketch`), and by probes (`last_layer_probing`) where that is not accurate enough
or the problem is small. `Solved.error` states the standard error. Where no P×P matrix fits, blocks
of it take its place (`last_layer_blocks`).

`reference` computes the same for one task, without these tricks. What each of them brings was not
measured alone; `benchmarks/ssla_speed.py` measures all of them together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ssla._checks import warn
from ssla.curvature.jacobians import Features
from ssla.curvature.structure import NoFactorError, no_factor
from ssla.data import as_inputs
from ssla.likelihoods import Likelihood
from ssla.maths import linalg
from ssla.refit.increments import FISHER, OBSERVED, at_mode
from ssla.refit.weights.anderson import Found, Progress, Slope, ascend
from ssla.refit.weights.contrasts import Contrasts
from ssla.refit.weights.last_layer_blocks import (
    SharedBlocks,
    shared_blocks,
    vectors_that_fit,
)
from ssla.refit.weights.last_layer_curvature import (
    SharedFactor,
    SharedStructure,
    factor_bytes,
    shared_factor,
    shared_structure,
)
from ssla.refit.weights.last_layer_probing import (
    MORE_PROBES,
    NewRow,
    Probing,
    by_component,
    by_output,
    weighted,
)
from ssla.refit.weights.last_layer_sketch import (
    Sampled,
    SharedVectors,
    estimate_remainder,
    sampling,
    shared_vectors,
    systematic,
)
from ssla.refit.weights.refit_rows import Block, PriorChange, TrainingRows, check_seen, open_rows
from ssla.refit.weights.solved import FROZEN, Options, Solved, own_increment, own_pull
from ssla.report import AS_IS

if TYPE_CHECKING:
    from ssla.posterior import Posterior

SHORTER = 0.7  # of the linearised step, as in `last_layer_group`
SINGLE_TOLERANCE = 1e-6  # a guess: from this tolerance on, classes are refitted in single precision
CACHE_ELEMENTS = 1 << 18  # a guess: rows × tasks × outputs worked on together, to stay in the cache
MOST_TASKS = 64  # a guess
# A guess: the precision of an output at the new row below which that row does not explain it.
RARE_OUTPUT = 1e-4
# Guesses: the standard error in log density at which probing ends, of small and of large problems.
ERROR, LARGE_ERROR = 5e-4, 2e-3
LARGE = 2e7  # a guess: rows × parameters
RARE_ERROR = 10.0  # a guess: by which the error of a rare y may be larger
ENOUGH = 1.5  # a guess: times that error; more of it is not worth probes
# Guesses: the first for rare y, the second where that is not enough.
FEW_ROWS_SKETCHED, MANY_ROWS_SKETCHED = ROWS_SKETCHED = 512, 2048
# A guess, times the error of a certain y: a y with a larger one (p below 0.04) is rare.
LIKELY = 5.0
OFFSET = 0.5  # of systematic sampling; a guess


@dataclass(frozen=True, eq=False)
class ProductsRefit:
    """All refits of one posterior's last layer at inputs x. `solve` takes any tasks (row of x, y).

    Points are δ' (m, P): outputs × whitened features. Everything that is a product is in `dtype`,
    sums over rows of increments are in float64.
    """

    posterior: Posterior
    options: Options
    rows: TrainingRows  # whitened features in `dtype`
    features: Tensor  # of x, whitened (N, F), in `dtype`
    f: Tensor  # f̂ at x (N, C)
    basis: Tensor  # L_B (F, F): φ' = L_B⁻¹φ, δ' = L_Bᵀδ
    gradient: Tensor  # g₀ = ∇(ℓ_D + log π)(θ̂) (P,)
    shared: SharedFactor | SharedBlocks | SharedStructure
    # the observed curvature at θ̂ is not positive definite: all tasks use the Fisher
    fallback: bool
    prior_precision: Tensor  # in the basis (C, F, F)

    @property
    def large(self) -> bool:
        return is_large(self.posterior)

    def target(self, log_density: Tensor) -> Tensor:
        """The standard error in log density at which probing ends, from densities that are nearly
        right (m,).

        Of a large problem it is LARGE_ERROR/√p for a probability p: errors e of log probabilities
        change the predictive by a Kullback–Leibler divergence of about ½ Σ p e².
        """
        if not self.large:
            return torch.full_like(log_density, ERROR)
        return LARGE_ERROR * (-0.5 * log_density.clamp(max=0)).exp().clamp(max=RARE_ERROR)

    @cached_property
    def vectors(self) -> SharedVectors | None:
        """Of a large problem whose rows are kept, where they fit."""
        if not self.large or self.rows.kept is None or not isinstance(self.shared, SharedFactor):
            return None
        each = self.dtype.itemsize * self.posterior.statistics.n * self.outputs
        if each * len(self.shared.vectors) > self.posterior.memory_budget // 4:
            return None
        blocks = list(self.rows)
        return shared_vectors(
            blocks, self.shared.vectors, [self.covariances(block) for block in blocks]
        )

    @property
    def law(self) -> Likelihood:
        """Of the new observation."""
        return self.posterior.likelihood.predictive

    @property
    def dtype(self) -> torch.dtype:
        return self.features.dtype

    @property
    def outputs(self) -> int:
        return self.f.shape[1]

    @property
    def fisher(self) -> bool:
        return self.shared.kind == FISHER

    @property
    def tasks_at_once(self) -> int:
        P, C = self.gradient.numel(), self.outputs
        state = self.dtype.itemsize * P * (3 * self.options.memory + 8 + C + 4 * MORE_PROBES)
        most = max(self.posterior.memory_budget // 8 // state, 1)
        return most if self.rows.kept is None else min(most, MOST_TASKS)

    @cached_property
    def prior(self) -> PriorChange:
        return PriorChange(self.posterior.bound_prior, self.posterior.theta)

    def original(self, point: Tensor) -> Tensor:
        """δ' (m, P) -> δ (m, P) in float64."""
        parts = point.double().reshape(-1, self.basis.shape[0])
        solved: Tensor = torch.linalg.solve_triangular(self.basis.mT, parts.mT, upper=True)
        return solved.mT.reshape(point.shape)

    def to_basis(self, gradient: Tensor) -> Tensor:
        """A gradient (P,) in the coordinates δ'."""
        parts = gradient.reshape(-1, self.basis.shape[0])
        solved: Tensor = torch.linalg.solve_triangular(self.basis, parts.mT, upper=False)
        return solved.mT.reshape(gradient.shape).to(self.dtype)

    @cached_property
    def _memo(self) -> dict[int, Tensor]:
        """`covariances` of kept blocks, while they fit. (A kept block lives as long as we do.)"""
        return {}

    def covariances(self, block: Block) -> Tensor:
        known = self._memo.get(id(block))
        if known is None:
            assert not isinstance(self.shared, SharedBlocks)
            known = self.shared.covariances(block.x)
            used = sum(part.numel() * part.element_size() for part in (*self._memo.values(), known))
            if self.rows.kept is not None and used <= self.posterior.memory_budget // 8:
                self._memo[id(block)] = known
        return known

    # --- one group of tasks ----------------------------------------------------------------

    def solve(self, where: Tensor, y: Tensor, progress: Progress | None = None) -> Solved:
        """Tasks (row of x, y): the three increments at each one's own mode."""
        group = Group(self, where, y)
        found = self._ascend(group, progress)
        precision = group.precision(found.point)
        new = None if self.options.logdet == FROZEN else NewRow.of(group.K, precision)
        changes = group.changes(found.point, new)
        likelihood, prior = group.values(found.point, changes)
        curvature = group.curvature(found.point, precision, new, changes, likelihood + prior)
        fallback = torch.full_like(curvature.positive, self.fallback)
        finite = torch.isfinite(likelihood + prior + curvature.value)
        return Solved(
            likelihood,
            prior,
            curvature.value,
            fallback,
            found.converged & curvature.positive & finite,
            found.steps,
            found.norm.double(),
            curvature.error,
        )

    def stuck(self, where: Tensor, y: Tensor) -> Tensor:
        """Never: f is linear in a last layer, and refits of it are quick."""
        return torch.zeros(len(where), dtype=torch.bool)

    def modes(self, where: Tensor, y: Tensor) -> Tensor:
        """θ̃ (M, P)."""
        found = self._ascend(Group(self, where, y))
        return self.posterior.theta + self.original(found.point)

    def _ascend(self, group: Group, progress: Progress | None = None) -> Found:
        options = self.options
        return ascend(
            group.evaluate,
            group.start(),
            tolerance=options.tolerance,
            max_steps=options.max_steps,
            memory=options.memory,
            progress=progress,
        )


class Curvature(NamedTuple):
    """−½[log|H̃(θ̃)| − log|H(θ̂)|] of m tasks, where H̃ is positive definite, and the standard
    error of the value. All (m,).
    """

    value: Tensor
    positive: Tensor
    error: Tensor


@dataclass(frozen=True, eq=False)
class Group:
    """m tasks that are solved together."""

    refit: ProductsRefit
    where: Tensor
    y: Tensor

    def take(self, tasks: Tensor) -> Group:
        """Some of the tasks, with what was computed of them."""
        if len(tasks) == len(self.y):
            return self
        part = Group(self.refit, self.where[tasks], self.y[tasks])
        known = ("phi", "f", "pulled", "K", "root")
        part.__dict__.update(
            {name: self.__dict__[name][tasks] for name in known if name in self.__dict__}
        )
        return part

    @cached_property
    def phi(self) -> Tensor:
        return self.refit.features[self.where]

    @cached_property
    def f(self) -> Tensor:
        return self.refit.f[self.where]

    @cached_property
    def pulled(self) -> Tensor:
        """U = H⁻¹Jᵀ at each task's own input (m, C, P)."""
        places, index = self.where.unique(return_inverse=True)
        phi = self.refit.features[places]
        C = self.refit.outputs
        J = torch.einsum("ab,nf->nabf", torch.eye(C, dtype=phi.dtype), phi).reshape(
            len(places) * C, -1
        )
        return self.refit.shared.solve(J).reshape(len(places), C, -1)[index]

    @cached_property
    def K(self) -> Tensor:
        """J H⁻¹ Jᵀ (m, C, C), in float64."""
        blocks = self.pulled.reshape(*self.pulled.shape[:2], self.refit.outputs, -1)
        K = torch.einsum("macf,mf->mac", blocks, self.phi).double()
        return (K + K.mT) / 2

    @cached_property
    def root(self) -> Tensor:
        return linalg.root(self.K)

    def push(self, point: Tensor) -> Tensor:
        """J δ at each task's own input (m, C)."""
        return torch.einsum(
            "mcf,mf->mc", point.reshape(len(point), self.refit.outputs, -1), self.phi
        )

    def start(self) -> Tensor:
        """SHORTER times the step to the refit of the linearised model, H⁻¹Jᵀu: on the way there
        the curvature mostly grows.
        """
        refit = self.refit
        if not refit.law.linear_domain:
            return torch.zeros(len(self.y), refit.gradient.numel(), dtype=refit.dtype)
        pull = at_mode(refit.law, self.y, self.f, self.root).pull
        return SHORTER * torch.einsum("mc,mcp->mp", pull.to(refit.dtype), self.pulled)

    def evaluate(self, point: Tensor, tasks: Tensor) -> Slope:
        """The gradient of ℓ_D + log p(y|x,·) + log π − g₀ᵀ(θ−θ̂), by differences from θ̂ row by
        row; and H₁⁻¹ of it.
        """
        return self.take(tasks)._evaluate(point)

    def _evaluate(self, point: Tensor) -> Slope:
        refit, law = self.refit, self.refit.law
        likelihood = refit.posterior.likelihood
        m, C = self.f.shape
        total = torch.zeros(C * m, self.phi.shape[1], dtype=refit.dtype)
        outside = torch.zeros(m, dtype=torch.bool)
        for part, f in self.outputs(point):
            change = likelihood.score_change(part.y, f, part.f)
            if not likelihood.linear_domain:
                outside |= ~torch.isfinite(likelihood.log_prob(part.y, f)).all(-1)
            total += by_component(weighted(change, part)).flatten(0, 1) @ part.x
        gradient = total.reshape(C, m, -1).movedim(0, 1).reshape(m, -1)
        own = self.f + self.push(point).double()
        gradient = gradient + self.pull(law.score(self.y, own)) + self.prior_gradient(point)
        if refit.posterior.mode == AS_IS:
            gradient = gradient + refit.to_basis(refit.gradient)
        if not law.linear_domain:
            outside |= ~torch.isfinite(law.log_prob(self.y, own))
            gradient = torch.where(outside.unsqueeze(-1), torch.nan, gradient)
        # (H + JᵀΛJ)⁻¹g = z − U(I + ΛK)⁻¹ΛJz with z = H⁻¹g
        z = refit.shared.solve(gradient)
        u = own_pull(law, self.y, own, self.root, self.push(z).double())
        return Slope(gradient, z - torch.einsum("mc,mcp->mp", u.to(z.dtype), self.pulled))

    def pull(self, u: Tensor) -> Tensor:
        """Jᵀu at each task's own input (m, P)."""
        return (u.to(self.phi.dtype).unsqueeze(-1) * self.phi.unsqueeze(1)).flatten(1)

    def prior_gradient(self, point: Tensor) -> Tensor:
        """∇log π(θ̂ + δ) − ∇log π(θ̂) in the coordinates δ' (m, P)."""
        parts = point.reshape(len(point), self.refit.outputs, -1).movedim(1, 0)
        return -(parts @ self.refit.prior_precision).movedim(0, 1).reshape(point.shape)

    def chunks(self, columns: int) -> Iterator[tuple[Block, Block, slice]]:
        """Each block of rows in parts of CACHE_ELEMENTS/columns: the block, a part of it, and
        where that is.
        """
        size = max(CACHE_ELEMENTS // columns, 64)
        for block in self.refit.rows:
            for start in range(0, len(block.f), size):
                part = slice(start, start + size)
                weights = None if block.weights is None else block.weights[part]
                yield block, Block(block.x[part], block.f[part], block.y[part], weights), part

    def moved(self, x: Tensor, step: Tensor) -> Tensor:
        """φᵀΔ of rows under m steps: x (b, F), step (C, m, F) -> (m, b, C), stored
        component-major.
        """
        moved: Tensor = (step.flatten(0, 1) @ x.mT).unflatten(0, step.shape[:2])
        return moved.movedim(0, -1)

    def outputs(self, point: Tensor) -> Iterator[tuple[Block, Tensor]]:
        """Parts of the rows, with the outputs of all tasks on them (m, b, C)."""
        m, C = self.f.shape
        step = by_output(point, C)
        for _, part, _ in self.chunks(m * C):
            yield part, self.moved(part.x, step).add_(part.f)

    def values(self, point: Tensor, changes: _Changes) -> tuple[Tensor, Tensor]:
        """Likelihood and prior increments (m,), the former with the tilt."""
        refit = self.refit
        step = refit.original(point)
        total = changes.log_prob + refit.law.log_prob(self.y, self.f + self.push(point).double())
        if refit.posterior.mode != AS_IS:
            total = total - step @ refit.gradient
        return total, refit.prior.value(step)

    # --- determinants ----------------------------------------------------------------------

    def precision(self, point: Tensor) -> Tensor:
        """Λ of each new row at its own f̃ (m, C, C)."""
        law, own = self.refit.law, self.f + self.push(point).double()
        return law.fisher(own) if self.refit.fisher else law.precision(self.y, own)

    def curvature(
        self,
        point: Tensor,
        precision: Tensor,
        new: NewRow | None,
        changes: _Changes,
        others: Tensor,
    ) -> Curvature:
        """By the terms of the module's docstring.  others: the sum of the other increments (m,)."""
        refit = self.refit
        value, positive = own_increment(self.root, precision)
        error = torch.zeros_like(value)
        if new is None:
            return Curvature(value, positive, error)
        if isinstance(refit.shared, SharedBlocks):
            return self.by_blocks(point, new, Curvature(value, positive, error), refit.shared)
        trace = changes.trace
        assert trace is not None
        value = value - 0.5 * trace
        target = refit.target(
            others + value
        )  # of the log densities, but for what is estimated here
        rest, left = torch.zeros_like(value), positive & (trace != 0)
        if changes.rows is not None:
            for count in ROWS_SKETCHED:
                tasks = left.nonzero().squeeze(-1)
                if count < MANY_ROWS_SKETCHED:  # likely ones need more rows
                    tasks = tasks[target[tasks] > LIKELY * LARGE_ERROR]
                if tasks.numel():
                    rest[tasks], error[tasks] = self.sketch(tasks, new, changes.rows, count)
                    left[tasks] = ~(error[tasks] <= ENOUGH * target[tasks])
        tasks = left.nonzero().squeeze(-1)
        if tasks.numel():
            probing = Probing(
                self.take(tasks), point[tasks], new.take(tasks), trace[tasks], target[tasks]
            )
            rest[tasks], good, spread = probing.run()
            positive[tasks] &= good
            error[tasks] = 0.5 * spread
        return Curvature(value - 0.5 * rest, positive, error)

    def by_blocks(
        self, point: Tensor, new: NewRow, own: Curvature, shared: SharedBlocks
    ) -> Curvature:
        """As `ssla.refit.weights.last_layer_blocks` describes."""
        likelihood, C = self.refit.posterior.likelihood, self.refit.outputs
        value, error = own.value.clone(), own.error.clone()
        y, before, fisher = shared.rows.y, shared.rows.f, shared.kind == FISHER
        diagonal = likelihood.precision_diagonal(y, before, fisher)
        for task, step in enumerate(point.reshape(len(point), C, -1)):
            f = before + shared.rows.x @ step.mT
            change = likelihood.precision_diagonal(y, f, fisher) - diagonal
            by_rows = shared.rows.weighted((shared.variances * change).sum(1))
            size = shared.variances.sum(1) * likelihood.score_change(y, f, before).norm(dim=-1)
            if not bool(size.any()):
                continue
            pi = sampling(size, MANY_ROWS_SKETCHED)
            rows = systematic(pi, OFFSET)
            rest = shared.estimate(
                likelihood, rows, pi[rows], step, self.phi[task], new.explained[task]
            )
            value[task] -= 0.5 * (float(by_rows.sum(dtype=torch.float64)) + rest.value)
            error[task] = 0.5 * rest.error
        return Curvature(value, own.positive & torch.isfinite(value), error)

    def sketch(
        self,
        tasks: Tensor,
        new: NewRow,
        changed: _Rows,
        count: int,
    ) -> tuple[Tensor, Tensor]:
        """tr[log(I + A) − A] of some tasks from the shared vectors on `count` rows.

        And half of its standard error.
        """
        refit, shared = self.refit, self.refit.vectors
        assert shared is not None
        w = shared.w.reshape(len(shared.w), refit.outputs, -1)
        outputs = changed.outputs
        found = []
        # A task has its own rows and fills the cache: a guess that tasks together would not be
        # faster.
        for task in tasks.tolist():
            pi = sampling(changed.sizes[task], count)
            rows = systematic(pi, OFFSET)
            inverse = 1 / pi[rows]
            weight = inverse if shared.weights is None else inverse * shared.weights[rows]
            c = changed.across[changed.places[task]].index_select(0, rows)  # (b, C, r)
            shrink = new.shrink[task, outputs].to(c.dtype) @ (w @ self.phi[task]).mT
            explained = new.explained[task, outputs][:, outputs].to(c.dtype)
            v = shared.v.index_select(0, rows)  # a third of the time of [rows]
            v.flatten(0, 1).addmm_(c.flatten(0, 1), shrink, alpha=-1)
            K = shared.K.index_select(0, rows) - c @ explained @ c.mT
            f = changed.f[:, task].index_select(1, rows).mT.contiguous()
            sampled = Sampled(shared.y[rows], shared.f[rows], f, weight, inverse, v, K)
            found.append(estimate_remainder(refit.posterior.likelihood, sampled, refit.fisher))
        value, error = torch.tensor(found, dtype=torch.float64).unbind(1)
        return value, 0.5 * error

    def changes(self, point: Tensor, new: NewRow | None) -> _Changes:
        """One pass over the rows at the modes, for log likelihoods and, with `new`, traces."""
        refit, likelihood, fisher = self.refit, self.refit.posterior.likelihood, self.refit.fisher
        m, C = self.f.shape
        log_prob = torch.zeros(m, dtype=torch.float64)
        if new is None or isinstance(refit.shared, SharedBlocks):
            for part, f in self.outputs(point):
                log_prob += self.log_prob_change(part, f)
            return _Changes(log_prob)
        places, first = _distinct_inputs(self.where)
        # Outputs that the new row says nothing about have no part in G.
        rows = (
            (new.explained.diagonal(dim1=-2, dim2=-1).abs() > RARE_OUTPUT)
            .any(0)
            .nonzero()
            .squeeze(-1)
        )
        explained = new.explained[:, rows][:, :, rows]
        F = self.phi.shape[1]
        across = self.pulled[first][:, rows].reshape(
            len(first), len(rows), C, F
        )  # input, row of U, output, feature
        across = across.permute(2, 0, 1, 3).reshape(C, len(first) * len(rows), F).contiguous()
        tasks_at = [(places == k).nonzero().squeeze(-1) for k in range(len(first))]
        trace = torch.zeros(m, dtype=torch.float64)
        step = by_output(point, C)
        sizes, outputs, kept = [], [], []
        for block, part, place in self.chunks(C * max(m, len(first) * len(rows), C)):
            f = self.moved(part.x, step).add_(part.f)
            log_prob += self.log_prob_change(part, f)
            K = refit.covariances(block)[place]
            change = likelihood.precision_trace(part.y, f, K, fisher)
            change = change - likelihood.precision_trace(part.y, part.f.unsqueeze(0), K, fisher)
            change = change if part.weights is None else change * part.weights
            trace += change.sum(-1, dtype=torch.float64)
            c = self.moved(part.x, across).unflatten(0, (len(first), len(rows)))
            c = c.permute(0, 2, 3, 1).contiguous()  # (k, b, C, rows of U)
            for tasks, along in zip(tasks_at, c, strict=True):
                own = f.movedim(-1, 0)[:, tasks].movedim(0, -1)  # component-major, as f
                inside = likelihood.precision_change_along(
                    part.y, own, part.f, along, part.weights, fisher
                )
                trace[tasks] -= (explained[tasks] * inside).sum((1, 2))
            if refit.vectors is not None:
                variances = K.diagonal(dim1=-2, dim2=-1).sum(-1)
                sizes.append(variances * likelihood.score_change(part.y, f, part.f).norm(dim=-1))
                outputs.append(f.movedim(-1, 0))
                kept.append(c)
        if refit.vectors is None:
            return _Changes(log_prob, trace)
        across = torch.cat(kept, 1)
        changed = _Rows(places, rows, torch.cat(sizes, 1), torch.cat(outputs, 2), across)
        return _Changes(log_prob, trace, changed)

    def log_prob_change(self, part: Block, f: Tensor) -> Tensor:
        """Σ_i of the change of log p(y_i|f_i) from θ̂, with f (m, b, C): (m,) in float64."""
        change = self.refit.posterior.likelihood.log_prob_difference(part.y, f, part.f)
        change = change if part.weights is None else change * part.weights
        return change.sum(-1, dtype=torch.float64)


class _Rows(NamedTuple):
    """How the training rows change with m tasks at k inputs: what a sketch of the determinants
    needs of them.
    """

    places: Tensor  # of each task's input among the k (m,)
    outputs: Tensor  # those of the new rows that have a part (r,)
    # (m, n): tr K_i times the change of a row's score, which for classes is as large as that of
    # its curvature.
    sizes: Tensor
    f: Tensor  # at the modes (C, m, n)
    across: Tensor  # J_iUᵀ (k, n, C, r)


class _Changes(NamedTuple):
    """What the training rows add to the increments of m tasks."""

    log_prob: Tensor  # of all rows, at the mode less at θ̂ (m,)
    # tr H₁⁻¹ΔH = Σ_i tr(K_iΔΛ_i) − tr(G Σ_i c_iΔΛ_ic_iᵀ), c_i = U J_iᵀ (m,)
    trace: Tensor | None = None
    rows: _Rows | None = None  # where there are shared vectors


def _distinct_inputs(where: Tensor) -> tuple[Tensor, Tensor]:
    """The number of each task's input (m,), and the first task at each distinct input (k,)."""
    unique, index = where.unique(return_inverse=True)
    first = torch.stack([(index == k).nonzero()[0, 0] for k in range(len(unique))])
    return index, first


def is_large(posterior: Posterior) -> bool:
    """Whether a product with the features takes long enough for larger errors to be worth it."""
    return posterior.statistics.n * posterior.theta.numel() > LARGE


def open_products(
    posterior: Posterior, x: Any, options: Options, data: Any, single: bool
) -> ProductsRefit:
    """Stage one: a pass over the data for gradient and basis at θ̂, one for the curvature.

    single: products in float32.
    """
    network, likelihood = posterior.network, posterior.likelihood
    C, dtype = network.outputs, torch.float32 if single else torch.float64

    def prepare(inputs: Any) -> tuple[Tensor, Tensor]:
        f, J = network.linearise(inputs, posterior.theta)
        assert isinstance(J, Features)
        return J.with_ones().to("cpu", dtype), f.double()

    rows = replace(open_rows(posterior, data, prepare), size=_bytes)
    F = posterior.theta.numel() // C
    n, gradient = 0, torch.zeros(C * F, dtype=torch.float64)
    middle = torch.zeros(F, F, dtype=torch.float64)
    for block in rows:
        n += block.y.shape[0]
        phi = block.x.double()
        gradient += Features(phi, C).pull(block.weighted(likelihood.score(block.y, block.f)))
        level = block.weighted(likelihood.fisher(block.f)).diagonal(dim1=-2, dim2=-1).mean(-1)
        middle += (phi * level.unsqueeze(-1)).mT @ phi
    check_seen(posterior, n, gradient)
    prior_precision = posterior.bound_prior.precision(posterior.theta).reshape(C, F)
    whole = factor_bytes(C, F, dtype) <= posterior.memory_budget
    vectors = 0
    if not whole and rows.kept is not None:
        vectors = vectors_that_fit(n, C, F, dtype.itemsize, posterior.memory_budget)
    basis = torch.eye(F, dtype=torch.float64)
    if whole or vectors:
        basis, info = torch.linalg.cholesky_ex(middle + torch.diag(prior_precision.mean(0)))
        if int(info):
            raise NoFactorError(no_factor(prior_precision.flatten(), " on the data to refit on"))

    def white(phi: Tensor) -> Tensor:
        if not (whole or vectors):
            return phi
        found: Tensor = torch.linalg.solve_triangular(basis, phi.double().mT, upper=False)
        return found.mT.to(dtype).contiguous()

    def ready(block: Block) -> Block:
        # component-major, as the outputs of many tasks
        by_class = block.f.to(dtype).mT.contiguous().mT
        y = block.y.to(dtype) if block.y.is_floating_point() else block.y
        weights = None if block.weights is None else block.weights.to(dtype)
        return Block(white(block.x), by_class, y, weights)

    rows = rows.changed(ready)
    half = torch.linalg.solve_triangular(basis, torch.diag_embed(prior_precision), upper=False)
    prior = torch.linalg.solve_triangular(basis, half.mT, upper=False).to(dtype)
    shared: SharedFactor | SharedBlocks | SharedStructure | None = None
    # Single precision is for classes, whose observed curvature is the Fisher.
    kinds: tuple[str, ...] = (
        (OBSERVED, FISHER) if options.curvature == OBSERVED and not single else (options.curvature,)
    )
    if not (whole or vectors):
        warn(
            f"No matrix of {posterior.theta.numel():,} × {posterior.theta.numel():,} fits the "
            "memory budget, so the determinants of the refits are those of the fitted structure, "
            "with an error that is not known (with kfac 0.1 in log probability was seen). Fit "
            "with a larger memory_budget, or use refit='output'.",
            RuntimeWarning,
        )
        shared, kinds = shared_structure(posterior.operator, C, options.curvature, dtype), ()
    contrasts = _contrasts(posterior, prior_precision)
    for kind in kinds:
        if vectors:
            shared = shared_blocks(rows, likelihood, prior, kind, vectors)
        else:
            shared = shared_factor(rows, likelihood, prior, kind, contrasts)
        if shared is not None:
            break
    if shared is None:
        if single:
            return open_products(posterior, x, options, data, single=False)
        raise NoFactorError(no_factor(prior_precision.flatten(), " on the data to refit on"))
    parts = [
        prepare(network.cast(part))
        for part in network.chunks(as_inputs(x), posterior.memory_budget)
    ]
    return ProductsRefit(
        posterior=posterior,
        options=options,
        rows=rows,
        features=white(torch.cat([phi for phi, _ in parts])),
        f=torch.cat([f for _, f in parts]),
        basis=basis,
        gradient=gradient + posterior.bound_prior.gradient(posterior.theta),
        shared=shared,
        fallback=shared.kind != options.curvature,
        prior_precision=prior,
    )


def _contrasts(posterior: Posterior, prior_precision: Tensor) -> Contrasts | None:
    """Contrasts of classes where the sum over them keeps the prior's curvature and no gradient
    moves along it.
    """
    same = torch.equal(prior_precision, prior_precision[:1].expand_as(prior_precision))
    if not (posterior.likelihood.shift_invariant and same) or posterior.mode == AS_IS:
        return None
    return Contrasts(posterior.network.outputs)


def _bytes(block: Block) -> int:
    return sum(part.numel() * part.element_size() for part in (block.x, block.f, block.y))
