"""Brings targets to the scale of the networks, and chooses between two scales by held-out rows."""

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
from ssla.tables.networks.whole_numbers import are_small_counts, compute_rounded_log_probs

# The nats a row by which another scale of the target must be better; a guess.
WORTH_A_SCALE = 0.01


@dataclass(frozen=True, eq=False)
class ScaledTarget:
    """Targets on the scale of the networks, where they are standardised.

    The unit standardises after the scale, such as log y, is applied.
    """

    y: Tensor  # (n,) or (n, D), standardised on the scale
    likelihood: str  # its name
    scale: Transform | None  # None: that of the target itself
    unit: Scaling | None  # that standardised y; None: counts and classes have none

    @staticmethod
    def from_values(y: Tensor, weights: Tensor, likelihood: str) -> ScaledTarget:
        """Transform targets y (n,) or (n, D) to the scale of a likelihood, and standardise them.

        weights (n,) are row weights. Counts and classes stay as they are. Raises ValueError if y is
        outside the support of the scale.
        """
        scale = choose_scale(y, likelihood)
        y = scale_targets(y, scale, likelihood)
        if likelihood not in CONTINUOUS:
            return ScaledTarget(y, likelihood, scale, None)
        columns = y[:, None] if y.dim() == 1 else y
        unit = fit_scaling(columns, weights)
        return ScaledTarget(unit(columns).reshape(y.shape), likelihood, scale, unit)

    def compute_rounded_log_probs(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
        """Return log P (n,) of what rounds to counts y (n,), for outputs f (n, C).

        y are counts in their own unit. The targets must be continuous.
        """
        assert self.unit is not None
        return compute_rounded_log_probs(likelihood, f, self.unit, self.scale, y)

    @property
    def log_slopes(self) -> Tensor:
        """The logarithm of dy/dz (n,) at each row of one continuous target.

        y is the target in its own unit, and z its standardised value.
        """
        assert self.unit is not None
        on_scale = self.unit.shift + self.unit.scale * self.y
        if self.scale is None:
            return self.unit.scale.log() + torch.zeros_like(self.y)
        return self.unit.scale.log() + self.scale.log_slope(on_scale)


def choose_target(
    targets: Sequence[ScaledTarget],
    modules: Sequence[Sequence[nn.Sequential]],
    losses: Tensor,
    data: TrainingData,
    likelihood: Likelihood,
) -> int:
    """Return the index, 0 or 1, of the target whose networks predict held-out rows better.

    targets: the same values on two scales.  modules: the M networks of each.  losses (epochs, 2 M):
    the NLL of the standardised targets at the held-out rows of each network.  data: has the targets
    in their own unit; every member has held-out rows.  likelihood: that of the standardised target.
    """
    # The densities of small counts have no bound, so their probabilities are compared.
    if are_small_counts(data.y, data.weights):
        return choose_by_gains(compute_count_gains(targets, modules, data, likelihood))
    return choose_by_gains(compute_density_gains(targets, losses, data))


def choose_by_gains(gains: Tensor) -> int:
    """Return 1 if the gains (M,) of the second target over the first are large enough, otherwise 0.

    Their mean must be above WORTH_A_SCALE, and above its standard error over the M members. One
    member has no standard error.
    """
    error = float(gains.std()) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
    return int(float(gains.mean()) > max(WORTH_A_SCALE, error))


def compute_density_gains(
    targets: Sequence[ScaledTarget], losses: Tensor, data: TrainingData
) -> Tensor:
    """Return by how much the second target lowers the NLL of y at each member's held-out rows (M,).

    targets: the same values on two scales.  losses (epochs, 2 M): the NLL of the standardised
    targets there, first that of the M networks of the first target. The epoch with the lowest NLL
    counts.  data: the rows, and which each member holds out.
    """
    row_shares = data.held * data.weights
    row_shares = row_shares / row_shares.sum(1, keepdim=True)
    lowest = losses.amin(0).reshape(len(targets), -1)
    # −log p(y) = −log p(z) + log dy/dz
    first, second = (
        loss + row_shares @ target.log_slopes for loss, target in zip(lowest, targets, strict=True)
    )
    return torch.sub(first, second)


def compute_count_gains(
    targets: Sequence[ScaledTarget],
    modules: Sequence[Sequence[nn.Sequential]],
    data: TrainingData,
    likelihood: Likelihood,
) -> Tensor:
    """Return by how much the second target raises log P of small counts at held-out rows (M,).

    modules: the M networks of each target.  data: has the counts in their own unit.  targets: the
    same counts on two scales.  likelihood: a Gaussian likelihood of the standardised
    target.
    """
    gains = []
    for member, held in enumerate(data.held):
        z, y, weights = data.take_rows(held)
        with torch.no_grad():
            first, second = (
                target.compute_rounded_log_probs(likelihood, networks[member](z), y)
                for target, networks in zip(targets, modules, strict=True)
            )
        gains.append(weights @ (second - first) / weights.sum())

    return torch.stack(gains)
