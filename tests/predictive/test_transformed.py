"""Transformed targets, against scipy's log-normal and against numerical integration."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

import ssla
from ssla import metrics
from ssla.predictive import affine, from_marginal, mixture, transformed
from ssla.predictive.transformed import remove_transforms

MEAN = torch.tensor([[0.3], [-2.0], [1.5]], dtype=torch.float64)
K = torch.tensor([0.2, 0.01, 0.5], dtype=torch.float64).reshape(3, 1, 1)
NOISE = 0.4
SD = (K.flatten() + NOISE**2).sqrt().numpy()
Y = torch.tensor([[0.2, 1.0, 3.0], [0.05, 0.14, 0.2], [0.5, 4.0, 30.0]], dtype=torch.float64)


def gaussian(mean=MEAN, noise=NOISE, K=K):
    return from_marginal(ssla.likelihoods.Gaussian(noise=noise), mean, K)


def law():
    return stats.lognorm(SD, scale=np.exp(MEAN.flatten().numpy()))


class Opaque:
    """Hides the class of a law."""

    kind = "scalar"

    def __init__(self, law):
        self._law = law

    def __getattr__(self, name):
        return getattr(self._law, name)


def numerical(p, row, function):
    """∫ function(y) p(y) dy over the support, by scipy on the log scale."""

    def height(z):
        y = torch.full((3,), math.exp(z), dtype=torch.float64)
        return function(math.exp(z)) * math.exp(float(p.log_prob(y)[row]) + z)

    return integrate.quad(
        height, -14, 14, points=[-3, 0, 3], limit=500, epsabs=1e-13, epsrel=1e-11
    )[0]


def test_exp_of_a_gaussian_is_log_normal():
    p, exact = transformed(gaussian(), "exp"), law()
    columns = Y.numpy().T
    assert np.allclose(p.log_prob(Y).T, exact.logpdf(columns), rtol=1e-12)
    assert np.allclose(p.cdf(Y).T, exact.cdf(columns), rtol=1e-12)
    assert np.allclose(
        p.icdf([0.01, 0.5, 0.99]).T, [exact.ppf(q) for q in (0.01, 0.5, 0.99)], rtol=1e-10
    )
    assert np.allclose(p.mean, exact.mean(), rtol=1e-12)
    assert np.allclose(p.variance, exact.var(), rtol=1e-12)
    assert np.allclose(p.mode, np.exp(MEAN.flatten().numpy() - SD**2), rtol=1e-3)
    assert (p.interval(0.999)[:, 0] > 0).all()
    draws = p.sample(4000, torch.Generator().manual_seed(0)).numpy()
    assert (
        min(
            stats.kstest(draws[:, i], stats.lognorm(SD[i], scale=float(MEAN[i].exp())).cdf).pvalue
            for i in range(3)
        )
        > 1e-3
    )
    assert (
        p.cdf(torch.tensor([-1.0, 0.0, math.inf], dtype=torch.float64))
        == torch.tensor([0.0, 0.0, 1.0])
    ).all()
    assert np.allclose(
        metrics.crps(p, Y[:, 1], reduce=False), _crps_lognormal(Y[:, 1].numpy()), rtol=1e-5
    )


def _crps_lognormal(y):
    """Closed form (Baran and Lerch, 2015)."""
    mu, s = MEAN.flatten().numpy(), SD
    omega = (np.log(y) - mu) / s
    inner = stats.norm.cdf(omega - s) + stats.norm.cdf(s / np.sqrt(2)) - 1
    return y * (2 * stats.norm.cdf(omega) - 1) - 2 * np.exp(mu + s**2 / 2) * inner


def test_the_parts_of_the_variance_follow_their_definitions():
    """Var_f E[y|f] and E_f Var[y|f], by draws of f."""
    p = transformed(gaussian(), "exp")
    f = MEAN.flatten() + K.flatten().sqrt() * torch.randn(
        400_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    given = (f + NOISE**2 / 2).exp()
    assert torch.allclose(p.epistemic, given.var(0), rtol=0.05)
    assert torch.allclose(p.aleatoric, (given**2 * math.expm1(NOISE**2)).mean(0), rtol=0.05)
    assert torch.allclose(p.epistemic + p.aleatoric, p.variance)


def test_mixtures_of_gaussians_in_any_unit_have_closed_moments():
    parts = mixture([gaussian(noise=0.2), gaussian(MEAN + 1, 0.6)], [0.3, 0.7])
    p = transformed(affine(parts, shift=0.5, scale=0.8), "exp")
    for row in range(3):
        assert numerical(p, row, lambda y: 1.0) == pytest.approx(1, abs=1e-9)
        mean = numerical(p, row, lambda y: y)
        assert float(p.mean[row]) == pytest.approx(mean, rel=1e-8)
        assert float(p.variance[row]) == pytest.approx(
            numerical(p, row, lambda y, m=mean: (y - m) ** 2), rel=1e-7
        )
    region = p.hdr(0.8)
    inside = (
        torch.nan_to_num(p.cdf(region.upper) - p.cdf(region.lower))
        if region.lower.shape[1] == 1
        else None
    )
    assert inside is None or torch.allclose(inside, torch.full_like(inside, 0.8), atol=1e-6)


def test_laws_that_are_not_gaussian_are_integrated():
    """A Gaussian seen as if it were not: the quadrature has the closed form to its stated
    accuracy.
    """
    exact = law()
    p = transformed(replace(gaussian(), law=Opaque(gaussian().law)), "exp")
    assert np.allclose(p.mean, exact.mean(), rtol=1e-6)
    assert np.allclose(p.variance, exact.var(), rtol=1e-6)
    wide = replace(gaussian(), law=Opaque(gaussian(noise=1.5).law))
    sd = np.sqrt(K.flatten().numpy() + 2.25)
    assert np.allclose(
        transformed(wide, "exp").variance,
        stats.lognorm(sd, scale=np.exp(MEAN.flatten().numpy())).var(),
        rtol=1e-6,
    )


def test_exp_of_a_student_t_has_no_mean():
    z = from_marginal(
        ssla.likelihoods.StudentT(df=4.0, scale=0.3),
        torch.zeros(2, 1),
        torch.full((2, 1, 1), 1e-12),
    )
    p = transformed(z, "exp")
    with pytest.warns(UserWarning, match="2 of 2 predictives have no finite variance"):
        assert p.mean.isinf().all()
    assert torch.isfinite(p.interval(0.999)).all()
    assert float(p.icdf(0.9)[0]) == pytest.approx(math.exp(0.3 * stats.t.ppf(0.9, 4)), rel=1e-5)
    assert float(transformed(z, "logistic").mean[0]) == pytest.approx(0.5, rel=1e-5)


def test_the_logistic_transform_of_a_gaussian():
    p = transformed(gaussian(), "logistic")
    for row in range(3):
        z = stats.norm(float(MEAN[row]), SD[row])
        moments = [
            integrate.quad(
                lambda t, k=k, z=z: special.expit(t) ** k * z.pdf(t), -12, 12, epsabs=1e-12
            )[0]
            for k in (1, 2)
        ]
        assert float(p.mean[row]) == pytest.approx(moments[0], rel=1e-8)
        assert float(p.variance[row]) == pytest.approx(moments[1] - moments[0] ** 2, rel=1e-7)

        def height(y, row=row):
            return math.exp(float(p.log_prob(torch.full((3,), y, dtype=torch.float64))[row]))

        assert integrate.quad(height, 1e-9, 1 - 1e-9, limit=200)[0] == pytest.approx(1, abs=1e-6)
    ends = p.interval(0.99)
    assert ((ends > 0) & (ends < 1)).all()


def test_targets_outside_the_support_and_wrong_kinds_are_refused():
    p = transformed(gaussian(), "exp")
    with pytest.raises(ValueError, match="y must be positive"):
        p.log_prob(torch.tensor([1.0, 0.0, 2.0]))
    with pytest.raises(ValueError, match="Did you mean 'exp'"):
        transformed(gaussian(), "expo")
    counts = from_marginal(ssla.likelihoods.Poisson(), MEAN, K)
    with pytest.raises(TypeError, match="kind 'count'"):
        transformed(counts, "exp")


def test_increments_and_the_way_back():
    p = transformed(gaussian(), "exp")
    total = p.increments(Y).total
    assert torch.allclose(total, p.log_prob(Y) + p.mass.log()[:, None], atol=1e-10)
    mixed = mixture([p, transformed(gaussian(MEAN + 1), "exp")])
    assert torch.allclose(remove_transforms(mixed).mean, MEAN.flatten() + 0.5)
