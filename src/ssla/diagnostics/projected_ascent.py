"""Maximises many smooth functions over the unit ball at once, by projected gradient steps.

There are N rows with t functions each, every one with a point v (C,) of its own. A step goes from v
to the point of the ball that is nearest to v + s g, with g the gradient at v. The length s is that
of Barzilai and Borwein, s = ‖Δv‖² / −Δvᵀ Δg, with the changes Δv and Δg of the last step. Where the
function is not concave along the last step, −Δvᵀ Δg ≤ 0 gives no length, and the step goes to the
boundary, along g. Steps that do not gain enough are shortened. Values never fall.

The gap ‖g‖ − gᵀv, which is max over the ball of gᵀ(u − v), is zero at a maximum. For a concave
function it bounds how much can still be gained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# The numbers are guesses, but for the rounds: bounds of 10 classes with standard deviations of the
# logits up to 30 needed at most 60 (tests/diagnostics/test_relative_likelihood.py).
MOST_ROUNDS = 200
TOLERANCE = 1e-9  # of the scale: the gap at which a search ends
SUFFICIENT = 1e-4  # share of the expected gain that a step must reach
MOST_CUTS = 20  # how often a step is shortened at most
LEAST_CUT, MOST_CUT = 0.1, 0.5  # limits of the factor by which a step is shortened
FAR = 1e3  # step length, in units of the ball's radius, that leads to the boundary
LOOSE = 1e-4  # of the scale: a gap after MOST_ROUNDS that is not an answer

Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""v (m, t, C) and the numbers (m,) of its rows -> values (m, t) and gradients (m, t, C)."""


class Maxima(NamedTuple):
    """The largest values of N·t functions that a search has found, and where they are."""

    v: Tensor  # (N, t, C)
    value: Tensor  # (N, t)
    unconverged: Tensor  # (N, t) bool: the gap is still large


def project_to_ball(v: Tensor) -> Tensor:
    """Return the points of the unit ball that are nearest to v (..., C)."""
    length: Tensor = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return v / length.clamp_min(1.0)


def ascend(
    evaluate: Evaluate,
    start: Tensor,
    scale: Tensor,
    rounds: int = MOST_ROUNDS,
    leave_out_rows: bool = True,
) -> Maxima:
    """Maximise N·t functions over the unit ball, each from its start (N, t, C).

    start: inside the ball. scale (N, t): the size of the function's values; gaps are compared with
    it. rounds: the most steps of a search. leave_out_rows: whether `evaluate` accepts some of the
    rows alone; rows whose searches have all ended are then left out. Returns the last points, with
    a flag for searches whose gap is still above LOOSE.
    """
    rows = torch.arange(len(start))
    v = start.clone()
    value, gradient = evaluate(v, rows)
    step = _compute_far_step(gradient)
    stalled = torch.zeros_like(value, dtype=torch.bool)
    for _ in range(rounds):
        todo = ~stalled & (_compute_gap(v, gradient) > TOLERANCE * scale)
        if not bool(todo.any()):
            break
        active = rows[todo.any(1)] if leave_out_rows else rows
        point, height, slope = v[active], value[active], gradient[active]
        trial = _take_step(evaluate, point, height, slope, step[active], todo[active], active)
        v[active], value[active], gradient[active] = trial.v, trial.value, trial.gradient
        stalled[active] |= ~trial.gained
        step[active] = _compute_next_step(trial.v - point, trial.gradient - slope, trial.gradient)

    unconverged = ~stalled & (_compute_gap(v, gradient) > LOOSE * scale)
    return Maxima(v, value, unconverged)


class _Trial(NamedTuple):
    """The points after a step, and the functions there, for m rows."""

    v: Tensor  # (m, t, C)
    value: Tensor  # (m, t)
    gradient: Tensor  # (m, t, C)
    gained: Tensor  # (m, t) bool: False where no step gains enough, so that v is the old one


def _take_step(
    evaluate: Evaluate,
    v: Tensor,
    value: Tensor,
    gradient: Tensor,
    step: Tensor,
    todo: Tensor,
    rows: Tensor,
) -> _Trial:
    """Take one step for m rows, and shorten it until it gains enough.

    v (m, t, C), with its value (m, t) and gradient (m, t, C). step (m, t): the length s of the
    module. todo (m, t) bool: which functions take the step; the others stay, and count as gained.
    rows (m,): the numbers of the rows, for `evaluate`.
    """
    direction = project_to_ball(v + step[..., None] * gradient) - v
    expected = (gradient * direction).sum(-1)
    share = torch.ones_like(value)
    gained = ~todo
    best = _Trial(v, value, gradient, gained)
    for _ in range(MOST_CUTS):
        trial = v + share[..., None] * direction
        height, slope = evaluate(trial, rows)
        enough = ~best.gained & (height > value) & (height - value >= SUFFICIENT * share * expected)
        best = _Trial(
            torch.where(enough[..., None], trial, best.v),
            torch.where(enough, height, best.value),
            torch.where(enough[..., None], slope, best.gradient),
            best.gained | enough,
        )
        if bool(best.gained.all()):
            break

        # To the maximum of the parabola through the last value and the slope at v, within limits.
        cut = share * expected / (2 * (share * expected - (height - value)))
        share = share * torch.nan_to_num(cut, MOST_CUT).clamp(LEAST_CUT, MOST_CUT)

    return best


def _compute_gap(v: Tensor, gradient: Tensor) -> Tensor:
    """Return max over the ball of gᵀ(u − v) = ‖g‖ − gᵀv (m, t), at least zero."""
    length: Tensor = torch.linalg.vector_norm(gradient, dim=-1)
    return (length - (gradient * v).sum(-1)).clamp_min(0.0)


def _compute_far_step(gradient: Tensor) -> Tensor:
    """Return the step length (m, t) that leads to the boundary of the ball."""
    length: Tensor = torch.linalg.vector_norm(gradient, dim=-1)
    return FAR / length.clamp_min(torch.finfo(length.dtype).tiny)


def _compute_next_step(moved: Tensor, change: Tensor, gradient: Tensor) -> Tensor:
    """Return the length (m, t) of the next step, by the rule of the module.

    moved, change (m, t, C): by how much v and the gradient changed in the last step. gradient
    (m, t, C): the new one.
    """
    bend = -(moved * change).sum(-1)
    far = _compute_far_step(gradient)
    step = moved.square().sum(-1) / bend
    return torch.where((bend > 0) & (step > 0), torch.minimum(step, far), far)
