"""A tanh network in float64, rows for it, and one over sequences of integers."""

import torch
from torch import nn

from ssla import likelihoods as L
from ssla import priors

FIT = {"likelihood": L.Gaussian(noise=0.5), "prior": priors.Gaussian(precision=3.0)}


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = numbers(30, 3), numbers(30, seed=1)


def net(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double().eval()


class Tokens(nn.Module):
    """Mean of embeddings of ids (N, T), then a hidden layer used at every place: a Kronecker
    form with T places.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.inner, self.head = nn.Embedding(6, 4), nn.Linear(4, 3), nn.Linear(3, 1)
        self.double()

    def forward(self, ids):
        return self.head(torch.tanh(self.inner(self.table(ids))).mean(1))
