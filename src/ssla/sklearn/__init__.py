"""scikit-learn estimators whose predictions are distributions (`pip install 'ssla[sklearn]'`).

    from ssla.sklearn import SSLARegressor

    model = SSLARegressor(members=5).fit(X, y)
    model.predict_interval(X_new, level=0.95)

`SSLARegressor` and `SSLAClassifier` train their own small networks; `PredictiveRegressor` and `PredictiveClassifier` give
distributions to trees, forests and boosters of any library. For a network of your own use `ssla.fit`.
"""

from __future__ import annotations

try:
    import sklearn  # noqa: F401
except ImportError:
    raise ImportError("The estimators need scikit-learn: pip install 'ssla[sklearn]'.") from None

from ssla.sklearn.classifier import SSLAClassifier
from ssla.sklearn.encoder import TableEncoder
from ssla.sklearn.files import load
from ssla.sklearn.regressor import SSLARegressor
from ssla.sklearn.scorers import crps_scorer, nll_scorer, pinball_scorer
from ssla.sklearn.wrapped import PredictiveClassifier, PredictiveRegressor
from ssla.tabular import stacking_weights

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
