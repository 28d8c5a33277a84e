"""Held-out scores at any precision and noise, from sums and Jacobians that are taken once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.special import ndtr

from ssla import metrics
from ssla.curvature import Operator, Structure
from ssla.curvature.jacobians import Jacobian
from ssla.curvature.structure import NoFactorError
from ssla.data import Batch, column, leaves, open_source, pick_rows
from ssla.fitting.again import collect
from ssla.fitting.noise import at_noise
from ssla.fitting.tuning_space import NLL, Space
from ssla.fitting.variational import with_sums
from ssla.likelihoods import Likelihood
from ssla.predictive import GaussianLaw, Predictive, predictive_of_outputs
from ssla.predictive.cavities import Sites
from ssla.predictive.cavities import collect as collect_sites
from ssla.predictive.cavities import score as left_out_score
from ssla.report import POLISH
from ssla.values import Statistics

if TYPE_CHECKING:
    from ssla.posterior import Posterior

INDEFINITE = (
    "the curvature of the rows outside a fold was not positive definite: its positive part was "
    "taken"
)


class Part(NamedTuple):
    """Held-out rows with f̂ and J at them, and the sums of the rows that are not held out."""

    chunks: list[tuple[Tensor, Jacobian]]
    y: Tensor
    statistics: Statistics
    moves: bool  # whether θ̂ follows the sums by a Newton step

    def outputs(self, operator: Operator, step: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """f (b, C) and K (b, C, C) at θ̂ + step, with y (b,), a chunk at a time.

        In float64 for every network. The search takes differences of scores over steps of 1e-4:
        rounding errors of float32 would be errors of 1e-3 in its slopes, and it would look for
        better points in them without an end.
        """
        start = 0
        for f, J in self.chunks:
            J = J.double()
            yield f.double() + J.push(step), operator.covariance(J), self.y[start : start + len(f)]
            start += len(f)


@dataclass(frozen=True, eq=False)
class HeldOut:
    """−score of predictions for held-out rows, at any precision and noise."""

    posterior: Posterior
    parts: tuple[Part, ...]
    score: Callable[[Predictive, Tensor], Tensor]
    notes: list[str]

    @staticmethod
    def of(posterior: Posterior, data: Any, objective: str, folds: int | None) -> HeldOut:
        whole = _whole(data)
        score = negative_log_density if objective == NLL else crps
        if folds is None:
            moves = posterior.follows_prior
            part = Part(
                list(posterior.linearised(whole.x)), _targets(whole.y), posterior.sums, moves
            )
            return HeldOut(posterior, (part,), score, [])
        count = len(whole.y)
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
        # a refit of each fold by one Newton step: exact for a quadratic, first order for other
        # likelihoods of a last layer
        moves = posterior.network.linear and posterior.mode == POLISH
        notes = [] if moves else ["θ̂ was kept in every fold: the held-out rows have a share in it"]
        pieces = [pick_rows(whole, torch.arange(k, count, folds)) for k in range(folds)]
        sums = [collect(posterior, tuple(p for p in piece if p is not None)) for piece in pieces]
        parts = []
        for k, piece in enumerate(pieces):
            rest = [s for j, s in enumerate(sums) if j != k]
            merged = rest[0]
            for more in rest[1:]:
                merged = merged.merge(more)
            parts.append(
                Part(list(posterior.linearised(piece.x)), _targets(piece.y), merged, moves)
            )
        return HeldOut(posterior, tuple(parts), score, notes)

    @property
    def rows(self) -> int:
        return sum(len(part.y) for part in self.parts)

    @property
    def in_target_units(self) -> bool:
        """Whether the score is in the unit of the targets; a log density is only shifted by it."""
        return self.score is crps

    def __call__(self, space: Space, point: Tensor) -> float:
        factor = math.exp(float(space.full(point)[-1]))
        precision, total, rows = space.precision(point), 0.0, 0
        for part in self.parts:
            post = at_noise(with_sums(self.posterior, part.statistics), factor)
            operator = self._operator(post.sums.curvature, precision)
            step = torch.zeros_like(post.theta)
            if part.moves:
                step = operator.solve(
                    post.sums.gradient - precision * (post.mean - space.bound.mean)
                )
            for f, K, y in part.outputs(operator, step):
                total += float(self._score(post.likelihood, f, K, y).double().sum())
            rows += len(part.y)
        return -total / rows

    def _operator(self, curvature: Structure, precision: Tensor) -> Operator:
        """H⁻¹ of the rows that are not held out.

        Averages of an indefinite Λ over some of the rows may be indefinite where those over all
        rows are not.
        """
        try:
            return curvature.with_prior(precision)
        except NoFactorError:
            if INDEFINITE not in self.notes:
                self.notes.append(INDEFINITE)
            return curvature.positive_part().with_prior(precision)

    def _score(self, likelihood: Likelihood, f: Tensor, K: Tensor, y: Tensor) -> Tensor:
        if self.score is negative_log_density and likelihood.scored_by_average:
            return -likelihood.log_average(y, f, K)
        with (
            warnings.catch_warnings()
        ):  # far from the optimum predictives may be rough; the last one is asked again
            warnings.simplefilter("ignore", UserWarning)
            return self.score(predictive_of_outputs(likelihood, f, K), y)


@dataclass(frozen=True, eq=False)
class LeftOut:
    """The mean leave-one-out log density of the training rows, at any precision, with the sites
    of the rows kept.
    """

    posterior: Posterior
    sites: Sites
    notes: list[str]

    @staticmethod
    def of(posterior: Posterior) -> LeftOut:
        note = (
            "leave-one-out is optimistic where the network's features were trained on the same rows"
        )
        return LeftOut(posterior, collect_sites(posterior), [note])

    @property
    def rows(self) -> int:
        return self.posterior.sums.n

    in_target_units = False

    def __call__(self, space: Space, point: Tensor) -> float:
        precision, sums = space.precision(point), self.posterior.sums
        operator = sums.curvature.with_prior(precision)
        step = torch.zeros_like(self.posterior.mean)
        if space.moves:
            step = operator.solve(
                sums.gradient - precision * (self.posterior.mean - space.bound.mean)
            )
        return left_out_score(self.sites, self.posterior.mean + step, operator).mean_log_prob


def negative_log_density(predictive: Predictive, y: Tensor) -> Tensor:
    return metrics.nll(predictive, y, reduce=False)


def crps(predictive: Predictive, y: Tensor) -> Tensor:
    """Closed form for a Gaussian: σ [z (2Φ(z) − 1) + 2φ(z) − 1/√π]."""
    if not isinstance(predictive.law, GaussianLaw):
        return metrics.crps(predictive, y, reduce=False)
    scale = predictive.stddev.double()
    z = (y.reshape(scale.shape) - predictive.mean.double()) / scale
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    score: Tensor = scale * (z * (2 * ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))
    return score


def _whole(data: Any) -> Batch:
    """All batches as one."""
    batches = list(open_source(data))
    if not batches:
        raise ValueError("The data are empty: no batch with a row came.")
    if len(batches) == 1:
        return batches[0]
    x = batches[0].x
    if isinstance(x, Tensor):
        x = torch.cat([batch.x for batch in batches])
    elif isinstance(x, dict):
        x = {key: torch.cat([batch.x[key] for batch in batches]) for key in x}
    else:
        x = tuple(torch.cat([leaves(batch.x)[i] for batch in batches]) for i in range(len(x)))
    weights = [batch.weights for batch in batches if batch.weights is not None]
    return Batch(
        x, torch.cat([batch.y for batch in batches]), torch.cat(weights) if weights else None
    )


def _targets(y: Tensor) -> Tensor:
    value = column(y)
    return value.to("cpu").double() if value.is_floating_point() else value.to("cpu")
