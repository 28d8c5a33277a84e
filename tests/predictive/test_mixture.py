"""Mixtures and changes of unit: against scipy, scoringrules, brute sums, and the identities
between the names.
"""

import math
import warnings

import numpy as np
import pytest
import scoringrules
import torch
from scipy import optimize, stats

import ssla
from ssla import likelihoods as L
from ssla import metrics
from ssla.predictive import (
    Predictive,
    affine,
    from_marginal,
    mixture,
    mixture_laws,
    transformed,
)
from ssla.predictive.joined import join_predictives
from ssla.predictive.positive import Censored

F64 = torch.float64
N = 4
QS = torch.tensor([1e-7, 0.01, 0.3, 0.5, 0.9, 1 - 1e-7], dtype=F64)


def rows(values, dtype=F64):
    return torch.tensor(values, dtype=dtype)[:, None]


def gaussian(mean, sd_f, noise=0.5, dtype=F64):
    f = rows(mean, dtype)
    return from_marginal(
        L.Gaussian(noise=noise), f, torch.full((len(f), 1, 1), sd_f**2, dtype=dtype)
    )


def members(kind, dtype=F64):
    f = torch.linspace(-1, 1, N, dtype=dtype)[:, None]
    K = torch.full((N, 1, 1), 0.09, dtype=dtype)
    if kind == "gaussian":
        return [gaussian([0.0, 1.0, 2.0, 3.0], s, dtype=dtype) for s in (0.1, 0.4)] + [
            gaussian([4.0, 1.0, 2.1, -3.0], 0.2)
        ]
    if kind == "student":
        return [from_marginal(L.StudentT(df=4.0, scale=0.5), f + shift, K) for shift in (0.0, 1.0)]
    if kind == "poisson":
        return [from_marginal(L.Poisson(), f + shift, K) for shift in (1.0, 2.0)]
    if kind == "bernoulli":
        return [from_marginal(L.Bernoulli(), f + shift, K) for shift in (0.0, 2.0)]
    if kind == "categorical":
        g = torch.randn(2, N, 3, dtype=dtype, generator=torch.Generator().manual_seed(0))
        return [
            from_marginal(L.Categorical(), part, 0.1 * torch.eye(3, dtype=dtype).expand(N, 3, 3))
            for part in g
        ]
    g = torch.randn(2, N, 2, dtype=dtype, generator=torch.Generator().manual_seed(0))
    noise = torch.tensor([0.5, 1.0], dtype=dtype)
    return [
        from_marginal(
            L.Gaussian(noise=noise), part, 0.1 * torch.eye(2, dtype=dtype).expand(N, 2, 2)
        )
        for part in g
    ]


KINDS = ["gaussian", "student", "poisson", "bernoulli", "categorical", "vector"]


def test_gaussian_mixture_equals_scipy():
    parts = members("gaussian")
    w = np.array([0.5, 0.3, 0.2])
    p = mixture(parts, weights=[5, 3, 2])
    y = torch.linspace(-6, 6, 41, dtype=F64)
    laws = [stats.norm(m.mean[:, None], m.stddev[:, None]) for m in parts]
    density = sum(wi * law.pdf(y) for wi, law in zip(w, laws, strict=True))
    assert np.allclose(p.log_prob(y[None]), np.log(density), rtol=1e-12)
    assert np.allclose(
        p.cdf(y[None]), sum(wi * law.cdf(y) for wi, law in zip(w, laws, strict=True)), rtol=1e-12
    )
    assert torch.allclose(p.cdf(p.icdf(QS)), QS.expand(N, -1), rtol=1e-9, atol=0)
    mean = sum(wi * m.mean for wi, m in zip(w, parts, strict=True))
    second = sum(wi * (m.variance + m.mean**2) for wi, m in zip(w, parts, strict=True))
    assert torch.allclose(p.mean, mean, rtol=1e-13)
    assert torch.allclose(p.variance, second - mean**2, rtol=1e-12)
    assert torch.allclose(p.aleatoric, torch.full((N,), 0.25, dtype=F64))


@pytest.mark.parametrize("kind", KINDS)
def test_variance_is_epistemic_plus_aleatoric_and_disagreement_is_epistemic(kind):
    parts = members(kind)
    p = mixture(parts)
    assert isinstance(p, Predictive)
    assert torch.allclose(p.variance, p.epistemic + p.aleatoric, rtol=1e-12)
    assert (p.epistemic >= sum(m.epistemic for m in parts) / len(parts) - 1e-15).all()
    same = mixture([parts[0]] * 3)
    assert torch.allclose(same.epistemic, parts[0].epistemic, atol=1e-14)
    assert p.mass.shape == (N,)
    assert p.diagnostics.refit == "output"


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_of_one_is_that_one(kind):
    one = members(kind)[0]
    p = mixture([one])
    y = one.sample(1, torch.Generator().manual_seed(0))[0].to(F64)
    assert torch.allclose(p.log_prob(y), one.log_prob(y), rtol=1e-12)
    assert torch.allclose(p.mean, one.mean, rtol=1e-12)
    assert torch.allclose(p.increments(y).total, one.increments(y).total)
    if kind not in ("bernoulli", "categorical"):
        assert torch.allclose(p.interval(0.9), one.interval(0.9), rtol=1e-9)
    if kind in ("gaussian", "student"):
        assert torch.allclose(p.mode, one.mode, atol=1e-3)
        assert torch.allclose(p.hdr(0.9).lower, one.hdr(0.9).lower, atol=2e-3)


@pytest.mark.parametrize("kind", ["gaussian", "student"])
def test_quantiles_and_regions_of_a_continuous_mixture(kind):
    p = mixture(members(kind))
    assert torch.allclose(p.cdf(p.icdf(QS)), QS.expand(N, -1), rtol=1e-7, atol=0)
    assert p.icdf(0.0).isneginf().all()
    assert p.icdf(1.0).isposinf().all()
    region = p.hdr(0.8)
    upper, lower = (
        torch.nan_to_num(p.cdf(torch.nan_to_num(e)).where(~e.isnan(), torch.nan))
        for e in (region.upper, region.lower)
    )
    assert torch.allclose((upper - lower).sum(1), torch.full((N,), 0.8, dtype=F64), atol=1e-9)
    ends = torch.cat([region.lower, region.upper], 1)
    heights = p.log_prob(torch.nan_to_num(ends)).where(~ends.isnan(), torch.nan)
    spread = torch.nan_to_num(heights, nan=-math.inf).amax(1) - torch.nan_to_num(
        heights, nan=math.inf
    ).amin(1)
    assert (spread < 0.02).all()  # the density is the same at all ends
    near = p.mode[:, None] + torch.linspace(-0.05, 0.05, 11, dtype=F64) * p.stddev[:, None]
    assert (p.log_prob(p.mode) >= p.log_prob(near).amax(1) - 1e-4).all()


def test_a_region_of_two_far_modes_is_two_intervals():
    p = mixture([gaussian([-5.0], 0.1), gaussian([5.0], 0.1)])
    region = p.hdr(0.9)
    assert region.lower.shape == (1, 2)
    assert float((region.upper - region.lower).sum()) < 4
    assert float(p.interval(0.9)[0, 1] - p.interval(0.9)[0, 0]) > 9


def test_count_mixture_is_the_sum_of_its_parts():
    parts = members("poisson")
    p = mixture(parts, [0.25, 0.75])
    y = torch.arange(0, 600, dtype=F64)[None].expand(N, -1)
    mass = p.log_prob(y).exp()
    assert torch.allclose(
        mass, 0.25 * parts[0].log_prob(y).exp() + 0.75 * parts[1].log_prob(y).exp()
    )
    assert torch.allclose((mass * y).sum(1), p.mean, rtol=1e-6)
    assert torch.allclose(mass.cumsum(1), p.cdf(y), atol=1e-6)
    for q in (0.05, 0.5, 0.975):
        k = p.icdf(q)
        assert (p.cdf(k) >= q - 1e-12).all()
        assert (p.cdf(k - 1) < q).all()
    assert torch.equal(p.mode, mass.argmax(1).to(F64))
    region = p.hdr(0.9)
    inside = (
        (y[:, :, None] >= region.lower[:, None]) & (y[:, :, None] <= region.upper[:, None])
    ).any(-1)
    total = (mass * inside).sum(1)
    least = torch.where(inside, mass, math.inf).amin(1)
    assert (total >= 0.9).all()
    assert (total - least < 0.9).all()


@pytest.mark.parametrize("most", [40, 400])
def test_regions_of_many_counts_hold_at_least_their_level(most, monkeypatch):
    """With more counts than are looked at one by one, blocks of counts take their place."""
    one_by_one = mixture(members("poisson"), [0.25, 0.75])
    exact, mode = one_by_one.hdr(0.9), one_by_one.mode
    monkeypatch.setattr(mixture_laws, "MOST_COUNTS", most)
    p = mixture(members("poisson"), [0.25, 0.75])
    y = torch.arange(0, 600, dtype=F64)[None].expand(N, -1)
    mass = p.log_prob(y).exp()
    region = p.hdr(0.9)
    inside = (
        (y[:, :, None] >= region.lower[:, None]) & (y[:, :, None] <= region.upper[:, None])
    ).any(-1)
    assert ((mass * inside).sum(1) >= 0.9 - 1e-9).all()
    lengths = (region.upper - region.lower + 1).nansum(-1)
    least = (exact.upper - exact.lower + 1).nansum(-1)
    assert (lengths <= 1.25 * least + 2).all()
    heights = torch.gather(mass, 1, p.mode.long()[:, None])
    assert (heights >= 0.9 * torch.gather(mass, 1, mode.long()[:, None])).all()


def test_class_mixture_averages_probabilities():
    for kind in ("bernoulli", "categorical"):
        parts = members(kind)
        p = mixture(parts)
        assert torch.allclose(p.probs, (parts[0].probs + parts[1].probs) / 2)
        assert torch.equal(p.mode, p.probs.argmax(1))
        assert torch.allclose(p.log_prob(torch.ones(N)), p.probs[:, 1].log())
        assert p.interval(0.8).shape == p.probs.shape
        indicators = p.probs[:, 1] if kind == "bernoulli" else p.probs
        assert torch.allclose(
            p.variance, indicators * (1 - indicators)
        )  # total variance of an indicator
        assert set(metrics.summary(p, torch.ones(N)).scores) >= {"nll", "brier", "ece", "accuracy"}


def test_vector_mixture_moments_and_quantiles():
    parts = members("vector")
    p = mixture(parts, [0.3, 0.7])
    draws = p.sample(100_000, torch.Generator().manual_seed(0))
    assert draws.shape == (100_000, N, 2)
    assert torch.allclose(draws.mean(0), p.mean, atol=0.02)
    for i in range(N):
        assert torch.allclose(torch.cov(draws[:, i].mT), p.covariance[i], atol=0.03)
    q = p.icdf([0.1, 0.9])
    assert q.shape == (N, 2, 2)
    assert torch.allclose(p.cdf(q[..., 0]), torch.full((N, 2), 0.1, dtype=F64), atol=1e-10)
    region = p.hdr(0.8)
    shares = torch.stack([region.contains(d) for d in draws[:2000]]).double().mean(0)
    assert ((shares - 0.8).abs() < 0.04).all()


def test_scores_of_a_gaussian_mixture_equal_scoringrules():
    parts = members("gaussian")
    p = mixture(parts, [0.5, 0.3, 0.2])
    y = torch.tensor([0.3, 4.0, 2.0, -9.0], dtype=F64)
    m, s = (
        torch.stack([getattr(part, name) for part in parts], 1).numpy()
        for name in ("mean", "stddev")
    )
    expected = scoringrules.crps_mixnorm(y.numpy(), m, s, np.array([[0.5, 0.3, 0.2]] * N))
    assert np.allclose(metrics.crps(p, y, reduce=False), expected, rtol=1e-6)


def test_samples_follow_the_mixture():
    p = mixture(members("gaussian"), [0.2, 0.2, 0.6])
    draws = p.sample(4000, torch.Generator().manual_seed(1))
    for i in range(N):
        assert (
            stats.kstest(
                draws[:, i].numpy(),
                lambda y, i=i: p.cdf(torch.tensor(y)[None].expand(N, -1))[i].numpy(),
            ).pvalue
            > 1e-3
        )


def test_single_precision_members_keep_their_tails():
    p = mixture(members("student", torch.float32))
    exact = mixture(members("student"))
    assert p.mean.dtype == torch.float32
    assert torch.allclose(p.icdf(QS).double(), exact.icdf(QS), rtol=1e-4)
    nested = mixture([p, affine(p, 0.0, 1.0)])
    assert torch.allclose(nested.icdf(QS), p.icdf(QS), rtol=1e-5)


@pytest.mark.parametrize("likelihood", [L.Gaussian(noise=0.5), L.StudentT(df=4.0, scale=0.5)])
def test_refits_of_weights_can_be_mixed(likelihood):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 2, generator=generator, dtype=F64)
    net = torch.nn.Linear(2, 1).double().eval()
    posterior = ssla.fit(
        net, (x, x.sum(1)), likelihood=likelihood, prior=ssla.priors.Gaussian(), gaussian="laplace"
    )
    one = posterior.predict(x[:3], refit="weights")
    both = mixture([one, posterior.predict(x[:3], refit="output")])
    expected = torch.logaddexp(
        one.log_prob(x[:3, 0]), posterior.predict(x[:3]).log_prob(x[:3, 0])
    ) - math.log(2)
    assert torch.allclose(both.log_prob(x[:3, 0]), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (lambda: ([],), "at least one"),
        (lambda: (members("gaussian")[0],), "list of predictives"),
        (lambda: ([1.0],), "but got a float"),
        (lambda: ([members("gaussian")[0], members("poisson")[0]],), "same kind"),
        (lambda: ([gaussian([1.0], 0.1), gaussian([1.0, 2.0], 0.1)],), "same inputs"),
        (lambda: (members("gaussian"), [1.0]), "one number for each of the 3"),
        (lambda: (members("gaussian"), [1.0, -1.0, 3.0]), "must not be negative"),
        (lambda: (members("gaussian"), [1.0, math.nan, 3.0]), "finite"),
    ],
)
def test_mixtures_that_are_refused(arguments, match):
    with pytest.raises((TypeError, ValueError), match=match):
        mixture(*arguments())


def test_a_mixture_has_no_increments_but_its_members_do():
    p = mixture(members("gaussian"))
    with pytest.raises(TypeError, match="one by one"):
        p.increments(torch.zeros(N))
    assert p.members[0].increments(torch.zeros(N)).total.shape == (N,)
    assert ssla.mixture is mixture


# --- another unit ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gaussian", "student"])
def test_affine_is_the_exact_change_of_unit(kind):
    base = members(kind)[0]
    p = affine(base, 3.0, 0.25)
    y = p.icdf(0.7)
    assert torch.allclose(p.cdf(y), torch.full((N,), 0.7, dtype=F64), atol=1e-9)
    assert torch.allclose(p.mean, 3 + 0.25 * base.mean)
    assert torch.allclose(p.stddev, 0.25 * base.stddev)
    assert torch.allclose(p.variance, p.epistemic + p.aleatoric)
    assert torch.allclose(p.increments(y).total - p.mass.log(), p.log_prob(y), atol=1e-10)
    grid = p.mean[:, None] + p.stddev[:, None] * torch.linspace(-40, 40, 20_001, dtype=F64)
    area = torch.trapezoid(p.log_prob(grid).exp(), grid)
    assert torch.allclose(area, torch.ones(N, dtype=F64), atol=1e-4)
    assert torch.allclose(metrics.crps(p, y), metrics.crps(base, (y - 3) / 0.25) * 0.25)
    assert torch.allclose(p.hdr(0.9).upper, 3 + 0.25 * base.hdr(0.9).upper)
    assert p.interval(0.9).shape == (N, 2)
    assert p.sample(5).shape == (5, N)


def test_affine_of_several_targets():
    base = members("vector")[0]
    p = affine(base, torch.tensor([1.0, 2.0]), torch.tensor([0.5, 4.0]))
    law = stats.multivariate_normal(p.mean[0].numpy(), p.covariance[0].numpy())
    y = torch.randn(N, 2, dtype=F64)
    assert abs(float(p.log_prob(y)[0]) - law.logpdf(y[0].numpy())) < 1e-10
    assert p.interval(0.9).shape == (N, 2, 2)
    assert torch.allclose(p.interval(0.9)[..., 1], p.icdf(0.95))
    assert torch.allclose(p.hdr(0.9).centre, p.mean)
    mixed = affine(mixture(members("vector")), 1.0, 2.0)
    inside = mixed.hdr(0.5).contains(mixed.mean)
    assert torch.equal(
        inside, mixture(members("vector")).hdr(0.5).contains(mixture(members("vector")).mean)
    )


def test_affine_refuses_what_has_no_unit():
    with pytest.raises(TypeError, match="class"):
        affine(members("bernoulli")[0], 0.0, 1.0)
    with pytest.raises(ValueError, match="positive"):
        affine(members("gaussian")[0], 0.0, 0.0)
    with pytest.raises(ValueError, match="numbers"):
        affine(members("gaussian")[0], torch.zeros(2), 1.0)


@pytest.mark.parametrize("likelihood", [L.Categorical(), L.Gaussian(noise=0.5), L.Poisson()])
def test_refits_of_the_weights_can_be_mixed(likelihood):
    generator = torch.Generator().manual_seed(0)
    outputs = 3 if isinstance(likelihood, L.Categorical) else 1
    x = torch.randn(30, 2, generator=generator)
    y = torch.randint(0, 3, (30,), generator=generator)
    parts = []
    for _ in range(2):
        model = torch.nn.Sequential(
            torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, outputs)
        ).eval()
        torch.nn.init.normal_(model[0].weight, generator=generator)
        torch.nn.init.zeros_(model[0].bias)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "polish moved", UserWarning)
            posterior = ssla.fit(
                model,
                (x, y),
                likelihood=likelihood,
                prior=ssla.priors.Gaussian(),
                gaussian="laplace",
            )
        parts.append(posterior.predict(x[:3], "weights"))
    p = mixture(parts)
    each = torch.stack([part.log_prob(y[:3]) for part in parts]).double()
    assert torch.allclose(
        p.log_prob(y[:3]).double(), torch.logsumexp(each, 0) - math.log(2), atol=1e-5
    )
    assert p.mass.dtype == torch.float32


def normals(means, scales, rows=1):
    """Predictives N(m, s²) at some rows."""
    return [
        from_marginal(
            L.Gaussian(noise=float(s)),
            torch.full((rows, 1), float(m)),
            torch.zeros(rows, 1, 1),
            "plug_in",
        )
        for m, s in zip(means, scales, strict=True)
    ]


@pytest.mark.parametrize("place", [0.0, 15.0, 20.0, 30.0, 1e4])
def test_a_mean_beyond_the_quartiles_of_a_mixture_is_counted(place):
    weights = [0.94, 0.06]
    p = ssla.mixture(normals([0.0, place], [1.0, 1.0]), weights)
    law = [stats.norm(0, 1), stats.norm(place, 1)]
    cdf = lambda y: sum(w * part.cdf(y) for w, part in zip(weights, law, strict=True))
    low, median, high = (
        optimize.brentq(lambda y, q=q: cdf(y) - q, -10, place + 10) for q in (0.25, 0.5, 0.75)
    )
    expected = abs(0.06 * place - median) > high - low
    assert p.diagnostics.off_centre.tolist() == [expected]
    assert f"mean far from the median in {int(expected)}" in str(p.diagnostics)
    moved = affine(p, 3.0, 100.0)
    assert moved.diagnostics.off_centre.tolist() == [expected]


def test_rows_are_flagged_one_by_one_also_where_joined():
    first, second = (
        ssla.mixture(normals([0.0, far], [1.0, 1.0], 2), [0.9, 0.1]) for far in (0.0, 100.0)
    )
    both = join_predictives([first, second], [torch.tensor([0, 3]), torch.tensor([1, 2])])
    assert both.diagnostics.off_centre.tolist() == [False, True, True, False]


def test_one_law_and_classes_are_not_flagged():
    p = normals([0.0], [1.0])[0]
    assert p.diagnostics.off_centre.tolist() == [False]
    assert "median" not in str(p.diagnostics)


def test_a_skewed_scale_is_judged_on_that_scale():
    """A log-normal law has its mean beyond the upper quartile for σ > 1.35; its median is one."""
    for sigma in (0.5, 1.0, 2.0):
        p = transformed(ssla.mixture(normals([0.0, 0.0], [sigma, sigma])), "exp")
        law = stats.lognorm(sigma)
        expected = law.mean() - law.median() > law.ppf(0.75) - law.ppf(0.25)
        assert p.diagnostics.off_centre.tolist() == [expected]


def test_a_value_with_half_of_the_probability_is_not_flagged():
    """Rare events: quartiles and median are zero, so there is no range to compare with."""
    p = transformed(ssla.mixture(normals([-1.0, -1.0], [1.0, 1.0])), Censored())
    assert float(p.mean) > 0
    assert p.diagnostics.off_centre.tolist() == [False]
