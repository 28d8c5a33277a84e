"""Some training rows, on which a predictive is compared with its network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla.curvature.jacobians import Jacobian
from ssla.data import Batch, Source, check_batch, take_rows
from ssla.fitting.validation_rows import Candidate, compute_log_densities

if TYPE_CHECKING:
    from ssla.posterior import Posterior

# Guesses: a sample large enough for a standard error, and cheap beside a fit.
MOST_ROWS, MOST_BATCHES = 256, 8
KEPT_SHARE = 8  # parts of the memory budget that kept Jacobians take at most


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """A sample of n training rows, with the outputs of the network at the mean of a posterior.

    Jacobians are kept where they fit in memory.
    """

    posterior: Posterior
    batches: tuple[Batch, ...]
    kept: tuple[tuple[Tensor, Jacobian], ...] | None  # f in float64 and J of some rows each

    @staticmethod
    def sample_from(posterior: Posterior) -> TrainingRows | None:
        """Read a sample of the rows that a posterior was fitted on.

        The rows are linearised at once if their Jacobians fit in memory. The result is None where
        the data cannot be read again, and where no row of the sample has a weight.
        """
        source = posterior.source
        if source is None or not source.repeatable:
            return None
        batches = tuple(_sample_batches(source))
        rows = TrainingRows(posterior, batches, None)
        size = sum(batch.y.shape[0] for batch in batches) * posterior.network.jacobian_per_row
        if size <= posterior.memory_budget // KEPT_SHARE:
            rows = replace(rows, kept=tuple(rows._linearise()))
        return rows if batches and float(rows.weights.sum()) > 0 else None

    @cached_property
    def y(self) -> Tensor:
        """Return the targets of the rows, (n,) or (n, D), after a check against the support."""
        outputs = self.posterior.network.outputs
        support = self.posterior.likelihood.support_for(outputs)
        return torch.cat([check_batch(batch, support, outputs)[1] for batch in self.batches])

    @cached_property
    def weights(self) -> Tensor:
        """Return the weights of the rows (n,)."""
        return torch.cat(
            [
                torch.ones(len(batch.y), dtype=torch.float64)
                if batch.weights is None
                else batch.weights.double()
                for batch in self.batches
            ]
        )

    @cached_property
    def plug_in(self) -> Tensor:
        """Return log p(y|f) (n,) of the network itself, at the mean of the posterior."""
        if self.kept is not None:
            outputs = [f for f, _ in self.kept]
        else:
            network, mean = self.posterior.network, self.posterior.mean
            outputs = [network.evaluate(network.cast(batch.x), mean) for batch in self.batches]
        return self.posterior.likelihood.predictive.log_prob(self.y, torch.cat(outputs).double())

    def compute_scores(self, posterior: Posterior) -> Tensor:
        """Compute log p(y|x) (n,) of the rows under the predictive of a posterior.

        The posterior must have the mean of θ at which the rows are linearised. Its covariance and
        its likelihood may be different from those of `self.posterior`.
        """
        candidate = Candidate(posterior.likelihood, posterior.covariance, step=None)
        scores = []
        start = 0
        for f, J in self.kept if self.kept is not None else self._linearise():
            scores.append(compute_log_densities(candidate, self.y[start : start + len(f)], f, J))
            start += len(f)
        return torch.cat(scores)

    def _linearise(self) -> Iterator[tuple[Tensor, Jacobian]]:
        """Yield f (b, C) in float64 and J of the rows, a chunk of b rows at a time."""
        for batch in self.batches:
            for f, J in self.posterior.linearised(batch.x, progress=False):
                yield f.double(), J


def _sample_batches(source: Source) -> list[Batch]:
    """Return a few hundred rows of the first batches of a source, evenly spread over each batch.

    Batches are read until there are MOST_ROWS rows, or MOST_BATCHES batches with rows.
    """
    sample: list[Batch] = []
    rows = 0
    for batch in source:
        size = batch.y.shape[0]
        if not size:
            continue
        spread_rows = slice(None, None, max(size // MOST_ROWS, 1))
        weights = None if batch.weights is None else batch.weights[spread_rows]
        sample.append(Batch(take_rows(batch.x, spread_rows), batch.y[spread_rows], weights))
        rows += sample[-1].y.shape[0]
        if rows >= MOST_ROWS or len(sample) == MOST_BATCHES:
            break
    return sample
