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

from ssla._checks import all_in_plain_torch, one_of
from ssla._checks import level as checked_level
from ssla.posterior import Posterior
from ssla.predictive import Predictive
from ssla.predictive.predictive import probabilities
from ssla.refit import resolve
from ssla.tables.columns.frames import with_gaps
from ssla.tables.estimators.bases import (
    check_methods,
    column_scaling,
    fitted,
    is_fitted,
    labels_of,
    numbers_of,
    predicted,
)
from ssla.tables.estimators.inputs import check_target_size
from ssla.tables.estimators.row_weights import AUTO, MEANINGS, checked_weights, decided, factor_of
from ssla.tables.estimators.saving import save_wrapped
from ssla.tables.estimators.whole_fits import all_or_nothing
from ssla.tables.trees.out_of_fold import (
    ClassLayer,
    NumberLayer,
    fit_classes,
    fit_numbers,
    log_squares,
)

FOLDS, ALL = "folds", "all"
MEAN, NOISE, CLASSES = "mean", "noise", "classes"
Predictor = Callable[[Any, Any], np.ndarray]  # model, X -> (N,) or (N, C)


@all_in_plain_torch
class WrappedEstimator(BaseEstimator):  # type: ignore[misc]
    """Abstract: folds, clones and features. The two estimators define y."""

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
        self.base = base
        self.cv = cv
        self.final = final
        self.refit = refit
        self.prior_strength = prior_strength
        self.row_weights = row_weights
        self.random_state = random_state

    # --- rows ------------------------------------------------------------------------------

    def _rows(self, X: Any, reset: bool) -> Any:
        """X as the base takes it: tables with column names as they are, everything else as an array
        of numbers.

        Masked cells of an array are gaps.
        """
        X = with_gaps(X)
        if hasattr(X, "iloc") or type(X).__module__.startswith("polars"):
            validate_data(self, X, reset=reset, skip_check_array=True)
            if not len(X):
                raise ValueError("X has no rows: at least one was expected.")
            return X
        finite = "allow-nan" if self._allows_nan() else True
        return validate_data(
            self, X, reset=reset, ensure_all_finite=finite, ensure_min_samples=2 if reset else 1
        )

    def _weights(self, y: np.ndarray, sample_weight: Any) -> np.ndarray:
        weights = checked_weights(sample_weight, len(y))
        if int((weights > 0).sum()) < 2:
            raise ValueError(
                "Fitting needs at least two rows with a positive weight, but "
                f"n_samples={int((weights > 0).sum())}."
            )
        self.weight_factor_ = factor_of(weights, self.row_weights)
        return weights * self.weight_factor_

    def _prepared(
        self, base: Any, X: Any, y: np.ndarray, sample_weight: Any, generator: Any
    ) -> tuple[Any, np.ndarray, np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
        """The rows of positive weight, their targets, weights and folds."""
        check_consistent_length(X, y)
        self._check_settings(base)
        weights = self._weights(y, sample_weight)
        present = np.flatnonzero(weights > 0)
        folds = self._folds(X, y, present, generator)
        if len(present) < len(y):
            X, y, weights = _safe_indexing(X, present), y[present], weights[present]
        return X, y, weights, folds

    def _check_settings(self, base: Any) -> None:
        """Validated at fit and not in __init__, as scikit-learn requires."""
        one_of("final", self.final, (FOLDS, ALL))
        one_of("row_weights", self.row_weights, MEANINGS)
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

    def _folds(
        self, X: Any, y: np.ndarray, present: np.ndarray, generator: Any
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """(training rows, rows to predict) of each fold, of the present rows.

        Each is predicted once.
        """
        n = len(present)
        if isinstance(self.cv, numbers.Integral):
            order = np.lexsort(
                (generator.uniform(size=n), y[present] if self._stratified else np.zeros(n))
            )
            fold = np.empty(n, dtype=np.int64)
            fold[order] = np.arange(n) % min(int(self.cv), n)
            return [
                (np.flatnonzero(fold != k), np.flatnonzero(fold == k))
                for k in range(fold.max() + 1)
            ]
        found = list(check_cv(self.cv, y, classifier=self._stratified).split(X, y))
        times = np.bincount(np.concatenate([test for _, test in found]), minlength=len(y))
        if not bool((times == 1).all()):
            raise ValueError(
                f"cv must predict every row once, but predicts {int((times == 0).sum())} rows "
                f"never and {int((times > 1).sum())} more than once. Use KFold, GroupKFold or "
                "PredefinedSplit."
            )
        place = np.full(len(y), -1)
        place[present] = np.arange(n)
        pairs = [tuple(place[rows][place[rows] >= 0] for rows in pair) for pair in found]
        return [(train, test) for train, test in pairs if len(test)]

    # --- models ----------------------------------------------------------------------------

    def _grown(
        self,
        base: Any,
        X: Any,
        y: np.ndarray,
        weights: np.ndarray | None,
        folds: Any,
        seeds: Any,
        predict: Predictor,
    ) -> tuple[np.ndarray, tuple[Any, ...]]:
        """Out-of-fold predictions (n,) or (n, C), and the models of predictions: those of the
        folds, or one of all rows.
        """
        found, models = [], []
        for train, test in folds:
            model = fitted(base, X, y, weights, train, seeds)
            found.append(predict(model, _safe_indexing(X, test)))
            models.append(model)
        out = np.empty((len(y), *found[0].shape[1:]))
        for (_, test), part in zip(folds, found, strict=True):
            out[test] = part
        if not np.isfinite(out).all():
            raise ValueError(
                f"{type(base).__name__} predicts values that are not finite. Check its settings "
                "and the rows."
            )
        return out, self._final(base, models, lambda: fitted(base, X, y, weights, None, seeds))

    def _final(
        self, base: Any, models: list[Any], on_all_rows: Callable[[], Any]
    ) -> tuple[Any, ...]:
        if base is self.base and is_fitted(base):
            return (base,)
        return tuple(models) if self.final == FOLDS else (on_all_rows(),)

    def _mean_of(self, kind: str, X: Any, predict: Predictor) -> Tensor:
        """The mean prediction of the kept models."""
        return torch.from_numpy(
            np.mean([predict(model, X) for model in self.models_[kind]], axis=0)
        )

    def _allows_nan(self) -> bool:
        base = self._base(None)
        try:
            return bool(get_tags(base).input_tags.allow_nan)
        except (AttributeError, TypeError):  # a library without tags: the base decides
            return True

    def probe(self) -> list[Tensor] | None:
        """The predictions of the models at three rows, the means of the columns and one standard
        deviation off: their identity in a file. None where such rows cannot be predicted (columns
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
        """The inputs of the last layer at X (N, F), for the methods of `posterior_`."""
        check_is_fitted(self, "ensemble_")
        layer: Any = self.ensemble_
        features: Tensor = layer.features(*self._predictions(self._rows(X, reset=False)))
        return features

    def predict_dist(self, X: Any) -> Predictive:
        """The predictive distribution of y at X (see `ssla.Predictive`): mean, variance, cdf,
        hdr, mass, sample, …
        """
        check_is_fitted(self, "ensemble_")
        layer: Any = self.ensemble_
        predictive: Predictive = layer.predict(
            *self._predictions(self._rows(X, reset=False)), self.refit
        )
        return predictive

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the last layer to a directory of tensors and JSON. The models are not in it.

        Trees have no common format that is free of code. Keep `models_` in the format of its
        library (or with skops or joblib), and give it to `ssla.sklearn.load(path, models=…)`.
        """
        check_is_fitted(self, "ensemble_")
        return save_wrapped(self, path)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = False
        tags.input_tags.allow_nan = self._allows_nan()
        return tags


@all_in_plain_torch
class PredictiveRegressor(RegressorMixin, WrappedEstimator):  # type: ignore[misc]
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

    def _base(self, seed: int | None) -> Any:
        return HistGradientBoostingRegressor(random_state=seed) if self.base is None else self.base

    @all_or_nothing
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> PredictiveRegressor:
        """Grow the models and fit the last layer.

        X (n, d), y (n,), sample_weight (n,): a row of weight 2 counts as two rows.
        """
        X = self._rows(X, reset=True)
        y = numbers_of(y)
        generator = check_random_state(self.random_state)
        base = self._base(generator.randint(2**31 - 1))
        X, y, weights, folds = self._prepared(base, X, y, sample_weight, generator)
        if bool((y == y[0]).all()):
            raise ValueError("The target y is constant, so there is nothing to predict.")
        check_target_size(y)
        own = None if sample_weight is None else weights
        m, means = self._grown(base, X, y, own, folds, generator, predicted)
        w = torch.from_numpy(weights)
        squares = log_squares(torch.from_numpy(y - m), w).numpy()
        noise_base = clone(base) if self.noise_base is None else self.noise_base
        noises: tuple[Any, ...] = ()
        v = squares
        if np.ptp(squares) > 0:
            v, noises = self._grown(noise_base, X, squares, own, folds, generator, predicted)
        parts = [torch.from_numpy(part) for part in (m, v, y)]
        with decided():
            layer = fit_numbers(parts[0], parts[1], parts[2], w, float(self.prior_strength))
        self.models_ = {MEAN: means, NOISE: noises}
        self.ensemble_ = replace(layer, inputs=column_scaling(X, weights))
        self.oof_log_prob_ = (
            layer.predict(parts[0], parts[1], self.refit).log_prob(parts[2]).numpy()
        )
        return self

    def _predictions(self, X: Any) -> tuple[Tensor, Tensor]:
        layer: Any = self.ensemble_
        m = self._mean_of(MEAN, X, predicted)
        return m, self._mean_of(NOISE, X, predicted) if self.models_[NOISE] else torch.full_like(
            m, layer.centre
        )

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The predictive mean (N,), and with return_std its standard deviation (noise included)."""
        p = self.predict_dist(X)
        return (p.mean.numpy(), p.stddev.numpy()) if return_std else p.mean.numpy()

    def predict_interval(self, X: Any, level: float = 0.95) -> np.ndarray:
        """Central interval (N, 2)."""
        checked_level(level)
        return self.predict_dist(X).interval(level).numpy()

    def predict_quantiles(self, X: Any, q: Any = (0.05, 0.25, 0.5, 0.75, 0.95)) -> np.ndarray:
        """Quantiles (N, k) for probabilities q (k,); (N,) for one number."""
        probabilities(q)
        p: Any = self.predict_dist(X)
        quantiles: np.ndarray = p.icdf(np.asarray(q, dtype=np.float64)).numpy()
        return quantiles


@all_in_plain_torch
class PredictiveClassifier(ClassifierMixin, WrappedEstimator):  # type: ignore[misc]
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

    def _base(self, seed: int | None) -> Any:
        return HistGradientBoostingClassifier(random_state=seed) if self.base is None else self.base

    @all_or_nothing
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> PredictiveClassifier:
        """Grow the models and fit the last layer.

        X (n, d), y (n,) labels of any kind, sample_weight (n,).
        """
        X = self._rows(X, reset=True)
        y = labels_of(y)
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise ValueError("Classification needs at least two classes, but y has one class only.")
        generator = check_random_state(self.random_state)
        base = self._base(generator.randint(2**31 - 1))
        X, y, weights, folds = self._prepared(base, X, y, sample_weight, generator)
        codes = np.searchsorted(self.classes_, y)
        for train, _ in folds:
            if len(np.unique(codes[train])) < 2:
                raise ValueError(
                    f"A fold leaves rows of one class only for its model (n_samples={len(y)}). Use "
                    "fewer folds, or more rows."
                )
        if is_fitted(base):
            self._probs(base, _safe_indexing(X, [0]))  # refuses other classes before the work
        p, models = self._grown(
            base, X, y, None if sample_weight is None else weights, folds, generator, self._probs
        )
        parts = [torch.from_numpy(part) for part in (p, codes, weights)]
        with decided():
            layer = fit_classes(parts[0], parts[1], parts[2], float(self.prior_strength))
        self.models_ = {CLASSES: models}
        self.ensemble_ = replace(layer, inputs=column_scaling(X, weights))
        self.oof_log_prob_ = layer.predict(parts[0], self.refit).log_prob(parts[1]).numpy()
        return self

    def _probs(self, model: Any, X: Any) -> np.ndarray:
        """Probabilities (N, C) in the order of classes_; zero for classes that the model has
        not seen.
        """
        found = np.asarray(model.predict_proba(X), dtype=np.float64)
        labels = np.asarray(model.classes_).reshape(-1).tolist()
        places = {label: i for i, label in enumerate(self.classes_.tolist())}
        if not places.keys() >= set(labels):
            raise ValueError(f"base was fitted on the classes {labels}, but y has {list(places)}.")
        probs = np.zeros((len(found), len(places)))
        probs[:, [places[label] for label in labels]] = found
        return probs

    def _predictions(self, X: Any) -> tuple[Tensor]:
        return (self._mean_of(CLASSES, X, self._probs),)

    def predict_proba(self, X: Any) -> np.ndarray:
        """P(class) (N, C), columns as in classes_."""
        p: Any = self.predict_dist(X)
        probs: np.ndarray = p.probs.numpy()
        return probs

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class (N,)."""
        probs = self.predict_proba(X)
        labels: np.ndarray = self.classes_[probs.argmax(1)]
        return labels
