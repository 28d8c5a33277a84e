"""The classifier of tables."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, column_or_1d

from ssla import metrics
from ssla._checks import all_in_plain_torch
from ssla.tables.estimators.answers import ClassAnswers
from ssla.tables.estimators.estimator import AUTO, OnEpoch, TableEstimator, as_numbers
from ssla.tables.estimators.related import Related
from ssla.tables.estimators.row_weights import choose_weight_factor, find_weighted_rows
from ssla.tables.estimators.targets import check_labels_known, refuse_masked_target
from ssla.tables.estimators.whole_fits import restore_on_failure
from ssla.tables.networks.ensemble import CLASSES

BALANCED = "balanced"
SMALLEST_LOG = float(np.log(np.finfo(np.float64).tiny))  # of a normal number: about −708


@all_in_plain_torch
class SSLAClassifier(ClassAnswers, ClassifierMixin, TableEstimator):  # type: ignore[misc]
    """Networks for tables that predict class probabilities, with the uncertainty of their weights.

    Parameters are those of `SSLARegressor`, without likelihood and conformal, and

    class_weight:
        A dict {label: weight}, or "balanced": every class has the same total weight, and the
        weights sum to the number of rows. It multiplies the row weights of the fit, so
        probabilities are those of a population with these frequencies of classes. `row_weights`
        decides the scale of the product too, by a factor on `class_weights_`.

    >>> SSLAClassifier(random_state=0).fit(X, y).predict_proba(X_new)      # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        members: int | str = AUTO,
        hidden: tuple[int, ...] = (50, 50),
        activation: str = AUTO,
        refit: str = "output",
        weights: str = "last_layer",
        structure: str = "dense",
        prior_precision: float = 1.0,
        tune: bool = True,
        max_epochs: int | str = AUTO,
        batch_size: int | str | None = AUTO,
        learning_rate: float = 1e-2,
        early_stopping: bool = True,
        validation_fraction: float = 0.1,
        patience: int = 40,
        trees: int | str = AUTO,
        class_weight: Any = None,
        row_weights: str = AUTO,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        """Store the parameters, which `fit` checks."""
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
        self.trees = trees
        self.class_weight = class_weight
        self.row_weights = row_weights
        self.random_state = random_state
        self.verbose = verbose

    @restore_on_failure
    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        groups: Any = None,
        time: Any = None,
        *,
        on_epoch: OnEpoch | None = None,
    ) -> SSLAClassifier:
        """Train the networks, fit their posteriors, and return the estimator.

        X (n, d), y (n,) labels of any kind, sample_weight (n,); groups, time and on_epoch as for
        `SSLARegressor.fit`. Raises ValueError for rows, labels, weights or parameters that cannot
        be used.
        """
        refuse_masked_target(y)
        check_labels_known(y)
        self._check_class_weight()
        inputs, y = self._read_training_rows(X, y)
        check_classification_targets(y)
        y = column_or_1d(y, warn=True)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("Classification needs at least two classes, but y has one class only.")

        self.class_weights_ = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
        _, weights = self._read_weights(sample_weight, len(y))

        # The scale of the product of both weights is kept in those of the classes, so that
        # `partial_fit` uses it for later rows.
        if self.class_weight is not None:
            self.class_weights_ = self.class_weights_ * choose_weight_factor(
                weights * self.class_weights_[codes],
                self.row_weights,
                "sample_weight times class_weight",
            )

        weights = weights * self.class_weights_[codes]
        present = find_weighted_rows(weights)

        rows = as_numbers(self._make_plan(inputs, present))
        self.ensemble_ = self._fit_rows(
            rows[present],
            codes[present],
            weights[present],
            CLASSES,
            Related.from_arguments(groups, time, len(y))[present],
            len(self.classes_),
            on_epoch=on_epoch,
        )
        self.n_iter_ = self.ensemble_.epochs
        return self

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> SSLAClassifier:
        """Add rows to a fitted model, as `SSLARegressor.partial_fit`, and return it.

        The first call is `fit`. Its y must have all `classes`, if they are given.

        class_weight="balanced" is that of the first call: later rows have the weight of their class
        there. The trees stay as they were. Raises ValueError for new classes, and for rows, labels
        or weights that cannot be used.

        X (n, d), y (n,), sample_weight (n,): as in `fit`.  classes: labels that the first rows must
        have; None: any.
        """
        if not hasattr(self, "ensemble_"):
            expected = [] if classes is None else np.asarray(classes).tolist()
            missing = sorted(set(expected) - set(np.asarray(y).tolist()))
            if missing:
                raise ValueError(
                    f"The first rows must have every class, but have none of {missing}. Start with "
                    "more rows."
                )
            return self.fit(X, y, sample_weight)

        rows, present, weights = self._read_more_rows(X, sample_weight)
        refuse_masked_target(y)
        labels = column_or_1d(y, warn=True)
        check_consistent_length(rows, labels)
        new = sorted(set(labels.tolist()) - set(self.classes_.tolist()))
        if new:
            raise ValueError(
                f"y has the new classes {new}, but the model has {self.classes_.tolist()}. Fit "
                "again on all rows."
            )

        codes = np.searchsorted(self.classes_, labels)
        weights = weights * self.class_weights_[codes]
        self._update_last_layers(rows[present], codes[present], weights[present])
        return self

    def _check_class_weight(self) -> None:
        """Raise ValueError for a class_weight that is not a dict, "balanced" or None."""
        class_weight = self.class_weight
        if not (
            class_weight is None
            or isinstance(class_weight, dict)
            or (isinstance(class_weight, str) and class_weight == BALANCED)
        ):
            raise ValueError(
                "class_weight must be a dict {label: weight}, 'balanced' or None, but is "
                f"{class_weight!r}."
            )

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Return the log probabilities of the classes (N, C), in the order of classes_.

        The logs are accurate for very small probabilities too. None is below −708, the logarithm of
        the smallest normal number. Raises NotFittedError before `fit`.
        """
        predictive = self.predict_dist(X)
        classes = np.arange(len(self.classes_))[None]
        logs: np.ndarray = predictive.log_prob(classes).clamp_min(SMALLEST_LOG).numpy()
        return logs

    def predict_set(self, X: Any, level: float = 0.95) -> np.ndarray:
        """Return the smallest set of classes whose probability is at least `level`, bool (N, C).

        The columns are in the order of classes_. Raises ValueError for a level that is not between
        0 and 1, and NotFittedError before `fit`.
        """
        chosen: np.ndarray = self.predict_dist(X).interval(level).numpy()
        return chosen

    def predictive_set(self, X: Any, level: float = 0.95) -> np.ndarray:
        """Return approximate conformal sets of classes (N, C) bool, without calibration rows.

        The columns are in the order of classes_. A class is in the set unless its probability is
        below those that held-out rows have for their observed class, each by the network that held
        it out (with its trees). The most probable class is always in the set: no set is empty, and
        where the model is right more often than the level, so are the sets. The guarantee is
        approximate: the held-out rows also stopped the training and chose the prior and the
        mixture, and the mixture of all networks predicts better than a single network. The refit is
        "output".

        Raises ValueError for a model from a file, for rows with missing or unknown inputs, and for
        a level that is not between 0 and 1.
        """
        rows = self._read_complete_rows(X, "predict_set")
        chosen: np.ndarray = self.ensemble_.class_sets(rows, level).numpy()
        return chosen

    def evaluate(self, X: Any, y: Any) -> dict[str, Any]:
        """Return the scores of rows X with labels y (n,) by name, as `ssla evaluate` prints them.

        The scores are NLL, Brier score, ECE and accuracy. Rows with a label that the training rows
        did not have are only counted, as "unknown labels". Raises ValueError if all rows are such.
        """
        labels = np.asarray(y)
        is_known = np.isin(labels, self.classes_)
        if not is_known.any():
            raise ValueError("None of the labels in the target occurs in the training table.")
        codes = np.searchsorted(self.classes_, labels[is_known])
        predictive = self.predict_dist(self.encode(X)[is_known])
        scores: dict[str, Any] = dict(metrics.summary(predictive, codes).scores)
        if not is_known.all():
            scores["unknown labels"] = float((~is_known).sum())
        return scores
