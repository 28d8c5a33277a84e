"""Whether targets are counts: each function alone, with networks that are written by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from ssla import likelihoods as L
from ssla.predictive.positive import Positive
from ssla.tables.networks import count_targets as counts
from ssla.tables.networks import whole_numbers
from ssla.tables.networks.scaling import Scaling

F64 = torch.float64
RATE = np.exp(np.linspace(-1, 1.5, 80))
Y = torch.from_numpy(np.random.default_rng(0).poisson(RATE).astype(float))
X = torch.from_numpy(np.log(RATE))[:, None]
W = 1 + torch.arange(80, dtype=F64) % 3


def ones(y):
    return torch.ones(len(y), dtype=F64)


@pytest.mark.parametrize(
    ("y", "small"),
    [
        ([0.0, 1, 2, 5], True),
        ([0.0, 1, 1, 0], False),  # two classes
        ([0.0, 1, 2.5], False),
        ([-1.0, 1, 2], False),
        ([0.0, 5, 10], True),
        ([0.0, 6, 12, 18], False),  # a standard deviation above five
    ],
)
def test_small_counts_are_whole_and_not_spread_wide(y, small):
    y = torch.tensor(y, dtype=F64)
    assert whole_numbers.are_small_counts(y, ones(y)) is small
    assert not whole_numbers.are_small_counts(y[:, None], ones(y))


def test_counts_that_vary_less_than_poisson_counts_are_numbers():
    spread = torch.tensor([0.0, 2, 4, 6], dtype=F64)  # variance 5, mean 3
    grades = torch.tensor([3.0, 4, 5, 4], dtype=F64)  # variance 0.5, mean 4
    assert counts.may_be_poisson(spread, ones(spread))
    assert not counts.may_be_poisson(grades, ones(grades))
    # the first and last rows are the spread; without them the rest is narrow
    assert not counts.may_be_poisson(spread, torch.tensor([0.0, 1, 1, 0], dtype=F64))


UNIT = Scaling(torch.tensor([2.0], dtype=F64), torch.tensor([1.5], dtype=F64))


@pytest.mark.parametrize("scale", [None, Positive(-1.0, 2.0)])
def test_probabilities_of_whole_numbers_add_up_to_one(scale):
    f = torch.tensor([[0.3], [-1.0], [2.0]], dtype=F64)
    y = torch.arange(400, dtype=F64)
    for row in f:
        many = row.expand(len(y), 1)
        logs = whole_numbers.compute_rounded_log_probs(L.Gaussian(noise=0.8), many, UNIT, scale, y)
        assert float(logs.exp().sum()) == pytest.approx(1, abs=1e-9)
        if scale is None:
            law = stats.norm(2 + 1.5 * float(row), 1.5 * 0.8)
            expected = law.cdf(y + 0.5) - np.where(y == 0, 0, law.cdf(y - 0.5))
            assert np.allclose(logs.exp(), expected, atol=1e-13)


def test_moments_are_on_the_scale_of_the_target():
    f = torch.tensor([[0.3, -0.5], [-1.0, 1.0]], dtype=F64)
    mean, sd = whole_numbers.compute_gaussian_moments(L.HeteroscedasticGaussian(), f, UNIT)
    assert np.allclose(mean, 2 + 1.5 * f[:, 0])
    assert np.allclose(sd, 1.5 * np.exp(f[:, 1].numpy() / 2))


def ensemble(modules, likelihoods, held, target=UNIT, kept=None):
    """What count_targets reads of an ensemble. modules: x (n, 1) -> f (n, C)."""
    parts = [
        SimpleNamespace(member=m, posterior=SimpleNamespace(likelihood=likelihood))
        for m, likelihood in enumerate(likelihoods)
    ]
    return SimpleNamespace(
        modules=modules,
        components=parts,
        held=held,
        kept_members=tuple(range(len(modules))) if kept is None else kept,
        target=target,
        scale=None,
        standardise=lambda x: x,
    )


HELD = torch.stack([torch.arange(80) % 2 == 0, torch.arange(80) % 2 == 1])


def numbers(noise=0.8, held=HELD):
    """Gaussian networks with the true rate as their mean."""
    one = lambda x: (x.exp() - 2.0) / 1.5
    return ensemble([one, one], [L.Gaussian(noise=noise)] * 2, held)


def poisson(shift=0.0, kept=None, held=HELD):
    one = lambda x: x + shift
    return ensemble([one, one], [L.Poisson()] * 2, held, target=None, kept=kept)


def test_means_are_those_of_the_network():
    found = counts.predict_means(numbers(), 0, X)
    assert np.allclose(found, RATE)


def test_dispersion_is_the_squared_error_beside_the_mean():
    expected = float(W @ (Y - torch.from_numpy(RATE)) ** 2) / float(W @ torch.from_numpy(RATE))
    assert counts.compute_dispersion(numbers(), X, Y, W) == pytest.approx(expected, rel=1e-12)


def test_a_mean_that_is_not_positive_has_no_dispersion():
    below = ensemble([lambda x: -5 + 0 * x] * 2, [L.Gaussian(noise=1.0)] * 2, HELD)
    assert counts.compute_dispersion(below, X, Y, W) == torch.inf


@pytest.mark.parametrize(("factor", "worth"), [(0.2, False), (1.0, True), (4.0, False)])
def test_errors_like_those_of_poisson_counts_are_worth_a_fit(factor, worth):
    rate = torch.from_numpy(RATE)
    y = rate + (factor * rate).sqrt() * torch.where(torch.arange(80) % 4 < 2, 1.0, -1.0)
    assert counts.compute_dispersion(numbers(), X, y, ones(y)) == pytest.approx(factor, rel=1e-9)
    assert counts.is_poisson_worth_fitting(numbers(), X, y, ones(y)) is worth


def test_rows_must_have_been_held_out():
    nobody = HELD.clone()
    nobody[1] = False
    nobody[1, 3] = True
    nobody[0] = False
    assert not counts.is_poisson_worth_fitting(numbers(held=None), X, Y, W)
    assert not counts.is_poisson_worth_fitting(numbers(held=nobody), X, Y, W)


def test_gains_are_differences_of_log_probabilities():
    found = counts.compute_member_gains(numbers(), poisson(), X, Y, W)
    assert found.shape == (2,)
    for gain, held in zip(found, HELD.numpy(), strict=True):
        own, rate, w = Y.numpy()[held], RATE[held], W.numpy()[held]
        law = stats.norm(rate, 1.5 * 0.8)
        low = np.where(own == 0, 0, law.cdf(own - 0.5))
        by_numbers = np.log(law.cdf(own + 0.5) - low)
        expected = np.average(stats.poisson(rate).logpmf(own) - by_numbers, weights=w)
        assert float(gain) == pytest.approx(expected, abs=1e-10)


def test_the_better_law_is_preferred():
    assert counts.is_poisson_better(numbers(noise=8.0), poisson(), X, Y, W)
    assert not counts.is_poisson_better(numbers(), poisson(shift=3.0), X, Y, W)


def test_only_members_that_both_have_kept_are_compared():
    whole = counts.compute_member_gains(numbers(), poisson(), X, Y, W)
    second = poisson(kept=(1,))
    second.components = [
        SimpleNamespace(member=0, posterior=SimpleNamespace(likelihood=L.Poisson()))
    ]
    second.modules = second.modules[1:]
    assert torch.allclose(counts.compute_member_gains(numbers(), second, X, Y, W), whole[1:])
    nothing = poisson(kept=())
    assert counts.compute_member_gains(numbers(), nothing, X, Y, W).shape == (0,)
    assert not counts.is_poisson_better(numbers(), nothing, X, Y, W)
