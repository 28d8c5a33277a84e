"""Laws of counts: against SciPy's, sums over every count, and the smallest set by sorting."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import gammaln

from ssla import likelihoods as L
from ssla.predictive import from_marginal
from ssla.predictive.count_law import (
    SINGLE_COUNTS,
    TAIL,
    Table,
    estimate_tails,
    find_densest_runs,
    sum_blocks,
)

F64 = torch.float64
RATES = np.array([0.02, 0.7, 3.0, 40.0, 900.0, 2e4])
INSIDE_A_BLOCK = 1e-4  # beyond single counts the distribution function is linear in a block
QS = torch.tensor([1e-6, 0.01, 0.3, 0.5, 0.9, 0.999], dtype=F64)


def negative_binomial(dispersion):
    """SciPy's law with the mean μ and the variance μ + dispersion·μ²."""
    r = 1 / dispersion
    return lambda mean: stats.nbinom(r, r / (r + mean))


LAWS = {
    "poisson": (L.Poisson(), np.log, stats.poisson),
    "poisson identity": (L.Poisson(link="identity"), lambda mean: mean, stats.poisson),
    "negative binomial": (L.NegativeBinomial(0.4), np.log, negative_binomial(0.4)),
    "dispersed": (L.NegativeBinomial(3.0), np.log, negative_binomial(3.0)),
}


def plugged_in(name, rates=RATES):
    """The law at known rates, and SciPy's."""
    likelihood, link, law = LAWS[name]
    f = torch.from_numpy(np.array(link(rates)))[:, None]
    K = torch.full((len(f), 1, 1), 0.1, dtype=F64)
    return from_marginal(likelihood, f, K, refit="plug_in"), law(rates)


@pytest.mark.parametrize("name", LAWS)
def test_a_known_rate_has_the_law_of_scipy(name):
    p, law = plugged_in(name)
    assert np.allclose(p.mean, law.mean(), rtol=1e-7)
    assert np.allclose(p.variance, law.var(), rtol=2e-6)
    assert np.allclose(p.mass, 1, rtol=0, atol=2e-8)
    y = np.stack([law.ppf(q) for q in (0.05, 0.5, 0.95)], 1)
    expected = np.stack([law.logpmf(column) for column in y.T], 1)
    assert np.allclose(p.log_prob(torch.from_numpy(y)), expected, rtol=0, atol=2e-8)
    below = np.stack([law.cdf(column) for column in y.T], 1)
    errors = np.abs(p.cdf(torch.from_numpy(y)).numpy() - below)
    assert (errors <= np.where(y < SINGLE_COUNTS, 2e-8, INSIDE_A_BLOCK)).all()


@pytest.mark.parametrize("name", LAWS)
def test_quantiles_of_a_known_rate_are_those_of_scipy(name):
    p, law = plugged_in(name)
    found = p.icdf(QS).numpy()
    for q, column in zip(QS.tolist(), found.T, strict=True):
        expected = law.ppf(q)
        beyond = np.maximum(1, 1e-3 * expected)
        assert (np.abs(column - expected) <= np.where(expected < SINGLE_COUNTS, 0, beyond)).all()
    ends = p.interval(0.9).numpy()
    small = slice(0, 4)
    assert np.array_equal(ends[small, 0], law.ppf(0.05)[small])
    assert np.array_equal(ends[small, 1], law.ppf(0.95)[small])


@pytest.mark.parametrize("name", LAWS)
def test_modes_of_a_known_rate_are_the_most_probable_counts(name):
    p, law = plugged_in(name)
    y = np.arange(25_000)[:, None]
    assert np.allclose(law.logpmf(p.mode.numpy()), law.logpmf(y).max(0), atol=1e-9)


@pytest.mark.parametrize("name", ["poisson", "negative binomial", "dispersed"])
@pytest.mark.parametrize(("f", "K"), [(0.0, 0.3), (1.5, 1.0), (3.0, 0.2)])
def test_an_uncertain_rate_equals_the_sums_over_every_count(name, f, K):
    p = from_marginal(LAWS[name][0], torch.tensor([[f]], dtype=F64), torch.tensor([[[K]]]).double())
    y = torch.arange(60_000, dtype=F64)
    share = p.log_prob(y[None]).exp()[0]
    assert float(share.sum()) == pytest.approx(1, abs=5e-8)
    end = int(p.law.tables[0].edges[0, -1])  # of the window; moments are those of its counts
    assert float(share[end:].sum()) < TAIL
    share, y = share[:end], y[:end]
    mean = float(share @ y)
    assert float(p.mean) == pytest.approx(mean, rel=1e-6)
    assert float(p.variance) == pytest.approx(float(share @ (y - mean) ** 2), rel=2e-6)
    whole = share.cumsum(0)
    errors = (p.cdf(y[None])[0] - whole).abs()
    assert float(errors[:SINGLE_COUNTS].max()) < 5e-8
    assert float(errors.max()) < INSIDE_A_BLOCK
    exact = torch.searchsorted(whole, QS[1:5])
    assert torch.equal(p.icdf(QS[1:5])[0], exact.double())
    assert int(exact[-1]) < SINGLE_COUNTS


def test_the_distribution_function_is_constant_between_counts():
    p, law = plugged_in("poisson", np.array([3.0]))
    found = p.cdf(torch.tensor([[-0.5, 2.0, 2.5, 2.999]], dtype=F64))[0]
    assert found[0] == 0
    assert found[1] == found[2] == found[3]
    assert float(found[1]) == pytest.approx(float(law.cdf(2)[0]), abs=1e-8)


@pytest.mark.parametrize("wrong", [0.5, -1.0])
def test_only_counts_have_a_probability(wrong):
    with pytest.raises(ValueError, match="y must hold counts"):
        plugged_in("poisson")[0].log_prob(wrong)


@pytest.mark.parametrize("name", LAWS)
def test_draws_have_the_law(name):
    rates = np.array([0.7, 3.0, 40.0])
    p, law = plugged_in(name, rates)
    draws = p.sample(40_000, torch.Generator().manual_seed(0)).numpy()
    assert (draws == np.round(draws)).all()
    for q in (0.1, 0.5, 0.9):
        at = law.ppf(q)
        expected = law.cdf(at)
        error = np.sqrt(expected * (1 - expected) / 40_000)
        assert (np.abs((draws <= at).mean(0) - expected) < 5 * error).all()


@pytest.mark.parametrize("level", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("name", LAWS)
def test_the_densest_set_is_the_smallest_one(name, level):
    rates = np.array([0.02, 0.7, 3.0, 40.0])
    p, law = plugged_in(name, rates)
    region = p.hdr(level)
    y = np.arange(2000)[:, None]
    share = law.pmf(y)  # (y, rows)
    lower, upper = region.lower.numpy(), region.upper.numpy()
    inside = ((y[..., None] >= lower) & (y[..., None] <= upper)).any(-1)
    assert ((share * inside).sum(0) >= level - 1e-9).all()
    ordered = -np.sort(-share, 0)
    fewest = (ordered.cumsum(0) < level - 1e-9).sum(0) + 1
    assert np.array_equal(inside.sum(0), fewest)


def test_the_densest_set_of_two_peaks_has_two_runs():
    """Single counts and one block of ten, of which a part is needed."""
    edges = torch.tensor([[0.0, 1, 2, 3, 4, 14]], dtype=F64)
    shares = torch.tensor([[0.4, 0.04, 0.02, 0.04, 0.5]], dtype=F64)
    heights = (shares / edges.diff(dim=1)).log()
    region = find_densest_runs(edges, heights, shares, 0.4)
    assert [region.lower[0, 0], region.upper[0, 0]] == [0, 0]
    # 0.4, and as many of the ten counts of 0.05 each as 0.79 needs: eight
    region = find_densest_runs(edges, heights, shares, 0.79)
    lower, upper = (part[0][~part[0].isnan()].tolist() for part in region)
    sizes = sum(b - a + 1 for a, b in zip(lower, upper, strict=True))
    assert lower[0] == 0
    assert sizes == 1 + 8
    assert len(lower) == 2


def table_of(edges, law):
    """Blocks of a law, with the logs that are found from its values at the middles."""
    edges = torch.as_tensor(edges, dtype=F64)[None]
    frame = Table(torch.arange(1), edges, edges[:, 1:], edges[:, 1:], torch.ones(1).bool())
    logs = torch.from_numpy(law(frame.middles.numpy()))
    totals, centres, corrections = sum_blocks(frame, logs)
    return frame._replace(logs=totals, centres=centres), corrections


def poisson_log(rate):
    """log P at any middle, also between two counts."""
    return lambda y: y * np.log(rate) - rate - gammaln(y + 1)


def test_totals_and_means_of_blocks_are_those_of_their_counts():
    edges = np.arange(2752.0, 3250.0, 7)  # about five standard deviations to either side
    table, corrections = table_of(edges, poisson_log(3000.0))
    for j in range(1, len(edges) - 2):
        y = np.arange(edges[j], edges[j + 1])
        share = stats.poisson(3000).pmf(y)
        assert math.exp(table.logs[0, j]) == pytest.approx(share.sum(), rel=2e-4)
        # The mean count is exact to second order; the next term of it is slope³ κ₄/6.
        slope = math.log(3000 / y.mean())
        expected = (share @ y) / share.sum() + slope**3 * (7**4 - 1) / 720
        assert float(table.centres[0, j]) == pytest.approx(expected, abs=5e-4)
    plain = table.widths[0].log() + torch.from_numpy(poisson_log(3000.0)(table.middles.numpy()))[0]
    exact = stats.poisson(3000).cdf(edges[1:] - 1) - stats.poisson(3000).cdf(edges[:-1] - 1)
    inner = slice(1, -1)
    with_bend = np.abs(table.logs[0].exp().numpy() / exact - 1)[inner]
    without = np.abs(plain.exp().numpy() / exact - 1)[inner]
    assert with_bend.max() < without.max() / 5  # the correction by the curvature counts
    assert float(corrections.abs().max()) > 1e-4


def test_single_counts_need_no_correction():
    table, corrections = table_of(np.arange(30), poisson_log(4.0))
    assert not corrections.any()
    assert np.allclose(table.logs.exp()[0], stats.poisson(4).pmf(np.arange(29)), rtol=1e-12)


@pytest.mark.parametrize("rate", [2.0, 30.0])
def test_tails_bound_what_is_left_out(rate):
    """The tail of a Poisson law falls faster than the geometric one that is assumed."""
    law = stats.poisson(rate)
    for end in (int(rate) + 4, int(rate) + 10, int(2 * rate) + 20):
        left, right = estimate_tails(table_of(np.arange(end + 1), poisson_log(rate))[0])
        assert float(left) == 0
        assert law.sf(end - 1) / law.cdf(end - 1) <= float(right) * (1 + 1e-9)
    assert float(right) < 1e-3


def test_the_tail_of_a_geometric_law_is_exact():
    ratio = 0.8
    table, _ = table_of(np.arange(41), lambda y: y * math.log(ratio))
    _, right = estimate_tails(table)
    assert float(right) >= ratio**40 / (1 - ratio**40) * (1 - 1e-9)
    assert float(right) == pytest.approx(ratio**40 / (1 - ratio**40), rel=0.5)


def test_probabilities_that_do_not_fall_have_an_endless_tail():
    _, right = estimate_tails(table_of(np.arange(41), lambda y: 0.01 * y)[0])
    assert float(right) == math.inf


def test_a_window_that_begins_above_zero_has_a_left_tail():
    law = stats.poisson(30.0)
    left, _ = estimate_tails(table_of(np.arange(20, 80), poisson_log(30.0))[0])
    assert float(left) >= law.cdf(19) / law.sf(19)
    assert float(left) < 1
