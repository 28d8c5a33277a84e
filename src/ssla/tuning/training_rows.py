"""Some training rows, on which a predictive is compared with its network."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ssla.data import Batch, Source, checked, slice_inputs
from ssla.state import State
from ssla.structures.jacobians import Jacobian
from ssla.tuning.validation_rows import Candidate, log_densities

MOST_ROWS, MOST_BATCHES = 256, 8


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """Rows with the outputs and Jacobians of a network at the mean of a posterior."""

    y: Tensor
    parts: tuple[tuple[Tensor, Jacobian], ...]  # f in float64 and J of some rows each
    plug_in: Tensor  # log p(y|f) (n,)

    @staticmethod
    def of(posterior: State) -> TrainingRows | None:
        """Rows of a posterior that can read its data again; None for others."""
        source = posterior.source
        if source is None or not source.repeatable:
            return None
        outputs = posterior.network.outputs
        support = posterior.likelihood.support_for(outputs)
        targets: list[Tensor] = []
        parts: list[tuple[Tensor, Jacobian]] = []
        for batch in _spread(source):
            targets.append(checked(batch, support, outputs)[1])
            parts.extend((f.double(), J) for f, J in posterior.linearised(batch.x, progress=False))
        if not targets:
            return None
        y, f = torch.cat(targets), torch.cat([f for f, _ in parts])
        return TrainingRows(y, tuple(parts), posterior.likelihood.predictive.log_prob(y, f))

    def scores(self, posterior: State) -> Tensor:
        """log p(y|x) (n,) of a predictive with the same mean and another covariance."""
        own, found, start = Candidate(posterior.likelihood, posterior.covariance, None), [], 0
        for f, J in self.parts:
            found.append(log_densities(own, self.y[start : start + len(f)], f, J))
            start += len(f)
        return torch.cat(found)


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
