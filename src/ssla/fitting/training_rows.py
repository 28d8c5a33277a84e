"""Some training rows, on which a predictive is compared with its network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla.curvature.jacobians import Jacobian
from ssla.data import Batch, Source, checked, slice_inputs
from ssla.fitting.validation_rows import Candidate, log_densities

if TYPE_CHECKING:
    from ssla.posterior import Posterior

MOST_ROWS, MOST_BATCHES = 256, 8
KEPT_SHARE = 8  # parts of the memory budget that kept Jacobians take at most


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """Rows with the outputs of a network at the mean of a posterior; Jacobians are kept where
    they fit.
    """

    posterior: Posterior
    batches: tuple[Batch, ...]
    kept: tuple[tuple[Tensor, Jacobian], ...] | None  # f in float64 and J of some rows each

    @staticmethod
    def of(posterior: Posterior) -> TrainingRows | None:
        """Rows of a posterior that can read its data again; None for others."""
        source = posterior.source
        if source is None or not source.repeatable:
            return None
        batches = tuple(_spread(source))
        rows = TrainingRows(posterior, batches, None)
        size = sum(batch.y.shape[0] for batch in batches) * posterior.network.jacobian_per_row
        if size <= posterior.memory_budget // KEPT_SHARE:
            rows = replace(rows, kept=tuple(rows._linearised()))
        return rows if batches and float(rows.weights.sum()) > 0 else None

    @cached_property
    def y(self) -> Tensor:
        outputs = self.posterior.network.outputs
        support = self.posterior.likelihood.support_for(outputs)
        return torch.cat([checked(batch, support, outputs)[1] for batch in self.batches])

    @cached_property
    def weights(self) -> Tensor:
        """Of the rows (n,)."""
        ones = (torch.ones(len(batch.y), dtype=torch.float64) for batch in self.batches)
        return torch.cat(
            [
                one if batch.weights is None else batch.weights.double()
                for batch, one in zip(self.batches, ones, strict=True)
            ]
        )

    @cached_property
    def plug_in(self) -> Tensor:
        """log p(y|f) (n,) of the network itself."""
        if self.kept is not None:
            f = torch.cat([f for f, _ in self.kept])
        else:
            network = self.posterior.network
            f = torch.cat(
                [
                    network.evaluate(network.cast(batch.x), self.posterior.mean)
                    for batch in self.batches
                ]
            )
        return self.posterior.likelihood.predictive.log_prob(self.y, f.double())

    def scores(self, posterior: Posterior) -> Tensor:
        """log p(y|x) (n,) of a predictive with the same mean and another covariance."""
        own, found, start = Candidate(posterior.likelihood, posterior.covariance, None), [], 0
        for f, J in self.kept if self.kept is not None else self._linearised():
            found.append(log_densities(own, self.y[start : start + len(f)], f, J))
            start += len(f)
        return torch.cat(found)

    def _linearised(self) -> Iterator[tuple[Tensor, Jacobian]]:
        for batch in self.batches:
            for f, J in self.posterior.linearised(batch.x, progress=False):
                yield f.double(), J


def _spread(source: Source) -> list[Batch]:
    """A few hundred rows of the first batches, evenly spread over each."""
    found: list[Batch] = []
    rows = 0
    for batch in source:
        size = batch.y.shape[0]
        if not size:
            continue
        own = slice(None, None, max(size // MOST_ROWS, 1))
        weights = None if batch.weights is None else batch.weights[own]
        some = Batch(slice_inputs(batch.x, own), batch.y[own], weights)
        found.append(some)
        rows += some.y.shape[0]
        if rows >= MOST_ROWS or len(found) == MOST_BATCHES:
            break
    return found
