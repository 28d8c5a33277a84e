"""Maximises many functions of a few coordinates at once, without gradients: a compass search.

A search tries one step forwards and backwards along each coordinate, goes wherever the value is
higher, and halves its step where it is not. It needs values only, so it can also maximise answers
of predictives that are computed by quadrature and have no gradient.

T functions are maximised together, each by a search of its own. All have the same d coordinates,
and u (T, d) holds the point of each search.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

STARTS = 3  # points of those given from which a search starts; a guess
MOST_ROUNDS = 150  # a guess

Evaluate = Callable[[Tensor], Tensor]
"""u (T, d) -> the value of each of T functions at its own u (T,)."""
Project = Callable[[Tensor], Tensor]
"""u (T, d) -> the nearest allowed points (T, d)."""


def maximise(
    evaluate: Evaluate,
    points: Tensor,
    at_points: Tensor,
    project: Project,
    first_step: float,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    """Maximise T functions at once, each from its best STARTS of the given points.

    points (k, d): at least one, all of them allowed. at_points (k, T): the value of each function
    there. project: moves a point to the nearest allowed one. first_step: the first change of a
    coordinate. tolerance: a search ends when its step is shorter. Returns the points u (T, d) with
    the highest values found, and these values (T,).
    """
    best_values, best_points = at_points.topk(min(STARTS, len(points)), 0)
    climbs = [
        climb(evaluate, points[start], values, project, first_step, tolerance)
        for values, start in zip(best_values, best_points, strict=True)
    ]
    best_u, best_value = climbs[0]
    for u, value in climbs[1:]:
        best_u = torch.where((value > best_value)[:, None], u, best_u)
        best_value = torch.maximum(value, best_value)
    return best_u, best_value


def climb(
    evaluate: Evaluate,
    u: Tensor,
    value: Tensor,
    project: Project,
    first_step: float,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    """Maximise T functions, each from one point u (T, d) with its value (T,).

    The other arguments are those of `maximise`. Returns the last points (T, d) and the values there
    (T,), which are at least those at the start. All searches go on until the last has ended, at
    most MOST_ROUNDS rounds.
    """
    step = torch.full_like(value, first_step)
    for _ in range(MOST_ROUNDS):
        gained = torch.zeros_like(value, dtype=torch.bool)
        for j, sign in itertools.product(range(u.shape[1]), (1.0, -1.0)):
            trial = u.clone()
            trial[:, j] += sign * step
            trial = project(trial)
            trial_value = evaluate(trial)
            better = trial_value > value
            u = torch.where(better[:, None], trial, u)
            value = torch.where(better, trial_value, value)
            gained |= better

        # Where no direction is better, the next round tries nearer points.
        step = torch.where(gained, step, step / 2)
        if float(step.max()) < tolerance:
            break

    return u, value
