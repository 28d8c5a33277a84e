"""`--tune-trials N`: settings tried by Optuna on rows kept aside, in a SQLite study that a later call continues."""

from __future__ import annotations

from typing import Any

import numpy as np

from ssla.cli.console import progress
from ssla.cli.training import Prepared, Request, make, score, smaller

STUDY_FRACTION = 0.2


def best_options(request: Request, ready: Prepared, quiet: bool) -> dict[str, Any]:
    """The options of the best of all trials so far, this call's and earlier ones'."""
    try:
        import optuna
    except ImportError:
        raise ImportError("--tune-trials needs Optuna: pip install 'ssla[tune]'.") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    output = request.output
    output.parent.mkdir(parents=True, exist_ok=True)
    file = output.with_name(f"{output.name}.study.db")
    name = f"{request.target} from {len(ready.y)} rows and {ready.plan.width} inputs, {ready.likelihood}"
    study = optuna.create_study(
        storage=f"sqlite:///{file}",
        study_name=name,
        load_if_exists=True,
        direction="minimize",
        sampler=optuna.samplers.TPESampler(seed=request.seed),
    )
    rows = np.random.default_rng(request.seed + 1).permutation(len(ready.y))
    count = max(round(STUDY_FRACTION * len(rows)), 2)
    aside, kept = rows[:count], rows[count:]

    def objective(trial: Any) -> float:
        options = _suggest(trial)
        estimator = make(smaller(request), ready.likelihood, options).fit(ready.X[kept], ready.y[kept])
        return score(estimator, ready.X[aside], ready.y[aside])["nll"]

    done = [trial for trial in study.trials if trial.state.is_finished()]
    left = max(request.tune_trials - len(done), 0)
    with progress(left, "tuning", quiet) as advance:
        study.optimize(objective, n_trials=left, callbacks=[lambda s, t: advance(t.number + 1 - len(done))])
    return _options(study.best_params)


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
