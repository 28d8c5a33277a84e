"""Distribution-like answers: shapes, identities between the names, memory."""

import math

import pytest
import torch
from scipy import stats

import ssla
from ssla import likelihoods as L
from ssla.predictive import from_marginal, mixture
from ssla.refit import make_log_density_of_marginal, resolve
from support.cases import CASES
from support.oracles import random_spd

N, QUANTILES = 5, torch.tensor([0.001, 0.025, 0.3, 0.5, 0.9, 0.999], dtype=torch.float64)
REFITS = ["plug_in", "none", "newton", "output"]


def make(name, refit="output", rows=N, sd=0.4):
    likelihood, f, _ = CASES[name]
    f = f[torch.arange(rows) % len(f)]
    if name in ("heteroscedastic", "natural"):
        f = (
            f.clamp(-1.5, 1.5)
            if name == "heteroscedastic"
            else torch.tensor([[0.4, -0.8]], dtype=torch.float64).expand(rows, 2)
        )
    K = random_spd(rows, f.shape[1], f.shape[1], seed=4)
    K = (
        K
        / K.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        * (sd**2 if name != "natural" else 1e-3)
    )
    if name == "poisson identity":
        f, K = f + 3, K
    return from_marginal(likelihood, f, K, refit=refit)


SCALAR = [
    "gaussian",
    "heteroscedastic",
    "natural",
    "student",
    "custom gamma",
    "custom heteroscedastic",
]
COUNTS = ["poisson", "poisson identity", "negative binomial", "custom poisson", "tempered"]
VECTOR = ["gaussian vector", "gaussian full"]
CLASSES = ["bernoulli", "categorical", "custom bernoulli"]


@pytest.mark.parametrize("name", SCALAR + COUNTS + VECTOR + CLASSES)
def test_a_predictive_has_the_attributes_of_its_kind_and_no_other(name):
    p = make(name)
    mixed = mixture([p, p])
    expected = {"cdf": p.kind != "class", "icdf": p.kind != "class", "probs": p.kind == "class"}
    for one in (p, mixed):
        assert isinstance(one, ssla.Predictive)
        assert (
            name
            in {"scalar": SCALAR, "count": COUNTS, "vector": VECTOR, "class": CLASSES}[one.kind]
        )
        assert {attribute: hasattr(one, attribute) for attribute in expected} == expected
        assert hasattr(one, "members") == (one is mixed)
    assert hasattr(mixed, "covariance") == (p.kind == "vector")


@pytest.mark.parametrize("name", SCALAR + COUNTS)
def test_shapes_of_scalar_targets_and_counts(name):
    p = make(name)
    for value in (p.mean, p.variance, p.stddev, p.mode, p.mass, p.epistemic, p.aleatoric):
        assert value.shape == (N,)
    y = p.icdf(0.6)
    assert y.shape == p.log_prob(y).shape == p.cdf(y).shape == p.increments(y).total.shape == (N,)
    grid = p.icdf(QUANTILES)
    assert (
        grid.shape
        == p.log_prob(grid).shape
        == p.cdf(grid).shape
        == p.increments(grid).curvature.shape
        == (N, 6)
    )
    assert p.interval(0.9).shape == (N, 2)
    region = p.hdr(0.9)
    assert region.lower.shape == region.upper.shape
    assert region.lower.shape[0] == N
    assert p.sample(7, torch.Generator().manual_seed(0)).shape == (7, N)


@pytest.mark.parametrize("name", VECTOR)
def test_shapes_of_vector_targets(name):
    p = make(name)
    y = torch.randn(N, 2)
    assert (
        p.mean.shape
        == p.variance.shape
        == p.stddev.shape
        == p.epistemic.shape
        == p.aleatoric.shape
        == (N, 2)
    )
    assert p.covariance.shape == (N, 2, 2)
    assert p.mass.shape == p.log_prob(y).shape == p.increments(y).total.shape == (N,)
    assert p.log_prob(torch.randn(N, 9, 2)).shape == (N, 9)
    assert p.cdf(y).shape == (N, 2)
    assert p.icdf(0.5).shape == (N, 2)
    assert p.icdf([0.1, 0.5, 0.9]).shape == (N, 2, 3)
    assert p.interval(0.9).shape == (N, 2, 2)
    assert p.sample(7).shape == (7, N, 2)
    inside = p.hdr(0.8).contains(p.sample(1, torch.Generator().manual_seed(0))[0])
    assert inside.shape == (N,)
    draws = make(name, rows=4000).sample(1, torch.Generator().manual_seed(1))[0]
    assert abs(float(make(name, rows=4000).hdr(0.8).contains(draws).double().mean()) - 0.8) < 0.03
    assert torch.allclose(p.variance, p.covariance.diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("name", CLASSES)
def test_shapes_of_classes(name):
    p = make(name)
    C = p.probs.shape[1]
    assert p.probs.shape == (N, C)
    assert torch.allclose(p.probs.sum(1), torch.ones(N, dtype=torch.float64))
    assert p.mode.shape == p.mass.shape == (N,)
    assert torch.equal(p.mode, p.probs.argmax(1))
    y = torch.zeros(N, dtype=torch.long)
    assert torch.allclose(p.log_prob(y), p.probs[:, 0].log())
    assert p.increments(y).total.shape == (N,)
    assert torch.allclose(
        p.increments(y).total, p.log_prob(y), atol=0.01, rtol=0.01
    )  # they approximate the integral
    chosen = p.interval(0.8)
    assert chosen.dtype == torch.bool
    assert ((p.probs * chosen).sum(1) >= 0.8 - 1e-12).all()
    least = torch.where(chosen, p.probs, torch.inf).amin(1)
    assert ((p.probs * chosen).sum(1) - least < 0.8).all()  # no class in the set could be left out
    assert p.sample(7).shape == (7, N)
    assert p.mean.shape == p.epistemic.shape == ((N,) if name == "bernoulli" else (N, C))


@pytest.mark.filterwarnings("ignore:.*predictives are inaccurate \\(refit='newton'")
@pytest.mark.parametrize("refit", REFITS)
@pytest.mark.parametrize("name", SCALAR + COUNTS)
def test_variance_is_epistemic_plus_aleatoric(name, refit):
    p = make(name, refit)
    assert torch.allclose(p.variance, p.epistemic + p.aleatoric, rtol=1e-10)
    assert (p.epistemic >= 0).all()
    if refit in ("plug_in", "none"):
        assert not p.epistemic.any()


@pytest.mark.parametrize("name", ["gaussian", "heteroscedastic", "poisson", "negative binomial"])
def test_parts_of_the_variance_equal_the_law_of_total_variance(name):
    """Against Monte Carlo over f: Var E[y|f] and E Var[y|f]."""
    p = make(name, sd=0.3)
    f, K = p.law.log_density.marginal
    white = torch.randn(
        200_000, f.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    likelihood = CASES[name][0]
    for i in range(N):
        draws = f[i] + white @ torch.linalg.cholesky(K[i]).mT
        assert abs(float(p.epistemic[i] / likelihood.mean(draws).var()) - 1) < 0.03
        assert abs(float(p.aleatoric[i] / likelihood.variance(draws).mean()) - 1) < 0.03


@pytest.mark.parametrize("name", SCALAR)
def test_icdf_inverts_cdf_and_density_is_its_slope(name):
    p = make(name)
    y = p.icdf(QUANTILES)
    assert torch.allclose(p.cdf(y), QUANTILES.expand(N, -1), atol=1e-8)
    eps = 1e-4 * p.stddev[:, None]
    slope = (p.cdf(y + eps) - p.cdf(y - eps)) / (2 * eps)
    assert torch.allclose(slope, p.log_prob(y).exp(), rtol=2e-3, atol=1e-6)
    assert (p.log_prob(p.mode) >= p.log_prob(y).amax(1) - 1e-6).all() or name == "custom gamma"


@pytest.mark.parametrize("refit", ["none", "output"])
@pytest.mark.parametrize("name", COUNTS)
def test_counts_add_up(name, refit):
    p = make(name, refit)
    y = torch.arange(1500, dtype=torch.float64).expand(N, -1)
    probability = p.log_prob(y).exp()
    assert torch.allclose(probability.sum(1), torch.ones(N, dtype=torch.float64), atol=1e-7)
    assert torch.allclose(p.mass, p.increments(y).total.exp().sum(1), rtol=1e-7)
    assert torch.allclose(p.mean, (probability * y).sum(1), rtol=1e-6)
    assert torch.allclose(p.cdf(y)[:, :200], probability.cumsum(1)[:, :200], atol=1e-7)
    q = p.icdf(QUANTILES)
    assert (p.cdf(q) >= QUANTILES - 1e-9).all()
    assert (p.cdf(q - 1) < QUANTILES).all()
    region = p.hdr(0.9)
    inside = (
        (y[..., None] >= region.lower[:, None]) & (y[..., None] <= region.upper[:, None])
    ).any(-1)
    assert ((probability * inside).sum(1) >= 0.9 - 1e-9).all()
    assert (p.log_prob(p.mode) >= p.log_prob(y).amax(1) - 1e-9).all()


def test_large_counts_are_summed_in_blocks():
    """Rates of 10⁶ with 10% doubt: against the log-normal–Poisson moments and SciPy's Poisson."""
    f, K = (
        torch.tensor([[math.log(1e6)]], dtype=torch.float64),
        torch.tensor([[[0.01]]], dtype=torch.float64),
    )
    p = from_marginal(L.Poisson(), f, K)
    mean = 1e6 * math.exp(0.005)
    assert abs(float(p.mean) / mean - 1) < 1e-4
    assert abs(float(p.variance) / (mean + mean**2 * math.expm1(0.01)) - 1) < 1e-3
    assert abs(float(p.cdf(p.icdf(0.3))) - 0.3) < 1e-5  # one count has a probability of 4e-6
    plug = from_marginal(L.Poisson(), f, K, refit="plug_in")
    ends = plug.interval(0.95)[0]
    assert abs(float(ends[0]) - stats.poisson(1e6).ppf(0.025)) <= 2
    assert abs(float(ends[1]) - stats.poisson(1e6).ppf(0.975)) <= 2


@pytest.mark.parametrize("name", SCALAR + COUNTS)
def test_samples_follow_the_cdf(name):
    p = make(name)
    draws = p.sample(20_000, torch.Generator().manual_seed(0))
    for q in (0.2, 0.5, 0.9):
        share = (draws <= p.icdf(q)).double().mean(0)
        exact = p.cdf(p.icdf(q))
        assert ((share - exact).abs() < 0.02).all()
    assert torch.equal(draws, p.sample(20_000, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("name", SCALAR)
def test_hdr_has_its_level_and_is_no_longer_than_the_interval(name):
    p = make(name)
    region, interval = p.hdr(0.9), p.interval(0.9)
    inside = (p.cdf(region.upper) - p.cdf(region.lower)).sum(1)
    assert torch.allclose(inside, torch.full((N,), 0.9, dtype=torch.float64), atol=1e-5)
    assert ((region.upper - region.lower).nansum(1) <= interval[:, 1] - interval[:, 0] + 1e-4).all()


def test_student_with_two_degrees_of_freedom_has_infinite_variance():
    f, K = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1, 1), 0.1, dtype=torch.float64)
    p = from_marginal(L.StudentT(df=2.0, scale=1.0), f, K)
    assert torch.isinf(p.variance).all()
    assert torch.isinf(p.aleatoric).all()
    assert torch.isfinite(p.interval(0.95)).all()


def test_mass_is_an_error_meter():
    """|log mass| orders the rungs as their distance to the truth does."""
    masses = {
        refit: (make("heteroscedastic", refit).mass - 1).abs().mean()
        for refit in ("none", "output")
    }
    assert masses["output"] < 0.01 < masses["none"]


def test_a_million_points_in_bounded_memory():
    """10⁶ inputs through the closed form and 10⁵ through the grid; intermediate chunks stay
    within the budget.
    """
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    ).eval()
    x = torch.randn(1_000_000, 2)
    post = ssla.fit(
        model,
        (x[:500], x[:500, 0]),
        likelihood=L.Gaussian(noise="estimate"),
        prior=ssla.priors.Gaussian(),
        memory_budget=8 << 20,
    )
    assert post.predict(x).interval(0.9).shape == (1_000_000, 2)
    assert post.network.rows_at_once(8 << 20) < 65_536
    two = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
    post = ssla.fit(
        two,
        (x[:500], x[:500, 0] + 0.1 * x[:500, 1]),
        likelihood=L.HeteroscedasticGaussian(),
        prior=ssla.priors.Gaussian(),
        gaussian="laplace",
        memory_budget=8 << 20,
    )
    p = post.predict(x[:100_000])
    assert p.interval(0.9).shape == (100_000, 2)
    assert torch.isfinite(p.mass).all()


def test_numbers_arrays_and_grids_of_y():
    p = make("heteroscedastic")
    assert p.log_prob(0.5).shape == (N,)
    assert torch.equal(p.log_prob(0.5), p.log_prob(torch.full((N,), 0.5)))
    assert p.cdf(torch.linspace(-1, 1, 9)[None]).shape == (N, 9)
    assert p.log_prob(torch.zeros(N).numpy()).shape == (N,)
    with pytest.raises(
        ValueError, match=r"y must be a number, \(5,\).*but has shape \(9,\).*y\[None\]"
    ):
        p.log_prob(torch.linspace(-1, 1, 9))


@pytest.mark.parametrize("likelihood", [L.Poisson(), L.NegativeBinomial(0.5)])
@pytest.mark.parametrize(
    ("f", "K"), [(2.0, 1.5), (2.0, 4.0), (8.0, 1.0), (-3.0, 9.0), (-5.6, 16.0)]
)
def test_wide_count_predictives_equal_the_brute_sum(likelihood, f, K):
    """Log-normal-like tails over single counts near zero: every count up to 400,000 summed one
    by one.
    """
    p = from_marginal(
        likelihood,
        torch.tensor([[f]], dtype=torch.float64),
        torch.tensor([[[K]]], dtype=torch.float64),
    )
    terms = p.increments(torch.arange(400_000, dtype=torch.float64)[None]).total[0].exp()
    whole = terms.cumsum(0) / p.mass
    assert abs(float(terms.sum() / p.mass) - 1) < 2e-5
    assert float(p.mode) == float(terms.argmax())
    for q in (0.025, 0.5, 0.975):
        exact = int(torch.searchsorted(whole, q))
        assert abs(float(p.icdf(q)) - exact) <= max(1, 2e-4 * exact)
    assert torch.allclose(p.cdf(torch.arange(100.0)[None]), whole[:100], atol=1e-8)


def test_the_distribution_function_outside_the_support():
    for name in ("gaussian", "heteroscedastic", "custom gamma", "poisson"):
        p = make(name)
        assert torch.equal(
            p.cdf(torch.tensor([[-math.inf, math.inf]])),
            torch.tensor([[0.0, 1.0]]).double().expand(N, -1),
        )
    assert not make("custom gamma").cdf(-1.0).any()


@pytest.mark.filterwarnings("ignore:.*predictives are inaccurate")
def test_a_mode_is_found_among_several():
    """Wide doubt about the log variance: the refit has a mode near \"noise explains y\" and one
    near \"the mean does\".
    """
    f, K = (
        torch.zeros(1, 2, dtype=torch.float64),
        torch.tensor([[[30.0, 0.0], [0.0, 16.0]]], dtype=torch.float64),
    )
    y = torch.tensor([[5.0, 20.0, 36.0, 40.0, 200.0]], dtype=torch.float64)
    parts = from_marginal(L.HeteroscedasticGaussian(), f, K).increments(y)
    d = torch.linspace(-80, 80, 400_001, dtype=torch.float64)[
        :, None
    ]  # the mean profiled out, the log variance by brute force
    profile = -0.5 * (math.log(2 * math.pi) + d + y**2 / (d.exp() + 30) + d**2 / 16)
    assert torch.allclose(parts.likelihood, profile.amax(0, keepdim=True), atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*predictives are inaccurate")
def test_a_saddle_is_not_taken_for_a_mode():
    """Two bumps at ±3 around f: at y = 0 the centre is a minimum of the objective between two
    maxima.
    """

    def bumps(y, f):
        left, right = -0.5 * (y - f[..., 0] - 3) ** 2, -0.5 * (y - f[..., 0] + 3) ** 2
        return torch.logaddexp(left, right) - math.log(2 * math.sqrt(2 * math.pi))

    f, K = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1, 1), 4.0, dtype=torch.float64)
    total = from_marginal(L.custom(bumps), f, K).increments(torch.tensor([[0.0, 1e-3]])).total[0]
    assert abs(float(total[0] - total[1])) < 1e-2


def test_rows_without_integral_are_warned_about_and_flagged():
    f, K = torch.zeros(2, 1, dtype=torch.float64), torch.full((2, 1, 1), 4.0, dtype=torch.float64)
    with pytest.warns(
        UserWarning,
        match=r"2 of 2 predictives are inaccurate \(refit='newton'\).*refit='output' is safer",
    ):
        p = from_marginal(L.Poisson(), f, K, refit="newton")
    assert p.diagnostics.inaccurate.all()
    assert torch.isfinite(p.interval(0.9)).all()


def test_student_refits_reach_the_higher_of_two_modes():
    f, K = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1, 1), 25.0, dtype=torch.float64)
    y = torch.linspace(0, 30, 13, dtype=torch.float64)[None]
    likelihood = L.StudentT(df=3.0, scale=1.0)
    found = from_marginal(likelihood, f, K).increments(y).likelihood[0]
    grid = torch.linspace(-10, 40, 200_001, dtype=torch.float64)
    objective = likelihood.log_prob(y[0][:, None], grid[:, None]) - grid**2 / 50
    assert torch.allclose(found, objective.amax(1), atol=1e-6)


@pytest.mark.parametrize("classes", [3, 10])
def test_epistemic_share_of_classes_equals_monte_carlo(classes):
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(4, classes, dtype=torch.float64, generator=generator)
    K = random_spd(4, classes, classes, seed=1) / classes
    p = from_marginal(L.Categorical(), f, K)
    white = torch.randn(200_000, classes, dtype=torch.float64, generator=generator)
    for i in range(4):
        draws = torch.softmax(f[i] + white @ torch.linalg.cholesky(K[i]).mT, -1)
        share = draws.var(0) / (draws.var(0) + (draws * (1 - draws)).mean(0))
        assert torch.allclose(
            p.epistemic[i] / p.variance[i], share, rtol=0.1, atol=0.015
        )  # 512 quasi-random points


def test_a_likelihood_with_a_kink_ends():
    """sqrt((y − f)²) has no derivative at y = f: whatever comes, the ascent must end there."""
    kink = L.custom(lambda y, f: -math.log(2) - torch.sqrt((y - f[..., 0]) ** 2), outputs=1)
    f, K = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, 1, dtype=torch.float64)
    log_density = make_log_density_of_marginal(resolve("output"), kink, f, K)
    density = log_density.density_at(torch.tensor([[-1.0, 0.0, 1.0]], dtype=torch.float64))
    assert density.log.shape == (1, 3)
