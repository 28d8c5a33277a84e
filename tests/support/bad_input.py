"""A small network, rows for it, and the check of an error's text."""

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L

G = L.Gaussian(noise=0.5)


X, Y = (
    torch.randn(20, 3, generator=torch.Generator().manual_seed(0)),
    torch.randn(20, generator=torch.Generator().manual_seed(1)),
)


def net(*layers, outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *(layers or (nn.ReLU(),)), nn.Linear(4, outputs)).eval()


def spoiled(values, index, value):
    out = values.clone()
    out[index] = value
    return out


def fit(model=None, data=(X, Y), likelihood=G, **options):
    return ssla.fit(net() if model is None else model, data, likelihood=likelihood, **options)


def assert_message(make, message):
    """make() ends in a ValueError or TypeError with this text, and the rows stay as they are."""
    x, y = X.clone(), Y.clone()
    with pytest.raises((ValueError, TypeError), match=message):
        make()
    assert torch.equal(x, X)
    assert torch.equal(y, Y)
