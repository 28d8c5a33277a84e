"""Monte Carlo dropout for classes: the paper's network with dropout after each hidden layer,
active in predictions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ssla_paper.networks import Recipe, perceptron, train


def dropout_classes(
    x: Tensor,
    y: Tensor,
    held_out: Tensor,
    classes: int,
    *,
    rate: float = 0.1,
    draws: int = 50,
    seed: int = 0,
    recipe: Recipe | None = None,
) -> Callable[[Tensor], Tensor]:
    """Trained on x (n, d), y (n,) but for held_out (n,), on which it stops -> new (N, d) to
    probabilities (draws, N, C).
    """
    x = x.float()
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # nn.Dropout draws from the global state
        net = perceptron(x.shape[1], classes, generator, dropout=rate)
        parts = ((x[~held_out], y[~held_out]), (x[held_out], y[held_out]))
        train(
            net,
            *parts,
            lambda f, t: cross_entropy(f, t),
            recipe or Recipe(batch_size=64),
            generator,
        )

    def predict(new: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            net.train()
            found = torch.stack([torch.softmax(net(new.float()).double(), 1) for _ in range(draws)])
            net.eval()
        return found

    return predict
