"""Expectations of functions and probabilities of events under a predictive.

The results are computed for every row at once. Nodes are values of y with weights: an expectation
E h(Y) is the weighted sum of h over the nodes of a row.
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
"""A set of y: (low, high) for low ≤ Y ≤ high, where either end may be infinite; a list of such
intervals that do not overlap; a class or a list of classes; or a function of y that returns True or
False.
"""


class Nodes(NamedTuple):
    """Values of y and their probabilities, by row: E h(Y) = Σ_j weights_j h(values_j)."""

    values: Tensor  # (N, k)
    weights: Tensor  # (N, k), sums to one; zero where a row has fewer than k


def get_expectation_nodes(predictive: Predictive) -> Nodes:
    """Return nodes of a predictive of one target, for expectations E h(Y).

    Expectations of smooth h are as accurate as the quadrature. A jump of h is placed only to within
    the spacing of the nodes. Raises ValueError for a Gaussian of several targets, and TypeError for
    laws without nodes (mixtures, transformed targets, angles).
    """
    law = predictive.law
    if isinstance(law, GaussianLaw):
        if predictive.mean.dim() != 1:
            raise ValueError(
                "Expectations are for one target, but this predictive has several. Ask for its "
                "mean and covariance."
            )
        scores = torch.linspace(
            -GAUSSIAN_REACH, GAUSSIAN_REACH, GAUSSIAN_NODES, dtype=torch.float64
        )
        weights = torch.softmax(-0.5 * scores * scores, 0)
        mean, scale = predictive.mean.double(), predictive.stddev.double()
        return Nodes(mean[:, None] + scale[:, None] * scores, weights.expand(len(mean), -1))
    if isinstance(law, ClassLaw):
        probs = predictive.probs.double()
        return Nodes(torch.arange(probs.shape[1], dtype=torch.float64).expand_as(probs), probs)
    if isinstance(law, CountLaw):
        values = [table.centres for table in law.tables]
        probabilities = [torch.softmax(table.logs, 1) for table in law.tables]
        return _join_nodes(law.tables, values, probabilities)
    if isinstance(law, GridLaw):
        values = [law.support.from_real(piece.grid.nodes) for piece in law.pieces]
        shares = [piece.grid.shares for piece in law.pieces]
        probabilities = [share / share.sum(1, keepdim=True) for share in shares]
        return _join_nodes(law.pieces, values, probabilities)

    raise TypeError(f"Expectations are not implemented for {type(law).__name__}.")


def _join_nodes(pieces: Sequence[Piece], values: list[Tensor], weights: list[Tensor]) -> Nodes:
    """Join the values and weights (m, k) of all pieces into nodes, in the order of the rows.

    The number of nodes k may differ between pieces. Shorter rows are padded to the largest k: the
    last value is repeated with weight zero.
    """
    most = max(value.shape[1] for value in values)
    padded_values = []
    padded_weights = []
    for value, weight in zip(values, weights, strict=True):
        missing = most - value.shape[1]
        last = value[:, -1:].expand(-1, missing)
        padded_values.append(torch.cat([value, last], 1).double())
        padded_weights.append(pad(weight.double(), (0, missing)))
    return Nodes(gather_rows(pieces, padded_values), gather_rows(pieces, padded_weights))


def expect(predictive: Predictive, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return E function(Y) under the predictive, for each row (N,).

    function: applied to each y of a tensor (N, k). Raises ValueError unless it returns one value
    for each y, and what `get_expectation_nodes` raises.
    """
    values, weights = get_expectation_nodes(predictive)
    answer = torch.as_tensor(function(values))
    if answer.shape != values.shape:
        raise ValueError(
            f"The function must return one value for each y: for y {tuple(values.shape)} the same "
            f"shape, but it returned {tuple(answer.shape)}."
        )
    # A value without weight counts as zero, also where the function is infinite or NaN there.
    return (weights * torch.where(weights > 0, answer.double(), 0.0)).sum(1)


def probability(predictive: Predictive, event: Event) -> Tensor:
    """Return P(Y ∈ event) under the predictive, for each row (N,).

    Intervals are evaluated by the distribution function, and a function by the nodes of
    `get_expectation_nodes`. Raises ValueError or TypeError for an event that does not fit the
    target.
    """
    if callable(event):
        return expect(predictive, lambda y: torch.as_tensor(event(y)).double())
    if isinstance(predictive.law, ClassLaw):
        classes = [event] if isinstance(event, int) else list(event)
        if not all(isinstance(c, int) and 0 <= c < predictive.probs.shape[1] for c in classes):
            raise ValueError(
                "An event of classes is a class or a list of them, from 0 to "
                f"{predictive.probs.shape[1] - 1}."
            )
        return predictive.probs[:, classes].sum(1).double()
    if (
        not isinstance(predictive.law, GaussianLaw | GridLaw | CountLaw)
        or predictive.mean.dim() != 1
    ):
        raise TypeError("The probability of an interval needs a predictive of one ordered target.")

    total = torch.zeros(len(predictive.mean), dtype=torch.float64)

    def evaluate_cdf(end: float) -> Tensor:
        """Return P(Y ≤ end) in each row (N,); the end may be infinite."""
        if math.isinf(end):
            return torch.ones_like(total) if end > 0 else torch.zeros_like(total)
        return predictive.cdf(torch.full_like(total, end)).double()

    for low, high in parse_intervals(event):
        # Both ends belong to the interval. Of counts, P(Y < low) is P(Y ≤ ⌈low⌉ − 1).
        if predictive.kind == "count" and math.isfinite(low):
            low = math.ceil(low) - 1
        total = total + evaluate_cdf(high) - evaluate_cdf(low)

    return total


def parse_intervals(event: Event) -> Sequence[tuple[float, float]]:
    """Return the intervals of an event, one or a list of them, as pairs (low, high) in order.

    Raises TypeError for other events, and ValueError for none, and where intervals overlap or end
    before they begin.
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
