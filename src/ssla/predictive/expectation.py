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
from torch.nn.functional import pad

from ssla.predictive.class_law import ClassLaw
from ssla.predictive.count_law import CountLaw
from ssla.predictive.gaussian_law import GaussianLaw
from ssla.predictive.grid_law import GridLaw
from ssla.predictive.law import Piece, gather_rows
from ssla.predictive.predictive import Predictive

GAUSSIAN_NODES = 1201  # a guess: steps of 0.015 standard deviations
GAUSSIAN_REACH = 9.0  # standard deviations; beyond it is 1e-19 of the probability

Event = Any
"""(low, high): low ≤ Y ≤ high, either end may be infinite; a list of such, disjoint; for classes a
class or a list of them; or a function of y that returns True or False.
"""


class Nodes(NamedTuple):
    """Values of y and their probabilities, by row: E h(Y) = Σ_j weights_j h(values_j)."""

    values: Tensor  # (N, k)
    weights: Tensor  # (N, k), sums to one; zero where a row has fewer than k


def nodes_of(predictive: Predictive) -> Nodes:
    """Return nodes of a predictive of one target, for expectations.

    They are accurate to quadrature for smooth functions; at jumps to the spacing of the nodes.
    ValueError for several targets, TypeError for laws without nodes.
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
        values = [t.centres for t in law.tables]
        return _join_nodes(law.tables, values, [torch.softmax(t.logs, 1) for t in law.tables])
    if isinstance(law, GridLaw):
        values = [law.support.from_real(p.grid.nodes) for p in law.pieces]
        shares = [p.grid.shares / p.grid.shares.sum(1, keepdim=True) for p in law.pieces]
        return _join_nodes(law.pieces, values, shares)
    raise TypeError(f"Expectations are not implemented for {type(law).__name__}.")


def _join_nodes(pieces: Sequence[Piece], values: list[Tensor], weights: list[Tensor]) -> Nodes:
    """Join the nodes of pieces, values and weights (m, k) each with its own k, in row order.

    Shorter rows are padded: the last value is repeated with no weight.
    """
    most = max(value.shape[1] for value in values)
    padded = []
    for value, weight in zip(values, weights, strict=True):
        missing = most - value.shape[1]
        last = value[:, -1:].expand(-1, missing)
        padded.append((torch.cat([value, last], 1).double(), pad(weight.double(), (0, missing))))
    return Nodes(*(gather_rows(pieces, parts) for parts in zip(*padded, strict=True)))


def expect(predictive: Predictive, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return E function(Y) for each row (N,). function is applied elementwise to y (N, k).

    ValueError unless it returns one value for each y.
    """
    values, weights = nodes_of(predictive)
    answer = torch.as_tensor(function(values))
    if answer.shape != values.shape:
        raise ValueError(
            f"The function must return one value for each y: for y {tuple(values.shape)} the same "
            f"shape, but it returned {tuple(answer.shape)}."
        )
    return (weights * torch.where(weights > 0, answer.double(), 0.0)).sum(1)


def probability(predictive: Predictive, event: Event) -> Tensor:
    """Return P(Y ∈ event) for each row (N,): by the distribution function for intervals, by the
    nodes for a function.

    ValueError or TypeError for an event that does not fit the target.
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

    def cdf(end: float) -> Tensor:
        """Evaluate P(Y ≤ end) in each row (N,); the end may be infinite."""
        if math.isinf(end):
            return torch.ones_like(total) if end > 0 else torch.zeros_like(total)
        return predictive.cdf(torch.full_like(total, end)).double()

    for low, high in intervals_of(event):
        # The ends are included: of counts, P(Y < low) is P(Y ≤ low − 1).
        if predictive.kind == "count" and math.isfinite(low):
            low = math.ceil(low) - 1
        total = total + cdf(high) - cdf(low)
    return total


def intervals_of(event: Event) -> Sequence[tuple[float, float]]:
    """Return an interval, or a list of disjoint ones, as pairs (low, high) in order.

    TypeError for other events; ValueError where intervals overlap or end before they begin.
    """
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
