"""From a table of numbers to a fitted predictive: standardise, train, estimate the noise on held-out rows, fit, tune, mix.

Members are trained together, each with different held-out rows; each then becomes a Posterior over its last layer (or more) on
all rows. The estimators and the command use this package; it needs only torch.
"""

from __future__ import annotations

from ssla.tabular.building import fit_ensemble
from ssla.tabular.ensemble import CONTINUOUS, LIKELIHOODS, ON_SCALE, Ensemble, Settings
from ssla.tabular.gaps import predict_with_gaps
from ssla.tabular.scaling import Scaling, scaling_of
from ssla.tabular.stacking import stacking_weights
from ssla.tabular.updating import updated

__all__ = [
    "CONTINUOUS",
    "LIKELIHOODS",
    "ON_SCALE",
    "Ensemble",
    "Scaling",
    "Settings",
    "fit_ensemble",
    "predict_with_gaps",
    "scaling_of",
    "stacking_weights",
    "updated",
]
