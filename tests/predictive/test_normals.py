"""Mixtures of normals: closed forms, scipy, and brute force over the posterior of mean and log
variance.
"""

import math

import pytest
import torch
from scipy import integrate, stats

from ssla.predictive.normals import NormalsLaw, average_normals
from ssla.values import Marginal

ONE = torch.ones(1, dtype=torch.float64)


def law():
    means = torch.tensor([[0.0, 3.0], [1.0, 1.0]], dtype=torch.float64)
    scales = torch.tensor([[1.0, 0.5], [2.0, 0.1]], dtype=torch.float64)
    return NormalsLaw(
        means,
        scales,
        torch.tensor([0.7, 0.3], dtype=torch.float64),
        torch.zeros(2, dtype=torch.float64),
    )


def test_density_distribution_and_quantiles_are_those_of_scipy():
    y, q = (
        torch.tensor([[-1.0, 2.9], [0.9, 4.0]], dtype=torch.float64),
        torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64),
    )
    found = law()
    for row, (means, scales) in enumerate(
        zip(found.means.tolist(), found.scales.tolist(), strict=True)
    ):
        parts = [stats.norm(m, s) for m, s in zip(means, scales, strict=True)]
        pdf = 0.7 * parts[0].pdf(y[row]) + 0.3 * parts[1].pdf(y[row])
        cdf = 0.7 * parts[0].cdf(y[row]) + 0.3 * parts[1].cdf(y[row])
        assert found.log_prob(y)[row].exp().tolist() == pytest.approx(pdf.tolist(), rel=1e-12)
        assert found.cdf(y)[row].tolist() == pytest.approx(cdf.tolist(), rel=1e-12)
    assert torch.allclose(found.cdf(found.icdf(q)), q.expand(2, 3), atol=1e-12)


def test_moments_modes_and_regions():
    found = law()
    assert found.mean.tolist() == pytest.approx([0.9, 1.0])
    assert float(found.variance[0]) == pytest.approx(0.7 * (1 + 0.81) + 0.3 * (0.25 + 2.1**2))
    assert float(found.mode[1]) == pytest.approx(1.0, abs=1e-3)
    region = found.hdr(0.9)
    inside = found.cdf(torch.nan_to_num(region.upper)) - found.cdf(torch.nan_to_num(region.lower))
    assert torch.where(region.lower.isnan(), 0.0, inside).sum(1).tolist() == pytest.approx(
        [0.9, 0.9], abs=1e-3
    )
    draws = found.sample(20_000, torch.Generator().manual_seed(0))
    assert torch.allclose(draws.mean(0), found.mean, atol=0.04)
    assert torch.allclose(draws.var(0), found.variance, rtol=0.04)
    with pytest.raises(TypeError, match="not a sum of increments"):
        found.increments(torch.zeros(2, 1, dtype=torch.float64))


def test_average_over_mean_and_log_variance_is_the_double_integral():
    f = torch.tensor([[0.3, -0.4]], dtype=torch.float64)
    K = torch.tensor([[[0.2, 0.1], [0.1, 0.3]]], dtype=torch.float64)
    found = average_normals([Marginal(f, K)], ONE, ONE, ONE, f)
    joint = stats.multivariate_normal(f[0].numpy(), K[0].numpy())
    for y in (-1.0, 0.3, 2.5):
        exact, _ = integrate.dblquad(
            lambda s, m, y=y: joint.pdf([m, s]) * stats.norm.pdf(y, m, math.exp(s / 2)),
            -4,
            4,
            -4.5,
            3.7,
            epsabs=1e-8,
        )
        assert float(found.log_prob(torch.tensor([y], dtype=torch.float64)).exp()) == pytest.approx(
            exact, rel=2e-4
        )
    assert float(found.epistemic) == pytest.approx(0.2)
    assert float(found.aleatoric) == pytest.approx(math.exp(-0.4 + 0.15), rel=1e-4)  # E eˢ


def test_factors_stretch_around_the_mean_and_the_log_variance_has_a_limit():
    f, K = (
        torch.tensor([[1.0, 0.0]], dtype=torch.float64),
        torch.zeros(1, 2, 2, dtype=torch.float64),
    )
    wide = average_normals([Marginal(f, K)], ONE, 3 * ONE, ONE, f)
    assert float(wide.mean) == pytest.approx(1.0)
    assert float(wide.stddev) == pytest.approx(3.0)
    far = average_normals(
        [Marginal(torch.tensor([[1.0, 50.0]], dtype=torch.float64), K)], ONE, ONE, ONE, f, 2.0
    )
    assert float(far.variance) == pytest.approx(math.exp(2.0))
