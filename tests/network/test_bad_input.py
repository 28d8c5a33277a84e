"""Modules and inputs that are refused: what was expected, what was given and what to do."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from ssla import likelihoods as L
from support.bad_input import X, Y, assert_message, fit, net, spoiled


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(x + torch.randn_like(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 3)
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.table(x))


class BatchMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(x - x.mean(0))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(x), x


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += 1
        return self.head(x)


class NoGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()

    @torch.no_grad()
    def forward(self, x):
        return self.inner(x)


def broken():
    model = net()
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    return model


def with_buffer(value, norm=False):
    """A module with a buffer of its own, or with this variance in its batch norm."""
    model = net(nn.BatchNorm1d(4))
    if norm:
        model[1].running_var[0] = value
    else:
        model.register_buffer("bound", torch.tensor([0.0, value]))
    return model


CASES = {
    "NaN in x": (
        lambda: fit(data=(spoiled(X, (3, 1), math.nan), Y)),
        r"x must be finite, but 1 of 60.*\[3, 1\].*impute",
    ),
    "NaN buffer": (
        lambda: fit(with_buffer(math.nan)),
        "Buffer 'bound' must not have NaN, but 1 of its values are.*train it again",
    ),
    "infinite variance of a norm": (
        lambda: fit(with_buffer(math.inf, True)),
        "Buffer '1.running_var' must be finite.*again",
    ),
    "NaN parameter": (lambda: fit(broken()), "'0.weight' must be finite.*train it again"),
    "wrong columns": (
        lambda: fit(data=(X[:, :2], Y)),
        r"failed on the inputs.*\(20, 2\).*number of columns",
    ),
    "dropout in training": (
        lambda: fit(net(nn.Dropout(0.5)).train()),
        r"training mode and has dropout.*random. Call model.eval\(\) first",
    ),
    "batch norm in training": (
        lambda: fit(net(nn.BatchNorm1d(4)).train()),
        r"training mode and has batch norm.*Call model.eval\(\) first",
    ),
    "random module": (lambda: fit(Noisy()), "different outputs for the same input.*eval"),
    "rows that interact": (lambda: fit(BatchMean()), "depends on the other rows"),
    "buffers that change": (lambda: fit(Counter()), r"changes its buffers in forward \(seen\)"),
    "two results": (
        lambda: fit(Pair()),
        "must return one tensor.*tuple with the tensors 0, 1.*output=0",
    ),
    "not a module": (lambda: fit(model="net.pt"), "must be a torch.nn.Module, but is a str"),
    "softmax at the end": (
        lambda: fit(
            nn.Sequential(nn.Linear(3, 2), nn.Softmax(1)), (X, (Y > 0).long()), L.Categorical()
        ),
        "something comes after it.*raw outputs of a final nn.Linear",
    ),
    "no linear layer": (
        lambda: fit(nn.Bilinear(3, 3, 1), ((X, X), Y)),
        "no linear layer was called.*weights='all'",
    ),
    "weight norm": (
        lambda: fit(nn.Sequential(nn.Linear(3, 4), weight_norm(nn.Linear(4, 1)))),
        "computed from other parameters",
    ),
    "tied last layer": (
        lambda: fit(
            Tied(), (torch.arange(3).repeat(7)[:20], torch.arange(20) % 3), L.Categorical()
        ),
        "'table.weight'|'head.weight'.*tied to",
    ),
    "unknown parameter": (
        lambda: fit(weights=["2.wieght"]),
        r"Unknown parameter '2.wieght'. Did you mean '2.weight'\?",
    ),
    "unknown scope": (
        lambda: fit(weights="last_layers"),
        r"Unknown weights 'last_layers'. Did you mean 'last_layer'\?",
    ),
    "a parameter as a string": (
        lambda: fit(weights="2.weight"),
        r"names a parameter. For that parameter alone write weights=\['2.weight'\]",
    ),
    "no names": (lambda: fit(weights=[]), "empty list"),
    "NaN at predict": (lambda: fit().predict(spoiled(X, (0, 0), math.nan)), "x must be finite"),
    "other columns at predict": (
        lambda: fit().predict(X[:, :2]),
        r"x must have shape \(N, 3\) as at fit, but one row of it is \(2,\)",
    ),
    "other parts at predict": (
        lambda: fit().predict((X, X)),
        r"parts it had at fit \(x\), but has \(x\[0\], x\[1\]\)",
    ),
    "gradients cut off": (
        lambda: fit(NoGradient(), weights="all"),
        "free parameters is zero.*no_grad",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case):
    assert_message(*CASES[case])
