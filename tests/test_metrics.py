"""Scores against scoringrules, SciPy and hand computation; calibration of a model that is right."""

import math

import numpy as np
import pytest
import scoringrules
import torch
from scipy import stats

import ssla
from ssla import likelihoods as L
from ssla import metrics
from ssla.predictive import from_marginal
from support.oracles import Constant


def gaussian(n=4000, sd=0.7, doubt=0.4, seed=0):
    """A predictive that is right: y is drawn from it."""
    generator = torch.Generator().manual_seed(seed)
    f = torch.randn(n, 1, dtype=torch.float64, generator=generator)
    K = torch.full((n, 1, 1), doubt**2, dtype=torch.float64)
    p = from_marginal(L.Gaussian(noise=sd), f, K)
    return p, p.sample(1, generator)[0]


def student(n=300, seed=0):
    """The same numbers as a grid predictive: Student-t with K = 0 has a known CRPS."""
    f = torch.randn(n, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return from_marginal(
        L.StudentT(df=5.0, scale=0.7), f, torch.zeros(n, 1, 1, dtype=torch.float64)
    ), f[:, 0]


def test_nll_and_rmse_by_hand():
    p, y = gaussian(10)
    scale = math.sqrt(0.7**2 + 0.4**2)
    assert (
        abs(float(metrics.nll(p, y)) + stats.norm(p.mean.numpy(), scale).logpdf(y.numpy()).mean())
        < 1e-12
    )
    assert metrics.nll(p, y, reduce=False).shape == (10,)
    assert abs(float(metrics.rmse(p, y)) - float(((p.mean - y) ** 2).mean().sqrt())) < 1e-12


@pytest.mark.parametrize("offset", [0.0, 0.3, -2.0, 9.0, -60.0])
def test_crps_of_a_grid_equals_scoringrules(offset):
    p, centre = student()
    y = centre + offset
    expected = scoringrules.crps_t(y.numpy(), 5.0, centre.numpy(), 0.7)
    assert (metrics.crps(p, y, reduce=False) - torch.from_numpy(expected)).abs().max() < 2e-4 * (
        1 + abs(offset)
    )


def test_crps_of_a_gaussian_equals_scoringrules():
    p, y = gaussian(50)
    expected = scoringrules.crps_normal(y.numpy(), p.mean.numpy(), p.stddev.numpy())
    assert (metrics.crps(p, y, reduce=False) - torch.from_numpy(expected)).abs().max() < 1e-12


@pytest.mark.parametrize("rate", [0.05, 3.0, 400.0])
def test_crps_of_counts_equals_the_sum(rate):
    """Σ_k (F(k) − 1{k ≥ y})² with SciPy's F (scoringrules' own overflows for large counts)."""
    f, K = (
        torch.full((5, 1), math.log(rate), dtype=torch.float64),
        torch.zeros(5, 1, 1, dtype=torch.float64),
    )
    p = from_marginal(L.Poisson(), f, K)
    y = torch.tensor([0.0, 1.0, 3.0, 400.0, 2000.0], dtype=torch.float64)
    k = np.arange(3000)
    expected = ((stats.poisson(rate).cdf(k) - (k >= y.numpy()[:, None])) ** 2).sum(1)
    assert torch.allclose(
        metrics.crps(p, y, reduce=False), torch.from_numpy(expected), rtol=2e-5, atol=1e-6
    )


def test_interval_score_by_hand():
    p, y = gaussian(200)
    low, high = p.interval(0.9).unbind(1)
    miss = (low - y).clamp_min(0) + (y - high).clamp_min(0)
    assert torch.allclose(
        metrics.interval_score(p, y, 0.9, reduce=False), high - low + 2 / 0.1 * miss
    )


def test_a_right_predictive_is_calibrated_and_a_wrong_one_is_not():
    p, y = gaussian()
    for level in (0.5, 0.9, 0.95):
        error = 4 * math.sqrt(level * (1 - level) / 4000)
        assert abs(float(metrics.coverage(p, y, level)) - level) < error
    assert stats.kstest(metrics.pit(p, y).numpy(), "uniform").pvalue > 1e-3
    assert metrics.calibration_error(p, y) < 0.02
    overconfident = from_marginal(
        L.Gaussian(noise=0.3), *p.law.log_density.marginal, refit="plug_in"
    )
    assert metrics.coverage(overconfident, y, 0.95) < 0.7
    assert metrics.calibration_error(overconfident, y) > 0.05
    assert stats.kstest(metrics.pit(overconfident, y).numpy(), "uniform").pvalue < 1e-6
    assert metrics.mean_width(overconfident, 0.95) < metrics.mean_width(p, 0.95)


def test_randomised_pit_of_counts_is_uniform():
    f, K = (
        torch.full((5000, 1), 0.3, dtype=torch.float64),
        torch.full((5000, 1, 1), 0.2, dtype=torch.float64),
    )
    p = from_marginal(L.Poisson(), f, K)
    generator = torch.Generator().manual_seed(0)
    y = p.sample(1, generator)[0]
    assert stats.kstest(metrics.pit(p, y, generator).numpy(), "uniform").pvalue > 1e-3


def test_brier_and_ece():
    f = 2 * torch.randn(6000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p = from_marginal(L.Categorical(), f, torch.zeros(6000, 3, 3, dtype=torch.float64))
    y = p.sample(1, torch.Generator().manual_seed(1))[0]
    by_hand = ((torch.nn.functional.one_hot(y, 3) - torch.softmax(f, 1)) ** 2).sum(1).mean()
    assert abs(float(metrics.brier(p, y) - by_hand)) < 1e-9
    assert metrics.ece(p, y) < 0.02
    sharp = from_marginal(L.Categorical(), 4 * f, torch.zeros(6000, 3, 3, dtype=torch.float64))
    assert metrics.ece(sharp, y) > 0.05
    assert metrics.brier(sharp, y) > metrics.brier(p, y)
    assert set(metrics.summary(p, y).scores) == {"nll", "brier", "ece", "accuracy", "mass"}


def test_summary_reads_like_a_table():
    p, y = gaussian(100)
    s = metrics.summary(p, y)
    assert s["mass"] == 1.0
    assert "coverage 95%" in str(s)
    assert "width 50%" in str(s)


def test_scores_refuse_what_they_cannot_score():
    p, y = gaussian(10)
    with pytest.raises(TypeError, match="for classes, but the predictive is of kind 'scalar'"):
        metrics.brier(p, y)
    with pytest.raises(ValueError, match=r"y must have shape \(10,\)"):
        metrics.rmse(p, y[:3])
    classes = from_marginal(L.Bernoulli(), torch.zeros(2, 1), torch.ones(2, 1, 1))
    with pytest.raises(TypeError, match="CRPS needs ordered targets"):
        metrics.crps(classes, torch.zeros(2))


def test_scores_take_columns_and_arrays():
    post = ssla.fit(
        Constant(),
        (torch.ones(20, 1), torch.randn(20).double()),
        likelihood=L.Gaussian(noise="estimate"),
        prior=ssla.priors.Gaussian(),
    )
    y = torch.randn(7, 1)
    p = post.predict(torch.ones(7, 1))
    assert torch.allclose(metrics.nll(p, y), metrics.nll(p, y.numpy()))
    assert metrics.crps(p, y).dim() == 0
