"""Monte Carlo dropout: the paper's network with dropout after each hidden layer, active in
predictions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ssla_paper.networks import Recipe, perceptron, squared_error, train
from ssla_paper.peers import GaussianMixture

RATES = (0.02, 0.1)
VALIDATION, FEW_ROWS = 0.1, 30
NOISES = tuple(10 ** (k / 20) for k in range(-60, 11))  # of a standardised target


def mc_dropout(
    x: Tensor,
    y: Tensor,
    new: Tensor,
    *,
    rate: float | Sequence[float] = RATES,
    draws: int = 100,
    seed: int = 0,
    recipe: Recipe | None = None,
) -> GaussianMixture:
    """p(y|new) as a mixture over draws of the dropped units; x (n, d), y (n,), new (N, d),
    standardised.

    A tenth of the rows is held out (for small sets up to thirty): for early stopping, and to choose
    the noise σ and one of several rates by the likelihood of those rows under the mixture. σ is at
    least that of the training residuals, because early stopping selected the best epoch on the
    held-out rows. Torch's global random state is restored.
    """
    rates = (rate,) if isinstance(rate, float | int) else tuple(rate)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    count = max(round(VALIDATION * len(x)), min(FEW_ROWS, len(x) // 5), 1)
    x, y, new = x.float(), y.float().flatten(), new.float()
    held, kept = order[:count], order[count:]
    recipe = recipe or Recipe(batch_size=min(256, max(16, len(x) // 16)))
    best, answer = -math.inf, None
    with torch.random.fork_rng(devices=[]):
        for each in rates:
            torch.manual_seed(seed)  # nn.Dropout draws from the global state
            net = perceptron(x.shape[1], 1, generator, dropout=each)
            train(net, (x[kept], y[kept]), (x[held], y[held]), squared_error, recipe, generator)
            with torch.no_grad():
                least = squared_error(net(x[kept]), y[kept]).sqrt().item()
            noise, score = _noise(_draws(net, x[held], draws), y[held].double(), least)
            if score > best:
                means = _draws(net, new, draws)
                best, answer = score, GaussianMixture(means, torch.full_like(means, noise))
    assert answer is not None
    return answer


def _draws(net: nn.Sequential, x: Tensor, draws: int) -> Tensor:
    """f(x) with units dropped, (draws, N)."""
    net.train()
    with torch.no_grad():
        found = torch.stack([net(x)[:, 0] for _ in range(draws)]).double()
    net.eval()
    return found


def _noise(means: Tensor, y: Tensor, least: float) -> tuple[float, float]:
    """The σ ≥ least of the highest mean log likelihood, and that."""
    choices = [least, *(s for s in NOISES if s > least)]
    found = [
        (float(GaussianMixture(means, torch.full_like(means, s)).log_prob(y).mean()), s)
        for s in choices
    ]
    score, noise = max(found)
    return noise, score
