"""A small network and rows that it can explain."""

import torch
from torch import nn


def mlp(inputs=3, outputs=1, width=6, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs)).to(dtype).eval()


def data(n=60, inputs=3, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, inputs, dtype=dtype, generator=generator)
    y = torch.sin(x[:, 0]) + 0.3 * torch.randn(n, dtype=dtype, generator=generator)
    return x, y
