"""Opening a module: links that a likelihood would apply again, and frozen parameters."""

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from support.networks import data, mlp

GAUSSIAN = L.Gaussian(noise=0.3)
X, Y = data(60)


class Averaged(nn.Module):
    """Probabilities by another way than a softmax at the end."""

    def __init__(self):
        super().__init__()
        self.one, self.two = mlp(outputs=3), mlp(outputs=3, seed=1)

    def forward(self, x):
        return (self.one(x).softmax(-1) + self.two(x).softmax(-1)) / 2


@pytest.mark.parametrize("weights", ["all", ["0.2.weight", "0.2.bias"]])
@pytest.mark.parametrize(
    ("outputs", "end", "likelihood"),
    [
        (3, nn.Softmax(-1), L.Categorical()),
        (3, nn.Softmax(-1), L.Tempered(L.Categorical(), 0.5)),
        (1, nn.Sigmoid(), L.Bernoulli()),
        (1, nn.Softplus(), L.Poisson()),
        (1, nn.Softplus(), L.NegativeBinomial(2.0)),
    ],
)
def test_outputs_that_the_likelihood_would_link_again_are_refused(
    weights, outputs, end, likelihood
):
    net = nn.Sequential(mlp(outputs=outputs), end).eval()
    target = (Y > 0).long() if outputs == 3 else (Y > 0).double()
    name = type(end).__name__.lower()
    with pytest.raises(ValueError, match=f"already passed through a {name},.*raw outputs"):
        ssla.fit(
            net,
            (X, target),
            likelihood=likelihood,
            prior=priors.Gaussian(),
            gaussian="laplace",
            weights=weights,
        )


def test_averaged_probabilities_are_refused_and_legitimate_ends_pass():
    classes = (Y > 0).long()
    with pytest.raises(ValueError, match="already passed through a softmax"):
        ssla.fit(
            Averaged().eval(),
            (X, classes),
            likelihood=L.Categorical(),
            prior=priors.Gaussian(),
            gaussian="laplace",
            weights="all",
        )
    for end, likelihood, target, outputs in (
        (
            nn.LogSoftmax(-1),
            L.Categorical(),
            classes,
            3,
        ),  # the softmax of log probabilities are the probabilities
        (nn.Softplus(), L.Poisson(link="identity"), classes.double(), 1),
        (nn.Sigmoid(), L.Gaussian(noise=0.5), classes.double(), 1),
        (nn.Tanh(), L.Bernoulli(), classes.double(), 1),
    ):
        net = nn.Sequential(mlp(outputs=outputs), end).eval()
        assert (
            ssla.fit(
                net,
                (X, target),
                likelihood=likelihood,
                prior=priors.Gaussian(),
                gaussian="laplace",
                weights="all",
            ).report.n
            == 60
        )


def test_frozen_parameters_are_left_out_of_all_and_noted():
    net = nn.Sequential(mlp(outputs=5), nn.Tanh(), mlp(inputs=5)).eval()
    net[0].requires_grad_(False)
    post = ssla.fit(net, (X, Y), likelihood=GAUSSIAN, prior=priors.Gaussian(), weights="all")
    own = ["2.0.weight", "2.0.bias", "2.2.weight", "2.2.bias"]
    assert list(post.report.names) == own
    assert any(
        "59 frozen parameters (requires_grad=False: 0.0.weight" in note
        for note in post.report.notes
    )
    assert ssla.estimate_cost(net, 60, weights="all").parameters == post.report.parameters
    named = ssla.fit(net, (X, Y), likelihood=GAUSSIAN, prior=priors.Gaussian(), weights=own)
    assert torch.equal(named.marginal(X).covariance, post.marginal(X).covariance)
    assert (
        "0.0.weight"
        in ssla.fit(
            net, (X, Y), likelihood=GAUSSIAN, prior=priors.Gaussian(), weights=["0.0.weight"]
        ).report.names
    )
    assert not net[0][0].weight.requires_grad


def test_a_network_frozen_for_inference_is_taken_whole():
    free, fixed = mlp(), mlp().requires_grad_(False)
    one, two = (
        ssla.fit(net, (X, Y), likelihood=GAUSSIAN, prior=priors.Gaussian(), weights="all")
        for net in (free, fixed)
    )
    assert one.report.names == two.report.names
    assert torch.equal(one.marginal(X).covariance, two.marginal(X).covariance)
    assert any("every parameter is frozen" in note for note in two.report.notes)
    assert not any("frozen" in note for note in one.report.notes)
