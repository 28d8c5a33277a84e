"""The public path of the estimators, which are in `ssla.tables.estimators`."""

from ssla.tables.estimators import (
    PredictiveClassifier,
    PredictiveRegressor,
    SSLAClassifier,
    SSLARegressor,
    TableEncoder,
    crps_scorer,
    load,
    nll_scorer,
    pinball_scorer,
    stacking_weights,
)

__all__ = [
    "PredictiveClassifier",
    "PredictiveRegressor",
    "SSLAClassifier",
    "SSLARegressor",
    "TableEncoder",
    "crps_scorer",
    "load",
    "nll_scorer",
    "pinball_scorer",
    "stacking_weights",
]
