"""Coverage and mean size of sets of classes on three tables of scikit-learn: `predictive_set`
beside `predict_set`.

    python benchmarks/accuracy/conformal_classes.py [--sets digits,…] [--splits 5] [--first 300] [--rows 800]
    [--level 0.9] [--flip 0.2]

Seven tenths of the rows for training, at most --rows of them; the others for testing. --flip: that
share of all labels, in training and test, is replaced by another class at random, so that no model
is right more often than the level.
"""

from __future__ import annotations

import argparse
import warnings

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.model_selection import train_test_split

from ssla.sklearn import SSLAClassifier

SETS = {"digits": load_digits, "wine": load_wine, "breast_cancer": load_breast_cancer}


def one_split(name: str, split: int, options: argparse.Namespace) -> list[float]:
    """Accuracy, then coverage and mean size of predict_set and of predictive_set."""
    x, y = SETS[name](return_X_y=True)
    generator, classes = np.random.default_rng(split), len(np.unique(y))
    other = (y + generator.integers(1, classes, len(y))) % classes
    y = np.where(generator.random(len(y)) < options.flip, other, y)
    x, new, y, truth = train_test_split(x, y, test_size=0.3, stratify=y, random_state=split)
    model = SSLAClassifier(random_state=split).fit(x[: options.rows], y[: options.rows])
    found = [float((model.predict(new) == truth).mean())]
    for chosen in (model.predict_set(new, options.level), model.predictive_set(new, options.level)):
        found += [float(chosen[np.arange(len(truth)), truth].mean()), float(chosen.sum(1).mean())]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--first", type=int, default=300, help="seed of the first split")
    parser.add_argument("--rows", type=int, default=800, help="for training at most")
    parser.add_argument("--level", type=float, default=0.9)
    parser.add_argument("--flip", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| | accuracy | predict_set | predictive_set |\n|---|---|---|---|")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            "polish moved|The network is not at the mode|Tuning ended at the edge",
            UserWarning,
        )
        for name in options.sets.split(","):
            splits = range(options.first, options.first + options.splits)
            right, *sets = np.mean([one_split(name, split, options) for split in splits], 0)
            cells = [
                f"{100 * coverage:.1f} / {size:.2f}"
                for coverage, size in zip(sets[::2], sets[1::2], strict=True)
            ]
            print(f"| {name} | {100 * right:.1f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
