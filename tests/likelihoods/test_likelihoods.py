"""Every likelihood: normalised, differentiated right, with the right Fisher, and honest at the
boundary.
"""

import math

import pytest
import torch
from scipy import integrate, stats

from ssla import likelihoods as L
from ssla.likelihoods.support import Continuous
from support.cases import CASES, tasks
from support.oracles import finite_difference

NAMES = list(CASES)


@pytest.mark.parametrize("name", NAMES)
def test_score_and_precision_equal_autograd(name):
    likelihood, y, f = tasks(name)
    free = f.clone().requires_grad_(True)
    (score,) = torch.autograd.grad(likelihood.log_prob(y, free).sum(), free, create_graph=True)
    rows = [
        torch.autograd.grad(score[:, c].sum(), free, retain_graph=True)[0]
        for c in range(f.shape[1])
    ]
    precision = -torch.stack(rows, 1)
    scale = 1 + precision.abs().amax((1, 2), keepdim=True)
    assert torch.allclose(
        likelihood.score(y, f),
        score.detach(),
        rtol=1e-9,
        atol=1e-10 * float(score.detach().abs().max() + 1),
    )
    assert ((likelihood.precision(y, f) - precision) / scale).abs().max() < 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_score_and_precision_equal_finite_differences(name):
    likelihood, y, f = tasks(name)
    score = finite_difference(lambda g: likelihood.log_prob(y, g), f)
    size = 1 + score.abs().amax(-1, keepdim=True) + likelihood.log_prob(y, f).abs().unsqueeze(-1)
    assert ((likelihood.score(y, f) - score) / size).abs().max() < 1e-5
    precision = -finite_difference(lambda g: likelihood.score(y, g), f)
    size = (
        1
        + precision.abs().amax((-2, -1), keepdim=True)
        + likelihood.score(y, f).abs().amax(-1)[:, None, None]
    )
    assert ((likelihood.precision(y, f) - precision) / size).abs().max() < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_are_the_three_together(name):
    likelihood, y, f = tasks(name)
    together = likelihood.derivatives(y, f)
    assert torch.allclose(together.log_prob, likelihood.log_prob(y, f))
    assert torch.allclose(together.score, likelihood.score(y, f))
    assert torch.allclose(together.precision, likelihood.precision(y, f))


def expectation(likelihood, f, function):
    """E_y function(y) for one f (C,), by summation or adaptive quadrature: an array of
    function's shape.
    """
    support = likelihood.support_for(f.shape[-1])
    if support.kind in ("count", "class"):
        top = support.count if support.kind == "class" else 400
        y = torch.arange(top, dtype=torch.float64)
        p = likelihood.predictive.log_prob(y, f.expand(top, -1)).exp()
        return torch.tensordot(p, function(y, f.expand(top, -1)), 1)
    assert isinstance(support, Continuous)
    centre, scale = float(likelihood.mean(f)), float(likelihood.variance(f)) ** 0.5
    low, high = (
        (1e-9, centre + 60 * scale)
        if type(support).__name__ == "Positive"
        else (centre - 400 * scale, centre + 400 * scale)
    )

    def integrand(y):
        one = torch.tensor([y], dtype=torch.float64)
        return (likelihood.log_prob(one, f[None]).exp()[0] * function(one, f[None])[0]).numpy()

    parts = [low, centre - 8 * scale, centre, centre + 8 * scale, high]
    parts = [p for p in parts if p >= low]
    return sum(
        torch.as_tensor(integrate.quad_vec(integrand, a, b, epsabs=1e-12)[0])
        for a, b in zip(parts, parts[1:], strict=False)
    )


SCALAR = [
    name for name in NAMES if CASES[name][0].support_for(CASES[name][1].shape[1]).kind != "vector"
]


@pytest.mark.parametrize("name", [n for n in SCALAR if n != "tempered"])
def test_density_integrates_to_one_and_fisher_is_the_expected_precision(name):
    likelihood, f, _ = CASES[name]
    for row in f:
        mass = expectation(likelihood, row, lambda y, g: torch.ones_like(y))
        assert abs(float(mass) - 1) < 1e-6
        expected = expectation(
            likelihood, row, lambda y, g: likelihood.precision(y, g).flatten(1)
        ).reshape(len(row), -1)
        fisher = likelihood.fisher(row[None])[0]
        assert torch.allclose(
            fisher, expected, rtol=1e-5, atol=1e-6 * float(1 + expected.abs().max())
        )
        assert torch.linalg.eigvalsh(fisher)[0] >= -1e-12 * (1 + fisher.abs().max())


@pytest.mark.parametrize("name", [n for n in SCALAR if n != "tempered"])
def test_score_has_mean_zero(name):
    likelihood, f, _ = CASES[name]
    for row in f:
        score = expectation(likelihood, row, likelihood.score)
        assert score.abs().max() < 1e-5 * (1 + likelihood.fisher(row[None]).abs().max().sqrt())


@pytest.mark.parametrize("name", NAMES)
def test_samples_have_the_mean_and_variance(name):
    likelihood, f, _ = CASES[name]
    generator = torch.Generator().manual_seed(1)
    draws = likelihood.sample(f, 60_000, generator).double()
    assert draws.shape[:2] == (60_000, len(f))
    mean, variance = likelihood.mean(f), likelihood.variance(f)
    if mean.dim() == draws.dim() and likelihood.support_for(f.shape[1]).kind == "class":
        draws = torch.nn.functional.one_hot(draws.long(), mean.shape[-1]).double()
    error = (variance / 60_000).sqrt() + 1e-6
    assert ((draws.mean(0) - mean).abs() < 5 * error).all()
    assert torch.allclose(draws.var(0), variance, rtol=0.15, atol=1e-3)
    again = likelihood.sample(f, 60_000, torch.Generator().manual_seed(1))
    assert torch.equal(again, likelihood.sample(f, 60_000, torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(
    ("likelihood", "reference"),
    [
        (L.Gaussian(noise=0.7), lambda y: stats.norm(1.2, 0.7).logpdf(y)),
        (L.StudentT(df=4.0, scale=0.8), lambda y: stats.t(4, 1.2, 0.8).logpdf(y)),
        (L.Poisson(), lambda y: stats.poisson(math.exp(1.2)).logpmf(y)),
        (L.Poisson(link="identity"), lambda y: stats.poisson(1.2).logpmf(y)),
        (
            L.NegativeBinomial(dispersion=0.4),
            lambda y: stats.nbinom(2.5, 2.5 / (2.5 + math.exp(1.2))).logpmf(y),
        ),
        (L.Bernoulli(), lambda y: stats.bernoulli(1 / (1 + math.exp(-1.2))).logpmf(y)),
    ],
)
def test_log_prob_equals_scipy(likelihood, reference):
    y = (
        torch.tensor([0.0, 1.0])
        if isinstance(likelihood, L.Bernoulli)
        else torch.tensor([0.0, 1.0, 3.0, 11.0])
    )
    f = torch.full((len(y), 1), 1.2, dtype=torch.float64)
    assert torch.allclose(
        likelihood.log_prob(y.double(), f), torch.from_numpy(reference(y.numpy())), rtol=1e-10
    )


def test_heteroscedastic_forms_agree():
    mean, variance = torch.tensor([0.4, -2.0]).double(), torch.tensor([0.3, 5.0]).double()
    y = torch.tensor([1.0, -4.0]).double()
    by_log = L.HeteroscedasticGaussian().log_prob(y, torch.stack([mean, variance.log()], -1))
    natural = torch.stack([mean / variance, -0.5 / variance], -1)
    assert torch.allclose(
        by_log, L.HeteroscedasticGaussian(parameters="natural").log_prob(y, natural), rtol=1e-12
    )


def test_observed_precision_determinant_is_what_the_contract_says():
    """det Λ = −r² e^{−2s}/2: indefinite away from the mode."""
    f, y = torch.tensor([[0.5, 0.8]]).double(), torch.tensor([2.0]).double()
    r = 1.5
    det = torch.linalg.det(L.HeteroscedasticGaussian().precision(y, f))
    assert torch.allclose(det, torch.tensor(-(r**2) * math.exp(-1.6) / 2).double(), rtol=1e-6)


def test_multivariate_gaussian_equals_scipy_and_takes_full_covariance():
    sigma = torch.tensor([[1.0, 0.3], [0.3, 0.5]], dtype=torch.float64)
    f, y = torch.randn(5, 2).double(), torch.randn(5, 2).double()
    expected = [
        stats.multivariate_normal(f[i].numpy(), sigma.numpy()).logpdf(y[i].numpy())
        for i in range(5)
    ]
    assert torch.allclose(
        L.Gaussian(covariance=sigma).log_prob(y, f),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-10,
    )


@pytest.mark.parametrize("name", NAMES)
def test_broadcasts_a_grid_of_y(name):
    likelihood, f, y = CASES[name]
    if likelihood.support_for(f.shape[1]).kind == "vector":
        grid, many = y.expand(len(f), *y.shape), f[:, None, :]
    else:
        grid, many = y.expand(len(f), -1), f[:, None, :]
    flat = tasks(name)
    whole = likelihood.log_prob(grid, many)
    assert whole.shape == (len(f), len(y))
    assert torch.allclose(whole.flatten(), likelihood.log_prob(*flat[1:]), rtol=1e-12)
    assert likelihood.score(grid, many).shape == (*whole.shape, f.shape[1])
    assert likelihood.precision(grid, many).shape == (*whole.shape, f.shape[1], f.shape[1])


def test_a_column_of_targets_is_not_broadcast_against_the_rows():
    f, y = torch.randn(4, 1), torch.randn(4, 1)
    assert L.Gaussian(noise=1.0).log_prob(y, f).shape == (4,)


def test_tempering_scales_learning_but_not_the_new_observation():
    base, hot = L.Poisson(), L.Tempered(L.Poisson(), beta=0.3)
    y, f = torch.tensor([2.0]).double(), torch.tensor([[0.4]]).double()
    assert torch.allclose(hot.log_prob(y, f), 0.3 * base.log_prob(y, f))
    assert torch.allclose(hot.fisher(f), 0.3 * base.fisher(f))
    assert hot.predictive == base


def test_far_outputs_stay_finite():
    for name in ("poisson", "heteroscedastic", "negative binomial", "bernoulli", "categorical"):
        likelihood, f, y = CASES[name]
        for dtype in (torch.float32, torch.float64):
            for size in (80.0, 800.0):
                far = torch.full((2, f.shape[1]), size, dtype=dtype) * torch.tensor(
                    [[1.0], [-1.0]], dtype=dtype
                )
                for part in likelihood.derivatives(y[:2].to(dtype), far):
                    assert torch.isfinite(part).all(), (name, dtype, size)
