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

# a step may end where the slope along it has turned to at most minus this part of what it was
OVERSHOOT = 0.5
SHORTEST = 2.0**-24
RIDGE = 1e-14
SINGLE_RIDGE = 1e-7  # in single precision
SHARED_STEPS = (
    20  # evaluations with a shared preconditioner before a task continues with its own Hessian
)
# a mixed step may be this many times as long as the plain one: as weak as a direction of H may be
# beside P
FARTHEST = 1000.0


class Slope(NamedTuple):
    """At one point of each task: the gradient (m, P), and P⁻¹ times it."""

    gradient: Tensor
    step: Tensor


@dataclass(frozen=True)
class Found:
    """Where each task ended: point (M, P), √(gᵀP⁻¹g) there, evaluations, and whether the norm
    is within tolerance.
    """

    point: Tensor
    norm: Tensor
    steps: Tensor
    converged: Tensor
    history: History | None = (
        None  # of the last rounds of each task, for an ascent that continues this one
    )

    @staticmethod
    def nowhere(point: Tensor) -> Found:
        """Before the first evaluation."""
        no = torch.zeros(len(point), dtype=torch.bool)
        return Found(point, torch.full((len(point),), torch.inf, dtype=point.dtype), no.long(), no)

    def followed_by(self, rows: Tensor, later: Found) -> Found:
        """With the results of a later ascent of some tasks."""
        point, norm, steps, converged = (
            self.point.clone(),
            self.norm.clone(),
            self.steps.clone(),
            self.converged.clone(),
        )
        point[rows], norm[rows], converged[rows] = later.point, later.norm, later.converged
        steps[rows] += later.steps
        return Found(point, norm, steps, converged)


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
    earlier: Found | None = None,
    stop: Callable[[], bool] | None = None,
) -> Found:
    """Preconditioned ascent with Anderson mixing over `memory` rounds; a task that has converged is
    not evaluated again.

    A trial is taken where the slope along it is still above −½ of what it was, and halved
    otherwise. All tasks advance in the same round, those that halve and those that go on, so no
    task waits for another's line search. Works in the dtype of `start`.

    toward: a first direction from `start` in place of the preconditioned gradient, for a guess that
    may be too far. progress: called with the number of tasks that converged (see `Progress`).
    earlier: an ascent of the same tasks, which this one continues; its evaluations count towards
    max_steps. stop: asked before each round; the ascent ends where it is when the answer is yes.

    Fails (converged = False, the best point is kept) after max_steps evaluations, or where no step
    helps.
    """
    count = start.shape[0]
    point, norm = start.clone(), torch.full((count,), torch.inf, dtype=start.dtype)
    steps = torch.zeros(count, dtype=torch.long) if earlier is None else earlier.steps.clone()
    rows = torch.arange(count)
    now = evaluate(start, rows)
    state = _State(start, now.gradient, now.step)
    alive = _finite(now)
    norm[:] = torch.where(alive, state.norm, norm)
    steps += 1
    keep = (alive & (norm > tolerance) & (steps < max_steps)).nonzero().squeeze(-1)
    if progress is not None:
        progress(int((norm <= tolerance).sum()))
    rows, state = rows[keep], state.take(keep)
    past = _Past(None if earlier is None else earlier.history, rows, count, memory, state)
    direction, slope = past.mixed(rows, state)
    if toward is not None:
        guess = toward[keep]
        rise = (state.gradient * guess).sum(-1)
        uphill = torch.isfinite(rise) & (rise > 0)
        direction, slope = (
            torch.where(uphill.unsqueeze(-1), guess, direction),
            torch.where(uphill, rise, slope),
        )
    factor = torch.ones_like(slope)
    while rows.numel() and not (stop is not None and stop()):
        trial = state.point + factor.unsqueeze(-1) * direction
        there = evaluate(trial, rows)
        steps[rows] += 1
        new_slope = (there.gradient * direction).sum(-1)
        good = _finite(there) & (new_slope >= -OVERSHOOT * slope)
        state, change = state.advance(trial, there, good)
        past.push(rows, change)
        factor = torch.where(good, torch.ones_like(factor), factor / 2)
        point[rows], norm[rows] = state.point, state.norm
        keep = (
            ((state.norm > tolerance) & (factor >= SHORTEST) & (steps[rows] < max_steps))
            .nonzero()
            .squeeze(-1)
        )
        if progress is not None:
            progress(int((state.norm <= tolerance).sum()))
        rows, state, factor = rows[keep], state.take(keep), factor[keep]
        fresh, fresh_slope = past.mixed(rows, state)
        again = good[keep]
        direction = torch.where(again.unsqueeze(-1), fresh, direction[keep])
        slope = torch.where(again, fresh_slope, slope[keep])
    return Found(point, norm, steps, norm <= tolerance, past.finished())


def finished(
    found: Found,
    newton: Callable[[Tensor], Evaluate],
    *,
    tolerance: float,
    max_steps: int,
    progress: Progress | None = None,
) -> Found:
    """Tasks that have not converged continue with their own Hessians: `newton(which tasks)`
    evaluates them.
    """
    rest = (~found.converged).nonzero().squeeze(-1)
    if not rest.numel() or max_steps < 1:
        return found
    later = ascend(
        newton(rest),
        found.point[rest],
        tolerance=tolerance,
        max_steps=max_steps,
        memory=0,
        progress=progress,
    )
    return found.followed_by(rest, later)


def saddle_free(H: Tensor, gradient: Tensor) -> Tensor:
    """|H|⁻¹g: Newton's step, uphill also where H is indefinite.  (m, P, P), (m, P) -> (m, P)."""
    H = torch.where(
        torch.isfinite(H).all(-1, keepdim=True).all(-2, keepdim=True),
        H,
        torch.eye(H.shape[-1], dtype=H.dtype),
    )
    values, vectors = torch.linalg.eigh((H + H.mT) / 2)
    size = values.abs()
    size = torch.maximum(size, 1e-8 * size.amax(-1, keepdim=True))
    white = (vectors.mT @ gradient.unsqueeze(-1)).squeeze(-1) / size
    step: Tensor = (vectors @ white.unsqueeze(-1)).squeeze(-1)
    return step


def _finite(slope: Slope) -> Tensor:
    return torch.isfinite(slope.gradient.sum(-1)) & torch.isfinite(slope.step.sum(-1))


@dataclass(frozen=True)
class _State:
    """Accepted points with their gradients and steps."""

    point: Tensor
    gradient: Tensor
    step: Tensor

    @property
    def norm(self) -> Tensor:
        return (self.gradient * self.step).sum(-1).clamp_min(0).sqrt()

    def take(self, keep: Tensor) -> _State:
        if keep.numel() == self.point.shape[0]:
            return self
        return _State(self.point[keep], self.gradient[keep], self.step[keep])

    def advance(self, trial: Tensor, there: Slope, good: Tensor) -> tuple[_State, _State]:
        """The trials where they are good; elsewhere nothing changes. And by how much it changed."""
        new = _State(trial, there.gradient, there.step)
        if not bool(good.all()):
            taken = good.unsqueeze(-1)
            new = _State(
                torch.where(taken, trial, self.point),
                torch.where(taken, there.gradient, self.gradient),
                torch.where(taken, there.step, self.step),
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
        past = torch.zeros(count, memory, size, dtype=dtype)
        return History(past, past.clone(), torch.zeros(count, memory, memory, dtype=torch.float64))

    def take(self, tasks: Tensor, dtype: torch.dtype) -> History:
        return History(
            self.mixes[tasks].to(dtype), self.changes[tasks].to(dtype), self.gram[tasks], self.round
        )

    def put(self, tasks: Tensor, part: History) -> None:
        self.mixes[tasks], self.changes[tasks], self.gram[tasks] = (
            part.mixes,
            part.changes,
            part.gram,
        )
        self.round = part.round


class _Past:
    """The history of the tasks still under way.

    It is copied only when a quarter of the tasks in it have ended.
    """

    whole: History | None
    part: History

    def __init__(
        self, earlier: History | None, rows: Tensor, count: int, memory: int, like: _State
    ) -> None:
        """Of the tasks `rows` out of `count`."""
        size, dtype = like.point.shape[1], like.point.dtype
        if earlier is not None:
            self.part, self.stored = earlier.take(rows, dtype), rows
            self.whole = None
        else:
            self.whole = self.part = History.empty(count, memory, size, dtype)
            self.stored = torch.arange(count)  # tasks in `part`

    def push(self, rows: Tensor, change: _State) -> None:
        part, memory = self.part, self.part.gram.shape[-1]
        if not memory:
            return
        place, j = self._places(rows), part.round % memory
        part.round += 1
        part.mixes[place, j] = change.point + change.step
        part.changes[place, j] = change.step
        along = self._along(place, change.gradient)
        part.gram[place, j] = along
        part.gram[place, :, j] = along

    def mixed(self, rows: Tensor, state: _State) -> tuple[Tensor, Tensor]:
        """Anderson: d = s − Σ γ_j (Δθ_j + Δs_j), γ minimising ‖s − Σ γ_j Δs_j‖ in the metric of P
        (⟨s, s'⟩ = sᵀg').

        The plain step where d does not point uphill.  -> (d, its slope).
        """
        plain = (state.gradient * state.step).sum(-1)
        if not self.part.round or not self.part.gram.shape[-1] or not rows.numel():
            return state.step, plain
        if len(rows) <= 0.75 * len(self.stored):
            self._shrink(rows)
        place = self._places(rows)
        gram, right = self.part.gram[place], self._along(place, state.gradient)
        size = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
        idle = size <= 0  # rounds without a change
        size = torch.where(idle, torch.ones_like(size), size)
        scaled = gram / size.unsqueeze(-1) / size.unsqueeze(-2)
        scaled = torch.where(
            idle.unsqueeze(-1) | idle.unsqueeze(-2), torch.zeros_like(scaled), scaled
        )
        ridge = RIDGE if state.step.dtype == torch.float64 else SINGLE_RIDGE
        solved, _ = torch.linalg.solve_ex(
            scaled + torch.diag_embed(idle + ridge), (right / size).unsqueeze(-1)
        )
        gamma = (solved.squeeze(-1) / size).to(state.step.dtype)
        mixed = state.step - self._combined(place, gamma)
        slope = (state.gradient * mixed).sum(-1)
        near = mixed.norm(dim=-1) <= FARTHEST * state.step.norm(
            dim=-1
        )  # else the history describes another place
        uphill = torch.isfinite(slope) & (slope > 0.01 * plain) & near
        return torch.where(uphill.unsqueeze(-1), mixed, state.step), torch.where(
            uphill, slope, plain
        )

    def finished(self) -> History | None:
        """Of all tasks; None where this continues an earlier history."""
        if self.whole is not None and self.part is not self.whole:
            self.whole.put(self.stored, self.part)
        return self.whole

    def _places(self, rows: Tensor) -> Tensor:
        return torch.searchsorted(self.stored, rows)

    def _shrink(self, rows: Tensor) -> None:
        place = self._places(rows)
        self.finished()
        self.part, self.stored = self.part.take(place, self.part.mixes.dtype), rows

    def _along(self, place: Tensor, gradient: Tensor) -> Tensor:
        """Δs_jᵀ g of some tasks: (m, k), in float64."""
        changes = self.part.changes
        return (changes @ self._spread(place, gradient).unsqueeze(-1)).squeeze(-1)[place].double()

    def _combined(self, place: Tensor, gamma: Tensor) -> Tensor:
        """Σ γ_j (Δθ_j + Δs_j) (m, P)."""
        return (self._spread(place, gamma).unsqueeze(1) @ self.part.mixes).squeeze(1)[place]

    def _spread(self, place: Tensor, values: Tensor) -> Tensor:
        if len(place) == len(self.stored):
            return values
        whole = values.new_zeros(len(self.stored), values.shape[1])
        whole[place] = values
        return whole
