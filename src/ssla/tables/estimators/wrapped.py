"""Predictives for models of other libraries: trees, forests and boosters with the interface of
scikit-learn.

The rows that a tree was grown on say little about its errors. So clones are grown on all folds but
one, and predict the rows of that fold. These out-of-fold predictions are the features of a Bayesian
last layer (`ssla.tables.trees.out_of_fold`).
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.model_selection import check_cv
from sklearn.utils import _safe_indexing, check_consistent_length, check_random_state, get_tags
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from ssla._checks import all_in_plain_torch, check_name
from ssla._checks import check_level as checked_level
from ssla.posterior import Posterior
from ssla.predictive import Predictive
from ssla.refit import resolve
from ssla.tables.columns.frames import replace_masked
from ssla.tables.estimators.answers import ClassAnswers, NumberAnswers
from ssla.tables.estimators.bases import (
    check_methods,
    column_scaling,
    fit_clone,
    is_fitted,
    predict_numbers,
)
from ssla.tables.estimators.row_weights import (
    AUTO,
    MEANINGS,
    checked_weights,
    factor_of,
    rows_with_weight,
    without_weight_warning,
)
from ssla.tables.estimators.saving import save_wrapped
from ssla.tables.estimators.targets import check_target_size, read_labels, read_numbers
from ssla.tables.estimators.whole_fits import all_or_nothing
from ssla.tables.trees.out_of_fold import (
    ClassLayer,
    NumberLayer,
    fit_class_layer,
    fit_number_layer,
    log_squares,
)

FOLDS, ALL = "folds", "all"
MEAN, NOISE, CLASSES = "mean", "noise", "classes"
Predictor = Callable[[Any, Any], np.ndarray]  # model, X -> (N,) or (N, C)
Folds = list[tuple[np.ndarray, np.ndarray]]  # rows of training, and rows to predict


@all_in_plain_torch
class WrappedEstimator(BaseEstimator):  # type: ignore[misc]
    """Abstract: folds, clones and features. The two estimators define y, by `fit`, `_base` and
    `_predictions`.
    """

    ensemble_: NumberLayer | ClassLayer
    models_: dict[str, tuple[Any, ...]]

    def __init__(
        self,
        base: Any = None,
        *,
        cv: Any = 5,
        final: str = ALL,
        refit: str = "output",
        prior_strength: float = 1.0,
        row_weights: str = AUTO,
        random_state: Any = None,
    ) -> None:
        """Store the parameters, which `fit` checks."""
        self.base = base
        self.cv = cv
        self.final = final
        self.refit = refit
        self.prior_strength = prior_strength
        self.row_weights = row_weights
        self.random_state = random_state

    # --- rows ------------------------------------------------------------------------------

    def _read_rows(self, X: Any, reset: bool) -> Any:
        """Return X as the base takes it: tables with column names as they are, everything else as
        an array of numbers (n, d). Masked cells of an array are gaps.

        reset: whether names and number of the columns are remembered (at the fit) or compared.
        Raises ValueError for other columns, no rows, or gaps that the base does not take.
        """
        X = replace_masked(X)
        if hasattr(X, "iloc") or type(X).__module__.startswith("polars"):
            validate_data(self, X, reset=reset, skip_check_array=True)
            if not len(X):
                raise ValueError("X has no rows: at least one was expected.")
            return X
        finite = "allow-nan" if self._allows_nan() else True
        return validate_data(
            self, X, reset=reset, ensure_all_finite=finite, ensure_min_samples=2 if reset else 1
        )

    def _prepare_fit(
        self, base: Any, X: Any, y: np.ndarray, sample_weight: Any, generator: Any
    ) -> tuple[Any, np.ndarray, np.ndarray, Folds]:
        """Return the m rows of positive weight, their targets (m,), weights (m,) and folds.

        Raises ValueError or TypeError for wrong settings, weights or folds.
        """
        check_consistent_length(X, y)
        self._check_settings(base)
        weights = checked_weights(sample_weight, len(y))
        present = np.flatnonzero(rows_with_weight(weights))
        self.weight_factor_ = factor_of(weights, self.row_weights)
        weights = weights * self.weight_factor_
        folds = self._make_folds(X, y, present, generator)
        if len(present) < len(y):
            X = _safe_indexing(X, present)
            y = y[present]
            weights = weights[present]
        return X, y, weights, folds

    def _check_settings(self, base: Any) -> None:
        """Raise ValueError or TypeError for a setting that is out of range.

        Settings are checked at the fit and not in __init__, as scikit-learn requires.
        """
        check_name("final", self.final, (FOLDS, ALL))
        check_name("row_weights", self.row_weights, MEANINGS)
        resolve(self.refit)
        strength: Any = self.prior_strength
        real = isinstance(strength, numbers.Real) and not isinstance(strength, bool)
        if not real or not 0 < float(strength) < np.inf:
            raise ValueError(f"prior_strength must be a positive number, but is {strength!r}.")
        if isinstance(self.cv, numbers.Integral) and (isinstance(self.cv, bool) or self.cv < 2):
            raise ValueError(
                f"cv must be at least 2 folds, or a splitter of scikit-learn, but is {self.cv!r}."
            )
        check_methods("base", base, ("fit", self._method))
        if getattr(self, "noise_base", None) is not None:
            check_methods("noise_base", self.noise_base, ("fit", "predict", "get_params"))

    def _make_folds(self, X: Any, y: np.ndarray, present: np.ndarray, generator: Any) -> Folds:
        """Return the training rows and the rows to predict of each fold, as positions among the m
        present rows (m,). Each present row is predicted once.

        Raises ValueError for a splitter that predicts a row never or more than once.
        """
        m = len(present)
        if isinstance(self.cv, numbers.Integral):
            # Rows in random order, sorted by class, take turns: each fold has its share of a class.
            strata = y[present] if self._stratified else np.zeros(m)
            order = np.lexsort((generator.uniform(size=m), strata))
            fold = np.empty(m, dtype=np.int64)
            fold[order] = np.arange(m) % min(int(self.cv), m)
            return [
                (np.flatnonzero(fold != k), np.flatnonzero(fold == k))
                for k in range(fold.max() + 1)
            ]
        pairs = list(check_cv(self.cv, y, classifier=self._stratified).split(X, y))
        times = np.bincount(np.concatenate([test for _, test in pairs]), minlength=len(y))
        if not bool((times == 1).all()):
            raise ValueError(
                f"cv must predict every row once, but predicts {int((times == 0).sum())} rows "
                f"never and {int((times > 1).sum())} more than once. Use KFold, GroupKFold or "
                "PredefinedSplit."
            )
        position = np.full(len(y), -1)
        position[present] = np.arange(m)
        folds = [(position[train], position[test]) for train, test in pairs]
        folds = [(train[train >= 0], test[test >= 0]) for train, test in folds]
        return [(train, test) for train, test in folds if len(test)]

    # --- models ----------------------------------------------------------------------------

    def _fit_models(
        self,
        base: Any,
        X: Any,
        y: np.ndarray,
        weights: np.ndarray | None,
        folds: Folds,
        seeds: Any,
        predict: Predictor,
    ) -> tuple[np.ndarray, tuple[Any, ...]]:
        """Fit a clone of the base for each fold, and return the out-of-fold predictions (n,) or
        (n, C), and the models that will predict new rows.

        y (n,), weights (n,) or None. predict: what is asked of a model. Raises ValueError for
        predictions that are not finite.
        """
        predictions = []
        models = []
        for train, test in folds:
            model = fit_clone(base, X, y, weights, train, seeds)
            predictions.append(predict(model, _safe_indexing(X, test)))
            models.append(model)
        out_of_fold = np.empty((len(y), *predictions[0].shape[1:]))
        for (_, test), prediction in zip(folds, predictions, strict=True):
            out_of_fold[test] = prediction
        if not np.isfinite(out_of_fold).all():
            raise ValueError(
                f"{type(base).__name__} predicts values that are not finite. Check its settings "
                "and the rows."
            )
        # A base that was given fitted makes the predictions itself.
        if base is self.base and is_fitted(base):
            models = [base]
        elif self.final == ALL:
            models = [fit_clone(base, X, y, weights, None, seeds)]
        return out_of_fold, tuple(models)

    def _mean_prediction(self, kind: str, X: Any, predict: Predictor) -> Tensor:
        """Return the mean prediction (N,) or (N, C) of the models of a kind at X."""
        return torch.from_numpy(
            np.mean([predict(model, X) for model in self.models_[kind]], axis=0)
        )

    def _allows_nan(self) -> bool:
        """Return whether the base takes gaps in X, by its tags."""
        base = self._make_base(None)
        try:
            return bool(get_tags(base).input_tags.allow_nan)
        except (AttributeError, TypeError):  # a library without tags: the base decides
            return True

    def predict_probe(self) -> list[Tensor] | None:
        """Return the predictions of the models at three rows, the means of the columns and one
        standard deviation off: a tensor (3,) or (3, C) for each kind of model.

        A file holds them to recognise the models. None where such rows cannot be predicted (columns
        that are not numbers, or are categories).
        """
        inputs = self.ensemble_.inputs
        if inputs is None:
            return None
        rows: Any = torch.stack([inputs.shift + step * inputs.scale for step in (-1, 0, 1)]).numpy()
        if hasattr(self, "feature_names_in_"):
            pandas = import_module("pandas")
            rows = pandas.DataFrame(rows, columns=self.feature_names_in_)
        try:
            return list(self._predictions(rows))
        except Exception:  # of any library
            return None

    # --- answers ---------------------------------------------------------------------------

    @property
    def posterior_(self) -> Posterior:
        """The posterior of the last layer. Its inputs are `features(X)`."""
        check_is_fitted(self, "ensemble_")
        return self.ensemble_.posterior

    def features(self, X: Any) -> Tensor:
        """Return the inputs of the last layer at X (N, F), for the methods of `posterior_`."""
        check_is_fitted(self, "ensemble_")
        layer: Any = self.ensemble_
        features: Tensor = layer.compute_features(
            *self._predictions(self._read_rows(X, reset=False))
        )
        return features

    def predict_dist(self, X: Any) -> Predictive:
        """Return the predictive distribution of y at X (see `ssla.Predictive`): mean, variance,
        cdf, hdr, mass, sample, …
        """
        check_is_fitted(self, "ensemble_")
        layer: Any = self.ensemble_
        predictive: Predictive = layer.predict(
            *self._predictions(self._read_rows(X, reset=False)), self.refit
        )
        return predictive

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the last layer to a directory of tensors and JSON, and return its path. The models
        are not in it.

        Trees have no common format that is free of code. Keep `models_` in the format of its
        library (or with skops or joblib), and give it to `ssla.sklearn.load(path, models=…)`.
        """
        check_is_fitted(self, "ensemble_")
        return save_wrapped(self, path)

    def __sklearn_tags__(self) -> Any:
        """The tags of an estimator of dense rows, with gaps where the base takes them."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = False
        tags.input_tags.allow_nan = self._allows_nan()
        return tags


@all_in_plain_torch
class PredictiveRegressor(NumberAnswers, RegressorMixin, WrappedEstimator):  # type: ignore[misc]
    """Predictive distributions for any regressor with the interface of scikit-learn: trees,
    forests, boosters.

    Parameters
    ----------
    base:
        The regressor, for example `LGBMRegressor()`; scikit-learn's
        `HistGradientBoostingRegressor()` if not given. It is never changed: clones of it are
        fitted. A base that is already fitted makes the predictions itself, and its clones are used
        for the out-of-fold predictions only; give it the rows that it was fitted on.
    noise_base:
        The regressor of the logarithm of squared out-of-fold errors; a clone of `base` if not
        given. Needed where base has a loss for positive targets only.
    cv:
        Number of folds, or a splitter of scikit-learn that predicts every row once (`GroupKFold`,
        `PredefinedSplit`, …).
    final:
        What predicts new rows: "folds", the mean of the models of the folds, or "all", one more
        model, of all rows.
    refit:
        The refit used in predictions: "output", "newton", "none" or "plug_in".
    prior_strength:
        A factor on the precisions of the prior of the last layer, which is centred on the
        predictions of the base.
    row_weights:
        What sample_weight means. "frequencies": a row of weight 2 equals that row twice.
        "relative": only the ratios count; the weights are rescaled to a mean of one over the rows
        of positive weight. "auto": frequencies, but relative, with a warning, where they sum to
        less than half of the rows of positive weight. `weight_factor_` is the factor that was
        applied.
    random_state:
        Seed of the folds, and of bases that have no random_state of their own.

    Attributes
    ----------
    posterior_:
        The posterior of the last layer.
    models_:
        The fitted models, by what they predict.
    oof_log_prob_:
        Log density of each training row (of positive weight) from its out-of-fold prediction, for
        `stacking_weights`.

    Examples
    --------
    >>> model = PredictiveRegressor(LGBMRegressor()).fit(X, y)      # doctest: +SKIP
    >>> model.predict_interval(X_new, level=0.9)                    # doctest: +SKIP
    """

    _method = "predict"
    _stratified = False

    def __init__(
        self,
        base: Any = None,
        *,
        noise_base: Any = None,
        cv: Any = 5,
        final: str = FOLDS,
        refit: str = "output",
        prior_strength: float = 1.0,
        row_weights: str = AUTO,
        random_state: Any = None,
    ) -> None:
        """Store the parameters, which `fit` checks."""
        super().__init__(
            base,
            cv=cv,
            final=final,
            refit=refit,
            prior_strength=prior_strength,
            row_weights=row_weights,
            random_state=random_state,
        )
        self.noise_base = noise_base

    def _make_base(self, seed: int | None) -> Any:
        """Return the regressor whose clones are fitted."""
        return HistGradientBoostingRegressor(random_state=seed) if self.base is None else self.base

    @all_or_nothing
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> PredictiveRegressor:
        """Grow the models, fit the last layer, and return the estimator.

        X (n, d), y (n,), sample_weight (n,): a row of weight 2 counts as two rows. Raises
        ValueError or TypeError for rows, targets, weights or parameters that cannot be used.
        """
        X = self._read_rows(X, reset=True)
        y = read_numbers(y)
        generator = check_random_state(self.random_state)
        base = self._make_base(generator.randint(2**31 - 1))
        X, y, weights, folds = self._prepare_fit(base, X, y, sample_weight, generator)
        if bool((y == y[0]).all()):
            raise ValueError("The target y is constant, so there is nothing to predict.")
        check_target_size(y)
        # A base without row weights can be fitted where none are given.
        given = None if sample_weight is None else weights
        mean, mean_models = self._fit_models(base, X, y, given, folds, generator, predict_numbers)
        # The second kind of models predicts log (y − m)², unless it is the same in every row.
        row_weights = torch.from_numpy(weights)
        log_errors = log_squares(torch.from_numpy(y - mean), row_weights).numpy()
        noise_models: tuple[Any, ...] = ()
        noise = log_errors
        if np.ptp(log_errors) > 0:
            noise_base = clone(base) if self.noise_base is None else self.noise_base
            noise, noise_models = self._fit_models(
                noise_base, X, log_errors, given, folds, generator, predict_numbers
            )
        m, v, target = (torch.from_numpy(values) for values in (mean, noise, y))
        with without_weight_warning():
            layer = fit_number_layer(m, v, target, row_weights, float(self.prior_strength))
        self.models_ = {MEAN: mean_models, NOISE: noise_models}
        self.ensemble_ = replace(layer, inputs=column_scaling(X, weights))
        self.oof_log_prob_ = layer.predict(m, v, self.refit).log_prob(target).numpy()
        return self

    def _predictions(self, X: Any) -> tuple[Tensor, Tensor]:
        """Return the mean (N,) and the log squared error (N,) that the models predict at X."""
        layer: Any = self.ensemble_
        m = self._mean_prediction(MEAN, X, predict_numbers)
        if not self.models_[NOISE]:
            return m, torch.full_like(m, layer.centre)
        return m, self._mean_prediction(NOISE, X, predict_numbers)

    def predict_interval(self, X: Any, level: float = 0.95) -> np.ndarray:
        """Return the central interval (N, 2) that holds y with this probability.

        Raises ValueError for a level that is not between 0 and 1.
        """
        checked_level(level)  # before the models predict
        ends: np.ndarray = self.predict_dist(X).interval(level).numpy()
        return ends


@all_in_plain_torch
class PredictiveClassifier(ClassAnswers, ClassifierMixin, WrappedEstimator):  # type: ignore[misc]
    """Calibrated class probabilities for any classifier with the interface of scikit-learn: trees,
    forests, boosters.

    A Bayesian last layer on the logarithms of the out-of-fold probabilities corrects their
    confidence. Parameters and attributes are those of `PredictiveRegressor`, without noise_base;
    `base` needs predict_proba.

    >>> model = PredictiveClassifier(RandomForestClassifier()).fit(X, y)  # doctest: +SKIP
    >>> model.predict_proba(X_new)                                        # doctest: +SKIP
    """

    _method = "predict_proba"
    _stratified = True

    def _make_base(self, seed: int | None) -> Any:
        """Return the classifier whose clones are fitted."""
        return HistGradientBoostingClassifier(random_state=seed) if self.base is None else self.base

    @all_or_nothing
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> PredictiveClassifier:
        """Grow the models, fit the last layer, and return the estimator.

        X (n, d), y (n,) labels of any kind, sample_weight (n,). Raises ValueError or TypeError for
        rows, labels, weights or parameters that cannot be used.
        """
        X = self._read_rows(X, reset=True)
        y = read_labels(y)
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise ValueError("Classification needs at least two classes, but y has one class only.")
        generator = check_random_state(self.random_state)
        base = self._make_base(generator.randint(2**31 - 1))
        X, y, weights, folds = self._prepare_fit(base, X, y, sample_weight, generator)
        codes = np.searchsorted(self.classes_, y)
        for train, _ in folds:
            if len(np.unique(codes[train])) < 2:
                raise ValueError(
                    f"A fold leaves rows of one class only for its model (n_samples={len(y)}). Use "
                    "fewer folds, or more rows."
                )
        # A base that was fitted on other classes is refused before the work.
        if is_fitted(base):
            self._predict_probs(base, _safe_indexing(X, [0]))
        given = None if sample_weight is None else weights
        probs, models = self._fit_models(base, X, y, given, folds, generator, self._predict_probs)
        p, target, row_weights = (torch.from_numpy(part) for part in (probs, codes, weights))
        with without_weight_warning():
            layer = fit_class_layer(p, target, row_weights, float(self.prior_strength))
        self.models_ = {CLASSES: models}
        self.ensemble_ = replace(layer, inputs=column_scaling(X, weights))
        self.oof_log_prob_ = layer.predict(p, self.refit).log_prob(target).numpy()
        return self

    def _predict_probs(self, model: Any, X: Any) -> np.ndarray:
        """Return the probabilities (N, C) that a model predicts, in the order of classes_; zero for
        classes that it has not seen.

        Raises ValueError for a model that was fitted on other classes.
        """
        probs_of_model = np.asarray(model.predict_proba(X), dtype=np.float64)
        labels = np.asarray(model.classes_).reshape(-1).tolist()
        columns = {label: i for i, label in enumerate(self.classes_.tolist())}
        if not columns.keys() >= set(labels):
            raise ValueError(f"base was fitted on the classes {labels}, but y has {list(columns)}.")
        probs = np.zeros((len(probs_of_model), len(columns)))
        probs[:, [columns[label] for label in labels]] = probs_of_model
        return probs

    def _predictions(self, X: Any) -> tuple[Tensor]:
        """Return the probabilities (N, C) that the models predict at X, alone in a tuple."""
        return (self._mean_prediction(CLASSES, X, self._predict_probs),)
