"""Answers do not depend on the torch contexts that the caller has entered.

Every question is asked outside any context first: these answers are the reference, and they are compared bit by bit.
"""

import contextlib
import math
import warnings

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors

ROWS, NEW = 24, 2
SCALE = 0.5


def log_prob(y, f):
    """The logistic density around f."""
    z = (y - f[..., 0]) / SCALE
    return -z - 2 * torch.nn.functional.softplus(-z) - math.log(SCALE)


def fisher(f):
    return torch.full_like(f, 1 / (3 * SCALE**2)).unsqueeze(-1)


def mean(f):
    return f[..., 0]


def variance(f):
    return torch.full_like(f[..., 0], (math.pi * SCALE) ** 2 / 3)


LIKELIHOODS = {
    "gaussian": ("real", 1, lambda: L.Gaussian(noise=0.4)),
    "heteroscedastic": ("real", 2, L.HeteroscedasticGaussian),
    "student": ("real", 1, lambda: L.StudentT(df=4.0, scale=0.5)),
    "poisson": ("count", 1, L.Poisson),
    "categorical": ("class", 3, L.Categorical),
    "custom": ("real", 1, lambda: L.custom(log_prob, fisher=fisher, mean=mean, variance=variance)),
}


def trained(name):
    """A network in float32 near its mode under a prior of precision one, with its rows."""
    kind, outputs, likelihood = LIKELIHOODS[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 2, generator=generator)
    signal = (1.5 * x[:, 0]).tanh()
    y = signal + 0.4 * torch.randn(ROWS, generator=generator)
    if kind == "count":
        y = torch.poisson(signal.exp(), generator=generator)
    if kind == "class":
        y = (y > -0.5).long() + (y > 0.5)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=300, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def loss():
        optimiser.zero_grad()
        total = -likelihood().log_prob(y if kind == "class" else y.double(), model(x.double())).sum()
        total = total + 0.5 * sum((parameter**2).sum() for parameter in model.parameters())
        total.backward()
        return total

    optimiser.step(loss)
    return model.float().eval(), (x, y)


CASES = {name: trained(name) for name in LIKELIHOODS}


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def global_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


CONTEXTS = {
    "none": contextlib.nullcontext,
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "cpu": lambda: torch.device("cpu"),
    "meta": lambda: torch.device("meta"),
    "meta for all": lambda: global_device("meta"),
    "deterministic": deterministic,
}


def answers_of(predictive, y):
    """Every question that a predictive of this kind answers."""
    found = {name: getattr(predictive, name) for name in ("mean", "variance", "stddev", "mode", "mass", "epistemic", "aleatoric")}
    found["log_prob"] = predictive.log_prob(y)
    found["interval"] = predictive.interval(0.9)
    found["hdr"] = predictive.hdr(0.9)
    found["increments"] = predictive.increments(y).total
    found["sample"] = predictive.sample(4, torch.Generator().manual_seed(1))
    if predictive.kind == "class":
        found["probs"] = predictive.probs
    else:
        found["cdf"] = predictive.cdf(y)
        found["icdf"] = predictive.icdf([0.1, 0.5])
    return found


def fitted(name, weights, data=None, **options):
    model, rows = CASES[name]
    likelihood = LIKELIHOODS[name][2]()
    rows = rows if data is None else data
    return ssla.fit(model, rows, likelihood=likelihood, prior=priors.Gaussian(1.0), weights=weights, **options)


def surface(name, weights, refit):
    """Answers of the methods of a posterior and of its predictive, by name."""
    x, y = CASES[name][1]
    new, at = x[:NEW], y[:NEW]
    post = fitted(name, weights)
    found = {f"predict {key}": value for key, value in answers_of(post.predict(new, refit), at).items()}
    found |= {"theta": post.theta, "mean": post.mean, "evidence": post.log_evidence()}
    found |= {"marginal": post.marginal(new), "joint": post.joint(new), "assla": ssla.assla(post, new, at).total}
    draws = post.draw_functions(2, torch.Generator().manual_seed(2))
    found |= {"functions": draws(new), "function": draws[1](new)}
    found["another prior"] = post.with_prior(priors.custom(lambda theta: -(theta**2), independent=True)).marginal(new)
    found["update"] = post.update((x[:5], y[:5])).marginal(new)
    found["tune"] = post.tune(over=("prior",), per_layer=False).marginal(new)
    loo = post.loo()
    found |= {"loo": loo.log_prob, "loo nll": loo.nll, "loo pit": loo.pit}
    found["set"] = post.predictive_set(new, 0.8)
    reasons = ssla.explain(post, new)
    found |= {"influence": reasons.influence, "split": reasons.split, "inputs": reasons.inputs}
    found["label_next"] = ssla.label_next(post, x[5:9]).gain
    mixed = ssla.mixture([post.predict(new), post.predict(new, "none")])
    found |= {"mixture": mixed.mean, "mixture interval": mixed.interval(0.5)}
    return found


