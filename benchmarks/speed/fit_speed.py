"""The time of a fit to many rows, in units of scikit-learn's HistGradientBoosting.

Ten columns of numbers; y is a smooth function of them with noise that depends on x (classes: its
three thirds). The goal is at most ten times the booster's time for a million rows. Each fit is a
process of its own, so that its peak memory is its own.

    python benchmarks/speed/fit_speed.py [--rows 1000000] [--task regression|classes]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
import warnings

import numpy as np

METHODS = ("HistGradientBoosting", "ssla", "nothing")


def table(rows: int, seed: int, task: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 10))
    y = (
        np.sin(2 * x[:, 0])
        + x[:, 1] * x[:, 2]
        + np.abs(x[:, 3])
        + np.exp(0.5 * x[:, 4]) * 0.5 * rng.normal(size=rows)
    )
    return x, y if task == "regression" else np.digitize(y, [0.0, 1.5])


def run(method: str, task: str, rows: int) -> None:
    """One fit: elapsed and processor seconds, peak memory in MiB, error of the mean (or
    log-loss) on other rows.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    from ssla.sklearn import SSLAClassifier, SSLARegressor

    x, y = table(rows, 0, task)
    new, truth = table(10_000, 1, task)
    if method == "nothing":  # memory of the interpreter, the imports and the table
        print(0, 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 0)
        return
    choices = {
        ("HistGradientBoosting", "regression"): HistGradientBoostingRegressor,
        ("HistGradientBoosting", "classes"): HistGradientBoostingClassifier,
        ("ssla", "regression"): SSLARegressor,
        ("ssla", "classes"): SSLAClassifier,
    }
    model = choices[method, task](random_state=0)
    start, used = time.perf_counter(), time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(x, y)
    elapsed, used = time.perf_counter() - start, time.process_time() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if task == "regression":
        error = float(np.sqrt(((model.predict(new) - truth) ** 2).mean()))
    else:
        error = float(-np.log(model.predict_proba(new)[np.arange(len(truth)), truth]).mean())
    print(elapsed, used, peak, error)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--task", choices=("regression", "classes"), default="regression")
    parser.add_argument("--only", choices=METHODS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        run(options.only, options.task, options.rows)
        return
    found = {}
    for method in METHODS:
        command = [
            sys.executable,
            __file__,
            "--rows",
            str(options.rows),
            "--task",
            options.task,
            "--only",
            method,
        ]
        found[method] = [
            float(part)
            for part in subprocess.run(
                command, check=True, capture_output=True, text=True
            ).stdout.split()
        ]
    base = found["HistGradientBoosting"]
    print(f"{options.rows:,} rows, {options.task}")
    print(
        f"{'':<24}{'seconds':>10}{'ratio':>8}{'processor':>11}{'ratio':>8}{'MiB above the table':>22}{'error':>9}"
    )
    for method in METHODS[:2]:
        elapsed, used, peak, error = found[method]
        above = peak - found["nothing"][2]
        print(
            f"{method:<24}{elapsed:>10.1f}{elapsed / base[0]:>8.1f}{used:>11.1f}{used / base[1]:>8.1f}{above:>22.0f}{error:>9.4f}"
        )


if __name__ == "__main__":
    main()
