"""Averages of a likelihood over a Gaussian of its outputs, against quadrature and Monte Carlo
written here.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from ssla.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    NegativeBinomial,
    Poisson,
    StudentT,
    Tempered,
)
from ssla.likelihoods.averages import averages, pool_fisher
from ssla.maths.roots import FullRoot, full_root

ONE_OUTPUT = [
    (Bernoulli(), 1.0),
    (Poisson(), 3.0),
    (NegativeBinomial(dispersion=0.5), 2.0),
    (StudentT(df=4.0, scale=0.7), 1.5),
    (Tempered(Bernoulli(), 0.4), 0.0),
]


@pytest.mark.parametrize(("likelihood", "y"), ONE_OUTPUT, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(("mean", "sd"), [(0.3, 0.2), (-1.0, 1.5)])
def test_one_output_against_scipy(likelihood: Likelihood, y: float, mean: float, sd: float) -> None:
    f, root = (
        torch.tensor([[mean]], dtype=torch.float64),
        FullRoot(torch.tensor([[[sd]]], dtype=torch.float64)),
    )
    found = averages(likelihood, torch.tensor([y], dtype=torch.float64), f, root)

    def expected(part: str) -> float:
        def weighted(value: float) -> float:
            at = torch.tensor([[value]], dtype=torch.float64)
            derivatives = likelihood.derivatives(torch.tensor([y], dtype=torch.float64), at)
            return float(getattr(derivatives, part)) * stats.norm.pdf(value, mean, sd)

        return float(
            integrate.quad(weighted, mean - 9 * sd, mean + 9 * sd, epsabs=1e-11, limit=200)[0]
        )

    # 32 nodes resolve its peak to three digits
    narrow = isinstance(likelihood, StudentT) and sd > likelihood.scale
    within = 1e-9 if isinstance(likelihood, Poisson) else 2e-5  # a closed form, or nodes
    for part in ("log_prob", "score", "precision"):
        assert float(getattr(found, part)) == pytest.approx(
            expected(part), rel=5e-3 if narrow else within, abs=within
        )


def test_two_outputs_against_scipy() -> None:
    likelihood, y = HeteroscedasticGaussian(), 0.8
    f, K = (
        torch.tensor([[0.2, -0.5]], dtype=torch.float64),
        torch.tensor([[[0.3, 0.1], [0.1, 0.4]]], dtype=torch.float64),
    )
    found = averages(likelihood, torch.tensor([y], dtype=torch.float64), f, full_root(K))
    law = stats.multivariate_normal(f[0].numpy(), K[0].numpy())
    x, w = np.polynomial.legendre.leggauss(120)
    a, b = f[0, 0].item() + 8 * 0.55 * x, f[0, 1].item() + 8 * 0.64 * x
    grid = torch.cartesian_prod(torch.from_numpy(a), torch.from_numpy(b))
    weight = torch.from_numpy(law.pdf(grid.numpy()) * np.outer(w * 8 * 0.55, w * 8 * 0.64).ravel())
    at = likelihood.derivatives(torch.full((len(grid),), y, dtype=torch.float64), grid)
    assert float(weight.sum()) == pytest.approx(1, abs=1e-9)
    torch.testing.assert_close(
        found.log_prob[0], (weight * at.log_prob).sum(), rtol=1e-8, atol=1e-8
    )
    torch.testing.assert_close(
        found.score[0], (weight[:, None] * at.score).sum(0), rtol=1e-8, atol=1e-8
    )
    torch.testing.assert_close(
        found.precision[0], (weight[:, None, None] * at.precision).sum(0), rtol=1e-8, atol=1e-8
    )


@pytest.mark.parametrize("classes", [3, 10])
def test_classes_against_monte_carlo(classes: int) -> None:
    generator = torch.Generator().manual_seed(classes)
    f = torch.randn(4, classes, dtype=torch.float64, generator=generator)
    A = torch.randn(4, classes, classes, dtype=torch.float64, generator=generator)
    root, y = FullRoot(A * (0.6 / classes**0.5)), torch.arange(4) % classes
    found = averages(Categorical(), y, f, root)
    draws = torch.randn(200_000, classes, dtype=torch.float64, generator=generator)
    for i in range(4):
        points = f[i] + draws @ root.values[i].mT
        p = torch.softmax(points, 1)
        assert float(found.log_prob[i]) == pytest.approx(
            float(torch.log(p[:, y[i]]).mean()), abs=6e-3
        )
        hit = torch.nn.functional.one_hot(y[i], classes)
        torch.testing.assert_close(found.score[i], hit - p.mean(0), rtol=0, atol=4e-3)
        torch.testing.assert_close(
            found.precision[i], torch.diag(p.mean(0)) - p.mT @ p / len(p), rtol=0, atol=4e-3
        )


@pytest.mark.parametrize(
    "likelihood",
    [
        Bernoulli(),
        Poisson(),
        Categorical(),
        HeteroscedasticGaussian(),
        Tempered(Categorical(), 0.5),
        Tempered(HeteroscedasticGaussian(), 0.5),
    ],
    ids=repr,
)
def test_without_uncertainty_they_are_the_values(likelihood: Likelihood) -> None:
    law = likelihood.base if isinstance(likelihood, Tempered) else likelihood
    outputs = {"Bernoulli": 1, "Poisson": 1, "HeteroscedasticGaussian": 2}.get(
        type(law).__name__, 4
    )
    f = torch.randn(6, outputs, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0.0, 1, 1, 0, 1, 0], dtype=torch.float64)
    found = averages(
        likelihood, y, f, FullRoot(torch.zeros(6, outputs, outputs, dtype=torch.float64))
    )
    for mine, other in zip(found, likelihood.derivatives(y, f), strict=True):
        torch.testing.assert_close(mine, other)


def test_the_fisher_in_place_of_an_indefinite_precision() -> None:
    f = torch.tensor([[0.0, 0.0]], dtype=torch.float64)
    root, y = (
        FullRoot(0.3 * torch.eye(2, dtype=torch.float64)[None]),
        torch.tensor([3.0], dtype=torch.float64),
    )
    law = HeteroscedasticGaussian()
    assert float(torch.linalg.eigvalsh(averages(law, y, f, root).precision).min()) < 0
    fisher = averages(law, y, f, root, fisher=True).precision[0]
    torch.testing.assert_close(
        fisher, torch.diag(torch.tensor([np.exp(0.045), 0.5], dtype=torch.float64))
    )


def test_rows_in_pieces_have_the_same_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    f = torch.randn(50, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    root, y = (
        FullRoot(0.5 * torch.eye(5, dtype=torch.float64).expand(50, 5, 5)),
        torch.arange(50) % 5,
    )
    whole = averages(Categorical(), y, f, root)
    monkeypatch.setattr("ssla.likelihoods.averages.NUMBERS_AT_ONCE", 3000)
    for mine, other in zip(averages(Categorical(), y, f, root), whole, strict=True):
        torch.testing.assert_close(mine, other)


def test_which_likelihoods_are_concave() -> None:
    assert Categorical().concave
    assert Tempered(Poisson(), 0.5).concave
    assert not StudentT(df=4.0, scale=1.0).concave
    assert not HeteroscedasticGaussian().concave


@pytest.mark.parametrize(
    "likelihood", [Categorical(), Tempered(Categorical(), 0.5), Gaussian(noise=0.7)], ids=repr
)
def test_pooled_rows_have_the_sum_of_the_precisions(
    likelihood: Likelihood, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(6, 5, dtype=torch.float64, generator=generator)
    half = torch.randn(6, 5, 5, dtype=torch.float64, generator=generator)
    y = f if isinstance(likelihood, Gaussian) else torch.arange(6) % 5
    pool = torch.tensor([1.0, 2.0, 0.0, 0.5, 1.0, 3.0], dtype=torch.float64)
    root = full_root(half @ half.mT)
    each = averages(likelihood, y, f, root)
    for numbers in (1 << 22, 1):
        monkeypatch.setattr("ssla.likelihoods.averages.NUMBERS_AT_ONCE", numbers)
        found = averages(likelihood, y, f, root, pool=pool)
        expected = (pool[:, None, None] * each.precision).sum(0, keepdim=True)
        torch.testing.assert_close(found, each._replace(precision=expected), rtol=1e-12, atol=1e-14)
        fisher = (pool[:, None, None] * likelihood.fisher(f)).sum(0, keepdim=True)
        torch.testing.assert_close(pool_fisher(likelihood, f, pool), fisher, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("likelihood", "f"),
    [(HeteroscedasticGaussian(), [[0.0, -285.0]]), (Poisson(), [[285.0]])],
    ids=["variance", "rate"],
)
def test_beyond_the_range_of_exp_the_averages_stay_finite(
    likelihood: Likelihood, f: list[list[float]]
) -> None:
    at = torch.tensor(f, dtype=torch.float64)
    root = FullRoot(0.1 * torch.eye(at.shape[1], dtype=torch.float64)[None])
    for part in averages(likelihood, torch.zeros(1, dtype=torch.float64), at, root):
        assert torch.isfinite(part).all()
