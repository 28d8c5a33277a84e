"""log p(y|f̃) − log p(y|f̂) against 60 decimal digits, for steps from 1e-12 to 3, in every
likelihood.
"""

import math
from decimal import Decimal, localcontext

import pytest
import torch

from support.cases import CASES, SIGMA, tasks


def D(value):
    return Decimal(value)  # a float's own value, to the last bit


STEPS = [1e-12, 1e-9, 1e-6, 1e-3, 0.03, 1.0, 3.0]


def _softplus(z):
    return (1 + z.exp()).ln()


def _quadratic(r, sigma):
    a, b, d = D(float(sigma[0, 0])), D(float(sigma[0, 1])), D(float(sigma[1, 1]))
    return -(d * r[0] ** 2 - 2 * b * r[0] * r[1] + a * r[1] ** 2) / (a * d - b * b) / 2


def _normal(y, mean, variance):
    return -(variance.ln() + (y - mean) ** 2 / variance) / 2


def _categorical(y, f):
    return f[int(y[0])] - sum(v.exp() for v in f).ln()


# log p(y|f) up to what does not depend on f, in Decimal: y and f are lists
EXACT = {
    "gaussian": lambda y, f: _normal(y[0], f[0], D(0.7) ** 2),
    "gaussian vector": lambda y, f: (
        _normal(y[0], f[0], D(0.7) ** 2) + _normal(y[1], f[1], D(2.0) ** 2)
    ),
    "gaussian full": lambda y, f: _quadratic([y[0] - f[0], y[1] - f[1]], SIGMA),
    "heteroscedastic": lambda y, f: _normal(y[0], f[0], f[1].exp()),
    "custom heteroscedastic": lambda y, f: _normal(y[0], f[0], f[1].exp()),
    "natural": lambda y, f: _normal(y[0], -f[0] / (2 * f[1]), -1 / (2 * f[1])),
    "student": lambda y, f: -D("2.5") * (1 + ((y[0] - f[0]) / D(0.8)) ** 2 / 4).ln(),
    "poisson": lambda y, f: y[0] * f[0] - f[0].exp(),
    "custom poisson": lambda y, f: y[0] * f[0] - f[0].exp(),
    "tempered": lambda y, f: D(0.3) * (y[0] * f[0] - f[0].exp()),
    "poisson identity": lambda y, f: y[0] * f[0].ln() - f[0],
    "negative binomial": lambda y, f: (
        -D(1 / 0.4) * _softplus(f[0] + D(math.log(0.4)))
        - y[0] * _softplus(-f[0] - D(math.log(0.4)))
    ),
    "bernoulli": lambda y, f: -_softplus((1 - 2 * y[0]) * f[0]),
    "custom bernoulli": lambda y, f: -_softplus((1 - 2 * y[0]) * f[0]),
    "categorical": _categorical,
    "hot bernoulli": lambda y, f: -_softplus((1 - 2 * y[0]) * f[0] / D(2.5)),
    "hot categorical": lambda y, f: _categorical(y, [v / D(2.5) for v in f]),
    "scaled heteroscedastic": lambda y, f: _normal(y[0], f[0], f[1].exp() * D(1.7) ** 2),
    "scaled natural": lambda y, f: _normal(y[0], -f[0] / (2 * f[1]), -(D(1.7) ** 2) / (2 * f[1])),
    "custom gamma": lambda y, f: -3 * f[0] - 3 * y[0] * (-f[0]).exp(),
}


def exact_difference(name, y, new, old):
    with localcontext() as context:
        context.prec = 60
        rows = []
        for target, a, b in zip(
            y.reshape(len(y), -1).tolist(), new.tolist(), old.tolist(), strict=True
        ):
            target, a, b = ([D(v) for v in part] for part in (target, a, b))
            rows.append(float(EXACT[name](target, a) - EXACT[name](target, b)))
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", CASES)
def test_differences_keep_the_digits_of_the_step(name, step):
    """To 1e-13 of the size of what is added up: |Δ|·(|g| + |Λ||Δ| + |y| + |f| + 1)."""
    likelihood, y, f = tasks(name)
    generator = torch.Generator().manual_seed(0)
    delta = step * (2 * torch.rand(f.shape, dtype=torch.float64, generator=generator) - 1)
    new = f + delta
    if not likelihood.linear_domain:  # keep to the domain
        new[:, -1] = torch.where(new[:, -1].sign() == f[:, -1].sign(), new[:, -1], f[:, -1] * 1.5)
    found = likelihood.log_prob_difference(y, new, f)
    expected = exact_difference(name, y, new, f)
    moved = (new - f).abs().amax(-1)
    slope = torch.maximum(
        likelihood.score(y, f).abs().amax(-1), likelihood.score(y, new).abs().amax(-1)
    )
    bend = torch.maximum(
        likelihood.precision(y, f).abs().amax((-2, -1)),
        likelihood.precision(y, new).abs().amax((-2, -1)),
    )
    size = moved * (
        1 + slope + bend * (1 + moved) + y.reshape(len(y), -1).abs().amax(-1) + f.abs().amax(-1)
    )
    tolerance = 1e-13
    if name.startswith("custom") and step > 0.01:  # the plain difference: rounding of log p itself
        size = size + likelihood.log_prob(y, f).abs() + likelihood.log_prob(y, new).abs() + 100
    assert ((found - expected).abs() / size).max() < tolerance


@pytest.mark.parametrize("name", CASES)
def test_differences_are_differences_of_log_prob_and_broadcast(name):
    likelihood, y, f = tasks(name)
    new = f * 1.1
    found = likelihood.log_prob_difference(y, new, f)
    assert torch.allclose(
        found, likelihood.log_prob(y, new) - likelihood.log_prob(y, f), rtol=1e-9, atol=1e-9
    )
    many = likelihood.log_prob_difference(y[:, None], torch.stack([f, new], 1), f[:, None])
    assert torch.equal(many[:, 0], torch.zeros_like(found))
    assert torch.allclose(many[:, 1], found, rtol=1e-12, atol=1e-300)


def test_a_step_out_of_the_domain_is_impossible():
    for name, outside in (("poisson identity", [-0.1]), ("natural", [0.3, 0.2])):
        likelihood, y, f = tasks(name)
        new = torch.tensor(outside, dtype=torch.float64).expand_as(f)
        assert torch.isneginf(likelihood.log_prob_difference(y, new, f)).all()
