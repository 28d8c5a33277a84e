"""The stated network: 2 × 50, ReLU, outputs μ and log σ², trained by the Gaussian NLL with Adam,
500 epochs, stopped after 20 without improvement of the validation NLL.
"""

from __future__ import annotations

import torch
from torch import nn

from ssla_paper.networks import Recipe, gaussian_nll, perceptron, train
from ssla_paper.stated.data import Case, Pair

OUTPUTS = 2  # μ and log σ²


def trained(
    rows: Case, rate: float, batch: int, seed: int, epochs: int | None = None
) -> tuple[nn.Sequential, float]:
    """Return the network in float64, which was trained in float32, and its validation NLL.

    epochs: fewer than the stated 500, for tests.
    """
    generator = torch.Generator().manual_seed(seed)
    net = perceptron(rows.train[0].shape[1], OUTPUTS, generator)
    recipe = Recipe(rate, batch) if epochs is None else Recipe(rate, batch, epochs)
    loss = train(
        net, _single(rows.train), _single(rows.validation), gaussian_nll, recipe, generator
    )
    return net.double(), loss


def _single(pair: Pair) -> Pair:
    return pair[0].float(), pair[1].float()
