"""Gradients that would be zero without a word are refused."""

import pytest
import torch

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.predictive import affine, from_marginal, mixture
from support.networks import TwoInputs, data, mlp

GAUSSIAN = L.Gaussian(noise=0.3)
X, Y = data(60)


@pytest.fixture(scope="module")
def post():
    return ssla.fit(mlp(), (X, Y), likelihood=GAUSSIAN, prior=priors.Gaussian())


NO_GRADIENT = r"gradient would be zero here. Gradients need differentiable=True, .* give x.detach"


def questions(post):
    return {
        "predict": lambda x: post.predict(x).mean,
        "newton": lambda x: post.predict(x, refit="newton").variance,
        "marginal": lambda x: post.marginal(x).mean,
        "increments": lambda x: post.predict(x).increments(Y[:2]).total,
        "ssla": lambda x: ssla.ssla(post, x, Y[:2]).total,
        "assla": lambda x: ssla.assla(post, x, Y[:2]).total,
    }


@pytest.mark.filterwarnings("ignore:`torch.jit")  # of torch.func.jacfwd itself
@pytest.mark.parametrize("name", ["predict", "newton", "marginal", "increments", "ssla", "assla"])
def test_a_gradient_in_x_is_refused_and_not_zero(post, name):
    ask = questions(post)[name]
    with pytest.raises(ValueError, match=NO_GRADIENT):
        ask(X[:2].clone().requires_grad_(True))
    for transform in (
        torch.func.jacrev,
        torch.func.jacfwd,
        lambda f: torch.func.vmap(lambda x: f(x[None])),
    ):
        with pytest.raises(ValueError, match=NO_GRADIENT):
            transform(ask)(X[:2])
    with torch.no_grad():
        free = ask(X[:2].clone().requires_grad_(True))
    assert torch.equal(free, ask(X[:2]))


@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_answers_under_no_grad_are_the_same(weights):
    post = ssla.fit(mlp(), (X, Y), likelihood=GAUSSIAN, prior=priors.Gaussian(), weights=weights)
    with torch.no_grad():
        found = post.predict(X[:2]).variance
    assert torch.equal(found, post.predict(X[:2]).variance)


def test_a_gradient_in_one_part_of_x_is_refused():
    a, b = X[:, :1], X[:, 1:]
    post = ssla.fit(TwoInputs(), ((a, b), Y), likelihood=GAUSSIAN, prior=priors.Gaussian())
    assert post.predict((a, b)).mean.shape == (60,)
    with pytest.raises(ValueError, match=NO_GRADIENT):
        post.predict((a, b.clone().requires_grad_(True)))
    named = ssla.fit(
        TwoInputs(), [({"a": a, "b": b}, Y)], likelihood=GAUSSIAN, prior=priors.Gaussian()
    )
    with pytest.raises(ValueError, match=NO_GRADIENT):
        named.predict({"a": a.clone().requires_grad_(True), "b": b})


def test_a_gradient_in_y_is_refused_where_it_would_be_lost(post):
    gaussian, grid = (
        post.predict(X[:2]),
        from_marginal(L.StudentT(4.0, 0.5), X[:2, :1], torch.ones(2, 1, 1)),
    )
    asks = [
        p.log_prob
        for p in (gaussian, grid, affine(gaussian, 1.0, 2.0), mixture([gaussian, gaussian]))
    ]
    for ask in [
        *asks,
        gaussian.cdf,
        lambda y: gaussian.increments(y).total,
        lambda y: ssla.assla(post, X[:2], y).total,
    ]:
        with pytest.raises(ValueError, match=NO_GRADIENT):
            ask(Y[:2].clone().requires_grad_(True))
        with pytest.raises(ValueError, match=NO_GRADIENT):
            torch.func.grad(lambda y, ask=ask: ask(y).sum())(Y[:2])
