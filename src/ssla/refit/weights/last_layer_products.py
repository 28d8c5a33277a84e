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
from ssla.curvature.structure import NoFactorError, factorisation_error_text
from ssla.data import as_inputs
from ssla.likelihoods import Likelihood
from ssla.maths import linalg
from ssla.refit.increments import FISHER, OBSERVED, evaluate_at_mode
from ssla.refit.weights.anderson import Ascent, Progress, Slope, ascend
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
    factorise_shared,
    sample_structure,
)
from ssla.refit.weights.last_layer_probing import (
    MORE_PROBES,
    NewRow,
    Probing,
    outputs_first,
    split_by_output,
    times_row_weights,
)
from ssla.refit.weights.last_layer_sketch import (
    Sampled,
    SharedVectors,
    compute_shared_vectors,
    estimate_remainder,
    sample_systematically,
    sampling_probabilities,
)
from ssla.refit.weights.refit_rows import (
    Block,
    PriorChange,
    TrainingRows,
    check_same_data,
    open_rows,
)
from ssla.refit.weights.solved import (
    FROZEN,
    Options,
    Solved,
    curvature_of,
    new_row_increment,
    new_row_pull,
)
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
        """Return whether the problem is large, so that larger errors are allowed for less work."""
        return is_large_problem(self.posterior)

    def target(self, log_density: Tensor) -> Tensor:
        """Return the standard error of each log density (m,) at which probing ends.

        log_density (m,): log densities that are nearly right. Errors e of log probabilities change
        the predictive by a Kullback–Leibler divergence of about ½ Σ p e². A large problem therefore
        allows LARGE_ERROR/√p for a probability p.
        """
        if not self.large:
            return torch.full_like(log_density, ERROR)
        return LARGE_ERROR * (-0.5 * log_density.clamp(max=0)).exp().clamp(max=RARE_ERROR)

    @cached_property
    def vectors(self) -> SharedVectors | None:
        """The random vectors on all training rows; None where the sketch is not used.

        The sketch is for large problems whose rows are kept in memory, and only where the vectors
        fit a quarter of the memory budget.
        """
        if not self.large or self.rows.kept is None or not isinstance(self.shared, SharedFactor):
            return None
        bytes_of_one = self.dtype.itemsize * self.posterior.statistics.n * self.outputs
        if bytes_of_one * len(self.shared.vectors) > self.posterior.memory_budget // 4:
            return None
        blocks = list(self.rows)
        return compute_shared_vectors(
            blocks, self.shared.vectors, [self.covariances(block) for block in blocks]
        )

    @property
    def new_likelihood(self) -> Likelihood:
        """The likelihood of the new observation."""
        return self.posterior.likelihood.predictive

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the products with the features."""
        return self.features.dtype

    @property
    def outputs(self) -> int:
        """The number of outputs C."""
        return self.f.shape[1]

    @property
    def fisher(self) -> bool:
        """Return whether the Fisher information is the curvature of every row."""
        return self.shared.kind == FISHER

    @property
    def tasks_at_once(self) -> int:
        """The number of tasks that are solved together, within an eighth of the memory budget."""
        P = self.gradient.numel()
        C = self.outputs
        # An ascent keeps three vectors for each mixed round, and probing four for each probe.
        vectors = 3 * self.options.memory + 8 + C + 4 * MORE_PROBES
        task_bytes = self.dtype.itemsize * P * vectors
        most = max(self.posterior.memory_budget // 8 // task_bytes, 1)
        return most if self.rows.kept is None else min(most, MOST_TASKS)

    @cached_property
    def prior(self) -> PriorChange:
        """The change of log π with a step from θ̂."""
        return PriorChange(self.posterior.bound_prior, self.posterior.theta)

    def from_basis(self, point: Tensor) -> Tensor:
        """Return steps δ' (m, P) in the coordinates of θ, as δ (m, P) in float64."""
        by_output = point.double().reshape(-1, self.basis.shape[0])
        solved: Tensor = torch.linalg.solve_triangular(self.basis.mT, by_output.mT, upper=True)
        return solved.mT.reshape(point.shape)

    def to_basis(self, gradient: Tensor) -> Tensor:
        """Return a gradient (P,) in the coordinates δ', in the dtype of the products (P,)."""
        by_output = gradient.reshape(-1, self.basis.shape[0])
        solved: Tensor = torch.linalg.solve_triangular(self.basis, by_output.mT, upper=False)
        return solved.mT.reshape(gradient.shape).to(self.dtype)

    @cached_property
    def _stored_covariances(self) -> dict[int, Tensor]:
        """Results of `covariances`, by the id of a kept block.

        A kept block lives as long as this refit, so no other block has its id.
        """
        return {}

    def covariances(self, block: Block) -> Tensor:
        """Return K = J H⁻¹ Jᵀ at the rows of a block (b, C, C).

        Results are stored for kept blocks while they fit an eighth of the memory budget.
        """
        stored = self._stored_covariances
        covariances = stored.get(id(block))
        if covariances is None:
            assert not isinstance(self.shared, SharedBlocks)
            covariances = self.shared.covariances(block.x)
            used_bytes = sum(K.numel() * K.element_size() for K in (*stored.values(), covariances))
            if self.rows.kept is not None and used_bytes <= self.posterior.memory_budget // 8:
                stored[id(block)] = covariances
        return covariances

    # --- one group of tasks ----------------------------------------------------------------

    def solve(self, x_rows: Tensor, y: Tensor, progress: Progress | None = None) -> Solved:
        """Compute the three increments of m tasks, each at its own mode.

        x_rows (m,): the row of x of each task. y (m, …). Tasks that do not reach their mode, or
        whose determinant does not exist, are marked as not converged.
        """
        group = Group(self, x_rows, y)
        ascent = self._ascend(group, progress)
        precision = group.new_row_precision(ascent.point)
        # Frozen determinants need only the new row's own curvature, which `new_row_increment` has.
        new_row = None if self.options.logdet == FROZEN else NewRow.of(group.K, precision)
        changes = group.row_changes(ascent.point, new_row)
        likelihood, prior = group.likelihood_and_prior(ascent.point, changes)
        curvature = group.curvature_increments(
            ascent.point, precision, new_row, changes, likelihood + prior
        )
        finite = torch.isfinite(likelihood + prior + curvature.value)
        return Solved(
            likelihood,
            prior,
            curvature.value,
            fallback=torch.full_like(curvature.positive, self.fallback),
            converged=ascent.converged & curvature.positive & finite,
            steps=ascent.steps,
            norm=ascent.norm.double(),
            error=curvature.error,
        )

    def stuck(self, x_rows: Tensor, y: Tensor) -> Tensor:
        """Return False for each task (m,): f is linear in a last layer, so refits are quick."""
        return torch.zeros(len(x_rows), dtype=torch.bool)

    def modes(self, x_rows: Tensor, y: Tensor) -> Tensor:
        """Return θ̃ of each task (m, P)."""
        ascent = self._ascend(Group(self, x_rows, y))
        return self.posterior.theta + self.from_basis(ascent.point)

    def _ascend(self, group: Group, progress: Progress | None = None) -> Ascent:
        """Find the modes of a group's tasks with the shared preconditioner."""
        options = self.options
        return ascend(
            group.evaluate,
            group.start_point(),
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
    x_rows: Tensor
    y: Tensor

    def take(self, tasks: Tensor) -> Group:
        """Return the group of some of the tasks, with the cached values that were computed for
        them.
        """
        if len(tasks) == len(self.y):
            return self
        part = Group(self.refit, self.x_rows[tasks], self.y[tasks])
        cached = ("phi", "f", "pulled", "K", "root")
        part.__dict__.update(
            {name: self.__dict__[name][tasks] for name in cached if name in self.__dict__}
        )
        return part

    @cached_property
    def phi(self) -> Tensor:
        """The whitened features of each task's input (m, F)."""
        return self.refit.features[self.x_rows]

    @cached_property
    def f(self) -> Tensor:
        """The outputs at θ̂ of each task's input (m, C)."""
        return self.refit.f[self.x_rows]

    @cached_property
    def pulled(self) -> Tensor:
        """U = H⁻¹Jᵀ at each task's input (m, C, P), computed once for each distinct input."""
        distinct, index = self.x_rows.unique(return_inverse=True)
        phi = self.refit.features[distinct]
        C = self.refit.outputs
        J = torch.einsum("ab,nf->nabf", torch.eye(C, dtype=phi.dtype), phi).reshape(
            len(distinct) * C, -1
        )
        return self.refit.shared.solve(J).reshape(len(distinct), C, -1)[index]

    @cached_property
    def K(self) -> Tensor:
        """J H⁻¹ Jᵀ at each task's input (m, C, C), in float64."""
        blocks = self.pulled.reshape(*self.pulled.shape[:2], self.refit.outputs, -1)
        K = torch.einsum("macf,mf->mac", blocks, self.phi).double()
        return (K + K.mT) / 2

    @cached_property
    def root(self) -> Tensor:
        """R with R Rᵀ = K (m, C, C)."""
        return linalg.covariance_root(self.K)

    def push(self, point: Tensor) -> Tensor:
        """Return the change J δ of the outputs at each task's input (m, C), for steps δ' (m, P)."""
        return torch.einsum(
            "mcf,mf->mc", point.reshape(len(point), self.refit.outputs, -1), self.phi
        )

    def start_point(self) -> Tensor:
        """Return where the ascent starts (m, P): SHORTER times the linearised step H⁻¹Jᵀu.

        The step is shorter because the curvature mostly grows on the way. Where some outputs are
        not allowed the ascent starts at θ̂, which is allowed.
        """
        refit = self.refit
        if not refit.new_likelihood.linear_domain:
            return torch.zeros(len(self.y), refit.gradient.numel(), dtype=refit.dtype)
        u = evaluate_at_mode(refit.new_likelihood, self.y, self.f, self.root).pull
        return SHORTER * torch.einsum("mc,mcp->mp", u.to(refit.dtype), self.pulled)

    def evaluate(self, point: Tensor, tasks: Tensor) -> Slope:
        """Compute the gradient of ℓ_D + log p(y|x,·) + log π − g₀ᵀ(θ−θ̂) for some tasks, and H₁⁻¹
        of it.

        Differences from θ̂ are taken row by row, so that g₀ cancels exactly. point (m, P), tasks
        (m,).
        """
        return self.take(tasks)._evaluate(point)

    def _evaluate(self, point: Tensor) -> Slope:
        """Evaluate all tasks at points (m, P); NaN where an output is outside its domain."""
        refit = self.refit
        f_new = self.f + self.push(point).double()
        gradient, outside = self._data_gradient(point)
        new_score = refit.new_likelihood.score(self.y, f_new)
        gradient = gradient + self.pull(new_score) + self.prior_gradient(point)
        # With mode="as_is" g₀ is not subtracted, so it stays in the gradient.
        if refit.posterior.mode == AS_IS:
            gradient = gradient + refit.to_basis(refit.gradient)
        if not refit.new_likelihood.linear_domain:
            outside |= ~torch.isfinite(refit.new_likelihood.log_prob(self.y, f_new))
            gradient = torch.where(outside.unsqueeze(-1), torch.nan, gradient)
        # (H + JᵀΛJ)⁻¹g = z − U(I + ΛK)⁻¹ΛJz with z = H⁻¹g
        z = refit.shared.solve(gradient)
        u = new_row_pull(refit.new_likelihood, self.y, f_new, self.root, self.push(z).double())
        return Slope(gradient, z - torch.einsum("mc,mcp->mp", u.to(z.dtype), self.pulled))

    def _data_gradient(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return the change of the data's gradient from θ̂ (m, P), and where an output is not
        allowed (m,).
        """
        refit = self.refit
        likelihood = refit.posterior.likelihood
        m, C = self.f.shape
        total = torch.zeros(C * m, self.phi.shape[1], dtype=refit.dtype)
        outside = torch.zeros(m, dtype=torch.bool)
        for part, f in self.outputs_by_part(point):
            change = likelihood.score_change(part.y, f, part.f)
            if not likelihood.linear_domain:
                outside |= ~torch.isfinite(likelihood.log_prob(part.y, f)).all(-1)
            total += outputs_first(times_row_weights(change, part)).flatten(0, 1) @ part.x
        return total.reshape(C, m, -1).movedim(0, 1).reshape(m, -1), outside

    def pull(self, u: Tensor) -> Tensor:
        """Return Jᵀu at each task's input (m, P), for u (m, C)."""
        return (u.to(self.phi.dtype).unsqueeze(-1) * self.phi.unsqueeze(1)).flatten(1)

    def prior_gradient(self, point: Tensor) -> Tensor:
        """Return ∇log π(θ̂ + δ) − ∇log π(θ̂) in the coordinates δ' (m, P)."""
        by_output = point.reshape(len(point), self.refit.outputs, -1).movedim(1, 0)
        return -(by_output @ self.refit.prior_precision).movedim(0, 1).reshape(point.shape)

    def chunks(self, columns: int) -> Iterator[tuple[Block, Block, slice]]:
        """Yield parts of the training rows that stay in the cache: a block, a part of it, and its
        rows.

        columns: the numbers that are worked on for each row, so that a part has
        CACHE_ELEMENTS/columns rows.
        """
        rows_at_once = max(CACHE_ELEMENTS // columns, 64)
        for block in self.refit.rows:
            for start in range(0, len(block.f), rows_at_once):
                part_rows = slice(start, start + rows_at_once)
                weights = None if block.weights is None else block.weights[part_rows]
                yield (
                    block,
                    Block(block.x[part_rows], block.f[part_rows], block.y[part_rows], weights),
                    part_rows,
                )

    def output_changes(self, x: Tensor, step: Tensor) -> Tensor:
        """Return the change φᵀΔ of the outputs of rows under m steps (m, b, C), stored
        component-major.

        x (b, F) are features, step (C, m, F) the steps.
        """
        moved: Tensor = (step.flatten(0, 1) @ x.mT).unflatten(0, step.shape[:2])
        return moved.movedim(0, -1)

    def outputs_by_part(self, point: Tensor) -> Iterator[tuple[Block, Tensor]]:
        """Yield parts of the training rows with the outputs of all tasks on them (m, b, C)."""
        m, C = self.f.shape
        step = split_by_output(point, C)
        for _, part, _ in self.chunks(m * C):
            yield part, self.output_changes(part.x, step).add_(part.f)

    def likelihood_and_prior(self, point: Tensor, changes: RowChanges) -> tuple[Tensor, Tensor]:
        """Return the likelihood increments, with the tilt, and the prior increments (m,)."""
        refit = self.refit
        step = refit.from_basis(point)
        f_new = self.f + self.push(point).double()
        likelihood = changes.log_prob + refit.new_likelihood.log_prob(self.y, f_new)
        if refit.posterior.mode != AS_IS:
            likelihood = likelihood - step @ refit.gradient
        return likelihood, refit.prior.value(step)

    # --- determinants ----------------------------------------------------------------------

    def new_row_precision(self, point: Tensor) -> Tensor:
        """Return Λ (m, C, C) of each task's new row at its outputs f̃, for points (m, P)."""
        f_new = self.f + self.push(point).double()
        return curvature_of(self.refit.new_likelihood, self.refit.shared.kind, self.y, f_new)

    def curvature_increments(
        self,
        point: Tensor,
        precision: Tensor,
        new_row: NewRow | None,
        changes: RowChanges,
        other_increments: Tensor,
    ) -> Curvature:
        """Compute the curvature increments at points (m, P) by the terms of the module's docstring.

        precision (m, C, C): Λ of the new rows. other_increments (m,): the sum of the likelihood and
        prior increments, which tells how probable a y is and so which error is allowed.
        """
        refit = self.refit
        value, positive = new_row_increment(self.root, precision)
        error = torch.zeros_like(value)
        if new_row is None:  # frozen at θ̂ but for the new row
            return Curvature(value, positive, error)
        if isinstance(refit.shared, SharedBlocks):
            return self._correct_by_blocks(
                point, new_row, Curvature(value, positive, error), refit.shared
            )
        trace = changes.trace
        assert trace is not None
        value = value - 0.5 * trace
        # The log densities, up to the remainder that is estimated below.
        target = refit.target(other_increments + value)
        remainder = torch.zeros_like(value)
        not_done = positive & (trace != 0)
        if changes.rows is not None:
            self._sketch_where_enough(new_row, changes.rows, target, remainder, error, not_done)
        tasks = not_done.nonzero().squeeze(-1)
        if tasks.numel():
            probing = Probing(
                self.take(tasks), point[tasks], new_row.take(tasks), trace[tasks], target[tasks]
            )
            remainder[tasks], exists, spread = probing.run()
            positive[tasks] &= exists
            error[tasks] = 0.5 * spread
        return Curvature(value - 0.5 * remainder, positive, error)

    def _sketch_where_enough(
        self,
        new_row: NewRow,
        changed: ChangedRows,
        target: Tensor,
        remainder: Tensor,
        error: Tensor,
        not_done: Tensor,
    ) -> None:
        """Estimate tr[log(I + A) − A] of tasks by the sketch, in place, all (m,).

        Writes `remainder` and its `error`, and clears `not_done` where the error meets the target.
        """
        for count in ROWS_SKETCHED:
            tasks = not_done.nonzero().squeeze(-1)
            # Probable y have a smaller target, which few rows do not reach.
            if count < MANY_ROWS_SKETCHED:
                tasks = tasks[target[tasks] > LIKELY * LARGE_ERROR]
            if tasks.numel():
                remainder[tasks], error[tasks] = self.sketch_remainders(
                    tasks, new_row, changed, count
                )
                not_done[tasks] = ~(error[tasks] <= ENOUGH * target[tasks])

    def _correct_by_blocks(
        self, point: Tensor, new_row: NewRow, at_new_row: Curvature, shared: SharedBlocks
    ) -> Curvature:
        """Add what the training rows change to the increments `at_new_row`, by blocks of H.

        The formula is that of `ssla.refit.weights.last_layer_blocks`. Tasks run one by one, because
        each has rows of its own.
        """
        likelihood = self.refit.posterior.likelihood
        value = at_new_row.value.clone()
        error = at_new_row.error.clone()
        y, f_hat, fisher = shared.rows.y, shared.rows.f, shared.kind == FISHER
        diagonal = likelihood.precision_diagonal(y, f_hat, fisher)
        for task, step in enumerate(point.reshape(len(point), self.refit.outputs, -1)):
            f = f_hat + shared.rows.x @ step.mT
            change = likelihood.precision_diagonal(y, f, fisher) - diagonal
            trace_by_row = shared.rows.weighted((shared.variances * change).sum(1))
            # Rows are sampled by how much they change: a change of the score costs no matrix.
            size = shared.variances.sum(1) * likelihood.score_change(y, f, f_hat).norm(dim=-1)
            if not bool(size.any()):
                continue
            pi = sampling_probabilities(size, MANY_ROWS_SKETCHED)
            rows = sample_systematically(pi, OFFSET)
            correction = shared.estimate(
                likelihood, rows, pi[rows], step, self.phi[task], new_row.explained[task]
            )
            trace = float(trace_by_row.sum(dtype=torch.float64))
            value[task] -= 0.5 * (trace + correction.value)
            error[task] = 0.5 * correction.error
        return Curvature(value, at_new_row.positive & torch.isfinite(value), error)

    def sketch_remainders(
        self, tasks: Tensor, new_row: NewRow, changed: ChangedRows, count: int
    ) -> tuple[Tensor, Tensor]:
        """Estimate tr[log(I + A) − A] of some tasks (k,) from the shared vectors on `count` rows.

        Returns the estimates and half of their standard errors (k,).
        """
        shared = self.refit.vectors
        assert shared is not None
        likelihood = self.refit.posterior.likelihood
        # A task has its own rows and fills the cache: a guess that tasks together would not be
        # faster.
        estimates = [
            estimate_remainder(
                likelihood,
                self._sample_rows(task, new_row, changed, count, shared),
                self.refit.fisher,
            )
            for task in tasks.tolist()
        ]
        value, error = torch.tensor(estimates, dtype=torch.float64).unbind(1)
        return value, 0.5 * error

    def _sample_rows(
        self, task: int, new_row: NewRow, changed: ChangedRows, count: int, shared: SharedVectors
    ) -> Sampled:
        """Sample `count` training rows by how much one task changes them, with H₁ for H."""
        outputs = changed.outputs
        pi = sampling_probabilities(changed.sizes[task], count)
        rows = sample_systematically(pi, OFFSET)
        inverse = 1 / pi[rows]
        weight = inverse if shared.weights is None else inverse * shared.weights[rows]
        c = changed.across[changed.places[task]].index_select(0, rows)  # (b, C, r)
        # Draws of N(0, H⁻¹) become draws of N(0, H₁⁻¹), and K becomes J_i H₁⁻¹ J_iᵀ.
        w = shared.w.reshape(len(shared.w), self.refit.outputs, -1)
        shrink = new_row.shrink[task, outputs].to(c.dtype) @ (w @ self.phi[task]).mT
        explained = new_row.explained[task, outputs][:, outputs].to(c.dtype)
        v = shared.v.index_select(0, rows)  # a third of the time of [rows]
        v.flatten(0, 1).addmm_(c.flatten(0, 1), shrink, alpha=-1)
        K = shared.K.index_select(0, rows) - c @ explained @ c.mT
        f = changed.f[:, task].index_select(1, rows).mT.contiguous()
        return Sampled(shared.y[rows], shared.f[rows], f, weight, inverse, v, K)

    def row_changes(self, point: Tensor, new_row: NewRow | None) -> RowChanges:
        """Read the training rows once at the modes: log likelihoods, and traces with `new_row`.

        point (m, P). Without `new_row`, or with blocks of H, only log likelihoods are needed.
        """
        refit, likelihood, fisher = self.refit, self.refit.posterior.likelihood, self.refit.fisher
        m, C = self.f.shape
        log_prob = torch.zeros(m, dtype=torch.float64)
        if new_row is None or isinstance(refit.shared, SharedBlocks):
            for part, f in self.outputs_by_part(point):
                log_prob += self.log_prob_change(part, f)
            return RowChanges(log_prob)
        inputs, first = number_distinct_inputs(self.x_rows)
        # Outputs that the new row says nothing about have no part in G.
        important = new_row.explained.diagonal(dim1=-2, dim2=-1).abs() > RARE_OUTPUT
        outputs = important.any(0).nonzero().squeeze(-1)
        explained = new_row.explained[:, outputs][:, :, outputs]
        pulled = self._pulled_by_output(first, outputs)
        tasks_at = [(inputs == k).nonzero().squeeze(-1) for k in range(len(first))]
        trace = torch.zeros(m, dtype=torch.float64)
        step = split_by_output(point, C)
        sizes, new_outputs, across = [], [], []
        for block, part, part_rows in self.chunks(C * max(m, len(first) * len(outputs), C)):
            f = self.output_changes(part.x, step).add_(part.f)
            log_prob += self.log_prob_change(part, f)
            # tr K_iΔΛ_i
            K = refit.covariances(block)[part_rows]
            change = likelihood.precision_trace(part.y, f, K, fisher)
            change = change - likelihood.precision_trace(part.y, part.f.unsqueeze(0), K, fisher)
            change = change if part.weights is None else change * part.weights
            trace += change.sum(-1, dtype=torch.float64)
            # tr G c_iΔΛ_ic_iᵀ, for the tasks of one input after the other: they share c_i.
            c = self.output_changes(part.x, pulled).unflatten(0, (len(first), len(outputs)))
            c = c.permute(0, 2, 3, 1).contiguous()  # (k, b, C, r)
            for tasks, along in zip(tasks_at, c, strict=True):
                f_of_tasks = f.movedim(-1, 0)[:, tasks].movedim(0, -1)  # component-major, as f
                along_new_row = likelihood.precision_change_along(
                    part.y, f_of_tasks, part.f, along, part.weights, fisher
                )
                trace[tasks] -= (explained[tasks] * along_new_row).sum((1, 2))
            if refit.vectors is not None:
                variances = K.diagonal(dim1=-2, dim2=-1).sum(-1)
                sizes.append(variances * likelihood.score_change(part.y, f, part.f).norm(dim=-1))
                new_outputs.append(f.movedim(-1, 0))
                across.append(c)
        if refit.vectors is None:
            return RowChanges(log_prob, trace)
        changed = ChangedRows(
            inputs, outputs, torch.cat(sizes, 1), torch.cat(new_outputs, 2), torch.cat(across, 1)
        )
        return RowChanges(log_prob, trace, changed)

    def _pulled_by_output(self, first: Tensor, outputs: Tensor) -> Tensor:
        """Return some rows r of U at the inputs of the tasks `first` (k,): (C, k · r, F)."""
        k, r = len(first), len(outputs)  # r may be zero
        C, F = self.refit.outputs, self.phi.shape[1]
        pulled = self.pulled[first][:, outputs].reshape(k, r, C, F)
        return pulled.permute(2, 0, 1, 3).reshape(C, k * r, F).contiguous()

    def log_prob_change(self, part: Block, f: Tensor) -> Tensor:
        """Return Σ_i of the change of log p(y_i|f_i) from θ̂ (m,) in float64, for outputs f (m, b,
        C).
        """
        change = self.refit.posterior.likelihood.log_prob_difference(part.y, f, part.f)
        change = change if part.weights is None else change * part.weights
        return change.sum(-1, dtype=torch.float64)


class ChangedRows(NamedTuple):
    """The change of the training rows under m tasks at k inputs, as the sketch of determinants
    needs it.
    """

    places: Tensor  # of each task's input among the k (m,)
    outputs: Tensor  # those of the new rows that have a part (r,)
    # (m, n): tr K_i times the change of a row's score, which for classes is as large as that of
    # its curvature.
    sizes: Tensor
    f: Tensor  # at the modes (C, m, n)
    across: Tensor  # J_iUᵀ (k, n, C, r)


class RowChanges(NamedTuple):
    """The contributions of the training rows to the increments of m tasks."""

    log_prob: Tensor  # of all rows, at the mode less at θ̂ (m,)
    # tr H₁⁻¹ΔH = Σ_i tr(K_iΔΛ_i) − tr(G Σ_i c_iΔΛ_ic_iᵀ), c_i = U J_iᵀ (m,)
    trace: Tensor | None = None
    rows: ChangedRows | None = None  # where there are shared vectors


def number_distinct_inputs(x_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Number the distinct inputs of tasks.

    Returns the number of each task's input (m,), and the first task at each distinct input (k,).
    """
    unique, index = x_rows.unique(return_inverse=True)
    first = torch.stack([(index == k).nonzero()[0, 0] for k in range(len(unique))])
    return index, first


def is_large_problem(posterior: Posterior) -> bool:
    """Return whether a product with the features takes so long that larger errors are worth it."""
    return posterior.statistics.n * posterior.theta.numel() > LARGE


def open_products(
    posterior: Posterior, x: Any, options: Options, data: Any, single: bool
) -> ProductsRefit:
    """Prepare all refits of a last layer at inputs x: everything that does not depend on y.

    A pass over the data sums gradient and basis at θ̂, another one the curvature. single: products
    are in float32. ValueError where the data are not those of the fit; NoFactorError where the
    curvature at θ̂ is not positive definite.
    """
    network, budget = posterior.network, posterior.memory_budget
    C, F = network.outputs, posterior.theta.numel() // network.outputs
    dtype = torch.float32 if single else torch.float64

    def prepare(inputs: Any) -> tuple[Tensor, Tensor]:
        """Return the features with their column of ones (b, F), and f̂ (b, C)."""
        f, J = network.linearise(inputs, posterior.theta)
        assert isinstance(J, Features)
        return J.with_ones().to("cpu", dtype), f.double()

    rows = replace(open_rows(posterior, data, prepare), size=stored_bytes)
    n, gradient, data_curvature = sum_gradient_and_curvature(posterior, rows)
    check_same_data(posterior, n, gradient)
    matrix_fits = factor_bytes(C, F, dtype) <= budget
    vectors = 0  # of the blocks that take the place of a P×P matrix
    if not matrix_fits and rows.kept is not None:
        vectors = vectors_that_fit(n, C, F, dtype.itemsize, budget)
    # The structure has coordinates of its own, so features stay as they are for it.
    whitens = bool(matrix_fits or vectors)
    prior_precision = posterior.bound_prior.precision(posterior.theta).reshape(C, F)
    basis = torch.eye(F, dtype=torch.float64)
    if whitens:
        basis, info = torch.linalg.cholesky_ex(data_curvature + torch.diag(prior_precision.mean(0)))
        if int(info):
            raise NoFactorError(
                factorisation_error_text(prior_precision.flatten(), " on the data to refit on")
            )
    whitening = _Whitening(basis if whitens else None, dtype)
    rows = rows.map_chunks(whitening.of_block)
    prior = _prior_in_basis(prior_precision, basis, dtype)
    shared: SharedFactor | SharedBlocks | SharedStructure | None
    if whitens:
        # Single precision is for classes, whose observed curvature is the Fisher information.
        observed_first = options.curvature == OBSERVED and not single
        kinds = (OBSERVED, FISHER) if observed_first else (options.curvature,)
        shared = _share_curvature(posterior, rows, prior, kinds, vectors)
    else:
        _warn_of_structure(posterior)
        shared = sample_structure(posterior.operator, C, options.curvature, dtype)
    if shared is None:
        if single:
            return open_products(posterior, x, options, data, single=False)
        raise NoFactorError(
            factorisation_error_text(prior_precision.flatten(), " on the data to refit on")
        )
    parts = [prepare(network.cast(part)) for part in network.chunks(as_inputs(x), budget)]
    return ProductsRefit(
        posterior=posterior,
        options=options,
        rows=rows,
        features=whitening.of_features(torch.cat([phi for phi, _ in parts])),
        f=torch.cat([f for _, f in parts]),
        basis=basis,
        gradient=gradient + posterior.bound_prior.gradient(posterior.theta),
        shared=shared,
        fallback=shared.kind != options.curvature,
        prior_precision=prior,
    )


@dataclass(frozen=True, eq=False)
class _Whitening:
    """φ' = L_B⁻¹φ in the dtype of the products; φ itself where there is no basis."""

    basis: Tensor | None  # L_B (F, F)
    dtype: torch.dtype

    def of_features(self, phi: Tensor) -> Tensor:
        """Return features (b, F) in the basis (b, F)."""
        if self.basis is None:
            return phi
        white: Tensor = torch.linalg.solve_triangular(self.basis, phi.double().mT, upper=False)
        return white.mT.to(self.dtype).contiguous()

    def of_block(self, block: Block) -> Block:
        """Return a block with features in the basis, in the dtype of the products."""
        f = block.f.to(self.dtype).mT.contiguous().mT  # component-major, as those of many tasks
        y = block.y.to(self.dtype) if block.y.is_floating_point() else block.y
        weights = None if block.weights is None else block.weights.to(self.dtype)
        return Block(self.of_features(block.x), f, y, weights)


def sum_gradient_and_curvature(
    posterior: Posterior, rows: TrainingRows
) -> tuple[int, Tensor, Tensor]:
    """Read the training rows at θ̂ once.

    Returns their number, ∇ℓ_D (P,), and the mean over outputs of the data's diagonal blocks of the
    Fisher curvature (F, F), all in float64.
    """
    C, likelihood = posterior.network.outputs, posterior.likelihood
    P = posterior.theta.numel()
    n = 0
    gradient = torch.zeros(P, dtype=torch.float64)
    data_curvature = torch.zeros(P // C, P // C, dtype=torch.float64)
    for block in rows:
        n += block.y.shape[0]
        phi = block.x.double()
        gradient += Features(phi, C).pull(block.weighted(likelihood.score(block.y, block.f)))
        level = block.weighted(likelihood.precision_diagonal(block.y, block.f, True)).mean(-1)
        data_curvature += (phi * level.unsqueeze(-1)).mT @ phi
    return n, gradient, data_curvature


def _prior_in_basis(precision: Tensor, basis: Tensor, dtype: torch.dtype) -> Tensor:
    """Transform the prior precision of each output (C, F) to the basis L (F, F): L⁻¹TL⁻ᵀ (C, F, F).

    Outputs with the same precisions share one matrix, and only one is formed in float64 at a time:
    together they would need more memory than the refits.
    """
    distinct, index = precision.unique(dim=0, return_inverse=True)
    matrices = torch.empty(len(distinct), *basis.shape, dtype=dtype)
    for matrix, of_output in zip(matrices, distinct, strict=True):
        half = torch.linalg.solve_triangular(basis, of_output.diag(), upper=False)
        matrix.copy_(torch.linalg.solve_triangular(basis, half.mT, upper=False))
    return matrices.expand(len(precision), -1, -1) if len(distinct) == 1 else matrices[index]


def _share_curvature(
    posterior: Posterior, rows: TrainingRows, prior: Tensor, kinds: tuple[str, ...], vectors: int
) -> SharedFactor | SharedBlocks | None:
    """Factorise the curvature at θ̂ of the first kind for which it is positive definite.

    prior (C, F, F): its precision in the basis. vectors: the number for blocks of the curvature; 0
    for all of it. None where no kind is positive definite.
    """
    likelihood = posterior.likelihood
    contrasts = class_contrasts(posterior)
    for kind in kinds:
        shared: SharedFactor | SharedBlocks | None
        if vectors:
            shared = shared_blocks(rows, likelihood, prior, kind, vectors)
        else:
            shared = factorise_shared(rows, likelihood, prior, kind, contrasts)
        if shared is not None:
            return shared
    return None


def _warn_of_structure(posterior: Posterior) -> None:
    """Warn that determinants come from the fitted structure, with an error that is not known."""
    P = posterior.theta.numel()
    warn(
        f"No matrix of {P:,} × {P:,} fits the "
        "memory budget, so the determinants of the refits are those of the fitted structure, "
        "with an error that is not known (with kfac 0.1 in log probability was seen). Fit "
        "with a larger memory_budget, or use refit='output'.",
        RuntimeWarning,
    )


def class_contrasts(posterior: Posterior) -> Contrasts | None:
    """Return contrasts of classes; None where they would change the answer.

    They are exact where the sum over classes keeps the prior's curvature and no gradient moves
    along it.
    """
    C = posterior.network.outputs
    prior_precision = posterior.bound_prior.precision(posterior.theta).reshape(C, -1)
    same = torch.equal(prior_precision, prior_precision[:1].expand_as(prior_precision))
    if not (posterior.likelihood.shift_invariant and same) or posterior.mode == AS_IS:
        return None
    return Contrasts(C)


def stored_bytes(block: Block) -> int:
    """Return the bytes of a block as it is kept."""
    return sum(part.numel() * part.element_size() for part in (block.x, block.f, block.y))
