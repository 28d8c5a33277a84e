"""The conjugate study against SciPy, closed forms and an independent implementation of the
published convention.
"""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

import ssla
from ssla import priors
from ssla_paper.conjugate.measure import compare, divergence, grid, published, run, widened
from ssla_paper.conjugate.models import Analytic, Linear, Normal, Poisson, normal

F64 = torch.float64
FAR = {"normal": Normal(0.0, 0.3), "poisson": Poisson(20.0, 4.0), "linear": Linear(-1.0, 0.2)}


def test_the_normal_predictive_by_quadrature_over_the_mean():
    model = Normal(1.0, 0.7)
    rows = model.draw(6, 3)
    x = rows[:, 0].numpy()

    def weight(mu):
        return stats.norm.pdf(mu, 1.0, math.sqrt(0.7)) * np.prod(
            stats.norm.pdf(x, mu, math.sqrt(2))
        )

    whole = integrate.quad(weight, -10, 15, epsabs=0, epsrel=1e-11)[0]
    for y in (-2.0, 1.0, 3.7, 8.0):
        joint = integrate.quad(
            lambda mu, y=y: weight(mu) * stats.norm.pdf(y, mu, math.sqrt(2)),
            -10,
            15,
            epsabs=0,
            epsrel=1e-11,
        )[0]
        assert float(model.analytic(rows).log_prob(torch.tensor(y, dtype=F64))) == pytest.approx(
            math.log(joint / whole), abs=1e-8
        )


def test_the_poisson_predictive_is_scipys_negative_binomial():
    model = Poisson(6.0, 2.0)
    rows = model.draw(50, 1)
    y = torch.arange(0, 25, dtype=F64)
    total = float(rows.sum())
    expected = stats.nbinom(total + 6, 52 / 53).logpmf(y.numpy())
    found = model.analytic(rows)
    assert np.allclose(found.log_prob(y).numpy(), expected, atol=1e-9, rtol=0)
    assert (found.centre, found.scale) == pytest.approx(
        (stats.nbinom(total + 6, 52 / 53).mean(), stats.nbinom(total + 6, 52 / 53).std())
    )
    assert torch.equal(found.log_prob(y[[7, 2]]), found.log_prob(y)[[7, 2]])  # in any order


def test_the_poisson_predictive_keeps_its_digits_at_a_million():
    """A probability mass function sums to one and has its mean, which lgamma near 10⁷ would
    miss by 1e-8.
    """
    found = Poisson().analytic(Poisson().draw(1_000_000, 0))
    y = torch.arange(0, 60, dtype=F64)
    p = found.log_prob(y).exp()
    assert abs(float(p.sum()) - 1) < 1e-12
    assert abs(float((p * y).sum()) - found.centre) < 1e-11


def test_the_linear_predictive_is_a_ratio_of_joint_normals():
    model = Linear(-1.0, 0.2)
    rows = model.draw(7, 2).numpy()
    x = np.append(rows[:, 0], model.at)
    design = np.stack([np.ones(8), x], 1)
    mean, covariance = design @ [-1.0, -1.0], 0.2 * design @ design.T + np.eye(8)
    y = np.array([-3.0, 0.5, 4.0])
    before = stats.multivariate_normal(mean[:7], covariance[:7, :7]).logpdf(rows[:, 1])
    joint = [
        stats.multivariate_normal(mean, covariance).logpdf(np.append(rows[:, 1], one)) for one in y
    ]
    found = model.analytic(torch.from_numpy(rows)).log_prob(torch.from_numpy(y))
    assert np.allclose(found.numpy(), np.array(joint) - before, atol=1e-10)


ROW = {
    "normal": lambda row, t: normal(row[0], t[0], 2.0),
    "poisson": lambda row, t: row[0] * t[0].log() - t[0] - torch.lgamma(row[0] + 1),
    "linear": lambda row, t: normal(row[1], t[0] + t[1] * row[0], 1.0),
}
PRIOR = {
    "normal": priors.Gaussian(1 / 0.3, 0.0),
    "poisson": priors.Gamma(20.0, 4.0, link="identity"),
    "linear": priors.Gaussian(5.0, -1.0),
}


@pytest.mark.parametrize("name", FAR)
def test_the_published_formulas_are_the_additive_convention(name):
    """Closed-form maximum likelihood here, Newton and autograd there; the prior in its
    increment alone.
    """
    model = FAR[name]
    rows = model.draw(20, 5)
    y = torch.tensor([0.0, 2.0, 3.0, 9.0], dtype=F64)
    candidates = (
        torch.stack([torch.full_like(y, 1.5), y], 1) if name == "linear" else y.unsqueeze(1)
    )
    start = [2.0, 1.0] if name == "linear" else [2.5]
    other = ssla.ExplicitModel(ROW[name], rows, start, PRIOR[name], "additive")
    for refit in (True, False):
        ours, theirs = (
            published(model, rows, y, refit, F64),
            other.increments(candidates, refit=refit),
        )
        for part in ("likelihood", "prior", "curvature"):
            assert (getattr(ours, part) - getattr(theirs, part)).abs().max() < 1e-8, part


def test_float32_rounds_to_the_spacing_of_its_sums():
    model = Normal()
    rows = model.draw(1_000_000, 0)
    y = grid(model.analytic(rows), False)
    single, double = (published(model, rows, y, False, dtype) for dtype in (torch.float32, F64))
    lost = (single.likelihood - double.likelihood).abs().max()
    spacing = float(np.spacing(np.float32(1.77e6)))
    assert 0.4 * spacing < lost <= 0.5 * spacing * (1 + 1e-3)
    assert (single.curvature - double.curvature).abs().max() < 1e-6


def gaussian(mean, variance):
    return lambda y: normal(y, mean, variance)


@pytest.mark.parametrize(
    ("mean", "variance"), [(0.0, 1.0 + 1e-7), (0.3, 1.2), (-30.0, 0.5), (3.0, 1.0)]
)
def test_the_divergence_of_two_normals(mean, variance):
    """KL(N(0, 1) ‖ N(m, v)) = ½ (1/v + m²/v − 1 + log v), with a grid that follows the mass,
    wherever it is, whatever it is.
    """
    analytic = Analytic(gaussian(0.0, 1.0), 0.0, 1.0)
    y = grid(analytic, False)

    def heavy(y):
        return gaussian(mean, variance)(y) + 50.0

    found = compare(heavy, y, heavy(y), analytic, False)
    d = variance - 1
    expected = 0.5 * (
        mean**2 / variance + (d * d / 2 if abs(d) < 1e-5 else 1 / variance - 1 + math.log(variance))
    )
    assert found["kl"] == pytest.approx(expected, rel=1e-5)
    assert found["log_mass"] == pytest.approx(50.0, abs=1e-8)
    off = (heavy(y) - analytic.log_prob(y)).abs()
    assert (
        off[21:60].max() <= found["error"] <= off[20:61].max()
    )  # ±3.8 and ±4, where the normal density is e⁻⁸ of its peak


def test_a_divergence_by_scipy():
    p, q = stats.nbinom(60, 0.95), stats.poisson(3.3)
    k = np.arange(80)
    expected = stats.entropy(p.pmf(k), q.pmf(k))
    assert divergence(
        torch.from_numpy(p.logpmf(k)), torch.from_numpy(q.logpmf(k))
    ) == pytest.approx(expected, rel=1e-9)


def test_a_density_without_an_end_is_refused():
    y = torch.linspace(-8, 8, 81, dtype=F64)
    with pytest.raises(ValueError, match="cannot be normalised"):
        widened(torch.zeros_like, y, torch.zeros_like(y), False)


@pytest.mark.parametrize("name", FAR)
def test_under_conflict_ours_is_the_predictive_and_the_published_is_not(name):
    methods = run(FAR[name], 20, 0)["methods"]
    assert methods["ours SSLA"]["kl"] < (1e-8 if name == "poisson" else 1e-24)
    assert abs(methods["ours SSLA"]["log_mass"]) < (1e-4 if name == "poisson" else 1e-12)
    assert methods["float64 SSLA"]["kl"] > 1e-4
    assert methods["float64 ASSLA"]["kl"] > methods["ours ASSLA"]["kl"]
    assert methods["ours ASSLA"]["kl"] == pytest.approx(methods["plug-in"]["kl"], rel=1e-8)
