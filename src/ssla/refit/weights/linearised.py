"""Refits of the network linearised at θ̂: f_i(θ) = f̂_i + J_i(θ − θ̂) on every row.

The objective is that of `ssla.refit.weights.all_weights` with these outputs. Under a Gaussian prior
and a log likelihood that is concave in f it is strictly concave, whatever θ̂ is: every refit has a
mode. It differs from the output refit in that the log likelihood and the curvature of all training
rows are those at θ̃.

Steps are written as δ = H⁻¹(Jᵀa + J_xᵀb), with a number in (a, b) for each output of the training
rows and of the new row. With K = J H⁻¹ Jᵀ (`linearised_covariance`) and T the prior's precision,

    J δ = K a + K_x b,      T δ = Jᵀ(a − ΛJδ) + J_xᵀb,

so that the gradient of the objective is Jᵀr + J_xᵀr_x with

    r = g(y, f) − g(y, f̂) + ΛJδ − a,      r_x = g(y, f_x) − b,

and (r, r_x) is the step of Newton's method with the curvature H at θ̂. An evaluation is one product
with K. The outputs move along with a point: it is (a, b, Jδ, J_xδ), in which everything is linear.

Determinants are those of `linearised_determinants`.

Terms and symbols are those of `ssla.refit.weights`. Here too:

R      the number of outputs of all training rows, n·c
c      the number of contrasts of classes Qᵀf (`ssla.refit.weights.contrasts`), or of outputs if the
       likelihood does not allow contrasts. J and K are those of the contrasts
_x     a subscript of values at the new row of a task; r, a and Jδ without it are (R,)
H₁     H + J_xᵀΛJ_x, the curvature at θ̂ with that of the new row
point  (a, b, Jδ, J_xδ) in one tensor (m, 2R + 2c), see `Point`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ssla.data import Inputs, as_inputs, row_count
from ssla.likelihoods import Likelihood
from ssla.maths import linalg
from ssla.network.frozen import split_into_chunks
from ssla.priors import BoundGaussian
from ssla.refit.increments import FISHER, OBSERVED, evaluate_at_mode
from ssla.refit.interrupts import Interrupted
from ssla.refit.weights.all_weights_dual import MOST_OUTPUTS
from ssla.refit.weights.anderson import (
    SHARED_STEPS,
    START_SHARE,
    Ascent,
    Progress,
    Slope,
    ascend,
)
from ssla.refit.weights.contrasts import Contrasts
from ssla.refit.weights.last_layer_probing import NewRow
from ssla.refit.weights.linearised_covariance import (
    SHARE,
    Jacobians,
    OutputCovariance,
    count_covariance_bytes,
    form_output_covariance,
)
from ssla.refit.weights.linearised_determinants import CurvatureChange, TaskCurvature
from ssla.refit.weights.refit_rows import Block, TrainingRows, check_same_data, open_rows
from ssla.refit.weights.solved import (
    EXACT,
    FROZEN,
    TRACES,
    Options,
    Solved,
    compute_new_row_increment,
    compute_new_row_pull,
    compute_row_curvature,
)
from ssla.report import AS_IS

if TYPE_CHECKING:
    from ssla.posterior import Posterior

MOST_TASKS = 64  # a guess: tasks that are solved together
# Guesses: the standard error aimed at, in log density, is TARGET_ERROR/√p for a probability p, and
# at most RARE_ERROR times TARGET_ERROR.
TARGET_ERROR, RARE_ERROR = 2e-3, 10.0
NEGATIVE = -1e-9  # a guess: an eigenvalue of Λ above it, over the largest one, may be rounding
# Guesses, for the memory of one task: vectors of outputs besides those of the history, and float64
# values of each output of a row.
VECTORS_OF_ASCENT, VALUES_OF_OUTPUT = 8, 8


class OutputCounts(NamedTuple):
    """How many outputs and weights a problem has; outputs are counted in contrasts."""

    R: int  # outputs of all training rows
    P: int  # weights
    new: int  # outputs of all new rows

    @staticmethod
    def from_posterior(posterior: Posterior, new_rows: int) -> OutputCounts:
        """Return the counts for a posterior and a number of new rows."""
        outputs = choose_output_contrasts(posterior).shape[1]
        training = posterior.statistics.n * outputs
        return OutputCounts(training, posterior.theta.numel(), new_rows * outputs)


def choose_output_contrasts(posterior: Posterior) -> Tensor:
    """Return Q (C, c): contrasts of classes if the likelihood allows them, otherwise the identity.

    They are allowed if the likelihood does not depend on the sum of the outputs.
    """
    C = posterior.network.outputs
    if posterior.likelihood.shift_invariant:
        return Contrasts(C).matrix
    return torch.eye(C, dtype=torch.float64)


def find_obstacle_to_linearising(posterior: Posterior, new_rows: int, single: bool) -> str | None:
    """Return why refits of the linearised network are not possible, with a remedy.

    None if they are possible. new_rows: the number of new inputs. single: whether products would be
    in float32.
    """
    prior = posterior.bound_prior
    is_gaussian = isinstance(prior, BoundGaussian)
    if not (is_gaussian and bool((prior.precision(posterior.theta) > 0).all())):
        return (
            "Refits of the linearised network need a Gaussian prior with a precision above zero "
            f"for every weight, but this posterior has {posterior.report.prior}. Use "
            "ssla.priors.Gaussian, or refit='output'."
        )
    if posterior.mode == AS_IS:
        return (
            "Refits of the linearised network start from a mode, but this posterior has "
            "mode='as_is'. Use mode='tilt', or refit='output'."
        )
    counts = OutputCounts.from_posterior(posterior, new_rows)
    needed = count_covariance_bytes(*counts, itemsize=4 if single else 8)
    if needed > posterior.memory_budget:
        return (
            f"Refits of the linearised network need {needed / 2**30:.2g} GiB for the covariance of "
            f"{counts.R:,} outputs of training rows ({new_rows:,} new rows, {counts.P:,} weights), "
            f"more than the memory budget of {posterior.memory_budget / 2**30:.2g} GiB. Fit with a "
            "larger memory_budget, give fewer new rows at a time, or use refit='output'."
        )

    return None


@dataclass(frozen=True, eq=False)
class RowsAtMode:
    """All training rows at θ̂, in the dtype of the refits unless stated."""

    f: Tensor  # f̂ (n, C), in float64
    y: Tensor  # (n, …)
    weights: Tensor | None  # of rows (n,), in float64; None: all one
    score: Tensor  # weighted g(y, f̂) in contrasts (n, c), in float64
    precision: Tensor  # weighted Λ(f̂) in contrasts (n, c, c)

    def apply_weights(self, values: Tensor) -> Tensor:
        """Return values (m, n, c) times the weights of the rows."""
        return values if self.weights is None else values * self.weights.to(values).unsqueeze(-1)


@dataclass(frozen=True, eq=False)
class LinearisedRefit:
    """All refits of one posterior's network, linearised at θ̂, at inputs x. An `Engine`."""

    posterior: Posterior
    options: Options
    rows: RowsAtMode
    blocks: TrainingRows  # the rows as they are read, for `find_weights_at_modes`
    x: Inputs
    f: Tensor  # f̂ at x (N, C)
    Q: Tensor  # contrasts of outputs (C, c)
    covariance: OutputCovariance
    curvature_kind: str  # of the curvature in both determinants
    dtype: torch.dtype
    interrupted: Interrupted

    @property
    def new_likelihood(self) -> Likelihood:
        """Return the likelihood of the new observation."""
        return self.posterior.likelihood.predictive

    @property
    def fallback(self) -> bool:
        """Return whether the Fisher information replaces an indefinite observed curvature."""
        return self.curvature_kind != self.options.curvature

    @property
    def tasks_at_once(self) -> int:
        """Return the number of tasks that are solved together, at most MOST_TASKS.

        They take at most an eighth of the memory budget.
        """
        n, C = self.rows.f.shape
        numbers = 2 * n * self.Q.shape[1]  # of a point: a and Jδ
        # The ascent keeps three vectors for each mixed round, in the dtype of the refits.
        vectors = 3 * self.options.memory + VECTORS_OF_ASCENT
        task_bytes = self.dtype.itemsize * numbers * vectors + 8 * VALUES_OF_OUTPUT * n * C
        return max(min(self.posterior.memory_budget // 8 // task_bytes, MOST_TASKS), 1)

    def project_to_contrasts(self, precision: Tensor) -> Tensor:
        """Compute QᵀΛQ (…, c, c) for curvatures Λ (…, C, C)."""
        Q = self.Q.to(precision.dtype)
        return Q.mT @ precision @ Q

    def find_modes(self, x_rows: Tensor, y: Tensor, progress: Progress | None = None) -> Ascent:
        """Find the mode of each task, for x_rows (m,) and y (m, …): see `Engine`.

        Ctrl-C ends the ascent: tasks that have not converged count as such.
        """
        with self.interrupted.listen():
            return self._find_modes(Group(self, x_rows, y), progress)

    def solve(
        self,
        x_rows: Tensor,
        y: Tensor,
        progress: Progress | None = None,
        at: Ascent | None = None,
    ) -> Solved:
        """Compute the three increments of m tasks, each at its own mode: see `Engine`.

        x_rows (m,): the row of x of each task. y (m, …). Ctrl-C ends the ascent: tasks that have
        not converged count as such. Later calls then return untried tasks, unless `at` is given.
        """
        if self.interrupted.asked and at is None:
            return Solved.untried(len(x_rows))
        with self.interrupted.listen():
            group = Group(self, x_rows, y)
            ascent = self._find_modes(group, progress) if at is None else at
            likelihood, prior = group.compute_likelihood_and_prior(ascent.point)
            curvature, positive, error = group.compute_curvature_increments(
                ascent.point, likelihood + prior
            )

        finite = torch.isfinite(likelihood + prior + curvature)
        return Solved(
            likelihood,
            prior,
            curvature,
            fallback=torch.full_like(positive, self.fallback),
            converged=ascent.converged & positive & finite,
            steps=ascent.steps,
            norm=ascent.norm.double(),
            error=error,
        )

    def find_stuck(self, x_rows: Tensor, y: Tensor) -> Tensor:
        """Return False for each task (m,): outputs are linear in the weights, and modes exist."""
        return torch.zeros(len(x_rows), dtype=torch.bool)

    def find_weights_at_modes(self, x_rows: Tensor, y: Tensor) -> Tensor:
        """Find the mode of each task, and return θ̃ = θ̂ + T⁻¹(Jᵀ(a − ΛJδ) + J_xᵀb) (m, P).

        It needs a pass over the training rows, whose Jacobians are not kept. x_rows (m,), y (m, …):
        see `Engine`.
        """
        group = Group(self, x_rows, y)
        mode = group.split_point(self._find_modes(group).point)
        network, theta = self.posterior.network, self.posterior.theta
        total = torch.zeros(len(theta), len(y), dtype=torch.float64)

        # Jᵀ(a − ΛJδ) of the training rows, block by block.
        pulled = (mode.a - group.multiply_by_precision(mode.moved)).double()
        by_row = pulled.reshape(len(y), *self.rows.precision.shape[:2]) @ self.Q.mT
        first = 0

        for block in self.blocks:
            last = first + len(block.f)
            _, J = network.linearise(block.x, theta)
            total += J.double().pull_many(by_row[:, first:last].permute(1, 2, 0))
            first = last

        # J_xᵀb of the new rows: each task has its b at its own input.
        at_x = torch.zeros(len(self.f), len(self.Q), len(y), dtype=torch.float64)
        at_x[x_rows, :, torch.arange(len(y))] = mode.b.double() @ self.Q.mT
        first = 0

        for inputs in network.chunks(self.x, self.posterior.memory_budget):
            last = first + row_count(inputs)
            _, J = network.linearise(inputs, theta)
            total += J.double().pull_many(at_x[first:last])
            first = last
        return theta + total.mT / self.posterior.bound_prior.precision(theta)

    def _find_modes(self, group: Group, progress: Progress | None = None) -> Ascent:
        """Find the modes of a group's tasks, at first with the curvature at θ̂ that all share.

        After every SHARED_STEPS evaluations the tasks that have not converged continue with their
        own curvatures at the points that they have reached. Ctrl-C ends it.
        """
        options = self.options
        start = group.compute_start_point()
        ascent = Ascent.not_started(start)
        tasks = torch.arange(len(start))
        steps_left = options.max_steps

        while len(tasks) and steps_left > 0 and not self.interrupted.asked:
            later = ascend(
                group.evaluate,
                start,
                tolerance=options.tolerance,
                max_steps=min(SHARED_STEPS, steps_left),
                memory=options.memory,
                progress=progress,
                stop=self.interrupted,
            )
            ascent = ascent.continued_by(tasks, later)
            unfinished = (~later.converged).nonzero().squeeze(-1)
            tasks = tasks[unfinished]
            steps_left -= SHARED_STEPS
            start = later.point[unfinished]
            if len(tasks) and steps_left > 0:
                group = group.select_tasks(unfinished).add_task_curvatures(start)

        return ascent


class Point(NamedTuple):
    """A step δ = H⁻¹(Jᵀa + J_xᵀb) of m tasks, with the change of the outputs by it."""

    a: Tensor  # (m, R)
    b: Tensor  # (m, c)
    moved: Tensor  # Jδ (m, R), the change of the training rows' outputs
    at_x: Tensor  # J_xδ (m, c), that of the new row's outputs


@dataclass(frozen=True, eq=False)
class Group:
    """m tasks that are solved together."""

    refit: LinearisedRefit
    x_rows: Tensor  # the row of x of each task (m,)
    y: Tensor  # the target that each task adds (m, …)
    # what each task adds to the curvature at θ̂ in its preconditioner; None: nothing
    task_curvatures: tuple[TaskCurvature, ...] | None = None

    def select_tasks(self, tasks: Tensor) -> Group:
        """Return the group of some of the tasks, with the values that were computed for them.

        tasks (k,): different numbers of tasks of this group, in rising order. `cached_property`
        reads values from `__dict__`, so they are not computed again.
        """
        if len(tasks) == len(self.y):
            return self
        curvatures = None
        if self.task_curvatures is not None:
            curvatures = tuple(self.task_curvatures[task] for task in tasks.tolist())
        selected = Group(self.refit, self.x_rows[tasks], self.y[tasks], curvatures)
        names = ("cross_covariance", "root")
        cached = {name: self.__dict__[name][tasks] for name in names if name in self.__dict__}
        selected.__dict__.update(cached)
        return selected

    def add_task_curvatures(self, point: Tensor) -> Group:
        """Return the group with the curvature of each task at its point in its preconditioner.

        point (m, 2R + 2c).
        """
        location = self.split_point(point)
        changes = self._yield_curvature_changes(
            location, self._compute_new_row_precision(location), range(len(self.y))
        )
        return replace(
            self, task_curvatures=tuple(change.select_task_curvature() for change in changes)
        )

    def _compute_new_row_precision(self, location: Point) -> Tensor:
        """Compute Λ of each task's new row at its outputs there (m, C, C), of the refits' kind."""
        refit = self.refit
        return compute_row_curvature(
            refit.new_likelihood, refit.curvature_kind, self.y, self.compute_new_outputs(location)
        )

    def _yield_curvature_changes(
        self, location: Point, precision: Tensor, tasks: Iterable[int]
    ) -> Iterator[CurvatureChange]:
        """Yield how the curvature of the training rows changes in some tasks, by number, in order.

        location: of all tasks. precision: Λ of the new rows of all tasks (m, C, C).
        """
        explained = NewRow.from_covariance(
            self.K_in_contrasts, self.refit.project_to_contrasts(precision)
        ).explained
        f = self.compute_training_outputs(location.moved)
        for task in tasks:
            yield CurvatureChange(self.refit, f[task], self.cross_covariance[task], explained[task])

    @cached_property
    def cross_covariance(self) -> Tensor:
        """Return J H⁻¹ J_xᵀ of each task's input (m, R, c), in the dtype of the refits."""
        return self.refit.covariance.cross_covariance[self.x_rows]

    @property
    def K_in_contrasts(self) -> Tensor:
        """Return K_x in contrasts (m, c, c), in float64."""
        return self.refit.covariance.new_covariance[self.x_rows]

    @property
    def K(self) -> Tensor:
        """Return K_x of all outputs (m, C, C), in float64."""
        return self.refit.Q @ self.K_in_contrasts @ self.refit.Q.mT

    @cached_property
    def root(self) -> Tensor:
        """Return R with R Rᵀ = K_x (m, C, C)."""
        return linalg.covariance_root(self.K)

    @property
    def f(self) -> Tensor:
        """Return f̂ at each task's input (m, C)."""
        return self.refit.f[self.x_rows]

    def split_point(self, point: Tensor) -> Point:
        """Return points (m, 2R + 2c) by their four parts."""
        R, c = self.refit.covariance.cross_covariance.shape[1:]
        return Point(*point.split([R, c, R, c], -1))

    def compute_start_point(self) -> Tensor:
        """Compute where the ascent starts (m, 2R + 2c): START_SHARE times the output refit's step.

        In that step a = 0. If the likelihood does not allow all outputs, the ascent starts at θ̂
        (zeros), which is allowed.
        """
        refit = self.refit
        m = len(self.y)
        R, c = self.cross_covariance.shape[1:]
        if not refit.new_likelihood.linear_domain:
            return torch.zeros(m, 2 * (R + c), dtype=refit.dtype)
        output_refit = evaluate_at_mode(refit.new_likelihood, self.y, self.f, self.root)
        b = (START_SHARE * output_refit.pull @ refit.Q).to(refit.dtype)
        moved, at_x = self._compute_output_changes(torch.zeros(m, R, dtype=refit.dtype), b)
        return torch.cat([torch.zeros_like(moved), b, moved, at_x], -1)

    def _compute_output_changes(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Compute Jδ (m, R) and J_xδ (m, c) for δ = H⁻¹(Jᵀa + J_xᵀb), a (m, R) and b (m, c)."""
        along = (self.cross_covariance @ b.unsqueeze(-1)).squeeze(-1)
        at_x = (self.K_in_contrasts.to(b.dtype) @ b.unsqueeze(-1)).squeeze(-1)
        # At the start a = 0: the product with K, the expensive one, is left out.
        if not bool(a.any()):
            return along, at_x
        moved = self.refit.covariance.multiply(a) + along
        return moved, at_x + (a.unsqueeze(-2) @ self.cross_covariance).squeeze(-2)

    def compute_training_outputs(self, moved: Tensor) -> Tensor:
        """Compute the outputs f̂ + Jδ of the training rows (m, n, C), for moved, their Jδ (m, R).

        They are in the dtype of `moved`.
        """
        rows, Q = self.refit.rows, self.refit.Q.to(moved.dtype)
        by_row = moved.reshape(len(moved), len(rows.f), -1)
        return rows.f.to(moved.dtype) + by_row @ Q.mT

    def compute_new_outputs(self, location: Point) -> Tensor:
        """Compute the outputs of each task's new row (m, C), in float64."""
        return self.f + location.at_x.double() @ self.refit.Q.mT

    def multiply_by_precision(self, moved: Tensor) -> Tensor:
        """Compute ΛJδ (m, R), for moved, Jδ (m, R), and Λ of the training rows at θ̂."""
        precision = self.refit.rows.precision
        by_row = moved.reshape(len(moved), len(precision), -1)
        product = torch.einsum("ncd,mnd->mnc", precision.to(moved.dtype), by_row)
        return product.reshape(moved.shape)

    def evaluate(self, point: Tensor, tasks: Tensor) -> Slope:
        """Compute the gradient of the objective at points (m, 2R + 2c), and the step H₁⁻¹ of it.

        tasks (m,): the numbers of the tasks in this group. With `task_curvatures` H₁ includes them.
        Gradient and step have the form of a point, see `_evaluate_all`.
        """
        return self.select_tasks(tasks)._evaluate_all(point)

    def _evaluate_all(self, point: Tensor) -> Slope:
        """Evaluate all tasks by the formulas of the module's docstring, at points (m, 2R + 2c).

        The gradient is (0, 0, r, r_x): its dot product with a step (a, b, Jδ, J_xδ) is the slope of
        the objective along the step. It is NaN where an output is not allowed.
        """
        refit, new_likelihood = self.refit, self.refit.new_likelihood
        likelihood = refit.posterior.likelihood
        location = self.split_point(point)
        f, f_new = self.compute_training_outputs(location.moved), self.compute_new_outputs(location)
        y = refit.rows.y
        change = likelihood.score_change(y, f, refit.rows.f.to(f.dtype))
        change = (refit.rows.apply_weights(change) @ refit.Q.to(refit.dtype)).flatten(1)
        r = change + self.multiply_by_precision(location.moved) - location.a
        r_x = (new_likelihood.score(self.y, f_new) @ refit.Q).to(refit.dtype) - location.b
        gradient = torch.cat([torch.zeros_like(r), torch.zeros_like(r_x), r, r_x], -1)
        if not (likelihood.linear_domain and new_likelihood.linear_domain):
            allowed = torch.isfinite(likelihood.log_prob(y, f)).all(-1)
            allowed &= torch.isfinite(new_likelihood.log_prob(self.y, f_new))
            gradient = torch.where(allowed.unsqueeze(-1), gradient, torch.nan)
        step = self._compute_preconditioned_step(r, r_x, f_new)
        if self.task_curvatures is not None:
            # Woodbury's formula for the curvature of each task: r is corrected, and the step is
            # computed once more.
            corrected = self._correct_gradients(self.task_curvatures, r, step.moved)
            step = self._compute_preconditioned_step(corrected, r_x, f_new)

        return Slope(gradient, torch.cat(step, -1))

    def _correct_gradients(
        self, task_curvatures: tuple[TaskCurvature, ...], r: Tensor, moved: Tensor
    ) -> Tensor:
        """Return r (m, R), each corrected for the curvature of its task.

        task_curvatures: of the m tasks. moved (m, R): J times the step that r gives without the
        correction. See `TaskCurvature.correct_gradient`.
        """
        n, c, _ = self.refit.rows.precision.shape
        by_row = zip(task_curvatures, r.reshape(-1, n, c), moved.reshape(-1, n, c), strict=True)
        corrected = [
            curvature.correct_gradient(r_of_task, moved_of_task)
            for curvature, r_of_task, moved_of_task in by_row
        ]
        return torch.stack(corrected).flatten(1)

    def _compute_preconditioned_step(self, r: Tensor, r_x: Tensor, f_new: Tensor) -> Point:
        """Compute the step H₁⁻¹(Jᵀr + J_xᵀr_x) of m tasks, with H₁ = H + J_xᵀΛJ_x.

        By Woodbury's formula it is z − H⁻¹J_xᵀ(I + ΛK_x)⁻¹ΛJ_xz with z = H⁻¹(Jᵀr + J_xᵀr_x).
        r (m, R), r_x (m, c), and Λ of the new rows at their outputs f_new (m, C).
        """
        Q = self.refit.Q
        moved, moved_at_x = self._compute_output_changes(r, r_x)
        Jz = moved_at_x.double() @ Q.mT
        pull = compute_new_row_pull(self.refit.new_likelihood, self.y, f_new, self.root, Jz)
        u = (pull @ Q).to(r.dtype)
        taken, taken_at_x = self._compute_output_changes(torch.zeros_like(r), u)
        return Point(r, r_x - u, moved - taken, moved_at_x - taken_at_x)

    def compute_likelihood_and_prior(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the likelihood increments, with the tilt, and the prior increments: both (m,).

        They are in float64. point (m, 2R + 2c): the modes. log π(θ̃) − log π(θ̂) = ∇log πᵀδ − ½
        δᵀTδ, and δᵀTδ = (Jδ)ᵀ(a − ΛJδ) + (J_xδ)ᵀb.
        """
        refit, rows, covariance = self.refit, self.refit.rows, self.refit.covariance
        location = self.split_point(point.double())
        f = self.compute_training_outputs(location.moved)
        change = refit.posterior.likelihood.log_prob_difference(rows.y, f, rows.f)
        if rows.weights is not None:
            change = change * rows.weights

        # ∇log πᵀδ and ∇ℓ_Dᵀδ, whose sum is g₀ᵀδ, the tilt with the other sign.
        new_slope = covariance.new_slope[self.x_rows]
        along_prior = location.a @ covariance.slope + (location.b * new_slope).sum(-1)
        along_data = location.moved @ rows.score.flatten()
        log_prob = refit.new_likelihood.log_prob(self.y, self.compute_new_outputs(location))
        likelihood = log_prob + change.sum(-1) - along_data - along_prior

        # δᵀTδ by the identity above.
        T_product = location.a - self.multiply_by_precision(location.moved)
        square = (location.moved * T_product).sum(-1) + (location.at_x * location.b).sum(-1)
        return likelihood, along_prior - 0.5 * square

    # --- determinants ----------------------------------------------------------------------

    def compute_curvature_increments(
        self, point: Tensor, other_increments: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute −½[log|H̃(θ̃)| − log|H(θ̂)|], where it exists, and its standard error: all (m,).

        point (m, 2R + 2c): the modes. other_increments (m,): the sum of the likelihood and prior
        increments. It tells how probable a y is, and thus which error is allowed.
        """
        options = self.refit.options
        location = self.split_point(point)
        precision = self._compute_new_row_precision(location)
        value, positive = compute_new_row_increment(self.root, precision)
        error = torch.zeros_like(value)
        if options.logdet == FROZEN:
            return value, positive, error
        tasks = positive.nonzero().squeeze(-1).tolist()

        for task, change in zip(
            tasks, self._yield_curvature_changes(location, precision, tasks), strict=True
        ):
            allowed = 0.0
            if options.logdet != EXACT:
                probability = float((other_increments[task] + value[task]).clamp(max=0).exp())
                allowed = TARGET_ERROR * max(probability, RARE_ERROR**-2) ** -0.5
            half, error[task], positive[task] = change.compute_half_logdet(allowed)
            value[task] -= half

        return value, positive, error


def choose_logdet(posterior: Posterior) -> str:
    """Return the default of the option logdet: EXACT for at most MOST_OUTPUTS, otherwise TRACES."""
    has_few_outputs = OutputCounts.from_posterior(posterior, 0).R <= MOST_OUTPUTS
    return EXACT if has_few_outputs else TRACES


def open_linearised(
    posterior: Posterior, x: Any, options: Options, data: Any, single: bool
) -> LinearisedRefit:
    """Prepare all refits of the linearised network at inputs x: what does not depend on y.

    Passes over the data give the gradient at θ̂ and the covariance of all outputs. x: N inputs.
    data: the training data; None: those of the posterior. single: products are in float32. Raises
    ValueError if `find_obstacle_to_linearising` finds an obstacle, if the inputs do not fit in
    memory, or if the data are not those of the fit.
    """
    network, theta = posterior.network, posterior.theta
    inputs = network.cast(as_inputs(x))
    obstacle = find_obstacle_to_linearising(posterior, row_count(inputs), single)
    if obstacle is not None:
        raise ValueError(obstacle)
    Q = choose_output_contrasts(posterior)
    dtype = torch.float32 if single else torch.float64

    def prepare_inputs(block: Inputs) -> tuple[Inputs, Tensor]:
        """Return cast inputs as they are, and f̂ (b, C) in float64."""
        return block, network.evaluate(block, theta).double()

    blocks = open_rows(posterior, data, prepare_inputs)
    _check_training_rows(posterior, blocks)

    curvature_kind, rows = _evaluate_rows(posterior, options.curvature, blocks, Q)
    jacobians = _open_jacobians(
        posterior, blocks, inputs, Q, factorise_symmetrically(rows.precision)
    )
    chunks = network.chunks(inputs, posterior.memory_budget)
    return LinearisedRefit(
        posterior=posterior,
        options=options,
        rows=replace(rows, precision=rows.precision.to(dtype)),
        blocks=blocks,
        x=inputs,
        f=torch.cat([network.evaluate(chunk, theta).double() for chunk in chunks]),
        Q=Q,
        covariance=form_output_covariance(jacobians, dtype, posterior.memory_budget),
        curvature_kind=curvature_kind,
        dtype=dtype,
        interrupted=Interrupted(),
    )


def _evaluate_rows(
    posterior: Posterior, requested_kind: str, blocks: TrainingRows, Q: Tensor
) -> tuple[str, RowsAtMode]:
    """Return the kind of curvature that is used, and all training rows at θ̂, in float64.

    requested_kind: see `choose_curvature_at_mode`. blocks: the training rows. Q (C, c): the
    contrasts of outputs.
    """
    likelihood = posterior.likelihood
    f = torch.cat([block.f for block in blocks])
    y = torch.cat([block.y for block in blocks])
    weights = join_row_weights(list(blocks))
    curvature_kind, precision = choose_curvature_at_mode(likelihood, requested_kind, y, f)
    score = likelihood.score(y, f) @ Q
    precision = Q.mT @ precision @ Q
    if weights is not None:
        score = score * weights.unsqueeze(-1)
        precision = precision * weights[:, None, None]
    return curvature_kind, RowsAtMode(f, y, weights, score, precision)


def _check_training_rows(posterior: Posterior, blocks: TrainingRows) -> None:
    """Raise ValueError unless the rows are those of the fit, and their inputs fit in memory."""
    network, likelihood, theta = posterior.network, posterior.likelihood, posterior.theta
    n, gradient = 0, torch.zeros_like(theta)
    for block in blocks:
        n += len(block.f)
        _, J = network.linearise(block.x, theta)
        gradient += J.double().pull(block.apply_weights(likelihood.score(block.y, block.f)))
    check_same_data(posterior, n, gradient)
    if blocks.kept is None:
        raise ValueError(
            "Refits of the linearised network hold the inputs of all training rows, but they do "
            "not fit in a quarter of the memory budget. Fit with a larger memory_budget, or use "
            "refit='output'."
        )


def _open_jacobians(
    posterior: Posterior, blocks: TrainingRows, inputs: Inputs, Q: Tensor, root: Tensor
) -> Jacobians:
    """Return the Jacobians of training rows and new inputs, which each pass computes again.

    inputs: cast new inputs. Q (C, c): the contrasts of outputs. root: Λ^½ of the training rows
    (n, c, c).
    """
    network, theta, budget = posterior.network, posterior.theta, posterior.memory_budget
    prior_root = posterior.bound_prior.precision(theta).sqrt()
    # Rows whose Jacobians in all weights fit a part of the budget.
    at_once = max(budget // SHARE // (8 * len(Q) * len(theta)), 1)
    at_once = min(at_once, network.rows_at_once(budget))

    def yield_columns(x: Iterable[Inputs], first: int, last: int) -> Iterator[Tensor]:
        """Yield QᵀJ T^-½ of blocks of rows (b·c, last − first), for some of the weights.

        They are the weights first, …, last − 1.
        """
        for block in x:
            for chunk in split_into_chunks(block, at_once):
                _, J = network.linearise(chunk, theta)
                values = J.to_dense().values[:, :, first:last].double() / prior_root[first:last]
                yield (Q.mT @ values).flatten(0, 1)

    return Jacobians(
        training=lambda first, last: yield_columns((block.x for block in blocks), first, last),
        new=lambda first, last: yield_columns([inputs], first, last),
        P=len(theta),
        R=len(root) * Q.shape[1],
        new_outputs=row_count(inputs) * Q.shape[1],
        root=root,
        prior_gradient=posterior.bound_prior.gradient(theta) / prior_root,
    )


def choose_curvature_at_mode(
    likelihood: Likelihood, curvature_kind: str, y: Tensor, f: Tensor
) -> tuple[str, Tensor]:
    """Choose the kind of curvature that is used, and return it with Λ of all rows at f̂ (n, C, C).

    curvature_kind: the kind asked for. y (n, …), f: f̂ (n, C). The Fisher information takes the
    place of an observed curvature that is indefinite in some row.
    """
    if curvature_kind == OBSERVED:
        precision = likelihood.precision(y, f).expand(*f.shape, f.shape[-1])
        values = torch.linalg.eigvalsh(precision)
        if bool((values.amin(-1) >= NEGATIVE * values.abs().amax(-1)).all()):
            return OBSERVED, precision
    return FISHER, likelihood.fisher(f).expand(*f.shape, f.shape[-1])


def factorise_symmetrically(precision: Tensor) -> Tensor:
    """Return the symmetric roots Λ^½ (n, c, c) of positive semi-definite matrices Λ (n, c, c)."""
    values, vectors = torch.linalg.eigh(precision)
    root: Tensor = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT
    return root


def join_row_weights(blocks: list[Block]) -> Tensor | None:
    """Return the weights of all rows (n,) in float64; None where no block has weights."""
    if all(block.weights is None for block in blocks):
        return None
    return torch.cat([block.apply_weights(torch.ones(len(block.f)).double()) for block in blocks])
