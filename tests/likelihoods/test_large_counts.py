"""Counts near 1e15: densities without cancellation, sums that end, and fits that are refused at
once.
"""

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.predictive import from_marginal, mixture
from ssla.sklearn import SSLARegressor
from support.networks import mlp

LAWS = [L.Poisson(), L.Poisson(link="identity"), L.NegativeBinomial(0.02), L.NegativeBinomial(3.0)]


def exact(law, y, mean):
    """log P(y) in fifty digits."""
    y, mean = mpmath.mpf(y), mpmath.mpf(mean)
    if isinstance(law, L.Poisson):
        return y * mpmath.log(mean) - mean - mpmath.loggamma(y + 1)
    r = 1 / mpmath.mpf(law.dispersion)
    p = mean / (mean + r)
    return (
        mpmath.loggamma(y + r)
        - mpmath.loggamma(r)
        - mpmath.loggamma(y + 1)
        + y * mpmath.log(p)
        + r * mpmath.log(1 - p)
    )


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_densities_of_large_counts(law):
    mpmath.mp.dps = 50
    for y in (0.0, 5.0, 999_999.0, 1e6, 1e9, 1e12, 1e15):
        for away in (-3.0, 0.0, 1.0, 50.0):
            rate = max(y + away * math.sqrt(y), 1.0)
            f, mean = (
                (rate, rate)
                if not law.linear_domain
                else (math.log(rate), mpmath.exp(mpmath.mpf(math.log(rate))))
            )
            found = law.log_prob(
                torch.tensor([y], dtype=torch.float64), torch.tensor([[f]], dtype=torch.float64)
            )
            truth = exact(law, y, mean)
            assert abs(float(found[0]) - truth) < 2e-6 * max(1, abs(truth))


@pytest.mark.parametrize("f", [14.0, 25.0, 34.5])
def test_sums_over_large_counts(f):
    """The mean and variance of a Poisson law whose log rate is N(f, K), and its quantiles for a
    known rate.
    """
    for K in (1e-30, 1e-6, 0.01):
        p = from_marginal(
            L.Poisson(),
            torch.tensor([[f]], dtype=torch.float64),
            torch.tensor([[[K]]], dtype=torch.float64),
        )
        mean = math.exp(f + K / 2)
        variance = mean + mean**2 * math.expm1(K)
        assert float(p.mean) == pytest.approx(mean, rel=1e-5)
        assert float(p.stddev) == pytest.approx(math.sqrt(variance), rel=1e-3)
        assert float(p.mass) == pytest.approx(1.0, abs=1e-5)
        assert not bool(p.diagnostics.inaccurate.any())
        if K == 1e-30:
            normal = stats.norm(mean, math.sqrt(mean))
            assert float((p.icdf(0.95) - normal.ppf(0.95)) / math.sqrt(mean)) == pytest.approx(
                0, abs=2e-3
            )


@pytest.mark.filterwarnings("ignore:1 of 1 predictives are inaccurate")
def test_sums_over_impossible_ranges_end():
    """A wide tail, whose last blocks have alternating widths, is not cut at the centre.

    Means of e⁴⁰ end, with a flag.
    """
    wide = from_marginal(
        L.Poisson(),
        torch.tensor([[5.0]], dtype=torch.float64),
        torch.tensor([[[100.0]]], dtype=torch.float64),
    )
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    below = float(weights @ stats.poisson.cdf(1e6, np.exp(5 + 10 * nodes)) / weights.sum())
    assert float(wide.cdf(1e6)) == pytest.approx(
        below, abs=0.04
    )  # the refit's own error: its mass is .94
    for f, K in ((40.0, 25.0), (80.0, 25.0)):
        p = from_marginal(
            L.Poisson(),
            torch.tensor([[f]], dtype=torch.float64),
            torch.tensor([[[K]]], dtype=torch.float64),
        )
        assert bool(p.diagnostics.inaccurate.all())


def test_quantiles_of_mixtures_of_large_counts_end():
    """Whole numbers beyond 2⁵³ are not all doubles: a search by halves must end at neighbours."""
    K = torch.tensor([[[1e-4]]], dtype=torch.float64)
    parts = [
        from_marginal(L.NegativeBinomial(1.0), torch.tensor([[f]], dtype=torch.float64), K)
        for f in (40.0, 41.0)
    ]
    median = float(mixture(parts, [0.5, 0.5]).icdf(0.5))
    below = [
        1 - math.exp(-median / math.exp(f)) for f in (40.0, 41.0)
    ]  # exponential laws, but for K
    assert sum(below) / 2 == pytest.approx(0.5, abs=1e-3)


def test_fits_to_such_counts_are_refused_at_once():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 3))
    y = np.round(1e15 * np.exp(0.3 * X[:, 0]))
    with pytest.raises(
        ValueError, match=r"counts up to 1e\+09, but the largest is .*'positive' in the estimators"
    ):
        SSLARegressor("poisson").fit(X, y)
    for law in (L.Poisson(), L.NegativeBinomial(0.5)):
        with pytest.raises(ValueError, match=r"counts up to 1e\+09"):
            ssla.fit(
                mlp().double(),
                (torch.from_numpy(X), torch.from_numpy(y)),
                likelihood=law,
                prior=priors.Gaussian(),
            )
    asked = from_marginal(
        L.Poisson(), torch.zeros(1, 1).double(), torch.ones(1, 1, 1).double()
    ).log_prob(1e15)
    log = math.log(1e15)  # y is the rate, which is log-normal
    assert float(asked[0]) == pytest.approx(
        -0.5 * log**2 - log - 0.5 * math.log(2 * math.pi), abs=0.01
    )
