"""Highest-density regions of every kind of predictive, against sorted probabilities."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from ssla import likelihoods as L
from ssla.predictive import affine, from_marginal, mixture, transformed
from ssla.predictive.positive import Censored, Positive

F64 = torch.float64
LEVELS = (1e-6, 0.01, 0.5, 0.9, 0.99, 0.9999)
NEARLY_ONE = 1 - 1e-9


def numbers(*values):
    return torch.tensor(values, dtype=F64)


def gaussian(mean, noise, doubt=0.01):
    return from_marginal(L.Gaussian(noise=noise), numbers([mean]), numbers([[doubt]]))


def counts(rate, doubt=0.05):
    return from_marginal(L.Poisson(), numbers([math.log(rate)]), numbers([[doubt]]))


def gamma(shape):
    def log_prob(y, f):
        rate = shape * torch.exp(-f[..., 0])
        return shape * torch.log(rate) + (shape - 1) * torch.log(y) - rate * y - math.lgamma(shape)

    return from_marginal(
        L.custom(log_prob, support="positive", outputs=1), numbers([0.5]), numbers([[0.1]])
    )


def beta_log_prob(y, f):
    a, b = torch.exp(f).unbind(-1)
    return (
        torch.lgamma(a + b)
        - torch.lgamma(a)
        - torch.lgamma(b)
        + (a - 1) * y.log()
        + (b - 1) * torch.log1p(-y)
    )


def beta(*logs):
    likelihood = L.custom(beta_log_prob, support="unit_interval", outputs=2)
    return from_marginal(likelihood, numbers(list(logs)), 0.01 * torch.eye(2, dtype=F64)[None])


def two_humps():
    return mixture([gaussian(-1.0, 0.4), gaussian(1.0, 0.5)], [0.3, 0.7])


CONTINUOUS = {
    "gaussian": lambda: gaussian(0.3, 0.7),
    "student": lambda: from_marginal(
        L.StudentT(df=2.0, scale=0.8), numbers([0.0]), numbers([[0.1]])
    ),
    "gamma": lambda: gamma(3.0),
    "gamma that is infinite at zero": lambda: gamma(0.5),
    "beta that is infinite at both ends": lambda: beta(-0.7, -0.5),
    "beta": lambda: beta(1.7, 0.9),
    "mixture": two_humps,
    "mixture of a narrow part and a far wide one": lambda: mixture(
        [gaussian(-50.0, 0.01, 1e-6), gaussian(1.0, 5.0)], [0.3, 0.7]
    ),
    "mixture with a rare part": lambda: mixture(
        [gaussian(0.0, 1.0), gaussian(1e4, 1.0)], [0.999, 0.001]
    ),
    "exp": lambda: transformed(gaussian(0.3, 0.7), "exp"),
    "exp of a wide one": lambda: transformed(gaussian(0.3, 3.0), "exp"),
    "logistic with two peaks": lambda: transformed(gaussian(0.3, 3.0), "logistic"),
    "exp of a mixture": lambda: transformed(affine(two_humps(), 2.0, 3.0), "exp"),
    "censored": lambda: transformed(gaussian(0.3, 0.7), Censored()),
    "censored, mostly zero": lambda: transformed(gaussian(-1.0, 0.7), Censored()),
    "positive": lambda: transformed(gaussian(0.3, 0.7), Positive(-1.0, 2.0)),
    "positive, half zero": lambda: transformed(gaussian(-2.0, 0.7), Positive(-1.0, 2.0)),
    "mixture with zeros": lambda: mixture(
        [transformed(gaussian(mean, 0.7), Censored()) for mean in (-2.0, 9.0)]
    ),
}


def cells_of(p):
    """Lengths, probabilities and heights of thousands of cells, and the probability of zero."""
    law = p.law
    quantiles = law.icdf(torch.special.ndtr(torch.linspace(-7, 7, 3001, dtype=F64)))[0]
    ends = torch.cat(
        [torch.linspace(float(quantiles[0]), float(quantiles[-1]), 2001, dtype=F64), quantiles]
    ).unique()[None]
    shares = law.cdf(ends).diff(dim=1)[0]
    heights = law.log_prob((ends[:, 1:] + ends[:, :-1]) / 2)[0]
    atom = float(law.cdf(torch.zeros(1, 1, dtype=F64))) if float(quantiles[0]) == 0.0 else 0.0
    return ends.diff(dim=1)[0], shares, heights, atom


def probability_of(p, region, atom):
    """Of a union of intervals; the atom belongs to one that begins at zero."""
    known = ~region.lower[0].isnan()
    lower, upper = (end[0][known] for end in region)
    below = p.law.cdf(lower[None])[0]
    return float((p.law.cdf(upper[None])[0] - below).sum()) + (
        atom if atom and bool((lower <= 0).any()) else 0.0
    )


@pytest.mark.parametrize("name", CONTINUOUS)
def test_a_region_of_numbers_has_its_level_and_the_least_length(name):
    """exp(N(0.3, 9)) had a 90% region of probability 0.21; a gamma of shape ½ one twice too
    long.
    """
    p = CONTINUOUS[name]()
    lengths, shares, heights, atom = cells_of(p)
    order = heights.argsort(descending=True)
    for level in LEVELS:
        region = p.hdr(level)
        assert probability_of(p, region, atom) == pytest.approx(
            max(level, atom), rel=1e-5, abs=1e-9
        )
        needed = int((shares[order].cumsum(0) < level - atom).sum()) + 1 if level > atom else 0
        length = float((region.upper - region.lower).nansum())
        # one cell more than needed, and the linear log density between the nodes of a mixture
        assert length <= 1.01 * float(lengths[order[:needed]].sum()) + float(lengths.min())
    assert probability_of(p, p.hdr(NEARLY_ONE), atom) == pytest.approx(NEARLY_ONE, abs=1e-9)


COUNTS = {
    "poisson": (lambda: counts(3.0), 400, False),
    "poisson in blocks": (lambda: counts(300.0), 3000, True),
    "large poisson": (lambda: counts(2e4, 1e-6), 40_000, True),
    "negative binomial": (
        lambda: from_marginal(L.NegativeBinomial(dispersion=2.0), numbers([2.5]), numbers([[0.3]])),
        9000,
        True,
    ),
    "mixture": (lambda: mixture([counts(3.0), counts(9.0)], [0.4, 0.6]), 900, False),
    "mixture of zeros and thousands": (
        lambda: mixture([counts(0.1), counts(3e4)], [0.4, 0.6]),
        200_000,
        True,
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_set_of_counts_has_its_level_and_the_fewest_counts(name):
    """Blocks may add three counts and 0.2%. Whole blocks gave 743 counts where one was enough."""
    make, top, blocks = COUNTS[name]
    p = make()
    chances = p.law.log_prob(torch.arange(top, dtype=F64)[None])[0].exp()
    best = chances.sort(descending=True).values.cumsum(0)
    for level in LEVELS:
        region = p.hdr(level)
        known = ~region.lower[0].isnan()
        runs = [
            (int(a), int(b))
            for a, b in zip(region.lower[0][known], region.upper[0][known], strict=True)
        ]
        assert sum(float(chances[a : b + 1].sum()) for a, b in runs) >= level - 1e-7
        fewest = int((best < level).sum()) + 1
        assert sum(b + 1 - a for a, b in runs) <= (1.002 * fewest + 3 if blocks else fewest)


@pytest.mark.parametrize("rate", [500.0, 1000.0])
def test_the_tails_of_counts_hold_no_more_than_they_should(rate):
    """A narrow last block after a wide one hid a tail of 9e-7, where 1e-8 is the bound."""
    p = counts(rate)
    logs = p.law.log_density.density_at(torch.arange(int(12 * rate), dtype=F64)[None]).log
    assert float(p.mass) == pytest.approx(float(logs.exp().sum()), rel=1e-7)


@pytest.mark.parametrize("peaks", [1, 2])
@pytest.mark.parametrize("place", [3.0, 0.3])
def test_arcs_have_their_level_and_the_least_length(peaks, place):
    constant = math.log(2 * math.pi) + math.log(float(torch.special.i0(torch.tensor(3.0))))
    likelihood = L.custom(
        lambda y, f: 3.0 * torch.cos(peaks * (y - f[..., 0])) - constant,
        support="circular",
        outputs=1,
    )
    p = from_marginal(likelihood, numbers([place]), numbers([[0.05]]))
    ends = torch.linspace(-math.pi, math.pi, 4001, dtype=F64)
    shares = p.cdf(ends[None]).diff(dim=1)[0].sort(descending=True).values.cumsum(0)
    for level in LEVELS:
        region = p.hdr(level)
        found = p.cdf(torch.nan_to_num(region.upper)) - p.cdf(torch.nan_to_num(region.lower))
        assert float(found.sum()) == pytest.approx(level, rel=1e-5, abs=1e-9)
        needed = int((shares < level).sum()) + 1
        assert (
            float((region.upper - region.lower).nansum())
            <= needed * float(ends[1] - ends[0]) + 1e-9
        )


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_an_ellipsoid_holds_its_share_of_draws_of_another_generator(size, dtype):
    rng = np.random.default_rng(size)
    root = rng.normal(size=(size, size))
    mean, spread = rng.normal(size=size), root @ root.T + 0.1 * np.eye(size)
    p = from_marginal(
        L.Gaussian(noise=torch.full((size,), 0.5)),
        *(torch.tensor(v[None], dtype=dtype) for v in (mean, spread)),
    )
    draws = rng.multivariate_normal(mean, spread + 0.25 * np.eye(size), size=100_000)[None]
    for level in (0.01, 0.5, 0.9, 0.999):
        region = p.hdr(level)
        assert abs(float(region.contains(draws).double().mean()) - level) < 5 * math.sqrt(
            level * (1 - level) / 1e5
        )
        assert region.squared_radius == pytest.approx(stats.chi2(size).ppf(level), rel=1e-9)
    assert p.hdr(0.5).contains(mean[None].tolist()).tolist() == [True]
    with pytest.raises(ValueError, match=rf"y must have shape \(1, {size}\)"):
        p.hdr(0.5).contains(torch.zeros(1, size + 1))


def test_a_region_of_a_mixture_of_vectors_holds_its_share_of_draws():
    one = from_marginal(
        L.Gaussian(noise=torch.full((2,), 0.5)), torch.zeros(1, 2), torch.eye(2)[None]
    )
    p = mixture([one, affine(one, 3.0, 0.5)], [0.4, 0.6])
    draws = p.sample(20_000, torch.Generator().manual_seed(3)).movedim(0, 1)
    for level in (0.5, 0.9, 0.99):
        inside = p.law.log_prob(draws.double()) >= p.hdr(level).threshold[:, None]
        assert abs(float(inside.double().mean()) - level) < 0.02


def test_a_set_of_classes_is_the_shortest_of_all_subsets():
    """By all 2⁵ subsets of five classes."""
    f = torch.randn(20, 5, generator=torch.Generator().manual_seed(0), dtype=F64)
    p = from_marginal(L.Categorical(), 2 * f, torch.eye(5, dtype=F64).expand(20, 5, 5))
    subsets = torch.tensor([[bool(i >> c & 1) for c in range(5)] for i in range(32)])
    chances = p.probs @ subsets.double().mT
    for level in (1e-9, 0.3, 0.5, 0.9, 0.999):
        chosen = p.hdr(level)
        assert ((p.probs * chosen).sum(1) >= level - 1e-12).all()
        fewest = torch.where(chances >= level, subsets.sum(1).double(), math.inf).amin(1)
        assert torch.equal(chosen.sum(1).double(), fewest)


@pytest.mark.parametrize("level", [0, 1, -0.1, 95, math.nan, True])
def test_levels_out_of_range_are_refused(level):
    with pytest.raises(ValueError, match="level must be strictly between 0 and 1"):
        gaussian(0.0, 1.0).hdr(level)


@pytest.mark.parametrize("level", [None, [0.5, 0.9], "most"])
def test_what_is_no_level_is_refused(level):
    with pytest.raises(TypeError, match="level must be one number strictly between 0 and 1"):
        gaussian(0.0, 1.0).hdr(level)
