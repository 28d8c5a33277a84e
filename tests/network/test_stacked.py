"""Many weight vectors by batched products, against the network itself for each."""

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla.network import open_network
from ssla.network.stacked import ELEMENTWISE, open_chain

CHAINS = {
    "tanh": lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)),
    "nested, no bias": lambda: nn.Sequential(
        nn.Sequential(nn.Linear(3, 5, bias=False), nn.SiLU()), nn.Dropout(), nn.Linear(5, 2)
    ),
}


def opened(net, weights="all"):
    net = net.double().eval()
    x = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.stack([x[:, 0], x[:, 1]], 1)[:, 0]
    law = L.HeteroscedasticGaussian()
    with torch.no_grad():
        assert net(x).shape == (20, 2)
    post = ssla.fit(
        net,
        (x, y),
        likelihood=law,
        prior=ssla.priors.Gaussian(),
        weights=weights,
        gaussian="laplace",
    )
    return post, x


@pytest.mark.filterwarnings("ignore:The network is")
@pytest.mark.parametrize("weights", ["all", ["0.weight"]])
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_gives_the_outputs_and_gradients_of_the_network(name, weights):
    net = CHAINS[name]()
    if weights != "all" and name != "tanh":
        weights = ["0.0.weight"]
    post, x = opened(net, weights)
    chain = open_chain(post.network, x, post.theta)
    assert chain is not None
    thetas = post.theta + 0.3 * torch.randn(
        4, len(post.theta), dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    f, gradient = chain.compute_outputs_and_gradient(thetas, x, torch.cos)
    for theta, found, slope in zip(thetas, f, gradient, strict=True):
        free = theta.clone().requires_grad_(True)
        expected = post.network.compute_outputs(post.network.layout.unpack(free), x)
        (own,) = torch.autograd.grad(expected, free, expected.detach().cos())
        assert torch.allclose(found, expected.detach(), atol=1e-12)
        assert torch.allclose(slope, own, atol=1e-12)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.two(x + self.one(x).tanh())


@pytest.mark.filterwarnings("ignore:The network is")
def test_other_networks_are_no_chain():
    post, x = opened(Residual())
    assert open_chain(post.network, x, post.theta) is None


def hooked():
    net = CHAINS["tanh"]()
    net[1].register_forward_hook(lambda module, given, result: 2 * result)
    return net


def open_alone(net, weights="all"):
    x = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return open_network(net.double().eval(), weights, x), x


@pytest.mark.parametrize(
    ("make", "weights"),
    [
        (hooked, "all"),
        (lambda: nn.Sequential(nn.Linear(3, 5), nn.Softmax(-1), nn.Linear(5, 2)), "all"),
        (lambda: nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2)), "all"),
        (CHAINS["tanh"], "last_layer"),  # its θ interleaves weight and bias
    ],
)
def test_what_batched_products_cannot_repeat_is_no_chain(make, weights):
    network, x = open_alone(make(), weights)
    assert open_chain(network, x, network.theta) is None


def test_inputs_that_are_no_matrix_have_no_chain():
    network, x = open_alone(CHAINS["tanh"]())
    assert open_chain(network, x, network.theta) is not None
    assert open_chain(network, (x,), network.theta) is None
    assert open_chain(network, x[:, None], network.theta) is None


@pytest.mark.parametrize("activation", ELEMENTWISE)
def test_every_elementwise_function_is_run_for_many_weights(activation):
    network, x = open_alone(nn.Sequential(nn.Linear(3, 5), activation(), nn.Linear(5, 2)))
    chain = open_chain(network, x, network.theta)
    thetas = network.theta + torch.tensor([[0.0], [0.2], [-0.3]], dtype=torch.float64)
    found = chain.compute_outputs(chain.split_parameters(thetas), x)
    expected = torch.stack([network.evaluate(x, theta) for theta in thetas])
    assert torch.allclose(found, expected, atol=1e-13)


def test_each_weight_vector_may_have_rows_of_its_own():
    network, x = open_alone(CHAINS["tanh"]())
    chain = open_chain(network, x, network.theta)
    thetas = network.theta + torch.tensor([[0.1], [-0.2]], dtype=torch.float64)
    rows = torch.stack([x[:4], x[4:8]])
    score = torch.linspace(-1, 1, 2 * 4 * 2, dtype=torch.float64).reshape(2, 4, 2)
    found = chain.compute_gradient(thetas, rows, score)
    for theta, own, g, expected in zip(thetas, rows, score, found, strict=True):
        J = network.linearise(own, theta)[1]
        assert torch.allclose(J.pull(g), expected, atol=1e-12)
