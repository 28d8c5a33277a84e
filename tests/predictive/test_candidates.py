"""Predictives from k candidates on a grid of given half-width: hand normalisation by SciPy, and the
full predictive in the limit.
"""

import numpy as np
import pytest
import torch
from scipy import integrate, interpolate, stats

import ssla
from support.refits import T, last_layer, seeded

K20 = {"candidates": 20, "half_width": 2.6}


def by_hand(post, new, refit, count, width):
    """For each input the spline of SciPy through ssla.ssla on the grid, and its range."""
    f = post.network.linearise(post.network.cast(new), post.theta)[0].double()
    grid = f[:, :1] + torch.linspace(-width, width, count, dtype=torch.float64)
    logs = ssla.ssla(post, new, grid, refit).total
    return [
        (
            interpolate.CubicSpline(y.numpy(), v.numpy(), bc_type="not-a-knot"),
            float(y[0]),
            float(y[-1]),
        )
        for y, v in zip(grid, logs, strict=True)
    ]


@pytest.mark.parametrize("at", ["candidate", "prediction"])
@pytest.mark.parametrize("name", ["heteroscedastic", "student"])
def test_twenty_candidates_are_normalised_by_hand(name, at):
    post, new, *_ = last_layer(name)
    refit = ssla.WeightRefit(at=at, **K20)
    p = post.predict(new, refit=refit)
    for i, (spline, low, high) in enumerate(
        by_hand(post, new, ssla.WeightRefit(at=at), 20, K20["half_width"])
    ):
        density = lambda y, s=spline: np.exp(s(y))
        points = np.linspace(low, high, 20)[1:-1]
        quad = lambda g: integrate.quad(g, low, high, points=points, epsabs=1e-12, limit=200)[0]
        mass = quad(density)
        mean = quad(lambda y: y * density(y)) / mass
        variance = quad(lambda y: (y - mean) ** 2 * density(y)) / mass
        assert float(p.mass[i]) == pytest.approx(mass, rel=1e-9)
        assert float(p.mean[i]) == pytest.approx(mean, abs=1e-9)
        assert float(p.variance[i]) == pytest.approx(variance, rel=1e-8)
        y = mean + 0.37
        assert float(p.log_prob(y)[i]) == pytest.approx(float(spline(y)) - np.log(mass), abs=1e-9)
        below = integrate.quad(density, low, y, points=points[points < y], epsabs=1e-12)[0] / mass
        assert float(p.cdf(y)[i]) == pytest.approx(below, abs=1e-9)
        assert float(p.icdf(below)[i]) == pytest.approx(y, abs=1e-8)
    assert (p.diagnostics.refits == (20 if at == "candidate" else 1)).all()
    assert not p.diagnostics.inaccurate.any()
    assert "of the mass beyond the candidates" in str(p.diagnostics)


@pytest.mark.filterwarnings("ignore:The candidates on", "ignore:.*predictives are inaccurate")
def test_it_tends_to_the_full_predictive():
    post, new, *_ = last_layer("heteroscedastic", n=200)
    full = post.predict(new, refit=ssla.WeightRefit(interpolation=1e-7))
    errors = []
    y = full.icdf(T(0.001, 0.02, 0.3, 0.6, 0.97, 0.999))
    for count, width in ((8, 1.8), (14, 2.2), (60, 5.0)):
        p = post.predict(new, refit=ssla.WeightRefit(candidates=count, half_width=width))
        errors.append(float((p.log_prob(y) - full.log_prob(y)).abs().max()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-4
    for what in ("mean", "stddev", "mass", "epistemic", "aleatoric"):
        assert torch.allclose(getattr(p, what), getattr(full, what), rtol=0, atol=2e-4)
    assert torch.allclose(p.interval(0.9), full.interval(0.9), rtol=0, atol=2e-4)
    assert torch.allclose(p.hdr(0.9).lower[:, 0], full.hdr(0.9).lower[:, 0], rtol=0, atol=2e-3)


def test_a_gaussian_on_a_grid_is_the_truncated_normal():
    """The spline of a parabola is exact, so this is SciPy's truncnorm."""
    post, new, *_ = last_layer("gaussian")
    exact = post.predict(new)
    with pytest.warns(RuntimeWarning, match=r"cut more than 2% of the mass in 3 of 3 rows"):
        p = post.predict(new, refit=ssla.WeightRefit(candidates=20, half_width=0.7))
    for i in range(len(new)):
        mean, sd = float(exact.mean[i]), float(exact.stddev[i])
        truth = stats.truncnorm(-0.7 / sd, 0.7 / sd, mean, sd)
        for y in (mean - 0.4, mean, mean + 0.65):
            assert float(p.log_prob(y)[i]) == pytest.approx(truth.logpdf(y), abs=1e-8)
            assert float(p.cdf(y)[i]) == pytest.approx(truth.cdf(y), abs=1e-8)
        assert float(p.stddev[i]) == pytest.approx(truth.std(), abs=1e-8)
        inside = stats.norm(mean, sd).cdf(mean + 0.7) - stats.norm(mean, sd).cdf(mean - 0.7)
        assert float(p.diagnostics.cut[i]) == pytest.approx(1 - inside, abs=1e-8)
        assert float(p.mass[i]) == pytest.approx(inside, abs=1e-8)
        assert float(p.interval(0.8)[i, 1]) == pytest.approx(truth.ppf(0.9), abs=1e-8)
        assert float(p.mode[i]) == pytest.approx(mean, abs=0.01)
    beyond = p.log_prob(exact.mean + 0.71)
    assert (beyond == -torch.inf).all()
    assert torch.equal(p.cdf(exact.mean + 5), torch.ones(3, dtype=torch.float64))
    draws = p.sample(4000, seeded(0))
    assert float((draws - exact.mean).abs().max()) <= 0.7
    assert torch.allclose(draws.std(0), p.stddev, rtol=0.05)
    region = p.hdr(0.5)
    assert torch.allclose(p.cdf(region.upper[:, 0]) - p.cdf(region.lower[:, 0]), T(0.5, 0.5, 0.5))
    y = exact.mean + 0.2
    assert torch.equal(p.increments(y).total, ssla.ssla(post, new, y).total)


@pytest.mark.filterwarnings("ignore:.*predictives are inaccurate")
def test_candidates_that_are_too_far_apart_are_flagged():
    post, new, *_ = last_layer("heteroscedastic")
    p = post.predict(new, refit=ssla.WeightRefit(candidates=5, half_width=6.0))
    assert p.diagnostics.inaccurate.all()


@pytest.mark.filterwarnings("ignore:.*did not converge", "ignore:The candidates on")
@pytest.mark.parametrize("on_failure", ["fallback", "nan"])
def test_rows_with_failed_refits(on_failure):
    post, new, *_ = last_layer("heteroscedastic")
    p = post.predict(new, refit=ssla.WeightRefit(max_steps=1, on_failure=on_failure, **K20))
    assert p.diagnostics.unconverged.all()
    if on_failure == "nan":
        assert set(p.diagnostics.rung) == {"failed"}
        assert p.mean.isnan().all()
        assert p.icdf(0.5).isnan().all()
    else:
        assert set(p.diagnostics.rung) == {"output"}
        assert (p.mean - post.predict(new).mean).abs().max() < 0.05


def test_without_rows():
    post, new, *_ = last_layer("heteroscedastic")
    p = post.predict(new[:0], refit=ssla.WeightRefit(**K20))
    assert p.mean.shape == (0,)
    assert p.interval(0.9).shape == (0, 2)
