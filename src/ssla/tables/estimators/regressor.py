"""The regressor: numbers and counts."""

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
    check_is_fitted,
    column_or_1d,
)

from ssla import metrics
from ssla._checks import all_in_plain_torch, one_of, warn
from ssla._checks import level as checked_level
from ssla.curvature.structure import NoFactorError
from ssla.fitting.mode import NoModeError
from ssla.likelihoods.support import LARGEST_COUNT, Counts
from ssla.predictive import Predictive
from ssla.predictive.positive import Positive
from ssla.predictive.predictive import probabilities
from ssla.predictive.transformed import Transform
from ssla.tables.estimators.estimator import (
    AUTO,
    OnEpoch,
    TableEstimator,
    flag,
    numbers,
    whole_or_real,
)
from ssla.tables.estimators.inputs import check_target_size
from ssla.tables.estimators.related import Related
from ssla.tables.estimators.split_conformal import Conformal
from ssla.tables.estimators.targets import check_numeric
from ssla.tables.estimators.whole_fits import all_or_nothing
from ssla.tables.networks import CONTINUOUS, ON_SCALE, Ensemble
from ssla.tables.networks.count_targets import (
    POISSON,
    may_be_poisson,
    prefer_counts,
    worth_counting,
)
from ssla.tables.networks.ensemble import GAUSSIAN, HETEROSCEDASTIC, POSITIVE

FEWEST_ROWS = 60  # for a noise that depends on x
FACTOR, LARGEST = 3.0, 1e100  # of targets for which a logarithmic scale is tried
NAMES = (AUTO, *CONTINUOUS, POISSON)
OF_INTERVALS = ("coverage", "width")  # scores


@all_in_plain_torch
class SSLARegressor(RegressorMixin, TableEstimator):  # type: ignore[misc]
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

    @all_or_nothing
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
        """Train, fit and tune.

        X (n, d), y (n,) or (n, D), sample_weight (n,): a row of weight 2 counts as two rows. X may
        also be rows that `TableEncoder(codes=True)` has encoded: its plan is kept.

        Masked cells of X are gaps; masked targets and weights are refused, and so are dates as
        targets.

        groups (n,): rows of one group (a patient, a shop) belong together: whole groups are held
        out, and calibrate conformal intervals. time (n,) numbers or dates: the latest rows are held
        out. Either gives the error on new groups or later rows. on_epoch: is called with the number
        of each finished epoch, in place of the bar of `verbose`.
        """
        one_of("likelihood", self.likelihood, NAMES)
        conformal = flag(self, "conformal")
        check_numeric(y)
        given, y = self._read(X, y, multi_output=True, y_numeric=True)
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        y = np.asarray(y, dtype=np.float64)
        present, weights = self._present(len(y), sample_weight)
        self._check_target(y[present])
        related = Related.of(groups, time, len(y))
        whole = np.flatnonzero(present)
        kept, aside = self._set_aside(whole, related[whole]) if conformal else (whole, np.arange(0))
        rows = self._encode(given, np.isin(np.arange(len(y)), kept))
        self.ensemble_ = self._fit_target(
            numbers(rows)[kept], y[kept], weights[kept], related[kept], on_epoch
        )
        self.n_iter_ = self.ensemble_.epochs
        self.conformal_ = None
        if conformal:
            predictive = self._predict_rows(rows[aside])
            self.conformal_ = Conformal.of(
                predictive, y[aside], weights[aside], self.refit, self.ensemble_.scale
            )
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> SSLARegressor:
        """Add rows to a fitted model in one pass over them: the networks, the noise and the prior
        stay, the last layers are those of a fit to all rows (with likelihoods other than Gaussian
        an approximation). The first call is `fit`.
        """
        if not hasattr(self, "ensemble_"):
            return self.fit(X, y, sample_weight)
        if self.conformal_ is not None:
            raise ValueError(
                "The conformal scores hold for the fitted model only. Use conformal=False for "
                "partial_fit, or fit again."
            )
        rows, present, weights = self._more_rows(X, sample_weight)
        check_numeric(y)
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
        self._update(rows[present], target[present], weights[present])
        return self

    def _likelihood(self, y: np.ndarray) -> str:
        """The likelihood by name; "auto" decides by y, its rows and the weights."""
        if self.likelihood != AUTO:
            return str(self.likelihood)
        return (
            HETEROSCEDASTIC
            if y.ndim == 1 and len(y) >= FEWEST_ROWS and self.weights == "last_layer"
            else GAUSSIAN
        )

    def _fit_target(
        self,
        X: np.ndarray,
        y: np.ndarray,
        weights: np.ndarray,
        related: Related,
        on_epoch: OnEpoch | None,
    ) -> Ensemble:
        """The ensemble; "auto" takes the target's own scale, then with a warning constant
        noise, where a fit is impossible.
        """
        likelihood = self._likelihood(y)
        self._settings(likelihood, len(y))  # wrong settings are refused here
        decides = self.likelihood == AUTO and likelihood == HETEROSCEDASTIC
        tries: list[tuple[str, str | None]] = (
            [(likelihood, POSITIVE)] if decides and varies_by_factors(y) else []
        )
        tries += [(likelihood, None), (GAUSSIAN, None)] if decides else [(likelihood, None)]
        problem = ""
        for name, rival in tries:
            try:
                numbers = self._fit_rows(
                    X, y, weights, name, related, rival=rival, on_epoch=on_epoch
                )
                break
            except (NoFactorError, NoModeError) as error:
                problem = str(error).split(":")[0]
                if (name, rival) == tries[-1]:
                    raise
        counts = self._fit_counts(numbers, X, y, weights, related, on_epoch) if decides else None
        if counts is None and decides and name == GAUSSIAN:
            warn(
                "A noise that depends on x could not be fitted, as where the networks meet the "
                "training rows exactly (no noise, or many columns): constant noise was used. Give "
                f"likelihood='gaussian' to choose it. ({problem})"
            )
        return numbers if counts is None else counts

    def _fit_counts(
        self,
        numbers: Ensemble,
        X: np.ndarray,
        y: np.ndarray,
        weights: np.ndarray,
        related: Related,
        on_epoch: OnEpoch | None,
    ) -> Ensemble | None:
        """A Poisson fit to small counts, if it predicts held-out rows better than the fit to
        numbers; otherwise None.
        """
        x, target, w = (torch.from_numpy(part.copy()) for part in (X, y, weights))
        if not (may_be_poisson(target, w) and worth_counting(numbers, x, target, w)):
            return None
        try:
            counts = self._fit_rows(
                X,
                y,
                weights,
                POISSON,
                related,
                seed=numbers.settings.seed,
                on_epoch=on_epoch,
            )
        except (NoFactorError, NoModeError, FloatingPointError):
            return None
        return counts if prefer_counts(numbers, counts, x, target, w) else None

    def _check_target(self, y: np.ndarray) -> None:
        if self.likelihood not in (AUTO, GAUSSIAN) and y.ndim == 2:
            raise ValueError(
                f"likelihood={self.likelihood!r} needs one target, but y has {y.shape[1]} columns. "
                "Fit one for each."
            )
        if bool((y == y[:1]).all(0).any()):
            raise ValueError("The target y is constant, so there is nothing to predict.")
        check_target_size(y)
        scale = Positive(0.0, 1.0) if self.likelihood == POSITIVE else ON_SCALE.get(self.likelihood)
        self._check_support(y, self.likelihood, scale)

    def _check_support(self, y: np.ndarray, likelihood: str, scale: Transform | None) -> None:
        if scale is not None and not bool(scale.inside(torch.from_numpy(y)).all()):
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
        if likelihood == POISSON:  # before the networks are trained
            Counts(LARGEST_COUNT).check(torch.from_numpy(y.flatten()), 1)

    def _set_aside(self, rows: np.ndarray, related: Related) -> tuple[np.ndarray, np.ndarray]:
        whole_or_real(self, "calibration_fraction", float, 0, strict=True)
        if not self.calibration_fraction < 1:
            raise ValueError(
                "calibration_fraction must be between 0 and 1, but is "
                f"{self.calibration_fraction!r}."
            )
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        if related.given:
            chosen = related.aside(self.calibration_fraction, seed)
            kept, aside = rows[~chosen], rows[chosen]
        else:
            kept, aside = train_test_split(
                rows, test_size=self.calibration_fraction, random_state=seed
            )
        if len(kept) < 2:
            raise ValueError(
                f"conformal=True leaves {len(kept)} of n_samples={len(rows)} for the fit, which "
                "needs at least two. Use more rows or a smaller calibration_fraction."
            )
        return np.sort(kept), np.sort(aside)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The predictive mean (N,), and with return_std its standard deviation (noise included)."""
        p = self.predict_dist(X)
        return (p.mean.numpy(), p.stddev.numpy()) if return_std else p.mean.numpy()

    def predict_interval(self, X: Any, level: float = 0.95) -> np.ndarray:
        """Central interval (N, 2), or (N, D, 2); with conformal=True its coverage is at least
        the level.
        """
        return self.interval_of(self.predict_dist(X), level)

    def predictive_set(self, X: Any, level: float = 0.95) -> np.ndarray:
        """Approximate conformal intervals (N, 2) without calibration rows, for one target: see
        `Posterior.predictive_set`.

        A new row is compared with the rows that each network held out of its training, by the
        network that held them out, with the mean of the networks' outputs at the new row, without
        trees. The guarantee is approximate: these rows also stopped the training, and chose the
        noise and the prior, and one network errs more than the mean of all. Not for a model from a
        file, nor for rows with missing or unknown inputs.
        """
        found: np.ndarray = self.ensemble_.predictive_set(
            self._complete_rows(X, "predict_interval"), level
        ).numpy()
        return found

    def interval_of(self, predictive: Predictive, level: float) -> np.ndarray:
        """`predict_interval` from an existing predictive, for example for several levels."""
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
        """The scores of rows with known y (n,), as `ssla evaluate` gives them: NLL, CRPS, RMSE,
        coverage, width. With conformal=True coverage and width are also those of the conformal
        intervals.
        """
        predictive = self.predict_dist(X)
        scores: dict[str, Any] = dict(metrics.summary(predictive, y).scores)
        if self.conformal_ is None:
            return scores
        found: dict[str, Any] = {name: scores[name] for name in ("nll", "crps", "rmse")}
        if not self.conformal_.holds_for(self.refit):
            found["conformal intervals"] = (
                f"none: they were calibrated with refit {self.conformal_.refit!r}"
            )
            return found | _of_predictive(scores)
        for level in metrics.LEVELS:
            low, high = self.interval_of(predictive, level).T
            width = float((high - low).mean())
            found[f"conformal coverage {level:.0%}"] = float(((low <= y) & (y <= high)).mean())
            found[f"conformal width {level:.0%}"] = width if np.isfinite(width) else "infinite"
        return found | _of_predictive(scores)

    def predict_quantiles(self, X: Any, q: Any = (0.05, 0.25, 0.5, 0.75, 0.95)) -> np.ndarray:
        """Quantiles (N, k) for probabilities q (k,); (N,) for one number. D targets: (N, D, k)."""
        check_is_fitted(self, "ensemble_")
        probabilities(q)
        p: Any = self.predict_dist(X)
        quantiles: np.ndarray = p.icdf(np.asarray(q, dtype=np.float64)).numpy()
        return quantiles

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = self.likelihood in (AUTO, GAUSSIAN)
        tags.target_tags.positive_only = self.likelihood in (POISSON, POSITIVE, *ON_SCALE)
        return tags


def _of_predictive(scores: dict[str, Any]) -> dict[str, Any]:
    """Scores of a conformal model's predictive, labelled to distinguish them from those of its
    intervals.
    """
    return {
        f"predictive {name}" if name.startswith(OF_INTERVALS) else name: value
        for name, value in scores.items()
    }


def varies_by_factors(y: np.ndarray) -> bool:
    """Whether targets (n,) are not negative, and some are several times others: a logarithmic
    scale may fit them better.
    """
    return bool(y.min() >= 0) and bool(FACTOR * np.quantile(y, 0.05) < y.max() < LARGEST)
