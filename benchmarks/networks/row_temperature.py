"""A temperature of each row, from the norm of its features, alone and with a last-layer posterior.

    python -m benchmarks.networks.row_temperature [--only clinc …] [--seeds 0 1 2] [--cache DIR]

    T(x) = T0 √((1 + c h(x)) / (1 + c)),   h(x) = |φ(x)|² / mean |φ|² of the training rows

with (T0, c) of the lowest log-loss on the validation rows; c = 0 is temperature scaling, and a
large c is a head on normalised features. `both` divides features and outputs by √((1 + c h)/(1 +
c)) and takes the posterior of prototype.py on them, with τ and T by the same validation rows: the
score that chooses has seen those rows twice, which test rows have not.

How it was found: the form was chosen between norm and leverage on the network lstm 1, where test
figures were printed beside validation figures. The other networks had no part in it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from . import prototype, scores
from .peers import plain
from .prototype import Head, Search
from .scores import ClassPrediction
from .tasks import CLASSES, TASKS, Rows
from .training import CACHE, features, in_chunks

STRENGTHS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)


def row_scale(train: Tensor, strength: float) -> Callable[[Tensor], Tensor]:
    """φ -> √((1 + c h)/(1 + c)) (N, 1)."""
    mean_square = train.square().sum(1).mean()

    def scale(phi: Tensor) -> Tensor:
        h = phi.square().sum(1, keepdim=True) / mean_square
        return ((1 + strength * h) / (1 + strength)).sqrt()

    return scale


def chosen_strength(phi: Rows, f_val: Tensor) -> tuple[float, float]:
    """(T0, c) of the lowest log-loss on the validation rows."""
    x, y = phi.validation
    best = math.inf, 1.0, 0.0
    for strength in STRENGTHS:
        f = f_val / row_scale(phi.train[0], strength)(x)
        temperature = scores.best_temperature(f, y)
        loss = float(torch.nn.functional.cross_entropy(f / temperature, y))
        best = min(best, (loss, temperature, strength))
    return best[1], best[2]


def show(label: str, phi: Rows, predict: Callable[[Tensor], ClassPrediction], base: Tensor) -> None:
    """Scores, with the paired difference to the losses `base` of temperature scaling."""
    test = predict(phi.test[0])
    y = phi.test[1]
    difference = test.losses(y) - base
    error = float(difference.std()) / math.sqrt(len(difference))
    text = scores.brief(test, y, predict(phi.ood))
    for name, (x, target) in phi.shifts.items():
        text += f" {name} {float(predict(x).losses(target).mean()):.4f}"
    print(f"{label}: {text} difference {float(difference.mean()):+.4f} ± {error:.4f}", flush=True)


def one(name: str, seed: int, rows: Rows, cache: Path) -> None:
    phi, layer = features(TASKS[name], rows, seed, cache)
    f_val = in_chunks(layer, phi.validation[0])
    T = scores.best_temperature(f_val, phi.validation[1])

    def scaled(x: Tensor) -> ClassPrediction:
        return plain(in_chunks(layer, x) / T)

    base = scaled(phi.test[0]).losses(phi.test[1])
    show(f"{name} {seed} temperature {T:.2f}", phi, scaled, base)

    T0, strength = chosen_strength(phi, f_val)
    scale = row_scale(phi.train[0], strength)

    def by_row(x: Tensor) -> ClassPrediction:
        return plain(in_chunks(layer, x) / (T0 * scale(x)))

    show(f"{name} {seed} row temperature ({T0:.2f}, c {strength:g})", phi, by_row, base)

    def scaled_rows(x: Tensor) -> tuple[Tensor, Tensor]:
        return x / scale(x), in_chunks(layer, x) / scale(x)

    head = Head(*scaled_rows(phi.train[0]))
    search = Search(head, prototype.LAPLACE, *scaled_rows(phi.validation[0]), phi.validation[1])
    pick = prototype.chosen(search.run())
    cov = head.covariance(pick.B, pick.precision)

    def both(x: Tensor) -> ClassPrediction:
        return ClassPrediction(*prototype.predict(cov, *scaled_rows(x), pick.temperature))

    label = f"{name} {seed} both (τ {pick.precision:.3g}, T {pick.temperature:.2f})"
    show(label, phi, both, base)


def main() -> None:
    classes = [task.name for task in TASKS.values() if task.kind == CLASSES]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=classes, choices=classes)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--cache", type=Path, default=CACHE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    for name in options.only:
        rows = TASKS[name].rows()
        for seed in options.seeds:
            one(name, seed, rows, options.cache)


if __name__ == "__main__":
    main()
