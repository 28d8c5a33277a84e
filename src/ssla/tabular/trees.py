"""Decision trees beside the networks, for classes.

A forest is grown for each member, on the rows that its network was trained on. At the rows that both held out, the forest's
probabilities are the features of a Bayesian last layer (`ssla.tabular.out_of_fold`). The same rows choose the forest's share of
the mixture. All trees together predict new rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ssla.predictive import Predictive
from ssla.refit import Refit
from ssla.tabular.forest import Forest, joined
from ssla.tabular.out_of_fold import ClassLayer, fit_classes


@dataclass(frozen=True, eq=False)
class Trees:
    """A forest, its last layer, and its share of the mixture."""

    forest: Forest
    layer: ClassLayer
    share: float

    def predict(self, z: Tensor, refit: str | Refit) -> Predictive:
        """The predictive of the class at z (N, d)."""
        return self.layer.predict(self.forest(z), refit)


def calibrated_trees(forests: list[Forest], z: list[Tensor], y: Tensor, weights: Tensor) -> tuple[Trees, Tensor]:
    """All trees, with the layer of the rows z that each forest has not seen, classes y (n,) and weights (n,) of all these rows;
    and the log probabilities of these classes (n,). The share is still to be chosen."""
    probs = torch.cat([forest(rows) for forest, rows in zip(forests, z, strict=True)])
    layer = fit_classes(probs, y, weights)
    return Trees(joined(forests), layer, 0.0), layer.predict(probs).log_prob(y)
