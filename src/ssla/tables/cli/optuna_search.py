"""`--tune-trials N`: Optuna tries settings on held-out training rows.

The trials are in a SQLite study that a later call continues. The name of a study contains a hash of
its rows and settings, so that trials of another table are not continued.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ssla.tables.cli.console import show_progress
from ssla.tables.cli.train import (
    Request,
    make_estimator,
    make_one_network_request,
    shuffle_rows,
    without_mixtures,
)
from ssla.tables.columns import Encoded

STUDY_FRACTION = 0.2  # of the training rows, which score the trials: a guess


def search_options(
    request: Request, rows: Encoded, y: np.ndarray, likelihood: str, quiet: bool
) -> tuple[dict[str, Any], str]:
    """Run the trials that are missing, and return the options of the best trial.

    Also returns a text on whether earlier trials were continued. Trials are kept in a SQLite file
    beside the output. Raises ImportError if Optuna is not installed.

    rows, y (n,): training rows and their targets.  likelihood: its name in the request, or
    "classes".  quiet: whether there is no progress bar.
    """
    study, done = _open_study(request, rows, y, likelihood)
    missing_trials = max(request.tune_trials - done, 0)

    # Another seed than that of the test rows. At least two rows score a trial.
    order, most_held_out = shuffle_rows(y, likelihood, request.seed + 1)
    count = min(max(round(STUDY_FRACTION * len(y)), 2), most_held_out)
    held_out = order[:count]
    kept = order[count:]

    def score_trial(trial: Any) -> float:
        """Train one network with the options of a trial, and return its mean NLL at held-out rows.

        The NLL is the negative log-likelihood.
        """
        estimator = make_estimator(
            make_one_network_request(request), likelihood, _suggest_options(trial)
        )
        estimator.fit(rows[kept], y[kept])
        return float(estimator.evaluate(without_mixtures(rows[held_out]), y[held_out])["nll"])

    # Trials are numbered over all calls, and the bar shows those of this call.
    with show_progress(missing_trials, "tuning", quiet) as advance:
        study.optimize(
            score_trial,
            n_trials=missing_trials,
            callbacks=[lambda study, trial: advance(trial.number + 1 - done)],
        )

    history = f"continued with {done} earlier trials" if done else "new study"
    return _make_estimator_options(study.best_params), history


def _open_study(request: Request, rows: Encoded, y: np.ndarray, likelihood: str) -> tuple[Any, int]:
    """Open or create the Optuna study of a request, and count its finished trials.

    Returns the study and this number. The arguments and the ImportError are those of
    `search_options`.
    """
    try:
        import optuna
    except ImportError:
        raise ImportError("--tune-trials needs Optuna: pip install 'ssla[tune]'.") from None

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    output = request.output
    output.parent.mkdir(parents=True, exist_ok=True)
    database = output.with_name(f"{output.name}.study.db")
    study = optuna.create_study(
        storage=f"sqlite:///{database}",
        study_name=f"{request.target}, {likelihood}, {_hash_study(request, rows.values, y)}",
        load_if_exists=True,
        direction="minimize",
    )
    done = sum(trial.state == optuna.trial.TrialState.COMPLETE for trial in study.trials)

    # With the seed of the first call, the sampler would repeat earlier trials.
    study.sampler = optuna.samplers.TPESampler(seed=request.seed + len(study.trials))
    return study, done


def _hash_study(request: Request, X: np.ndarray, y: np.ndarray) -> str:
    """Return a hash of all that the score of a trial depends on, as 16 hexadecimal digits.

    That is the rows X (n, d) and y (n,), and the request without paths and number of trials.
    """
    settings = replace(make_one_network_request(request), data=Path(), output=Path(), tune_trials=0)
    digest = hashlib.sha256(f"{settings} {X.shape} {y.tolist()}".encode())
    digest.update(np.ascontiguousarray(X).tobytes())
    return digest.hexdigest()[:16]


def _suggest_options(trial: Any) -> dict[str, Any]:
    """Let Optuna choose the parameters of a trial, and return them as options of an estimator.

    The parameters are stored in the trial. The ranges are guesses.
    """
    trial.suggest_categorical("width", [25, 50, 100])
    trial.suggest_int("layers", 1, 3)
    trial.suggest_categorical("activation", ["silu", "relu", "tanh"])
    trial.suggest_float("learning_rate", 1e-3, 3e-2, log=True)
    trial.suggest_float("prior_precision", 1e-2, 1e2, log=True)
    return _make_estimator_options(trial.params)


def _make_estimator_options(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a trial as options of an estimator.

    The option `hidden` is in place of the parameters "width" and "layers".
    """
    options = dict(parameters)
    width = int(options.pop("width"))
    layers = int(options.pop("layers"))
    return {"hidden": (width,) * layers, **options}
