"""The regressor of tables, for numbers and counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    _check_y,
    check_consistent_length,
    column_or_1d,
)

from ssla import metrics
from ssla._checks import all_in_plain_torch, check_name, warn
from ssla._checks import check_level as checked_level
from ssla.curvature.structure import NoFactorError
from ssla.fitting.mode import NoModeError
from ssla.likelihoods.support import LARGEST_COUNT, Counts
from ssla.predictive import Predictive
from ssla.predictive.positive import Positive
from ssla.predictive.transformed import Transform
from ssla.tables.estimators.answers import NumberAnswers
from ssla.tables.estimators.estimator import (
    AUTO,
    OnEpoch,
    TableEstimator,
    as_numbers,
    copy_to_tensors,
    read_flag,
    read_number,
)
from ssla.tables.estimators.related import Related
from ssla.tables.estimators.split_conformal import Conformal
from ssla.tables.estimators.targets import check_target_size, refuse_masked_or_dates
from ssla.tables.estimators.whole_fits import restore_on_failure
from ssla.tables.networks import CONTINUOUS, ON_SCALE, Ensemble
from ssla.tables.networks.count_targets import (
    POISSON,
    is_poisson_better,
    is_poisson_worth_fitting,
    may_be_poisson,
)
from ssla.tables.networks.ensemble import GAUSSIAN, HETEROSCEDASTIC, POSITIVE

FEWEST_ROWS = 60  # for a noise that depends on x; a guess
# A logarithmic scale is tried for targets whose largest value is more than FACTOR times the
# quantile at LOW, and below LARGEST. These are guesses.
FACTOR, LOW, LARGEST = 3.0, 0.05, 1e100
NAMES = (AUTO, *CONTINUOUS, POISSON)
INTERVAL_SCORES = ("coverage", "width")  # how the names of the scores of intervals begin


@all_in_plain_torch
class SSLARegressor(NumberAnswers, RegressorMixin, TableEstimator):  # type: ignore[misc]
    """A network for tables that predicts distributions.

    X is an array, or a data frame of pandas or polars with numbers, texts, categories, booleans,
    dates and gaps.

    Parameters
    ----------
    likelihood:
        "auto" ("heteroscedastic", or "positive" where its networks predict held-out rows better, or
        "poisson" where the target has small counts and its networks predict them better; "gaussian"
        for several targets, fewer than 60 rows, more weights than the last layer, or, with a
        warning, where the former cannot be fitted), "gaussian" (constant noise, estimated on
        held-out rows), "heteroscedastic" (noise depends on x), "positive" (the same on a
        logarithmic scale, for targets that are not negative; zero is allowed), "poisson" (counts),
        "log_normal" (positive targets: Gaussian on the log scale, so no interval has a negative
        end), "logit_normal" (targets strictly between 0 and 1).
    members:
        Number of networks, trained together; the prediction is the mixture of their predictives.
        "auto": five, ten for tables of up to 300 rows, two for more than 100,000.
    hidden, activation:
        Widths of the hidden layers; "silu", "relu" or "tanh". "auto": "relu" with the numbers also
        given by the pieces of their ranges for "heteroscedastic", "positive" and "poisson",
        otherwise "silu".
    refit:
        The refit used in predictions: "output", "newton", "none" or "plug_in".
    weights, structure:
        Which weights are uncertain ("last_layer", "all") and the form of their curvature ("dense",
        "kfac", "diag", "low_rank").
    prior_precision, tune:
        Precision of the Gaussian prior: the weight decay of training; if `tune`, it is then tuned
        by the evidence.
    max_epochs, batch_size, learning_rate, early_stopping, validation_fraction, patience:
        Training. Each member holds out different rows for early stopping and noise; its last layer
        is then fitted to all rows. batch_size="auto" is a sixteenth of the rows, between 16 and 256
        (large tables: up to 4,096); None uses all rows at once. max_epochs="auto" is 200, or as
        many as visit four million rows, at least eight.
    trees:
        The number of decision trees that are grown beside each network, on the same rows (boosted;
        a random forest for classes). Rows that both held out choose their share of the mixture, and
        for numbers how far they move the networks' means. "auto": 50, none for fewer than 30 rows
        or more than 50 classes; 0: none. For mean and log variance and for classes, with
        early_stopping and tune.
    conformal, calibration_fraction:
        Correct `predict_interval` on that share of the rows, held out: coverage of at least the
        level for exchangeable rows. Row weights are frequencies here too; rows of weight 0 are
        ignored.
    row_weights:
        What sample_weight means. "frequencies": a row of weight 2 equals that row twice.
        "relative": only the ratios count; the weights are rescaled to a mean of one over the rows
        of positive weight. "auto": frequencies, but relative, with a warning, where they sum to
        less than half of the rows of positive weight. `weight_factor_` is the factor that was
        applied.
    random_state:
        Seed. The same seed and data give the same fit.
    verbose:
        1 shows a bar of the epochs (needs tqdm).

    Attributes
    ----------
    ensemble_:
        Posteriors, scaling and networks.
    n_iter_:
        Epochs of the training.
    plan_:
        What became of each column of X: see `TableEncoder`.

    Examples
    --------
    >>> model = SSLARegressor(members=5, random_state=0).fit(X, y)      # doctest: +SKIP
    >>> model.predict_interval(X_new, level=0.95)                       # doctest: +SKIP
    """

    def __init__(
        self,
        likelihood: str = AUTO,
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
        patience: int = 16,
        trees: int | str = AUTO,
        conformal: bool = False,
        calibration_fraction: float = 0.2,
        row_weights: str = AUTO,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        """Store the parameters, which `fit` checks."""
        self.likelihood = likelihood
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
        self.conformal = conformal
        self.calibration_fraction = calibration_fraction
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
    ) -> SSLARegressor:
        """Train the networks, fit and tune their posteriors, and return the estimator.

        X (n, d), y (n,) or (n, D). X may also be rows that `TableEncoder(codes=True)` has encoded,
        whose plan is kept. Masked cells of X are gaps.

        sample_weight (n,): row weights. A row of weight 2 counts as two rows, unless `row_weights`
        gives them another scale.
        groups (n,): rows of one group (a patient, a shop) belong together. Whole groups are held
        out, and whole groups calibrate conformal intervals.
        time (n,): numbers or dates. The latest rows are held out, and calibrate the intervals. With
        groups or time the held-out rows show the error for new groups or later rows.
        on_epoch: a function that is called with the number of each finished epoch. It replaces the
        bar of `verbose`.

        Raises ValueError for rows, targets, weights or parameters that cannot be used, and
        TypeError for dates as targets. Masked targets and weights cannot be used.
        """
        check_name("likelihood", self.likelihood, NAMES)
        conformal = read_flag(self, "conformal")
        refuse_masked_or_dates(y)
        inputs, y = self._read_training_rows(X, y, multi_output=True, y_numeric=True)
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        y = np.asarray(y, dtype=np.float64)
        present, weights = self._read_weights(sample_weight, len(y))
        self._check_target(y[present])
        related = Related.from_arguments(groups, time, len(y))

        # Conformal intervals are calibrated on rows that neither the plan nor the networks see.
        kept = np.flatnonzero(present)
        held_out = np.arange(0)
        if conformal:
            kept, held_out = self._split_rows(kept, related[kept])
        rows = self._make_plan(inputs, np.isin(np.arange(len(y)), kept))

        self.ensemble_ = self._fit_target(
            as_numbers(rows)[kept], y[kept], weights[kept], related[kept], on_epoch
        )
        self.n_iter_ = self.ensemble_.epochs
        self.conformal_ = None
        if conformal:
            predictive = self._predict_rows(rows[held_out])
            self.conformal_ = Conformal.from_rows(
                predictive, y[held_out], weights[held_out], self.refit, self.ensemble_.scale
            )

        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> SSLARegressor:
        """Add rows to a fitted model in one pass over them, and return it.

        The networks, the noise and the prior stay. The last layers are then those of a fit to all
        rows; for likelihoods other than Gaussian this is an approximation. The first call is `fit`.

        Raises ValueError for a conformal model, and for rows or targets that cannot be used.

        X, y, sample_weight: as in `fit`.
        """
        if not hasattr(self, "ensemble_"):
            return self.fit(X, y, sample_weight)

        if self.conformal_ is not None:
            raise ValueError(
                "The conformal scores hold for the fitted model only. Use conformal=False for "
                "partial_fit, or fit again."
            )

        rows, present, weights = self._read_more_rows(X, sample_weight)
        refuse_masked_or_dates(y)
        target = np.asarray(
            _check_y(y, multi_output=True, y_numeric=True, estimator=self), dtype=np.float64
        )
        check_consistent_length(rows, target)
        if self.ensemble_.one_target:
            target = column_or_1d(target)
        elif target.shape[1:] != (self.ensemble_.architecture.outputs,):
            raise ValueError(
                f"y must have {self.ensemble_.architecture.outputs} columns as at the fit, but has "
                f"shape {target.shape}."
            )

        self._check_support(
            target[present], self.ensemble_.settings.likelihood, self.ensemble_.scale
        )
        self._update_last_layers(rows[present], target[present], weights[present])
        return self

    def _choose_likelihood(self, y: np.ndarray) -> str:
        """Return the name of the likelihood with which the fit of y (n,) or (n, D) begins.

        "auto" means a noise that depends on x for one target with enough rows and uncertain last
        layers, and otherwise a constant one.
        """
        if self.likelihood != AUTO:
            return str(self.likelihood)
        noise_varies = y.ndim == 1 and len(y) >= FEWEST_ROWS and self.weights == "last_layer"
        return HETEROSCEDASTIC if noise_varies else GAUSSIAN

    def _fit_target(
        self,
        X: np.ndarray,
        y: np.ndarray,
        weights: np.ndarray,
        related: Related,
        on_epoch: OnEpoch | None,
    ) -> Ensemble:
        """Fit the ensemble to rows X (n, d), y (n,) or (n, D), weights (n,), and return it.

        With "auto" several likelihoods are tried. The first is a noise that depends on x, with y on
        a logarithmic scale beside the linear one if y varies by factors. If its posterior has no
        mode or factor, the linear scale is fitted alone, and then constant noise, with a warning. A
        Poisson fit of small counts replaces the result if it predicts better. Errors are those of
        `_fit_rows`; only the last likelihood raises those of its posterior.

        related: the groups or times of the rows.  on_epoch: as in `fit`.
        """
        likelihood = self._choose_likelihood(y)
        self._make_settings(likelihood, len(y))  # refuses wrong parameters
        if not (self.likelihood == AUTO and likelihood == HETEROSCEDASTIC):
            return self._fit_rows(X, y, weights, likelihood, related, on_epoch=on_epoch)

        # Each try is a likelihood and its rival. The later tries need less to be fitted.
        tries: list[tuple[str, str | None]] = [(likelihood, None), (GAUSSIAN, None)]
        if varies_by_factors(y):
            tries.insert(0, (likelihood, POSITIVE))
        ensemble, name, problem = self._fit_first_possible(tries, X, y, weights, related, on_epoch)

        poisson = self._fit_poisson_if_better(ensemble, X, y, weights, related, on_epoch)
        if poisson is not None:
            return poisson
        if name == GAUSSIAN:
            warn(
                "A noise that depends on x could not be fitted, as where the networks meet the "
                "training rows exactly (no noise, or many columns): constant noise was used. Give "
                f"likelihood='gaussian' to choose it. ({problem})"
            )

        return ensemble

    def _fit_first_possible(
        self,
        tries: list[tuple[str, str | None]],
        X: np.ndarray,
        y: np.ndarray,
        weights: np.ndarray,
        related: Related,
        on_epoch: OnEpoch | None,
    ) -> tuple[Ensemble, str, str]:
        """Return the fit of the first try whose posterior has a mode and a factor.

        Also returns the name of its likelihood, and the problem of the try before, "" if there was
        none. Errors are those of `_fit_rows`; only the last try raises those of its posterior.

        tries: the name of each likelihood, and its rival.  The other arguments are those of
        `_fit_target`.
        """
        problem = ""
        for name, rival in tries[:-1]:
            try:
                ensemble = self._fit_rows(
                    X, y, weights, name, related, rival=rival, on_epoch=on_epoch
                )
            except (NoFactorError, NoModeError) as error:
                problem = str(error).split(":")[0]
            else:
                return ensemble, name, problem

        name, rival = tries[-1]
        ensemble = self._fit_rows(X, y, weights, name, related, rival=rival, on_epoch=on_epoch)
        return ensemble, name, problem

    def _fit_poisson_if_better(
        self,
        ensemble: Ensemble,
        X: np.ndarray,
        y: np.ndarray,
        weights: np.ndarray,
        related: Related,
        on_epoch: OnEpoch | None,
    ) -> Ensemble | None:
        """Return a Poisson fit to small counts if it predicts held-out rows better; otherwise None.

        The Poisson fit is compared with `ensemble`, a continuous fit of the same X (n, d), y (n,),
        weights (n,). The result is also None if y are not such counts, or if the Poisson fit fails.

        related: the groups or times of the rows.  on_epoch: as in `fit`.
        """
        x, target, weights_tensor = copy_to_tensors(X, y, weights)
        if not (
            may_be_poisson(target, weights_tensor)
            and is_poisson_worth_fitting(ensemble, x, target, weights_tensor)
        ):
            return None

        # The same seed holds out the same rows, so that both fits can be compared on them.
        seed = ensemble.settings.seed
        try:
            poisson = self._fit_rows(X, y, weights, POISSON, related, seed=seed, on_epoch=on_epoch)
        except (NoFactorError, NoModeError, FloatingPointError):
            # The user did not ask for Poisson, and the continuous fit is complete. Networks that
            # cannot be trained or fitted to these counts would not predict them better.
            return None

        return poisson if is_poisson_better(ensemble, poisson, x, target, weights_tensor) else None

    def _check_target(self, y: np.ndarray) -> None:
        """Raise ValueError for targets y (n,) or (n, D) that cannot be fitted.

        Such targets are several for a likelihood of one target, constant, too large or too small,
        or outside the support of the likelihood.
        """
        if self.likelihood not in (AUTO, GAUSSIAN) and y.ndim == 2:
            raise ValueError(
                f"likelihood={self.likelihood!r} needs one target, but y has {y.shape[1]} columns. "
                "Fit one for each."
            )
        if bool((y == y[:1]).all(0).any()):
            raise ValueError("The target y is constant, so there is nothing to predict.")
        check_target_size(y)

        # The support of the positive scale does not depend on its ends, which are not known yet.
        scale = Positive(0.0, 1.0) if self.likelihood == POSITIVE else ON_SCALE.get(self.likelihood)
        self._check_support(y, self.likelihood, scale)

    def _check_support(self, y: np.ndarray, likelihood: str, scale: Transform | None) -> None:
        """Raise ValueError for targets y (n,) or (n, D) outside the support of likelihood or scale.

        scale: that of the target; None: the linear one, which has every number.
        """
        if scale is not None and not bool(scale.is_in_support(torch.from_numpy(y)).all()):
            raise ValueError(
                f"likelihood={self.likelihood!r} needs targets that are {scale.support}, but y is "
                f"from {y.min():g} to {y.max():g}. Use 'gaussian', or leave out these rows."
            )
        if likelihood == POISSON and (bool((y < 0).any()) or bool((y != np.round(y)).any())):
            chosen = "" if self.likelihood == POISSON else " (chosen by 'auto' for this table)"
            raise ValueError(
                f"likelihood='poisson'{chosen} needs counts 0, 1, 2, …, but y has negative or "
                "fractional values. Use 'heteroscedastic', or leave out these rows."
            )

        # Counts that are too large are refused here, before the networks are trained.
        if likelihood == POISSON:
            Counts(LARGEST_COUNT).check(torch.from_numpy(y.flatten()), 1)

    def _split_rows(self, rows: np.ndarray, related: Related) -> tuple[np.ndarray, np.ndarray]:
        """Split positions of rows (n,) into those for the fit and those for calibrating intervals.

        Both parts are sorted.  related: the groups or times of these rows, by which they are split;
        otherwise the split is random. Raises ValueError for a calibration_fraction that is not
        between 0 and 1, for a single group or time, and for fewer than two rows of the fit.
        """
        read_number(self, "calibration_fraction", float, 0, strict=True)
        fraction = self.calibration_fraction
        if not fraction < 1:
            raise ValueError(f"calibration_fraction must be between 0 and 1, but is {fraction!r}.")
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        if related.has_values:
            chosen = related.choose_held_out_rows(fraction, seed)
            kept = rows[~chosen]
            held_out = rows[chosen]
        else:
            kept, held_out = train_test_split(rows, test_size=fraction, random_state=seed)

        if len(kept) < 2:
            raise ValueError(
                f"conformal=True leaves {len(kept)} of n_samples={len(rows)} for the fit, which "
                "needs at least two. Use more rows or a smaller calibration_fraction."
            )

        return np.sort(kept), np.sort(held_out)

    def predict_interval(self, X: Any, level: float = 0.95) -> np.ndarray:
        """Return the central interval (N, 2), or (N, D, 2), that holds y with probability `level`.

        With conformal=True its coverage is at least the level. Raises ValueError for a level that
        is not between 0 and 1, and if the conformal scores were computed with another refit.
        """
        return self.interval_of(self.predict_dist(X), level)

    def predictive_set(self, X: Any, level: float = 0.95) -> np.ndarray:
        """Return approximate conformal intervals (N, 2) of one target, without calibration rows.

        A new row is compared with the rows that each network held out of its training, by the
        network that held them out. At the new row the mean of the networks' outputs is used,
        without trees. The guarantee is approximate: the held-out rows also stopped the training and
        chose the noise and the prior, and a single network errs more than the mean of all. See
        `Posterior.predictive_set`.

        Raises ValueError for a model from a file, for a model without held-out rows, for rows with
        missing or unknown inputs, and for a level that is not between 0 and 1.
        """
        rows = self._read_complete_rows(X, "predict_interval")
        ends: np.ndarray = self.ensemble_.predictive_set(rows, level).numpy()
        return ends

    def interval_of(self, predictive: Predictive, level: float) -> np.ndarray:
        """Return the intervals of `predict_interval`, (N, 2) or (N, D, 2), from a predictive.

        The predictive is that of `predict_dist`, so that several levels need one prediction only.
        Raises what `predict_interval` raises.
        """
        if self.conformal_ is None:
            return predictive.interval(level).numpy()
        if not self.conformal_.holds_for(self.refit):
            raise ValueError(
                f"The conformal scores were computed with refit={self.conformal_.refit!r}, but "
                f"refit is now {self.refit!r}, for which their coverage does not hold. Fit again "
                "with the new refit, or predict with the first one."
            )
        return self.conformal_.interval(predictive, checked_level(level), self.ensemble_.scale)

    def evaluate(self, X: Any, y: Any) -> dict[str, Any]:
        """Return the scores of rows X with known y (n,) by name, as `ssla evaluate` prints them.

        The scores are NLL, CRPS, RMSE, and coverage and width of intervals. With conformal=True
        there are also coverage and width of the conformal intervals, or a text if their scores do
        not hold for the present refit.
        """
        predictive = self.predict_dist(X)
        predictive_scores: dict[str, Any] = dict(metrics.summary(predictive, y).scores)
        if self.conformal_ is None:
            return predictive_scores
        scores: dict[str, Any] = {name: predictive_scores[name] for name in ("nll", "crps", "rmse")}
        if self.conformal_.holds_for(self.refit):
            for level in metrics.LEVELS:
                low, high = self.interval_of(predictive, level).T
                covered = (low <= y) & (y <= high)
                width = float((high - low).mean())
                scores[f"conformal coverage {level:.0%}"] = float(covered.mean())
                scores[f"conformal width {level:.0%}"] = width if np.isfinite(width) else "infinite"
        else:
            scores["conformal intervals"] = (
                f"none: they were calibrated with refit {self.conformal_.refit!r}"
            )

        return scores | _label_interval_scores(predictive_scores)

    def __sklearn_tags__(self) -> Any:
        """Return the tags of a table estimator, with the targets that the likelihood takes."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = self.likelihood in (AUTO, GAUSSIAN)
        tags.target_tags.positive_only = self.likelihood in (POISSON, POSITIVE, *ON_SCALE)
        return tags


def _label_interval_scores(scores: dict[str, Any]) -> dict[str, Any]:
    """Return the scores with "predictive" before the names of those of intervals.

    These names distinguish the intervals of the predictive from the conformal intervals.
    """
    return {
        f"predictive {name}" if name.startswith(INTERVAL_SCORES) else name: value
        for name, value in scores.items()
    }


def varies_by_factors(y: np.ndarray) -> bool:
    """Return whether targets y (n,) may fit a logarithmic scale better.

    This is so if none is negative, and the largest is several times a low quantile.
    """
    return bool(y.min() >= 0) and bool(FACTOR * np.quantile(y, LOW) < y.max() < LARGEST)
