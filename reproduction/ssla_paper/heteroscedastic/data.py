"""The toy set: y = 7 sin x + 3|cos(x/2)| e, with x from three clusters; rows as
ToyHeteroscedasticDatamodule generates them.

In that module numpy's global generator at one seed gives, row by row, a uniform that picks the
cluster, the input and the noise; a tenth of 250 rows is for testing, a tenth for validation, of
which two fifths are set aside for conformal methods. That leaves the paper's 200/15/25. Both
columns are standardised by the training rows. Its default seed is 42, for rows and splits. (One of
its versions drew a single e for all rows, which leaves no noise at all; the published coverages
rule it out.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ssla_paper.peers import library

CLUSTERS = ((-4.0, 0.4), (0.0, 0.9), (4.0, 0.4))  # mean and standard deviation
ROWS, TEST_SHARE, VALIDATION_SHARE, CALIBRATION_SHARE = 250, 0.1, 0.1, 0.4
Pair = tuple[Tensor, Tensor]


def mean(x: np.ndarray) -> np.ndarray:
    return np.asarray(7 * np.sin(x))


def noise(x: np.ndarray) -> np.ndarray:
    """Its standard deviation."""
    return np.asarray(3 * np.abs(np.cos(x / 2)))


def drawn(rows: int, generator: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """x and y, row by row: cluster, input, noise."""
    x, e = np.empty(rows), np.empty(rows)
    for i in range(rows):
        x[i] = generator.normal(*CLUSTERS[int(3 * generator.rand())])
        e[i] = generator.randn()
    return x, mean(x) + noise(x) * e


@dataclass(frozen=True, eq=False)
class Toy:
    """Standardised rows: x (n, 1), y (n,) float64."""

    train: Pair
    validation: Pair
    test: Pair
    scales: tuple[float, float, float, float]  # mean and deviation of x, then of y

    @property
    def known(self) -> Pair:
        """Training and validation rows: the input of a method."""
        return torch.cat([self.train[0], self.validation[0]]), torch.cat(
            [self.train[1], self.validation[1]]
        )

    def standardised(self, x: np.ndarray, y: np.ndarray) -> Pair:
        centre, sd, y_centre, y_sd = self.scales
        return torch.from_numpy((x - centre) / sd)[:, None], torch.from_numpy((y - y_centre) / y_sd)

    def fresh(self, rows: int, seed: int) -> Pair:
        """New rows from the same distribution."""
        return self.standardised(*drawn(rows, np.random.RandomState(seed)))

    def truth(self, x: Tensor) -> Pair:
        """Mean and deviation of y given x, standardised."""
        centre, sd, y_centre, y_sd = self.scales
        at = x[:, 0].numpy() * sd + centre
        return torch.from_numpy((mean(at) - y_centre) / y_sd), torch.from_numpy(noise(at) / y_sd)


def toy(seed: int = 42) -> Toy:
    """The set at this seed, which is the module's default of 42 for rows and splits."""
    split = library("sklearn.model_selection", "scikit-learn").train_test_split
    x, y = drawn(ROWS, np.random.RandomState(seed))
    rest, test = split(np.arange(ROWS), test_size=TEST_SHARE, random_state=seed)
    train, held = split(rest, test_size=VALIDATION_SHARE / (1 - TEST_SHARE), random_state=seed)
    validation, _ = split(held, test_size=CALIBRATION_SHARE, random_state=seed)
    scales = (
        float(x[train].mean()),
        float(x[train].std()),
        float(y[train].mean()),
        float(y[train].std()),
    )
    empty = torch.empty(0)
    bare = Toy((empty, empty), (empty, empty), (empty, empty), scales)
    parts = [bare.standardised(x[rows], y[rows]) for rows in (train, validation, test)]
    return Toy(parts[0], parts[1], parts[2], scales)
