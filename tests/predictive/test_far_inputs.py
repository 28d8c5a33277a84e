"""Inputs very far from the training rows: probabilities reach a limit along a ray, nothing
overflows, and rows are flagged.
"""

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.maths.quadrature.logistic import logistic_normal
from ssla.network.bounds import LARGEST, shrink_factors, shrink_rows
from ssla.sklearn import SSLAClassifier, SSLARegressor

DIRECTION = torch.tensor([0.3, -1.2, 0.7], dtype=torch.float64)
POWERS = torch.cat([torch.arange(4, 37), torch.tensor([50, 100, 150, 160, 200, 300])]).double()


def network(outputs, dtype):
    generator = torch.Generator().manual_seed(outputs)
    module = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, outputs))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.7 * torch.randn(parameter.shape, generator=generator))
    return module.to(dtype).eval()


def posterior(outputs, dtype, structure="dense", weights="last_layer"):
    module = network(outputs, dtype)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, 3, generator=generator, dtype=torch.float64).to(dtype)
    with torch.no_grad():
        f = module(x).double()
    draws = torch.rand(150, generator=generator)
    y = (
        (draws < torch.sigmoid(f[:, 0])).long()
        if outputs == 1
        else torch.softmax(f, 1).cumsum(1).lt(draws[:, None]).sum(1)
    )
    likelihood = L.Bernoulli() if outputs == 1 else L.Categorical()
    mode = "polish" if weights == "last_layer" else None
    given = {
        "structure": structure,
        "weights": weights,
        "prior": priors.Gaussian(1.0),
        "mode": mode,
    }
    return ssla.fit(module, (x, y.clamp_max(max(outputs, 2) - 1)), likelihood=likelihood, **given)


def ray(dtype):
    """Scales 1e4 … 1e36 (float32) or 1e300 (float64), and the inputs there."""
    powers = POWERS if dtype == torch.float64 else POWERS[POWERS <= 36]
    return 10.0**powers, (10.0 ** powers[:, None] * DIRECTION).to(dtype)


@pytest.mark.parametrize("structure", ["dense", "kfac", "diag", "low_rank"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("outputs", [1, 2, 3, 5])
def test_probabilities_reach_their_limit_along_a_ray(outputs, dtype, structure):
    """The limit is the same integral with f and √K of the ray's direction alone, a million
    times as large.
    """
    post = posterior(outputs, dtype, structure)
    _, x = ray(dtype)
    p = post.predict(x)
    probs = p.probs.double()
    assert bool(torch.isfinite(probs).all())
    assert float((probs - probs[-1]).abs().max()) < 1e-4
    if outputs == 1:
        f, K = post.outputs_at(x[:1].double() if dtype == torch.float64 else x[:1])
        limit = stats.norm.cdf(
            float(f[0, 0]) / float(K[0, 0, 0]) ** 0.5
        )  # a step in place of the sigmoid
        assert float(probs[-1, 1]) == pytest.approx(limit, abs=2e-4)
    flagged = p.diagnostics.extreme_rows
    assert not bool(flagged[:20].any())
    if dtype == torch.float64:
        assert bool(flagged[-5:].all())
        assert f"outputs beyond 1e+40 in {int(flagged.sum())}" in str(p.diagnostics)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_weights_reach_their_limit_too(dtype):
    post = posterior(3, dtype, weights="all")
    probs = post.predict(ray(dtype)[1]).probs.double()
    assert bool(torch.isfinite(probs).all())
    assert float((probs - probs[-1]).abs().max()) < 1e-3


def test_the_logistic_integral_at_every_scale():
    """Against the sum in forty digits, and from 1e6 on against the step function's Φ(m/s)."""
    mpmath.mp.dps = 40
    for s in (99.0, 101.0, 3e3):
        for ratio in (-3.0, 0.5):
            m = ratio * s
            exact = mpmath.quad(
                lambda t, m=m, s=s: mpmath.npdf(t) / (1 + mpmath.exp(-(m + s * t))),
                [
                    -12,
                    *sorted(
                        {
                            max(min(-ratio + k / s, 11.9), -11.9)
                            for k in (-60, -20, -5, 0, 5, 20, 60)
                        }
                    ),
                    12,
                ],
            )
            found = logistic_normal(
                torch.tensor([m], dtype=torch.float64), torch.tensor([s], dtype=torch.float64)
            )
            assert float(found.log_one[0]) == pytest.approx(float(mpmath.log(exact)), abs=1e-7)
    ratios = torch.linspace(-5, 5, 21, dtype=torch.float64)
    for power in range(6, 155, 4):
        s = torch.full_like(ratios, 10.0**power)
        found = logistic_normal(ratios * s, s)
        assert np.allclose(found.log_one, stats.norm.logcdf(ratios), atol=3e-6, rtol=0)
        assert bool(((found.spread >= 0) & (found.spread <= 0.25 + 1e-9)).all())


def test_rows_are_moved_along_their_ray():
    phi = torch.tensor([[1.0, -2.0], [1e70, -2e70], [torch.inf, 1.0]], dtype=torch.float64)
    factors = shrink_factors(phi)
    assert torch.allclose(
        shrink_rows(phi, factors)[1], torch.tensor([0.5, -1.0], dtype=torch.float64) * LARGEST
    )
    assert torch.equal(shrink_rows(phi, factors)[0], phi[0])
    assert bool(torch.isfinite(shrink_rows(phi, factors)).all())
    assert shrink_factors(phi[:1]) is None
    assert shrink_factors(phi[:1].float()) is None
    assert torch.equal(
        shrink_factors(torch.tensor([[1e20], [1.0]])), torch.ones(2, dtype=torch.float64)
    )


def test_a_network_without_an_answer_says_so():
    module = nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.LayerNorm(4), nn.Linear(4, 1))
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    post = ssla.fit(
        module.eval(), (x, x[:, 0]), likelihood=L.Gaussian(noise=0.5), prior=priors.Gaussian()
    )
    with pytest.raises(
        ValueError, match=r"network's output must be finite, but 1 of 2 .* layers overflow"
    ):
        post.predict(torch.tensor([[1.0, 1.0, 1.0], [3e38, -3e38, 3e38]]))


@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic", "positive"])
def test_numbers_stay_finite_and_are_flagged(likelihood):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(100, 2))
    y = np.exp(0.3 * (X @ [1.0, -1.0] + 0.3 * rng.normal(size=100)))
    model = SSLARegressor(likelihood, members=1, max_epochs=10, random_state=0).fit(X, y)
    p = model.predict_dist(X[:4] * np.array([1.0, 1e20, 1e160, 1e300])[:, None])
    assert bool(torch.isfinite(p.mean).all())
    assert bool(torch.isfinite(p.interval(0.9)).all())
    assert p.diagnostics.extreme_rows.tolist() == [False, False, True, True]


def test_classes_of_tables_stay_finite_and_are_flagged():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(100, 2))
    model = SSLAClassifier(members=2, max_epochs=10, random_state=0).fit(
        X, X[:, 0] + 0.5 * rng.normal(size=100) > 0
    )
    scales = 10.0 ** np.array([0, 4, 8, 9, 12, 16, 20, 60, 160, 300])
    p = model.predict_dist(np.array([[0.4, -0.9]]) * scales[:, None])
    assert bool(torch.isfinite(p.probs).all())
    assert float((p.probs[1:] - p.probs[-1]).abs().max()) < 1e-3
    assert p.diagnostics.extreme_rows.tolist() == [False] * 7 + [True] * 3
