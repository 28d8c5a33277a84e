"""The paper's settings are those that its text states, and run on a network."""

import numpy as np
import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from support.refits import inputs, noisy


def test_the_settings_are_those_of_the_text():
    settings = ssla.paper_settings(half_width=1.96)
    prior = settings.fit["prior"]
    assert (type(prior), prior.precision, prior.mean) == (priors.Gaussian, 1.0, 0.0)
    assert {name: value for name, value in settings.fit.items() if name != "prior"} == {
        "weights": "last_layer",
        "structure": "kfac",
        "gaussian": "laplace",
        "mode": "tilt",
    }
    assert settings.tune["objective"] == "evidence"
    assert settings.tune["over"] == ("prior",)
    ssla_refit = settings.refits["SSLA"]
    assert (ssla_refit.at, ssla_refit.logdet) == ("prediction", "structure")
    assert (ssla_refit.candidates, ssla_refit.half_width) == (20, 1.96)
    assert settings.refits["ASSLA"] == ssla.NoRefit(curvature="observed", data_curvature="fisher")
    assert settings.refits["LA"] == ssla.OutputRefit()


def trained_network():
    """Mean and log variance by Adam, near its mode."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 10), nn.ReLU(), nn.Linear(10, 2)).double()
    x = inputs(150, 5)
    y = noisy(x)
    likelihood = L.HeteroscedasticGaussian()
    optimiser = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(300):
        optimiser.zero_grad()
        squares = sum((p**2).sum() for p in net.parameters())
        (0.5 * squares - likelihood.log_prob(y, net(x)).sum()).backward()
        optimiser.step()
    return net.eval(), x, y, likelihood


@pytest.mark.parametrize("structure", ["kfac", "diag", "dense"])
def test_three_answers_of_one_posterior(structure):
    net, x, y, likelihood = trained_network()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    settings = ssla.paper_settings(half_width=3.0, structure=structure)
    post = ssla.fit(net, (x, y), likelihood=likelihood, **settings.fit).tune(**settings.tune)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert post.tuning_history is not None
    assert torch.equal(
        post.theta, ssla.fit(net, (x, y), likelihood=likelihood, **settings.fit).theta
    )
    new = inputs(3, 6)
    answers = {name: post.predict(new, refit=refit) for name, refit in settings.refits.items()}
    # SSLA by hand: 20 candidates around the mean, with one refit on it, by the trapezoidal rule
    f = net(new).detach()
    grid = f[:, :1] + torch.linspace(-3.0, 3.0, 20, dtype=torch.float64)
    refit = ssla.WeightRefit(at="prediction", logdet="structure")
    logs = ssla.ssla(post, new, grid, refit).total
    mass = torch.from_numpy(np.trapezoid(logs.exp().numpy(), grid.numpy()))
    found = answers["SSLA"].log_prob(grid)
    assert (found - (logs - mass.log()[:, None])).abs().max() < 0.01
    assert torch.equal(answers["SSLA"].diagnostics.refits, torch.ones(3, dtype=torch.long))
    # the paper's finding for a log variance: SSLA is narrower than classical Laplace
    assert (answers["SSLA"].stddev < answers["LA"].stddev).all()
    assert torch.equal(
        answers["ASSLA"].log_prob(grid), post.predict(new, refit="none").log_prob(grid)
    )


def test_a_refit_for_each_y():
    settings = ssla.paper_settings(half_width=3.0, at="candidate", candidates=12)
    assert settings.refits["SSLA"].at == "candidate"
    assert settings.refits["SSLA"].candidates == 12
