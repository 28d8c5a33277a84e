"""Wrong answers that came without a word: gradients, covariances, conventions, scales, frozen and half-precision networks."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.digests import digest
from ssla.predictive import affine, from_marginal, mixture
from test_fit import data, mlp

GAUSSIAN = L.Gaussian(noise=0.3)
X, Y = data(60)


@pytest.fixture(scope="module")
def post():
    return ssla.fit(mlp(), (X, Y), likelihood=GAUSSIAN)


# --- gradients -----------------------------------------------------------------------------

NO_GRADIENT = "not supported yet: its gradient would be zero. Give x.detach"


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
    for transform in (torch.func.jacrev, torch.func.jacfwd, lambda f: torch.func.vmap(lambda x: f(x[None]))):
        with pytest.raises(ValueError, match=NO_GRADIENT):
            transform(ask)(X[:2])
    with torch.no_grad():
        free = ask(X[:2].clone().requires_grad_(True))
    assert torch.equal(free, ask(X[:2]))


def test_a_gradient_in_one_part_of_x_is_refused():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, a, b):
            return self.body(torch.cat([a, b], 1))

    a, b = X[:, :1], X[:, 1:]
    post = ssla.fit(Two(), ((a, b), Y), likelihood=GAUSSIAN)
    assert post.predict((a, b)).mean.shape == (60,)
    with pytest.raises(ValueError, match=NO_GRADIENT):
        post.predict((a, b.clone().requires_grad_(True)))
    named = ssla.fit(Two(), [({"a": a, "b": b}, Y)], likelihood=GAUSSIAN)
    with pytest.raises(ValueError, match=NO_GRADIENT):
        named.predict({"a": a.clone().requires_grad_(True), "b": b})


def test_a_gradient_in_y_is_refused_where_it_would_be_lost(post):
    gaussian, grid = post.predict(X[:2]), from_marginal(L.StudentT(4.0, 0.5), X[:2, :1], torch.ones(2, 1, 1))
    asks = [p.log_prob for p in (gaussian, grid, affine(gaussian, 1.0, 2.0), mixture([gaussian, gaussian]))]
    for ask in [*asks, gaussian.cdf, lambda y: gaussian.increments(y).total, lambda y: ssla.assla(post, X[:2], y).total]:
        with pytest.raises(ValueError, match=NO_GRADIENT):
            ask(Y[:2].clone().requires_grad_(True))
        with pytest.raises(ValueError, match=NO_GRADIENT):
            torch.func.grad(lambda y, ask=ask: ask(y).sum())(Y[:2])


def test_rows_of_a_fit_may_carry_a_graph(post):
    graph = ssla.fit(mlp(), (X.clone().requires_grad_(True), Y.clone().requires_grad_(True) * 1), likelihood=GAUSSIAN)
    assert torch.equal(graph.theta, post.theta)


# --- covariances from elsewhere ------------------------------------------------------------


@pytest.mark.parametrize(
    ("K", "message"),
    [
        ([[[-0.5]], [[1.0]]], r"positive semi-definite .* 1 of 2 are not \(row 0: its smallest eigenvalue is -0.5"),
        ([[[1.0]], [[-1e-3]]], r"positive semi-definite .*row 1"),
        ([[[1.0, 2.0], [2.0, 1.0]]], "positive semi-definite .* eigenvalue is -1"),
        ([[[1.0, 0.5], [-0.2, 1.0]]], "symmetric .* transpose by 0.7"),
        ([[[float("nan")]]], "must be finite"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_no_covariance_is_refused(K, message, dtype):
    K = torch.tensor(K, dtype=dtype)
    noise = L.Gaussian(noise=torch.ones(K.shape[-1]))
    with pytest.raises(ValueError, match=message):
        from_marginal(noise, torch.zeros(K.shape[:2], dtype=dtype), K)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_covariances_that_are_only_rounded_pass(dtype):
    """Singular ones too, in any unit: J Jᵀ of fewer directions than outputs, rounded to the dtype."""
    J = torch.randn(50, 5, 2, dtype=torch.float64) * torch.logspace(-6, 6, 50, dtype=torch.float64)[:, None, None]
    K = (J @ J.mT).to(dtype)
    found = from_marginal(L.Gaussian(noise=torch.ones(5)), torch.zeros(50, 5, dtype=dtype), K)
    assert torch.isfinite(found.log_prob(torch.zeros(50, 5))).all()
    variances = torch.tensor([[[1.0]], [[-1e-17]]], dtype=torch.float64)  # 1 − (1 + ε) in a Gaussian process, say
    assert from_marginal(GAUSSIAN, torch.zeros(2, 1).double(), variances).epistemic[1] == 0


# --- conventions ---------------------------------------------------------------------------


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


# --- digests -------------------------------------------------------------------------------

SCALE = 2.0


def closing_over(value, other=0):
    return lambda y: y * value + other


class Plain:
    def __init__(self, **held):
        vars(self).update(held)


@pytest.mark.parametrize(
    ("make", "same", "unlike"),
    [
        (lambda v: v, (1, 1.0), (1.0, 1.0 + 2**-52)),
        (lambda v: torch.tensor(v), ([1.0, 2.0], [1.0, 2.0]), ([1.0, 2.0], [2.0, 1.0])),
        (lambda v: dict(v), ([("a", 1), ("b", 2)], [("b", 2), ("a", 1)]), ([("a", 1)], [("a", 2)])),
        (closing_over, (0.1, 0.1), (0.1, 0.2)),
        (lambda v: [lambda y: y + SCALE, lambda y: y - SCALE][v], (0, 0), (0, 1)),
        (lambda v: partial(closing_over, v), (1, 1), (1, 2)),
        (lambda v: Plain(a=v, b=torch.ones(2)), (1, 1), (1, 2)),
        (lambda v: torch.distributions.Normal(0.0, v), (1.0, 1.0), (1.0, 1.1)),
        (lambda v: [torch.softmax, torch.sigmoid][v], (0, 0), (0, 1)),
        (lambda v: np.float32(v), (0.5, 0.5), (0.5, 0.25)),
        (lambda v: np.arange(v), (3, 3), (3, 4)),
    ],
)
def test_digests_are_equal_for_equal_content_only(make, same, unlike):
    assert digest(make(same[0])) == digest(make(same[1]))
    assert digest(make(unlike[0])) != digest(make(unlike[1]))


def test_digests_leave_out_caches_and_end_on_cycles():
    one, two = (torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2)) for _ in range(2))
    assert two.precision_matrix.shape == (2, 2)
    assert digest(one) == digest(two)
    ring = Plain()
    ring.me = ring
    assert digest(ring) == digest(ring)
