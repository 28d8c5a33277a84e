"""Each correction of docs/paper/errata.md, checked by numbers: closed forms on one side, refits of
`ssla.ExplicitModel` on the other.
"""

import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats

import ssla
from ssla_paper.rates import regions

F64 = torch.float64


def counts(n, theta=0.7):
    """n counts with rate e^θ, whose sum is what the rate says, so that sizes are comparable."""
    y = torch.poisson(torch.full((n,), math.exp(theta), dtype=F64), generator=generator(n))
    return y[:, None]


def generator(seed):
    return torch.Generator().manual_seed(seed)


def poisson(row, theta):
    return row[0] * theta[0] - theta[0].exp() - torch.lgamma(row[0] + 1)


def normal(row, theta):
    return -0.5 * (row[0] - theta[0]) ** 2 - 0.5 * math.log(2 * math.pi)


def line(row, theta):
    """y = θ x + ε, σ = 0.5; a row is (x, y)."""
    return -2.0 * (row[1] - theta[0] * row[0]) ** 2 - 0.5 * math.log(0.5 * math.pi)


def model(log_prob, rows, precision=1.0, convention="exact", start=(0.5,)):
    return ssla.ExplicitModel(
        log_prob, rows, list(start), ssla.priors.Gaussian(precision), convention
    )


@pytest.mark.parametrize("target", [0.0, 2.0, 9.0])
@pytest.mark.parametrize("n", [10, 100])
def test_lemma_1_has_a_step_towards_the_new_row_and_the_bound_by_the_least_curvature(n, target):
    known = model(poisson, counts(n))
    hat = float(known.mode[0])
    tilde = float(known.modes([[target]])[0, 0])
    score = target - math.exp(hat)
    # J̃ between the modes: (n + 1) e^θ + 1, and its mean over the segment in closed form
    mean_curvature = 1 + (n + 1) * (math.exp(tilde) - math.exp(hat)) / (tilde - hat)
    assert tilde - hat == pytest.approx(score / mean_curvature, rel=1e-8)
    assert (tilde - hat) * score > 0
    least = 1 + (n + 1) * math.exp(min(hat, tilde))
    assert abs(tilde - hat) <= abs(score) / least * (1 + 1e-9)


def spread(row, theta):
    """N(y; 0, e^(s x)); a row is (x, y). At y = 0, the prediction, the score of s is −x/2."""
    return -0.5 * theta[0] * row[0] - 0.5 * row[1] ** 2 * (-theta[0] * row[0]).exp()


def test_at_the_prediction_lemma_1_fails_for_a_log_variance_with_vanishing_inputs():
    """x_i = 1/i and y = ŷ = 0 at x = 1: (A1) to (A3) hold, J is bounded, the step stays."""
    x = 1 / torch.arange(1, 100_001, dtype=F64)
    z = torch.randn(100_000, dtype=F64, generator=generator(0))  # true s = 0
    rows = torch.stack([x, z], 1)
    steps, curvatures = [], []
    for n in (100, 1_000, 10_000, 100_000):
        known = model(spread, rows[:n], start=(0.0,))
        hat = float(known.mode[0])
        tilde = float(known.modes([[1.0, 0.0]])[0, 0])
        steps.append(tilde - hat)
        information = [
            float(1 + 0.5 * (x[:n] ** 2 * z[:n] ** 2 * (-s * x[:n]).exp()).sum())
            for s in (hat, tilde)
        ]
        curvatures.append(information[0])
        # F̃' = −½ Σ x + ½ Σ x z² e^(−s x) − s − ½ is zero at the new mode
        slope = -0.5 * x[:n].sum() + 0.5 * (x[:n] * z[:n] ** 2 * (-tilde * x[:n]).exp()).sum()
        assert float(slope) - tilde - 0.5 == pytest.approx(0, abs=1e-8)
        assert 1 <= min(information) <= 0.5 / abs(tilde - hat) <= max(information)
    assert [round(step, 3) for step in steps] == [-0.184, -0.182, -0.182, -0.182]
    assert [round(curvature, 2) for curvature in curvatures] == [2.57, 2.61, 2.61, 2.6]


@pytest.mark.parametrize("n", [200, 800])
def test_at_the_prediction_a_log_variance_changes_likelihood_prior_and_curvature_by_order_one_over_n(
    n,
):
    """N(0, e^s) at y = ŷ = 0: a loss of 1/(4n); the ratio of prior to curvature is −2 τ ŝ."""
    rows = torch.stack(
        [torch.ones(n, dtype=F64), 2 * torch.randn(n, dtype=F64, generator=generator(n))], 1
    )
    squares = float((rows[:, 1] ** 2).sum())
    flat = ssla.ExplicitModel(spread, rows, [0.5], ssla.priors.Flat())
    hat, tilde = float(flat.mode[0]), float(flat.modes([[1.0, 0.0]])[0, 0])
    assert tilde - hat == pytest.approx(-math.log1p(1 / n), rel=1e-8)
    loss = 0.5 * n * (tilde - hat) + 0.5 * squares * (math.exp(-tilde) - math.exp(-hat))
    assert loss == pytest.approx(0.5 - 0.5 * n * math.log1p(1 / n), rel=1e-6)
    assert loss * 4 * n == pytest.approx(1, abs=1 / n)
    tau = 2.0
    known = model(spread, rows, precision=tau)
    parts = known.increments([[1.0, 0.0]])
    assert float(parts.prior) * n == pytest.approx(tau * float(known.mode[0]), rel=20 / n)
    assert float(parts.curvature) * n == pytest.approx(-0.5, rel=20 / n)


def test_theorem_1_is_bounded_by_the_score_and_its_intermediate_term_falls_as_one_over_n():
    """With a flat prior: ℓ(θ̂) − ℓ(θ̃) = n r²/(2 (n + 1)²), of order 1/n and not 1/n²."""
    scaled = []
    for n in (100, 400):
        rows = torch.randn(n, 1, dtype=F64, generator=generator(n))
        known = ssla.ExplicitModel(normal, rows, [0.0], ssla.priors.Flat())
        hat = float(known.mode[0])
        tilde = float(known.modes([[hat + 3.0]])[0, 0])
        loss = -0.5 * float(((rows - hat) ** 2).sum() - ((rows - tilde) ** 2).sum())
        assert loss == pytest.approx(n * 9 / (2 * (n + 1) ** 2), rel=1e-6)
        parts = known.increments([[hat + 3.0]])
        still = known.increments([[hat + 3.0]], refit=False)
        gain = float(parts.likelihood - still.likelihood)
        assert gain == pytest.approx(9 / (2 * (n + 1)), rel=1e-8)  # g²/(2 J̃), the bound attained
        scaled.append(loss * n)
    assert scaled[1] == pytest.approx(scaled[0], rel=0.03)


def test_the_prior_increment_has_the_order_of_the_curvature_increment():
    """Normal mean: their ratio tends to 2 τ θ̂ (y − θ̂)."""
    tau = 2.0
    for n, close in ((100, 0.06), (10_000, 6e-4)):
        rows = 1.5 + torch.randn(n, 1, dtype=F64, generator=generator(n))
        known = model(normal, rows, precision=tau)
        hat = float(known.mode[0])
        parts = known.increments([[hat + 1.0]])
        assert float(parts.prior / parts.curvature) == pytest.approx(2 * tau * hat, rel=close)


def expansion(known, y):
    """½ g²/J − ½ (∂J/J) (g/J): what ASSLA leaves out, to leading order, for counts."""
    hat = float(known.mode[0])
    rate = len(known.data) * math.exp(hat)
    score, curvature = y - math.exp(hat), rate + 1.0
    return 0.5 * score**2 / curvature - 0.5 * rate * score / curvature**2


def test_what_assla_leaves_out_is_of_order_one_over_n_with_a_remainder_of_one_over_n_squared():
    left, remainders = [], []
    for n in (200, 800):
        known = model(poisson, torch.full((n, 1), 2.0, dtype=F64))
        gap = float(known.increments([[5.0]]).total - known.increments([[5.0]], refit=False).total)
        left.append(gap * n)
        remainders.append((gap - expansion(known, 5.0)) * n**2)
    assert left[1] == pytest.approx(left[0], rel=0.02)
    assert remainders[1] == pytest.approx(remainders[0], rel=0.05)
    assert abs(remainders[0]) > 0.1  # a remainder that is there


def test_the_change_of_the_likelihood_cancels_the_prior_increment_to_first_order():
    sums = []
    for n in (200, 800):
        known = model(poisson, torch.full((n, 1), 2.0, dtype=F64), precision=3.0)
        hat, tilde = float(known.mode[0]), float(known.modes([[5.0]])[0, 0])
        data = n * (2.0 * (tilde - hat) - math.exp(tilde) + math.exp(hat))
        prior = float(known.increments([[5.0]]).prior)
        assert abs(data + prior) < 0.9 * abs(prior)
        score = 5.0 - math.exp(hat)
        sums.append((data + prior) / (-0.5 * score**2 / (n * math.exp(hat) + 3.0)))
    assert abs(sums[1] - 1) < abs(sums[0] - 1) < 0.05


@pytest.mark.parametrize("precision", [0.1, 10.0, 100.0])
def test_without_the_prior_in_the_curvature_a_linear_model_loses_a_constant(precision):
    x = torch.linspace(-1, 1, 20, dtype=F64)
    rows = torch.stack([x, 0.8 * x + 0.5 * torch.randn(20, dtype=F64, generator=generator(0))], 1)
    candidates = torch.tensor([[1.5, y] for y in (-3.0, 0.5, 4.0)], dtype=F64)
    exact, paper = (
        model(line, rows, precision, convention).increments(candidates).total
        for convention in ("exact", "paper")
    )
    information = float((x * x).sum()) * 4
    lost = 0.5 * (
        math.log1p(9.0 / (information + precision)) - math.log1p(9.0 / information)
    )  # 1.5² / σ² = 9
    torch.testing.assert_close(paper - exact, torch.full((3,), lost, dtype=F64))
    assert lost < 0
    mean = float((x * rows[:, 1]).sum()) * 4 / (information + precision) * 1.5
    truth = stats.norm(mean, math.sqrt(0.25 + 2.25 / (information + precision)))
    np.testing.assert_allclose(exact.numpy(), truth.logpdf(candidates[:, 1].numpy()), atol=1e-10)


def unknown_variance(row, theta):
    """N(y; μ, e^s), θ = (μ, s)."""
    return -0.5 * (row[0] - theta[0]) ** 2 * (-theta[1]).exp() - 0.5 * theta[1]


def test_one_refit_on_the_prediction_is_a_plug_in_that_is_narrower():
    """Algorithm 1 as written refits once, on ŷ: the result is the plug-in of that refit."""
    rows = torch.randn(12, 1, dtype=F64, generator=generator(3))
    known = ssla.ExplicitModel(unknown_variance, rows, [0.0, 0.0], ssla.priors.Gaussian(0.01))
    hat = known.mode
    once = known.modes(hat[:1, None])[0]
    assert float(once[0]) == pytest.approx(float(hat[0]), abs=2e-3)
    assert float(once[1]) < float(hat[1]) - 0.05  # the score of s at ŷ is −½
    grid = torch.linspace(-9, 9, 601, dtype=F64)
    p = torch.softmax(known.increments(grid[:, None]).total, 0)
    spread = math.sqrt(float((p * grid**2).sum() - (p * grid).sum() ** 2))
    plug_in, literal = math.exp(0.5 * float(hat[1])), math.exp(0.5 * float(once[1]))
    assert literal < 0.99 * plug_in < 0.99 * spread


def test_with_constant_noise_one_refit_on_the_prediction_moves_nothing():
    x = torch.linspace(-1, 1, 20, dtype=F64)
    known = model(line, torch.stack([x, x.sin()], 1))
    at = torch.tensor([[1.5, 1.5 * float(known.mode[0])]], dtype=F64)
    torch.testing.assert_close(known.modes(at)[0], known.mode, rtol=0, atol=1e-12)


def test_the_outer_product_of_the_summed_score_is_zero_where_the_curvature_is_not():
    rows = torch.randn(30, 1, dtype=F64, generator=generator(1))
    known = ssla.ExplicitModel(normal, rows, [0.0], ssla.priors.Flat())
    hat = float(known.mode[0])
    summed = float((rows - hat).sum()) + 0.0  # the new row at ŷ = θ̂ adds nothing
    assert summed**2 / 30 < 1e-20
    assert float(((rows - hat) ** 2).sum()) / 30 == pytest.approx(float(rows.var(correction=0)))


@pytest.mark.parametrize(("precision", "centre"), [(1.0, 0.5), (50.0, -2.0)])
def test_maximum_likelihood_estimates_under_a_conflict_have_the_stated_mass(precision, centre):
    n = 20
    rows = 0.7 + torch.randn(n, 1, dtype=F64, generator=generator(2))
    known = ssla.ExplicitModel(
        normal, rows, [0.5], ssla.priors.Gaussian(precision, centre), "additive"
    )
    mean = float(rows.mean())
    conflict = mean - centre
    weight = n / (n + 1) + precision / (n + 1) ** 2
    middle = mean - precision * conflict / ((n + 1) * weight)
    y = middle + torch.linspace(-9, 9, 2001, dtype=F64) / math.sqrt(weight)
    total = known.increments(y[:, None]).total
    r = y - mean
    closed = -0.5 * math.log(2 * math.pi * (n + 1) / n) - n * r**2 / (2 * (n + 1))
    closed -= precision / 2 * (2 * conflict * r / (n + 1) + (r / (n + 1)) ** 2)
    torch.testing.assert_close(total, closed, rtol=1e-10, atol=1e-9)
    log_mass = float(total.logsumexp(0)) + math.log(float(y[1] - y[0]))
    stated = 0.5 * math.log(n / ((n + 1) * weight))
    stated += precision**2 * conflict**2 / (2 * (n + 1) ** 2 * weight)
    assert log_mass == pytest.approx(stated, abs=1e-6)
    assert (abs(stated) > 10) == (centre == -2.0)


def test_the_half_width_of_the_appendix_is_its_formula():
    """The product written out for five rows, against the sum of logarithms."""
    x = torch.tensor([0.5, -1.0, 0.3, 0.9, -0.2], dtype=F64)
    y = torch.tensor([0.7, -0.5, 0.1, 0.9, 0.0], dtype=F64)
    w, n, density = 0.8, 5, stats.norm(0, 0.5)
    likelihood = float(np.prod(density.pdf((y - w * x).numpy())))
    curvature = float((x * x).sum()) * 4
    inside = (2 * math.pi / n) ** -1.5 * math.sqrt((curvature + 9) / n) * curvature / n
    inside /= likelihood**2 * stats.norm.pdf(w) ** 3
    for with_new, factor in ((False, 1.0), (True, 1 / (likelihood * density.pdf(0.0)))):
        expected = (1.5 * 0.95 * inside * factor) ** (1 / 3)
        found = regions.log_half_width(x, y, w, with_new)
        assert math.exp(found) == pytest.approx(expected, rel=1e-12)


def test_the_region_of_the_appendix_is_not_the_half_width_of_a_region():
    record = regions.one(50)
    half = optimize.brentq(
        lambda b: math.erf(b / math.sqrt(2) / (record["exact"] / regions.QUANTILE)) - 0.95, 0, 9
    )
    assert record["exact"] == pytest.approx(half, rel=1e-10)
    assert record["library"] == pytest.approx(half, rel=1e-8)
    assert record["log_published"] > 30
    assert record["log_without"] > 20


def test_the_predictive_of_counts_is_not_symmetric():
    ours, exact = regions.skewness()["skewness"]
    total = regions.SHAPE + sum(regions.COUNTS)
    odds = regions.RATE + len(regions.COUNTS)
    truth = stats.nbinom(total, odds / (odds + 1)).stats(moments="s")
    assert exact == pytest.approx(float(truth), rel=1e-9)
    assert ours == pytest.approx(exact, rel=1e-3)


def test_dividing_both_curvatures_by_their_own_number_of_rows_changes_the_answer_by_order_one_over_n():
    """½ q log((n + 1)/n): the size of the curvature increment itself."""
    n = 100
    known = ssla.ExplicitModel(
        normal, torch.randn(n, 1, dtype=F64, generator=generator(5)), [0.0], ssla.priors.Flat()
    )
    increment = float(known.increments([[1.0]], refit=False).curvature)
    assert increment == pytest.approx(-0.5 * math.log((n + 1) / n), rel=1e-10)
