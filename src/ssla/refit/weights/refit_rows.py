"""The training data as a refit reads them, and small operations on rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ssla.curvature import Operator
from ssla.data import Batch, Inputs, Rows, Source, checked, leaves, map_inputs, open_source
from ssla.priors import BoundGaussian, BoundPrior

if TYPE_CHECKING:
    from ssla.posterior import Posterior


class Purpose(NamedTuple):
    """What the training data are read for, and how a user gives them: the words of an error."""

    task: str
    data: str  # what the data are called
    call: str


REFIT = Purpose("A refit of the weights", "The data to refit on", "refit=ssla.WeightRefit(data={})")


class Block(NamedTuple):
    """Some rows: what the outputs are computed from, their targets, and their weights (None:
    all one).
    """

    x: Any  # features (b, F) with their column of ones for a last layer, cast inputs otherwise
    f: Tensor  # outputs at θ̂ (b, C)
    y: Tensor
    weights: Tensor | None

    @property
    def targets(self) -> Tensor:
        """y (b, 1, …), which broadcasts with the outputs of many tasks (b, m, C)."""
        return self.y.unsqueeze(1)

    def weighted(self, values: Tensor) -> Tensor:
        """values (b, …) times the row weights."""
        return (
            values
            if self.weights is None
            else values * self.weights.reshape(-1, *[1] * (values.dim() - 1))
        )


TrainingRows = Rows[Block]


def training_data(posterior: Posterior, data: Any, purpose: Purpose = REFIT) -> Source:
    """The data behind a posterior, or those the user gives; ValueError if they cannot be read
    again.
    """
    source = posterior.source if data is None else open_source(data)
    if source is None:
        why = "this posterior does not hold them (it was loaded from a file or put together)"
    elif not source.repeatable:
        why = "they came from a generator, which can be read only once"
    else:
        return source
    call = purpose.call.format("(X, y)")
    raise ValueError(
        f"{purpose.task} needs the training data again, but {why}. Give all the data of the fit: "
        f"{call}."
    )


def open_rows(
    posterior: Posterior, data: Any, prepare: Callable[[Inputs], tuple[Any, Tensor]]
) -> TrainingRows:
    """The rows behind a posterior, or those the user gives; `prepare` turns cast inputs into
    (x, f at θ̂).
    """
    source = training_data(posterior, data)
    network, budget = posterior.network, posterior.memory_budget
    support = posterior.likelihood.support_for(network.outputs)

    def block(part: Batch) -> Block:
        _, y, weights = checked(part, support, network.outputs)
        return Block(*prepare(network.cast(part.x)), y, weights)

    return Rows(source, lambda _: network.rows_at_once(budget), block, _bytes, budget // 4)


def _bytes(block: Block) -> int:
    return sum(8 * leaf.numel() for leaf in (*leaves(block.x), block.f, block.y))


def check_seen(posterior: Posterior, n: int, gradient: Tensor, purpose: Purpose = REFIT) -> None:
    """ValueError unless these rows are those of the fit: as many, with the same gradient at θ̂."""
    call = purpose.call.format("…")
    if n != posterior.statistics.n:
        raise ValueError(
            f"{purpose.data} have {n:,} rows, but the posterior was fitted on "
            f"{posterior.statistics.n:,}. Give all of them, in any order: {call}. If a loader "
            "drops or samples rows, take that out."
        )
    off = gradient - posterior.statistics.gradient
    distance = float(off @ _by_data(posterior).solve(off)) ** 0.5
    if not distance <= 0.01 * len(off) ** 0.5:
        raise ValueError(
            f"{purpose.data} are not those of the fit: the log likelihood's gradient at θ̂ differs "
            f"by {distance:.3g} posterior standard deviations. Likely causes: (a) other data, or "
            "other row weights; (b) a loader that augments at random. Give the data of the fit: "
            f"{call}."
        )


def _by_data(posterior: Posterior) -> Operator:
    """H⁻¹ with a prior no stronger than the data on average: a strong prior would make every
    difference of data look small.
    """
    precision = posterior.objective_prior.precision(posterior.theta)
    v = torch.arange(
        len(posterior.theta), dtype=torch.float64
    ).cos()  # a direction that no symmetry of θ singles out
    level = 2 * float(v @ posterior.statistics.curvature.push(v)) / len(v)
    if precision.dim() == 2 or not 0 < level < float(precision.max()):
        return posterior.operator
    return posterior.statistics.curvature.with_prior(precision.clamp(max=level))


def by_rows(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """function of each row, at once; one by one where it cannot be vectorised (control flow in
    a user's own code).
    """
    try:
        result: Tensor = torch.func.vmap(function)(values)
    except (RuntimeError, ValueError, TypeError):
        result = torch.stack([function(row) for row in values])
    return result


@dataclass(frozen=True, eq=False)
class PriorChange:
    """How log π changes with a step δ (m, P) from θ̂; exact and without cancellation for a
    Gaussian.
    """

    bound: BoundPrior
    theta: Tensor

    @property
    def gaussian(self) -> bool:
        return isinstance(self.bound, BoundGaussian)

    def value(self, step: Tensor) -> Tensor:
        """log π(θ̂ + δ) − log π(θ̂) (m,)."""
        if self.gaussian:
            return (step * (self.bound.gradient(self.theta) + 0.5 * self.gradient(step))).sum(-1)
        return by_rows(self.bound.log_prob, self.theta + step) - self.bound.log_prob(self.theta)

    def gradient(self, step: Tensor) -> Tensor:
        """∇log π(θ̂ + δ) − ∇log π(θ̂) (m, P)."""
        if self.gaussian:
            return -self.bound.precision(self.theta) * step
        return by_rows(self.bound.gradient, self.theta + step) - self.bound.gradient(self.theta)

    def precision(self, step: Tensor) -> Tensor | None:
        """The change of −∇² log π as (m, P, P); None where there is none."""
        if self.gaussian:
            return None
        change = by_rows(self.bound.precision, self.theta + step) - self.bound.precision(self.theta)
        return torch.diag_embed(change) if change.dim() == 2 else change


def take(x: Inputs, rows: Tensor) -> Inputs:
    """Some rows of an input."""
    return map_inputs(lambda part: part[rows], x)


def leading(row: Inputs) -> Inputs:
    """One row -> a batch of one."""
    return map_inputs(lambda part: part.unsqueeze(0), row)


def square(precision: Tensor) -> Tensor:
    """(P,) or (P, P) -> (P, P)."""
    return torch.diag(precision) if precision.dim() == 1 else precision


def solve_rows(operator: Operator, factor: Tensor | None, values: Tensor) -> Tensor:
    """H⁻¹ v for each row of values (m, P): by the factor of H where there is one, else by the
    structure.
    """
    return (
        torch.cholesky_solve(values.mT, factor).mT
        if factor is not None
        else operator.solve_many(values.mT).mT
    )
