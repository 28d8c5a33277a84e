"""A small network, rows that it can explain, and posteriors of it."""

from copy import deepcopy

import torch
from torch import nn

import ssla
from ssla import priors

SCOPES = {"last layer": "last_layer", "all": "all", "named": ["0.weight", "2.bias"]}
STRUCTURES = ["dense", "kfac", "diag", "low_rank"]


def mlp(inputs=3, outputs=1, width=6, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return (
        nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))
        .to(dtype)
        .eval()
    )


def data(n=60, inputs=3, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, inputs, dtype=dtype, generator=generator)
    y = torch.sin(x[:, 0]) + 0.3 * torch.randn(n, dtype=dtype, generator=generator)
    return x, y


def fitted_mlp(rows, likelihood, outputs, scope, structure, gaussian):
    """The posterior of an `mlp` under a prior of precision 2. scope: a name of SCOPES."""
    return ssla.fit(
        mlp(outputs=outputs),
        rows,
        likelihood=likelihood,
        prior=priors.Gaussian(2.0),
        weights=SCOPES[scope],
        structure=structure,
        gaussian=gaussian,
    )


class TwoInputs(nn.Module):
    """An `mlp` that is called as model(a, b)."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, a, b):
        return self.body(torch.cat([a, b], 1))


def trained(width=16, steps=300):
    """An `mlp` after some steps on `data(60)`."""
    x, y = data(60)
    net = mlp(width=width)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(steps):
        optimiser.zero_grad()
        ((net(x).squeeze(1) - y) ** 2).mean().backward()
        optimiser.step()
    return net


def around_a_million(n=400):
    """float32 with a bias of 10⁶, its double, and targets with a noise of 0.01 in float64."""
    x, y = data(n)
    y = 1e6 + 0.05 * torch.sin(x[:, 0]) + 0.01 * torch.randn(n, dtype=torch.float64)
    net = mlp(dtype=torch.float32, width=16)
    with torch.no_grad():
        net[2].weight.zero_()
        net[2].bias.fill_(1e6)
    return net, deepcopy(net).double(), x.float(), y
