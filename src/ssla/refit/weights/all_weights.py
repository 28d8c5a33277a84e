"""Refits of any set of weights: all tasks at once through `torch.func`, preconditioned by the
fitted curvature.

The network is run for m parameter vectors at a time; gradients come by one backward pass through
all of them. Few weights are preconditioned with their exact Hessian at θ̂, many with the fitted
structure, to which Anderson's mixing adds what the structure leaves out. Gradients of many weights
are in float32 until they are as small as its rounding allows; every task ends with gradients in
float64, which decide whether it has converged. `reference` computes the same for one task, without
these tricks. What they bring (docs/notes/refits.md):

gradients in float32      0.28 ms for each task in place of 0.55 ms (2,851 weights, 300 rows)
Anderson's mixing         not measured alone; longer mixed steps took three classes from 66 to 88
                          gradients to 15 to 19
the fitted structure      24.5 gradients, where the exact Hessian at θ̂ takes 16 to 17 and costs
                          seconds to build (2,851 weights)
a linearised start        not measured alone
batched products          not measured alone

Terms and symbols are those of `ssla.refit.weights`. Points are θ − θ̂ (P,). The preconditioner is
H⁻¹ at θ̂, which all tasks share: that of the full Hessian for few weights (at most
`determinants.SMALL`) if it is positive definite, otherwise that of the fitted structure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssla._checks import warn
from ssla.curvature.jacobians import LayerJacobian
from ssla.curvature.woodbury import WoodburyOperator
from ssla.data import Inputs, as_inputs, map_inputs, row_count, take_rows
from ssla.likelihoods import Likelihood
from ssla.maths import linalg
from ssla.network.any_parameters import AnyParameters
from ssla.network.stacked import ROWS_AT_ONCE, StackedChain, open_chain
from ssla.priors import PAPER
from ssla.refit.increments import evaluate_at_mode
from ssla.refit.interrupts import Interrupted
from ssla.refit.weights.anderson import (
    SHARED_STEPS,
    Ascent,
    Progress,
    Slope,
    ascend,
    compute_saddle_free_step,
    finish_with_newton,
)
from ssla.refit.weights.determinants import SMALL, Determinants
from ssla.refit.weights.refit_rows import (
    Block,
    PriorChange,
    TrainingRows,
    as_batch,
    check_same_data,
    open_rows,
    solve_rows,
)
from ssla.refit.weights.solved import HESSIAN, Options, Solved, compute_new_row_pull
from ssla.report import AS_IS

if TYPE_CHECKING:
    from ssla.posterior import Posterior

MOST_TASKS = 256  # a guess: tasks that are solved together
# Guesses, for the memory of one task: vectors of all weights for each mixed round and besides
# them, and copies of the activations of all rows.
VECTORS_OF_HISTORY = 4
VECTORS_OF_ASCENT = 16
ACTIVATION_COPIES = 6
# A guess: gradients of a trial. Twice as many as a refit to 1e-3 takes.
TRIAL_STEPS = 40
# A guess: below this many times the rounding error of float32, gradients are in float64.
ABOVE_ROUNDING = 5.0
NEARLY = 0.9  # a guess: float32 ends at this part of the tolerance, so that float64 confirms it
# A guess: tasks this many posterior standard deviations from a mode after the shared steps start
# at θ̂ again for Newton's method.
LOST = 0.1
PROGRESS = 0.1  # a guess: a trial whose distance falls below this part of the first is not stuck


@dataclass(frozen=True, eq=False)
class ManyNetworks:
    """f_θ for many θ at once on the CPU, in the dtype of θ.

    Where the network is a chain of layers it is run by matrix products, else by `vmap`.
    """

    network: AnyParameters
    chain: StackedChain | None = None

    def compute_outputs_of_one(self, theta: Tensor, x: Inputs) -> Tensor:
        """Return f of one θ (P,) on rows x (b, …): (b, C)."""
        return self.network.compute_outputs(self.network.layout.unpack(theta), x)

    def compute_outputs_on_same_rows(self, thetas: Tensor, x: Inputs) -> Tensor:
        """Return f of every θ (m, P) on the same rows x (b, …): (m, b, C).

        A chain runs as many networks together as stay in the cache.
        """
        if self.chain is not None and isinstance(x, Tensor):
            chain, rows = self.chain, x
            return torch.cat(
                [
                    chain.compute_outputs(chain.split_parameters(some_thetas), rows)
                    for some_thetas in thetas.split(_count_networks_at_once(rows))
                ]
            )
        return self._map_over_first(lambda theta: self.compute_outputs_of_one(theta, x), thetas)

    def compute_outputs_on_own_rows(self, thetas: Tensor, x: Inputs) -> Tensor:
        """Return f of each θ (m, P) on a row of its own, for x (m, …): (m, C)."""
        if self.chain is not None and isinstance(x, Tensor):
            return self.chain.compute_outputs(
                self.chain.split_parameters(thetas), x.unsqueeze(1)
            ).squeeze(1)
        return self._map_over_first(
            lambda theta, row: self.compute_outputs_of_one(theta, as_batch(row)).squeeze(0),
            thetas,
            x,
        )

    @staticmethod
    def _map_over_first(function: Callable[..., Tensor], *values: Any) -> Tensor:
        """Call a function for each index of the first dimension of all `values`; stack the results.

        All calls are made at once if every layer has a batching rule, and one by one otherwise. An
        error of the function itself is raised there.
        """
        try:
            result: Tensor = torch.func.vmap(function)(*values)
        except RuntimeError:
            # A layer without a batching rule, such as a recurrent one. Any other error is raised
            # again below.
            index = torch.arange(len(values[0]))
            result = torch.stack(
                [function(*(take_rows(value, i) for value in values)) for i in index]
            )
        return result

    def compute_gradients(
        self,
        thetas: Tensor,
        x: Inputs,
        score: Callable[[Tensor], Tensor],
        one_row_each: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Compute Σ_i J_i(θ)ᵀ score(f_i) for each θ (m, P), and the outputs f; neither has a graph.

        score: a function from outputs f to scores of their shape, which is not differentiated.
        one_row_each: x (m, …) has one row for each θ, and f is (m, C). Otherwise all θ have the
        same rows x (b, …) and f is (m, b, C); `score` may then be called for some of the θ at a
        time.
        """
        if self.chain is not None and isinstance(x, Tensor):
            return self._compute_chain_gradients(self.chain, thetas, x, score, one_row_each)
        run = (
            self.compute_outputs_on_own_rows if one_row_each else self.compute_outputs_on_same_rows
        )
        with torch.enable_grad():
            free = thetas.detach().clone().requires_grad_(True)
            f = run(free, x)
            (total,) = torch.autograd.grad(f, free, score(f.detach()).to(f.dtype))
        return total, f.detach()

    @staticmethod
    def _compute_chain_gradients(
        chain: StackedChain,
        thetas: Tensor,
        x: Tensor,
        score: Callable[[Tensor], Tensor],
        one_row_each: bool,
    ) -> tuple[Tensor, Tensor]:
        """Compute what `compute_gradients` does, by the matrix products of a chain of layers.

        The arguments after `chain` are those of `compute_gradients`, with x as one tensor.
        """
        if one_row_each:
            f, total = chain.compute_outputs_and_gradient(
                thetas, x.unsqueeze(1), lambda f: score(f.squeeze(1)).to(f.dtype).unsqueeze(1)
            )
            return total, f.squeeze(1)
        results = [
            chain.compute_outputs_and_gradient(some_thetas, x, lambda f: score(f).to(f.dtype))
            for some_thetas in thetas.split(_count_networks_at_once(x))
        ]
        return torch.cat([total for _, total in results]), torch.cat([f for f, _ in results])


def _count_networks_at_once(x: Tensor) -> int:
    """Return how many networks run together on rows x (b, …), at least one."""
    return max(ROWS_AT_ONCE // len(x), 1)


@dataclass(frozen=True, eq=False)
class AllWeightsRefit:
    """All refits of one posterior's weights at inputs x.

    An `Engine`: `solve` takes any tasks (row of x, y). Points are θ − θ̂ (m, P).
    """

    posterior: Posterior
    options: Options
    networks: ManyNetworks
    networks_single: ManyNetworks  # the same in float32
    rows: TrainingRows  # inputs in float64
    x: Inputs  # in float64
    f: Tensor  # f̂ at x (N, C)
    jacobian: Tensor  # J at x (N, C, P)
    gradient: Tensor  # ∇ℓ_D(θ̂) (P,)
    precondition: Callable[[Tensor], Tensor]  # H⁻¹v for each row v of (m, P)
    precondition_single: Callable[[Tensor], Tensor]  # the same in float32
    determinants: Determinants
    # the same with the prior of the objective, whose curvature steers the steps
    step_curvature: Determinants
    interrupted: Interrupted = field(default_factory=Interrupted)

    @property
    def new_likelihood(self) -> Likelihood:
        """Return the likelihood of the new observation."""
        return self.posterior.likelihood.predictive

    @cached_property
    def prior(self) -> PriorChange:
        """Return the change of log π with a step from θ̂, as an object: the prior increment."""
        return PriorChange(self.posterior.bound_prior, self.posterior.theta)

    @cached_property
    def objective_prior(self) -> PriorChange:
        """Return the change of the log prior in the objective of the refits."""
        return PriorChange(self.posterior.objective_prior, self.posterior.theta)

    @property
    def tasks_at_once(self) -> int:
        """Return the number of tasks that are solved together, at most MOST_TASKS.

        They take at most half of the memory budget.
        """
        budget = self.posterior.memory_budget
        rows_of_block = min(
            self.posterior.network.rows_at_once(budget), self.posterior.statistics.n
        )
        vectors = VECTORS_OF_HISTORY * self.options.memory + VECTORS_OF_ASCENT
        activation_bytes = (
            ACTIVATION_COPIES * self.networks.network.frozen.bytes_per_row * rows_of_block
        )
        task_bytes = 8 * self.gradient.numel() * vectors + activation_bytes
        return max(min(budget // 2 // task_bytes, MOST_TASKS), 1)

    def find_modes(self, x_rows: Tensor, y: Tensor, progress: Progress | None = None) -> Ascent:
        """Find the mode of each task, for x_rows (m,) and y (m, …): see `Engine`.

        Ctrl-C ends the ascent: tasks that have not converged count as such.
        """
        with self.interrupted.listen():
            return self._find_modes(_Group(self, x_rows, y), self.options.max_steps, progress)

    def solve(
        self,
        x_rows: Tensor,
        y: Tensor,
        progress: Progress | None = None,
        at: Ascent | None = None,
    ) -> Solved:
        """Compute the three increments of m tasks, each at its own mode: see `Engine`.

        x_rows (m,): the row of x of each task. y (m, …). Ctrl-C ends the ascent, with a warning:
        tasks that have converged keep their answers, and the others count as not converged. Later
        calls then return untried tasks, unless `at` is given.
        """
        if self.interrupted.asked and at is None:
            return Solved.untried(len(x_rows))
        with self.interrupted.listen():
            group = _Group(self, x_rows, y)
            ascent = at
            if ascent is None:
                ascent = self._find_modes(group, self.options.max_steps, progress)
            likelihood, prior, f_new = group.compute_likelihood_and_prior(ascent.point)
            curvature, fallback, positive = self.determinants(
                ascent.point, f_new, y, group.x, group.root
            )
            finite = torch.isfinite(likelihood + prior + curvature)
            converged = ascent.converged & positive & finite

        if self.interrupted.asked:
            warn(
                f"Refits of the weights were interrupted: {int(converged.sum()):,} of "
                f"{len(x_rows):,} under way were finished. The others, and all that had not "
                "started, count as not converged.",
                RuntimeWarning,
            )

        return Solved(
            likelihood,
            prior,
            curvature,
            fallback,
            converged,
            ascent.steps,
            ascent.norm,
            error=torch.zeros_like(curvature),
        )

    def find_stuck(self, x_rows: Tensor, y: Tensor) -> Tensor:
        """Return a mask of the tasks (m,) that are stuck: √(gᵀH⁻¹g) does not fall below PROGRESS.

        PROGRESS is relative to its value at θ̂. A trial takes TRIAL_STEPS gradients, with the H⁻¹
        that all tasks share. Near a mode each few gradients bring a digit. Near a saddle the
        objective rises without bound along some direction, or to a mode far away. x_rows
        (m,), y (m, …): see `Engine`.
        """
        group = _Group(self, x_rows, y)
        theta_hat = torch.zeros(len(x_rows), self.gradient.numel(), dtype=torch.float64)
        first = group.evaluate(theta_hat, torch.arange(len(x_rows)))
        first_norm = (first.gradient * first.step).sum(-1).clamp_min(0).sqrt()
        enough = max(PROGRESS * float(first_norm.min()), self.options.tolerance)
        ascent = self._find_modes(group, min(TRIAL_STEPS, self.options.max_steps), tolerance=enough)
        return ~(ascent.norm <= (PROGRESS * first_norm).clamp_min(self.options.tolerance))

    def find_weights_at_modes(self, x_rows: Tensor, y: Tensor) -> Tensor:
        """Find the mode of each task, and return its weights θ̃ (m, P): see `Engine`."""
        ascent = self._find_modes(_Group(self, x_rows, y), self.options.max_steps)
        return self.posterior.theta + ascent.point

    @cached_property
    def float32_rounding(self) -> float:
        """Return √(eᵀH⁻¹e) of the error e that float32 makes in the data's gradient at θ̂.

        The unit is posterior standard deviations. It is infinite if the gradient overflows. It
        costs a pass over the data, once.
        """
        likelihood = self.posterior.likelihood
        theta = self.posterior.theta.float().unsqueeze(0)
        error = -self.gradient
        for block in self.rows:

            def score(f: Tensor, block: Block = block) -> Tensor:
                """Return the weighted scores of a block for outputs f (1, b, C) of one network."""
                return block.apply_weights(likelihood.score(block.y, f[0].double())).unsqueeze(0)

            gradient, _ = self.networks_single.compute_gradients(
                theta, map_inputs(_to_single, block.x), score
            )
            error = error + gradient.squeeze(0).double()

        square = float(error @ self.precondition(error.unsqueeze(0)).squeeze(0))
        # A gradient that overflows in float32 gives NaN: it is never exact enough.
        return float("inf") if math.isnan(square) else max(square, 0.0) ** 0.5

    def _find_modes(
        self,
        group: _Group,
        max_steps: int,
        progress: Progress | None = None,
        tolerance: float | None = None,
    ) -> Ascent:
        """Find the modes of a group's tasks with the preconditioner that all tasks share.

        Many weights start with gradients in float32, if these are accurate enough. Tasks of few
        weights that have not converged continue with their own Hessians. max_steps: the most
        gradients of a task. tolerance: where the ascent ends; None: that of the options.
        """
        tolerance = self.options.tolerance if tolerance is None else tolerance
        few_weights = self.gradient.numel() <= SMALL
        shared_steps = min(max_steps, SHARED_STEPS) if few_weights else max_steps
        start = torch.zeros(len(group.y), self.gradient.numel(), dtype=torch.float64)

        # The refit of the linearised network gives a direction, perhaps too long.
        toward: Tensor | None = group.linearised_step
        earlier = None

        if not few_weights and self.float32_rounding * ABOVE_ROUNDING < PROGRESS:
            earlier = self._ascend_in_single(group, group.linearised_step, max_steps, tolerance)
            start, toward = earlier.point.double(), None
        ascent = ascend(
            group.evaluate,
            start,
            tolerance=tolerance,
            max_steps=shared_steps,
            memory=self.options.memory,
            toward=toward,
            progress=progress,
            earlier=earlier,
            stop=self.interrupted,
        )
        if few_weights:  # Newton's method is safer from θ̂ than from a point far from any mode
            lost = (~ascent.converged & (ascent.norm > LOST)).unsqueeze(-1)
            point = torch.where(lost, torch.zeros_like(ascent.point), ascent.point)
            ascent = replace(ascent, point=point)

        return finish_with_newton(
            ascent,
            lambda unfinished: group.select_tasks(unfinished).evaluate_newton,
            tolerance=tolerance,
            max_steps=max_steps - shared_steps,
            progress=progress,
        )

    def _ascend_in_single(
        self, group: _Group, toward: Tensor, max_steps: int, tolerance: float
    ) -> Ascent:
        """Ascend from θ̂ with gradients in float32, as far as their rounding allows.

        toward (m, P): the first direction. max_steps, tolerance: see `_find_modes`. The result is
        in float32.
        """
        return ascend(
            group.evaluate,
            torch.zeros_like(toward, dtype=torch.float32),
            tolerance=max(NEARLY * tolerance, ABOVE_ROUNDING * self.float32_rounding),
            max_steps=max_steps,
            memory=self.options.memory,
            toward=toward.float(),
            stop=self.interrupted,
        )


@dataclass(frozen=True, eq=False)
class _Group:
    """m tasks that are solved together. Points are θ − θ̂ (m, P)."""

    refit: AllWeightsRefit
    x_rows: Tensor  # the row of x of each task (m,)
    y: Tensor  # the target that each task adds (m, …)

    @cached_property
    def x(self) -> Inputs:
        """Return the input of each task, m rows in float64."""
        return take_rows(self.refit.x, self.x_rows)

    @cached_property
    def jacobian(self) -> Tensor:
        """Return J at each task's input (m, C, P)."""
        return self.refit.jacobian[self.x_rows]

    @cached_property
    def U(self) -> Tensor:
        """Return U = H⁻¹Jᵀ at each task's input (m, C, P), computed once for each input."""
        distinct, index = self.x_rows.unique(return_inverse=True)
        J = self.refit.jacobian[distinct]
        return self.refit.precondition(J.flatten(0, 1)).reshape(J.shape)[index]

    @cached_property
    def jacobian_single(self) -> Tensor:
        """Return J at each task's input in float32 (m, C, P)."""
        return self.jacobian.float()

    @cached_property
    def U_single(self) -> Tensor:
        """Return U = H⁻¹Jᵀ at each task's input in float32 (m, C, P)."""
        return self.U.float()

    @cached_property
    def root(self) -> Tensor:
        """Return R with R Rᵀ = K = J H⁻¹ Jᵀ at each task's input (m, C, C)."""
        K = self.jacobian @ self.U.mT
        return linalg.covariance_root((K + K.mT) / 2)

    @cached_property
    def linearised_step(self) -> Tensor:
        """Return H⁻¹Jᵀu (m, P), the step of the refit of the network linearised at θ̂.

        u (m, C) is its pull. The step is zero if the likelihood does not allow all outputs.
        """
        f = self.refit.f[self.x_rows]
        if not self.refit.new_likelihood.linear_domain:
            return torch.zeros(len(f), self.jacobian.shape[-1], dtype=torch.float64)
        pull = evaluate_at_mode(self.refit.new_likelihood, self.y, f, self.root).pull
        return (pull.unsqueeze(-2) @ self.U).squeeze(-2)

    def select_tasks(self, tasks: Tensor) -> _Group:
        """Return the group of some of the tasks, with the values that were computed for them.

        tasks (k,): different numbers of tasks of this group, in rising order. `cached_property`
        reads values from `__dict__`, so they are not computed again.
        """
        if len(tasks) == len(self.y):
            return self
        selected = _Group(self.refit, self.x_rows[tasks], self.y[tasks])
        cached = ("jacobian", "U", "root", "jacobian_single", "U_single")
        selected.__dict__.update(
            {name: self.__dict__[name][tasks] for name in cached if name in self.__dict__}
        )
        return selected

    def evaluate(self, point: Tensor, tasks: Tensor) -> Slope:
        """Compute the gradient of the objective at points (m, P), and the step (H + JᵀΛJ)⁻¹ of it.

        tasks (m,): the numbers of the tasks in this group. H and J are those at θ̂. Both results
        are in the dtype of the points. The gradient is NaN where an output is not allowed.
        """
        group = self.select_tasks(tasks)
        gradient, f_new = group.compute_gradient(point)
        return Slope(gradient, group._compute_preconditioned_step(gradient, f_new))

    def evaluate_newton(self, point: Tensor, tasks: Tensor) -> Slope:
        """Compute the gradient of the objective at points (m, P), and the step |H̃|⁻¹ of it.

        tasks (m,): the numbers of the tasks in this group. H̃ is the Hessian of each task at its
        point; see `compute_saddle_free_step`.
        """
        group = self.select_tasks(tasks)
        gradient, _ = group.compute_gradient(point)
        theta = self.refit.posterior.theta + point
        H = self.refit.step_curvature.compute_augmented_curvature(HESSIAN, theta, group.y, group.x)
        return Slope(gradient, compute_saddle_free_step(H, gradient))

    def compute_gradient(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradient of the objective at points (m, P), and the outputs at x there.

        The gradient (m, P) is in the dtype of the points, float32 or float64, and NaN where an
        output is not allowed. The outputs (m, C) are in float64. Points that are all zero need no
        pass over the data.
        """
        refit, new_likelihood = self.refit, self.refit.new_likelihood
        if not bool(point.any()):
            return self._compute_gradient_at_start(point)
        if point.dtype == torch.float64:
            networks, cast = refit.networks, _to_double
        else:
            networks, cast = refit.networks_single, _to_single
        theta = refit.posterior.theta.to(point.dtype) + point
        x = map_inputs(cast, self.x)
        total, f_new = networks.compute_gradients(
            theta, x, lambda f: new_likelihood.score(self.y, f.double()), one_row_each=True
        )
        total, outside = self._add_data_gradient(total, theta, networks, cast)
        total = total + refit.objective_prior.compute_gradient_change(point)

        # The prior's change leaves ∇log π(θ̂) out, so "as_is" adds it and "tilt" only takes ∇ℓ_D(θ̂).
        if refit.posterior.mode == AS_IS:
            total = total + refit.posterior.objective_prior.gradient(refit.posterior.theta)
        else:
            total = total - refit.gradient
        f_new = f_new.double()
        if not new_likelihood.linear_domain:
            outside |= ~torch.isfinite(new_likelihood.log_prob(self.y, f_new))

        return torch.where(outside.unsqueeze(-1), torch.nan, total).to(point.dtype), f_new

    def _add_data_gradient(
        self,
        total: Tensor,
        theta: Tensor,
        networks: ManyNetworks,
        cast: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return total + ∇ℓ_D(θ) for each θ (m, P), and where an output is not allowed (m,).

        total (m, P) is not changed. networks and cast, which casts inputs, have the dtype of theta.
        """
        likelihood = self.refit.posterior.likelihood
        outside = torch.zeros(len(theta), dtype=torch.bool)
        for block in self.refit.rows:

            def score(f: Tensor, block: Block = block) -> Tensor:
                """Return the weighted scores of a block for outputs f (m, b, C)."""
                value = likelihood.score(block.y, f.double())
                return value if block.weights is None else value * block.weights.unsqueeze(-1)

            gradient, f = networks.compute_gradients(theta, map_inputs(cast, block.x), score)
            total = total + gradient
            if not likelihood.linear_domain:
                outside |= ~torch.isfinite(likelihood.log_prob(block.y, f.double())).all(-1)

        return total, outside

    def _compute_gradient_at_start(self, zero: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the objective's gradient at θ̂ (m, P), and the outputs at x (m, C).

        It needs no pass over the data: it is the gradient of log p(y|x,θ̂), and g₀ in addition with
        mode="as_is". zero (m, P): the points, whose dtype the gradient gets.
        """
        refit = self.refit
        f_new = refit.f[self.x_rows]
        score = refit.new_likelihood.score(self.y, f_new)
        total = (score.unsqueeze(-2) @ self.jacobian).squeeze(-2)
        if refit.posterior.mode == AS_IS:
            prior_gradient = refit.posterior.objective_prior.gradient(refit.posterior.theta)
            total = total + refit.gradient + prior_gradient
        return total.to(zero.dtype), f_new

    def _compute_preconditioned_step(self, gradient: Tensor, f_new: Tensor) -> Tensor:
        """Compute (H + JᵀΛJ)⁻¹g = z − H⁻¹Jᵀ(I + ΛK)⁻¹ΛJz (m, P), with z = H⁻¹g.

        J, Λ and K are those of the new rows. By Woodbury's formula no task needs a P×P matrix.
        gradient: g (m, P), in whose dtype the products are. f_new (m, C): the outputs at x.
        """
        refit = self.refit
        if gradient.dtype == torch.float64:
            J, U = self.jacobian, self.U
            z = refit.precondition(gradient)
        else:
            J, U = self.jacobian_single, self.U_single
            z = refit.precondition_single(gradient)
        Jz = (J @ z.unsqueeze(-1)).squeeze(-1).double()
        u = compute_new_row_pull(refit.new_likelihood, self.y, f_new, self.root, Jz)
        return z - (u.to(z.dtype).unsqueeze(-2) @ U).squeeze(-2)

    def compute_likelihood_and_prior(self, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the likelihood increments (m,) with the tilt, and the prior increments (m,).

        The third result is the outputs at x (m, C). point (m, P): the modes. With mode="as_is"
        there is no tilt.
        """
        refit, likelihood = self.refit, self.refit.posterior.likelihood
        theta = refit.posterior.theta + point
        with torch.no_grad():
            f_new = refit.networks.compute_outputs_on_own_rows(theta, self.x)
            increment = refit.new_likelihood.log_prob(self.y, f_new)
            for block in refit.rows:
                f = refit.networks.compute_outputs_on_same_rows(theta, block.x)
                change = likelihood.log_prob_difference(block.y, f, block.f)
                change = change if block.weights is None else change * block.weights
                increment = increment + change.sum(-1)

        if refit.posterior.mode != AS_IS:
            slope = refit.gradient + refit.posterior.objective_prior.gradient(refit.posterior.theta)
            increment = increment - point @ slope
        return increment, refit.prior.compute_value_change(point), f_new


def open_all_weights(
    posterior: Posterior, x: Inputs, options: Options, data: Any
) -> AllWeightsRefit:
    """Prepare all refits of any weights at inputs x: everything that does not depend on y.

    A pass over the data sums the gradient at θ̂, and for few weights another one the Hessian. x: N
    inputs. data: the training data; None: those of the posterior. Raises TypeError for a network of
    another kind, and ValueError if the data are not those of the fit or cannot be read again.
    """
    network, theta = posterior.network, posterior.theta
    if not isinstance(network, AnyParameters):
        raise TypeError(
            f"A refit of the weights does not support networks of type {type(network).__name__}. "
            "Use refit='output'."
        )
    networks = ManyNetworks(
        replace(network, fixed_tensors=_map_values(network.fixed_tensors, _to_double))
    )

    def prepare_inputs(inputs: Inputs) -> tuple[Inputs, Tensor]:
        """Return cast inputs (b, …) in float64, and f̂ (b, C)."""
        inputs_64 = map_inputs(_to_double, inputs)
        with torch.no_grad():
            return inputs_64, networks.compute_outputs_of_one(theta, inputs_64)

    rows = open_rows(posterior, data, prepare_inputs)
    inputs_64, f = prepare_inputs(network.cast(as_inputs(x)))

    # The same networks by matrix products, where they are a chain, and in float32.
    networks = replace(networks, chain=open_chain(networks.network, inputs_64, theta))
    single = replace(network, fixed_tensors=_map_values(network.fixed_tensors, _to_single))
    chain = None if networks.chain is None else replace(networks.chain, network=single)

    n, gradient = _sum_gradient(posterior, networks, rows)
    check_same_data(posterior, n, gradient)

    step_curvature = determinants = Determinants(
        posterior, options, networks.compute_outputs_of_one, rows, posterior.objective_prior
    )
    if posterior.convention == PAPER:  # the prior is in the steps, and not in the determinants
        determinants = replace(determinants, prior=posterior.determinant_prior)
    factor = step_curvature.start_factor
    return AllWeightsRefit(
        posterior=posterior,
        options=options,
        networks=networks,
        networks_single=ManyNetworks(single, chain),
        rows=rows,
        x=inputs_64,
        f=f,
        jacobian=_compute_jacobian(posterior, x),
        gradient=gradient,
        precondition=lambda v: solve_rows(posterior.operator, factor, v),
        precondition_single=_precondition_in_single(posterior, factor),
        determinants=determinants,
        step_curvature=step_curvature,
    )


def _compute_jacobian(posterior: Posterior, x: Inputs) -> Tensor:
    """Return J at inputs x (N, C, P), in float64, with all its entries."""
    # `AnyParameters` has no Jacobians but LayerJacobian: the test below is for the type checker.
    jacobians = [J.double() for _, J in posterior.linearised(x)]
    return torch.cat([J.to_dense().values for J in jacobians if isinstance(J, LayerJacobian)])


def _sum_gradient(
    posterior: Posterior, networks: ManyNetworks, rows: TrainingRows
) -> tuple[int, Tensor]:
    """Return the number of training rows, and the gradient ∇ℓ_D(θ̂) (P,) in float64.

    networks: in float64, as the rows are.
    """
    theta = posterior.theta
    n, gradient = 0, torch.zeros_like(theta)
    for block in rows:
        n += row_count(block.x)
        # The outputs at θ̂ are known, so the scores do not depend on those that are computed again.
        score = block.apply_weights(posterior.likelihood.score(block.y, block.f)).unsqueeze(0)
        block_gradient, _ = networks.compute_gradients(theta.unsqueeze(0), block.x, score.expand_as)
        gradient += block_gradient.squeeze(0)
    return n, gradient


def _precondition_in_single(
    posterior: Posterior, factor: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """Return the function that maps each row v of a tensor (m, P) to H⁻¹v, in float32.

    It computes in float32 if the structure allows it. factor: the Cholesky factor of H (P, P);
    None: H⁻¹ is that of the posterior's structure.
    """
    operator = posterior.operator
    if isinstance(operator, WoodburyOperator):
        single = WoodburyOperator(
            operator.prior.float(), operator.basis.float(), operator.spectrum.float()
        )
        return lambda v: single.solve_many(v.mT).mT
    if factor is not None:
        factor_single = factor.float()
        return lambda v: torch.cholesky_solve(v.mT, factor_single).mT
    return lambda v: solve_rows(operator, factor, v.double()).float()


def _to_double(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU, in float64 unless it holds whole numbers or booleans."""
    return tensor.to("cpu", torch.float64) if tensor.is_floating_point() else tensor.to("cpu")


def _to_single(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU, in float32 unless it holds whole numbers or booleans."""
    return tensor.to("cpu", torch.float32) if tensor.is_floating_point() else tensor.to("cpu")


def _map_values(
    named: Mapping[str, Tensor], change: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return named tensors, each changed by a function."""
    return {name: change(value) for name, value in named.items()}
