"""From a table of numbers to a fitted predictive: standardise, train, find the noise on rows left out, fit, tune, mix.

Members are trained at once, each with other rows left out; each then becomes a Posterior over its last layer (or more) of all
rows. The estimators and the command stand on this room; it needs torch alone.
"""

from __future__ import annotations

from ssla.tabular.building import fit_ensemble
from ssla.tabular.ensemble import CONTINUOUS, LIKELIHOODS, Ensemble, Settings
from ssla.tabular.gaps import predict_with_gaps
from ssla.tabular.scaling import Scaling, scaling_of

__all__ = ["CONTINUOUS", "LIKELIHOODS", "Ensemble", "Scaling", "Settings", "fit_ensemble", "predict_with_gaps", "scaling_of"]
