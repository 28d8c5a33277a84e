"""Expectations of functions and probabilities of events under a predictive, for every row at
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssla.predictive.class_law import ClassLaw
from ssla.predictive.count_law import CountLaw
from ssla.predictive.gaussian_law import GaussianLaw
from ssla.predictive.grid_law import GridLaw
from ssla.predictive.predictive import Predictive

GAUSSIAN_NODES = 1201
GAUSSIAN_REACH = 9.0  # standard deviations

Event = Any
"""(low, high): low ≤ Y ≤ high, either end may be infinite; a list of such, disjoint; for classes a
class or a list of them; or a function of y that returns True or False.
"""


class Nodes(NamedTuple):
    """Values of y and their probabilities, by row: E h(Y) = Σ_j weights_j h(values_j)."""

    values: Tensor  # (N, k)
    weights: Tensor  # (N, k), sums to one; zero where a row has fewer than k


def nodes_of(predictive: Predictive) -> Nodes:
    """Where a predictive's mass lies.

    Accurate to quadrature for smooth functions; at jumps to the spacing of the nodes.
    """
    law = predictive.law
    if isinstance(law, GaussianLaw):
        if predictive.mean.dim() != 1:
            raise ValueError(
                "Expectations are for one target, but this predictive has several. Ask for its "
                "mean and covariance."
            )
        z = torch.linspace(-GAUSSIAN_REACH, GAUSSIAN_REACH, GAUSSIAN_NODES, dtype=torch.float64)
        weights = torch.softmax(-0.5 * z * z, 0)
        mean, scale = predictive.mean.double(), predictive.stddev.double()
        return Nodes(mean[:, None] + scale[:, None] * z, weights.expand(len(mean), -1))
    if isinstance(law, ClassLaw):
        probs = predictive.probs.double()
        return Nodes(torch.arange(probs.shape[1], dtype=torch.float64).expand_as(probs), probs)
    if isinstance(law, CountLaw):
        tables = law.tables
        return _padded(
            [t.rows for t in tables],
            [t.centres for t in tables],
            [torch.softmax(t.logs, 1) for t in tables],
        )
    if isinstance(law, GridLaw):
        grids = [(p.rows, p.grid) for p in law.pieces]
        shares = [grid.shares / grid.shares.sum(1, keepdim=True) for _, grid in grids]
        return _padded(
            [r for r, _ in grids], [law.support.from_real(g.nodes) for _, g in grids], shares
        )
    raise TypeError(f"Expectations are not implemented for {type(law).__name__}.")


def _padded(rows: list[Tensor], values: list[Tensor], weights: list[Tensor]) -> Nodes:
    """Pieces with different numbers of nodes -> one table; padding repeats the last value with
    no weight.
    """
    count, most = sum(len(r) for r in rows), max(v.shape[1] for v in values)
    all_values, all_weights = (
        torch.zeros(count, most, dtype=torch.float64),
        torch.zeros(count, most, dtype=torch.float64),
    )
    for index, value, weight in zip(rows, values, weights, strict=True):
        all_values[index] = value[:, -1:].expand(-1, most)
        all_values[index[:, None], torch.arange(value.shape[1])] = value.double()
        all_weights[index[:, None], torch.arange(value.shape[1])] = weight.double()
    return Nodes(all_values, all_weights)


def expect(predictive: Predictive, function: Callable[[Tensor], Tensor]) -> Tensor:
    """E function(Y) for each row (N,). function is applied elementwise to y (N, k)."""
    values, weights = nodes_of(predictive)
    answer = torch.as_tensor(function(values))
    if answer.shape != values.shape:
        raise ValueError(
            f"The function must return one value for each y: for y {tuple(values.shape)} the same "
            f"shape, but it returned {tuple(answer.shape)}."
        )
    return (weights * torch.where(weights > 0, answer.double(), 0.0)).sum(1)


def probability(predictive: Predictive, event: Event) -> Tensor:
    """P(Y ∈ event) for each row (N,): by the distribution function for intervals, by the nodes
    for a function.
    """
    if callable(event):
        return expect(predictive, lambda y: torch.as_tensor(event(y)).double())
    if isinstance(predictive.law, ClassLaw):
        chosen = [event] if isinstance(event, int) else list(event)
        if not all(isinstance(c, int) and 0 <= c < predictive.probs.shape[1] for c in chosen):
            raise ValueError(
                "An event of classes is a class or a list of them, from 0 to "
                f"{predictive.probs.shape[1] - 1}."
            )
        return predictive.probs[:, chosen].sum(1).double()
    if (
        not isinstance(predictive.law, GaussianLaw | GridLaw | CountLaw)
        or predictive.mean.dim() != 1
    ):
        raise TypeError("The probability of an interval needs a predictive of one ordered target.")
    total = torch.zeros(len(predictive.mean), dtype=torch.float64)
    for low, high in intervals_of(event):
        if predictive.kind == "count":
            low = math.ceil(low) - 1 if math.isfinite(low) else low
        below = (
            predictive.cdf(torch.full_like(total, low)).double()
            if low > -math.inf
            else torch.zeros_like(total)
        )
        above = (
            predictive.cdf(torch.full_like(total, high)).double()
            if high < math.inf
            else torch.ones_like(total)
        )
        total = total + above - below
    return total


def intervals_of(event: Event) -> Sequence[tuple[float, float]]:
    """An interval or a list of disjoint ones, in order."""
    try:
        pairs = [event] if len(event) == 2 and not hasattr(event[0], "__len__") else list(event)
        ends = sorted((float(low), float(high)) for low, high in pairs)
    except TypeError:
        raise TypeError(
            "An event is (low, high), a list of such, or a function of y that returns True or "
            f"False, but is {event!r}."
        ) from None
    if (
        not ends
        or any(not low <= high for low, high in ends)
        or any(a[1] > b[0] for a, b in pairwise(ends))
    ):
        raise ValueError(
            "An event needs intervals (low, high) with low ≤ high that do not overlap, but is "
            f"{event!r}."
        )
    return ends
