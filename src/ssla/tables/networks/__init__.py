"""Fits an ensemble of small networks to a table of numbers, and predicts with it.

The steps of a fit are: standardise, train, estimate the noise on held-out rows, fit the posteriors,
tune their priors, mix. The estimators and the command use this package; it needs only torch.

Words of all modules here:

- *member*: one network of the ensemble with its posteriors. M members are trained together.
- *held-out rows* of a member: those that its training does not use. The others are its *seen* rows.
- *posterior*: a Gaussian over the uncertain weights of a network, usually those of its last layer.
  The network *as trained* is the same without this uncertainty.
- *component*: one posterior in the mixture that predicts. Its *share* is its weight there.
- *unit* and *scale* of the target: a scale such as log y is a map that is applied first. The unit
  is the scaling that then standardises.
- *rival*: a likelihood on another scale of the target. Held-out rows choose between both.
- *spread*: a factor that stretches predictives, with its share (`recalibration`).
- *trust*: for classes, the share of the posteriors beside the networks as trained.
- *levels* and *codes*: a category with L levels can be one column of codes 0, 1, …, L
  (`embeddings`).
- *pieces*: the intervals of a column's range, each of which is an input too (`pieces`).
- f (n, C) are the outputs of a network at n rows, and K (n, C, C) is their covariance under a
  posterior.
- *row weights*: frequencies. A row of weight 2 counts as that row twice.
"""

from __future__ import annotations

from ssla.tables.networks.building import fit_ensemble
from ssla.tables.networks.ensemble import CONTINUOUS, LIKELIHOODS, ON_SCALE, Ensemble, Settings
from ssla.tables.networks.gaps import predict_with_gaps
from ssla.tables.networks.scaling import Scaling, fit_scaling
from ssla.tables.networks.stacking import stacking_weights
from ssla.tables.networks.updating import update_ensemble

__all__ = [
    "CONTINUOUS",
    "LIKELIHOODS",
    "ON_SCALE",
    "Ensemble",
    "Scaling",
    "Settings",
    "fit_ensemble",
    "fit_scaling",
    "predict_with_gaps",
    "stacking_weights",
    "update_ensemble",
]
