"""Maximising thousands of smooth objectives at once, from their gradients alone.

Every task starts close to its maximum and shares a good preconditioner with the others, so a
fixed-point iteration θ ← θ + P⁻¹g converges by a constant factor in each round. Anderson's mixing
of the last few rounds makes it a Krylov method: near the maximum it is conjugate gradients on the
true Hessian, without a product with it.

The line search uses slopes, not values: a gain of 1e-16 is lost in the rounding of a sum over n
rows, its slope is not.

Terms: g is the gradient of a task's objective, P the preconditioner (P×P for P weights), and
s = P⁻¹g the plain step. A round is one evaluation of all active tasks, each at its own trial point.
A task has converged where √(gᵀP⁻¹g), its distance from the mode, is at most the tolerance. The
history has, of the last k rounds, the changes Δθ_j of the point and Δs_j of the step. A task is
active until it has converged or failed. Other terms are those of `ssla.refit.weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# A guess: a step may end where the slope along it is at least minus this part of what it was.
OVERSHOOT = 0.5
SHORTEST = 2.0**-24  # a guess: the shortest part of a step that is tried
# Guesses: added to the diagonal of the mixing equations, in double and in single precision.
RIDGE, SINGLE_RIDGE = 1e-14, 1e-7
# A guess: evaluations with the preconditioner that all tasks share, before a task continues with
# its own Hessian.
SHARED_STEPS = 20
# The ascents start at this part of the output refit's step: the curvature mostly grows on the way,
# so that step is too long (docs/notes/refits.md: 7.3 and 8.7 gradients).
START_SHARE = 0.7
# A guess: a mixed step may be this many times as long as the plain one, because a direction of H
# may be this much weaker than P.
FARTHEST = 1000.0
LEAST_RISE = 0.01  # a guess: the least slope of a mixed step over that of the plain one
CROWDED = 0.75  # a guess: the history is copied where fewer of its tasks are still active
LEAST_CURVATURE = 1e-8  # a guess: the least |eigenvalue| of a Hessian, over its largest one


class Slope(NamedTuple):
    """At one point of each task: the gradient (m, P), and P⁻¹ times it."""

    gradient: Tensor
    step: Tensor


@dataclass(frozen=True)
class Ascent:
    """The end of the ascents of M tasks."""

    point: Tensor  # the last accepted one (M, P)
    norm: Tensor  # √(gᵀP⁻¹g) there (M,)
    steps: Tensor  # evaluations of the gradient (M,)
    converged: Tensor  # (M,)
    # Of the last rounds of each task, for an ascent that continues this one.
    history: History | None = None

    @staticmethod
    def not_started(point: Tensor) -> Ascent:
        """Return an ascent that ends at points (M, P) without an evaluation, not converged."""
        never = torch.zeros(len(point), dtype=torch.bool)
        norm = torch.full((len(point),), torch.inf, dtype=point.dtype)
        return Ascent(point, norm, never.long(), never)

    def continued_by(self, tasks: Tensor, later: Ascent) -> Ascent:
        """Return this ascent with the ends of a later one of some tasks (m,), without a history.

        Evaluations of both are added.
        """
        point, norm = self.point.clone(), self.norm.clone()
        steps, converged = self.steps.clone(), self.converged.clone()
        point[tasks], norm[tasks] = later.point, later.norm
        steps[tasks] += later.steps
        converged[tasks] = later.converged
        return Ascent(point, norm, steps, converged)

    def select_tasks(self, tasks: Tensor) -> Ascent:
        """Return the ends of some tasks (k,), without their history."""
        return Ascent(self.point[tasks], self.norm[tasks], self.steps[tasks], self.converged[tasks])

    @staticmethod
    def join(ascents: Sequence[Ascent]) -> Ascent:
        """Return the ends of the tasks of all ascents as one, in order and without a history."""
        return Ascent(
            torch.cat([ascent.point for ascent in ascents]),
            torch.cat([ascent.norm for ascent in ascents]),
            torch.cat([ascent.steps for ascent in ascents]),
            torch.cat([ascent.converged for ascent in ascents]),
        )


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

    start (M, P): the first points, in whose dtype all points are. evaluate: see `Evaluate`. In each
    round every active task tries a step. A trial is taken if the slope along it is still at least
    −OVERSHOOT times what it was at its start; otherwise the task tries half of the step in the next
    round. No task waits for another's line search. A task that has converged is not evaluated
    again.

    tolerance: where a task has converged. max_steps: the most evaluations of a task. toward (M, P):
    a first direction from `start`, taken if it points uphill; it may be too long. progress: called
    with the number of tasks that converged (see `Progress`). earlier: an ascent of the same tasks,
    which this one continues; its evaluations count towards max_steps. stop: called before each
    round; when it returns True, the ascent ends where it is.

    Returns where each task ended: its last accepted point, which may be `start`. A task has not
    converged after max_steps evaluations, or where steps of SHORTEST do not help.
    """
    state, ascent, finite = _start_ascent(evaluate, start, tolerance, earlier)
    point, norm, steps = ascent.point, ascent.norm, ascent.steps
    if progress is not None:
        progress(int(ascent.converged.sum()))

    # From here on, tensors of m rows are those of the active tasks.
    tasks = (finite & (norm > tolerance) & (steps < max_steps)).nonzero().squeeze(-1)
    state = state.select_tasks(tasks)
    stored = None if earlier is None else earlier.history
    history = _ActiveHistory(stored, tasks, len(start), memory, state)
    direction, slope = history.mix_directions(tasks, state)
    if toward is not None:
        direction, slope = _prefer_uphill(toward[tasks], state.gradient, direction, slope)
    step_share = torch.ones_like(slope)  # of the direction that is tried; halved after a refusal

    while tasks.numel() and not (stop is not None and stop()):
        trial = state.point + step_share.unsqueeze(-1) * direction
        at_trial = evaluate(trial, tasks)
        steps[tasks] += 1
        taken = _is_taken(at_trial, direction, slope)
        state, change = state.advance(trial, at_trial, taken)
        history.add_round(tasks, change)
        step_share = torch.where(taken, torch.ones_like(step_share), step_share / 2)
        point[tasks], norm[tasks] = state.point, state.norm

        # Tasks that have ended leave the round.
        converged = state.norm <= tolerance
        active = (state.norm > tolerance) & (step_share >= SHORTEST) & (steps[tasks] < max_steps)
        if progress is not None:
            progress(int(converged.sum()))
        keep = active.nonzero().squeeze(-1)
        tasks, state, step_share = tasks[keep], state.select_tasks(keep), step_share[keep]

        # Tasks whose trial was taken get a new direction; the others try a shorter step again.
        new_direction, new_slope = history.mix_directions(tasks, state)
        advanced = taken[keep]
        direction = torch.where(advanced.unsqueeze(-1), new_direction, direction[keep])
        slope = torch.where(advanced, new_slope, slope[keep])

    return Ascent(point, norm, steps, norm <= tolerance, history.write_back())


def _start_ascent(
    evaluate: Evaluate, start: Tensor, tolerance: float, earlier: Ascent | None
) -> tuple[_State, Ascent, Tensor]:
    """Evaluate all tasks at `start` (M, P); the first evaluation of an ascent.

    evaluate, tolerance: see `ascend`. earlier: an ascent whose evaluations are counted too; None:
    there is none. Returns the states of the tasks, an ascent that ends at the start, and where
    gradients and steps are finite (M,).
    """
    count = start.shape[0]
    first = evaluate(start, torch.arange(count))
    state = _State(start, first.gradient, first.step)
    finite = _is_finite(first)
    norm = torch.full((count,), torch.inf, dtype=start.dtype)
    norm[:] = torch.where(finite, state.norm, norm)
    steps = torch.zeros(count, dtype=torch.long) if earlier is None else earlier.steps.clone()
    steps += 1
    return state, Ascent(start.clone(), norm, steps, norm <= tolerance), finite


def _is_taken(at_trial: Slope, direction: Tensor, slope: Tensor) -> Tensor:
    """Return a mask of the trials that the line search takes (m,).

    at_trial: gradients and steps there. A trial that has gone too far beyond the maximum along its
    direction (m, P) is not taken, nor is one outside the domain, whose gradient is NaN. slope (m,):
    gᵀdirection where the step starts.
    """
    new_slope = (at_trial.gradient * direction).sum(-1)
    return _is_finite(at_trial) & (new_slope >= -OVERSHOOT * slope)


def _prefer_uphill(
    guess: Tensor, gradient: Tensor, direction: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor]:
    """Return each guess (m, P) that points uphill, and for other tasks the direction (m, P).

    gradient (m, P). slope (m,): the slopes along the directions. The second result is the slopes
    (m,) along what is returned.
    """
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
    """Continue the tasks that have not converged by Newton's method, without mixing.

    newton: a function from the numbers of these tasks (m,) to their `Evaluate`, whose steps are
    those with each task's own Hessian. tolerance: where a task has converged. max_steps: the most
    further evaluations of a task; below one, the ascent is returned as it is. Returns the ends of
    all tasks.
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


def compute_saddle_free_step(H: Tensor, gradient: Tensor) -> Tensor:
    """Compute |H|⁻¹g (m, P): Newton's step, which points uphill also where H is indefinite.

    H (m, P, P): minus the second derivatives, gradient: g (m, P). |H| has the eigenvectors of H and
    the absolute values of its eigenvalues, at least LEAST_CURVATURE times the largest. An H that is
    not finite counts as the identity.
    """
    finite = torch.isfinite(H).all(-1, keepdim=True).all(-2, keepdim=True)
    H = torch.where(finite, H, torch.eye(H.shape[-1], dtype=H.dtype))
    values, vectors = torch.linalg.eigh((H + H.mT) / 2)
    curvatures = values.abs()
    curvatures = torch.maximum(curvatures, LEAST_CURVATURE * curvatures.amax(-1, keepdim=True))
    by_eigenvector = (vectors.mT @ gradient.unsqueeze(-1)).squeeze(-1) / curvatures
    step: Tensor = (vectors @ by_eigenvector.unsqueeze(-1)).squeeze(-1)
    return step


def _is_finite(slope: Slope) -> Tensor:
    """Return a mask of the tasks whose gradient and step are finite (m,).

    Sums are tested in place of all entries: the sum of a row with NaN or infinity is not finite.
    """
    return torch.isfinite(slope.gradient.sum(-1)) & torch.isfinite(slope.step.sum(-1))


@dataclass(frozen=True)
class _State:
    """The accepted points of m tasks, with gradients g and plain steps s there: all (m, P).

    `advance` returns changes of all three in the same form.
    """

    point: Tensor
    gradient: Tensor
    step: Tensor

    @property
    def norm(self) -> Tensor:
        """Return √(gᵀP⁻¹g) (m,), the distance from the mode."""
        return (self.gradient * self.step).sum(-1).clamp_min(0).sqrt()

    def select_tasks(self, keep: Tensor) -> _State:
        """Return the states of some tasks, by their different positions (k,), in rising order."""
        if keep.numel() == self.point.shape[0]:
            return self
        return _State(self.point[keep], self.gradient[keep], self.step[keep])

    def advance(self, trial: Tensor, at_trial: Slope, taken: Tensor) -> tuple[_State, _State]:
        """Return the states after a round, and by how much they changed.

        trial (m, P), with gradients and steps `at_trial`. taken (m,): the tasks that move to their
        trial; the state of the others stays, and its change is zero.
        """
        new = _State(trial, at_trial.gradient, at_trial.step)
        if not bool(taken.all()):
            chosen = taken.unsqueeze(-1)
            new = _State(
                torch.where(chosen, trial, self.point),
                torch.where(chosen, at_trial.gradient, self.gradient),
                torch.where(chosen, at_trial.step, self.step),
            )
        return new, _State(
            new.point - self.point, new.gradient - self.gradient, new.step - self.step
        )


@dataclass(eq=False)
class History:
    """How points θ and steps s = P⁻¹g of M tasks changed over the last k rounds.

    A round in which a task did not change is idle: it is zero, and has no part in a mixed step. The
    tensors are changed in place.
    """

    mixes: Tensor  # Δθ + Δs (M, k, P)
    changes: Tensor  # Δs (M, k, P)
    gram: Tensor  # Δsᵀ Δg (M, k, k), in float64
    rounds: int = 0  # rounds so far; the next one replaces entry `rounds` modulo k

    @staticmethod
    def empty(count: int, memory: int, size: int, dtype: torch.dtype) -> History:
        """Return a history of `count` tasks without rounds, with room for `memory` of them.

        size: the number of weights P. dtype: of the points.
        """
        past = torch.zeros(count, memory, size, dtype=dtype)
        return History(past, past.clone(), torch.zeros(count, memory, memory, dtype=torch.float64))

    def select_tasks(self, tasks: Tensor, dtype: torch.dtype) -> History:
        """Return the history of some tasks, in `dtype`; the Gram matrices stay in float64."""
        return History(
            self.mixes[tasks].to(dtype),
            self.changes[tasks].to(dtype),
            self.gram[tasks],
            self.rounds,
        )

    def store_tasks(self, tasks: Tensor, part: History) -> None:
        """Write the history `part` of some tasks (m,) into this one, in place."""
        self.mixes[tasks] = part.mixes
        self.changes[tasks] = part.changes
        self.gram[tasks] = part.gram
        self.rounds = part.rounds


class _ActiveHistory:
    """The history of the tasks that are still active, which changes in every round.

    Tasks that have ended stay in it until CROWDED of its tasks or fewer are active: taking them out
    is a copy. Tasks are known by their numbers among all tasks.
    """

    complete: History | None  # of all tasks; None where this continues an earlier ascent
    part: History  # of the tasks `stored`
    stored: Tensor  # the numbers of these tasks, in rising order

    def __init__(
        self, earlier: History | None, tasks: Tensor, count: int, memory: int, state: _State
    ) -> None:
        """Start the history of `count` tasks, or continue an earlier one for those in `tasks` (m,).

        earlier: None to start. memory: the rounds that are kept, for a new history. state: any
        state, whose number of weights and dtype the history takes.
        """
        size, dtype = state.point.shape[1], state.point.dtype
        if earlier is not None:
            self.complete = None
            self.part = earlier.select_tasks(tasks, dtype)
            self.stored = tasks
        else:
            self.complete = self.part = History.empty(count, memory, size, dtype)
            self.stored = torch.arange(count)

    def add_round(self, tasks: Tensor, change: _State) -> None:
        """Store a round, over the oldest one: by how much the states of some tasks (m,) changed.

        change: see `_State.advance`. With a memory of no rounds nothing is stored.
        """
        part, memory = self.part, self.part.gram.shape[-1]
        if not memory:
            return
        positions = self._positions(tasks)
        j = part.rounds % memory  # the entry of the oldest round
        part.rounds += 1
        part.mixes[positions, j] = change.point + change.step
        part.changes[positions, j] = change.step
        products = self._multiply_changes(positions, change.gradient)
        part.gram[positions, j] = products
        part.gram[positions, :, j] = products

    def mix_directions(self, tasks: Tensor, state: _State) -> tuple[Tensor, Tensor]:
        """Compute Anderson's directions d = s − Σ γ_j (Δθ_j + Δs_j) (m, P), and their slopes (m,).

        γ minimises ‖s − Σ γ_j Δs_j‖ in the metric of P, ⟨s, s'⟩ = sᵀg'. The plain step s takes the
        place of a d that does not point uphill (LEAST_RISE) or is far longer (FARTHEST). state: of
        the tasks (m,). The history of tasks that have ended may be removed, in place.
        """
        plain_slope = (state.gradient * state.step).sum(-1)
        if not self.part.rounds or not self.part.gram.shape[-1] or not tasks.numel():
            return state.step, plain_slope
        if len(tasks) <= CROWDED * len(self.stored):
            self._shrink_to(tasks)
        positions = self._positions(tasks)
        gamma = _solve_mixing_equations(
            self.part.gram[positions],
            self._multiply_changes(positions, state.gradient),
            RIDGE if state.step.dtype == torch.float64 else SINGLE_RIDGE,
        ).to(state.step.dtype)
        mixed = state.step - self._combine_mixes(positions, gamma)
        slope = (state.gradient * mixed).sum(-1)

        # Where the mixed step is far longer, the history describes another region.
        not_far = mixed.norm(dim=-1) <= FARTHEST * state.step.norm(dim=-1)
        usable = torch.isfinite(slope) & (slope > LEAST_RISE * plain_slope) & not_far
        direction = torch.where(usable.unsqueeze(-1), mixed, state.step)
        return direction, torch.where(usable, slope, plain_slope)

    def write_back(self) -> History | None:
        """Write the history of the active tasks into that of all tasks, and return the latter.

        None if this continues an earlier history: that one is not changed.
        """
        if self.complete is not None and self.part is not self.complete:
            self.complete.store_tasks(self.stored, self.part)
        return self.complete

    def _positions(self, tasks: Tensor) -> Tensor:
        """Return the positions of tasks in `part` (m,)."""
        return torch.searchsorted(self.stored, tasks)

    def _shrink_to(self, tasks: Tensor) -> None:
        """Keep only the history of these tasks (m,), after that of the others is written back."""
        positions = self._positions(tasks)
        self.write_back()
        self.part = self.part.select_tasks(positions, self.part.mixes.dtype)
        self.stored = tasks

    def _multiply_changes(self, positions: Tensor, gradient: Tensor) -> Tensor:
        """Compute Δs_jᵀg of each round j (m, k) in float64.

        gradient: g (m, P), for tasks at `positions` in `part` (m,).
        """
        spread = self._spread_over_stored(positions, gradient).unsqueeze(-1)
        return (self.part.changes @ spread).squeeze(-1)[positions].double()

    def _combine_mixes(self, positions: Tensor, gamma: Tensor) -> Tensor:
        """Compute Σ γ_j (Δθ_j + Δs_j) (m, P), for tasks at `positions` in `part` (m,).

        gamma: γ (m, k).
        """
        spread = self._spread_over_stored(positions, gamma).unsqueeze(1)
        return (spread @ self.part.mixes).squeeze(1)[positions]

    def _spread_over_stored(self, positions: Tensor, values: Tensor) -> Tensor:
        """Return values (m, k) in the rows of their tasks, and zero for the other stored tasks.

        positions (m,): of the tasks in `part`. A product with the result (stored tasks, k) needs no
        copy of the history of the m tasks.
        """
        if len(positions) == len(self.stored):
            return values
        spread = values.new_zeros(len(self.stored), values.shape[1])
        spread[positions] = values
        return spread


def _solve_mixing_equations(gram: Tensor, right: Tensor, ridge: float) -> Tensor:
    """Compute γ (m, k) with gram γ = right, for gram Δsᵀ Δg (m, k, k) and right Δsᵀ g (m, k).

    ridge is added to the diagonal after both are scaled to a unit diagonal. An idle round, whose
    entries are zero, gets γ_j = 0.
    """
    scale = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    idle = scale <= 0
    scale = torch.where(idle, torch.ones_like(scale), scale)
    scaled = gram / scale.unsqueeze(-1) / scale.unsqueeze(-2)
    either_idle = idle.unsqueeze(-1) | idle.unsqueeze(-2)
    scaled = torch.where(either_idle, torch.zeros_like(scaled), scaled)
    # An idle round has a one on the diagonal and zeros elsewhere.
    solved, _ = torch.linalg.solve_ex(
        scaled + torch.diag_embed(idle + ridge), (right / scale).unsqueeze(-1)
    )
    gamma: Tensor = solved.squeeze(-1) / scale
    return gamma
