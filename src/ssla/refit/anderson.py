"""Maximising thousands of smooth objectives at once, from their gradients alone.

Every task starts close to its maximum and shares a good preconditioner with the others, so a fixed-point iteration
θ ← θ + P⁻¹g converges by a constant factor in each round. Anderson's mixing of the last few rounds makes it a Krylov method:
near the maximum it is conjugate gradients on the true Hessian, without a product with it.

The line search uses slopes, not values: a gain of 1e-16 is lost in the rounding of a sum over n rows, its slope is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

OVERSHOOT = 0.5  # a step may end where the slope along it has turned to at most minus this part of what it was
SHORTEST = 2.0**-24
RIDGE = 1e-14
SHARED_STEPS = 20  # evaluations with a shared preconditioner before a task continues with its own Hessian
FARTHEST = 10.0  # a mixed step may be this many times as long as the plain one


class Slope(NamedTuple):
    """At one point of each task: the gradient (m, P), and P⁻¹ times it."""

    gradient: Tensor
    step: Tensor


@dataclass(frozen=True)
class Found:
    """Where each task ended: point (M, P), √(gᵀP⁻¹g) there, evaluations, and whether the norm is within tolerance."""

    point: Tensor
    norm: Tensor
    steps: Tensor
    converged: Tensor

    @staticmethod
    def nowhere(point: Tensor) -> Found:
        """Before the first evaluation."""
        no = torch.zeros(len(point), dtype=torch.bool)
        return Found(point, torch.full((len(point),), torch.inf, dtype=point.dtype), no.long(), no)

    def followed_by(self, rows: Tensor, later: Found) -> Found:
        """With the results of a later ascent of some tasks."""
        point, norm, steps, converged = self.point.clone(), self.norm.clone(), self.steps.clone(), self.converged.clone()
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
) -> Found:
    """Preconditioned ascent with Anderson mixing over `memory` rounds; a task that has converged is not evaluated again.

    A trial is taken where the slope along it is still above −½ of what it was, and halved otherwise. All tasks advance in
    the same round, those that halve and those that go on, so no task waits for another's line search.

    toward: a first direction from `start` in place of the preconditioned gradient, for a guess that may be too far.
    progress: called with the number of tasks that converged (see `Progress`).

    Fails (converged = False, the best point is kept) after max_steps evaluations, or where no step helps.
    """
    count = start.shape[0]
    point, norm = start.clone(), torch.full((count,), torch.inf, dtype=start.dtype)
    steps = torch.zeros(count, dtype=torch.long)
    rows = torch.arange(count)
    now = evaluate(start, rows)
    state = _State(start, now.gradient, now.step, [])
    alive = _finite(now)
    norm[:] = torch.where(alive, state.norm, norm)
    steps += 1
    keep = (alive & (norm > tolerance)).nonzero().squeeze(-1)
    if progress is not None:
        progress(int((norm <= tolerance).sum()))
    rows, state = rows[keep], state.take(keep)
    direction, slope = state.mixed()
    if toward is not None:
        guess = toward[keep]
        rise = (state.gradient * guess).sum(-1)
        uphill = torch.isfinite(rise) & (rise > 0)
        direction, slope = torch.where(uphill.unsqueeze(-1), guess, direction), torch.where(uphill, rise, slope)
    factor = torch.ones_like(slope)
    for _ in range(max_steps - 1):
        if not rows.numel():
            break
        move = factor.unsqueeze(-1) * direction
        trial = state.point + move
        there = evaluate(trial, rows)
        steps[rows] += 1
        new_slope = (there.gradient * direction).sum(-1)
        good = _finite(there) & (new_slope >= -OVERSHOOT * slope)
        state = state.advance(trial, there, good, memory)
        factor = torch.where(good, torch.ones_like(factor), factor / 2)
        point[rows], norm[rows] = state.point, state.norm
        keep = ((state.norm > tolerance) & (factor >= SHORTEST)).nonzero().squeeze(-1)
        if progress is not None:
            progress(int((state.norm <= tolerance).sum()))
        rows, state, factor = rows[keep], state.take(keep), factor[keep]
        fresh, fresh_slope = state.mixed()
        again = good[keep]
        direction = torch.where(again.unsqueeze(-1), fresh, direction[keep])
        slope = torch.where(again, fresh_slope, slope[keep])
    return Found(point, norm, steps, norm <= tolerance)


def finished(
    found: Found, newton: Callable[[Tensor], Evaluate], *, tolerance: float, max_steps: int, progress: Progress | None = None
) -> Found:
    """Tasks that have not converged continue with their own Hessians: `newton(which tasks)` evaluates them."""
    rest = (~found.converged).nonzero().squeeze(-1)
    if not rest.numel() or max_steps < 1:
        return found
    later = ascend(newton(rest), found.point[rest], tolerance=tolerance, max_steps=max_steps, memory=0, progress=progress)
    return found.followed_by(rest, later)


def saddle_free(H: Tensor, gradient: Tensor) -> Tensor:
    """|H|⁻¹g: Newton's step, uphill also where H is indefinite.  (m, P, P), (m, P) -> (m, P)."""
    H = torch.where(torch.isfinite(H).all(-1, keepdim=True).all(-2, keepdim=True), H, torch.eye(H.shape[-1], dtype=H.dtype))
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
    """Accepted points with their gradients and steps, and how these changed over the last rounds."""

    point: Tensor
    gradient: Tensor
    step: Tensor
    history: list[tuple[Tensor, Tensor, Tensor]]

    @property
    def norm(self) -> Tensor:
        return (self.gradient * self.step).sum(-1).clamp_min(0).sqrt()

    def take(self, keep: Tensor) -> _State:
        if keep.numel() == self.point.shape[0]:
            return self
        history = [(a[keep], b[keep], c[keep]) for a, b, c in self.history]
        return _State(self.point[keep], self.gradient[keep], self.step[keep], history)

    def advance(self, trial: Tensor, there: Slope, good: Tensor, memory: int) -> _State:
        """The trials where they are good; elsewhere nothing changes, and that round counts for nothing in the history."""
        if bool(good.all()):
            point, gradient, step = trial, there.gradient, there.step
        else:
            taken = good.unsqueeze(-1)
            point = torch.where(taken, trial, self.point)
            gradient = torch.where(taken, there.gradient, self.gradient)
            step = torch.where(taken, there.step, self.step)
        change = (point - self.point, gradient - self.gradient, step - self.step)
        return _State(point, gradient, step, [change, *self.history][:memory])

    def mixed(self) -> tuple[Tensor, Tensor]:
        """Anderson: d = s − Σ γ_j (Δθ_j + Δs_j), γ minimising ‖s − Σ γ_j Δs_j‖ in the metric of P (⟨s, s'⟩ = sᵀg').

        The plain step where d does not point uphill.  -> (d, its slope).
        """
        plain = (self.gradient * self.step).sum(-1)
        if not self.history:
            return self.step, plain
        gram = torch.stack([torch.stack([(s * g).sum(-1) for _, g, _ in self.history], -1) for _, _, s in self.history], -2)
        gram = (gram + gram.mT) / 2
        right = torch.stack([(s * self.gradient).sum(-1) for _, _, s in self.history], -1)
        size = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
        size = torch.where(size > 0, size, torch.ones_like(size))
        scaled = gram / size.unsqueeze(-1) / size.unsqueeze(-2)
        eye = torch.eye(len(self.history), dtype=gram.dtype)
        idle = (gram.diagonal(dim1=-2, dim2=-1) <= 0).to(gram.dtype)  # rounds without a change
        gamma, _ = torch.linalg.solve_ex(scaled + RIDGE * eye + torch.diag_embed(idle), (right / size).unsqueeze(-1))
        gamma = gamma.squeeze(-1) / size
        mixed = self.step.clone()
        for j, (moved, _, changed) in enumerate(self.history):
            mixed -= gamma[:, j, None] * (moved + changed)
        slope = (self.gradient * mixed).sum(-1)
        near = mixed.norm(dim=-1) <= FARTHEST * self.step.norm(dim=-1)  # else the history describes another place
        uphill = torch.isfinite(slope) & (slope > 0.01 * plain) & near
        return torch.where(uphill.unsqueeze(-1), mixed, self.step), torch.where(uphill, slope, plain)
