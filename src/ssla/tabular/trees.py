"""Decision trees beside the networks, for classes and for mean and log variance.

A forest is grown for each member, on the rows that its network was trained on. At the rows that both held out, the forest's
predictions are the features of a Bayesian last layer (`ssla.tabular.out_of_fold`); for numbers the network's log variance is one
too. The same rows choose the forest's share of the mixture. All trees together predict new rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ssla.predictive import Predictive
from ssla.refit import Refit
from ssla.tabular.forest import Forest, joined
from ssla.tabular.out_of_fold import ClassLayer, NumberLayer, fit_classes, fit_numbers


@dataclass(frozen=True, eq=False)
class Trees:
    """A forest, its last layer, and its share of the mixture."""

    forest: Forest
    layer: ClassLayer | NumberLayer
    share: float

    def predict(self, z: Tensor, modules: Sequence[nn.Module], refit: str | Refit | None) -> Predictive:
        """The predictive at z (N, d), where `modules` are the networks. refit None: the average over the posterior (numbers)."""
        found = self.forest(z)
        if isinstance(self.layer, ClassLayer):
            return self.layer.predict(found, refit or "output")
        m, v = found[:, 0], log_variance(modules, z)
        return self.layer.averaged(m, v) if refit is None else self.layer.predict(m, v, refit)


def log_variance(modules: Sequence[nn.Module], z: Tensor) -> Tensor:
    """The networks' mean log variance (N,)."""
    with torch.no_grad():
        return torch.stack([module(z)[:, 1] for module in modules]).mean(0)


def calibrated_trees(
    forests: list[Forest], modules: Sequence[nn.Module], z: list[Tensor], y: Tensor, weights: Tensor
) -> tuple[Trees, Tensor]:
    """All trees, with the layer of the rows z that each forest has not seen, and the log densities (n,) of their targets.

    y, weights (n,): of all these rows. The share is still to be chosen.
    """
    found = torch.cat([forest(rows) for forest, rows in zip(forests, z, strict=True)])
    if found.shape[1] > 1:
        classes = fit_classes(found, y, weights)
        return Trees(joined(forests), classes, 0.0), classes.predict(found).log_prob(y)
    v = torch.cat([log_variance([module], rows) for module, rows in zip(modules, z, strict=True)])
    layer = fit_numbers(found[:, 0], v, y, weights)
    return Trees(joined(forests), layer, 0.0), layer.averaged(found[:, 0], v).log_prob(y)
