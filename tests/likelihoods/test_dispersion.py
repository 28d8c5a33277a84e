"""Temperatures and scales of likelihoods: a fit with one is the fit of a network whose outputs
have it inside.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import ssla
from ssla import likelihoods
from ssla.likelihoods import Likelihood
from ssla.likelihoods.likelihood import multiply_dispersion
from ssla.priors import Gaussian

T = 2.5
ROWS, NEW = 60, 5


def _problem(outputs: int) -> tuple[nn.Sequential, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double().eval()
    with torch.no_grad():
        model[2].weight.mul_(4)
    x = torch.randn(ROWS, 2, dtype=torch.float64)
    y = torch.randint(0, max(outputs, 2), (ROWS,))
    return model, x, y, torch.randn(NEW, 2, dtype=torch.float64)


def _cooled(model: nn.Sequential) -> nn.Sequential:
    """The network with its outputs divided by T."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[2].weight.div_(T)
        other[2].bias.div_(T)
    return other


@pytest.mark.parametrize("gaussian", ["laplace", "variational"])
@pytest.mark.parametrize("mode", ["tilt", "polish"])
@pytest.mark.parametrize("structure", ["dense", "kfac"])
@pytest.mark.parametrize(
    ("law", "outputs"), [(likelihoods.Bernoulli, 1), (likelihoods.Categorical, 3)]
)
def test_temperature_is_a_division_of_the_outputs(
    law: type, outputs: int, structure: str, mode: str, gaussian: str
) -> None:
    model, x, y, new = _problem(outputs)
    how = {"structure": structure, "mode": mode, "gaussian": gaussian}
    hot = ssla.fit(model, (x, y), likelihood=law(temperature=T), prior=Gaussian(1.5), **how)
    cooled = ssla.fit(_cooled(model), (x, y), likelihood=law(), prior=Gaussian(1.5 * T**2), **how)
    for refit in ("output", "newton", "none", "weights"):
        torch.testing.assert_close(
            hot.predict(new, refit).probs, cooled.predict(new, refit).probs, rtol=2e-5, atol=1e-7
        )
    assert hot.log_evidence() == pytest.approx(cooled.log_evidence(), rel=1e-6)
    torch.testing.assert_close(
        hot.predict(new).epistemic, cooled.predict(new).epistemic, rtol=1e-5, atol=1e-8
    )


@pytest.mark.parametrize("structure", ["dense", "kfac"])
def test_scale_is_a_shift_of_the_log_variance(structure: str) -> None:
    model, x, _, new = _problem(2)
    y = x.sin().sum(1) + 0.3 * torch.randn(ROWS, dtype=torch.float64)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[2].bias[1] += 2 * math.log(T)
    fits = [
        ssla.fit(m, (x, y), likelihood=law, prior=Gaussian(1.5), structure=structure, mode="tilt")
        for m, law in (
            (model, likelihoods.HeteroscedasticGaussian(scale=T)),
            (other, likelihoods.HeteroscedasticGaussian()),
        )
    ]
    first, second = (fit.predict(new) for fit in fits)
    torch.testing.assert_close(first.mean, second.mean)
    torch.testing.assert_close(first.interval(0.9), second.interval(0.9), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("likelihood", "variance"),
    [
        (likelihoods.Gaussian(noise=0.7), 9.0),
        (likelihoods.Gaussian(covariance=torch.eye(2).double()), 9.0),
        (likelihoods.StudentT(df=5.0, scale=0.7), 9.0),
        (likelihoods.HeteroscedasticGaussian(), 9.0),
        (likelihoods.HeteroscedasticGaussian(parameters="natural"), 9.0),
        (likelihoods.Tempered(likelihoods.Gaussian(noise=0.7), 0.5), 9.0),
    ],
    ids=repr,
)
def test_dispersion_is_a_factor_on_the_standard_deviation(
    likelihood: Likelihood, variance: float
) -> None:
    f = torch.tensor([[0.3, -0.4]], dtype=torch.float64)
    f = f[:, :1] if "StudentT" in repr(likelihood) else f
    wide = multiply_dispersion(likelihood, 3.0)
    torch.testing.assert_close(wide.variance(f), variance * likelihood.variance(f))
    torch.testing.assert_close(wide.mean(f), likelihood.mean(f))


def test_counts_spread_more_at_the_same_mean() -> None:
    f = torch.zeros(1, 1, dtype=torch.float64)  # a mean of 1
    for law in (likelihoods.Poisson(), likelihoods.NegativeBinomial(0.2)):
        wide = multiply_dispersion(law, 3.0)
        torch.testing.assert_close(wide.mean(f), law.mean(f))
        assert float(wide.variance(f)) > float(law.variance(f))
    assert float(multiply_dispersion(likelihoods.Poisson(), 3.0).variance(f)) == pytest.approx(3.0)
    assert multiply_dispersion(likelihoods.Poisson(), 0.5) == likelihoods.Poisson()


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_impossible_spreads_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        likelihoods.Categorical(temperature=value)
    with pytest.raises(ValueError, match="scale"):
        likelihoods.HeteroscedasticGaussian(scale=value)


@pytest.mark.parametrize(
    ("link", "factor", "words"),
    [
        ("log", 3.0, "their overdispersion is 2"),
        ("log", 0.9, "as Poisson's do, or less"),
        ("identity", 3.0, "3 times as much as Poisson's"),
        ("identity", 0.9, "as Poisson's do, or less"),
    ],
)
def test_the_dispersion_of_counts_in_words_is_true(link: str, factor: float, words: str) -> None:
    assert words in likelihoods.Poisson(link=link).dispersion_in_words(factor)
