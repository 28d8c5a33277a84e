"""Maximises a smooth function of a few coordinates inside a box, by projected BFGS.

A point (d,) has coordinates between the edges of the box, low and high. A coordinate is held while
it is at an edge and its gradient points outwards. BFGS learns the inverse of minus the Hessian from
the changes of the gradient, in units of length for each coordinate in which the curvature is about
one. A place is a point with the function there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# All constants are guesses, not measured.
LONGEST_STEP = 3.0  # in any coordinate: these are logarithms
# Factor on the steps where the function is not concave. Six rounds lead from a slope of 1e-3 to the
# longest step
GROWTH = 4.0
SUFFICIENT_GAIN = 1e-4  # share of the linear prediction that a step must gain (Armijo)
STEEP = 1e-6  # slope, as a share of the level, above which an ascent without a gain has failed
ROUNDING = 1e-14  # rounding error of a value, as a share of the level
SHORTEST_STEP = 1e-12  # share of a full step below which the line search ends


class Value(NamedTuple):
    """A function's value and derivatives at a point."""

    value: float
    gradient: Tensor  # (d,)
    curvature: Tensor | None = None  # minus the second derivatives (d,), where they are known


Function = Callable[[Tensor], "Value | tuple[float, Tensor]"]
"""A point (d,) -> the function there, as a Value or as (value, gradient (d,))."""


@dataclass(frozen=True, eq=False)
class Maximum:
    """Where the ascent ended, and the way there."""

    point: Tensor  # (d,)
    value: float
    gradient: Tensor  # (d,)
    at_bound: Tensor  # (d,) bool: at an edge, with a gradient that points outwards
    converged: bool
    points: Tensor  # (r + 1, d): the start, and the point after each of r steps
    values: Tensor  # (r + 1,)
    evaluations: int  # of the function


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
    """Maximise a function within low ≤ point ≤ high, both (d,), from `start` (d,).

    `scale` (d,): about the inverse of the curvature by coordinate,
    for a function that does not return one; None: not known, and the first step has length one. A
    curvature that the function returns is used anew at each point: in logarithms of precisions it
    may change by orders of magnitude on the way.

    A coordinate at an edge whose gradient points outwards is held. The ascent ends when the free
    gradient, in units of `level`, is below the tolerance, or when no step rises any more
    (rounding). `converged` is false after `rounds` steps, and where no step rises
    although the gradient is large. The last point is then the best one so far.

    level: the size of the terms that the value sums, whose rounding error it has. It is not taken
    from the value, to which other units of the data add a constant: the ascent must end at the same
    point in every unit. noise: the error of a value, as a share of `level`. The ascent does not
    look for gains below it, because a search among errors has no end.
    """
    start = start.clamp(low, high)
    first = _Place(start, Value(*function(start)))
    if scale is None:
        steepest = max(float(first.gradient.abs().max()), 1e-300)
        scale = torch.full_like(first.point, 1 / steepest)
    return _climb(_Search(function, low, high, scale, tolerance, noise, level, rounds), first)


class _Search(NamedTuple):
    """The arguments of `maximise_in_box`, with a scale (d,) that is never None."""

    function: Function
    low: Tensor
    high: Tensor
    scale: Tensor
    tolerance: float
    noise: float
    level: float
    rounds: int


def _climb(search: _Search, place: _Place) -> Maximum:
    """Return the maximum that projected BFGS reaches from a place inside the box.

    The rules are those of `maximise_in_box`, whose arguments are in `search`.
    """
    low, high, level = search.low, search.high, search.level
    evaluations = 1
    visited = [place]

    # The inverse of minus the Hessian, in units in which the scale is one
    first_inverse = torch.eye(len(place.point), dtype=torch.float64)
    inverse = first_inverse
    unit = _compute_units(place, search.scale, search.tolerance * level)
    error = search.noise * level
    converged = False
    for _ in range(search.rounds):
        held = place.find_pushed_edges(low, high, at_rest=True)
        free_gradient = torch.where(held, 0.0, place.gradient)
        slope = float(free_gradient.abs().max())
        if slope <= search.tolerance * level:
            converged = True
            break
        step = unit * _choose_ascent_direction(inverse, unit * free_gradient, held)
        predicted_gain = float(free_gradient @ step)
        steep = slope > STEEP * level

        # The remaining gain is below rounding error.
        if not steep and predicted_gain <= ROUNDING * level:
            converged = True
            break

        # A shorter step gains less than the error of a value, or than rounding.
        shortest = max(SHORTEST_STEP, error / predicted_gain)
        higher, tries = _search_line(search.function, place, step, low, high, level, shortest)
        evaluations += tries
        if higher is None:
            # Not even a step along the gradient rises: this is the top, to rounding or noise.
            if inverse is first_inverse:
                converged = not steep or search.noise > 0
                break
            # The estimate of the curvature is wrong, so the next step is along the gradient.
            inverse = first_inverse
            continue

        unit = _compute_units(higher, search.scale, search.tolerance * level)
        fall = place.gradient - higher.gradient
        inverse = _update_inverse(inverse, higher.point - place.point, fall, unit)
        gain = higher.value - place.value
        place = higher
        visited.append(place)
        if gain < error:
            converged = True
            break

    return _describe_maximum(visited, low, high, converged, evaluations)


def _describe_maximum(
    visited: list[_Place], low: Tensor, high: Tensor, converged: bool, evaluations: int
) -> Maximum:
    """Return the last visited place as the maximum, with the way there."""
    place = visited[-1]
    return Maximum(
        place.point,
        place.value,
        place.gradient,
        place.find_pushed_edges(low, high, at_rest=False),
        converged,
        torch.stack([visit.point for visit in visited]),
        torch.tensor([visit.value for visit in visited], dtype=torch.float64),
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

    def find_pushed_edges(self, low: Tensor, high: Tensor, at_rest: bool) -> Tensor:
        """Return which coordinates are at an edge with a gradient that points outwards (d,) bool.

        at_rest: whether a gradient of zero counts too.
        """
        g = self.gradient
        if at_rest:
            falls, rises = g <= 0, g >= 0
        else:
            falls, rises = g < 0, g > 0
        return ((self.point <= low) & falls) | ((self.point >= high) & rises)


def _search_line(
    function: Function,
    place: _Place,
    step: Tensor,
    low: Tensor,
    high: Tensor,
    level: float,
    shortest: float,
) -> tuple[_Place | None, int]:
    """Halve a step (d,) from a place until the function rises enough.

    Returns the new place, or None if not even the shortest step rises enough, and the number of
    evaluations. low, high (d,), level: those of `maximise_in_box`. shortest: the share of the step
    below which the search ends.
    """
    size = min(1.0, LONGEST_STEP / float(step.abs().max()))
    evaluations = 0
    while True:
        point = (place.point + size * step).clamp(low, high)
        trial = _Place(point, Value(*function(point)))
        evaluations += 1
        enough = place.value + SUFFICIENT_GAIN * float(place.gradient @ (point - place.point))

        # The prediction may be negative after the clamp, so a fall beyond rounding is refused too.
        if trial.value >= enough and trial.value > place.value - ROUNDING * level:
            return trial, evaluations
        size /= 2
        if size < shortest:
            return None, evaluations


def _compute_units(place: _Place, scale: Tensor, least_curvature: float) -> Tensor:
    """Return the unit of length (d,) of each coordinate: curvature^(−½).

    scale (d,): the inverse of the curvature, for a function that does not return one. A returned
    curvature is raised to `least_curvature`, and until a Newton step is not beyond the longest.
    """
    curvature = place.function.curvature
    if curvature is None:
        return scale.sqrt()
    raised = torch.maximum(curvature, place.gradient.abs() / LONGEST_STEP)
    return raised.clamp_min(least_curvature).rsqrt()


def _choose_ascent_direction(inverse: Tensor, gradient: Tensor, held: Tensor) -> Tensor:
    """Return an ascent direction (d,) that is zero for held coordinates.

    inverse (d, d): the inverse of minus the Hessian. gradient (d,): zero for held coordinates too.
    Where the Newton step does not ascend, it is the gradient, scaled by the inverse's diagonal.
    """
    step = (~held).double() * (inverse @ gradient)
    return step if float(step @ gradient) > 0 else gradient * inverse.diagonal()


def _update_inverse(inverse: Tensor, step: Tensor, fall: Tensor, unit: Tensor) -> Tensor:
    """Return the BFGS update of the inverse of minus the Hessian (d, d), in units of `unit` (d,).

    step (d,): the change of the point. fall (d,): the old gradient minus the new one. Where the
    function is not concave along the step, BFGS has no update: the inverse grows by a factor, and
    with it the steps, unless they have the longest length already.
    """
    s, y = step / unit, fall * unit
    along = float(s @ y)
    # 1e-12: smaller products are rounding errors of zero.
    if along <= 1e-12 * float(s.norm() * y.norm()):
        return inverse if float(step.abs().max()) >= LONGEST_STEP else GROWTH * inverse
    eye = torch.eye(len(s), dtype=torch.float64)
    projection = eye - torch.outer(s, y) / along
    return projection @ inverse @ projection.mT + torch.outer(s, s) / along
