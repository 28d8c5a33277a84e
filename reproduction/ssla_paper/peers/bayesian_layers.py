"""Mean-field variational inference by bayesian-torch's layers: no compilation, so many small
sets take little time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ssla_paper.peers import GaussianMixture, library

INSTALL = "bayesian-torch"
RATE, LAST_RATE, START_RHO = 1e-2, 1e-4, -5.0  # sd = log(1 + e^ρ): 0.007


def layered_mean_field(
    x: Tensor,
    y: Tensor,
    new: Tensor,
    *,
    hidden: Sequence[int] = (50, 50),
    steps: int = 3000,
    draws: int = 100,
    batch_size: int = 64,
    seed: int = 0,
) -> GaussianMixture:
    """p(y|new) as a mixture over draws from q; x (n, d), y (n,), new (N, d), standardised.

    Weights have the prior N(0, 1/inputs of the layer), biases N(0, 1); σ is a parameter. The bound
    is n·E log p(y|f) − KL, the KL being a sum over weights: the layers' own is a mean for each
    tensor, as if there were one weight. Adam's rate falls from 0.01 to 0.0001. Torch's global
    random state is restored.
    """
    layers = library("bayesian_torch.layers", INSTALL)
    x, y, new = x.float(), y.float().flatten(), new.float()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)  # the layers draw from the global state
        stack = [_layer(layers, a, b) for a, b in pairwise((x.shape[1], *hidden, 1))]
        log_noise = torch.zeros((), requires_grad=True)
        optimiser = torch.optim.Adam(
            [*(p for layer in stack for p in layer.parameters()), log_noise], lr=RATE
        )
        falling = torch.optim.lr_scheduler.ExponentialLR(
            optimiser, (LAST_RATE / RATE) ** (1 / steps)
        )
        order, place = torch.randperm(len(x)), 0
        for _ in range(steps):
            if place >= len(x):
                order, place = torch.randperm(len(x)), 0
            rows, place = order[place : place + batch_size], place + batch_size
            optimiser.zero_grad()
            residual = (y[rows] - outputs(stack, x[rows])) * torch.exp(-log_noise)
            (0.5 * residual.square().mean() + log_noise + divergence(stack) / len(x)).backward()
            optimiser.step()
            falling.step()
        with torch.no_grad():
            means = torch.stack([outputs(stack, new) for _ in range(draws)]).double()
    return GaussianMixture(means, torch.full_like(means, math.exp(log_noise.item())))


def _layer(layers: Any, inputs: int, width: int) -> nn.Module:
    layer: nn.Module = layers.LinearReparameterization(
        inputs, width, prior_variance=1 / math.sqrt(inputs), posterior_rho_init=START_RHO
    )
    with torch.no_grad():
        layer.get_parameter("mu_weight").normal_(0, 1 / math.sqrt(inputs))
        layer.get_parameter("mu_bias").zero_()
        layer.get_buffer("prior_bias_sigma").fill_(1.0)
    return layer


def outputs(stack: Sequence[Any], x: Tensor) -> Tensor:
    """f(x) for one draw of the weights (n,)."""
    for i, layer in enumerate(stack):
        x = layer(x, return_kl=False)
        x = torch.tanh(x) if i < len(stack) - 1 else x
    return x[:, 0]


def divergence(stack: Sequence[Any]) -> Tensor:
    """KL(q ‖ prior), summed over all weights and biases."""
    total = torch.zeros(())
    for layer in stack:
        for part in ("weight", "bias"):
            mean, spread = (
                getattr(layer, f"mu_{part}"),
                nn.functional.softplus(getattr(layer, f"rho_{part}")),
            )
            prior = getattr(layer, f"prior_{part}_mu"), getattr(layer, f"prior_{part}_sigma")
            total = total + mean.numel() * layer.kl_div(mean, spread, *prior)
    return total
