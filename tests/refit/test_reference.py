"""The reference refit against independent oracles, and the fast engines against the reference.

The engines are solved to 1e-9 posterior standard deviations, the reference to 1e-10. Likelihood and
prior increments are of first order in that distance, so 1e-8 is asked of each increment (6e-10 was
reached; 5e-9 in determinants of all weights).
"""

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.refit.weights import reference
from ssla.refit.weights.last_layer import LastLayerRefit
from ssla.refit.weights.last_layer_products import ProductsRefit
from ssla.refit.weights.reference import compute_half_logdet, maximise_by_newton, refit_one
from support.cases import CASES
from support.oracles import brute_force_refit, linear_predictive
from support.reference_problems import problem
from support.refits import FAMILIES, T, inputs, last_layer, seeded, small_network

CLOSE = 1e-8  # in log density, of every increment
ENGINE = {"tolerance": 1e-9}


@cache
def last_layer_problem(name):
    return problem(name)


@cache
def all_weights_problem(name):
    return problem(name, weights="all")


def total(found):
    return float(found.likelihood + found.prior + found.curvature)


def assert_equals_reference(post, new, candidates, kind, **options):
    """Every task of an engine, the mode and the three increments, against the reference."""
    log_density = ssla.WeightRefit(**(ENGINE | options), curvature=kind)(post, new)
    y = candidates.expand(len(new), *candidates.shape)
    solved = log_density.solve(y)
    modes = log_density.find_weights_at_modes(y).flatten(0, 1)
    assert solved.converged.all()
    task = 0
    for i in range(len(new)):
        for value in candidates:
            found = refit_one(post, new[i : i + 1], value, kind)
            assert float(solved.likelihood[task]) == pytest.approx(
                float(found.likelihood), abs=CLOSE
            )
            assert float(solved.prior[task]) == pytest.approx(float(found.prior), abs=CLOSE)
            assert float(solved.curvature[task]) == pytest.approx(float(found.curvature), abs=CLOSE)
            assert torch.allclose(modes[task], found.theta, rtol=0, atol=1e-8)
            assert bool(solved.fallback[task]) == (found.curvature_kind != kind)
            task += 1
    assert float(solved.total.amax() - solved.total.amin()) > 1e-3  # the tasks differ
    return log_density, solved


# --- the reference against other ways to compute the same ---------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_a_last_layer_equals_scipy(name):
    """SciPy's trust region on torch.distributions, autograd's Hessian, NumPy's determinant."""
    post, new, candidates, log_joint, log_new = last_layer(name)
    for i, j in ((0, 0), (1, 1), (2, -1)):
        expected, mode = brute_force_refit(log_joint, log_new(i, candidates[j]), post.theta)
        found = refit_one(post, new[i : i + 1], candidates[j])
        assert total(found) == pytest.approx(expected, abs=1e-9)
        assert torch.allclose(found.theta, mode, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", ["gaussian", "heteroscedastic", "poisson", "categorical"])
def test_all_weights_equal_scipy(name):
    """With the network's second derivatives in both determinants."""
    post, new, _, log_joint, log_new, _ = small_network(name)
    value = T(1.0) if name in ("poisson", "categorical") else post.predict(new).mean[:1]
    expected, mode = brute_force_refit(log_joint, log_new(0, value[0]), post.theta)
    found = refit_one(post, new[:1], value[0], "hessian")
    assert total(found) == pytest.approx(expected, abs=1e-8)
    assert torch.allclose(found.theta, mode, rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", ["observed", "fisher", "hessian"])
def test_gaussian_linear_models_have_the_exact_predictive(kind):
    """Fact 1 of method.md: un-normalised, to rounding."""
    x = inputs(50, 1, 4)
    y = x[:, 0] + 0.3 * inputs(50, 2, 1)[:, 0]
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).double()
    post = ssla.fit(model, (x, y), likelihood=L.Gaussian(noise=0.3), prior=priors.Gaussian(0.7))
    new = inputs(1, 4, 4)
    mean, variance = linear_predictive(x, y, 0.09, 0.7, 0.0, new)
    for value in (-1.0, 0.5, 4.0):
        expected = -0.5 * (np.log(2 * np.pi * variance[0]) + (value - mean[0]) ** 2 / variance[0])
        found = refit_one(post, new, T(value)[0], kind)
        assert total(found) == pytest.approx(expected, abs=1e-10)
        assert found.steps == 1  # a quadratic objective


@pytest.mark.parametrize("name", ["heteroscedastic", "custom gamma", "negative binomial"])
def test_observed_curvature_of_a_last_layer_is_the_hessian(name):
    """Λ by the likelihood and −∇² by autograd: f is linear, so they are the same."""
    post, new, candidates = last_layer_problem(name)
    observed, hessian = (
        refit_one(post, new[:1], candidates[1], kind) for kind in ("observed", "hessian")
    )
    assert float(observed.curvature) == pytest.approx(float(hessian.curvature), abs=1e-10)


def test_newton_leaves_a_region_of_wrong_curvature():
    """cos θ + 2 cos θ₂ from near a minimum: plain Newton would go to the minimum."""

    def objective(theta):
        weights = T(1.0, 2.0)
        value = (weights * theta.cos()).sum()
        return value, -weights * theta.sin(), torch.diag(weights * theta.cos())

    found, steps = maximise_by_newton(objective, T(2.5, -2.0))
    assert torch.allclose(found.cos(), torch.ones(2, dtype=torch.float64))  # a maximum
    assert steps > 2


def test_without_a_maximum_it_raises(monkeypatch):
    monkeypatch.setattr(reference, "MOST_STEPS", 20)
    with pytest.raises(RuntimeError, match="No maximum was reached from θ̂ in 20 steps"):
        maximise_by_newton(lambda t: (t @ t, 2 * t, -2 * torch.eye(2, dtype=t.dtype)), T(1.0, 0.5))


def test_half_a_log_determinant():
    assert float(compute_half_logdet(torch.diag(T(4.0, 9.0)))) == pytest.approx(np.log(6))
    assert compute_half_logdet(torch.diag(T(4.0, -9.0))).isnan()


# --- the engines against the reference -----------------------------------------------------------


@pytest.mark.parametrize("kind", ["observed", "fisher"])
@pytest.mark.parametrize("name", CASES)
def test_the_dense_engine_of_a_last_layer(name, kind):
    log_density, solved = assert_equals_reference(*last_layer_problem(name), kind, logdet="exact")
    assert isinstance(log_density._engine, LastLayerRefit)
    assert not solved.error.any()


@pytest.mark.parametrize("kind", ["observed", "fisher"])
@pytest.mark.parametrize("name", CASES)
def test_the_engine_of_products(name, kind):
    """With all probes the traces are exact but for the quadrature, whose error is stated."""
    post, new, candidates = last_layer_problem(name)
    options = ENGINE | {"logdet": "traces", "curvature": kind}
    log_density = ssla.WeightRefit(**options)(post, new)
    assert isinstance(log_density._engine, ProductsRefit)
    solved = log_density.solve(candidates.expand(len(new), *candidates.shape))
    found = [refit_one(post, new[i : i + 1], y, kind) for i in (0, 1) for y in candidates]
    likelihood, prior, curvature = (
        torch.stack([getattr(task, part) for task in found])
        for part in ("likelihood", "prior", "curvature")
    )
    assert solved.converged.all()
    assert torch.allclose(solved.likelihood, likelihood, rtol=0, atol=CLOSE)
    assert torch.allclose(solved.prior, prior, rtol=0, atol=CLOSE)
    assert ((solved.curvature - curvature).abs() <= 4 * solved.error + 1e-6).all()
    assert (solved.error < 1e-3).all()


@pytest.mark.parametrize("kind", ["observed", "fisher", "hessian"])
@pytest.mark.parametrize("name", list(CASES))
def test_the_engine_of_all_weights(name, kind):
    assert_equals_reference(*all_weights_problem(name), kind, logdet="exact")


@pytest.mark.filterwarnings("ignore:The network is not at the mode")
@pytest.mark.parametrize("weights", ["last_layer", "all"])
@pytest.mark.parametrize("mode", ["polish", "tilt", "as_is"])
def test_every_mode_with_row_weights(mode, weights):
    rows = 0.5 + torch.rand(80, dtype=torch.float64, generator=seeded(8))
    post, new, candidates = problem("heteroscedastic", weights, mode, row_weights=rows)
    assert (post.report.residual_after > 1e-3) == (mode != "polish")
    assert_equals_reference(post, new[:1], candidates, "observed", logdet="exact")


def test_the_tilt_is_part_of_the_answer():
    """A network off its mode: with "as_is" the refit also finishes the training."""
    rows = [
        refit_one(post, new[:1], y[0])
        for post, new, y in (problem("poisson", mode=mode) for mode in ("tilt", "as_is"))
    ]
    assert abs(total(rows[0]) - total(rows[1])) > 1e-3


@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_single_precision_networks_are_refitted_in_double(weights):
    post, new, candidates = problem("heteroscedastic", weights, dtype=torch.float32)
    assert_equals_reference(post, new[:1], candidates, "observed", logdet="exact")


@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_a_prior_whose_curvature_changes(weights):
    post, new, candidates = problem("gaussian", weights)
    post = post.with_prior(priors.StudentT(df=5.0, scale=1.5))
    assert_equals_reference(post, new[:1], candidates, "observed", logdet="exact")


def test_an_indefinite_observed_curvature_uses_the_fisher():
    """An untrained heteroscedastic layer, kept by the tilt, is not at a mode of its likelihood."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = inputs(70, 5)
    with torch.no_grad():
        model[2].bias[1] = 3.0
    post = ssla.fit(
        model,
        (x, torch.sin(x[:, 0])),
        likelihood=L.HeteroscedasticGaussian(),
        mode="tilt",
        prior=priors.Gaussian(1e-3),
        gaussian="laplace",
    )
    found = refit_one(post, inputs(1, 6), T(0.4)[0])
    assert found.curvature_kind == "fisher"
