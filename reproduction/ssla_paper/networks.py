"""The paper's network and training: two hidden layers of 50, ReLU, Adam, 500 epochs, stopped
after 20 without improvement.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

HIDDEN = (50, 50)
EPOCHS, PATIENCE = 500, 20
Loss = Callable[[Tensor, Tensor], Tensor]


def squared_error(f: Tensor, y: Tensor) -> Tensor:
    """The loss of the published network. f (n, 1), y (n,)."""
    return (f[:, 0] - y).square().mean()


def gaussian_nll(f: Tensor, y: Tensor) -> Tensor:
    """−log N(y; μ, σ²) with f = (μ, log σ²), as the text describes; without its constant.

    f (n, 2), y (n,).
    """
    return 0.5 * ((y - f[:, 0]).square() * torch.exp(-f[:, 1]) + f[:, 1]).mean()


def perceptron(
    inputs: int,
    outputs: int,
    generator: torch.Generator,
    activation: type[nn.Module] = nn.ReLU,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Weights and biases as torch initialises them, U(±1/√inputs), from the generator."""
    layers: list[nn.Module] = []
    width = inputs
    for hidden in HIDDEN:
        layers += [nn.Linear(width, hidden), activation()] + (
            [nn.Dropout(dropout)] if dropout else []
        )
        width = hidden
    net = nn.Sequential(*layers, nn.Linear(width, outputs))
    with torch.no_grad():
        for layer in net:
            if isinstance(layer, nn.Linear):
                for part in (layer.weight, layer.bias):
                    bound = 1 / math.sqrt(layer.in_features)
                    part.copy_((2 * torch.rand(part.shape, generator=generator) - 1) * bound)
    return net


@dataclass(frozen=True)
class Recipe:
    """Epochs, batches and rates."""

    learning_rate: float = 1e-2
    batch_size: int = 32
    epochs: int = EPOCHS
    patience: int = PATIENCE
    weight_decay: float = 0.0  # of torch.optim.Adam: τ/n if the loss is a mean


def train(
    net: nn.Module,
    data: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor],
    loss: Loss,
    recipe: Recipe,
    generator: torch.Generator,
) -> float:
    """Train in place; keep the best weights on the validation rows, and return their loss."""
    x, y = data
    optimiser = torch.optim.Adam(
        net.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    best, kept, since = math.inf, copy.deepcopy(net.state_dict()), 0
    for _ in range(recipe.epochs):
        net.train()
        for rows in torch.randperm(len(x), generator=generator).split(recipe.batch_size):
            optimiser.zero_grad()
            loss(net(x[rows]), y[rows]).backward()
            optimiser.step()
        net.eval()
        with torch.no_grad():
            score = float(loss(net(validation[0]), validation[1]))
        if score < best:
            best, kept, since = score, copy.deepcopy(net.state_dict()), 0
        else:
            since += 1
            if since >= recipe.patience or math.isnan(score):
                break
    net.load_state_dict(kept)
    net.eval()
    return best
