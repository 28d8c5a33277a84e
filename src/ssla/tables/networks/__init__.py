"""From a table of numbers to a fitted predictive: standardise, train, estimate the noise on
held-out rows, fit, tune, mix.

Members are trained together, each with different held-out rows; each then becomes a Posterior over
its last layer (or more) on all rows. The estimators and the command use this package; it needs only
torch.
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
