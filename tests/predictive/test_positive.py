"""The scale of targets that are not negative, against numerical integration."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from ssla import Marginal, likelihoods, metrics
from ssla.predictive import affine, from_marginal, mixture, transformed
from ssla.predictive.normals import average_normals
from ssla.predictive.positive import Censored, Positive
from ssla.predictive.transformed import Exponential

SCALE = Positive(-1.0, 2.0)
OPEN = Positive(-1.0, 2.0, closed=False)


def normals(means=(0.2, -1.5, 3.0), variances=(0.3, 2.0, 9.0)):
    """Predictives of mean and log variance: mixtures of normal distributions."""
    f = torch.tensor(
        [[m, math.log(v)] for m, v in zip(means, variances, strict=True)], dtype=torch.float64
    )
    K = torch.tensor([[0.05, 0.01], [0.01, 0.2]], dtype=torch.float64).expand(len(f), 2, 2)
    one = torch.ones(1, dtype=torch.float64)
    return average_normals(
        [Marginal(f, K)],
        one,
        torch.tensor([1.0, 2.0]).double(),
        torch.tensor([0.7, 0.3]).double(),
        f,
    )


def gaussians():
    f = torch.tensor([[0.2], [-1.5], [3.0]], dtype=torch.float64)
    return from_marginal(
        likelihoods.Gaussian(noise=0.8), f, torch.full((3, 1, 1), 0.3, dtype=torch.float64)
    )


def student():
    f = torch.tensor([[0.2], [-1.5], [3.0]], dtype=torch.float64)
    return from_marginal(
        likelihoods.StudentT(scale=0.5, df=8.0),
        f,
        torch.full((3, 1, 1), 0.1, dtype=torch.float64),
        "none",
    )


BASES = {
    "normals": normals,
    "units": lambda: affine(normals(), 0.5, 1.3),
    "gaussians": gaussians,
    "mixture": lambda: mixture([affine(normals(), 0.5, 1.3), gaussians()], [0.4, 0.6]),
    "student": student,
}


@pytest.mark.parametrize("scale", [SCALE, OPEN])
def test_the_scale_is_smooth_and_inverted(scale):
    z = torch.linspace(-1.999, 6.0, 300, dtype=torch.float64).requires_grad_(True)
    y = scale.to_y(z)
    assert torch.allclose(scale.to_z(y), z)
    (slope,) = torch.autograd.grad(y.sum(), z)
    assert torch.allclose(slope.log(), scale.log_slope(z))
    inside = torch.linspace(-1, 2, 7, dtype=torch.float64)
    assert torch.allclose(scale.to_y(inside), inside.exp())
    assert float(scale.to_y(torch.tensor(SCALE.low - 1))) == pytest.approx(0, abs=1e-12)
    assert float(scale.to_y(torch.tensor(-9.0))) == 0


@pytest.mark.parametrize("scale", [SCALE, OPEN])
@pytest.mark.parametrize("kind", BASES)
def test_density_quantiles_and_moments_are_those_of_an_integration(kind, scale):
    base = BASES[kind]()
    p = transformed(base, scale)
    ends = (0.0, math.exp(-1), math.exp(2), 100.0, 4000.0)
    for i in range(3):

        def density(y, i=i):
            row = torch.full((3,), float(y), dtype=torch.float64)
            return float(p.log_prob(row)[i].exp())

        found = [
            sum(
                integrate.quad(lambda y, k=k: y**k * density(y), a, b, limit=200)[0]
                for a, b in pairwise(ends)
            )
            for k in range(3)
        ]
        atom = float(base.cdf(torch.full((3,), SCALE.zero_point, dtype=torch.float64))[i])
        assert found[0] + atom == pytest.approx(1, abs=2e-6)
        assert float(p.mean[i]) == pytest.approx(found[1], rel=2e-4)
        assert float(p.variance[i]) == pytest.approx(
            found[2] - found[1] ** 2, rel=2e-2 if kind == "student" else 1e-4
        )
    q = np.array([0.001, 0.05, 0.5, 0.95, 0.999])
    for k, y in enumerate(p.icdf(q).unbind(1)):
        atom = p.cdf(torch.zeros(3, dtype=torch.float64))
        wanted = torch.maximum(torch.tensor(q[k]).double(), atom)
        assert torch.allclose(p.cdf(y), wanted, atol=1e-8)


def test_it_is_a_log_normal_law_where_the_tails_do_not_matter():
    """Exact: a narrow normal inside the logarithmic part."""
    narrow = normals(means=(0.4,), variances=(1e-3,))
    one, other = (transformed(narrow, scale) for scale in (Positive(-9.0, 9.0), Exponential()))
    assert torch.allclose(one.mean, other.mean, rtol=1e-9)
    assert torch.allclose(one.variance, other.variance, rtol=1e-6)
    y = torch.tensor([1.4], dtype=torch.float64)
    assert torch.allclose(one.log_prob(y), other.log_prob(y))


def test_a_censored_normal_far_below_the_logarithmic_part():
    """Exact: on the linear part the law is max(x, 0) of a normal x (closed form)."""
    scale = Positive(9.0, 10.0)
    f = torch.tensor([[8.5], [8.1]], dtype=torch.float64)
    base = from_marginal(
        likelihoods.Gaussian(noise=0.1), f, torch.zeros(2, 1, 1, dtype=torch.float64)
    )
    p = transformed(base, scale)
    unit = math.exp(9.0)
    for i, m in enumerate((0.5, 0.1)):
        share, height = stats.norm.cdf(m / 0.1), stats.norm.pdf(m / 0.1)
        mean, square = m * share + 0.1 * height, (m**2 + 0.01) * share + 0.1 * m * height
        assert float(p.mean[i]) == pytest.approx(mean * unit, rel=1e-7)
        assert float(p.variance[i]) == pytest.approx((square - mean**2) * unit**2, rel=1e-7)
        wanted = np.maximum(stats.norm(m, 0.1).interval(0.9), 0) * unit
        assert np.allclose(p.interval(0.9)[i], wanted, rtol=1e-6)


def test_zero_is_possible_and_negative_values_are_refused():
    p = transformed(normals(), SCALE)
    assert torch.isfinite(p.log_prob(torch.zeros(3, dtype=torch.float64))).all()
    assert (p.interval(0.9999)[:, 0] >= 0).all()
    draws = p.sample(2000, torch.Generator().manual_seed(0))
    assert (draws >= 0).all()
    assert torch.allclose(draws.double().mean(0), p.mean, rtol=0.1)
    with pytest.raises(ValueError, match="zero or positive"):
        p.log_prob(torch.tensor([-1.0, 1.0, 1.0], dtype=torch.float64))
    opened = transformed(normals(), OPEN)
    below = torch.full((3,), -1.0, dtype=torch.float64)
    z = torch.full(
        (3,), -1 / math.exp(-1) + (-1) - 1, dtype=torch.float64
    )  # T continued: y = e^low (1 + z − low)
    assert torch.allclose(
        opened.log_prob(below), normals().log_prob(z) + 1
    )  # and its slope there, e^low
    assert (opened.interval(0.9999)[:, 0] >= 0).all()
    assert np.isfinite(float(metrics.crps(opened, np.ones(3))))


def test_what_is_below_zero_becomes_exactly_zero():
    """1 + (low − 1) − low is 1e-17 for a quarter of all `low`: the lower ends of intervals were
    above zero, and zeros outside.
    """
    z = torch.tensor([-50.0, -1e300], dtype=torch.float64)
    for low in np.random.default_rng(0).uniform(-16, 16, 400):
        scale = Positive(low, low + 5)
        assert (scale.to_y(z) == 0).all()
        at = torch.tensor([scale.zero_point, scale.zero_point + 1e-3], dtype=torch.float64)
        assert torch.allclose(
            scale.to_y(at), math.exp(low) * torch.tensor([0, 1e-3], dtype=torch.float64), rtol=1e-10
        )


def test_variance_is_divided_as_on_the_scale_of_the_model():
    base = normals()
    p = transformed(base, SCALE)
    assert torch.allclose(p.epistemic + p.aleatoric, p.variance)
    assert torch.allclose(p.epistemic / p.variance, base.epistemic / base.variance)


@pytest.mark.parametrize("kind", BASES)
def test_a_censored_law_against_an_integration(kind):
    base = BASES[kind]()
    p = transformed(base, Censored())
    for i in range(3):

        def density(y, i=i):
            return float(base.log_prob(torch.full((3,), float(y), dtype=torch.float64))[i].exp())

        ends = (0.0, 1.0, 10.0, 200.0)
        found = [
            sum(
                integrate.quad(lambda y, k=k: y**k * density(y), a, b, limit=200)[0]
                for a, b in pairwise(ends)
            )
            for k in (1, 2)
        ]
        assert float(p.mean[i]) == pytest.approx(found[0], rel=3e-4, abs=1e-5)
        assert float(p.variance[i]) == pytest.approx(
            found[1] - found[0] ** 2, rel=2e-2 if kind == "student" else 1e-3
        )
    y = torch.tensor([0.0, 0.5, 4.0], dtype=torch.float64)
    assert torch.allclose(p.log_prob(y), base.log_prob(y))
    assert torch.allclose(p.interval(0.99), base.interval(0.99).clamp_min(0))
    with pytest.raises(ValueError, match="zero or positive"):
        p.log_prob(-y)
