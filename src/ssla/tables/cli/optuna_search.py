"""`--tune-trials N`: Optuna tries settings on held-out training rows, in a SQLite study that a
later call continues.

The name of a study contains a hash of its rows and settings, so that trials of another table are
not continued.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ssla.tables.cli.console import progress
from ssla.tables.cli.train import Request, make, shuffled, smaller, without_mixtures
from ssla.tables.columns import Encoded

STUDY_FRACTION = 0.2


def best_options(
    request: Request, rows: Encoded, y: np.ndarray, likelihood: str, quiet: bool
) -> tuple[dict[str, Any], str]:
    """The options of the best trial on these training rows, including earlier calls; and
    whether there were any.
    """
    try:
        import optuna
    except ImportError:
        raise ImportError("--tune-trials needs Optuna: pip install 'ssla[tune]'.") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    output = request.output
    output.parent.mkdir(parents=True, exist_ok=True)
    file = output.with_name(f"{output.name}.study.db")
    study = optuna.create_study(
        storage=f"sqlite:///{file}",
        study_name=f"{request.target}, {likelihood}, {_fingerprint(request, rows.values, y)}",
        load_if_exists=True,
        direction="minimize",
    )
    done = sum(trial.state == optuna.trial.TrialState.COMPLETE for trial in study.trials)
    left = max(request.tune_trials - done, 0)
    study.sampler = optuna.samplers.TPESampler(
        seed=request.seed + len(study.trials)
    )  # do not repeat earlier trials
    order, most = shuffled(y, likelihood, request.seed + 1)
    count = min(max(round(STUDY_FRACTION * len(y)), 2), most)
    aside, kept = order[:count], order[count:]

    def objective(trial: Any) -> float:
        estimator = make(smaller(request), likelihood, _suggest(trial))
        estimator.fit(rows[kept], y[kept])
        return float(estimator.evaluate(without_mixtures(rows[aside]), y[aside])["nll"])

    with progress(left, "tuning", quiet) as advance:
        study.optimize(
            objective, n_trials=left, callbacks=[lambda s, t: advance(t.number + 1 - done)]
        )
    return _options(
        study.best_params
    ), f"continued with {done} earlier trials" if done else "new study"


def _fingerprint(request: Request, X: np.ndarray, y: np.ndarray) -> str:
    """A digest of what the score of a trial depends on: the rows, and the request without paths
    and number of trials.
    """
    settings = replace(smaller(request), data=Path(), output=Path(), tune_trials=0)
    digest = hashlib.sha256(f"{settings} {X.shape} {y.tolist()}".encode())
    digest.update(np.ascontiguousarray(X).tobytes())
    return digest.hexdigest()[:16]


def _suggest(trial: Any) -> dict[str, Any]:
    trial.suggest_categorical("width", [25, 50, 100])
    trial.suggest_int("layers", 1, 3)
    trial.suggest_categorical("activation", ["silu", "relu", "tanh"])
    trial.suggest_float("learning_rate", 1e-3, 3e-2, log=True)
    trial.suggest_float("prior_precision", 1e-2, 1e2, log=True)
    return _options(trial.params)


def _options(found: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in found.items() if name not in ("width", "layers")}
    return {"hidden": (int(found["width"]),) * int(found["layers"]), **rest}
