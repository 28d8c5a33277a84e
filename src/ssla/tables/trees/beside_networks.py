"""Decision trees beside the networks, for classes and for mean and log variance.

A forest is grown for each member, on the rows that its network was trained on. At the rows that
both held out, the forest's predictions are the features of a Bayesian last layer
(`ssla.tables.trees.out_of_fold`); for numbers the network's log variance is one too. The same rows
choose the forest's share of the mixture. All trees together predict new rows.

A mixture of two laws has the mean of neither. So for numbers the networks' predictives are also
moved towards the trees' mean t,

    μ → μ + β (t − μ),   β = Σ c d r / ((1 + κ/n) Σ c d²)  in [0, 1],
    d = t − μ,  r = y − μ,  c = weight / σ²

by least squares at the n held-out rows. κ more rows, at which r = 0, shrink β towards 0: with few
held-out rows β would otherwise be decided by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ssla.predictive import Predictive
from ssla.refit import Refit
from ssla.tables.networks.recalibration import LARGEST_LOG_VARIANCE
from ssla.tables.trees.forest import Forest, join_forests
from ssla.tables.trees.out_of_fold import ClassLayer, NumberLayer, fit_class_layer, fit_number_layer

NO_MOVE = 10.0  # κ; a guess
SMALLEST_LOG_VARIANCE = -30.0  # of a standardised target; a guess


@dataclass(frozen=True, eq=False)
class Trees:
    """The trees beside all networks, as one forest with its last layer."""

    forest: Forest
    layer: ClassLayer | NumberLayer  # on the predictions of the forest
    share: float  # of the trees in the mixture with the networks
    pull: float = 0.0  # β: the part of the way that the networks' means are moved; 0 for classes

    def predict(
        self, z: Tensor, modules: Sequence[nn.Module], refit: str | Refit | None
    ) -> tuple[Predictive, Tensor | None]:
        """Return the trees' predictive at standardised inputs z (N, d), and a move of the networks.

        The move β (t − μ) is what the caller adds to the networks' means (N,). It is None for
        classes.

        modules: the networks.  refit: that of the layer's posterior. None is the average over this
        posterior for numbers, and "output" for classes.
        """
        outputs = self.forest(z)
        if isinstance(self.layer, ClassLayer):
            return self.layer.predict(outputs, refit or "output"), None

        # The trees' mean t, the networks' mean m and log variance v.
        t = outputs[:, 0]
        m, v = average_network_outputs(modules, z)
        if refit is None:
            predictive = self.layer.average_predictive(t, v)
        else:
            predictive = self.layer.predict(t, v, refit)

        return predictive, self.pull * (t - m)


def average_network_outputs(modules: Sequence[nn.Module], z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the networks' mean and log variance (N,) at z (N, d), averaged over the networks.

    Each module returns both as its outputs (N, 2). The log variance is clamped, because it can have
    any size far from the data.
    """
    with torch.no_grad():
        mean, log_variance = torch.stack([module(z) for module in modules]).mean(0).unbind(1)
    return mean, log_variance.clamp(SMALLEST_LOG_VARIANCE, LARGEST_LOG_VARIANCE)


def calibrate_trees(
    forests: list[Forest], modules: Sequence[nn.Module], z: list[Tensor], y: Tensor, weights: Tensor
) -> tuple[Trees, Tensor, Tensor]:
    """Join all trees, and fit their layer to rows that their own forest was not grown on.

    Three values are returned. The first is the trees, with the share 0, which the caller replaces.
    The second is the log densities (n,) of the targets by the trees. The third is the move of the
    networks' means (n,), or a zero of shape () for classes.

    forests, modules, z: one of each for every member. z[k] (n_k, d) are the rows that forest k and
    network k have not seen.  y (n,), weights (n,): the targets and the row weights of all these
    rows, in the order of members, n = Σ n_k.
    """
    trees = join_forests(forests)
    predictions = torch.cat([forest(rows) for forest, rows in zip(forests, z, strict=True)])

    # Forests give the probabilities of two classes at least, or one number.
    if predictions.shape[1] > 1:
        class_layer = fit_class_layer(predictions, y, weights)
        log_prob = class_layer.predict(predictions).log_prob(y)
        return Trees(trees, class_layer, 0.0), log_prob, torch.zeros(())

    # The trees' mean t, and each network's mean m and log variance v at its own rows.
    t = predictions[:, 0]
    outputs = [
        average_network_outputs([module], rows) for module, rows in zip(modules, z, strict=True)
    ]
    m = torch.cat([mean for mean, _ in outputs])
    v = torch.cat([log_variance for _, log_variance in outputs])
    layer = fit_number_layer(t, v, y, weights)
    pull = estimate_move_share(t - m, y - m, v, weights)
    return (
        Trees(trees, layer, 0.0, pull),
        layer.average_predictive(t, v).log_prob(y),
        pull * (t - m),
    )


def estimate_move_share(d: Tensor, r: Tensor, log_variance: Tensor, weights: Tensor) -> float:
    """Return β in [0, 1], the part of the way from the networks' means μ to the trees' means t.

    The formula is that of the module's docstring. β is 0 if all d are zero.

    d (n,): t − μ.  r (n,): the errors y − μ.  log_variance (n,): log σ² of the networks.  weights
    (n,): row weights.
    """
    # c relative to the smallest variance: β is the same, and no weight overflows.
    c = weights * (log_variance.amin() - log_variance).exp()
    squares = (c @ d**2) * (1 + NO_MOVE / weights.sum())
    # `tiny` keeps 0/0 from being NaN.
    return float((c @ (d * r) / squares.clamp_min(torch.finfo(squares.dtype).tiny)).clamp(0.0, 1.0))
