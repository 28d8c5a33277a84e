"""Every likelihood once, with outputs and targets to try it on (boundaries included)."""

import math

import torch
from torch.nn.functional import logsigmoid

from ssla import likelihoods as L


def _gamma_log_prob(y, f):
    """Gamma with shape 3 and mean e^f."""
    shape = 3.0
    rate = shape * torch.exp(-f[..., 0])
    return shape * torch.log(rate) + (shape - 1) * torch.log(y) - rate * y - math.lgamma(shape)


def _poisson_log_prob(y, f):
    return y * f[..., 0] - torch.exp(f[..., 0]) - torch.lgamma(y + 1)


def _heteroscedastic_log_prob(y, f):
    return -0.5 * (math.log(2 * math.pi) + f[..., 1] + (y - f[..., 0]) ** 2 * torch.exp(-f[..., 1]))


def _bernoulli_log_prob(y, f):
    return logsigmoid((2 * y - 1) * f[..., 0])


T = lambda *v: torch.tensor(v, dtype=torch.float64)
REALS = T(-30.0, -1.0, 0.0, 0.3, 2.5, 40.0)
COUNTS = T(0.0, 1.0, 2.0, 7.0, 40.0)
SIGMA = T([1.0, 0.3], [0.3, 0.5])

# name: (likelihood, f (N, C), y (k,) or (k, D))
CASES = {
    "gaussian": (L.Gaussian(noise=0.7), T([-2.0], [0.0], [15.0]), REALS),
    "gaussian vector": (
        L.Gaussian(noise=T(0.7, 2.0)),
        T([-2.0, 1.0], [0.0, 0.5]),
        T([0.0, 0.0], [3.0, -8.0]),
    ),
    "gaussian full": (
        L.Gaussian(covariance=SIGMA),
        T([-2.0, 1.0], [0.0, 0.5]),
        T([0.0, 0.0], [3.0, -8.0]),
    ),
    "heteroscedastic": (
        L.HeteroscedasticGaussian(),
        T([0.0, 0.0], [1.0, -15.0], [-1.0, 15.0], [0.3, -1.0]),
        T(-3.0, 0.0, 0.2, 1.0, 5.0),
    ),
    "natural": (
        L.HeteroscedasticGaussian(parameters="natural"),
        T([0.0, -0.5], [1.0, -4.0], [-3.0, -0.01]),
        T(-3.0, 0.0, 0.2, 5.0),
    ),
    "student": (L.StudentT(df=4.0, scale=0.8), T([-2.0], [0.0], [3.0]), REALS),
    "poisson": (L.Poisson(), T([-3.0], [0.0], [2.5]), COUNTS),
    "poisson identity": (L.Poisson(link="identity"), T([0.05], [1.0], [12.0]), COUNTS),
    "negative binomial": (L.NegativeBinomial(dispersion=0.4), T([-3.0], [0.0], [2.5]), COUNTS),
    "bernoulli": (L.Bernoulli(), T([-30.0], [-1.0], [0.0], [3.0]), T(0.0, 1.0)),
    "categorical": (
        L.Categorical(),
        T([0.0, 0.0, 0.0], [5.0, -3.0, 1.0], [-20.0, 0.0, 9.0]),
        T(0.0, 1.0, 2.0),
    ),
    "hot bernoulli": (L.Bernoulli(temperature=2.5), T([-30.0], [-1.0], [0.0], [3.0]), T(0.0, 1.0)),
    "hot categorical": (
        L.Categorical(temperature=2.5),
        T([0.0, 0.0, 0.0], [5.0, -3.0, 1.0]),
        T(0.0, 1.0, 2.0),
    ),
    "scaled heteroscedastic": (
        L.HeteroscedasticGaussian(scale=1.7),
        T([0.0, 0.0], [1.0, -6.0], [-1.0, 5.0], [0.3, -1.0]),
        T(-3.0, 0.0, 0.2, 1.0, 5.0),
    ),
    "scaled natural": (
        L.HeteroscedasticGaussian(parameters="natural", scale=1.7),
        T([0.0, -0.5], [1.0, -4.0], [-3.0, -0.01]),
        T(-3.0, 0.0, 0.2, 5.0),
    ),
    "tempered": (L.Tempered(L.Poisson(), beta=0.3), T([-3.0], [0.0], [2.5]), COUNTS),
    "custom gamma": (
        L.custom(_gamma_log_prob, support="positive", outputs=1),
        T([-1.0], [0.5]),
        T(0.1, 1.0, 6.0),
    ),
    "custom heteroscedastic": (
        L.custom(_heteroscedastic_log_prob, outputs=2),
        T([0.0, 0.0], [1.0, -2.0]),
        T(-3.0, 0.5, 2.0),
    ),
    "custom poisson": (L.custom(_poisson_log_prob, support="counts"), T([-1.0], [1.5]), COUNTS),
    "custom bernoulli": (
        L.custom(_bernoulli_log_prob, support="classes", classes=2),
        T([-2.0], [1.0]),
        T(0.0, 1.0),
    ),
}


def tasks(name):
    """likelihood, y and f of all pairs: y (M,) or (M, D), f (M, C)."""
    likelihood, f, y = CASES[name]
    count = len(y)
    return likelihood, y.repeat(len(f), *[1] * (y.dim() - 1)), f.repeat_interleave(count, 0)
