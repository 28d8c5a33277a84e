"""Held-out scores at any prior precision and noise, from sums and Jacobians that are taken once.

A score is the negative mean loss of the held-out rows, so that larger is better. The kept rows of a
fold are those that are not held out. A space and its points (d,) are those of
`ssla.fitting.tuning_space`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.special import ndtr

from ssla import metrics
from ssla.curvature import Operator, Structure
from ssla.curvature.jacobians import Jacobian
from ssla.curvature.structure import NoFactorError
from ssla.data import Batch, input_tensors, open_source, pick_batch_rows, squeeze_column
from ssla.fitting.further_passes import collect_sums
from ssla.fitting.noise import scale_noise
from ssla.fitting.tuning_space import NLL, Space
from ssla.fitting.variational import with_sums
from ssla.likelihoods import Likelihood
from ssla.predictive import GaussianLaw, Predictive, predictive_of_outputs
from ssla.predictive.cavities import Sites, collect_sites
from ssla.predictive.cavities import score_left_out as left_out_score
from ssla.report import POLISH
from ssla.values import Statistics

if TYPE_CHECKING:
    from ssla.posterior import Posterior

INDEFINITE = (
    "the curvature of the rows outside a fold was not positive definite: its positive part was "
    "taken"
)


class HeldOutRows(NamedTuple):
    """Held-out rows with f̂ and J at them, and the sums of the rows that are not held out."""

    chunks: list[tuple[Tensor, Jacobian]]  # f̂ (b, C) and J of b rows each
    y: Tensor  # (n,) or (n, D), of all chunks
    weights: Tensor  # (n,) float64: a row of weight 2 counts as two equal rows
    statistics: Statistics
    moves: bool  # whether θ̂ follows the sums by a Newton step

    @staticmethod
    def from_batch(
        posterior: Posterior, batch: Batch, statistics: Statistics, moves: bool
    ) -> HeldOutRows:
        """Linearise the held-out rows of a batch at a posterior.

        statistics: the sums of the rows that are not held out. moves: whether θ̂ follows them.
        """
        y = squeeze_column(batch.y).to("cpu")
        targets = y.double() if y.is_floating_point() else y
        weights = torch.ones(len(y)) if batch.weights is None else batch.weights.to("cpu")
        chunks = list(posterior.linearised(batch.x))
        return HeldOutRows(chunks, targets, weights.double(), statistics, moves)

    def iterate_outputs(
        self, operator: Operator, step: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield f (b, C), K (b, C, C), y and weights (b,) of the rows, a chunk at a time.

        f and K are mean and covariance of the outputs for θ ~ N(θ̂ + step, operator), with a step
        (P,). All values are float64 for every network: the search takes
        differences of scores over steps of 1e-4, so rounding errors of float32 would be errors of
        1e-3 in its slopes, and it would not end.
        """
        start = 0
        for f, J in self.chunks:
            J = J.double()
            rows = slice(start, start + len(f))
            K = operator.covariance(J)
            yield f.double() + J.push(step), K, self.y[rows], self.weights[rows]
            start += len(f)


@dataclass(frozen=True, eq=False)
class HeldOutScore:
    """The negative weighted mean loss of predictions for held-out rows, at any prior and noise."""

    posterior: Posterior
    folds: tuple[HeldOutRows, ...]  # a validation set is one fold
    loss: Callable[[Predictive, Tensor], Tensor]  # of each row (n,)
    notes: list[str]  # for the history; the calls append to it

    @staticmethod
    def from_data(
        posterior: Posterior, data: Any, objective: str, folds: int | None
    ) -> HeldOutScore:
        """Return the score of a validation set, or of the training data in folds.

        posterior: whose predictions are scored. objective: NLL or CRPS. folds: their number; None:
        `data` are a validation set. Raises ValueError for a number of folds or of rows that does
        not suit the data.
        """
        batch = _join_batches(data)
        if batch.weights is not None and not bool(batch.weights.any()):
            raise ValueError("All row weights of the data are zero, so no row can be scored.")
        loss = compute_negative_log_densities if objective == NLL else compute_crps_of_rows
        if folds is None:
            all_rows = HeldOutRows.from_batch(
                posterior, batch, posterior.sums, posterior.follows_prior
            )
            return HeldOutScore(posterior, (all_rows,), loss, [])

        _check_folds(posterior, len(batch.y), folds)

        # Each fold is refitted by one Newton step: that is exact for a quadratic, and right to
        # first order for other likelihoods of a last layer.
        moves = posterior.network.linear and posterior.mode == POLISH
        notes = [] if moves else ["θ̂ was kept in every fold: the held-out rows have a share in it"]
        pieces = [
            pick_batch_rows(batch, torch.arange(k, len(batch.y), folds)) for k in range(folds)
        ]

        # As data, a batch is (x, y) or (x, y, weights).
        sums = [
            collect_sums(posterior, tuple(column for column in piece if column is not None))
            for piece in pieces
        ]
        rows_of_folds = []
        for k, piece in enumerate(pieces):
            remaining = reduce(Statistics.merge, sums[:k] + sums[k + 1 :])
            rows_of_folds.append(HeldOutRows.from_batch(posterior, piece, remaining, moves))
        return HeldOutScore(posterior, tuple(rows_of_folds), loss, notes)

    @cached_property
    def weight(self) -> float:
        """Return the sum of the weights of the held-out rows."""
        return sum(float(fold.weights.sum()) for fold in self.folds)

    @property
    def in_target_units(self) -> bool:
        """Return whether the score is in the unit of the targets, as the CRPS is.

        Another unit only adds a constant to a log density.
        """
        return self.loss is compute_crps_of_rows

    def __call__(self, space: Space, point: Tensor) -> float:
        """Compute the negative mean loss at a point (d,) of the space: larger is better.

        Raises ValueError where the curvature cannot be factorised.
        """
        factor = space.compute_noise_factor(point)
        precision = space.compute_precision(point)
        total = 0.0
        for fold in self.folds:
            of_kept_rows = scale_noise(with_sums(self.posterior, fold.statistics), factor)
            operator = self._factorise(of_kept_rows.sums.curvature, precision)
            step = torch.zeros_like(of_kept_rows.theta)
            if fold.moves:  # one Newton step to the mode of the kept rows
                step = operator.solve(
                    of_kept_rows.sums.gradient - precision * (of_kept_rows.mean - space.bound.mean)
                )
            for f, K, y, weights in fold.iterate_outputs(operator, step):
                losses = self._compute_losses_of_rows(of_kept_rows.likelihood, f, K, y).double()
                total += float((weights * losses).sum())
        return -total / self.weight

    def _factorise(self, curvature: Structure, precision: Tensor) -> Operator:
        """Factorise H⁻¹ of the kept rows, from their curvature and a prior precision (P,).

        Averages of an indefinite Λ over some of the rows may be indefinite where those over all
        rows are not. The positive part is then taken, with a note. Raises ValueError where that
        cannot be factorised either.
        """
        try:
            return curvature.with_prior(precision)
        except NoFactorError:
            if INDEFINITE not in self.notes:
                self.notes.append(INDEFINITE)
            return curvature.positive_part().with_prior(precision)

    def _compute_losses_of_rows(
        self, likelihood: Likelihood, f: Tensor, K: Tensor, y: Tensor
    ) -> Tensor:
        """Compute the losses (b,) of rows with targets y, whose outputs are N(f, K).

        f (b, C) and K (b, C, C) are their mean and covariance.
        """
        # Where refits in the outputs would need many steps, the average density scores the rows.
        if self.loss is compute_negative_log_densities and likelihood.scored_by_average:
            return -likelihood.log_average(y, f, K)
        # Far from the optimum predictives may be inaccurate and warn. They are not kept, and the
        # predictions of the tuned posterior warn themselves.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return self.loss(predictive_of_outputs(likelihood, f, K), y)


def _check_folds(posterior: Posterior, count: int, folds: int) -> None:
    """Raise ValueError unless the data can be split into this number of folds.

    `folds` must be a whole number from 2 to `count`, the number of rows in the data, which must be
    the number of rows that the posterior was fitted on.
    """
    if isinstance(folds, bool) or not isinstance(folds, int) or not 2 <= folds <= count:
        raise ValueError(
            f"folds must be a whole number from 2 to the number of rows ({count}), but is "
            f"{folds!r}."
        )
    if not math.isclose(posterior.statistics.n, count):
        raise ValueError(
            f"With folds= the data must be those of the fit: {posterior.statistics.n} rows "
            f"were fitted, but {count} came. For a validation set leave folds out."
        )


@dataclass(frozen=True, eq=False)
class LeaveOneOutScore:
    """The mean leave-one-out log density of the training rows, at any prior precision.

    The sites (the Gaussian factor of each row) are kept as they are under the present posterior.
    """

    posterior: Posterior
    sites: Sites
    notes: list[str]

    @staticmethod
    def from_posterior(posterior: Posterior) -> LeaveOneOutScore:
        """Return the score of a posterior's training rows, which are read once.

        Raises ValueError where the posterior cannot read them.
        """
        note = (
            "leave-one-out is optimistic where the network's features were trained on the same rows"
        )
        return LeaveOneOutScore(posterior, collect_sites(posterior), [note])

    @property
    def weight(self) -> float:
        """Return the sum of the weights of the training rows."""
        return self.posterior.sums.weight

    in_target_units = False  # see HeldOutScore: another unit only adds a constant

    def __call__(self, space: Space, point: Tensor) -> float:
        """Compute the mean log density at a point (d,) of the space, whose noise stays.

        Raises ValueError where the curvature cannot be factorised.
        """
        precision = space.compute_precision(point)
        sums = self.posterior.sums
        operator = sums.curvature.with_prior(precision)
        step = torch.zeros_like(self.posterior.mean)
        if space.mean_moves:
            step = operator.solve(
                sums.gradient - precision * (self.posterior.mean - space.bound.mean)
            )
        return left_out_score(self.sites, self.posterior.mean + step, operator).mean_log_prob


def compute_negative_log_densities(predictive: Predictive, y: Tensor) -> Tensor:
    """Compute −log p(y) (n,) of the targets y of each row."""
    return metrics.nll(predictive, y, reduce=False)


def compute_crps_of_rows(predictive: Predictive, y: Tensor) -> Tensor:
    """Compute the CRPS (n,) of each row, in the unit of the targets y (n,).

    For a Gaussian it is σ [z (2Φ(z) − 1) + 2φ(z) − 1/√π] with z = (y − μ)/σ.
    """
    if not isinstance(predictive.law, GaussianLaw):
        return metrics.crps(predictive, y, reduce=False)
    scale = predictive.stddev.double()
    z = (y.reshape(scale.shape) - predictive.mean.double()) / scale
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    score: Tensor = scale * (z * (2 * ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))
    return score


def _join_batches(data: Any) -> Batch:
    """Read all batches of the data, and return them as one.

    data: in any form that `ssla.fit` takes. Either every batch must have row weights, or none.
    Raises ValueError where there is no batch.
    """
    batches = list(open_source(data))
    if not batches:
        raise ValueError("The data are empty: no batch with a row came.")
    if len(batches) == 1:
        return batches[0]

    # Inputs are a tensor, a dict of tensors, or a tuple of tensors.
    x = batches[0].x
    if isinstance(x, Tensor):
        x = torch.cat([batch.x for batch in batches])
    elif isinstance(x, dict):
        x = {key: torch.cat([batch.x[key] for batch in batches]) for key in x}
    else:
        x = tuple(
            torch.cat([input_tensors(batch.x)[i] for batch in batches]) for i in range(len(x))
        )
    weights = [batch.weights for batch in batches if batch.weights is not None]
    y = torch.cat([batch.y for batch in batches])
    return Batch(x, y, torch.cat(weights) if weights else None)
