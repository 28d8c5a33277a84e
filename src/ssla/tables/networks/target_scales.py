"""Targets on the scale of the networks, and the choice between two scales by held-out rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ssla.likelihoods import Likelihood
from ssla.predictive.transformed import Transform
from ssla.tables.networks.ensemble import CONTINUOUS, choose_scale, scale_targets
from ssla.tables.networks.scaling import Scaling, fit_scaling
from ssla.tables.networks.training_data import TrainingData
from ssla.tables.networks.whole_numbers import are_small_counts, log_probs

# By how many nats a row another scale of the target must be better (a guess), and by more than
# the standard error of the difference.
WORTH_A_SCALE = 0.01


@dataclass(frozen=True, eq=False)
class ScaledTarget:
    """Targets y (n,) or (n, D) on the scale of the networks, divided by their unit there."""

    y: Tensor
    likelihood: str
    scale: Transform | None  # None: that of the target itself
    unit: Scaling | None  # None: counts and classes have none

    @staticmethod
    def from_values(y: Tensor, weights: Tensor, likelihood: str) -> ScaledTarget:
        """Scale targets y (n,) or (n, D) with row weights (n,) for a likelihood.

        Raises ValueError if y is outside the support of the scale.
        """
        scale = choose_scale(y, likelihood)
        y = scale_targets(y, scale, likelihood)
        if likelihood not in CONTINUOUS:
            return ScaledTarget(y, likelihood, scale, None)
        columns = y[:, None] if y.dim() == 1 else y
        unit = fit_scaling(columns, weights)
        return ScaledTarget(unit(columns).reshape(y.shape), likelihood, scale, unit)

    def log_probs(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
        """Return log P (n,) of what rounds to counts y (n,), for outputs f (n, C)."""
        assert self.unit is not None
        return log_probs(likelihood, f, self.unit, self.scale, y)

    @property
    def log_slopes(self) -> Tensor:
        """The log slope dy/dz (n,) at each row, with z the standardised value of one target."""
        assert self.unit is not None
        z = self.unit.shift + self.unit.scale * self.y
        return self.unit.scale.log() + (
            torch.zeros_like(self.y) if self.scale is None else self.scale.log_slope(z)
        )


def choose_target(
    targets: Sequence[ScaledTarget],
    modules: Sequence[Sequence[nn.Sequential]],
    losses: Tensor,
    data: TrainingData,
    likelihood: Likelihood,
) -> int:
    """Return 0 or 1: which of two targets the networks predict best at held-out rows.

    modules: the M networks of each target.  losses (epochs, 2 M): NLL at the held-out rows.
    """
    if are_small_counts(data.y, data.weights):
        return choose_by_gains(gains_of_counts(targets, modules, data, likelihood))
    return choose_by_gains(gains_of_densities(targets, losses, data))


def choose_by_gains(gains: Tensor) -> int:
    """Return 1 if the gains (M,) of the second target are large enough, otherwise 0."""
    error = float(gains.std()) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
    return int(float(gains.mean()) > max(WORTH_A_SCALE, error))


def gains_of_densities(
    targets: Sequence[ScaledTarget], losses: Tensor, data: TrainingData
) -> Tensor:
    """Return by how much the second target lowers the NLL of y at each member's held-out rows (M,).

    losses (epochs, 2 M): the NLL of the standardised targets there.
    """
    row_shares = data.held * data.weights
    row_shares = row_shares / row_shares.sum(1, keepdim=True)
    lowest = losses.amin(0).reshape(len(targets), -1)
    # −log p(y) = −log p(z) + log dy/dz
    first, second = (
        loss + row_shares @ target.log_slopes for loss, target in zip(lowest, targets, strict=True)
    )
    return torch.sub(first, second)


def gains_of_counts(
    targets: Sequence[ScaledTarget],
    modules: Sequence[Sequence[nn.Sequential]],
    data: TrainingData,
    likelihood: Likelihood,
) -> Tensor:
    """Return by how much the second target raises log P of small counts at held-out rows (M,)."""
    gains = []
    for member, held in enumerate(data.held):
        z, y, weights = data.batch(held)
        with torch.no_grad():
            first, second = (
                target.log_probs(likelihood, networks[member](z), y)
                for target, networks in zip(targets, modules, strict=True)
            )
        gains.append(weights @ (second - first) / weights.sum())
    return torch.stack(gains)
