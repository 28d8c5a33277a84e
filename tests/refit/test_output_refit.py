"""The rungs against Gauss–Hermite integration of ∫ p(y|f) N(f; f̂, K) df, for every likelihood."""

import numpy as np
import pytest
import torch
from scipy import integrate, stats

import ssla
from ssla import likelihoods as L
from ssla.predictive import from_marginal
from support.cases import CASES
from support.oracles import gauss_hermite, kl_on_grid, monte_carlo_classes, random_spd

SD = [0.1, 0.3, 0.6]
# the lower rungs have no integral at times
pytestmark = pytest.mark.filterwarnings("ignore:.*predictives are inaccurate")


def outputs(name, sd, seed=0):
    """f̂ (N, C) in the bulk of the likelihood, K with standard deviations of at most sd,
    correlated.
    """
    likelihood = CASES[name][0]
    C = CASES[name][1].shape[1]
    generator = torch.Generator().manual_seed(seed)
    f = torch.randn(12, C, dtype=torch.float64, generator=generator)
    K = random_spd(12, C, C, seed=seed + 1)
    scale = K.diagonal(dim1=-2, dim2=-1).sqrt()
    K = K / scale[:, :, None] / scale[:, None, :] * sd**2
    if "natural" in name:
        f = torch.stack([f[:, 0], -1.0 - f[:, 1].abs()], -1)
        K = K * 0.02  # σ² = −1/(2η₂) must keep its sign over the whole of N(f̂, K)
    if name == "poisson identity":
        f, K = 4 + f.abs(), K
    return likelihood, f, K


def kl(name, sd, refit):
    """Mean KL from the integral to the rung's normalised predictive."""
    likelihood, f, K = outputs(name, sd)
    predictive = from_marginal(likelihood, f, K, refit=refit)
    support = likelihood.support_for(f.shape[1])
    if support.kind == "class":
        y, weights = (
            torch.arange(support.count, dtype=torch.float64).expand(len(f), -1),
            torch.ones(1, dtype=torch.float64),
        )
    elif support.kind == "count":
        y, weights = (
            torch.arange(250, dtype=torch.float64).expand(len(f), -1),
            torch.ones(1, dtype=torch.float64),
        )
    else:
        t = torch.linspace(-1, 1, 1201, dtype=torch.float64)
        z = (
            predictive.mean[:, None]
            + 14 * predictive.stddev[:, None] * torch.sign(t) * t.abs() ** 1.5
        )
        y = z.clamp_min(1e-6) if type(support).__name__ == "Positive" else z
        weights = torch.zeros_like(y)
        weights[:, 1:-1] = (y[:, 2:] - y[:, :-2]) / 2
    truth = gauss_hermite(likelihood.predictive, y, f, K)
    return float(kl_on_grid(truth, predictive.log_prob(y), weights).mean())


INTEGRABLE = [
    n
    for n in CASES
    if n
    not in (
        "gaussian vector",
        "gaussian full",
        "categorical",
        "hot categorical",
        "custom heteroscedastic",
    )
]


@pytest.mark.parametrize("sd", SD)
@pytest.mark.parametrize("name", INTEGRABLE)
def test_output_refit_is_close_to_the_integral(name, sd):
    assert -1e-6 < kl(name, sd, "output") <= 2e-3


@pytest.mark.parametrize("name", INTEGRABLE)
def test_the_output_refit_is_at_least_as_close_as_no_refit(name):
    """At sd(f) = 0.6 the mode beats ASSLA wherever the two differ."""
    assert kl(name, 0.6, "output") <= kl(name, 0.6, "none") + 1e-4


@pytest.mark.parametrize("sd", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_softmax_is_close_to_the_integral_up_to_sd_3(sd, classes):
    generator = torch.Generator().manual_seed(classes)
    f = torch.randn(8, classes, dtype=torch.float64, generator=generator)
    K = torch.eye(classes, dtype=torch.float64).expand(8, -1, -1) * sd**2
    truth = monte_carlo_classes(f, K)
    p = from_marginal(L.Categorical(), f, K).probs
    assert float((truth * (truth / p).log()).sum(1).mean()) <= 2e-3


def test_bernoulli_equals_a_two_class_softmax():
    """One logit with variance K is the difference of two: the same answer either way."""
    f, K = (
        torch.tensor([[0.7], [-2.0]], dtype=torch.float64),
        torch.tensor([[[1.3]], [[4.0]]], dtype=torch.float64),
    )
    zeros = torch.zeros_like(f)
    big = torch.zeros(2, 2, 2, dtype=torch.float64)
    big[:, 1, 1] = K[:, 0, 0]
    for refit in ("none", "newton", "output"):
        one = from_marginal(L.Bernoulli(), f, K, refit=refit).probs
        two = from_marginal(L.Categorical(), torch.cat([zeros, f], 1), big, refit=refit).probs
        assert torch.allclose(one, two, rtol=1e-8)


def test_closed_form_and_batched_algebra_agree():
    """A likelihood of two outputs, told twice: by components (C = 2) and embedded among five
    (batched LAPACK).
    """

    def five(y, f):
        return L.HeteroscedasticGaussian().log_prob(y, torch.stack([f[..., 0], f[..., 3]], -1))

    f, K = (
        torch.tensor([[0.2, -0.4]], dtype=torch.float64),
        torch.tensor([[[0.3, 0.1], [0.1, 0.2]]], dtype=torch.float64),
    )
    wide_f, wide_K = (
        torch.zeros(1, 5, dtype=torch.float64),
        0.1 * torch.eye(5, dtype=torch.float64)[None],
    )
    for i, a in enumerate((0, 3)):
        wide_f[0, a] = f[0, i]
        for j, b in enumerate((0, 3)):
            wide_K[0, a, b] = K[0, i, j]
    y = torch.linspace(-5, 5, 21, dtype=torch.float64)[None]
    for refit in ("none", "newton", "output"):
        small = from_marginal(L.HeteroscedasticGaussian(), f, K, refit=refit).increments(y).total
        large = from_marginal(L.custom(five), wide_f, wide_K, refit=refit).increments(y).total
        assert torch.allclose(small, large, atol=1e-7)


@pytest.mark.parametrize(
    "name", [n for n in CASES if n not in ("gaussian vector", "gaussian full")]
)
def test_the_mode_is_a_mode(name):
    """No nearby f beats f̃: brute force over random steps in the whitened objective."""
    likelihood, f, K = outputs(name, 0.6)
    real = likelihood.support_for(f.shape[1]).kind == "real" and name != "custom gamma"
    y = (torch.tensor([-1.5, 1.0], dtype=torch.float64) if real else CASES[name][2][:2]).expand(
        len(f), -1
    )
    predictive = from_marginal(likelihood, f, K)
    found = predictive.increments(y)
    value = found.likelihood  # without a posterior the prior's part is counted here
    generator = torch.Generator().manual_seed(0)
    R = torch.linalg.cholesky(K)
    best = torch.full_like(value, -torch.inf)
    law = likelihood.predictive
    for scale in (3.0, 1.0, 0.3, 0.1, 0.03):
        v = scale * torch.randn(4000, 1, f.shape[1], 1, dtype=torch.float64, generator=generator)
        moved = f + (R @ v).squeeze(-1)
        if not law.linear_domain:
            moved[..., -1] = torch.where(
                (moved[..., -1] < 0) == (f[..., -1] < 0), moved[..., -1], f[..., -1]
            )
        objective = law.log_prob(y, moved.unsqueeze(-2)) - 0.5 * (v.squeeze(-1) ** 2).sum(
            -1, keepdim=True
        )
        best = torch.maximum(best, objective.amax(0))
    assert (value >= best - 1e-9).all()
    assert (value <= best + 0.3).all()  # and the search came close, so it could have won


def test_steps_one_is_the_newton_formula_of_the_contract():
    """log p(y|f̂) + ½ gᵀK(I+ΛK)⁻¹g − ½ log|I+ΛK|, by plain dense algebra."""
    likelihood, f, K = outputs("categorical", 0.8)
    y = torch.randint(3, (len(f),)).double()
    g, Lam = likelihood.score(y, f), likelihood.precision(y, f)
    M = torch.eye(3, dtype=torch.float64) + Lam @ K
    quadratic = (g.unsqueeze(1) @ K @ torch.linalg.solve(M, g.unsqueeze(-1))).flatten()
    expected = likelihood.log_prob(y, f) + 0.5 * quadratic - 0.5 * torch.logdet(M)
    found = from_marginal(likelihood, f, K, refit=ssla.OutputRefit(steps=1)).increments(y).total
    assert torch.allclose(found, expected, atol=1e-12)


def test_indefinite_curvature_falls_back_to_fisher_and_is_counted():
    likelihood = L.HeteroscedasticGaussian()
    f = torch.zeros(2, 2, dtype=torch.float64)
    K = torch.stack([0.01 * torch.eye(2), 4.0 * torch.eye(2)]).double()
    p = from_marginal(likelihood, f, K, refit="none")
    assert p.diagnostics.fallback.tolist() == [False, True]
    y = torch.full((2,), 6.0, dtype=torch.float64)
    Lam = likelihood.fisher(f)
    expected = likelihood.log_prob(y, f) - 0.5 * torch.logdet(torch.eye(2) + Lam @ K)
    assert abs(float(p.increments(y).total[1] - expected[1])) < 1e-10
    assert "Fisher fallback in 1" in str(p.diagnostics)
    assert not from_marginal(
        likelihood, f, K
    ).diagnostics.fallback.any()  # at the mode there is nothing to fall back from


RATES = [(7.0, 3.0), (7.0, 2.6), (9.0, 3.0), (2.0, 1.0), (0.5, 2.0), (40.0, 2.0), (1.0, 1e4)]


def zeros_of_a_rate(mean, sd, refit="output"):
    """The predictive of a count whose rate is mean ± sd, and P(0) before it is normalised."""
    f, K = (
        torch.tensor([[mean]], dtype=torch.float64),
        torch.tensor([[[sd**2]]], dtype=torch.float64),
    )
    predictive = from_marginal(L.Poisson(link="identity"), f, K, refit=refit)
    total = predictive.increments(torch.zeros(1, 1, dtype=torch.float64)).total
    return predictive, float(total.exp())


@pytest.mark.parametrize(("mean", "sd"), RATES)
def test_a_count_of_zero_is_integrated_over_positive_rates(mean, sd):
    """Against quadrature of e^−λ N(λ; m, s²) over λ > 0.

    At 7 ± 3 it was 0.066 or 0, and is 0.0207.
    """
    predictive, found = zeros_of_a_rate(mean, sd)
    density = stats.norm(mean, sd).pdf
    exact = integrate.quad(
        lambda rate: np.exp(-rate) * density(rate), 0, mean + 12 * min(sd, 40), epsabs=1e-14
    )[0]
    assert found == pytest.approx(exact, rel=1e-8)
    assert not any(
        flag.any() for flag in (predictive.diagnostics.fallback, predictive.diagnostics.unconverged)
    )


@pytest.mark.parametrize(("mean", "sd"), [case for case in RATES if case[1] < 10])
def test_the_mass_of_counts_is_that_of_the_positive_rates(mean, sd):
    """The other counts are Laplace approximations: their error is the rest.

    At 7 ± 3 the mass was 1.052.
    """
    predictive, _ = zeros_of_a_rate(mean, sd)
    assert float(predictive.mass) == pytest.approx(stats.norm.cdf(mean / sd), rel=0.03)


def test_a_count_of_zero_is_continuous_where_its_mode_meets_the_boundary():
    """m = s² ± 1e-9: the three increments as well as their sum."""
    below, above = (
        zeros_of_a_rate(9.0 + step, 3.0)[0].increments(torch.zeros(1, 1, dtype=torch.float64))
        for step in (-1e-9, 1e-9)
    )
    for name in ("likelihood", "curvature", "total"):
        assert torch.allclose(getattr(below, name), getattr(above, name), atol=1e-8)


def test_a_newton_step_to_a_rate_below_zero_is_counted():
    """From 23.6 ± 10.3 the step for y = 0 ends at −82: the mass was 8e12, and nothing was
    flagged.
    """
    predictive, found = zeros_of_a_rate(23.6, 10.3, "newton")
    assert found == pytest.approx(zeros_of_a_rate(23.6, 10.3)[1], rel=1e-12)
    assert bool(predictive.diagnostics.fallback.all())
    assert float(predictive.mass) < 1.5
    assert not bool(zeros_of_a_rate(7.0, 1.0, "newton")[0].diagnostics.fallback.any())
