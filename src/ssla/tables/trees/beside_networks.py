"""Decision trees beside the networks, for classes and for mean and log variance.

A forest is grown for each member, on the rows that its network was trained on. At the rows that
both held out, the forest's predictions are the features of a Bayesian last layer
(`ssla.tables.trees.out_of_fold`); for numbers the network's log variance is one too. The same rows
choose the forest's share of the mixture. All trees together predict new rows.

A mixture of two laws has the mean of neither. So for numbers the networks' predictives are also
moved towards the trees' mean t,

    μ → μ + β (t − μ),   β = Σ c d r / ((1 + κ/n) Σ c d²)  in [0, 1],
    d = t − μ,  r = y − μ,  c = weight / σ²

by least squares at the n held-out rows. κ rows that want no move keep few rows from deciding much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ssla.predictive import Predictive
from ssla.refit import Refit
from ssla.tables.networks.recalibration import LARGEST_LOG_VARIANCE
from ssla.tables.trees.forest import Forest, joined
from ssla.tables.trees.out_of_fold import ClassLayer, NumberLayer, fit_classes, fit_numbers

NO_MOVE = 10.0  # κ
SMALLEST_LOG_VARIANCE = -30.0


@dataclass(frozen=True, eq=False)
class Trees:
    """A forest, its last layer, its share of the mixture, and β (numbers): how far the
    networks' means go to the trees'.
    """

    forest: Forest
    layer: ClassLayer | NumberLayer
    share: float
    pull: float = 0.0

    def predict(
        self, z: Tensor, modules: Sequence[nn.Module], refit: str | Refit | None
    ) -> tuple[Predictive, Tensor | None]:
        """The trees' predictive at z (N, d), where `modules` are the networks, and the move of the
        networks' means (N,).

        refit None: the average over the posterior (numbers).
        """
        found = self.forest(z)
        if isinstance(self.layer, ClassLayer):
            return self.layer.predict(found, refit or "output"), None
        t, (m, v) = found[:, 0], mean_outputs(modules, z)
        own = self.layer.averaged(t, v) if refit is None else self.layer.predict(t, v, refit)
        return own, self.pull * (t - m)


def mean_outputs(modules: Sequence[nn.Module], z: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over networks of each output (N,): mean and log variance, which far from the
    data would have no bound.
    """
    with torch.no_grad():
        mean, log_variance = torch.stack([module(z) for module in modules]).mean(0).unbind(1)
    return mean, log_variance.clamp(SMALLEST_LOG_VARIANCE, LARGEST_LOG_VARIANCE)


def calibrated_trees(
    forests: list[Forest], modules: Sequence[nn.Module], z: list[Tensor], y: Tensor, weights: Tensor
) -> tuple[Trees, Tensor, Tensor]:
    """All trees, with the layer of the rows z that each forest has not seen, the log densities (n,)
    of their targets, and the move of the networks' means there (n,).

    y, weights (n,): of all these rows. The share is still to be chosen.
    """
    found = torch.cat([forest(rows) for forest, rows in zip(forests, z, strict=True)])
    if found.shape[1] > 1:
        classes = fit_classes(found, y, weights)
        return (
            Trees(joined(forests), classes, 0.0),
            classes.predict(found).log_prob(y),
            torch.zeros(()),
        )
    outputs = [mean_outputs([module], rows) for module, rows in zip(modules, z, strict=True)]
    t, m, v = found[:, 0], *(torch.cat(parts) for parts in zip(*outputs, strict=True))
    layer = fit_numbers(t, v, y, weights)
    pull = pull_of(t - m, y - m, v, weights)
    return (
        Trees(joined(forests), layer, 0.0, pull),
        layer.averaged(t, v).log_prob(y),
        pull * (t - m),
    )


def pull_of(d: Tensor, r: Tensor, log_variance: Tensor, weights: Tensor) -> float:
    """β from the differences d of the trees' and the errors r of the networks' means (n,)."""
    c = weights * (log_variance.amin() - log_variance).exp()
    squares = (c @ d**2) * (1 + NO_MOVE / weights.sum())
    return float((c @ (d * r) / squares.clamp_min(torch.finfo(squares.dtype).tiny)).clamp(0.0, 1.0))
