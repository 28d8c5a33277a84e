"""A small network, rows that it can explain, and posteriors of it."""

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
