"""A group of last-layer refits: m tasks (x, y) that are solved together by products over the
features.

`ssla.refit.weights.reference` computes the same numbers for one task, without the tricks:

trick                                                 what it brings
one product with Φ for the outputs of all tasks       with all that follows 11.5 times the speed of
                                                      Newton for one task at a time
                                                      (docs/refits-evidence.md)
H(θ̂) + JᵀΛJ as the preconditioner of all tasks        six gradients a refit in place of 2.9 Newton
                                                      steps (docs/notes/refits.md)
a start at 0.7 of the linearised step                 7.3 and 8.7 gradients, where a start at the
                                                      variational mean takes 11 and 19 (the notes)
vech(φφᵀ) shared by the ΔH of all tasks               not measured alone; ΔH is 8 of the 11 million
                                                      operations of a refit (the notes)
contrasts of classes                                  459 weights in place of 510 for ten classes
                                                      (the notes)
ΔH in single precision, its trace in double           a bound of twice the speed, not measured (the
                                                      notes); 1e-9 off (tests/refit/test_weights.py)
the trace alone where the step is small               not measured alone

Terms and symbols are those of `ssla.refit.weights`. Here too:

basis    the coordinates φ' = L_B⁻¹φ, δ' = L_Bᵀδ of `ssla.refit.weights.last_layer`
pairs    the C(C + 1)/2 pairs a ≤ b of outputs, in the order of `list_index_pairs`
packed   the form of a symmetric P×P matrix whose C×C blocks (F, F) are symmetric too: for each
         pair a ≤ b the upper triangle of its block, v = F(F + 1)/2 numbers, by rows (pairs · v,)
exists   the log determinant of a task exists where its H̃ is positive definite
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
from ssla.refit.increments import FISHER, evaluate_at_mode
from ssla.refit.weights.anderson import START_SHARE, Slope
from ssla.refit.weights.contrasts import Contrasts
from ssla.refit.weights.refit_rows import Block, PriorChange
from ssla.refit.weights.solved import (
    FROZEN,
    compute_new_row_increment,
    compute_new_row_pull,
    compute_row_curvature,
    count_matrices_at_once,
)
from ssla.report import AS_IS

if TYPE_CHECKING:
    from ssla.refit.weights.last_layer import LastLayerRefit

MANY_FEATURES = 24  # a guess: from here on products over all rows are worth single precision
# A guess: ‖ΔH‖ over the least eigenvalue of H, beyond which ΔH is in double precision.
LARGE_CHANGE = 10.0
SINGLE_TOLERANCE = 1e-6  # a guess: from this tolerance on determinants may be in single precision
SMALL_STEP = 0.02  # a guess: steps below so many posterior standard deviations try the trace alone
CACHED_TASKS = 8  # a guess: tasks whose ΔΛ are formed together
SMALL_ERROR = 1e-4  # a guess, in log density: what the trace alone may leave out
# The square of the bound on ‖H⁻¹ΔH‖ exceeds that error by more than this factor. Measured on ten
# classes, by a script that was not kept: 140 and more.
LOOSE = 50.0
# A guess: bytes of matrices factorised together. More do not fit the processor's cache.
CACHE_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class InitialCurvature:
    """The curvature at θ̂ of one kind, in the basis: H = L Lᵀ (P, P).

    That of the steps includes the prior of the objective. That of the determinants includes the
    prior that the convention puts there, which may be none (see `Posterior.with_prior`).

    contrasts: the outputs are contrasts of classes, Qᵀf (see `ssla.refit.weights.contrasts`); None:
    they are f.
    """

    curvature_kind: str  # OBSERVED or FISHER
    factor: Tensor  # L (P, P)
    outputs: int  # C, or C − 1 with contrasts
    prior: PriorChange  # the prior whose curvature is part of H
    contrasts: Contrasts | None = None

    @cached_property
    def matrix(self) -> Tensor:
        """Return H (P, P)."""
        return self.factor @ self.factor.mT

    @cached_property
    def operator(self) -> DenseOperator:
        """Return H⁻¹ as a structure's operator, for K = J H⁻¹ Jᵀ."""
        return DenseOperator(self.factor)

    @cached_property
    def single_inverse(self) -> Tensor:
        """Return H⁻¹ in single precision (P, P). It only steers steps: no answer depends on it."""
        return torch.cholesky_inverse(self.factor).float()

    def solve(self, values: Tensor) -> Tensor:
        """Return H⁻¹v for each row v of values (m, P), in their precision."""
        if values.dtype == torch.float32:
            return values @ self.single_inverse
        return torch.cholesky_solve(values.mT, self.factor).mT

    @cached_property
    def least_eigenvalue(self) -> float:
        """Return the smallest eigenvalue of H."""
        return float(torch.linalg.eigvalsh(self.matrix)[0])

    @cached_property
    def packed_inverse(self) -> Tensor:
        """Return H⁻¹ packed (pairs · v,), so that its dot product with a packed ΔH is tr H⁻¹ΔH.

        An entry off the diagonal of a block stands for two entries and is doubled, and so is a
        block off the diagonal.
        """
        C = self.outputs
        F = self.factor.shape[0] // C
        blocks = torch.cholesky_inverse(self.factor).reshape(C, F, C, F)
        triangle = torch.triu_indices(F, F)
        entries_counted = torch.where(triangle[0] == triangle[1], 1.0, 2.0)
        packed = []
        for a, b in list_index_pairs(C):
            blocks_counted = 1 if a == b else 2
            block = (blocks[a, :, b, :] + blocks[a, :, b, :].mT) / 2
            packed.append(blocks_counted * entries_counted * block[triangle[0], triangle[1]])
        return torch.cat(packed)


class PackedChange(NamedTuple):
    """ΔH = H(θ̃) − H(θ̂) of the training rows, for m tasks."""

    packed: Tensor  # (m, pairs · v)
    trace: Tensor  # tr H⁻¹ΔH (m,), in double precision


@dataclass(frozen=True, eq=False)
class Group:
    """m tasks that are solved together. Points are steps δ' (m, P) in the basis."""

    refit: LastLayerRefit
    initial: InitialCurvature  # of steps
    x_rows: Tensor  # the row of x of each task (m,)
    y: Tensor  # the target that each task adds (m, …)

    def select_tasks(self, tasks: Tensor) -> Group:
        """Return the group of some of the tasks, with the values that were computed for them.

        tasks (k,): different numbers of tasks of this group, in rising order. `cached_property`
        reads values from `__dict__`, so they are not computed again.
        """
        if len(tasks) == len(self.y):
            return self
        selected = Group(self.refit, self.initial, self.x_rows[tasks], self.y[tasks])
        cached = [name for name in ("phi", "f", "root") if name in self.__dict__]
        selected.__dict__.update({name: self.__dict__[name][tasks] for name in cached})
        return selected

    @cached_property
    def phi(self) -> Tensor:
        """Return the features of each task's input (m, F), in the basis."""
        return self.refit.features[self.x_rows]

    @cached_property
    def f(self) -> Tensor:
        """Return the outputs at θ̂ of each task's input (m, C)."""
        return self.refit.f[self.x_rows]

    def push(self, point: Tensor) -> Tensor:
        """Return the change J δ of the outputs at each task's input (m, C), for steps δ' (m, P)."""
        return torch.einsum(
            "mcf,mf->mc",
            point.reshape(len(point), self.refit.outputs, -1),
            self.phi.to(point.dtype),
        )

    def pull(self, u: Tensor) -> Tensor:
        """Return Jᵀu at each task's input (m, P) in the basis, for u (m, C)."""
        return (u.unsqueeze(-1) * self.phi.to(u.dtype).unsqueeze(1)).flatten(1)

    @cached_property
    def root(self) -> Tensor:
        """Return R with R Rᵀ = K = J H⁻¹ Jᵀ (m, C, C), for the H of steps."""
        return self._factorise_covariance(self.initial)

    def _factorise_covariance(self, initial: InitialCurvature) -> Tensor:
        """Return R with R Rᵀ = K = J H⁻¹ Jᵀ (m, C, C), for H = `initial`.

        It is computed once for each distinct input.
        """
        distinct, index = self.x_rows.unique(return_inverse=True)
        K = initial.operator.covariance(Features(self.refit.features[distinct], self.refit.outputs))
        return linalg.covariance_root((K + K.mT) / 2)[index]

    def find_determinant_root(self, initial: InitialCurvature) -> Tensor:
        """Return R with R Rᵀ = K = J H⁻¹ Jᵀ (m, C, C), for the H = `initial` of determinants.

        It is the root of steps if both have the same prior.
        """
        has_same_prior = initial.prior is self.initial.prior
        return self.root if has_same_prior else self._factorise_covariance(initial)

    def compute_start_point(self) -> Tensor:
        """Compute where the ascent starts (m, P): START_SHARE times the output refit's step H⁻¹Jᵀu.

        If the likelihood does not allow all outputs, the ascent starts at θ̂ (zeros), which is
        allowed.
        """
        if not self.refit.new_likelihood.linear_domain:
            return torch.zeros(len(self.y), self.refit.gradient.numel(), dtype=torch.float64)
        u = evaluate_at_mode(self.refit.new_likelihood, self.y, self.f, self.root).pull
        return START_SHARE * self.initial.solve(self.pull(u))

    def evaluate(self, point: Tensor, tasks: Tensor) -> Slope:
        """Compute the gradient of the objective at points (m, P), and the step (H + JᵀΛJ)⁻¹ of it.

        tasks (m,): the numbers of the tasks in this group. The scores at θ̂ are subtracted row by
        row, so that g₀ cancels exactly. The gradient is NaN where an output is not allowed.
        """
        return self.select_tasks(tasks)._evaluate_all(point)

    def _evaluate_all(self, point: Tensor) -> Slope:
        """Compute what `evaluate` does for all tasks, in the dtype of the points (m, P)."""

        refit, new_likelihood, dtype = self.refit, self.refit.new_likelihood, point.dtype
        gradient, outside = self._compute_data_gradient_change(point)
        y = _cast_target(self.y, dtype)
        f_new = self.f.to(dtype) + self.push(point)
        gradient = gradient + self.pull(new_likelihood.score(y, f_new).to(dtype))
        gradient = gradient + refit.compute_prior_gradient_change(point)
        # With mode="as_is" g₀ is not subtracted, so it stays in the gradient.
        if refit.posterior.mode == AS_IS:
            gradient = gradient + refit.to_basis(refit.gradient.unsqueeze(0)).to(dtype)
        if not new_likelihood.linear_domain:
            outside |= ~torch.isfinite(new_likelihood.log_prob(y, f_new))
            gradient = torch.where(outside.unsqueeze(-1), torch.nan, gradient)
        return Slope(gradient, self._compute_preconditioned_step(gradient, y, f_new))

    def _compute_data_gradient_change(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the change of the data's gradient ∇ℓ_D from θ̂ (m, P), for points (m, P).

        The second result marks tasks for which the output of a training row is not allowed (m,).
        Products are in the dtype of the points.
        """
        likelihood = self.refit.posterior.likelihood
        m, C = self.f.shape
        total = torch.zeros(C, m, self.phi.shape[1], dtype=point.dtype)
        outside = torch.zeros(m, dtype=torch.bool)

        for _, block, f in self.yield_outputs(point):
            if likelihood.softmax:
                # For classes y cancels in the difference.
                score = likelihood.score_change(block.targets, f, block.f.unsqueeze(1))
            else:
                # The scores at θ̂ belong to the rows alone: they are computed once for all tasks.
                before = likelihood.score(block.y, block.f).unsqueeze(1)
                score = likelihood.score(block.targets, f) - before
            if not likelihood.linear_domain:
                outside |= ~torch.isfinite(likelihood.log_prob(block.targets, f)).all(0)
            total += block.apply_weights(score).to(point.dtype).movedim(-1, 0).mT @ block.x

        return total.movedim(0, 1).reshape(m, -1), outside

    def evaluate_newton(self, point: Tensor, tasks: Tensor) -> Slope:
        """Compute the gradient of the objective at points (m, P), and Newton's step H̃⁻¹ of it.

        tasks (m,): the numbers of the tasks in this group. H̃ is the Hessian of each task at its
        own point. This is for tasks that have not converged with the H that all tasks share.
        """
        group = self.select_tasks(tasks)
        tasks_at_once = count_matrices_at_once(
            self.refit.posterior.memory_budget, self.refit.gradient.numel()
        )
        slopes = [
            group.select_tasks(chosen)._evaluate_with_newton(point[chosen])
            for chosen in torch.arange(len(point)).split(tasks_at_once)
        ]
        return Slope(*(torch.cat(column) for column in zip(*slopes, strict=True)))

    def _evaluate_with_newton(self, point: Tensor) -> Slope:
        """Compute what `evaluate_newton` does for all tasks of the group, in float64.

        point (m, P). A task whose H̃ has no Cholesky factor takes the step of `evaluate`.
        """
        shared = self._evaluate_all(point)
        change = self._sum_packed_change(point, self.initial, torch.float64)
        precision = self._compute_new_row_precision(point, self.initial)
        newton_steps = []

        for H, gradient, shared_step in zip(
            self._yield_task_curvatures(change.packed, point, precision, self.initial),
            shared.gradient.split(self._matrices_at_once),
            shared.step.split(self._matrices_at_once),
            strict=True,
        ):
            factor, info = torch.linalg.cholesky_ex(H)
            step = torch.cholesky_solve(gradient.unsqueeze(-1), factor).squeeze(-1)
            exists = (info == 0) & torch.isfinite(step).all(-1)
            newton_steps.append(torch.where(exists.unsqueeze(-1), step, shared_step))

        return Slope(shared.gradient, torch.cat(newton_steps))

    def _compute_new_row_precision(self, point: Tensor, initial: InitialCurvature) -> Tensor:
        """Compute Λ of each task's new row (m, C, C) at points (m, P), of the kind of `initial`."""

        f_new = self.f + self.push(point)
        return compute_row_curvature(
            self.refit.new_likelihood, initial.curvature_kind, self.y, f_new
        )

    def _compute_preconditioned_step(self, gradient: Tensor, y: Tensor, f_new: Tensor) -> Tensor:
        """Compute (H + JᵀΛJ)⁻¹g = z − H⁻¹Jᵀ(I + ΛK)⁻¹ΛJz with z = H⁻¹g (m, P).

        J, Λ and K are those of the new rows. By Woodbury's formula no task needs a P×P matrix.
        gradient: g (m, P). y (m, …), f_new (m, C): the targets and outputs of the new rows.
        """
        z = self.initial.solve(gradient)
        u = compute_new_row_pull(
            self.refit.new_likelihood, y, f_new, self.root.to(gradient.dtype), self.push(z)
        )
        return z - self.initial.solve(self.pull(u))

    def yield_outputs(self, point: Tensor) -> Iterator[tuple[Block, Block, Tensor]]:
        """Yield the training rows in blocks, with their outputs in all tasks, for points (m, P).

        The three values are the block as `refit.rows` holds it, the same block in the dtype of the
        points, and the outputs (b, m, C), stored component-major.
        """
        # Steps have the shape (C, F, m) here: one product with the features for all tasks.
        step = point.reshape(len(point), self.refit.outputs, -1).permute(1, 2, 0).contiguous()
        for stored in self.refit.rows:
            block = self.refit.cast_block(stored, point.dtype)
            f = (block.x @ step).add_(block.f.mT.unsqueeze(-1)).movedim(0, -1)
            yield stored, block, f

    def compute_likelihood_and_prior(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the likelihood increments, with the tilt, and the prior increments: both (m,).

        point (m, P): the modes. The tilt is −g₀ᵀ(θ̃ − θ̂); mode="as_is" has none.
        """
        refit = self.refit
        likelihood = refit.posterior.likelihood
        step = refit.from_basis(point)
        increment = refit.new_likelihood.log_prob(self.y, self.f + self.push(point))
        # Differences row by row do not cancel, so classes may have them in single precision.
        single = refit.options.tolerance >= SINGLE_TOLERANCE and not self.y.is_floating_point()
        for _, block, f in self.yield_outputs(point.float() if single else point):
            change = likelihood.log_prob_difference(block.targets, f, block.f.unsqueeze(1))
            increment = increment + block.apply_weights(change).sum(0, dtype=torch.float64)
        if refit.posterior.mode != AS_IS:
            increment = increment - step @ refit.gradient
        return increment, refit.prior.compute_value_change(step)

    def compute_curvature_increments(
        self, point: Tensor, initial: InitialCurvature
    ) -> tuple[Tensor, Tensor]:
        """Compute −½[log|H̃(θ̃)| − log|H(θ̂)|] (m,) at points (m, P), and where it exists (m,).

        initial: H(θ̂), of whose kind H̃ is too. With logdet="frozen" the training rows keep their
        curvature at θ̂.
        """
        precision = self._compute_new_row_precision(point, initial)
        if self.refit.options.logdet == FROZEN:
            return compute_new_row_increment(self.find_determinant_root(initial), precision)
        tasks_at_once = count_matrices_at_once(
            self.refit.posterior.memory_budget, self.refit.gradient.numel()
        )
        results = [
            self.select_tasks(tasks)._compute_increments_by_factors(
                point[tasks], precision[tasks], initial
            )
            for tasks in torch.arange(len(point)).split(tasks_at_once)
        ]
        increments, positive = zip(*results, strict=True)
        return torch.cat(increments), torch.cat(positive)

    def _compute_increments_by_factors(
        self, point: Tensor, precision: Tensor, initial: InitialCurvature
    ) -> tuple[Tensor, Tensor]:
        """Compute the curvature increments by a Cholesky factor of H + ΔH + JᵀΛJ for each task.

        point (m, P), precision: Λ of the new rows (m, C, C). Returns the increments, and where the
        matrix is positive definite: both (m,). There are three ways:

        - with fewer than MANY_FEATURES features, or where float32 does not hold the likelihood's
          derivatives, everything is in float64;
        - at a tolerance that float32 meets, `_compute_increments_in_single`;
        - otherwise ΔH is formed in float32, and tr H⁻¹ΔH, the first order of the log determinant,
          in float64. The rest is off by less than 1e-7·‖ΔH‖/λ, λ the least eigenvalue of H (2e-10
          was seen; tests/refit/test_weights.py allows 1e-9). Tasks with ‖ΔH‖ > LARGE_CHANGE·λ have
          ΔH in float64.
        """
        if self.phi.shape[1] < MANY_FEATURES or not self.refit.fits_single_precision:
            half, positive = self._compute_half_logdet_change(
                self._sum_packed_change(point, initial, torch.float64).packed,
                point,
                precision,
                initial,
            )
            return -half, positive
        if self.refit.options.tolerance >= SINGLE_TOLERANCE:
            return self._compute_increments_in_single(point, precision, initial)
        packed, trace = self._sum_packed_change(point, initial, torch.float32)

        # ‖ΔH‖ up to a factor √2: an entry of the packed form stands for 1, 2 or 4 of ΔH.
        change_norm = (2 * packed.square().sum(-1)).sqrt()
        large = (change_norm > LARGE_CHANGE * initial.least_eigenvalue).nonzero().squeeze(-1)
        packed = packed.double()
        if large.numel():
            in_double = self.select_tasks(large)._sum_packed_change(
                point[large], initial, torch.float64
            )
            packed[large] = in_double.packed
            trace[large] = in_double.trace

        return self._compute_increments_with_exact_trace(
            PackedChange(packed, trace), point, precision, initial
        )

    def _compute_increments_in_single(
        self, point: Tensor, precision: Tensor, initial: InitialCurvature
    ) -> tuple[Tensor, Tensor]:
        """Compute what `_compute_increments_by_factors` does, with matrices in float32.

        The trace of H⁻¹ΔH is summed in float64. A task with a small step takes −½[log|I + ΛK| + tr
        H⁻¹ΔH], without a matrix, if the bound on ‖H⁻¹ΔH‖ is small: what this leaves out is of the
        order of its square (see LOOSE).
        """
        single = point.float()
        value = torch.empty(len(point), dtype=torch.float64)
        positive = torch.zeros(len(point), dtype=torch.bool)
        small_steps = (point.norm(dim=-1) < SMALL_STEP).nonzero().squeeze(-1)
        if small_steps.numel() and initial.prior.is_gaussian:
            group = self.select_tasks(small_steps)
            trace, bound = group._compute_trace_and_bound(single[small_steps], initial)
            frozen, exists = compute_new_row_increment(
                group.find_determinant_root(initial), precision[small_steps]
            )
            value[small_steps] = frozen - 0.5 * trace
            positive[small_steps] = exists & (bound.square() <= LOOSE * SMALL_ERROR)

        for tasks in (~positive).nonzero().squeeze(-1).split(CACHED_TASKS):
            if not tasks.numel():  # `split` gives one empty part of nothing
                continue
            group = self.select_tasks(tasks)
            change = group._sum_packed_change(single[tasks], initial, torch.float32)
            value[tasks], positive[tasks] = group._compute_increments_with_exact_trace(
                change, point[tasks], precision[tasks], initial
            )

        return value, positive

    def _compute_increments_with_exact_trace(
        self, change: PackedChange, point: Tensor, precision: Tensor, initial: InitialCurvature
    ) -> tuple[Tensor, Tensor]:
        """Compute the increments (m,) from a rounded ΔH, and where the determinant exists (m,).

        To first order the log determinant is tr H⁻¹ΔH. That of the rounded ΔH is replaced by
        `change.trace`, which is in float64. point (m, P), precision: Λ of the new rows (m, C, C).
        """
        rounding = change.trace - change.packed.double() @ initial.packed_inverse
        half, positive = self._compute_half_logdet_change(change.packed, point, precision, initial)
        return -half - 0.5 * rounding, positive

    def _compute_half_logdet_change(
        self, change: Tensor, point: Tensor, precision: Tensor, initial: InitialCurvature
    ) -> tuple[Tensor, Tensor]:
        """Compute ½ log|H + ΔH + JᵀΛJ| − ½ log|H| (m,), and where it exists (m,).

        change: the packed ΔH (m, pairs · v), in whose dtype the matrices are. point (m, P),
        precision: Λ of the new rows (m, C, C). The value is a sum of logarithms of ratios of
        pivots, which are near one: no two large determinants are subtracted.
        """
        pivots, infos = [], []
        for H in self._yield_task_curvatures(change, point, precision, initial):
            factor, info = torch.linalg.cholesky_ex(H)
            pivots.append(factor.diagonal(dim1=-2, dim2=-1))
            infos.append(info)
        half = (torch.cat(pivots).double() / initial.factor.diagonal()).log().sum(-1)
        return half, torch.cat(infos) == 0

    @property
    def _matrices_at_once(self) -> int:
        """Return the number of P×P matrices that fit the cache together, at least one."""
        return max(CACHE_BYTES // (8 * self.refit.gradient.numel() ** 2), 1)

    def _yield_task_curvatures(
        self, change: Tensor, point: Tensor, precision: Tensor, initial: InitialCurvature
    ) -> Iterator[Tensor]:
        """Yield H̃ = H + ΔH + JᵀΛJ of the tasks as full matrices (k, P, P), k tasks at a time.

        k is `_matrices_at_once`, and the tasks are in order. change: the packed ΔH of the data
        (m, pairs · v), in whose dtype the matrices are. point (m, P): where each task is, from
        which the change of a prior's curvature follows. precision: Λ of the new rows (m, C, C).
        initial: H, whose contrasts, if any, Λ is projected to.
        """
        m, C, F = len(self.y), initial.outputs, self.phi.shape[1]
        dtype = change.dtype
        if initial.contrasts is not None:
            precision = initial.contrasts.project_matrices(precision)
        by_pairs = torch.stack([precision[:, a, b] for a, b in list_index_pairs(C)], 1)

        # JᵀΛJ, packed as ΔH: each entry of Λ times all products of two features.
        new_row = by_pairs.unsqueeze(-1) * multiply_pairs(self.phi).unsqueeze(1)
        packed = new_row.flatten(1).to(dtype) + change
        prior_precision_change = initial.prior.compute_precision_change(
            self.refit.from_basis(point)
        )

        for tasks in torch.arange(m).split(self._matrices_at_once):
            H = (
                packed[tasks]
                .index_select(1, list_packed_positions(C, F))
                .reshape(-1, C * F, C * F)
                .add_(initial.matrix.to(dtype))
            )
            if prior_precision_change is not None:
                H += change_basis(prior_precision_change[tasks], self.refit.basis).to(dtype)
            yield H

    def _yield_row_changes(
        self, point: Tensor, initial: InitialCurvature
    ) -> Iterator[tuple[Block, Tensor]]:
        """Yield the training rows in blocks, with ΔΛ of their rows in all tasks (pairs, b, m).

        ΔΛ_i = Λ(f̃_i) − Λ(f̂_i) at points (m, P), times the row's weight, of which the pairs a ≤ b
        of outputs are kept. initial: its kind is that of Λ, and its contrasts, if any, are the
        outputs. A block without a change, as with Gaussian noise, is left out.
        """
        if initial.contrasts is not None:
            yield from self._yield_class_row_changes(point, initial.contrasts)
            return
        likelihood = self.refit.posterior.likelihood
        for stored, block, f in self.yield_outputs(point):
            if initial.curvature_kind == FISHER:
                change = likelihood.fisher(f) - likelihood.fisher(block.f).unsqueeze(1)
            else:
                change = likelihood.precision(block.targets, f) - likelihood.precision(
                    block.y, block.f
                ).unsqueeze(1)
            if bool(change.any()):
                by_entry = block.apply_weights(change).movedim((-2, -1), (0, 1)).flatten(0, 1)
                yield stored, by_entry[list_upper_positions(self.refit.outputs)]

    def _yield_class_row_changes(
        self, point: Tensor, contrasts: Contrasts
    ) -> Iterator[tuple[Block, Tensor]]:
        """Yield what `_yield_row_changes` does, for a softmax in contrasts of classes.

        point (m, P). Λ at θ̂ is stored for the block (see `LastLayerRefit.store_for_block`).
        """
        for stored, block, f in self.yield_outputs(point):
            before = self.refit.store_for_block(
                stored,
                f"pairs {f.dtype}",
                partial(contrasts.project_softmax_curvature, block.f.mT),
            )
            change = contrasts.project_softmax_curvature(f.movedim(-1, 0)).sub_(
                before.unsqueeze(-1)
            )
            if block.weights is not None:
                change = change * block.weights.unsqueeze(-1)
            yield stored, change

    def _sum_packed_change(
        self, point: Tensor, initial: InitialCurvature, dtype: torch.dtype
    ) -> PackedChange:
        """Compute ΔH = Σ_i ΔΛ_i ⊗ φ_iφ_iᵀ at points (m, P), packed and in `dtype`, and tr H⁻¹ΔH.

        ΔH is one product of the ΔΛ of all tasks with vech(φφᵀ) of the rows, which all tasks share.
        The trace is Σ_i tr K_iΔΛ_i, with H = `initial`; it is summed in float64.
        """
        m, F = len(point), self.phi.shape[1]
        count = len(list_index_pairs(initial.outputs))
        total = torch.zeros(m * count, F * (F + 1) // 2, dtype=dtype)
        trace = torch.zeros(m, dtype=torch.float64)
        for block, change in self._yield_row_changes(point, initial):
            K = self.refit.list_paired_covariances(block, initial).to(change.dtype)
            trace += torch.einsum("pb,pbm->m", K, change)
            by_task = change.to(dtype).movedim(-1, 0).reshape(m * count, -1)
            total.addmm_(by_task, self.refit.multiply_features(block, dtype))
        return PackedChange(total.reshape(m, -1), trace)

    def _compute_trace_and_bound(
        self, point: Tensor, initial: InitialCurvature
    ) -> tuple[Tensor, Tensor]:
        """Compute tr H⁻¹ΔH (m,), and a bound on ‖H⁻¹ΔH‖ (m,), for points (m, P) and H = `initial`.

        The trace is Σ_i tr K_iΔΛ_i, and the bound Σ_i Σ_ab |K_iab||ΔΛ_iab|. No P×P matrix is
        formed: all tasks share the K_i of the training rows.
        """
        trace = torch.zeros(len(point), dtype=torch.float64)
        bound = torch.zeros(len(point), dtype=torch.float64)
        for block, change in self._yield_row_changes(point, initial):
            K = self.refit.list_paired_covariances(block, initial).to(change.dtype)
            trace += torch.einsum("pb,pbm->m", K, change)
            bound += torch.einsum("pb,pbm->m", K.abs(), change.abs())
        return trace, bound


def _cast_target(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return targets y, of any shape, in `dtype`; whole numbers (classes) stay as they are."""
    return y.to(dtype) if y.is_floating_point() else y


def list_index_pairs(size: int) -> list[tuple[int, int]]:
    """Return all pairs (a, b) with a ≤ b < size, in the order of the rows of an upper triangle."""
    return [(a, b) for a in range(size) for b in range(a, size)]


@lru_cache(maxsize=8)
def list_upper_positions(size: int) -> Tensor:
    """Return the positions (pairs,) of the pairs a ≤ b in a flattened size × size matrix."""
    return torch.tensor([a * size + b for a, b in list_index_pairs(size)])


def multiply_pairs(phi: Tensor) -> Tensor:
    """Return vech(φφᵀ) of rows φ (b, F), the upper triangles of φφᵀ by rows: (b, F(F + 1)/2)."""
    triangle = torch.triu_indices(phi.shape[1], phi.shape[1])
    return phi[:, triangle[0]] * phi[:, triangle[1]]


@lru_cache(maxsize=8)
def list_packed_positions(outputs: int, size: int) -> Tensor:
    """Return the position of each entry of a P×P matrix in its packed form, flattened (P²,).

    The matrix has outputs × outputs blocks of size × size, P = outputs · size. The packed form is
    that of the module's docstring.
    """
    triangle = torch.triu_indices(size, size)
    position = torch.empty(size, size, dtype=torch.long)
    numbers = torch.arange(triangle.shape[1])
    position[triangle[0], triangle[1]] = numbers
    position[triangle[1], triangle[0]] = numbers
    index = torch.empty(outputs, size, outputs, size, dtype=torch.long)
    for k, (a, b) in enumerate(list_index_pairs(outputs)):
        index[a, :, b, :] = k * triangle.shape[1] + position
        index[b, :, a, :] = index[a, :, b, :]
    return index.flatten()


def change_basis(H: Tensor, basis: Tensor) -> Tensor:
    """Return T⁻¹ H T⁻ᵀ with T = I ⊗ L_B, for symmetric H (…, P, P) and the basis L_B (F, F)."""
    F, P = basis.shape[0], H.shape[-1]

    def solve_left(matrix: Tensor) -> Tensor:
        """Return T⁻¹ M for a matrix M (…, P, P)."""
        by_output = matrix.reshape(*matrix.shape[:-2], P // F, F, P)
        solved: Tensor = torch.linalg.solve_triangular(
            basis.expand(*by_output.shape[:-2], F, F), by_output, upper=False
        )
        return solved.reshape(matrix.shape)

    # (T⁻¹H)ᵀ = HT⁻ᵀ, as H is symmetric.
    return solve_left(solve_left(H).mT)
