"""The rows of the stated experiment: one toy set and eight UCI sets, coded as the text says.

Binary columns are 0 and 1, categories are one column for each code ("one-hot"), and continuous
inputs and the target are standardised, here by the training rows. A fifth of the rows is for
testing, and a fifth of the rest validates training and search. Of the four larger sets 50 test rows
are scored.

Which columns are categories is not stated. Here they are those whose codes have no order, or a
cyclic one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.model_selection import train_test_split
from torch import Tensor

from ssla_paper.heteroscedastic.data import toy
from ssla_paper.uci.data import SETS, load, split

TOY = "toy"
TOY_ROWS, TOY_SEED = 100, 10_000  # fresh test rows, and the first seed of theirs
VALIDATION_SHARE = 0.2  # of the rows that are not for testing; the text does not say how many
SCORED = 50  # test rows of a larger set
CATEGORIES = {  # positions among the inputs, in the order of the file
    "auto_mpg": (6,),  # origin
    "bike_sharing_hour": (0, 2, 3, 5, 7),  # season, mnth, hr, weekday, weathersit
    "daily_demand_orders": (0, 1),  # week of the month, day of the week
}
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Case:
    """Rows of one set and split, x (n, d) and y (n,) float64, y standardised by training rows.

    unit: the standard deviation of all targets of the set, as a multiple of that of the training
    rows; published scores have this unit.
    """

    train: Pair
    validation: Pair
    test: Pair
    unit: float


def encode(x: np.ndarray, categories: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the coded columns (n, d'), and which of them are continuous (d',).

    A column with two values becomes 0 and 1; a category becomes one column for each of its codes.
    """
    columns: list[np.ndarray] = []
    continuous: list[bool] = []
    for position, column in enumerate(x.T):
        codes = np.unique(column)
        if position in categories:
            columns += [(column == code).astype(float) for code in codes]
            continuous += [False] * len(codes)
        elif len(codes) == 2:
            columns.append((column == codes[1]).astype(float))
            continuous.append(False)
        else:
            columns.append(column.astype(float))
            continuous.append(True)
    return np.stack(columns, 1), np.array(continuous)


def case(name: str, seed: int) -> Case:
    """Return the rows of a set at the seed of a split (of the toy set: of its rows)."""
    return toy_case(seed) if name == TOY else table_case(name, seed)


def toy_case(seed: int) -> Case:
    """Return the toy set, with fresh test rows of the same law: its own are 25."""
    data = toy(seed)
    return Case(data.train, data.validation, data.fresh(TOY_ROWS, TOY_SEED + seed), 1.0)


def table_case(name: str, seed: int) -> Case:
    """Return a UCI set (or the synthetic stand-in) at one split."""
    rows = load(name)
    x, continuous = encode(rows.x, CATEGORIES.get(name, ()))
    parts = split(len(rows.y), seed)
    kept, held = train_test_split(parts.train, test_size=VALIDATION_SHARE, random_state=seed)
    test = parts.test
    if name in SETS and SETS[name].medium:
        test = np.random.default_rng(seed).choice(test, SCORED, replace=False)
    mean, sd = x[kept].mean(0), x[kept].std(0)
    sd = np.where(sd > 1e-12, sd, 1.0)
    x = np.where(continuous, (x - mean) / sd, x)
    shift, scale = float(rows.y[kept].mean()), float(rows.y[kept].std())
    y = (rows.y - shift) / scale

    def pick(part: np.ndarray) -> Pair:
        return torch.from_numpy(x[part]), torch.from_numpy(y[part])

    return Case(pick(kept), pick(held), pick(test), rows.unit / scale)
