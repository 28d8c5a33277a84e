"""Tuning of float32 networks, as users have them: it ends, it is never worse, and it agrees with float64.

Every structure, Gaussian, likelihood and objective, once. The oracles are the same network in float64 and, for held-out scores,
`predict` of the tuned posterior, which computes in the network's dtype and does not share the code of the search.
"""

import copy
import warnings

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla.tuning.bfgs import maximise

ROWS, NEW = 16, 8
ACCURACY = 2e-5  # of 1 + |score|: errors of 1e-7 in features and outputs, times a few tens of parameters
MOST = 400  # evaluations; a search by two coordinates takes about 100

# name: (likelihood, outputs, kind of target)
LIKELIHOODS = {
    "gaussian": (L.Gaussian(noise="estimate"), 1, "real"),
    "heteroscedastic": (L.HeteroscedasticGaussian(), 2, "real"),
    "student": (L.StudentT(df=4.0, scale=0.3), 1, "real"),
    "poisson": (L.Poisson(), 1, "count"),
    "negative binomial": (L.NegativeBinomial(dispersion=0.3), 1, "count"),
    "bernoulli": (L.Bernoulli(), 1, "binary"),
    "3 classes": (L.Categorical(), 3, "class"),
    "10 classes": (L.Categorical(), 10, "class"),
}
STRUCTURES = ("dense", "kfac", "diag", "low_rank")
GAUSSIANS = ("laplace", "variational")


def problem(outputs, kind, rows=ROWS + NEW):
    """A float32 network with random weights, and rows that it half explains."""
    generator = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).eval()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.7 * torch.randn(p.shape, generator=generator))
    x = torch.randn(rows, 3, generator=generator)
    with torch.no_grad():
        f = module(x) + 0.5 * torch.randn(rows, outputs, generator=generator)
    y = {
        "real": f[:, 0],
        "count": torch.poisson(f[:, 0].exp(), generator=generator),
        "binary": (f[:, 0] > 0).float(),
        "class": f.argmax(1),
    }[kind]
    return module, x, y


def in_dtype(dtype, module, x, y):
    y = y.to(dtype) if y.is_floating_point() else y
    return copy.deepcopy(module).to(dtype), (x[:ROWS].to(dtype), y[:ROWS]), (x[ROWS:].to(dtype), y[ROWS:])


def options(objective, train, new):
    return {"nll": {"data": new}, "crps": {"data": new}, "folds": {"data": train, "folds": 2}}.get(objective, {})


def quiet(function, *args, **kwargs):
    """Few rows end at edges and warn about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def check(name, structure, gaussian, objectives):
    likelihood, outputs, kind = LIKELIHOODS[name]
    single, double = (in_dtype(dtype, *problem(outputs, kind)) for dtype in (torch.float32, torch.float64))
    posts = [
        quiet(ssla.fit, module, train, likelihood=likelihood, structure=structure, gaussian=gaussian)
        for module, train, _ in (single, double)
    ]
    for objective in objectives:
        asked = "nll" if objective == "folds" else objective
        tuned, exact = (
            quiet(post.tune, asked, **options(objective, *data)) for post, (_, *data) in zip(posts, (single, double), strict=True)
        )
        values, truth = tuned.tuning_history.values, exact.tuning_history.values
        room = ACCURACY * (1 + float(truth[-1].abs()))
        assert float(values[-1]) >= float(values[0]) - 1e-6 * (1 + abs(float(values[0]))), objective
        assert abs(float(values[-1] - truth[-1])) <= room, objective
        assert tuned.tuning_history.evaluations <= MOST, objective
        if objective == "nll" and name != "heteroscedastic":  # whose score is an integral, its predictive a refit
            x, y = single[2]
            reached = float(quiet(tuned.predict, x).log_prob(y).double().mean())
            assert abs(reached - float(values[-1])) <= 10 * room, objective
