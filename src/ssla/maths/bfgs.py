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
SUFFICIENT_GAIN = 1e-4  # share of the linear prediction that a step must gain (Armijo)
STEEP = 1e-6  # slope in units of the level above which an ascent without a gain has failed
ROUNDING = 1e-14  # error of a value in units of the level
SHORTEST_STEP = 1e-12  # share of a full step below which the line search ends


class Value(NamedTuple):
    """A function's value and derivatives at a point."""

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


def maximise_in_box(
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
    """Climb from `start` (d,) within low ≤ point ≤ high, both (d,).

    function(point) -> Value. `scale` (d,) is about the inverse of the curvature by coordinate, for
    a function that does not return one; None: not known, and the first step has length one. A
    curvature that the function returns is used anew at each point: in logarithms of precisions it
    may change by orders of magnitude on the way. A coordinate at an edge whose gradient points
    outwards is held. The ascent ends when the free gradient, in units of `level`, is below the
    tolerance, or when no step rises any more (rounding). converged = False after `rounds` steps, or
    where no step rises from a steep place.

    level: the size of the terms that the value sums, whose rounding error it has. It is not taken
    from the value, to which other units of the data add a constant: the ascent must end at the same
    point in every unit. noise: the error of a value, as a share of `level`. Gains below it are not
    looked for: a search among errors has no end.
    """
    start = start.clamp(low, high)
    here = _Place(start, Value(*function(start)))
    evaluations = 1
    visited = [here]
    if scale is None:
        scale = torch.full_like(here.point, 1 / max(float(here.gradient.abs().max()), 1e-300))
    # The inverse of minus the Hessian in coordinates in which the scale is one
    start_inverse = torch.eye(len(here.point), dtype=torch.float64)
    inverse = start_inverse
    unit = _coordinate_units(here, scale, tolerance * level)
    error = noise * level
    converged = False
    for _ in range(rounds):
        held = here.edges_pushed(low, high, at_rest=True)
        free = torch.where(held, 0.0, here.gradient)
        if float(free.abs().max()) <= tolerance * level:
            converged = True
            break
        step = unit * _ascent_direction(inverse, unit * free, held)
        steep = float(free.abs().max()) > STEEP * level
        # the remaining gain is below rounding error
        if not steep and float(free @ step) <= ROUNDING * level:
            converged = True
            break
        # A shorter step gains less than the error of a value, or than rounding.
        shortest = max(SHORTEST_STEP, error / float(free @ step))
        there, tried = _search_line(function, here, step, low, high, level, shortest)
        evaluations += tried
        if there is None:
            # Not even along the gradient: this is the top, to rounding or to the noise.
            if inverse is start_inverse:
                converged = not steep or noise > 0
                break
            inverse = start_inverse
            continue
        unit = _coordinate_units(there, scale, tolerance * level)
        inverse = _update_inverse(
            inverse, there.point - here.point, here.gradient - there.gradient, unit
        )
        gain = there.value - here.value
        here = there
        visited.append(here)
        if gain < error:
            converged = True
            break
    return Maximum(
        here.point,
        here.value,
        here.gradient,
        here.edges_pushed(low, high, at_rest=False),
        converged,
        torch.stack([place.point for place in visited]),
        torch.tensor([place.value for place in visited], dtype=torch.float64),
        evaluations,
    )


class _Place(NamedTuple):
    """A point (d,) of the ascent, and the function there."""

    point: Tensor
    function: Value

    @property
    def value(self) -> float:
        """Return the value of the function."""
        return self.function.value

    @property
    def gradient(self) -> Tensor:
        """Return the gradient of the function (d,)."""
        return self.function.gradient

    def edges_pushed(self, low: Tensor, high: Tensor, at_rest: bool) -> Tensor:
        """Return which coordinates are at an edge with a gradient that points outwards (d,) bool.

        at_rest: whether a gradient of zero counts too.
        """
        g = self.gradient
        down, up = (g <= 0, g >= 0) if at_rest else (g < 0, g > 0)
        return ((self.point <= low) & down) | ((self.point >= high) & up)


def _search_line(
    function: Function,
    here: _Place,
    step: Tensor,
    low: Tensor,
    high: Tensor,
    level: float,
    shortest: float,
) -> tuple[_Place | None, int]:
    """Halve a step (d,) until the function rises; None if even the shortest does not rise.

    Returns the place and the number of evaluations. low, high (d,), level: those of `maximise`.
    """
    size = min(1.0, LONGEST_STEP / float(step.abs().max()))
    evaluations = 0
    while True:
        trial = (here.point + size * step).clamp(low, high)
        there = _Place(trial, Value(*function(trial)))
        evaluations += 1
        enough = here.value + SUFFICIENT_GAIN * float(here.gradient @ (trial - here.point))
        if there.value >= enough and there.value > here.value - ROUNDING * level:
            return there, evaluations
        size /= 2
        if size < shortest:
            return None, evaluations


def _coordinate_units(place: _Place, scale: Tensor, least: float) -> Tensor:
    """Return the length (d,) at which each coordinate is measured: curvature^(−½).

    scale (d,): the inverse of the curvature where the function does not return one. A curvature
    below `least` is replaced, and so is one with a Newton step beyond the longest.
    """
    curvature = place.function.curvature
    if curvature is None:
        return scale.sqrt()
    return torch.maximum(curvature, place.gradient.abs() / LONGEST_STEP).clamp_min(least).rsqrt()


def _ascent_direction(inverse: Tensor, gradient: Tensor, held: Tensor) -> Tensor:
    """Return an ascent direction (d,) among the coordinates that are not held.

    inverse (d, d): of minus the Hessian; gradient (d,), which is zero for held coordinates.
    """
    step = (~held).double() * (inverse @ gradient)
    return step if float(step @ gradient) > 0 else gradient * inverse.diagonal()


def _update_inverse(inverse: Tensor, step: Tensor, fall: Tensor, unit: Tensor) -> Tensor:
    """Return the BFGS update of the inverse of minus the Hessian (d, d), in units of `unit` (d,).

    step (d,): the change of the point. fall (d,): how much less the gradient is there. Where the
    function is not concave along the step, no curvature bounds the steps: they grow up to the
    longest.
    """
    s, y = step / unit, fall * unit
    along = float(s @ y)
    if along <= 1e-12 * float(s.norm() * y.norm()):
        return inverse if float(step.abs().max()) >= LONGEST_STEP else GROWTH * inverse
    eye = torch.eye(len(s), dtype=torch.float64)
    left = eye - torch.outer(s, y) / along
    return left @ inverse @ left.mT + torch.outer(s, s) / along
