"""Estimators that make predictive distributions of the predictions of other libraries' models.

These models are trees, forests and boosters with the interface of scikit-learn. The rows that a
tree was grown on say little about its errors. So clones are fitted to all folds but one, and
predict the rows of that fold. These out-of-fold predictions are the features of a Bayesian last
layer (`ssla.tables.trees.out_of_fold`).
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
    fit_clone,
    fit_column_scaling,
    is_fitted,
    predict_numbers,
)
from ssla.tables.estimators.row_weights import (
    AUTO,
    MEANINGS,
    choose_weight_factor,
    find_weighted_rows,
    read_row_weights,
    without_weight_warning,
)
from ssla.tables.estimators.saving import save_wrapped
from ssla.tables.estimators.targets import check_target_size, read_labels, read_numeric_target
from ssla.tables.estimators.whole_fits import restore_on_failure
from ssla.tables.trees.out_of_fold import (
    ClassLayer,
    NumberLayer,
    compute_log_squares,
    fit_class_layer,
    fit_number_layer,
)

FOLDS, ALL = "folds", "all"  # the values of the parameter `final`
MEAN, NOISE, CLASSES = "mean", "noise", "classes"  # the keys of `models_`: what models predict
Predictor = Callable[[Any, Any], np.ndarray]  # model, X -> (N,) or (N, C)
Folds = list[tuple[np.ndarray, np.ndarray]]  # positions of training rows, and of rows to predict


@all_in_plain_torch
class WrappedEstimator(BaseEstimator):  # type: ignore[misc]
    """The abstract base of both estimators: it makes folds, fits clones and predicts.

    The two estimators define `fit`, `_make_base`, `_predict_with_models`, and two class attributes:
    `_prediction_method`, the method of the base that is called, and `_predicts_classes`.
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
        """Return X as the base takes it: a data frame as it is, or an array of numbers (n, d).

        Masked cells of an array are gaps.  reset: True at a fit, which stores the names and the
        number of the columns in the estimator. False later, when they are compared with the stored
        ones. Raises ValueError for other columns, too few rows, or gaps that the base does not
        take.
        """
        X = replace_masked(X)

        # Of a data frame of pandas or polars, scikit-learn stores or compares the columns, and the
        # base reads the cells.
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

        The weights are scaled by the factor that `row_weights` asks for, which is stored in
        `weight_factor_`. Raises ValueError or TypeError for wrong settings, weights or folds.

        base: the model whose clones will be fitted.  X, y (n,): the rows as they were read.
        sample_weight (n,): row weights; None: ones.  generator: a NumPy RandomState for the folds.
        """
        check_consistent_length(X, y)
        self._check_settings(base)
        weights = read_row_weights(sample_weight, len(y))
        present = np.flatnonzero(find_weighted_rows(weights))
        self.weight_factor_ = choose_weight_factor(weights, self.row_weights)
        weights = weights * self.weight_factor_
        folds = self._make_folds(X, y, present, generator)
        if len(present) < len(y):
            X = _safe_indexing(X, present)
            y = y[present]
            weights = weights[present]

        return X, y, weights, folds

    def _check_settings(self, base: Any) -> None:
        """Raise ValueError for a parameter that is out of range, TypeError for an unsuitable base.

        Parameters are checked at the fit and not in __init__, as scikit-learn requires.
        """
        check_name("final", self.final, (FOLDS, ALL))
        check_name("row_weights", self.row_weights, MEANINGS)
        resolve(self.refit)
        strength: Any = self.prior_strength
        is_number = isinstance(strength, numbers.Real) and not isinstance(strength, bool)
        if not is_number or not 0 < float(strength) < np.inf:
            raise ValueError(f"prior_strength must be a positive number, but is {strength!r}.")
        if isinstance(self.cv, numbers.Integral) and (isinstance(self.cv, bool) or self.cv < 2):
            raise ValueError(
                f"cv must be at least 2 folds, or a splitter of scikit-learn, but is {self.cv!r}."
            )

        check_methods("base", base, ("fit", self._prediction_method))
        if getattr(self, "noise_base", None) is not None:
            check_methods("noise_base", self.noise_base, ("fit", "predict", "get_params"))

    def _make_folds(self, X: Any, y: np.ndarray, present: np.ndarray, generator: Any) -> Folds:
        """Return the folds of the present rows, by the parameter `cv`.

        Each fold has the positions, among these m rows, of its training rows and of the rows that
        it predicts. Each row is predicted once. Raises ValueError for a splitter that predicts a
        row of X never or more than once.

        X, y (n,): all rows.  present (m,): the positions of the rows of positive weight.
        generator: a NumPy RandomState.
        """
        if isinstance(self.cv, numbers.Integral):
            return self._draw_folds(y[present], generator)
        return self._apply_splitter(X, y, present)

    def _draw_folds(self, y: np.ndarray, generator: Any) -> Folds:
        """Draw `cv` random folds of rows with targets y (m,), or m folds if there are fewer rows.

        Each fold has about the same proportions of classes.  generator: a NumPy RandomState.
        """
        m = len(y)
        # Rows are sorted by class, in random order within a class. Row i of this order is in the
        # fold i modulo the number of folds.
        strata = y if self._predicts_classes else np.zeros(m)
        order = np.lexsort((generator.uniform(size=m), strata))
        fold_of_row = np.empty(m, dtype=np.int64)
        fold_of_row[order] = np.arange(m) % min(int(self.cv), m)
        return [
            (np.flatnonzero(fold_of_row != k), np.flatnonzero(fold_of_row == k))
            for k in range(fold_of_row.max() + 1)
        ]

    def _apply_splitter(self, X: Any, y: np.ndarray, present: np.ndarray) -> Folds:
        """Return the folds that the splitter `cv` makes of X and y (n,), as in `_make_folds`.

        All n rows are split, and those that are not present (m,) are then left out. Raises
        ValueError for a splitter that predicts a row never or more than once.
        """
        pairs = list(check_cv(self.cv, y, classifier=self._predicts_classes).split(X, y))
        predicted = np.concatenate([test for _, test in pairs])
        times = np.bincount(predicted, minlength=len(y))  # how often each row is predicted
        if not bool((times == 1).all()):
            raise ValueError(
                f"cv must predict every row once, but predicts {int((times == 0).sum())} rows "
                f"never and {int((times > 1).sum())} more than once. Use KFold, GroupKFold or "
                "PredefinedSplit."
            )

        # The position of each of the n rows among the present rows; −1 for the others.
        position = np.full(len(y), -1)
        position[present] = np.arange(len(present))
        folds = []
        for train, test in pairs:
            train_positions = position[train]
            test_positions = position[test]
            train_positions = train_positions[train_positions >= 0]
            test_positions = test_positions[test_positions >= 0]
            if len(test_positions):
                folds.append((train_positions, test_positions))

        return folds

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
        """Fit a clone of the base for each fold, and return its predictions and the final models.

        The predictions are out-of-fold, (m,) or (m, C). The final models predict new rows:
        a base that was given fitted itself, those of the folds, or one of all rows, as `final`
        says.

        X: m rows.  y (m,): what the models learn.  weights (m,): row weights; None: the base is
        fitted without any.  seeds: a NumPy RandomState, see `fit_clone`.  predict: computes the
        predictions of a model. Raises ValueError for predictions that are not finite, and for
        weights that the base does not take.
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

        # The base may have been given fitted. The models of the noise are always fitted here.
        if base is self.base and is_fitted(base):
            models = [base]
        elif self.final == ALL:
            models = [fit_clone(base, X, y, weights, None, seeds)]

        return out_of_fold, tuple(models)

    def _average_predictions(self, key: str, X: Any, predict: Predictor) -> Tensor:
        """Return the mean (N,) or (N, C) of the predictions at X of the models `models_[key]`."""
        predictions = [predict(model, X) for model in self.models_[key]]
        return torch.from_numpy(np.mean(predictions, axis=0))

    def _allows_nan(self) -> bool:
        """Return whether the base takes gaps in X, by its tags; True for a base without tags."""
        base = self._make_base(None)
        # Without tags, the base itself refuses gaps that it does not take.
        try:
            return bool(get_tags(base).input_tags.allow_nan)
        except (AttributeError, TypeError):
            return True

    def predict_probe(self) -> list[Tensor] | None:
        """Return the predictions of the models at three rows, by which a file recognises them.

        The rows are the means of the columns, and one standard deviation below and above. The
        predictions are those of `_predict_with_models`, each (3,) or (3, C). The result is None if
        such rows cannot be predicted, as where columns are not numbers, or numbers are categories.
        """
        inputs = self.ensemble_.inputs
        if inputs is None:
            return None
        rows: Any = torch.stack([inputs.shift + step * inputs.scale for step in (-1, 0, 1)]).numpy()

        # Models that were fitted on columns with names expect these names.
        if hasattr(self, "feature_names_in_"):
            pandas = import_module("pandas")
            rows = pandas.DataFrame(rows, columns=self.feature_names_in_)

        # A model of another library may raise any exception.
        try:
            return list(self._predict_with_models(rows))
        except Exception:
            return None

    # --- answers ---------------------------------------------------------------------------

    @property
    def posterior_(self) -> Posterior:
        """The posterior of the last layer, whose inputs are `features(X)`."""
        check_is_fitted(self, "ensemble_")
        return self.ensemble_.posterior

    def features(self, X: Any) -> Tensor:
        """Return the inputs (N, F) of the last layer at X, for the methods of `posterior_`.

        Raises NotFittedError before `fit`, and ValueError for rows that cannot be used.
        """
        check_is_fitted(self, "ensemble_")
        layer: Any = self.ensemble_
        predictions = self._predict_with_models(self._read_rows(X, reset=False))
        features: Tensor = layer.compute_features(*predictions)
        return features

    def predict_dist(self, X: Any) -> Predictive:
        """Return the predictive distribution of y at X, a `ssla.Predictive`.

        X: rows (n, d) with the columns of `fit`. The result has n rows; `ssla.Predictive` lists its
        answers. Raises NotFittedError before `fit`, and ValueError for rows that cannot be used.
        """
        check_is_fitted(self, "ensemble_")
        layer: Any = self.ensemble_
        predictions = self._predict_with_models(self._read_rows(X, reset=False))
        predictive: Predictive = layer.predict(*predictions, self.refit)
        return predictive

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the last layer, without the models, to a directory, and return its path.

        The directory has tensors and JSON. Trees have no common format that is free of code. Keep
        `models_` in the format of its library (or with skops or joblib), and give it to
        `ssla.sklearn.load(path, models=…)`. Raises FileError for classes or parameters that a file
        cannot hold, and NotFittedError before `fit`.
        """
        check_is_fitted(self, "ensemble_")
        return save_wrapped(self, path)

    def __sklearn_tags__(self) -> Any:
        """Return the tags of an estimator of dense rows, with gaps if the base takes them."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = False
        tags.input_tags.allow_nan = self._allows_nan()
        return tags


@all_in_plain_torch
class PredictiveRegressor(NumberAnswers, RegressorMixin, WrappedEstimator):  # type: ignore[misc]
    """Predictive distributions for any regressor with the interface of scikit-learn.

    Such regressors are trees, forests and boosters of any library.

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

    _prediction_method = "predict"
    _predicts_classes = False

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
        """Return the regressor whose clones are fitted: the parameter `base`, or the default one.

        seed: the random_state of the default one.
        """
        return HistGradientBoostingRegressor(random_state=seed) if self.base is None else self.base

    @restore_on_failure
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> PredictiveRegressor:
        """Grow the models, fit the last layer, and return the estimator.

        X (n, d), y (n,), sample_weight (n,): a row of weight 2 counts as two rows. Raises
        ValueError or TypeError for rows, targets, weights or parameters that cannot be used.
        """
        X = self._read_rows(X, reset=True)
        y = read_numeric_target(y)
        generator = check_random_state(self.random_state)
        base = self._make_base(generator.randint(2**31 - 1))
        X, y, weights, folds = self._prepare_fit(base, X, y, sample_weight, generator)
        if bool((y == y[0]).all()):
            raise ValueError("The target y is constant, so there is nothing to predict.")
        check_target_size(y)

        # A base that takes no row weights can be fitted if none are given.
        given_weights = None if sample_weight is None else weights
        mean, mean_models = self._fit_models(
            base, X, y, given_weights, folds, generator, predict_numbers
        )

        # Further models predict log (y − m)², unless it is the same in every row.
        row_weights = torch.from_numpy(weights)
        log_errors = compute_log_squares(torch.from_numpy(y - mean), row_weights).numpy()
        noise_models: tuple[Any, ...] = ()
        noise = log_errors
        if np.ptp(log_errors) > 0:
            noise_base = clone(base) if self.noise_base is None else self.noise_base
            noise, noise_models = self._fit_models(
                noise_base, X, log_errors, given_weights, folds, generator, predict_numbers
            )

        # The out-of-fold predictions are the features of the last layer.
        m, v, target = (torch.from_numpy(values) for values in (mean, noise, y))
        with without_weight_warning():
            layer = fit_number_layer(m, v, target, row_weights, float(self.prior_strength))
        self.models_ = {MEAN: mean_models, NOISE: noise_models}
        self.ensemble_ = replace(layer, inputs=fit_column_scaling(X, weights))
        self.oof_log_prob_ = layer.predict(m, v, self.refit).log_prob(target).numpy()
        return self

    def _predict_with_models(self, X: Any) -> tuple[Tensor, Tensor]:
        """Return the mean (N,) and the log squared error (N,) that the models predict at X.

        Without models of the noise the second is that of all training rows.
        """
        layer: Any = self.ensemble_
        m = self._average_predictions(MEAN, X, predict_numbers)
        if not self.models_[NOISE]:
            return m, torch.full_like(m, layer.centre)
        return m, self._average_predictions(NOISE, X, predict_numbers)

    def predict_interval(self, X: Any, level: float = 0.95) -> np.ndarray:
        """Return the central interval (N, 2) that holds y with probability `level`.

        Raises ValueError for a level that is not between 0 and 1, and NotFittedError before `fit`.
        """
        checked_level(level)  # refuses a wrong one before the models predict
        ends: np.ndarray = self.predict_dist(X).interval(level).numpy()
        return ends


@all_in_plain_torch
class PredictiveClassifier(ClassAnswers, ClassifierMixin, WrappedEstimator):  # type: ignore[misc]
    """Calibrated class probabilities for any classifier with the interface of scikit-learn.

    Such classifiers are trees, forests and boosters of any library. A Bayesian last layer on the
    logarithms of the out-of-fold probabilities corrects their confidence. Parameters and attributes
    are those of `PredictiveRegressor`, without noise_base; `base` needs predict_proba.

    >>> model = PredictiveClassifier(RandomForestClassifier()).fit(X, y)  # doctest: +SKIP
    >>> model.predict_proba(X_new)                                        # doctest: +SKIP
    """

    _prediction_method = "predict_proba"
    _predicts_classes = True

    def _make_base(self, seed: int | None) -> Any:
        """Return the classifier whose clones are fitted: the parameter `base`, or the default one.

        seed: the random_state of the default one.
        """
        return HistGradientBoostingClassifier(random_state=seed) if self.base is None else self.base

    @restore_on_failure
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

        # A fitted base with other classes is refused before its clones are fitted.
        if is_fitted(base):
            self._predict_probs(base, _safe_indexing(X, [0]))

        # A base that takes no row weights can be fitted if none are given.
        given_weights = None if sample_weight is None else weights
        probs, models = self._fit_models(
            base, X, y, given_weights, folds, generator, self._predict_probs
        )

        # The out-of-fold probabilities are the features of the last layer.
        p, target, row_weights = (torch.from_numpy(array) for array in (probs, codes, weights))
        with without_weight_warning():
            layer = fit_class_layer(p, target, row_weights, float(self.prior_strength))
        self.models_ = {CLASSES: models}
        self.ensemble_ = replace(layer, inputs=fit_column_scaling(X, weights))
        self.oof_log_prob_ = layer.predict(p, self.refit).log_prob(target).numpy()
        return self

    def _predict_probs(self, model: Any, X: Any) -> np.ndarray:
        """Return the probabilities (N, C) that a model predicts at X, in the order of classes_.

        The probabilities are zero for classes that the model has not seen. Raises ValueError for a
        model that was fitted on other classes.
        """
        probs_of_model = np.asarray(model.predict_proba(X), dtype=np.float64)
        labels = np.asarray(model.classes_).reshape(-1).tolist()
        columns = {label: i for i, label in enumerate(self.classes_.tolist())}
        if not columns.keys() >= set(labels):
            raise ValueError(f"base was fitted on the classes {labels}, but y has {list(columns)}.")
        probs = np.zeros((len(probs_of_model), len(columns)))
        probs[:, [columns[label] for label in labels]] = probs_of_model
        return probs

    def _predict_with_models(self, X: Any) -> tuple[Tensor]:
        """Return the probabilities (N, C) that the models predict at X, as a tuple of one.

        The result is a tuple because that of the regressor has two tensors.
        """
        return (self._average_predictions(CLASSES, X, self._predict_probs),)
