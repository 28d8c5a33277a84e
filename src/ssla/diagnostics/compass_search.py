"""Maximises many functions of a few coordinates at once, without gradients: a compass search.

A search tries one step forwards and backwards along each coordinate, goes wherever the value is
higher, and halves its step where it is not. It needs nothing but values, so that it can maximise
answers of predictives that are quadratures.
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

    points (k, d); at_points (k, T): the values there. first_step: of a coordinate; tolerance: the
    step at which a search ends. Returns u (T, d) and the maxima (T,).
    """
    best_values, best_points = at_points.topk(min(STARTS, len(points)), 0)
    climbs = [
        climb(evaluate, points[start], values, project, first_step, tolerance)
        for values, start in zip(best_values, best_points, strict=True)
    ]
    best_u, best = climbs[0]
    for u, height in climbs[1:]:
        best_u = torch.where((height > best)[:, None], u, best_u)
        best = torch.maximum(height, best)
    return best_u, best


def climb(
    evaluate: Evaluate,
    u: Tensor,
    height: Tensor,
    project: Project,
    first_step: float,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    """Maximise T functions, each from one point u (T, d) with the value height (T,).

    The other arguments are those of `maximise`. Returns the last u (T, d) and the values there
    (T,). A search that has not ended after MOST_ROUNDS returns the best point so far.
    """
    step = torch.full_like(height, first_step)
    for _ in range(MOST_ROUNDS):
        gained = torch.zeros_like(height, dtype=torch.bool)
        for j, sign in itertools.product(range(u.shape[1]), (1.0, -1.0)):
            trial = u.clone()
            trial[:, j] += sign * step
            trial = project(trial)
            trial_height = evaluate(trial)
            better = trial_height > height
            u = torch.where(better[:, None], trial, u)
            height = torch.where(better, trial_height, height)
            gained |= better

        # Where no direction is better, the next round tries nearer points.
        step = torch.where(gained, step, step / 2)
        if float(step.max()) < tolerance:
            break

    return u, height
