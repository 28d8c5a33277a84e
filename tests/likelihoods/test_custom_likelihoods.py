"""Likelihoods of the user's own against the same distributions from SciPy: nothing is wrong in
silence.
"""

import math

import numpy as np
import pytest
import torch
from scipy import special, stats

import ssla
from ssla import likelihoods as L
from ssla import metrics
from ssla.fitting import mode
from ssla.fitting.mode import MOST_TRIALS
from ssla.maths.quadrature import Tail
from ssla.predictive import affine, from_marginal
from ssla.refit import make_log_density_of_marginal, resolve

LEVELS = [0.001, 0.025, 0.5, 0.975, 0.999]


def T(value):
    return torch.as_tensor(value, dtype=torch.float64)


def known(likelihood, f):
    """The predictive where f is known: that of the likelihood itself."""
    f = T(f).reshape(1, -1)
    return from_marginal(likelihood, f, torch.zeros(1, f.shape[1], f.shape[1], dtype=torch.float64))


def log_normal(sigma):
    def log_prob(y, f):
        z = y.log()
        return -z - math.log(sigma * math.sqrt(2 * math.pi)) - 0.5 * ((z - f[..., 0]) / sigma) ** 2

    return log_prob


def gamma(shape):
    return lambda y, f: (
        (shape - 1) * y.log() - y * torch.exp(-f[..., 0]) - shape * f[..., 0] - math.lgamma(shape)
    )


def lomax(a):
    return lambda y, f: math.log(a) - (a + 1) * torch.log1p(y) + 0 * f[..., 0]


def beta(a, b):
    constant = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return lambda y, f: constant + (a - 1) * y.log() + (b - 1) * torch.log1p(-y) + 0 * f[..., 0]


def student(df):
    constant = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    return lambda y, f: constant - (df + 1) / 2 * torch.log1p((y - f[..., 0]) ** 2 / df)


def agrees(likelihood, f, law, rtol=1e-5):
    p = known(likelihood, f)
    quantiles = T(law.ppf(LEVELS))
    assert not bool(p.diagnostics.inaccurate.any())
    assert torch.allclose(p.mass, T([1.0]), rtol=rtol)
    assert torch.allclose(p.cdf(quantiles[None])[0], T(LEVELS), rtol=0, atol=1e-5)
    assert torch.allclose(p.icdf(LEVELS)[0], quantiles, rtol=rtol)
    assert torch.allclose(p.interval(0.95)[0], T(law.interval(0.95)), rtol=rtol)
    assert torch.allclose(
        p.log_prob(quantiles[None])[0], T(law.logpdf(quantiles.numpy())), rtol=0, atol=1e-5
    )
    for mean, variance in (
        (p.mean, p.variance),
        (likelihood.mean(T([[f]])), likelihood.variance(T([[f]]))),
    ):
        assert torch.allclose(mean, T([law.mean()]), rtol=rtol)
        assert torch.allclose(variance, T([law.var()]), rtol=rtol)


@pytest.mark.parametrize("sigma", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("place", [-20.0, 0.0, 20.0])
def test_log_normal_targets_agree_with_scipy(sigma, place):
    agrees(
        L.custom(log_normal(sigma), support="positive"),
        place,
        stats.lognorm(sigma, scale=math.exp(place)),
    )


@pytest.mark.parametrize("shape", [0.1, 0.5, 1.0, 2.0, 50.0])
@pytest.mark.parametrize("place", [-20.0, 1.0, 20.0])
def test_gamma_and_exponential_targets_agree_with_scipy(shape, place):
    agrees(
        L.custom(gamma(shape), support="positive"), place, stats.gamma(shape, scale=math.exp(place))
    )


@pytest.mark.parametrize("a", [0.5, 1.0, 1.5, 3.0])
def test_moments_that_do_not_exist_are_infinite(a):
    agrees(L.custom(lomax(a), support="positive"), 0.0, stats.lomax(a))


@pytest.mark.parametrize(("a", "b"), [(0.5, 0.5), (1.0, 1.0), (0.3, 3.0), (200.0, 1000.0)])
def test_targets_in_the_unit_interval_agree_with_scipy(a, b):
    agrees(L.custom(beta(a, b), support="unit_interval"), 0.0, stats.beta(a, b))


def test_mass_at_the_limits_of_float64_is_flagged():
    """Gamma with shape 0.001 has half of its mass below e^-700, Beta(0.1, 0.1) one part in
    eighty above 1 − 2e-16.
    """
    for likelihood in (
        L.custom(gamma(0.001), support="positive"),
        L.custom(beta(0.1, 0.1), support="unit_interval"),
    ):
        with pytest.warns(UserWarning, match="inaccurate"):
            assert bool(known(likelihood, 0.0).diagnostics.inaccurate)


@pytest.mark.parametrize("df", [1.01, 1.05, 1.1, 1.2, 1.5, 2.0, 2.05])
def test_heavy_tails_agree_with_scipy(df):
    law = stats.t(df, loc=3.0)
    for likelihood in (L.StudentT(df, 1.0), L.custom(student(df))):
        p = known(likelihood, 3.0)
        assert not bool(p.diagnostics.inaccurate)
        assert p.mass.item() == pytest.approx(1, abs=1e-8)
        assert p.mean.item() == pytest.approx(3, abs=1e-4)
        assert p.variance.item() == pytest.approx(law.var(), rel=1e-5)
        assert torch.allclose(p.icdf(LEVELS)[0] - 3, T(law.ppf(LEVELS)) - 3, rtol=1e-5, atol=1e-5)
        assert torch.allclose(p.cdf(T(law.ppf(LEVELS))[None])[0], T(LEVELS), rtol=0, atol=1e-6)


def test_heavy_tails_with_uncertain_outputs_agree_with_integration():
    """∫ t(y; f, df) N(f; 0, K) df: far out it is the density of y itself."""
    p = from_marginal(L.StudentT(1.05, 1.0), T([[0.0]]), T([[[0.01]]]))
    x, w = (T(part) for part in np.polynomial.hermite_e.hermegauss(40))
    y = T([-50.0, -3.0, 0.5, 1.0, 1000.0])
    exact = T(stats.t(1.05).cdf((y[:, None] - 0.1 * x).numpy())) @ (w / w.sum())
    assert torch.allclose(p.cdf(y[None])[0], exact, atol=2e-5)
    assert p.mass.item() == pytest.approx(1, abs=1e-3)


def test_the_cauchy_distribution_has_no_mean():
    p = known(L.custom(student(1.0)), 0.0)
    assert p.mean.isnan().all()
    assert p.mass.item() == pytest.approx(1, abs=1e-8)
    assert p.icdf(0.975).item() == pytest.approx(stats.cauchy.ppf(0.975), rel=1e-5)


def test_a_moment_at_the_limit_of_a_power_law_is_infinite():
    """By rounding its power may come out a little above the limit: then it was about 1e9."""
    tail = Tail(T([1.0]), T([0.0]), T([3 + 1e-9]))
    assert tail.moment(2, T([0.0])).isinf()
    assert tail.moment(1, T([0.0])).item() == pytest.approx(1, rel=1e-8)


# --- counts --------------------------------------------------------------------------------------


def zero_inflated(y, f):
    """Zeros with probability 0.3, Poisson otherwise."""
    rate = f[..., 0].exp()
    zero = torch.log(0.3 + 0.7 * torch.exp(-rate))
    return torch.where(y == 0, zero, math.log(0.7) + y * f[..., 0] - rate - torch.lgamma(y + 1))


ZERO_INFLATED = L.custom(zero_inflated, support="counts")


def test_moments_and_information_of_zero_inflated_counts_are_exact():
    """Also for rates of 1e9, which an uncertain log rate reaches: they were refused as not
    normalised.
    """
    f = T([-2.0, 0.0, 3.0, 9.0, 11.09, 12.0, 16.0, 21.0])[:, None]
    rate = f[:, 0].exp()
    assert torch.allclose(ZERO_INFLATED.mean(f), 0.7 * rate, rtol=1e-6)
    assert torch.allclose(ZERO_INFLATED.variance(f), 0.7 * rate + 0.21 * rate**2, rtol=1e-6)
    y = torch.arange(400, dtype=torch.float64)
    for row in range(3):  # by brute force
        logs, score = zero_inflated(y, f[row]), ZERO_INFLATED.score(y, f[row].expand(400, 1))[:, 0]
        assert float(logs.exp().sum()) == pytest.approx(1, abs=1e-12)
        assert float(ZERO_INFLATED.fisher(f[row : row + 1])) == pytest.approx(
            float((logs.exp() * score**2).sum()), rel=1e-9
        )
    assert torch.allclose(ZERO_INFLATED.fisher(f)[3:, 0, 0], 0.7 * rate[3:], rtol=1e-6)


@pytest.mark.parametrize("K", [1.0, 4.0])
def test_zero_inflated_counts_with_uncertain_rates_are_predicted(K):
    p = from_marginal(ZERO_INFLATED, T([[1.0]]), T([[[K]]]))
    assert 0.8 < p.mass.item() < 1.1
    assert 0 < p.epistemic.item() < p.variance.item()
    y = torch.arange(100_000, dtype=torch.float64)
    probs = p.log_prob(y[None])[0].exp()
    assert float(probs.sum()) == pytest.approx(1, abs=1e-4)
    assert torch.allclose(p.cdf(T([[0.0, 5.0, 50.0]]))[0], probs.cumsum(0)[[0, 5, 50]], atol=1e-5)


@pytest.mark.parametrize("rate", [5.0, 100.0, 1e4, 1e6])
def test_zeros_beside_a_narrow_peak_of_large_counts_are_resolved(rate):
    p = known(ZERO_INFLATED, math.log(rate))
    assert p.mass.item() == pytest.approx(1, abs=1e-5)
    assert p.mean.item() == pytest.approx(0.7 * rate, rel=1e-5)
    assert p.variance.item() == pytest.approx(0.7 * rate + 0.21 * rate**2, rel=1e-5)
    median = stats.poisson(rate).ppf((0.5 - 0.3) / 0.7)
    assert p.icdf(0.5).item() == pytest.approx(median, rel=2e-4, abs=0.5)


def test_counts_and_classes_that_are_not_normalised_are_refused_with_the_figure():
    with pytest.raises(ValueError, match=r"sum to 1\.64872 .*Add the normalising constant"):
        L.custom(lambda y, f: zero_inflated(y, f) + 0.5, support="counts").mean(T([[1.0]]))
    with pytest.raises(ValueError, match=r"sum to 0\.606531 .*Add the normalising constant"):
        L.custom(lambda y, f: zero_inflated(y, f) - 0.5, support="counts").mean(T([[13.0]]))
    with pytest.raises(ValueError, match=r"sum to 2 .*Add the normalising constant"):
        L.custom(lambda y, f: 0 * (y + f[..., 0]), support="classes", classes=2).mean(T([[1.0]]))


def test_log_prob_of_counts_is_asked_for_whole_numbers_only():
    seen = []

    def poisson(y, f):
        seen.append(bool((y == y.round()).all()))
        return y * f[..., 0] - f[..., 0].exp() - torch.lgamma(y + 1)

    p = from_marginal(L.custom(poisson, support="counts"), T([[8.0]]), T([[[0.1]]]))
    assert p.mass.item() == pytest.approx(1, abs=1e-3)
    assert all(seen)


def test_whole_counts_keep_their_log_probability_beside_fractional_ones():
    def truncated(y, f):
        """Poisson without zeros."""
        rate = f[..., 0].exp()
        log_prob = y * f[..., 0] - rate - torch.lgamma(y + 1) - torch.log(-torch.expm1(-rate))
        return torch.where(y > 0, log_prob, -torch.inf)

    likelihood = L.custom(truncated, support="counts")
    f, y = T([[0.3]] * 4), T([0.0, 1.0, 1.5, 0.5])
    whole = [float(likelihood.log_prob(T([k]), f[:1])) for k in (0.0, 1.0, 2.0)]
    expected = [whole[0], whole[1], (whole[1] + whole[2]) / 2, whole[1]]
    assert whole[0] == -math.inf
    assert likelihood.log_prob(y, f).tolist() == pytest.approx(expected, rel=1e-12)


def binomial(y, f):
    log = math.lgamma(11) - torch.lgamma(y + 1) - torch.lgamma((10 - y).clamp_min(0) + 1)
    return torch.where(
        y <= 10, log + y * f[..., 0] - 10 * torch.nn.functional.softplus(f[..., 0]), -torch.inf
    )


def test_counts_with_an_end_agree_with_scipy():
    law, p = (
        stats.binom(10, 1 / (1 + math.exp(-1))),
        known(L.custom(binomial, support="counts"), 1.0),
    )
    assert p.mass.item() == pytest.approx(1, abs=1e-12)
    assert p.mean.item() == pytest.approx(law.mean())
    assert p.variance.item() == pytest.approx(law.var())
    assert torch.equal(p.interval(0.9)[0], T(law.interval(0.9)))
    y = torch.arange(15, dtype=torch.float64)
    assert torch.allclose(p.cdf(y[None])[0], T(law.cdf(y.numpy())))
    assert p.log_prob(T([[11.0]])).item() == -math.inf
    uncertain = from_marginal(L.custom(binomial, support="counts"), T([[1.0]]), T([[[0.3]]]))
    assert uncertain.mass.item() == pytest.approx(1, abs=0.01)
    assert uncertain.icdf(0.9999).item() <= 10


def test_a_density_whose_integral_depends_on_f_is_a_warning_with_the_figures():
    with pytest.warns(UserWarning, match=r"integrates to 1\.52 … 2\.507, depending on f"):
        L.custom(lambda y, f: -0.5 * (y - f[..., 0]) ** 2 * torch.exp(f[..., 0])).fisher(
            T([[0.0], [1.0]])
        )
    constant = L.custom(lambda y, f: -0.5 * (y - f[..., 0]) ** 2)
    assert torch.allclose(constant.fisher(T([[0.0], [1.0]])), T([[[1.0]], [[1.0]]]), atol=1e-6)
    assert known(constant, 0.0).mass.item() == pytest.approx(math.sqrt(2 * math.pi), rel=1e-6)


def test_a_log_density_that_is_no_tensor_is_refused():
    with pytest.raises(
        TypeError, match=r"must return a tensor with one value for each y, but returned 1\.0"
    ):
        ssla.fit(
            linear(),
            (X, Y),
            likelihood=L.custom(lambda y, f: 1.0),
            prior=ssla.priors.Gaussian(),
            gaussian="laplace",
        )


# --- kinks ---------------------------------------------------------------------------------------

G = torch.Generator().manual_seed(0)
X = torch.randn(40, 3, dtype=torch.float64, generator=G)
Y = X[:, 0] + torch.randn(40, dtype=torch.float64, generator=G)


class Counted:
    """A log density that counts its calls: about four for each pass over the data."""

    def __init__(self, log_prob):
        self.log_prob, self.calls = log_prob, 0

    def __call__(self, y, f):
        self.calls += 1
        return self.log_prob(y, f)


def laplace(y, f):
    return -math.log(2) - (y - f[..., 0]).abs()


def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1).double()


@pytest.mark.parametrize(
    "log_prob", [laplace, lambda y, f: -(y - f[..., 0]).abs()], ids=["normalised", "not normalised"]
)
def test_a_likelihood_without_curvature_is_tilted_and_says_so(log_prob):
    counted = Counted(log_prob)
    with pytest.warns(
        UserWarning,
        match=r"mode='tilt' was used in place of 'polish': .* no curvature in f .* has kinks",
    ):
        post = ssla.fit(
            linear(),
            (X, Y),
            likelihood=L.custom(counted),
            prior=ssla.priors.Gaussian(),
            gaussian="laplace",
        )
    assert counted.calls <= 100  # most of them for the Fisher information
    assert post.report.mode == "tilt"
    assert any("no curvature in f" in note for note in post.report.notes)
    ones = torch.cat([X, torch.ones(40, 1, dtype=torch.float64)], 1)
    H = ones.mT @ ones + torch.eye(
        4, dtype=torch.float64
    )  # the Fisher information of a Laplace distribution is 1
    assert torch.allclose(
        post.marginal(X[:2]).covariance[:, 0, 0],
        (ones[:2] @ H.inverse() * ones[:2]).sum(1),
        rtol=1e-3,
    )


def test_polish_of_a_likelihood_without_curvature_is_refused():
    with pytest.raises(ValueError, match=r"mode='polish' is not possible: .*Use mode='tilt'"):
        ssla.fit(
            linear(),
            (X, Y),
            likelihood=L.custom(laplace),
            prior=ssla.priors.Gaussian(),
            gaussian="laplace",
            mode="polish",
        )


def test_a_likelihood_with_curvature_in_one_output_alone_is_tilted():
    """The log scale has a curvature, the location has none."""
    counted = Counted(
        lambda y, f: laplace(y * torch.exp(-f[..., 1]), f * torch.exp(-f[..., 1:])) - f[..., 1]
    )
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="no curvature in f"):
        post = ssla.fit(
            torch.nn.Linear(3, 2).double(),
            (X, Y),
            likelihood=L.custom(counted),
            prior=ssla.priors.Gaussian(),
            gaussian="laplace",
        )
    assert counted.calls <= 200
    assert post.report.mode == "tilt"


@pytest.mark.parametrize("most", [5, MOST_TRIALS])
def test_polish_over_kinks_with_a_little_curvature_ends_and_warns(most, monkeypatch):
    monkeypatch.setattr(mode, "MOST_TRIALS", most)
    counted = Counted(lambda y, f: laplace(y, f) - 0.01 * (y - f[..., 0]) ** 2)
    likelihood = L.custom(counted, fisher=lambda f: torch.ones_like(f)[..., None])
    with pytest.warns(
        RuntimeWarning,
        match="polish (did not reach the mode|stopped after .* a log density with kinks)",
    ):
        post = ssla.fit(
            linear(),
            (X, Y),
            likelihood=likelihood,
            prior=ssla.priors.Gaussian(),
            gaussian="laplace",
            mode="polish",
        )
    assert counted.calls <= 4 * (most + 3)
    assert any(note.startswith("polish ") for note in post.report.notes)


@pytest.mark.parametrize(
    "known", [None, lambda f: torch.ones_like(f).unsqueeze(-1)], ids=["by scores", "given"]
)
@pytest.mark.parametrize("K", [0.1, 1.0])
def test_the_predictive_of_a_likelihood_without_curvature_has_the_fisher_in_its_determinant(
    K, known
):
    """−½ log(1 + K) with it. Without it the mass was 1.05 for K = 0.1 and 1.46 for K = 1."""
    likelihood = L.custom(laplace, fisher=known)
    y = T([[-6.0, -1.5, 0.0, 0.4 * K, 6.0]])
    f = y.clamp(-K, K)  # the mode of −|y − f| − f²/2K
    exact = -math.log(2) - (y - f).abs() - f**2 / (2 * K) - 0.5 * math.log1p(K)
    found = make_log_density_of_marginal(resolve("output"), likelihood, T([[0.0]]), T([[[K]]]))(y)
    assert torch.allclose(found.total, exact, atol=1e-6)
    if K < 1:
        assert from_marginal(likelihood, T([[0.0]]), T([[[K]]])).mass.item() == pytest.approx(
            1, abs=0.01
        )


def test_a_slope_at_one_target_is_not_taken_for_a_kink():
    """log p(0|f) = −f of a Poisson rate is straight in f, log p(y|f) of the other counts is not."""
    rate = L.custom(
        lambda y, f: torch.xlogy(y, f[..., 0]) - f[..., 0] - torch.lgamma(y + 1), support="counts"
    )
    exact = from_marginal(L.Poisson(link="identity"), T([[3.0]]), T([[[0.2]]])).increments(
        T([[0.0]])
    )
    found = make_log_density_of_marginal(resolve("output"), rate, T([[3.0]]), T([[[0.2]]]))(
        T([[0.0]])
    )
    assert torch.allclose(found.total, exact.total)
    assert torch.allclose(found.curvature, T([[0.0]]), atol=1e-12)


# --- angles --------------------------------------------------------------------------------------


def von_mises(y, f, kappa=2.0):
    return kappa * (torch.cos(y - f[..., 0]) - 1) - math.log(2 * math.pi * special.i0e(kappa))


@pytest.mark.parametrize("kappa", [1e-3, 0.5, 4.0, 300.0, 1e5])
@pytest.mark.parametrize("place", [0.0, 1.0, 3.0, -math.pi])
def test_angles_agree_with_scipy(kappa, place):
    likelihood = L.custom(lambda y, f: von_mises(y, f, kappa), support="circular")
    p, law = known(likelihood, place), stats.vonmises(kappa)  # SciPy's around zero
    d = np.linspace(-1, 1, 200_001) * min(math.pi, 12 / math.sqrt(kappa))
    spread = np.trapezoid(d**2 * law.pdf(d), d)  # SciPy's own variance takes seconds
    turn = lambda y: (y + math.pi) % (2 * math.pi) - math.pi
    assert not bool(p.diagnostics.inaccurate)
    assert p.mass.item() == pytest.approx(1, abs=1e-10)
    y = np.linspace(-math.pi, math.pi, 9)[:-1]
    assert torch.allclose(p.log_prob(T(y)[None])[0], T(law.logpdf(turn(y - place))), atol=1e-8)
    assert torch.allclose(
        p.log_prob(T(y)[None] + 4 * math.pi), p.log_prob(T(y)[None]), atol=1e-8 * max(kappa, 1)
    )
    for mean, variance in (
        (p.mean, p.variance),
        (likelihood.mean(T([[place]])), likelihood.variance(T([[place]]))),
    ):
        assert turn(mean.item() - place) == pytest.approx(0, abs=1e-6)
        assert variance.item() == pytest.approx(spread, rel=1e-6)
    assert turn(p.mode.item() - place) == pytest.approx(0, abs=1e-5)
    assert torch.allclose(p.interval(0.9)[0] - p.mean, T(law.interval(0.9)), atol=1e-6)
    below = law.cdf(y - place) - law.cdf(-math.pi - place)  # SciPy's goes on around the circle
    assert torch.allclose(p.cdf(T(y)[None])[0], T(below), atol=1e-7)
    q = T([0.001, 0.3, 0.5, 0.999])
    assert torch.allclose(p.cdf(p.icdf(q))[0], q, atol=1e-9)
    region = p.hdr(0.8)
    assert float(torch.nan_to_num(region.upper - region.lower).sum()) == pytest.approx(
        2 * law.ppf(0.9), rel=1e-4
    )
    assert (region.lower.shape[1] == 2) == (abs(place) + law.ppf(0.9) > math.pi)  # across ±π


def test_draws_of_angles_have_their_distribution():
    likelihood, generator = (
        L.custom(von_mises, support="circular"),
        torch.Generator().manual_seed(0),
    )
    for draws in (
        known(likelihood, 3.0).sample(20_000, generator)[:, 0],
        likelihood.sample(T([[3.0]]), 20_000, generator)[:, 0],
    ):
        assert draws.min() >= -math.pi
        assert draws.max() < math.pi
        off = (draws - 3 + math.pi) % (2 * math.pi) - math.pi
        assert stats.kstest(off.numpy(), stats.vonmises(2.0).cdf).pvalue > 1e-3


def test_uncertain_angles_agree_with_integration():
    f, K = T([[2.9]]), T([[[0.05]]])
    p = from_marginal(L.custom(lambda y, f: von_mises(y, f, 10.0), support="circular"), f, K)
    x, w = (T(part) for part in np.polynomial.hermite_e.hermegauss(40))
    y = T([-3.0, 2.0, 2.9, 3.1])
    exact = (
        von_mises(y[:, None], (2.9 + math.sqrt(0.05) * x)[:, None], 10.0).exp() @ (w / w.sum())
    ).log()
    assert torch.allclose(p.log_prob(y[None])[0], exact, atol=5e-3)
    assert p.mass.item() == pytest.approx(1, abs=5e-3)
    assert p.epistemic.item() == pytest.approx(0.05, rel=0.1)


def test_angles_are_fitted_wherever_they_are_counted_from():
    angles = torch.atan2(X[:, 0], X[:, 1])
    likelihood = L.custom(von_mises, support="circular", outputs=1)
    first, second = (
        ssla.fit(
            linear(),
            (X, y),
            likelihood=likelihood,
            prior=ssla.priors.Gaussian(),
            gaussian="laplace",
            mode="tilt",
        )
        for y in (angles, angles + 6 * math.pi)
    )
    assert torch.allclose(first.predict(X).variance, second.predict(X).variance, atol=1e-9)
    p = first.predict(X)
    assert metrics.coverage(p, angles, 0.9) == metrics.coverage(p, angles + 2 * math.pi, 0.9)
    assert metrics.rmse(p, angles) < math.pi
    assert "crps" not in metrics.summary(p, angles).scores
    for call, words in (
        (lambda: first.predict(X[:2], refit="weights"), "no predictive for angles"),
        (lambda: ssla.mixture([p, p]), "angles cannot be mixed"),
        (lambda: affine(p, 0.0, 2.0), "kind 'circular'"),
        (lambda: metrics.crps(p, angles), "For angles use"),
        (lambda: ssla.credal(first, X, [ssla.priors.Gaussian(1.0)]), "angles have no order"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            call()


def test_a_density_on_the_circle_with_a_jump_is_flagged():
    half = L.custom(
        lambda y, f: torch.where(y.abs() < 1, -math.log(2), -torch.inf) + 0 * f[..., 0],
        support="circular",
    )
    with pytest.warns(UserWarning, match="inaccurate"):
        assert known(half, 0.0).mass.item() == pytest.approx(1, abs=1e-3)
