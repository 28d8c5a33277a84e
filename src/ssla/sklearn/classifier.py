"""Classes."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from ssla.sklearn.estimator import AUTO, TableEstimator, numbers

SMALLEST_LOG = float(np.log(np.finfo(np.float64).tiny))


class SSLAClassifier(ClassifierMixin, TableEstimator):  # type: ignore[misc]
    """A network for tables that predicts class probabilities, including the uncertainty of its weights.

    Parameters are those of `SSLARegressor`, without likelihood and conformal, and

    class_weight:
        A dict {label: weight}, or "balanced": every class has the same total weight, and the weights sum to the number of rows.
        It multiplies the row weights of the fit, so probabilities are those of a population with these frequencies of classes.

    >>> SSLAClassifier(random_state=0).fit(X, y).predict_proba(X_new)      # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        members: int = 1,
        hidden: tuple[int, ...] = (50, 50),
        activation: str = "silu",
        refit: str = "output",
        weights: str = "last_layer",
        structure: str = "dense",
        prior_precision: float = 1.0,
        tune: bool = True,
        max_epochs: int = 200,
        batch_size: int | str | None = AUTO,
        learning_rate: float = 1e-2,
        early_stopping: bool = True,
        validation_fraction: float = 0.1,
        patience: int = 40,
        class_weight: Any = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.members = members
        self.hidden = hidden
        self.activation = activation
        self.refit = refit
        self.weights = weights
        self.structure = structure
        self.prior_precision = prior_precision
        self.tune = tune
        self.max_epochs = max_epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.class_weight = class_weight
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> SSLAClassifier:
        """Train and fit. X (n, d), y (n,) labels of any kind, sample_weight (n,)."""
        given, y = self._read(X, y)
        check_classification_targets(y)
        y = column_or_1d(y, warn=True)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("Classification needs at least two classes, but y has one class only.")
        balance = compute_sample_weight(self.class_weight, y)
        present, weights = self._present(y, balance if sample_weight is None else balance * np.asarray(sample_weight))
        rows = numbers(self._encode(given, present))
        self.ensemble_ = self._fit_rows(rows[present], codes[present], weights[present], "classes", len(self.classes_))
        self.n_iter_ = self.ensemble_.epochs
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """P(class) (N, C), columns as in classes_."""
        p: Any = self.predict_dist(X)
        probs: np.ndarray = p.probs.numpy()
        return probs

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """log P(class) (N, C), accurate for very small probabilities too; at least −708, the logarithm of the smallest number."""
        classes = np.arange(len(self.classes_))[None]
        logs: np.ndarray = self.predict_dist(X).log_prob(classes).clamp_min(SMALLEST_LOG).numpy()
        return logs

    def predict_set(self, X: Any, level: float = 0.95) -> np.ndarray:
        """The smallest set of classes with at least that probability: bool (N, C), columns as in classes_."""
        chosen: np.ndarray = self.predict_dist(X).interval(level).numpy()
        return chosen

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class (N,)."""
        probs = self.predict_proba(X)
        labels: np.ndarray = self.classes_[probs.argmax(1)]
        return labels
