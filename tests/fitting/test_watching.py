"""Warnings about scales: of the targets, of the prior, of the rounding."""

import warnings

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.fitting.watching import Spread
from support.networks import around_a_million, data, mlp, trained

GAUSSIAN = L.Gaussian(noise=0.3)
X, Y = data(60)


WEAK = {"prior": priors.Gaussian(1e-6)}


@pytest.mark.filterwarnings("ignore:polish moved", "ignore:The network is not at the mode")
@pytest.mark.parametrize(
    ("noise", "options"),
    [
        ("estimate", {"weights": "all"}),
        ("estimate", {}),
        (5.0, {"weights": "all"}),
        (5.0, {"mode": "tilt"}),
    ],
)
def test_targets_on_another_scale_are_warned_about(noise, options):
    net = trained()
    with pytest.warns(
        UserWarning, match="times as large as the spread of the targets.*another scale or unit"
    ):
        post = ssla.fit(
            net,
            (X, 77 * Y + 150),
            likelihood=L.Gaussian(noise=noise),
            prior=priors.Gaussian(),
            **options,
        )
    assert any("spread of the targets" in note for note in post.report.notes)


@pytest.mark.filterwarnings("ignore:The network is")
def test_a_poor_network_is_not_said_to_have_another_scale():
    """Untrained, constant and unlucky ones; and a last layer that is polished to the scale by a
    weak prior.
    """
    for seed in range(20):
        x, y = data(8 + 4 * seed, seed=seed)
        for net in (mlp(seed=seed), mlp(seed=seed, width=200)):
            ssla.fit(
                net,
                (x, y),
                likelihood=GAUSSIAN,
                prior=priors.Gaussian(),
                weights="all",
                structure="diag",
            )
    found = ssla.fit(
        mlp(),
        (X, 77 * Y + 150),
        likelihood=L.Gaussian(noise="estimate"),
        prior=priors.Gaussian(1e-8),
    )
    assert float(found.likelihood.noise) < 60


def test_the_spread_of_shards_is_that_of_all_rows():
    y, f = (
        1e6 + torch.randn(50, 2, dtype=torch.float64),
        1e6 + torch.randn(50, 2, dtype=torch.float64),
    )
    w = torch.rand(50, dtype=torch.float64)
    parts = [
        Spread.from_chunk(y[s], f[s], w[s], 1e-16, f[s].abs())
        for s in (slice(0, 7), slice(7, 30), slice(30, 50))
    ]
    merged, mean = parts[0].merge(parts[1].merge(parts[2])), (w @ y) / w.sum()
    assert torch.allclose(merged.mean, mean, rtol=1e-14)
    assert torch.allclose(merged.squares, w @ (y - mean) ** 2, rtol=1e-8)
    assert torch.allclose(merged.missed, w @ (y - f) ** 2, rtol=1e-10)


@pytest.mark.filterwarnings("ignore:The network is")
def test_a_noise_finer_than_the_rounding_is_warned_about():
    net, double, x, y = around_a_million()
    fine = {"likelihood": L.Gaussian(noise=0.01), **WEAK}
    with pytest.warns(
        UserWarning,
        match=r"noise \(0.01\) is finer than the rounding of the network's outputs, "
        r"in float32 \(0.119\)",
    ):
        ssla.fit(net, (x, y), weights="all", **fine)
    for model, inputs in ((net, x), (double, x.double())):
        with pytest.warns(UserWarning, match="rounding of the targets.*Give y in float64"):
            ssla.fit(model, (inputs, y.float()), **fine)
    with pytest.warns(
        UserWarning, match="rounding of the targets"
    ):  # the estimate has the rounding in it
        ssla.fit(net, (x, y.float()), likelihood=L.Gaussian(noise="estimate"), **WEAK)
    ssla.fit(double, (x.double(), y), weights="all", **fine)  # nothing to say
    ssla.fit(net, (x, y.float()), weights="all", likelihood=L.Gaussian(noise=1.0), **WEAK)


def test_a_prior_too_strong_for_the_targets_is_warned_about():
    """A network that is right about targets around 50 must not be lost silently to a standard
    normal prior.
    """
    x = torch.linspace(-2, 2, 80)[:, None]
    y = 50 + 10 * x[:, 0] + torch.randn(80, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(10.0)
        model.bias.fill_(50.0)
    for likelihood in (L.Gaussian(noise="estimate"), L.Gaussian(noise=10.0)):
        with pytest.warns(
            UserWarning,
            match=r"polish moved the network away.*residuals grew by a factor of.*mode='tilt'",
        ):
            ssla.fit(model, (x, y), likelihood=likelihood, prior=priors.Gaussian(), mode="polish")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # far from the mode of this prior
            kept = ssla.fit(model, (x, y), likelihood=likelihood, prior=priors.Gaussian())
        assert kept.report.mode == "tilt"
    weak = ssla.fit(
        model,
        (x, y),
        likelihood=L.Gaussian(noise="estimate"),
        prior=priors.Gaussian(precision=1e-4),
        mode="polish",
    )
    assert abs(weak.likelihood.noise - 1) < 0.3


@pytest.mark.parametrize(("weight", "warned"), [(0.1, True), (0.49, True), (0.5, False)])
def test_weights_that_cannot_be_frequencies_are_warned_about(weight, warned):
    w = torch.full((60,), weight, dtype=torch.float64)
    w[:20] = 0.0  # rows of no weight do not count
    fit = lambda: ssla.fit(mlp(), (X, Y, w), likelihood=GAUSSIAN, prior=priors.Gaussian())
    if not warned:
        assert not any("Row weights" in note for note in fit().report.notes)
        return
    words = f"Row weights sum to {40 * weight:.4g}, less than half of the 40 rows"
    with pytest.warns(UserWarning, match=words):
        post = fit()
    assert any(words in note for note in post.report.notes)
