"""Answers beside a large offset keep their digits."""

import torch

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.predictive import affine, from_marginal, mixture
from support.networks import around_a_million, data, mlp

GAUSSIAN = L.Gaussian(noise=0.3)
X, Y = data(60)


WEAK = {"prior": priors.Gaussian(1e-6)}


def test_answers_beside_a_large_offset_keep_their_digits():
    net, double, x, y = around_a_million()
    for likelihood in (L.Gaussian(noise=0.01), L.Gaussian(noise="estimate"), L.StudentT(8.0, 0.01)):
        one, two = (
            ssla.fit(m, (x.to(d), y), likelihood=likelihood, gaussian="laplace", **WEAK)
            for m, d in ((net, x.dtype), (double, y.dtype))
        )
        for refit in ("output", "none"):
            a, b = one.predict(x[:50], refit), two.predict(x[:50].double(), refit)
            assert a.mean.dtype == torch.float64
            assert ((a.mean - b.mean) / b.stddev).abs().max() < 1e-3
            assert torch.allclose(
                a.interval(0.9).diff(dim=1), b.interval(0.9).diff(dim=1), rtol=1e-3
            )
        f = one.marginal(x[:50]).mean
        assert f.dtype == torch.float64
        assert (f - two.marginal(x[:50].double()).mean).abs().max() < 1e-5


def test_answers_stay_in_the_models_dtype_where_it_holds_them():
    post = ssla.fit(mlp(dtype=torch.float32), (X, Y), likelihood=GAUSSIAN, prior=priors.Gaussian())
    assert post.predict(X).mean.dtype == post.marginal(X).mean.dtype == torch.float32
    assert (
        mixture([post.predict(X)] * 2).mean.dtype
        == affine(post.predict(X), 100.0, 2.0).mean.dtype
        == torch.float32
    )


def test_an_offset_added_to_a_predictive_keeps_its_digits():
    post = ssla.fit(mlp(dtype=torch.float32), (X, Y), likelihood=GAUSSIAN, prior=priors.Gaussian())
    base, moved = post.predict(X[:9]), affine(post.predict(X[:9]), 1e6, 0.01)
    exact = 1e6 + 0.01 * base.law.log_density.marginal.mean.squeeze(1)
    assert torch.allclose(moved.mean, exact, rtol=0, atol=1e-8)
    assert (
        mixture(
            [base, from_marginal(GAUSSIAN, torch.zeros(9, 1).double(), torch.ones(9, 1, 1))]
        ).mean.dtype
        == torch.float64
    )
