"""Targets, outputs and settings of likelihoods that are refused, and the remedy."""

import math

import pytest
import torch

import ssla
from ssla import likelihoods as L
from ssla import priors
from support.bad_input import X, Y, assert_message, fit, net, spoiled

CASES = {
    "infinite y": (
        lambda: fit(data=(X, spoiled(Y, 2, math.inf))),
        r"y must be finite.*\[2\].*Drop or impute",
    ),
    "y with two columns": (
        lambda: fit(data=(X, torch.randn(20, 2))),
        r"y must have shape \(N,\) or \(N, 1\).*\(20, 2\)",
    ),
    "count below zero": (
        lambda: fit(data=(X, Y), likelihood=L.Poisson()),
        "y must hold counts 0, 1, 2.*the first is .* in row",
    ),
    "class too high": (
        lambda: fit(net(outputs=3), (X, torch.arange(20)), L.Categorical()),
        "integers from 0 to 2.*the first is 3 in row 3",
    ),
    "one-hot classes": (
        lambda: fit(net(outputs=3), (X, torch.eye(3)[torch.arange(20) % 3]), L.Categorical()),
        r"one-hot.*y.argmax\(1\)",
    ),
    "target not positive": (
        lambda: fit(
            data=(X, Y),
            likelihood=L.custom(lambda y, f: -y / f[..., 0].exp() - f[..., 0], support="positive"),
        ),
        "numbers above zero",
    ),
    "outputs do not fit": (
        lambda: fit(likelihood=L.HeteroscedasticGaussian()),
        r"needs a network with 2 outputs \(mean and log variance\), but this one has 1",
    ),
    "one logit for classes": (
        lambda: fit(data=(X, (Y > 0).long()), likelihood=L.Categorical()),
        r"at least two.*Bernoulli\(\)",
    ),
    "noise for other outputs": (
        lambda: fit(likelihood=L.Gaussian(noise=torch.ones(3))),
        "noise for 3 outputs, but the network has 1",
    ),
    "rate below zero": (
        lambda: fit(
            data=(X, Y.abs().round()),
            likelihood=L.Poisson(link="identity"),
            prior=priors.Gaussian(),
        ),
        "needs positive outputs.*link='log'",
    ),
    "natural parameter above zero": (
        lambda: fit(net(outputs=2), likelihood=L.HeteroscedasticGaussian("natural")),
        "negative second output.*mean_log_variance",
    ),
    "zero noise": (lambda: L.Gaussian(noise=0.0), "noise must be positive.*standard deviation"),
    "noise missing": (lambda: L.Gaussian(), "exactly one of them"),
    "noise misspelt": (lambda: L.Gaussian(noise="estmate"), '"estimate"'),
    "covariance not symmetric": (
        lambda: L.Gaussian(covariance=torch.tensor([[1.0, 2.0], [0.0, 1.0]])),
        "symmetric and positive definite",
    ),
    "custom of the wrong shape": (
        lambda: fit(likelihood=L.custom(lambda y, f: -(f**2))),
        r"must return one value for each y.*f\[\.\.\., 0\]",
    ),
    "custom support": (lambda: L.custom(lambda y, f: y, support="reals"), r"Did you mean 'real'\?"),
    "unresolved noise": (
        lambda: L.Gaussian(noise="estimate").log_prob(Y, X[:, :1]),
        "no value yet: ssla.fit estimates it",
    ),
    "Cauchy": (lambda: L.StudentT(df=1.0, scale=1.0), "df must exceed 1"),
    "custom without a function": (lambda: L.custom("gaussian"), "log_prob must be a function"),
    "ssla outside the support": (
        lambda: ssla.assla(fit(data=(X, Y.abs().round()), likelihood=L.Poisson()), X, Y),
        "y must hold counts",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case):
    assert_message(*CASES[case])
