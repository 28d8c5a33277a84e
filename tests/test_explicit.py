"""Models written by hand: published numbers, conjugate predictives, conventions, and orders of
error.
"""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import optimize, stats

import ssla
from ssla import priors
from support.published import EXACT_OFF, OFF, SELF, VARIANCES

ROOT = Path(__file__).parents[1]
COUNTS = [2.0, 4.0, 3.0, 0.0, 5.0]
ASKED = [0.0, 3.0, 8.0]


def half(y, t):
    """One of two parameters is never seen."""
    return -((y - t[0]) ** 2)


def poisson(link):
    def log_prob(y, t):
        rate = t[0] if link == "identity" else t[0].exp()
        return y * rate.log() - rate - torch.lgamma(y + 1)

    return log_prob


def poisson_gamma(link, convention="exact", data=COUNTS):
    start = [3.0] if link == "identity" else [1.0]
    return ssla.ExplicitModel(
        poisson(link), data, start, priors.Gamma(6.0, 2.0, link=link), convention
    )


@pytest.mark.parametrize(
    ("link", "stated"),
    [("identity", [-2.670628, -1.568817, -4.691809]), ("log", [-2.670628, -1.568871, -4.691918])],
)
def test_poisson_gamma_has_the_stated_values(link, stated):
    found = poisson_gamma(link).increments(ASKED)
    assert (found.total - torch.tensor(stated, dtype=torch.float64)).abs().max() < 1e-6
    exact = stats.nbinom(20, 7 / 8).logpmf([0, 3, 8])
    assert np.abs(exact - [-2.670628, -1.569415, -4.693109]).max() < 1e-6
    assert np.abs(found.total.numpy() - exact).max() < 2e-3


@pytest.mark.parametrize("convention", ["exact", "paper", "additive"])
def test_increments_are_those_of_a_scalar_search(convention):
    """Poisson–gamma in λ, with modes by SciPy and derivatives by hand."""
    data = np.array(COUNTS)
    log_prior = stats.gamma(6.0, scale=0.5).logpdf
    flat = convention == "additive"

    def objective(lam, rows):
        return stats.poisson(lam).logpmf(rows).sum() + (0.0 if flat else log_prior(lam))

    def mode(rows):
        found = optimize.minimize_scalar(
            lambda t: -objective(t, rows),
            bounds=(0.05, 20),
            method="bounded",
            options={"xatol": 1e-12},
        )
        return float(found.x)

    def curvature(lam, rows):
        return rows.sum() / lam**2 + (5.0 / lam**2 if convention == "exact" else 0.0)

    found = poisson_gamma("identity", convention).increments(ASKED)
    for i, y in enumerate(ASKED):
        more = np.append(data, y)
        hat, tilde = mode(data), mode(more)
        likelihood = stats.poisson(tilde).logpmf(more).sum() - stats.poisson(hat).logpmf(data).sum()
        assert abs(float(found.likelihood[i]) - likelihood) < 1e-6
        assert abs(float(found.prior[i]) - (log_prior(tilde) - log_prior(hat))) < 1e-6
        assert (
            abs(
                float(found.curvature[i])
                + 0.5 * math.log(curvature(tilde, more) / curvature(hat, data))
            )
            < 1e-6
        )
    assert found.convention == convention


def modularity(convention, offset):
    """The paper's prior-modularity tables with a refit of the weight itself."""
    x = torch.linspace(-1, 1, 50, dtype=torch.float64)
    x = x * math.sqrt(1.5**2 / 0.05315 / float((x**2).sum()))
    y = 0.8 * x + 0.5 * torch.randn(
        50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    values = []
    for variance in VARIANCES:
        model = ssla.ExplicitModel(
            lambda row, w: -0.5 * ((row[1] - w[0] * row[0]) / 0.5) ** 2,
            torch.stack([x, y], 1),
            [0.5],
            priors.Gaussian(1 / variance),
            convention,
        )
        at = torch.tensor([[1.5, 1.5 * float(model.mode) + offset]], dtype=torch.float64)
        values.append(
            (float(model.increments(at).total), float(model.increments(at, refit=False).total))
        )
    return np.array(values).T


@pytest.mark.parametrize("convention", ["exact", "paper", "additive"])
def test_modes_are_those_of_the_augmented_data(convention):
    data = torch.tensor([3.1, 4.7, 5.2, 2.9], dtype=torch.float64)
    model = ssla.ExplicitModel(
        lambda y, t: -0.25 * (y - t[0]) ** 2,
        data,
        [4.0],
        priors.Gaussian(3.0, mean=1.0),
        convention,
    )
    y = torch.tensor([-2.0, 0.0, 7.5], dtype=torch.float64)
    pull = 0.0 if convention == "additive" else 3.0
    expected = (pull * 1.0 + (data.sum() + y) / 2) / (pull + 5 / 2)
    assert model.modes(y).shape == (3, 1)
    assert (model.modes(y)[:, 0] - expected).abs().max() < 1e-10
    with pytest.raises(ValueError, match="Candidates must be rows like the data's"):
        model.modes(y[:, None])


def test_the_papers_ten_numbers_by_a_real_refit():
    for offset, stated, without in [(0.0, SELF, -0.0259), (1.0, OFF, -2.0259)]:
        ssla_values, assla_values = modularity("paper", offset)
        assert np.abs(ssla_values - stated).max() < 1e-4
        assert np.abs(assla_values - without).max() < 1e-4
    assert np.abs(modularity("exact", 1.0)[0][:4] - EXACT_OFF).max() < 1e-4


def test_the_error_falls_as_the_square_of_n():
    """Tierney–Kadane: relative error O(n⁻²) at a fixed quantile."""
    errors, sizes = [], [10, 20, 40, 80, 160]
    for n in sizes:
        data = [2.0, 4.0] * (n // 2)
        total = poisson_gamma("identity", data=data).increments([7.0]).total
        exact = stats.nbinom(6 + sum(data), (2 + n) / (3 + n)).logpmf(7)
        errors.append(abs(float(total) - exact))
    slope = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
    assert slope < -1.6


def test_the_example_runs_and_shows_what_it_says(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location(
        "conjugate_priors", ROOT / "examples" / "conjugate_priors.py"
    )
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    errors = example.run(tmp_path / "picture.png")
    assert errors["normal–normal"] < 1e-12
    assert errors["linear, known noise"] < 1e-12
    assert max(errors.values()) < 0.01
    assert (tmp_path / "picture.png").stat().st_size > 50_000
    printed = capsys.readouterr().out
    assert "no conflict" in printed
    assert "lies in [" in printed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: poisson_gamma("identity", "pper"), "Unknown convention 'pper'. Did you mean "
                                                    "'paper'"),
        (lambda: ssla.ExplicitModel(poisson("identity"), [], [1.0], priors.Gamma(1.0, 1.0)), "at least one row"),
        (lambda: ssla.ExplicitModel(poisson("identity"), COUNTS, [math.nan], priors.Flat()), "start must be finite"),
        (lambda: ssla.ExplicitModel(poisson("identity"), COUNTS, torch.ones(99), priors.Flat()), "1 to 50 parameters"),
        (lambda: ssla.ExplicitModel(poisson("identity"), COUNTS, [-1.0], priors.Gaussian()), "not finite at start"),
        (lambda: ssla.ExplicitModel(lambda y, t: y * t, COUNTS, [1.0], priors.Gaussian()), "must return a scalar tensor"),
        (lambda: poisson_gamma("log").increments([[1.0, 2.0]]), "Candidates must be rows like the "
                                                                "data's"),
        (
            lambda: ssla.ExplicitModel(half, [1.0], [0.0, 1.0], priors.Gaussian(), "paper").increments([1.0]),
            "not positive definite",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
