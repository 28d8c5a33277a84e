"""Coverage of `predictive_set` by simulation: rows and new rows are drawn anew each time."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L

REPEATS, ROWS, NEW = 60, 30, 10


def simulated(model, level, seed):
    """The share of new rows inside, and its standard error over the repeats."""
    rng = np.random.default_rng(seed)
    shares = []
    for _ in range(REPEATS):
        x = torch.tensor(rng.standard_t(4, size=(ROWS + NEW, 2)))
        likelihood, outputs, y = model(x, rng)
        post = ssla.fit(
            nn.Linear(2, outputs).double(),
            (x[:ROWS], y[:ROWS]),
            likelihood=likelihood,
            prior=ssla.priors.Gaussian(1.0),
        )
        found, new = post.predictive_set(x[ROWS:], level), y[ROWS:]
        if found.dtype == torch.bool:
            inside = found.gather(1, new[:, None]).squeeze(1)
        else:
            inside = (found[:, 0] <= new) & (new <= found[:, 1])
        shares.append(float(inside.double().mean()))
    return np.mean(shares), np.std(shares) / math.sqrt(REPEATS)


def numbers(x, rng):
    """A linear mean, and noise that is skewed and depends on x: the model is wrong."""
    noise = torch.tensor(rng.exponential(size=len(x))) * (0.2 + x[:, 0].abs())
    return L.Gaussian(noise=0.5), 1, x[:, 0] + noise


def classes(x, rng):
    logits = torch.stack([2 * x[:, 0], x[:, 1] ** 2, torch.zeros(len(x))], 1)
    noise = torch.tensor(rng.gumbel(size=logits.shape))
    return L.Categorical(), 3, (logits + noise).argmax(1)


def two_classes(x, rng):
    chance = torch.sigmoid(3 * x[:, 0].sin())
    return L.Bernoulli(), 1, (torch.tensor(rng.uniform(size=len(x))) < chance).long()


@pytest.mark.filterwarnings("ignore:The residuals are")
@pytest.mark.parametrize("level", [0.5, 0.9])
@pytest.mark.parametrize("model", [numbers, classes, two_classes], ids=lambda model: model.__name__)
def test_sets_cover_at_least_their_level(model, level):
    """Exact for a linear model with Gaussian noise. Of n + 1 ranks at most one is given away."""
    share, error = simulated(model, level, seed=1)
    assert share > level - 3 * error
    if model is numbers:
        assert share < level + 1 / (ROWS + 1) + 3 * error
