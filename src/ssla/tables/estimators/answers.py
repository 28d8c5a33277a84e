"""The prediction methods of scikit-learn, for estimators that predict distributions.

In all of them X are N rows in any form that the estimator's `predict_dist` takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from ssla._checks import all_in_plain_torch
from ssla.predictive.predictive import parse_probabilities


@all_in_plain_torch
class NumberAnswers:
    """The methods of a regressor with `predict_dist`."""

    predict_dist: Any

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the predictive mean (N,), and with return_std also the standard deviation (N,).

        The standard deviation includes the noise. For D targets both are (N, D). Raises
        NotFittedError before `fit`.
        """
        predictive = self.predict_dist(X)
        mean = predictive.mean.numpy()
        return (mean, predictive.stddev.numpy()) if return_std else mean

    def predict_quantiles(self, X: Any, q: Any = (0.05, 0.25, 0.5, 0.75, 0.95)) -> np.ndarray:
        """Return quantiles (N, k) for probabilities q (k,), or (N,) if q is one number.

        For D targets they are (N, D, k), or (N, D). Raises ValueError for probabilities that are
        not between 0 and 1, and NotFittedError before `fit`.
        """
        check_is_fitted(self, "ensemble_")
        parse_probabilities(q)  # refuses wrong probabilities before the prediction
        quantiles: np.ndarray = self.predict_dist(X).icdf(np.asarray(q, dtype=np.float64)).numpy()
        return quantiles


@all_in_plain_torch
class ClassAnswers:
    """The methods of a classifier with `predict_dist`."""

    predict_dist: Any
    classes_: np.ndarray

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probabilities of the classes (N, C), in the order of classes_.

        Raises NotFittedError before `fit`.
        """
        probs: np.ndarray = self.predict_dist(X).probs.numpy()
        return probs

    def predict(self, X: Any) -> np.ndarray:
        """Return the label of the most probable class (N,).

        Raises NotFittedError before `fit`.
        """
        # This comes before `classes_`, which an estimator that is not fitted does not have.
        probs = self.predict_proba(X)
        labels: np.ndarray = self.classes_[probs.argmax(1)]
        return labels
