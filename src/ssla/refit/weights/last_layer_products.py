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
measured alone; `benchmarks/speed/ssla_speed.py` measures all of them together.

Terms and symbols are those of `ssla.refit.weights`. Here too:

whitened     in the basis of `last_layer`: features φ' = L_B⁻¹φ, steps δ' = L_Bᵀδ
U            H⁻¹Jᵀ at a task's input, one row for each output (C, P)
c_i          U J_iᵀ (C, C), the covariance of the outputs at the new row and at training row i
G            (I + ΛK)⁻¹Λ of the new row (C, C). The new row explains the part UᵀGU of H⁻¹, so that
             H₁⁻¹ = H⁻¹ − UᵀGU; it explains tr(G Σ_i c_iΔΛ_ic_iᵀ) of the trace
remainder    tr[log(I + A) − A]
part         some rows of a block that stay in the processor's cache
shared       the curvature at θ̂ that all tasks use, in one of three forms
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
from ssla.curvature.structure import NoFactorError, make_factorisation_error_text
from ssla.data import as_inputs
from ssla.likelihoods import Likelihood
from ssla.maths import linalg
from ssla.refit.increments import FISHER, OBSERVED, evaluate_at_mode
from ssla.refit.weights.anderson import START_SHARE, Ascent, Progress, Slope, ascend
from ssla.refit.weights.contrasts import Contrasts
from ssla.refit.weights.last_layer_blocks import (
    SharedBlocks,
    count_vectors_that_fit,
    open_shared_blocks,
)
from ssla.refit.weights.last_layer_curvature import (
    SharedFactor,
    SharedStructure,
    count_factor_bytes,
    factorise_shared,
    sample_structure,
)
from ssla.refit.weights.last_layer_probing import (
    MORE_PROBES,
    NewRow,
    Probing,
    move_outputs_first,
    multiply_by_row_weights,
    split_by_output,
)
from ssla.refit.weights.last_layer_sketch import (
    Sampled,
    SharedVectors,
    compute_sampling_probabilities,
    compute_shared_vectors,
    estimate_remainder,
    sample_systematically,
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
    compute_new_row_increment,
    compute_new_row_pull,
    compute_row_curvature,
)
from ssla.report import AS_IS

if TYPE_CHECKING:
    from ssla.posterior import Posterior

SINGLE_TOLERANCE = 1e-6  # a guess: from this tolerance on, classes are refitted in single precision
CACHE_ELEMENTS = 1 << 18  # a guess: rows × tasks × outputs worked on together, to stay in the cache
FEWEST_ROWS = 64  # a guess: rows worked on together, however many tasks there are
MOST_TASKS = 64  # a guess: tasks that are solved together
# A guess: vectors of all weights that a task of an ascent takes besides its history.
VECTORS_OF_ASCENT = 8
# A guess: the precision of an output at the new row below which that row does not explain it.
RARE_OUTPUT = 1e-4
# Guesses: the standard error in log density at which probing ends, of small and of large problems.
ERROR, LARGE_ERROR = 5e-4, 2e-3
LARGE = 2e7  # a guess: rows × parameters
RARE_ERROR = 10.0  # a guess: by which the error of a rare y may be larger
ENOUGH = 1.5  # a guess: a sketch whose error is this many times the allowed one is not probed
# Guesses: rows that a sketch samples, for rare y and where those are not enough.
FEW_ROWS_SKETCHED, MANY_ROWS_SKETCHED = 512, 2048
# A guess: a y is rare where its allowed error is this many times that of a certain y (p < 0.04).
LIKELY = 5.0
OFFSET = 0.5  # a guess: where systematic sampling of rows begins


@dataclass(frozen=True, eq=False)
class ProductsRefit:
    """All refits of one posterior's last layer at inputs x.

    An `Engine`: `solve` takes any tasks (row of x, y). Points are whitened steps δ' (m, P).
    Products with the features are in `dtype`, and sums of increments over rows in float64.
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
    def is_large(self) -> bool:
        """Return whether the problem is large, so that larger errors are allowed for less work."""
        return is_large_problem(self.posterior)

    def choose_allowed_errors(self, log_density: Tensor) -> Tensor:
        """Return the standard error that each log density may have (m,), where its estimate ends.

        log_density (m,): approximate log densities. Errors e of log probabilities change the
        predictive by a Kullback–Leibler divergence of about ½ Σ p e². A large problem therefore
        allows LARGE_ERROR/√p for a probability p, and at most RARE_ERROR times LARGE_ERROR. A small
        problem allows ERROR.
        """
        if not self.is_large:
            return torch.full_like(log_density, ERROR)
        return LARGE_ERROR * (-0.5 * log_density.clamp(max=0)).exp().clamp(max=RARE_ERROR)

    @cached_property
    def shared_vectors(self) -> SharedVectors | None:
        """Return the random vectors of the sketch with their outputs on all training rows.

        None without a sketch. The sketch is for large problems whose rows are kept in memory, and
        only where the vectors fit a quarter of the memory budget.
        """
        if not self.is_large or self.rows.kept is None or not isinstance(self.shared, SharedFactor):
            return None
        bytes_of_one = self.dtype.itemsize * self.posterior.statistics.n * self.outputs
        if bytes_of_one * len(self.shared.vectors) > self.posterior.memory_budget // 4:
            return None
        blocks = list(self.rows)
        return compute_shared_vectors(
            blocks, self.shared.vectors, [self.compute_covariances(block) for block in blocks]
        )

    @property
    def new_likelihood(self) -> Likelihood:
        """Return the likelihood of the new observation."""
        return self.posterior.likelihood.predictive

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the products with the features."""
        return self.features.dtype

    @property
    def outputs(self) -> int:
        """Return the number of outputs C."""
        return self.f.shape[1]

    @property
    def uses_fisher(self) -> bool:
        """Return whether the Fisher information is the curvature of every row."""
        return self.shared.curvature_kind == FISHER

    @property
    def tasks_at_once(self) -> int:
        """Return the number of tasks that are solved together, at least one.

        They take at most an eighth of the memory budget. If the rows are in memory, the number is
        at most MOST_TASKS; otherwise a pass over the rows is expensive, and there is no such limit.
        """
        P = self.gradient.numel()
        C = self.outputs
        # An ascent keeps three vectors for each mixed round, and probing four for each probe. The
        # group keeps C vectors, H⁻¹Jᵀ.
        vectors = 3 * self.options.memory + VECTORS_OF_ASCENT + C + 4 * MORE_PROBES
        task_bytes = self.dtype.itemsize * P * vectors
        most = max(self.posterior.memory_budget // 8 // task_bytes, 1)
        return most if self.rows.kept is None else min(most, MOST_TASKS)

    @cached_property
    def prior(self) -> PriorChange:
        """Return the change of log π with a step from θ̂, as an object: the prior increment."""
        return PriorChange(self.posterior.bound_prior, self.posterior.theta)

    def from_basis(self, point: Tensor) -> Tensor:
        """Return whitened steps δ' (m, P) in the coordinates of θ, in float64: δ = L_B⁻ᵀδ' (m, P).

        Each output has its own F coordinates.
        """
        by_output = point.double().reshape(-1, self.basis.shape[0])
        solved: Tensor = torch.linalg.solve_triangular(self.basis.mT, by_output.mT, upper=True)
        return solved.mT.reshape(point.shape)

    def to_basis(self, gradient: Tensor) -> Tensor:
        """Return a gradient g (P,) in the coordinates δ', in `dtype`: L_B⁻¹g (P,).

        Each output has its own F coordinates.
        """
        by_output = gradient.reshape(-1, self.basis.shape[0])
        solved: Tensor = torch.linalg.solve_triangular(self.basis, by_output.mT, upper=False)
        return solved.mT.reshape(gradient.shape).to(self.dtype)

    @cached_property
    def _stored_covariances(self) -> dict[int, Tensor]:
        """Return the dictionary in which `compute_covariances` stores its results, by block.

        A block is known by its id: a kept block lives as long as this refit, so no other block has
        it.
        """
        return {}

    def compute_covariances(self, block: Block) -> Tensor:
        """Return K = J H⁻¹ Jᵀ at the rows of a block (b, C, C).

        Results are stored for kept blocks while they fit an eighth of the memory budget. Raises
        AssertionError for `SharedBlocks`, which have variances alone.
        """
        stored = self._stored_covariances
        covariances = stored.get(id(block))
        if covariances is None:
            assert not isinstance(self.shared, SharedBlocks)
            covariances = self.shared.compute_covariances(block.x)
            used_bytes = sum(K.numel() * K.element_size() for K in (*stored.values(), covariances))
            if self.rows.kept is not None and used_bytes <= self.posterior.memory_budget // 8:
                stored[id(block)] = covariances
        return covariances

    # --- one group of tasks ----------------------------------------------------------------

    def find_modes(self, x_rows: Tensor, y: Tensor, progress: Progress | None = None) -> Ascent:
        """Find the mode of each task, for x_rows (m,) and y (m, …): see `Engine`."""
        return self._find_modes(Group(self, x_rows, y), progress)

    def solve(
        self,
        x_rows: Tensor,
        y: Tensor,
        progress: Progress | None = None,
        at: Ascent | None = None,
    ) -> Solved:
        """Compute the three increments of m tasks, each at its own mode: see `Engine`.

        x_rows (m,): the row of x of each task. y (m, …). Tasks that do not reach their mode, or
        whose determinant does not exist, are marked as not converged.
        """
        group = Group(self, x_rows, y)
        ascent = self._find_modes(group, progress) if at is None else at
        precision = group.compute_new_row_precision(ascent.point)

        # Frozen determinants need only the curvature of the new row itself, which
        # `compute_new_row_increment` has.
        new_row = None
        if self.options.logdet != FROZEN:
            new_row = NewRow.from_covariance(group.K, precision)
        changes = group.sum_row_changes(ascent.point, new_row)
        likelihood, prior = group.compute_likelihood_and_prior(ascent.point, changes)
        curvature = group.compute_curvature_increments(
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

    def find_stuck(self, x_rows: Tensor, y: Tensor) -> Tensor:
        """Return False for each task (m,): f is linear in θ, so that refits are quick."""
        return torch.zeros(len(x_rows), dtype=torch.bool)

    def find_weights_at_modes(self, x_rows: Tensor, y: Tensor) -> Tensor:
        """Find the mode of each task, and return its weights θ̃ (m, P): see `Engine`."""
        ascent = self._find_modes(Group(self, x_rows, y))
        return self.posterior.theta + self.from_basis(ascent.point)

    def _find_modes(self, group: Group, progress: Progress | None = None) -> Ascent:
        """Find the modes of a group's tasks with the curvature at θ̂ that all tasks share."""
        options = self.options
        return ascend(
            group.evaluate,
            group.compute_start_point(),
            tolerance=options.tolerance,
            max_steps=options.max_steps,
            memory=options.memory,
            progress=progress,
        )


class CurvatureIncrements(NamedTuple):
    """The curvature increments −½[log|H̃(θ̃)| − log|H(θ̂)|] of m tasks. All are (m,)."""

    value: Tensor
    positive: Tensor  # where H̃ is positive definite, so that the value exists
    error: Tensor  # the standard error of the value


@dataclass(frozen=True, eq=False)
class Group:
    """m tasks that are solved together. Points are whitened steps δ' (m, P)."""

    refit: ProductsRefit
    x_rows: Tensor  # the row of x of each task (m,)
    y: Tensor  # the target that each task adds (m, …)

    def select_tasks(self, tasks: Tensor) -> Group:
        """Return the group of some of the tasks, with the values that were computed for them.

        tasks (k,): different numbers of tasks of this group, in rising order. `cached_property`
        reads values from `__dict__`, so they are not computed again.
        """
        if len(tasks) == len(self.y):
            return self
        selected = Group(self.refit, self.x_rows[tasks], self.y[tasks])
        cached = ("phi", "f", "U", "K", "root")
        selected.__dict__.update(
            {name: self.__dict__[name][tasks] for name in cached if name in self.__dict__}
        )
        return selected

    @cached_property
    def phi(self) -> Tensor:
        """Return the whitened features of each task's input (m, F)."""
        return self.refit.features[self.x_rows]

    @cached_property
    def f(self) -> Tensor:
        """Return the outputs at θ̂ of each task's input (m, C)."""
        return self.refit.f[self.x_rows]

    @cached_property
    def U(self) -> Tensor:
        """Return U = H⁻¹Jᵀ at each task's input (m, C, P), computed once for each input."""
        distinct, index = self.x_rows.unique(return_inverse=True)
        phi = self.refit.features[distinct]
        C = self.refit.outputs
        # J = I ⊗ φᵀ of each input, all below one another.
        J = torch.einsum("ab,nf->nabf", torch.eye(C, dtype=phi.dtype), phi)
        J = J.reshape(len(distinct) * C, -1)
        return self.refit.shared.solve(J).reshape(len(distinct), C, -1)[index]

    @cached_property
    def K(self) -> Tensor:
        """Return J H⁻¹ Jᵀ at each task's input (m, C, C), in float64."""
        blocks = self.U.reshape(*self.U.shape[:2], self.refit.outputs, -1)
        K = torch.einsum("macf,mf->mac", blocks, self.phi).double()
        return (K + K.mT) / 2

    @cached_property
    def root(self) -> Tensor:
        """Return R with R Rᵀ = K (m, C, C)."""
        return linalg.covariance_root(self.K)

    def push(self, point: Tensor) -> Tensor:
        """Return the change J δ of the outputs at each task's input (m, C), for steps δ' (m, P)."""
        return torch.einsum(
            "mcf,mf->mc", point.reshape(len(point), self.refit.outputs, -1), self.phi
        )

    def compute_start_point(self) -> Tensor:
        """Compute where the ascent starts (m, P): START_SHARE times the output refit's step H⁻¹Jᵀu.

        If the likelihood does not allow all outputs, the ascent starts at θ̂ (zeros), which is
        allowed.
        """
        refit = self.refit
        if not refit.new_likelihood.linear_domain:
            return torch.zeros(len(self.y), refit.gradient.numel(), dtype=refit.dtype)
        u = evaluate_at_mode(refit.new_likelihood, self.y, self.f, self.root).pull
        return START_SHARE * torch.einsum("mc,mcp->mp", u.to(refit.dtype), self.U)

    def evaluate(self, point: Tensor, tasks: Tensor) -> Slope:
        """Compute the gradient of the objective at points (m, P), and the step H₁⁻¹ of it.

        tasks (m,): the numbers of the tasks in this group. Differences from θ̂ are taken row by
        row, so that g₀ cancels exactly. The gradient is NaN where an output is not allowed.
        """
        return self.select_tasks(tasks)._evaluate_all(point)

    def _evaluate_all(self, point: Tensor) -> Slope:
        """Compute what `evaluate` does for all tasks of the group, at points (m, P)."""
        refit = self.refit
        f_new = self.f + self.push(point).double()
        gradient, outside = self._compute_data_gradient_change(point)
        new_score = refit.new_likelihood.score(self.y, f_new)
        gradient = gradient + self.pull(new_score) + self.compute_prior_gradient_change(point)

        # With mode="as_is" g₀ is not subtracted, so it stays in the gradient.
        if refit.posterior.mode == AS_IS:
            gradient = gradient + refit.to_basis(refit.gradient)
        if not refit.new_likelihood.linear_domain:
            outside |= ~torch.isfinite(refit.new_likelihood.log_prob(self.y, f_new))
            gradient = torch.where(outside.unsqueeze(-1), torch.nan, gradient)

        # (H + JᵀΛJ)⁻¹g = z − U(I + ΛK)⁻¹ΛJz with z = H⁻¹g
        z = refit.shared.solve(gradient)
        u = compute_new_row_pull(
            refit.new_likelihood, self.y, f_new, self.root, self.push(z).double()
        )
        return Slope(gradient, z - torch.einsum("mc,mcp->mp", u.to(z.dtype), self.U))

    def _compute_data_gradient_change(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the change of the data's gradient ∇ℓ_D from θ̂ (m, P), for points (m, P).

        The second result marks tasks for which the output of a training row is not allowed (m,).
        """
        refit = self.refit
        likelihood = refit.posterior.likelihood
        m, C = self.f.shape
        total = torch.zeros(C * m, self.phi.shape[1], dtype=refit.dtype)
        outside = torch.zeros(m, dtype=torch.bool)
        for part, f in self.yield_outputs(point):
            change = likelihood.score_change(part.y, f, part.f)
            if not likelihood.linear_domain:
                outside |= ~torch.isfinite(likelihood.log_prob(part.y, f)).all(-1)
            total += (
                move_outputs_first(multiply_by_row_weights(change, part)).flatten(0, 1) @ part.x
            )
        return total.reshape(C, m, -1).movedim(0, 1).reshape(m, -1), outside

    def pull(self, u: Tensor) -> Tensor:
        """Return Jᵀu at each task's input (m, P), whitened, for u (m, C)."""
        return (u.to(self.phi.dtype).unsqueeze(-1) * self.phi.unsqueeze(1)).flatten(1)

    def compute_prior_gradient_change(self, point: Tensor) -> Tensor:
        """Compute ∇log π(θ̂ + δ) − ∇log π(θ̂) in the coordinates δ' (m, P), for points (m, P)."""
        by_output = point.reshape(len(point), self.refit.outputs, -1).movedim(1, 0)
        return -(by_output @ self.refit.prior_precision).movedim(0, 1).reshape(point.shape)

    def yield_parts(self, columns: int) -> Iterator[tuple[Block, Block, slice]]:
        """Yield the training rows in parts that stay in the processor's cache.

        The three values are a block, the part of it as a block, and the slice of the block's rows
        that the part has. columns: how many numbers are worked on for each row. A part has
        CACHE_ELEMENTS/columns rows, at least FEWEST_ROWS; the last of a block may have fewer.
        """
        rows_at_once = max(CACHE_ELEMENTS // columns, FEWEST_ROWS)
        for block in self.refit.rows:
            for start in range(0, len(block.f), rows_at_once):
                part_rows = slice(start, start + rows_at_once)
                weights = None if block.weights is None else block.weights[part_rows]
                yield (
                    block,
                    Block(block.x[part_rows], block.f[part_rows], block.y[part_rows], weights),
                    part_rows,
                )

    def compute_output_changes(self, x: Tensor, step: Tensor) -> Tensor:
        """Compute the change φᵀδ of the outputs of rows under m steps (m, b, C).

        x: the features φ of the rows (b, F). step: the steps by output (C, m, F). The result is
        stored component-major.
        """
        change: Tensor = (step.flatten(0, 1) @ x.mT).unflatten(0, step.shape[:2])
        return change.movedim(0, -1)

    def yield_outputs(self, point: Tensor) -> Iterator[tuple[Block, Tensor]]:
        """Yield the training rows in parts, with their outputs in all tasks (m, b, C).

        point (m, P). The outputs are stored component-major.
        """
        m, C = self.f.shape
        step = split_by_output(point, C)
        for _, part, _ in self.yield_parts(m * C):
            yield part, self.compute_output_changes(part.x, step).add_(part.f)

    def compute_likelihood_and_prior(
        self, point: Tensor, changes: RowChanges
    ) -> tuple[Tensor, Tensor]:
        """Compute the likelihood increments, with the tilt, and the prior increments: both (m,).

        point (m, P): the modes. changes: those of the training rows there. With mode="as_is" there
        is no tilt.
        """
        refit = self.refit
        step = refit.from_basis(point)
        f_new = self.f + self.push(point).double()
        likelihood = changes.log_prob + refit.new_likelihood.log_prob(self.y, f_new)
        if refit.posterior.mode != AS_IS:
            likelihood = likelihood - step @ refit.gradient
        return likelihood, refit.prior.compute_value_change(step)

    # --- determinants ----------------------------------------------------------------------

    def compute_new_row_precision(self, point: Tensor) -> Tensor:
        """Compute Λ of each task's new row (m, C, C) at points (m, P), of the shared kind."""
        f_new = self.f + self.push(point).double()
        return compute_row_curvature(
            self.refit.new_likelihood, self.refit.shared.curvature_kind, self.y, f_new
        )

    def compute_curvature_increments(
        self,
        point: Tensor,
        precision: Tensor,
        new_row: NewRow | None,
        changes: RowChanges,
        other_increments: Tensor,
    ) -> CurvatureIncrements:
        """Compute the curvature increments at points (m, P) by the terms of the module's docstring.

        precision: Λ of the new rows (m, C, C). new_row: what they explain; None: the training rows
        keep their curvature at θ̂. changes: those of the training rows. other_increments (m,): the
        sum of the likelihood and prior increments. It tells how probable a y is, and thus which
        error is allowed.
        """
        refit = self.refit
        value, positive = compute_new_row_increment(self.root, precision)
        error = torch.zeros_like(value)
        if new_row is None:  # frozen at θ̂ but for the new row
            return CurvatureIncrements(value, positive, error)
        if isinstance(refit.shared, SharedBlocks):
            return self._correct_by_blocks(
                point, new_row, CurvatureIncrements(value, positive, error), refit.shared
            )
        trace = changes.trace
        assert trace is not None
        value = value - 0.5 * trace

        # The log densities, up to the remainder that is estimated below.
        target = refit.choose_allowed_errors(other_increments + value)
        remainder = torch.zeros_like(value)

        # Where no curvature changes there is no remainder.
        not_done = positive & (trace != 0)
        if changes.rows is not None:
            self._sketch_where_accurate(new_row, changes.rows, target, remainder, error, not_done)
        tasks = not_done.nonzero().squeeze(-1)
        if tasks.numel():
            probing = Probing(
                self.select_tasks(tasks),
                point[tasks],
                new_row.select_tasks(tasks),
                trace[tasks],
                target[tasks],
            )
            remainder[tasks], exists, standard_error = probing.estimate_remainders()
            positive[tasks] &= exists
            error[tasks] = 0.5 * standard_error

        return CurvatureIncrements(value - 0.5 * remainder, positive, error)

    def _sketch_where_accurate(
        self,
        new_row: NewRow,
        changed: ChangedRows,
        target: Tensor,
        remainder: Tensor,
        error: Tensor,
        not_done: Tensor,
    ) -> None:
        """Estimate the remainders of the tasks that are `not_done` by the sketch, in place.

        It writes `remainder` and the `error` of the increment, and sets `not_done` to False where
        that error is at most ENOUGH times the target: all (m,). new_row, changed: of all tasks.
        """
        for count in (FEW_ROWS_SKETCHED, MANY_ROWS_SKETCHED):
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
        self, point: Tensor, new_row: NewRow, at_new_row: CurvatureIncrements, shared: SharedBlocks
    ) -> CurvatureIncrements:
        """Return the increments `at_new_row` with what the training rows change, by blocks of H.

        at_new_row: −½ log|I + ΛK| of each task. point (m, P). new_row: what the new rows explain.
        shared: the blocks. The formula is that of `ssla.refit.weights.last_layer_blocks`. Tasks run
        one by one, because each has sampled rows of its own.
        """
        likelihood = self.refit.posterior.likelihood
        value = at_new_row.value.clone()
        error = at_new_row.error.clone()
        y, f_hat, fisher = shared.rows.y, shared.rows.f, shared.curvature_kind == FISHER
        diagonal = likelihood.precision_diagonal(y, f_hat, fisher)

        for task, step in enumerate(point.reshape(len(point), self.refit.outputs, -1)):
            f = f_hat + shared.rows.x @ step.mT
            change = likelihood.precision_diagonal(y, f, fisher) - diagonal
            trace_by_row = shared.rows.apply_weights((shared.variances * change).sum(1))
            # Rows are sampled by how much they change: a change of the score costs no matrix.
            size = shared.variances.sum(1) * likelihood.score_change(y, f, f_hat).norm(dim=-1)
            if not bool(size.any()):
                continue
            pi = compute_sampling_probabilities(size, MANY_ROWS_SKETCHED)
            rows = sample_systematically(pi, OFFSET)
            correction = shared.estimate_correction(
                likelihood, rows, pi[rows], step, self.phi[task], new_row.explained[task]
            )
            trace = float(trace_by_row.sum(dtype=torch.float64))
            value[task] -= 0.5 * (trace + correction.value)
            error[task] = 0.5 * correction.error

        return CurvatureIncrements(value, at_new_row.positive & torch.isfinite(value), error)

    def sketch_remainders(
        self, tasks: Tensor, new_row: NewRow, changed: ChangedRows, count: int
    ) -> tuple[Tensor, Tensor]:
        """Estimate the remainders of some tasks (k,) from the shared vectors, on `count` rows.

        new_row, changed: of all tasks. Returns the estimates (k,), and half of their standard
        errors (k,): those of the increments. Raises AssertionError without shared vectors.
        """
        shared = self.refit.shared_vectors
        assert shared is not None
        likelihood = self.refit.posterior.likelihood

        # A task has its own rows and fills the cache: a guess that tasks together would not be
        # faster.
        estimates = [
            estimate_remainder(
                likelihood,
                self._sample_rows(task, new_row, changed, count, shared),
                self.refit.uses_fisher,
            )
            for task in tasks.tolist()
        ]
        value, error = torch.tensor(estimates, dtype=torch.float64).unbind(1)
        return value, 0.5 * error

    def _sample_rows(
        self, task: int, new_row: NewRow, changed: ChangedRows, count: int, shared: SharedVectors
    ) -> Sampled:
        """Sample about `count` training rows, in proportion to how much one task changes them.

        task: its number. new_row, changed: of all tasks. shared: see `shared_vectors`. The vectors
        and covariances of these rows become those of H₁, which includes the new row.
        """
        outputs = changed.outputs
        pi = compute_sampling_probabilities(changed.sizes[task], count)
        rows = sample_systematically(pi, OFFSET)
        inverse = 1 / pi[rows]
        weight = inverse if shared.weights is None else inverse * shared.weights[rows]
        c = changed.cross_covariances[changed.input_numbers[task]].index_select(
            0, rows
        )  # (b, C, r)

        # Draws of N(0, H⁻¹) become draws of N(0, H₁⁻¹), and K becomes J_i H₁⁻¹ J_iᵀ.
        w = shared.w.reshape(len(shared.w), self.refit.outputs, -1)
        shrink = new_row.shrink[task, outputs].to(c.dtype) @ (w @ self.phi[task]).mT
        explained = new_row.explained[task, outputs][:, outputs].to(c.dtype)
        v = shared.v.index_select(0, rows)  # a copy, in a third of the time of [rows]
        v.flatten(0, 1).addmm_(c.flatten(0, 1), shrink, alpha=-1)
        K = shared.K.index_select(0, rows) - c @ explained @ c.mT
        f = changed.f[:, task].index_select(1, rows).mT.contiguous()
        return Sampled(shared.y[rows], shared.f[rows], f, weight, inverse, v, K)

    def sum_row_changes(self, point: Tensor, new_row: NewRow | None) -> RowChanges:
        """Sum the changes of the training rows at points (m, P): of log likelihoods, and traces.

        new_row: what the new rows explain. If it is None, or with blocks of H, only the log
        likelihoods are summed. With shared vectors the result has the change of each row too.
        """
        refit = self.refit
        if new_row is None or isinstance(refit.shared, SharedBlocks):
            return RowChanges(self._sum_log_prob_changes(point))
        m, C = self.f.shape
        inputs, first = number_distinct_inputs(self.x_rows)
        tasks_at = [(inputs == k).nonzero().squeeze(-1) for k in range(len(first))]

        outputs = new_row.list_explaining_outputs(RARE_OUTPUT)
        explained = new_row.explained[:, outputs][:, :, outputs]
        U = self._select_U_by_output(first, outputs)

        log_prob = torch.zeros(m, dtype=torch.float64)
        trace = torch.zeros(m, dtype=torch.float64)
        step = split_by_output(point, C)
        sizes, new_outputs, cross_covariances = [], [], []

        for block, part, part_rows in self.yield_parts(C * max(m, len(first) * len(outputs), C)):
            f = self.compute_output_changes(part.x, step).add_(part.f)
            log_prob += self.compute_log_prob_change(part, f)
            K = refit.compute_covariances(block)[part_rows]
            trace += self._compute_trace_change(part, f, K)
            c = self.compute_output_changes(part.x, U).unflatten(0, (len(first), len(outputs)))
            c = c.permute(0, 2, 3, 1).contiguous()  # (k, b, C, r)
            trace -= self._compute_explained_trace(part, f, c, explained, tasks_at)
            if refit.shared_vectors is not None:
                variances = K.diagonal(dim1=-2, dim2=-1).sum(-1)
                score_change = refit.posterior.likelihood.score_change(part.y, f, part.f)
                sizes.append(variances * score_change.norm(dim=-1))
                new_outputs.append(f.movedim(-1, 0))
                cross_covariances.append(c)

        if refit.shared_vectors is None:
            return RowChanges(log_prob, trace)
        changed = ChangedRows(
            input_numbers=inputs,
            outputs=outputs,
            sizes=torch.cat(sizes, 1),
            f=torch.cat(new_outputs, 2),
            cross_covariances=torch.cat(cross_covariances, 1),
        )
        return RowChanges(log_prob, trace, changed)

    def _sum_log_prob_changes(self, point: Tensor) -> Tensor:
        """Sum the change of the training rows' log likelihoods from θ̂ at points (m, P): (m,)."""
        log_prob = torch.zeros(len(point), dtype=torch.float64)
        for part, f in self.yield_outputs(point):
            log_prob += self.compute_log_prob_change(part, f)
        return log_prob

    def _compute_trace_change(self, part: Block, f: Tensor, K: Tensor) -> Tensor:
        """Compute Σ_i tr(K_iΔΛ_i) over the rows of a part (m,), summed in float64.

        f: their outputs in all tasks (m, b, C). K: their covariances at θ̂ (b, C, C).
        """
        likelihood, fisher = self.refit.posterior.likelihood, self.refit.uses_fisher
        change = likelihood.precision_trace(part.y, f, K, fisher)
        change = change - likelihood.precision_trace(part.y, part.f.unsqueeze(0), K, fisher)
        change = change if part.weights is None else change * part.weights
        return change.sum(-1, dtype=torch.float64)

    def _compute_explained_trace(
        self, part: Block, f: Tensor, c: Tensor, explained: Tensor, tasks_at: list[Tensor]
    ) -> Tensor:
        """Compute tr(G Σ_i c_iΔΛ_ic_iᵀ) over the rows of a part (m,), which the new rows explain.

        f: the outputs of the rows in all tasks (m, b, C). c: c_iᵀ at the k distinct inputs, for r
        outputs of the new row (k, b, C, r). explained: G of each task (m, r, r). tasks_at: the
        tasks at each input, which share c_i.
        """
        likelihood, fisher = self.refit.posterior.likelihood, self.refit.uses_fisher
        total = torch.zeros(len(explained), dtype=torch.float64)
        for tasks, c_of_input in zip(tasks_at, c, strict=True):
            f_of_tasks = f.movedim(-1, 0)[:, tasks].movedim(0, -1)  # component-major, as f
            along_new_row = likelihood.precision_change_along(
                part.y, f_of_tasks, part.f, c_of_input, part.weights, fisher
            )
            total[tasks] = (explained[tasks] * along_new_row).sum((1, 2))
        return total

    def _select_U_by_output(self, first: Tensor, outputs: Tensor) -> Tensor:
        """Return some rows of U at some inputs, by output: (C, k · r, F).

        first (k,): a task at each of the inputs. outputs (r,): the numbers of the rows of U; r may
        be zero.
        """
        k, r = len(first), len(outputs)
        # The shapes are stated in full: −1 is ambiguous where r is zero.
        C, F = self.refit.outputs, self.phi.shape[1]
        U = self.U[first][:, outputs].reshape(k, r, C, F)
        return U.permute(2, 0, 1, 3).reshape(C, k * r, F).contiguous()

    def compute_log_prob_change(self, part: Block, f: Tensor) -> Tensor:
        """Compute the change of Σ_i log p(y_i|f_i) of the rows of a part from θ̂ (m,), in float64.

        f: their outputs in all tasks (m, b, C).
        """
        change = self.refit.posterior.likelihood.log_prob_difference(part.y, f, part.f)
        change = change if part.weights is None else change * part.weights
        return change.sum(-1, dtype=torch.float64)


class ChangedRows(NamedTuple):
    """How m tasks at k distinct inputs change each training row, as the sketch needs it."""

    input_numbers: Tensor  # the number of each task's input among the k (m,)
    outputs: Tensor  # the outputs of the new rows that explain anything (r,)
    # (m, n): tr K_i times the change of a row's score, which for classes is as large as that of
    # its curvature.
    sizes: Tensor
    f: Tensor  # at the modes (C, m, n)
    cross_covariances: Tensor  # J_iUᵀ (k, n, C, r)


class RowChanges(NamedTuple):
    """What the training rows contribute to the increments of m tasks."""

    log_prob: Tensor  # the change of their log likelihood from θ̂ to the mode (m,)
    # tr H₁⁻¹ΔH = Σ_i tr(K_iΔΛ_i) − tr(G Σ_i c_iΔΛ_ic_iᵀ), c_i = U J_iᵀ (m,)
    trace: Tensor | None = None
    rows: ChangedRows | None = None  # None without shared vectors


def number_distinct_inputs(x_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Number the distinct inputs of tasks, for x_rows (m,), the row of x of each task.

    Returns the number of each task's input (m,), and the first task at each distinct input (k,).
    """
    unique, index = x_rows.unique(return_inverse=True)
    first = torch.stack([(index == k).nonzero()[0, 0] for k in range(len(unique))])
    return index, first


def is_large_problem(posterior: Posterior) -> bool:
    """Return whether a problem is large: its training rows × parameters exceed LARGE.

    Products are slow there, so larger errors are allowed.
    """
    return posterior.statistics.n * posterior.theta.numel() > LARGE


def open_products(
    posterior: Posterior, x: Any, options: Options, data: Any, single: bool
) -> ProductsRefit:
    """Prepare all refits of a last layer at inputs x: everything that does not depend on y.

    A pass over the data sums gradient and basis at θ̂, another one the curvature. x: N inputs.
    data: the training data; None: those of the posterior. single: products are in float32, unless H
    is not positive definite in it. Raises ValueError if the data are not those of the fit or cannot
    be read again, and NoFactorError if the curvature at θ̂ is not positive definite. Warns if the
    curvature has to be that of the fitted structure.
    """
    network, budget = posterior.network, posterior.memory_budget
    C, F = network.outputs, posterior.theta.numel() // network.outputs
    dtype = torch.float32 if single else torch.float64

    def prepare_inputs(inputs: Any) -> tuple[Tensor, Tensor]:
        """Return the features of cast inputs, with their column of ones (b, F), and f̂ (b, C)."""
        f, J = network.linearise(inputs, posterior.theta)
        assert isinstance(J, Features)
        return J.with_ones().to("cpu", dtype), f.double()

    rows = replace(open_rows(posterior, data, prepare_inputs), size=count_stored_bytes)
    n, gradient, data_curvature = sum_gradient_and_curvature(posterior, rows)
    check_same_data(posterior, n, gradient)

    matrix_fits = count_factor_bytes(C, F, dtype) <= budget
    vectors = 0  # of the blocks that take the place of a P×P matrix
    if not matrix_fits and rows.kept is not None:
        vectors = count_vectors_that_fit(n, C, F, dtype.itemsize, budget)

    # The structure has coordinates of its own, so features stay as they are for it.
    is_whitened = bool(matrix_fits or vectors)
    prior_precision = posterior.bound_prior.precision(posterior.theta).reshape(C, F)
    basis = torch.eye(F, dtype=torch.float64)
    if is_whitened:
        basis = _factorise_basis(data_curvature, prior_precision)
    whitening = _Whitening(basis if is_whitened else None, dtype)
    rows = rows.map_chunks(whitening.whiten_block)
    prior = _transform_prior(prior_precision, basis, dtype)

    shared: SharedFactor | SharedBlocks | SharedStructure | None
    if is_whitened:
        kinds = _list_curvature_kinds(options, single)
        shared = _share_curvature(posterior, rows, prior, kinds, vectors)
    else:
        shared = _share_structure(posterior, options, dtype)
    if shared is None:
        if single:
            return open_products(posterior, x, options, data, single=False)
        raise _make_no_factor_error(prior_precision)

    chunks = network.chunks(as_inputs(x), budget)
    inputs_in_chunks = [prepare_inputs(network.cast(chunk)) for chunk in chunks]
    return ProductsRefit(
        posterior=posterior,
        options=options,
        rows=rows,
        features=whitening.whiten_features(torch.cat([phi for phi, _ in inputs_in_chunks])),
        f=torch.cat([f for _, f in inputs_in_chunks]),
        basis=basis,
        gradient=gradient + posterior.bound_prior.gradient(posterior.theta),
        shared=shared,
        fallback=shared.curvature_kind != options.curvature,
        prior_precision=prior,
    )


def _factorise_basis(data_curvature: Tensor, prior_precision: Tensor) -> Tensor:
    """Return the basis L_B (F, F): the Cholesky factor of the mean curvature over outputs.

    data_curvature: that mean of the data (F, F). prior_precision: of each output (C, F). Raises
    NoFactorError if their sum is not positive definite.
    """
    basis: Tensor
    basis, info = torch.linalg.cholesky_ex(data_curvature + torch.diag(prior_precision.mean(0)))
    if int(info):
        raise _make_no_factor_error(prior_precision)
    return basis


def _make_no_factor_error(prior_precision: Tensor) -> NoFactorError:
    """Return the error, to be raised, for a curvature that is not positive definite.

    prior_precision (C, F): its text names a likely cause by it.
    """
    return NoFactorError(
        make_factorisation_error_text(prior_precision.flatten(), " on the data to refit on")
    )


def _list_curvature_kinds(options: Options, single: bool) -> tuple[str, ...]:
    """Return the kinds of curvature to try, in this order.

    The Fisher information follows the observed curvature, which may be indefinite. In single
    precision that is not needed: it is for classes, where both are the same.
    """
    if options.curvature == OBSERVED and not single:
        return OBSERVED, FISHER
    return (options.curvature,)


@dataclass(frozen=True, eq=False)
class _Whitening:
    """φ' = L_B⁻¹φ in the dtype of the products; φ itself where there is no basis."""

    basis: Tensor | None  # L_B (F, F)
    dtype: torch.dtype

    def whiten_features(self, phi: Tensor) -> Tensor:
        """Return features (b, F) in the basis: L_B⁻¹φ of each row (b, F)."""
        if self.basis is None:
            return phi
        white: Tensor = torch.linalg.solve_triangular(self.basis, phi.double().mT, upper=False)
        return white.mT.to(self.dtype).contiguous()

    def whiten_block(self, block: Block) -> Block:
        """Return a block with its features in the basis, and all its numbers in `dtype`.

        Targets that are whole numbers stay as they are.
        """
        f = block.f.to(self.dtype).mT.contiguous().mT  # component-major, as those of many tasks
        y = block.y.to(self.dtype) if block.y.is_floating_point() else block.y
        weights = None if block.weights is None else block.weights.to(self.dtype)
        return Block(self.whiten_features(block.x), f, y, weights)


def sum_gradient_and_curvature(
    posterior: Posterior, rows: TrainingRows
) -> tuple[int, Tensor, Tensor]:
    """Sum the gradient and the curvature of the training rows at θ̂, in float64.

    The features of `rows` are not whitened yet. Returns the number of rows, ∇ℓ_D (P,), and the mean
    over outputs of the diagonal blocks of the data's Fisher information (F, F).
    """
    C, likelihood = posterior.network.outputs, posterior.likelihood
    P = posterior.theta.numel()
    n = 0
    gradient = torch.zeros(P, dtype=torch.float64)
    data_curvature = torch.zeros(P // C, P // C, dtype=torch.float64)

    for block in rows:
        n += block.y.shape[0]
        phi = block.x.double()
        gradient += Features(phi, C).pull(block.apply_weights(likelihood.score(block.y, block.f)))
        mean_precision = block.apply_weights(
            likelihood.precision_diagonal(block.y, block.f, fisher=True)
        ).mean(-1)
        data_curvature += (phi * mean_precision.unsqueeze(-1)).mT @ phi

    return n, gradient, data_curvature


def _transform_prior(precision: Tensor, basis: Tensor, dtype: torch.dtype) -> Tensor:
    """Transform the prior precision of each output (C, F) to the basis L (F, F): L⁻¹TL⁻ᵀ (C, F, F).

    Outputs with the same precisions share one matrix, and only one is formed in float64 at a time:
    together they would need more memory than the refits.
    """
    distinct, index = precision.unique(dim=0, return_inverse=True)
    matrices = torch.empty(len(distinct), *basis.shape, dtype=dtype)
    for matrix, of_output in zip(matrices, distinct, strict=True):
        # L⁻¹(L⁻¹T)ᵀ = L⁻¹TL⁻ᵀ, as T is symmetric.
        half = torch.linalg.solve_triangular(basis, of_output.diag(), upper=False)
        matrix.copy_(torch.linalg.solve_triangular(basis, half.mT, upper=False))
    return matrices.expand(len(precision), -1, -1) if len(distinct) == 1 else matrices[index]


def _share_curvature(
    posterior: Posterior, rows: TrainingRows, prior: Tensor, kinds: tuple[str, ...], vectors: int
) -> SharedFactor | SharedBlocks | None:
    """Factorise the curvature at θ̂ of the first of some kinds for which it is positive definite.

    rows: with whitened features. prior: its precision in the basis (C, F, F). vectors: the number
    of random vectors, if blocks of H take the place of H; 0: all of H is factorised. None if no
    kind is positive definite.
    """
    likelihood = posterior.likelihood
    contrasts = find_class_contrasts(posterior)
    for curvature_kind in kinds:
        shared: SharedFactor | SharedBlocks | None
        if vectors:
            shared = open_shared_blocks(rows, likelihood, prior, curvature_kind, vectors)
        else:
            shared = factorise_shared(rows, likelihood, prior, curvature_kind, contrasts)
        if shared is not None:
            return shared
    return None


def _share_structure(posterior: Posterior, options: Options, dtype: torch.dtype) -> SharedStructure:
    """Return the fitted structure as the curvature that all tasks share.

    It warns that determinants are those of the structure, with an error that is not known.
    """
    P = posterior.theta.numel()
    warn(
        f"No matrix of {P:,} × {P:,} fits the "
        "memory budget, so the determinants of the refits are those of the fitted structure, "
        "with an error that is not known (with kfac 0.1 in log probability was seen). Fit "
        "with a larger memory_budget, or use refit='output'.",
        RuntimeWarning,
    )
    return sample_structure(posterior.operator, posterior.network.outputs, options.curvature, dtype)


def find_class_contrasts(posterior: Posterior) -> Contrasts | None:
    """Return contrasts of classes; None if they would change the answer.

    They do not change it if the sum over classes has only the prior's curvature and no gradient:
    for a likelihood that does not depend on that sum, and a prior that is the same for all classes.
    """
    C = posterior.network.outputs
    prior_precision = posterior.bound_prior.precision(posterior.theta).reshape(C, -1)
    has_equal_priors = torch.equal(prior_precision, prior_precision[:1].expand_as(prior_precision))
    if not (posterior.likelihood.shift_invariant and has_equal_priors) or posterior.mode == AS_IS:
        return None
    return Contrasts(C)


def count_stored_bytes(block: Block) -> int:
    """Return the bytes of a block as it is kept in memory, without the weights of its rows."""
    return sum(values.numel() * values.element_size() for values in (block.x, block.f, block.y))
