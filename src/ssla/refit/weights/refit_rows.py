"""The training data as a refit reads them, the change of the log prior, and operations on rows.

Terms and symbols are those of `ssla.refit.weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ssla.curvature import Operator
from ssla.data import (
    Batch,
    Inputs,
    Rows,
    Source,
    check_batch,
    input_tensors,
    map_inputs,
    open_source,
)
from ssla.priors import BoundGaussian, BoundPrior

if TYPE_CHECKING:
    from ssla.posterior import Posterior


class DataPurpose(NamedTuple):
    """The words of an error about training data: what reads them, and how a user gives them."""

    task: str  # what needs the data
    data: str  # what the data are called
    call: str  # how a user gives them, with {} in the place of the data


REFIT = DataPurpose(
    "A refit of the weights", "The data to refit on", "refit=ssla.WeightRefit(data={})"
)
# A guess, in posterior standard deviations: the gradients of the same data differ by less, over √P.
SAME_GRADIENT = 0.01


class Block(NamedTuple):
    """Some training rows: what outputs are computed from, targets, and weights (None: all one)."""

    x: Any  # features (b, F) with their column of ones for a last layer, cast inputs otherwise
    f: Tensor  # outputs at θ̂ (b, C)
    y: Tensor  # (b, …)
    weights: Tensor | None  # (b,)

    @property
    def targets(self) -> Tensor:
        """Return y (b, 1, …), which broadcasts with the outputs of many tasks (b, m, C)."""
        return self.y.unsqueeze(1)

    def apply_weights(self, values: Tensor) -> Tensor:
        """Return values (b, …), with each row times its weight; unchanged without weights."""
        if self.weights is None:
            return values
        return values * self.weights.reshape(-1, *[1] * (values.dim() - 1))


TrainingRows = Rows[Block]


def open_training_data(posterior: Posterior, data: Any, purpose: DataPurpose = REFIT) -> Source:
    """Return the training data behind a posterior, or those that the user gives.

    data: the user's data; None: those of the posterior. purpose: the words of the error. Raises
    ValueError if there are no data, or if they can be read only once.
    """
    source = posterior.source if data is None else open_source(data)
    if source is None:
        reason = "this posterior does not hold them (it was loaded from a file or put together)"
    elif not source.repeatable:
        reason = "they came from a generator, which can be read only once"
    else:
        return source
    call = purpose.call.format("(X, y)")
    raise ValueError(
        f"{purpose.task} needs the training data again, but {reason}. Give all the data of the "
        f"fit: {call}."
    )


def open_rows(
    posterior: Posterior, data: Any, prepare: Callable[[Inputs], tuple[Any, Tensor]]
) -> TrainingRows:
    """Open the training rows behind a posterior, or those that the user gives, as blocks.

    data: the user's data; None: those of the posterior. prepare: a function from cast inputs to x
    and f of a `Block`. Blocks are kept in memory (`Rows.kept`) if all of them fit a quarter of the
    memory budget; otherwise each pass reads them again. Raises ValueError if they cannot be read
    again; a pass raises ValueError for targets or weights that are not valid.
    """
    source = open_training_data(posterior, data)
    network, budget = posterior.network, posterior.memory_budget
    support = posterior.likelihood.support_for(network.outputs)

    def prepare_block(batch: Batch) -> Block:
        """Check the targets and weights of a batch, and return it as a block."""
        _, y, weights = check_batch(batch, support, network.outputs)
        return Block(*prepare(network.cast(batch.x)), y, weights)

    rows_at_once = lambda _: network.rows_at_once(budget)  # noqa: E731
    return Rows(source, rows_at_once, prepare_block, _count_bytes, budget // 4)


def _count_bytes(block: Block) -> int:
    """Return the bytes that the inputs, outputs and targets of a block take in float64."""
    return sum(8 * leaf.numel() for leaf in (*input_tensors(block.x), block.f, block.y))


def check_same_data(
    posterior: Posterior, n: int, gradient: Tensor, purpose: DataPurpose = REFIT
) -> None:
    """Raise ValueError unless some rows are those of the fit: as many, with the same gradient.

    n: the number of these rows. gradient (P,): their ∇ℓ_D(θ̂). A difference e of the gradients is
    measured as √(eᵀH⁻¹e), in posterior standard deviations, and may be SAME_GRADIENT·√P. purpose:
    the words of the error.
    """
    call = purpose.call.format("…")
    if n != posterior.statistics.n:
        raise ValueError(
            f"{purpose.data} have {n:,} rows, but the posterior was fitted on "
            f"{posterior.statistics.n:,}. Give all of them, in any order: {call}. If a loader "
            "drops or samples rows, take that out."
        )
    difference = gradient - posterior.statistics.gradient
    distance = float(difference @ _factorise_with_weak_prior(posterior).solve(difference)) ** 0.5
    if not distance <= SAME_GRADIENT * len(difference) ** 0.5:  # also where it is NaN
        raise ValueError(
            f"{purpose.data} are not those of the fit: the log likelihood's gradient at θ̂ differs "
            f"by {distance:.3g} posterior standard deviations. Likely causes: (a) other data, or "
            "other row weights; (b) a loader that augments at random. Give the data of the fit: "
            f"{call}."
        )


def _factorise_with_weak_prior(posterior: Posterior) -> Operator:
    """Return H⁻¹ in which no prior precision exceeds twice the mean curvature of the data.

    A strong prior would make every difference of data look small. The posterior's own H⁻¹ is
    returned if its prior is weak enough, or has a full precision matrix.
    """
    curvature = posterior.statistics.curvature
    precision = posterior.objective_prior.precision(posterior.theta)
    # The mean curvature vᵀSv/‖v‖², along a direction v that no symmetry of θ singles out. The
    # squares of P cosines sum to about P/2.
    v = torch.arange(len(posterior.theta), dtype=torch.float64).cos()
    largest_allowed = 2 * float(v @ curvature.push(v)) / len(v)
    if precision.dim() == 2 or not 0 < largest_allowed < float(precision.max()):
        return posterior.operator
    return curvature.with_prior(precision.clamp(max=largest_allowed))


def map_rows(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Apply a function to each row of values (m, …), and stack the results (m, …).

    All rows are mapped at once if the function can be vectorised. A user's own code with control
    flow cannot be: it is called row by row, and its errors are raised there.
    """
    try:
        result: Tensor = torch.func.vmap(function)(values)
    except (RuntimeError, ValueError, TypeError):
        result = torch.stack([function(row) for row in values])
    return result


@dataclass(frozen=True, eq=False)
class PriorChange:
    """The change of a log prior, its gradient and its curvature with steps δ (m, P) from θ̂.

    Each step is in the coordinates of θ. For a Gaussian prior no two large values are subtracted.
    """

    bound: BoundPrior  # π
    theta: Tensor  # θ̂ (P,)

    @property
    def is_gaussian(self) -> bool:
        """Return whether the prior is Gaussian, so that its curvature does not change."""
        return isinstance(self.bound, BoundGaussian)

    def compute_value_change(self, step: Tensor) -> Tensor:
        """Compute log π(θ̂ + δ) − log π(θ̂) (m,) for steps δ (m, P)."""
        if self.is_gaussian:
            # ∇log πᵀδ − ½ δᵀTδ, and −Tδ is the change of the gradient.
            return (
                step * (self.bound.gradient(self.theta) + 0.5 * self.compute_gradient_change(step))
            ).sum(-1)
        return map_rows(self.bound.log_prob, self.theta + step) - self.bound.log_prob(self.theta)

    def compute_gradient_change(self, step: Tensor) -> Tensor:
        """Compute ∇log π(θ̂ + δ) − ∇log π(θ̂) (m, P) for steps δ (m, P)."""
        if self.is_gaussian:
            return -self.bound.precision(self.theta) * step
        return map_rows(self.bound.gradient, self.theta + step) - self.bound.gradient(self.theta)

    def compute_precision_change(self, step: Tensor) -> Tensor | None:
        """Compute the change of −∇² log π (m, P, P) for steps δ (m, P); None if π is Gaussian."""
        if self.is_gaussian:
            return None
        after = map_rows(self.bound.precision, self.theta + step)
        change = after - self.bound.precision(self.theta)
        # A diagonal (m, P) becomes matrices.
        return torch.diag_embed(change) if change.dim() == 2 else change


def as_batch(row: Inputs) -> Inputs:
    """Return one row of an input, without a dimension for rows, as a batch of one row."""
    return map_inputs(lambda part: part.unsqueeze(0), row)


def as_matrix(precision: Tensor) -> Tensor:
    """Return a precision as a matrix (P, P), from (P,) or (P, P)."""
    return torch.diag(precision) if precision.dim() == 1 else precision


def solve_rows(operator: Operator, factor: Tensor | None, values: Tensor) -> Tensor:
    """Return H⁻¹v for each row v of values (m, P): (m, P).

    factor: the Cholesky factor of H (P, P); None: H⁻¹ is `operator`, that of the fitted structure.
    """
    if factor is not None:
        return torch.cholesky_solve(values.mT, factor).mT
    return operator.solve_many(values.mT).mT
