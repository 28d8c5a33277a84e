"""The convention of the prior stays with a predictive."""

import pytest

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.predictive import affine, mixture
from support.networks import data, mlp

GAUSSIAN = L.Gaussian(noise=0.3)
X, Y = data(60)


@pytest.fixture(scope="module")
def post():
    return ssla.fit(mlp(), (X, Y), likelihood=GAUSSIAN, prior=priors.Gaussian())


def test_conventions_stay_with_rescaled_and_mixed_predictives(post):
    exact = post.predict(X[:2])
    for name in ("paper", "additive"):
        own = post.with_prior(priors.Gaussian(2.0), name).predict(X[:2])
        changed = affine(own, 1.0, 2.0)
        assert changed.diagnostics.convention == changed.increments(Y[:2]).convention == name
        assert mixture([own, own]).diagnostics.convention == name
        assert mixture([own]).increments(Y[:2]).convention == name
        assert mixture([own, exact]).diagnostics.convention == f"{name}, exact"
        assert f"prior {name}, exact:" in str(affine(mixture([own, exact]), 0.0, 2.0).diagnostics)
    assert mixture([exact, exact]).diagnostics.convention == "exact"
