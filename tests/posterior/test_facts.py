"""Exact results for Gaussian models, and the paper's published numbers. float64, 1e-10."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import ssla
from ssla import likelihoods, priors
from support.oracles import Constant, linear_log_evidence, linear_predictive

EXACT = ["newton", "output"]
D = torch.tensor([3.1, 4.7, 5.2, 2.9, 4.4], dtype=torch.float64)
ONES = torch.ones(5, 1, dtype=torch.float64)
X = torch.tensor([(1, -2), (1, -1), (1, 0), (1, 1), (1, 3)], dtype=torch.float64)
Y = torch.tensor([-4, -1.5, 0.5, 3.2, 6.9], dtype=torch.float64)


def normal_normal(**options):
    return ssla.fit(
        Constant(),
        (ONES, D),
        likelihood=likelihoods.Gaussian(noise=math.sqrt(2)),
        prior=priors.Gaussian(precision=1.0, mean=4.0),
        **options,
    )


def line(prior=None, **options):
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    noise = likelihoods.Gaussian(noise=math.sqrt(1.5))
    return ssla.fit(
        model, (X, Y), likelihood=noise, prior=prior or priors.Gaussian(precision=1.0), **options
    )


@pytest.mark.parametrize("refit", EXACT)
def test_normal_normal_has_the_stated_values(refit):
    p = normal_normal().predict(torch.zeros(1, 1), refit=refit)
    y = torch.tensor([[2.0, 4.0, 6.5]])
    stated = torch.tensor([[-2.245180, -1.332680, -2.652992]], dtype=torch.float64)
    assert (p.log_prob(y) - stated).abs().max() < 1e-6
    assert (p.increments(y).total - stated).abs().max() < 1e-6


@pytest.mark.parametrize("refit", EXACT)
def test_linear_regression_has_the_stated_values(refit):
    p = line().predict(torch.tensor([[1.0, 2.0]]), refit=refit)
    assert abs(float(p.mean) - 4.468235) < 1e-6
    assert abs(float(p.variance) - 2.043529) < 1e-6


@pytest.mark.parametrize("refit", EXACT)
@pytest.mark.parametrize("outputs", [1, 2, 4])
def test_fact_1_gaussian_linear_is_exact_before_normalisation(refit, outputs):
    """newton and output equal N(f̂, σ² + K) un-normalised, to machine precision, for any number
    of outputs.
    """
    generator = torch.Generator().manual_seed(outputs)
    x = torch.randn(30, 3, dtype=torch.float64, generator=generator)
    W = torch.randn(3, outputs, dtype=torch.float64, generator=generator)
    y = x @ W + 0.5 * torch.randn(30, outputs, dtype=torch.float64, generator=generator)
    noise = torch.linspace(0.4, 0.9, outputs, dtype=torch.float64)
    model = nn.Linear(3, outputs, dtype=torch.float64)
    post = ssla.fit(
        model,
        (x, y),
        likelihood=likelihoods.Gaussian(noise=noise),
        prior=priors.Gaussian(0.7, mean=0.2),
    )
    new = torch.randn(6, 3, dtype=torch.float64, generator=generator)
    target = 2 * torch.randn(6, outputs, dtype=torch.float64, generator=generator)
    p = post.predict(new, refit=refit)
    design, new_design = (torch.cat([a, torch.ones(len(a), 1)], 1).numpy() for a in (x, new))
    expected = np.zeros(6)
    for d in range(outputs):
        mean, variance = linear_predictive(
            design, y[:, d], float(noise[d]) ** 2, 0.7, 0.2, new_design
        )
        expected += stats.norm(mean, np.sqrt(variance)).logpdf(target[:, d])
    asked = target.squeeze(1) if outputs == 1 else target
    assert (p.increments(asked).total - torch.from_numpy(expected)).abs().max() < 1e-10
    assert (p.log_prob(asked) - torch.from_numpy(expected)).abs().max() < 1e-10
    assert (p.mass - 1).abs().max() < 1e-10


def test_fact_2_assla_is_the_plug_in_and_its_mass_is_known():
    post = line()
    x = torch.tensor([[1.0, 2.0], [1.0, -9.0]])
    K = post.marginal(x).covariance[:, 0, 0]
    p, plug_in = post.predict(x, refit="none"), post.predict(x, refit="plug_in")
    y = torch.linspace(-20, 20, 41).expand(2, -1)
    assert (p.log_prob(y) - plug_in.log_prob(y)).abs().max() < 1e-10
    assert (p.variance - 1.5).abs().max() < 1e-10
    assert (p.mass - torch.sqrt(1.5 / (1.5 + K))).abs().max() < 1e-10
    assert (p.increments(y).total - plug_in.log_prob(y) - p.mass.log()[:, None]).abs().max() < 1e-10


def test_fact_3_the_empirical_curvature_is_tighter_than_the_plug_in():
    post = line()
    x = torch.tensor([[1.0, 2.0], [1.0, -9.0]])
    empirical = post.predict(x, refit=ssla.NoRefit(curvature="empirical"))
    plug_in = post.predict(x, refit="plug_in")
    assert (empirical.stddev < 0.99 * plug_in.stddev).all()
    # un-normalised: log N(y; f̂, σ²) − ½ log(1 + K r²/σ⁴)
    f, K = (part.flatten() for part in post.marginal(x))
    y = torch.tensor([3.0, 1.0], dtype=torch.float64)
    expected = torch.from_numpy(
        stats.norm(f.numpy(), math.sqrt(1.5)).logpdf(y.numpy())
    ) - 0.5 * torch.log1p(K * (y - f) ** 2 / 1.5**2)
    assert (empirical.increments(y).total - expected).abs().max() < 1e-10


@pytest.mark.parametrize("refit", ["none", "newton", "output"])
def test_fact_4_mass_is_the_integral_of_the_increments(refit):
    """Against SciPy's quadrature of exp(total), for a likelihood without closed form."""
    f, K = (
        torch.tensor([[0.3, -0.5]], dtype=torch.float64),
        torch.tensor([[[0.2, 0.05], [0.05, 0.3]]], dtype=torch.float64),
    )
    p = ssla.predictive.from_marginal(likelihoods.HeteroscedasticGaussian(), f, K, refit=refit)
    y = torch.linspace(-60, 60, 48_001, dtype=torch.float64)
    integral = torch.trapezoid(p.increments(y[None]).total.exp(), y)
    assert abs(float(p.mass) - float(integral)) < 1e-6
    assert abs(float(torch.trapezoid(p.log_prob(y[None]).exp(), y)) - 1) < 1e-6


def test_evidence_equals_the_closed_form():
    expected = linear_log_evidence(X, Y, 1.5, 1.0, 0.0)
    assert abs(line().log_evidence() - expected) < 1e-10
    assert abs(normal_normal().log_evidence() - linear_log_evidence(ONES, D, 2.0, 1.0, 4.0)) < 1e-10


def test_increments_split_into_likelihood_prior_and_curvature_exactly():
    """In the linear model each increment is computable by hand from θ̂ and θ̃(y)."""
    post = line(prior=priors.Gaussian(precision=2.0, mean=0.5))
    x, y = torch.tensor([[1.0, 2.0]], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    parts = post.predict(x).increments(y)
    A, b = X.numpy(), Y.numpy()

    def mode(A, b):
        return np.linalg.solve(A.T @ A / 1.5 + 2 * np.eye(2), A.T @ b / 1.5 + 2 * 0.5)

    theta, tilde = mode(A, b), mode(np.vstack([A, x.numpy()]), np.append(b, y.numpy()))
    log_lik = lambda t: stats.norm(A @ t, math.sqrt(1.5)).logpdf(b).sum()
    log_prior = lambda t: stats.norm(0.5, math.sqrt(0.5)).logpdf(t).sum()
    new = stats.norm(x.numpy() @ tilde, math.sqrt(1.5)).logpdf(y.numpy())[0]
    H = A.T @ A / 1.5 + 2 * np.eye(2)
    curvature = -0.5 * (
        np.linalg.slogdet(H + x.numpy().T @ x.numpy() / 1.5)[1] - np.linalg.slogdet(H)[1]
    )
    assert abs(float(parts.likelihood) - (log_lik(tilde) - log_lik(theta) + new)) < 1e-10
    assert abs(float(parts.prior) - (log_prior(tilde) - log_prior(theta))) < 1e-10
    assert abs(float(parts.curvature) - curvature) < 1e-10


@pytest.mark.parametrize("n", [1_000, 1_000_000])
def test_float32_streams_stay_within_1e_5_of_the_analytic_predictive(n):
    """Normal–normal in float32, streamed: the authors' own code is off by 5.7e-2 at 10⁶."""
    generator = torch.Generator().manual_seed(3)
    data = 4 + 1.5 * torch.randn(n, generator=generator)
    batches = [(torch.ones(len(part), 1), part) for part in data.split(10_000)]
    post = ssla.fit(
        Constant(dtype=torch.float32),
        batches,
        likelihood=likelihoods.Gaussian(noise=1.5),
        prior=priors.Gaussian(precision=1.0, mean=4.0),
    )
    assert post.report.n == n
    total, tau = data.double().sum(), n / 2.25 + 1.0
    mean, variance = float((total / 2.25 + 4.0) / tau), 2.25 + 1 / tau
    y = (mean + math.sqrt(variance) * torch.linspace(-6, 6, 101, dtype=torch.float64)).float()
    expected = stats.norm(mean, math.sqrt(variance)).logpdf(y.double().numpy())
    for refit in ("newton", "output"):
        p = post.predict(torch.ones(1, 1), refit=refit)
        assert p.mean.dtype == torch.float32
        assert (p.log_prob(y[None]).double() - torch.from_numpy(expected)).abs().max() < 1e-5
        assert (
            p.increments(y[None]).total.double() - torch.from_numpy(expected)
        ).abs().max() < 1e-5
