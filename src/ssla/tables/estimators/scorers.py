"""Scorers of predictive distributions for `cross_val_score` and searches.

In scikit-learn a greater score is better, so the scores are negated.

    cross_val_score(SSLARegressor(), X, y, scoring=ssla.sklearn.crps_scorer)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from sklearn.pipeline import Pipeline
from torch import Tensor

from ssla import metrics
from ssla._checks import check_level as checked_level
from ssla.predictive import Predictive
from ssla.tables.estimators.row_weights import read_row_weights
from ssla.tables.estimators.targets import refuse_masked_or_dates, refuse_masked_target


@final
@dataclass(frozen=True)
class Scorer:
    """Computes the negated weighted mean of a score over rows.

    The estimator has `predict_dist`, or is a pipeline or a search that ends with such an estimator.
    """

    name: str
    score: Callable[[Predictive, Any], Tensor]  # one value for each row

    def __call__(self, estimator: Any, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the negated mean score of rows X (n, d) with targets y (n,) or (n, D).

        sample_weight (n,): row weights; None: equal weights. Raises TypeError for an estimator
        without `predict_dist` and for dates as targets, and ValueError for wrong weights or unknown
        labels.
        """
        model, inputs = _find_last_step(estimator, X)
        values = self.score(model.predict_dist(inputs), _encode_targets(model, y)).double().numpy()
        values = values.reshape(len(values), -1).mean(1)  # over several targets
        return -float(np.average(values, weights=read_row_weights(sample_weight, len(values))))

    def __repr__(self) -> str:
        """Return the name of the scorer."""
        return self.name


nll_scorer = Scorer("neg_nll", lambda predictive, y: metrics.nll(predictive, y, reduce=False))
crps_scorer = Scorer("neg_crps", lambda predictive, y: metrics.crps(predictive, y, reduce=False))


def pinball_scorer(q: float) -> Scorer:
    """Return the scorer of the quantile at probability q, by the pinball loss.

    Raises ValueError for a q that is not between 0 and 1.

    >>> GridSearchCV(SSLARegressor(), grid, scoring=pinball_scorer(0.9))      # doctest: +SKIP
    """
    level = checked_level(q)
    return Scorer(
        f"neg_pinball_{level:g}",
        lambda predictive, y: metrics.pinball(predictive, y, level, reduce=False),
    )


def _find_last_step(estimator: Any, X: Any) -> tuple[Any, Any]:
    """Return the last step of a search or a pipeline, and its inputs for the rows X.

    Another estimator is returned itself. Raises TypeError if the last step has no `predict_dist`.
    """
    if hasattr(estimator, "best_estimator_"):
        return _find_last_step(estimator.best_estimator_, X)
    if isinstance(estimator, Pipeline):
        inputs = estimator[:-1].transform(X) if len(estimator) > 1 else X
        return _find_last_step(estimator[-1], inputs)
    if not hasattr(estimator, "predict_dist"):
        raise TypeError(
            f"This scorer needs a predictive distribution, but a {type(estimator).__name__} has no "
            "predict_dist. Use SSLARegressor or SSLAClassifier, alone or as the last step of a "
            "pipeline."
        )

    return estimator, X


def _encode_targets(model: Any, y: Any) -> Any:
    """Return labels (n,) as the numbers of their classes, and other targets as floats.

    Raises ValueError for masked values and for labels that the model has not seen, and TypeError
    for dates.
    """
    classes = getattr(model, "classes_", None)
    if classes is None:
        refuse_masked_or_dates(y)
        return np.asarray(y).astype(np.float64)

    refuse_masked_target(y)
    values = np.asarray(y)
    unknown = ~np.isin(values, classes)
    if unknown.any():
        raise ValueError(
            f"y has {int(unknown.sum())} labels that were not in the training rows, the first is "
            f"{str(values[unknown][0])!r}: their score is infinite. Use a stratified split, or "
            "leave out rare classes."
        )

    return np.searchsorted(classes, values)
