"""Maximising thousands of smooth objectives at once, from their gradients alone.

Every task starts close to its maximum and shares a good preconditioner with the others, so a
fixed-point iteration θ ← θ + P⁻¹g converges by a constant factor in each round. Anderson's mixing
of the last few rounds makes it a Krylov method: near the maximum it is conjugate gradients on the
true Hessian, without a product with it.

The line search uses slopes, not values: a gain of 1e-16 is lost in the rounding of a sum over n
rows, its slope is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# A guess: a step may end where the slope along it is at least minus this part of what it was.
OVERSHOOT = 0.5
SHORTEST = 2.0**-24  # a guess: the shortest part of a step that is tried
# Guesses: added to the diagonal of the mixing equations, in double and in single precision.
RIDGE, SINGLE_RIDGE = 1e-14, 1e-7
# A guess: evaluations with a shared preconditioner before a task continues with its own Hessian.
SHARED_STEPS = 20
# A guess: a mixed step may be this many times as long as the plain one, because a direction of H
# may be this much weaker than P.
FARTHEST = 1000.0
LEAST_RISE = 0.01  # a guess: the least slope of a mixed step over that of the plain one
CROWDED = 0.75  # a guess: the history is copied where fewer of its tasks are still active


class Slope(NamedTuple):
    """At one point of each task: the gradient (m, P), and P⁻¹ times it."""

    gradient: Tensor
    step: Tensor


@dataclass(frozen=True)
class Ascent:
    """The end of each task's ascent: point (M, P), √(gᵀP⁻¹g) there, evaluations, and whether it
    converged.
    """

    point: Tensor
    norm: Tensor
    steps: Tensor
    converged: Tensor
    # Of the last rounds of each task, for an ascent that continues this one.
    history: History | None = None

    @staticmethod
    def not_started(point: Tensor) -> Ascent:
        """Return an ascent at points (M, P) without an evaluation."""
        no = torch.zeros(len(point), dtype=torch.bool)
        norm = torch.full((len(point),), torch.inf, dtype=point.dtype)
        return Ascent(point, norm, no.long(), no)

    def continued_by(self, tasks: Tensor, later: Ascent) -> Ascent:
        """Return this ascent with the results of a later one of some tasks (m,)."""
        point, norm = self.point.clone(), self.norm.clone()
        steps, converged = self.steps.clone(), self.converged.clone()
        point[tasks], norm[tasks] = later.point, later.norm
        steps[tasks] += later.steps
        converged[tasks] = later.converged
        return Ascent(point, norm, steps, converged)


Evaluate = Callable[[Tensor, Tensor], Slope]
"""(points (m, P), which tasks (m,)) -> Slope; NaN where a point is outside the domain."""
Progress = Callable[[int], None]
"""Called after each round of evaluations with the number of tasks that ended in it."""


def ascend(
    evaluate: Evaluate,
    start: Tensor,
    *,
    tolerance: float,
    max_steps: int,
    memory: int,
    toward: Tensor | None = None,
    progress: Progress | None = None,
    earlier: Ascent | None = None,
    stop: Callable[[], bool] | None = None,
) -> Ascent:
    """Maximise many objectives by preconditioned ascent with Anderson mixing over `memory` rounds.

    A trial is taken where the slope along it is still above −½ of what it was, and halved
    otherwise. All tasks advance in the same round, those that halve and those that go on, so no
    task waits for another's line search. A task that has converged is not evaluated again. Works in
    the dtype of `start` (M, P).

    toward (M, P): a first direction from `start` in place of the preconditioned gradient, for a
    guess that may be too far. progress: called with the number of tasks that converged (see
    `Progress`). earlier: an ascent of the same tasks, which this one continues; its evaluations
    count towards max_steps. stop: asked before each round; the ascent ends where it is when the
    answer is yes.

    Fails (converged = False, the best point is kept) after max_steps evaluations, or where no step
    helps.
    """
    count = start.shape[0]
    point = start.clone()
    norm = torch.full((count,), torch.inf, dtype=start.dtype)
    steps = torch.zeros(count, dtype=torch.long) if earlier is None else earlier.steps.clone()
    tasks = torch.arange(count)  # those that are still active
    first = evaluate(start, tasks)
    state = _State(start, first.gradient, first.step)
    finite = _finite(first)
    norm[:] = torch.where(finite, state.norm, norm)
    steps += 1
    keep = (finite & (norm > tolerance) & (steps < max_steps)).nonzero().squeeze(-1)
    if progress is not None:
        progress(int((norm <= tolerance).sum()))
    tasks, state = tasks[keep], state.take(keep)
    stored = None if earlier is None else earlier.history
    history = _ActiveHistory(stored, tasks, count, memory, state)
    direction, slope = history.mix(tasks, state)
    if toward is not None:
        direction, slope = _prefer_uphill(toward[keep], state.gradient, direction, slope)
    factor = torch.ones_like(slope)
    while tasks.numel() and not (stop is not None and stop()):
        trial = state.point + factor.unsqueeze(-1) * direction
        there = evaluate(trial, tasks)
        steps[tasks] += 1
        # The line search: halve a trial that has gone too far beyond the maximum along its line.
        new_slope = (there.gradient * direction).sum(-1)
        taken = _finite(there) & (new_slope >= -OVERSHOOT * slope)
        state, change = state.advance(trial, there, taken)
        history.push(tasks, change)
        factor = torch.where(taken, torch.ones_like(factor), factor / 2)
        point[tasks], norm[tasks] = state.point, state.norm
        # Tasks that have ended leave the round.
        converged = state.norm <= tolerance
        active = (state.norm > tolerance) & (factor >= SHORTEST) & (steps[tasks] < max_steps)
        if progress is not None:
            progress(int(converged.sum()))
        keep = active.nonzero().squeeze(-1)
        tasks, state, factor = tasks[keep], state.take(keep), factor[keep]
        # Tasks whose trial was taken get a new direction; the others try a shorter step again.
        new_direction, new_slope = history.mix(tasks, state)
        advanced = taken[keep]
        direction = torch.where(advanced.unsqueeze(-1), new_direction, direction[keep])
        slope = torch.where(advanced, new_slope, slope[keep])
    return Ascent(point, norm, steps, norm <= tolerance, history.of_all_tasks())


def _prefer_uphill(
    guess: Tensor, gradient: Tensor, direction: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor]:
    """Return guesses (m, P) where they point uphill, else the directions (m, P), and the slopes."""
    rise = (gradient * guess).sum(-1)
    uphill = torch.isfinite(rise) & (rise > 0)
    return torch.where(uphill.unsqueeze(-1), guess, direction), torch.where(uphill, rise, slope)


def finish_with_newton(
    ascent: Ascent,
    newton: Callable[[Tensor], Evaluate],
    *,
    tolerance: float,
    max_steps: int,
    progress: Progress | None = None,
) -> Ascent:
    """Continue tasks that have not converged with their own Hessians.

    newton: from the numbers of these tasks (m,) to the function that evaluates them.
    """
    unfinished = (~ascent.converged).nonzero().squeeze(-1)
    if not unfinished.numel() or max_steps < 1:
        return ascent
    later = ascend(
        newton(unfinished),
        ascent.point[unfinished],
        tolerance=tolerance,
        max_steps=max_steps,
        memory=0,
        progress=progress,
    )
    return ascent.continued_by(unfinished, later)


def saddle_free_step(H: Tensor, gradient: Tensor) -> Tensor:
    """Return |H|⁻¹g: Newton's step, uphill also where H is indefinite.

    H (m, P, P) and gradient (m, P) -> (m, P). A Hessian that is not finite counts as the identity.
    """
    finite = torch.isfinite(H).all(-1, keepdim=True).all(-2, keepdim=True)
    H = torch.where(finite, H, torch.eye(H.shape[-1], dtype=H.dtype))
    values, vectors = torch.linalg.eigh((H + H.mT) / 2)
    size = values.abs()
    size = torch.maximum(size, 1e-8 * size.amax(-1, keepdim=True))
    white = (vectors.mT @ gradient.unsqueeze(-1)).squeeze(-1) / size
    step: Tensor = (vectors @ white.unsqueeze(-1)).squeeze(-1)
    return step


def _finite(slope: Slope) -> Tensor:
    """Return where gradients and steps are finite (m,)."""
    return torch.isfinite(slope.gradient.sum(-1)) & torch.isfinite(slope.step.sum(-1))


@dataclass(frozen=True)
class _State:
    """Accepted points with their gradients and steps."""

    point: Tensor
    gradient: Tensor
    step: Tensor

    @property
    def norm(self) -> Tensor:
        """Return √(gᵀP⁻¹g) (m,), the distance from the mode."""
        return (self.gradient * self.step).sum(-1).clamp_min(0).sqrt()

    def take(self, keep: Tensor) -> _State:
        """Return the state of some tasks."""
        if keep.numel() == self.point.shape[0]:
            return self
        return _State(self.point[keep], self.gradient[keep], self.step[keep])

    def advance(self, trial: Tensor, there: Slope, taken: Tensor) -> tuple[_State, _State]:
        """Move to the trials where they are taken (m,), and return the new state and its change."""
        new = _State(trial, there.gradient, there.step)
        if not bool(taken.all()):
            at_trial = taken.unsqueeze(-1)
            new = _State(
                torch.where(at_trial, trial, self.point),
                torch.where(at_trial, there.gradient, self.gradient),
                torch.where(at_trial, there.step, self.step),
            )
        return new, _State(
            new.point - self.point, new.gradient - self.gradient, new.step - self.step
        )


@dataclass(eq=False)
class History:
    """How points and steps of M tasks changed over the last k rounds.

    A round without a change is zero and counts for nothing.
    """

    mixes: Tensor  # Δθ + Δs (M, k, P)
    changes: Tensor  # Δs (M, k, P)
    gram: Tensor  # Δsᵀ Δg (M, k, k), in float64
    round: int = 0

    @staticmethod
    def empty(count: int, memory: int, size: int, dtype: torch.dtype) -> History:
        """Return a history of no rounds, with room for `memory` of them."""
        past = torch.zeros(count, memory, size, dtype=dtype)
        return History(past, past.clone(), torch.zeros(count, memory, memory, dtype=torch.float64))

    def take(self, tasks: Tensor, dtype: torch.dtype) -> History:
        """Return the history of some tasks, in `dtype`."""
        return History(
            self.mixes[tasks].to(dtype), self.changes[tasks].to(dtype), self.gram[tasks], self.round
        )

    def store(self, tasks: Tensor, part: History) -> None:
        """Write the history of some tasks into this one, in place."""
        self.mixes[tasks] = part.mixes
        self.changes[tasks] = part.changes
        self.gram[tasks] = part.gram
        self.round = part.round


class _ActiveHistory:
    """The history of the tasks that are still active.

    It is copied only when a quarter of the tasks in it have ended.
    """

    complete: History | None  # of all tasks, where this is not a continuation
    part: History  # of the tasks `stored`

    def __init__(
        self, earlier: History | None, tasks: Tensor, count: int, memory: int, state: _State
    ) -> None:
        """Start the history of some tasks out of `count`, or continue an earlier one."""
        size, dtype = state.point.shape[1], state.point.dtype
        if earlier is not None:
            self.complete = None
            self.part = earlier.take(tasks, dtype)
            self.stored = tasks
        else:
            self.complete = self.part = History.empty(count, memory, size, dtype)
            self.stored = torch.arange(count)

    def push(self, tasks: Tensor, change: _State) -> None:
        """Add a round in which the states of some tasks changed; it replaces the oldest one."""
        part, memory = self.part, self.part.gram.shape[-1]
        if not memory:
            return
        positions = self._positions(tasks)
        j = part.round % memory
        part.round += 1
        part.mixes[positions, j] = change.point + change.step
        part.changes[positions, j] = change.step
        products = self._times_changes(positions, change.gradient)
        part.gram[positions, j] = products
        part.gram[positions, :, j] = products

    def mix(self, tasks: Tensor, state: _State) -> tuple[Tensor, Tensor]:
        """Return Anderson's directions d = s − Σ γ_j (Δθ_j + Δs_j) (m, P), and their slopes (m,).

        γ minimises ‖s − Σ γ_j Δs_j‖ in the metric of P (⟨s, s'⟩ = sᵀg'). The plain step s takes the
        place of a d that does not point uphill or is far longer.
        """
        plain_slope = (state.gradient * state.step).sum(-1)
        if not self.part.round or not self.part.gram.shape[-1] or not tasks.numel():
            return state.step, plain_slope
        if len(tasks) <= CROWDED * len(self.stored):
            self._shrink(tasks)
        positions = self._positions(tasks)
        gram, right = self.part.gram[positions], self._times_changes(positions, state.gradient)
        # Scale to a unit diagonal; rounds without a change become equations γ_j = 0.
        size = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
        idle = size <= 0
        size = torch.where(idle, torch.ones_like(size), size)
        scaled = gram / size.unsqueeze(-1) / size.unsqueeze(-2)
        either_idle = idle.unsqueeze(-1) | idle.unsqueeze(-2)
        scaled = torch.where(either_idle, torch.zeros_like(scaled), scaled)
        ridge = RIDGE if state.step.dtype == torch.float64 else SINGLE_RIDGE
        solved, _ = torch.linalg.solve_ex(
            scaled + torch.diag_embed(idle + ridge), (right / size).unsqueeze(-1)
        )
        gamma = (solved.squeeze(-1) / size).to(state.step.dtype)
        mixed = state.step - self._combine(positions, gamma)
        slope = (state.gradient * mixed).sum(-1)
        # Where the mixed step is far longer, the history describes another region.
        not_far = mixed.norm(dim=-1) <= FARTHEST * state.step.norm(dim=-1)
        usable = torch.isfinite(slope) & (slope > LEAST_RISE * plain_slope) & not_far
        direction = torch.where(usable.unsqueeze(-1), mixed, state.step)
        return direction, torch.where(usable, slope, plain_slope)

    def of_all_tasks(self) -> History | None:
        """Return the history of all tasks; None where this continues an earlier history."""
        if self.complete is not None and self.part is not self.complete:
            self.complete.store(self.stored, self.part)
        return self.complete

    def _positions(self, tasks: Tensor) -> Tensor:
        """Return the positions of tasks in `part` (m,)."""
        return torch.searchsorted(self.stored, tasks)

    def _shrink(self, tasks: Tensor) -> None:
        """Keep the history of these tasks alone."""
        positions = self._positions(tasks)
        self.of_all_tasks()
        self.part = self.part.take(positions, self.part.mixes.dtype)
        self.stored = tasks

    def _times_changes(self, positions: Tensor, gradient: Tensor) -> Tensor:
        """Return Δs_jᵀ g for gradients (m, P) of tasks at `positions`: (m, k), in float64."""
        spread = self._spread(positions, gradient).unsqueeze(-1)
        return (self.part.changes @ spread).squeeze(-1)[positions].double()

    def _combine(self, positions: Tensor, gamma: Tensor) -> Tensor:
        """Return Σ γ_j (Δθ_j + Δs_j) (m, P), for gamma (m, k)."""
        return (self._spread(positions, gamma).unsqueeze(1) @ self.part.mixes).squeeze(1)[positions]

    def _spread(self, positions: Tensor, values: Tensor) -> Tensor:
        """Return values (m, …) in the rows of their tasks, and zero for the other stored tasks.

        So a product needs no copy of the history of the active tasks.
        """
        if len(positions) == len(self.stored):
            return values
        spread = values.new_zeros(len(self.stored), values.shape[1])
        spread[positions] = values
        return spread
