"""scikit-learn estimators whose predictions are distributions (`pip install 'ssla[sklearn]'`).

    from ssla.tables.estimators import SSLARegressor

    model = SSLARegressor(members=5).fit(X, y)
    model.predict_interval(X_new, level=0.95)

`SSLARegressor` and `SSLAClassifier` train their own small networks; `PredictiveRegressor` and
`PredictiveClassifier` give distributions to trees, forests and boosters of any library. For a
network of your own use `ssla.fit`.
"""

from __future__ import annotations

try:
    import sklearn  # noqa: F401
except ImportError:
    raise ImportError("The estimators need scikit-learn: pip install 'ssla[sklearn]'.") from None

from ssla.tables.estimators.classifier import SSLAClassifier
from ssla.tables.estimators.encoder import TableEncoder
from ssla.tables.estimators.loading import load
from ssla.tables.estimators.regressor import SSLARegressor
from ssla.tables.estimators.scorers import crps_scorer, nll_scorer, pinball_scorer
from ssla.tables.estimators.wrapped import PredictiveClassifier, PredictiveRegressor
from ssla.tables.networks import stacking_weights

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
