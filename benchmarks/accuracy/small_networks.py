"""Small trained networks, sets of classes and tables for the benchmarks `last_layers.py` and
`class_sets.py`.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from sklearn import datasets
from torch import Tensor, nn

import ssla
from ssla.likelihoods import Likelihood

LAPLACE, VARIATIONAL = "laplace", "variational"
ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}
MOST_LEVELS = 30  # of a text column; later levels are one level together


class Split(NamedTuple):
    """Rows that train the features, rows that only early stopping has seen, test rows, and
    out-of-distribution inputs.
    """

    x: Tensor
    y: Tensor
    x_held: Tensor
    y_held: Tensor
    x_test: Tensor
    y_test: Tensor
    x_ood: Tensor
    outputs: int


# --- ssla.fit, with or without the argument `gaussian` ------------------------------------------


def available(gaussians: Sequence[str]) -> list[str]:
    """The Gaussians that this version of `ssla.fit` can make. Says which ones are skipped."""
    accepted = "gaussian" in inspect.signature(ssla.fit).parameters
    kept = [name for name in gaussians if accepted or name == LAPLACE]
    for name in gaussians:
        if name not in kept:
            print(
                f'Skipped: gaussian="{name}". This version of ssla.fit has no argument "gaussian"; '
                f'its posterior is "{LAPLACE}".'
            )
    if not kept:
        raise SystemExit("There is nothing to run.")
    return kept


def fit(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    likelihood: Likelihood,
    gaussian: str,
    prior: Any = None,
    **options: Any,
) -> ssla.Posterior:
    """`ssla.fit`, with `gaussian` where it is accepted."""
    if "gaussian" in inspect.signature(ssla.fit).parameters:
        options["gaussian"] = gaussian
    return ssla.fit(model, (x, y), likelihood=likelihood, prior=prior, **options)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that a network is not at the mode, or that tuning ended at the edge
    of its range.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- networks -----------------------------------------------------------------------------------


def perceptron(
    inputs: int, hidden: Sequence[int], outputs: int, activation: str = "tanh"
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, following in pairwise((inputs, *hidden)):
        layers += [nn.Linear(width, following), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], outputs)).double()


def convolutional(outputs: int) -> nn.Sequential:
    """Two convolutions with batch norm, for images of 8 × 8 pixels given as rows (N, 64)."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Linear(32, outputs),
    ).double()


def train(
    model: nn.Module,
    likelihood: Likelihood,
    split: Split,
    seed: int,
    epochs: int = 300,
    batch: int = 64,
    rate: float = 3e-3,
    precision: float = 1.0,
    patience: int = 40,
) -> nn.Module:
    """Adam with weight decay `precision`/n; the weights of the epoch with the lowest loss on
    the early-stopping rows.
    """
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    n, lowest, found, best = len(split.x), float("inf"), 0, model.state_dict()
    for epoch in range(epochs):
        model.train()
        for rows in torch.randperm(n, generator=generator).split(batch):
            if len(rows) < 2:  # batch norm needs two rows
                continue
            optimiser.zero_grad()
            decay = 0.5 * precision / n * sum((p**2).sum() for p in model.parameters())
            (decay - likelihood.log_prob(split.y[rows], model(split.x[rows])).mean()).backward()
            optimiser.step()
        model.eval()
        with torch.no_grad():
            loss = -float(likelihood.log_prob(split.y_held, model(split.x_held)).mean())
        if loss < lowest:
            lowest, found, best = (
                loss,
                epoch,
                {name: value.clone() for name, value in model.state_dict().items()},
            )
        elif epoch - found >= patience:
            break
    model.load_state_dict(best)
    return model.eval()


# --- sets of classes ----------------------------------------------------------------------------


def _standardised(split: Split) -> Split:
    """By the rows that train the network."""
    mean, scale = split.x.mean(0), split.x.std(0)
    scale = torch.where(scale > 1e-9, scale, 1.0)
    parts = {
        name: (getattr(split, name) - mean) / scale for name in ("x", "x_held", "x_test", "x_ood")
    }
    return split._replace(**parts)


def _divided(
    x: np.ndarray, y: np.ndarray, seed: int, sizes: tuple[float, float], outputs: int
) -> Split:
    """A random split into training, early-stopping and test rows.

    `sizes`: of the first two, as shares or as counts.
    """
    order = np.random.default_rng(seed).permutation(len(y))
    first, second = (int(size if size > 1 else size * len(y)) for size in sizes)
    parts = np.split(order, [first, first + second])
    rows = [
        part
        for index in parts
        for part in (torch.from_numpy(x[index]).double(), torch.from_numpy(y[index]).long())
    ]
    return Split(*rows, x_ood=torch.empty(0, x.shape[1], dtype=torch.float64), outputs=outputs)


def permuted_pixels(x: Tensor, seed: int) -> Tensor:
    """Each image with its own permutation of the pixels."""
    places = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)).argsort(1)
    return x.gather(1, places)


def far_inputs(x: Tensor, rows: int, seed: int) -> Tensor:
    """Standardised inputs in random directions, three times as far from the centre as the
    training rows are on average.
    """
    direction = torch.randn(
        rows, x.shape[1], dtype=x.dtype, generator=torch.Generator().manual_seed(seed)
    )
    return direction / direction.norm(dim=1, keepdim=True) * 3 * x.norm(dim=1).mean()


def digits(
    seed: int, train_rows: int = 600, held_rows: int = 200, test_rows: int | None = None
) -> Split:
    """Ten classes, pixels divided by 16.

    Out of distribution: the test images with permuted pixels.
    """
    images, labels = datasets.load_digits(return_X_y=True)
    split = _divided(images / 16, labels, seed, (train_rows, held_rows), 10)
    split = split._replace(x_test=split.x_test[:test_rows], y_test=split.y_test[:test_rows])
    return split._replace(x_ood=permuted_pixels(split.x_test, seed))


def few_digits(
    seed: int, train_rows: int = 450, held_rows: int = 150, test_rows: int | None = None
) -> Split:
    """Digits 0 to 4. Out of distribution: digits 5 to 9."""
    images, labels = datasets.load_digits(return_X_y=True)
    home = labels < 5
    split = _divided(images[home] / 16, labels[home], seed, (train_rows, held_rows), 5)
    foreign = np.random.default_rng(seed).permutation(images[~home] / 16)
    ood = torch.from_numpy(foreign).double()[: test_rows or len(split.x_test)]
    return split._replace(
        x_test=split.x_test[:test_rows], y_test=split.y_test[:test_rows], x_ood=ood
    )


def _far(split: Split, seed: int) -> Split:
    split = _standardised(split)
    return split._replace(x_ood=far_inputs(split.x, len(split.x_test), seed))


def wine(seed: int) -> Split:
    x, y = datasets.load_wine(return_X_y=True)
    return _far(_divided(x, y, seed, (0.5, 0.2), 3), seed)


def breast_cancer(seed: int) -> Split:
    x, y = datasets.load_breast_cancer(return_X_y=True)
    return _far(_divided(x, y, seed, (0.5, 0.2), 2), seed)


def moons(seed: int, train_rows: int = 150, held_rows: int = 60, test_rows: int = 500) -> Split:
    x, y = datasets.make_moons(train_rows + held_rows + test_rows, noise=0.3, random_state=seed)
    return _far(_divided(x, y, seed, (train_rows, held_rows), 2), seed)


# --- tables -------------------------------------------------------------------------------------


def class_tables(folder: Path) -> list[str]:
    """The names of the class tables, from the list in the folder's README.md."""
    lines = (folder / "README.md").read_text().splitlines()
    cells = [
        [cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| classes")
    ]
    return [row[2].removesuffix(".csv") for row in cells]


def class_table(folder: Path, name: str, seed: int, most_rows: int) -> Split:
    """60% of the rows train, 15% are for early stopping, 25% are the test.

    Text columns become indicators.

    Gaps of numbers are filled by the median of the training rows and get an indicator.
    """
    frame = pd.read_csv(folder / f"{name}.csv")
    frame = frame.sample(frac=1, random_state=seed)[:most_rows].reset_index(drop=True)
    labels, y = np.unique(frame.iloc[:, -1].astype(str), return_inverse=True)
    size = int(0.6 * len(y))
    columns: list[np.ndarray] = []
    for column in frame.columns[:-1]:
        values = frame[column]
        if pd.api.types.is_numeric_dtype(values):
            columns.append(values.fillna(values[:size].median()).fillna(0.0).to_numpy(float))
            if values.isna().any():
                columns.append(values.isna().to_numpy(float))
        else:
            levels = values.astype(object).where(values.notna(), "missing").astype(str)
            columns += [
                (levels == level).to_numpy(float)
                for level in levels[:size].value_counts().index[:MOST_LEVELS]
            ]
    x, target = torch.from_numpy(np.stack(columns, 1)), torch.from_numpy(y).long()
    sizes = [size, int(0.15 * len(y)), len(y) - size - int(0.15 * len(y))]
    parts = [
        part for pair in zip(x.split(sizes), target.split(sizes), strict=True) for part in pair
    ]
    return _standardised(Split(*parts, x_ood=x[:0], outputs=len(labels)))


# --- output -------------------------------------------------------------------------------------


def spread(values: Sequence[float], digits: int = 1, form: str = "e") -> str:
    """The mean ± standard deviation over seeds."""
    found = np.asarray(values, dtype=float)
    deviation = found.std(ddof=1) if len(found) > 1 else 0.0
    return f"{found.mean():.{digits}{form}} ± {deviation:.{digits - (form == 'e')}{form}}"


def write_json(path: Path | None, options: dict[str, Any], records: list[dict[str, Any]]) -> None:
    if path is not None:
        shown = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in options.items()
        }
        path.write_text(json.dumps({"options": shown, "records": records}, indent=1) + "\n")
