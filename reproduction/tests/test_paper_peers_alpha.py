"""The α energy in its limits: the evidence bound at α → 0, the evidence itself for one row, and
in between.
"""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from ssla_paper.peers.alpha import black_box_alpha, energy

SIGMA, Y = 0.7, torch.tensor([0.4, 1.1, -0.2], dtype=torch.float64)
CENTRE, SD = 0.3, 0.5


def draws(sd=SD, count=40_001):
    """Of q = N(0.3, sd²): its quantiles at even steps, so that means are nearly exact."""
    return CENTRE + sd * torch.special.ndtri(
        (torch.arange(count, dtype=torch.float64) + 0.5) / count
    )


def terms(w, y=Y, centre=CENTRE, sd=SD):
    """log p(y|w) (S, n) of y ~ N(w, σ²), and log p₀ − log q with p₀ = N(0, 1)."""

    def normal(at, mean, sd):
        return -0.5 * ((at - mean) / sd) ** 2 - math.log(sd) - 0.5 * math.log(2 * math.pi)

    return normal(y, w[:, None], SIGMA), normal(w, 0, 1) - normal(w, centre, sd)


def test_alpha_to_zero_is_the_evidence_bound():
    expected = stats.norm(0, SIGMA).logpdf(Y.numpy() - CENTRE).sum() - 3 * SD**2 / (2 * SIGMA**2)
    divergence = 0.5 * (SD**2 + CENTRE**2 - 1) - math.log(SD)
    assert float(energy(*terms(draws()), 0)) == pytest.approx(divergence - expected, abs=2e-4)
    assert float(energy(*terms(draws()), 1e-6)) == pytest.approx(
        float(energy(*terms(draws()), 0)), abs=1e-5
    )


def test_one_row_at_alpha_one_gives_the_evidence_for_every_q():
    evidence = stats.norm(0, math.hypot(1, SIGMA)).logpdf(float(Y[0]))
    assert float(energy(*terms(draws(0.9), Y[:1], sd=0.9), 1.0)) == pytest.approx(
        -evidence, abs=1e-5
    )
    precision = 1 + 1 / SIGMA**2
    centre, sd = float(Y[0]) / SIGMA**2 / precision, precision**-0.5
    w = torch.linspace(-2, 2, 5, dtype=torch.float64)  # q is the posterior: any draws, any α
    for alpha in (0, 0.3, 1.0, 2.0):
        assert float(energy(*terms(w, Y[:1], centre, sd), alpha)) == pytest.approx(
            -evidence, abs=1e-12
        )


def test_in_between_it_is_the_integral():
    alpha, n = 0.5, len(Y)

    def site(w, y):
        tilt = (stats.norm(0, 1).pdf(w) / stats.norm(CENTRE, SD).pdf(w)) ** (1 / n)
        return stats.norm(CENTRE, SD).pdf(w) * (stats.norm(w, SIGMA).pdf(y) * tilt) ** alpha

    expected = (
        -sum(math.log(integrate.quad(site, -6, 6, args=(y,), epsabs=1e-12)[0]) for y in Y.tolist())
        / alpha
    )
    assert float(energy(*terms(draws()), alpha)) == pytest.approx(expected, abs=2e-4)


def test_it_falls_as_alpha_grows():
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(9, 6, generator=generator), torch.randn(9, generator=generator)
    found = [float(energy(*parts, alpha)) for alpha in (0, 0.1, 0.5, 1.0, 3.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] + 0.1


def test_at_alpha_zero_it_agrees_with_numpyros_mean_field():
    pytest.importorskip("numpyro")
    from ssla_paper.peers.variational import mean_field

    generator = torch.Generator().manual_seed(2)
    x = torch.linspace(-1.5, 1.5, 80)[:, None]
    y = x[:, 0] + torch.exp(0.5 * x[:, 0]) * 0.5 * torch.randn(80, generator=generator)
    new = torch.tensor([[-1.5], [0.0], [1.5]])
    ours = black_box_alpha(x, y, new, alpha=0.0, hidden=(), steps=1500, draws=4000)
    theirs = mean_field(x, y, new, hidden=(), heteroscedastic=True, steps=2000, draws=4000)
    np.testing.assert_allclose(ours.mean.numpy(), theirs.mean.numpy(), atol=0.03)
    np.testing.assert_allclose(ours.stddev.numpy(), theirs.stddev.numpy(), rtol=0.05)
    assert float(ours.stddev[2]) > 1.5 * float(ours.stddev[0])  # the noise varies
