"""Maximising a smooth function of a few coordinates inside a box: projected BFGS with a
safeguard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LONGEST_STEP = 3.0  # in any coordinate: these are logarithms
# of steps where the function is not concave: from a slope of 1e-3 to the longest step in six rounds
GROWTH = 4.0


class Value(NamedTuple):
    """A function at a point."""

    value: float
    gradient: Tensor  # (d,)
    curvature: Tensor | None = None  # minus the second derivatives (d,), where they are known


Function = Callable[[Tensor], "Value | tuple[float, Tensor]"]


@dataclass(frozen=True, eq=False)
class Maximum:
    """Where the ascent ended, and the way there."""

    point: Tensor  # (d,)
    value: float
    gradient: Tensor
    at_bound: Tensor  # (d,) bool: pushed against an edge
    converged: bool
    points: Tensor  # (rounds + 1, d)
    values: Tensor
    evaluations: int


def maximise(
    function: Function,
    start: Tensor,
    low: Tensor,
    high: Tensor,
    scale: Tensor | None = None,
    *,
    tolerance: float = 1e-9,
    noise: float = 0.0,
    level: float = 1.0,
    rounds: int = 200,
) -> Maximum:
    """Climb from `start` within low ≤ point ≤ high.

    function(point) -> Value. `scale` (d,) is about the inverse of the curvature by coordinate, for
    a function that does not return one; None: not known, and the first step has length one. A
    curvature that the function returns is used anew at each point: in logarithms of precisions it
    may change by orders of magnitude on the way. A coordinate at an edge whose gradient points
    outwards is held. Ends when the free gradient, in units of `level`, is below the tolerance, or
    when no step rises any more (rounding). converged = False after `rounds` steps, or where no step
    rises from a steep place.

    level: the size of the terms that the value sums, whose rounding error it has. It is not taken
    from the value, to which other units of the data add a constant: the ascent must end at the same
    point in every unit. noise: the error of a value, as a share of `level`. Gains below it are not
    looked for: a search among errors has no end.
    """
    point = start.clamp(low, high)
    value, gradient, curvature = Value(*function(point))
    evaluations, points, values = 1, [point], [value]
    if scale is None:
        scale = torch.full_like(point, 1 / max(float(gradient.abs().max()), 1e-300))
    # The inverse of minus the Hessian in coordinates in which the scale is one
    start_inverse = torch.eye(len(point), dtype=torch.float64)
    inverse = start_inverse
    unit = _unit(gradient, curvature, scale, tolerance * level)
    converged = False
    for _ in range(rounds):
        held = ((point <= low) & (gradient <= 0)) | ((point >= high) & (gradient >= 0))
        free = torch.where(held, 0.0, gradient)
        if float(free.abs().max()) <= tolerance * level:
            converged = True
            break
        step = unit * _direction(inverse, unit * free, held)
        steep = float(free.abs().max()) > 1e-6 * level
        # the remaining gain is below rounding error
        if not steep and float(free @ step) <= 1e-14 * level:
            converged = True
            break
        size = min(1.0, LONGEST_STEP / float(step.abs().max()))
        error = noise * level
        shortest = max(
            1e-12, error / float(free @ step)
        )  # beyond, the gain is an error or rounding
        while True:
            trial = (point + size * step).clamp(low, high)
            new, slope, bend = Value(*function(trial))
            evaluations += 1
            enough = value + 1e-4 * float(gradient @ (trial - point))
            rises = new >= enough and new > value - 1e-14 * level
            size /= 2
            if rises or size < shortest:
                break
        if not rises:
            if (
                inverse is start_inverse
            ):  # not even along the gradient: the top, to rounding or to the noise
                converged = not steep or noise > 0
                break
            inverse = start_inverse
            continue
        unit = _unit(slope, bend, scale, tolerance * level)
        inverse = _updated(inverse, trial - point, gradient - slope, unit)
        gain = new - value
        point, value, gradient = trial, new, slope
        points.append(point)
        values.append(value)
        if gain < error:
            converged = True
            break
    bound = ((point <= low) & (gradient < 0)) | ((point >= high) & (gradient > 0))
    return Maximum(
        point,
        value,
        gradient,
        bound,
        converged,
        torch.stack(points),
        torch.tensor(values, dtype=torch.float64),
        evaluations,
    )


def _unit(gradient: Tensor, curvature: Tensor | None, scale: Tensor, least: float) -> Tensor:
    """The length (d,) at which each coordinate is measured: curvature^(−½).

    A small curvature is replaced: no coordinate's own Newton step is then beyond the longest.
    """
    if curvature is None:
        return scale.sqrt()
    return torch.maximum(curvature, gradient.abs() / LONGEST_STEP).clamp_min(least).rsqrt()


def _direction(inverse: Tensor, gradient: Tensor, held: Tensor) -> Tensor:
    """An ascent direction among the free coordinates."""
    keep = (~held).double()
    step = keep * (inverse @ gradient)
    return step if float(step @ gradient) > 0 else gradient * inverse.diagonal()


def _updated(inverse: Tensor, step: Tensor, fall: Tensor, unit: Tensor) -> Tensor:
    """BFGS on the inverse of minus the Hessian, for coordinates in units of `unit`.

    step: the change of the point, fall: how much less the gradient is there. Where the function is
    not concave along the step, no curvature bounds the steps: they grow up to the longest.
    """
    s, y = step / unit, fall * unit
    along = float(s @ y)
    if along <= 1e-12 * float(s.norm() * y.norm()):
        return inverse if float(step.abs().max()) >= LONGEST_STEP else GROWTH * inverse
    eye = torch.eye(len(s), dtype=torch.float64)
    left = eye - torch.outer(s, y) / along
    return left @ inverse @ left.mT + torch.outer(s, s) / along
