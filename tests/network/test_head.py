"""The last layer and its inputs: against the network itself and against autograd."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from ssla.network import LayerInputs, RowScale, open_network
from ssla.network.bounds import LARGEST
from support.networks import TwoInputs, data, mlp
from support.oracles import jacobian

X, _ = data(9)
WEIGHTS = [["2.weight", "2.bias"], ["2.weight"]]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_at_any_weights_are_those_of_the_network_with_them(weights, dtype):
    net = mlp(outputs=3, dtype=dtype)
    network = open_network(net, weights, X)
    theta = network.theta + torch.linspace(-1, 1, len(network.theta), dtype=torch.float64)
    twin = mlp(outputs=3, dtype=dtype)
    with torch.no_grad():
        for name, value in network.layout.unpack(theta).items():
            twin.get_parameter(name).copy_(value)
        expected = twin.double()(X.to(dtype).double())
    found = network.evaluate(network.cast(X), theta)
    assert found.dtype == torch.float64
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    assert torch.allclose(found, expected, atol=tolerance)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_each_parameter_changes_the_output_that_is_named(weights):
    net = mlp(outputs=3)
    network = open_network(net, weights, X)
    J = jacobian(net, X, network.layout.names)  # in the named order
    order = torch.cat([index.flatten() for index in network.layout.positions.values()])
    changes = torch.zeros(3, network.layout.size, dtype=torch.bool)
    changes[:, order] = (J != 0).any(0)
    assert torch.equal(changes.int().argmax(0), network.parameter_outputs)
    assert (changes.sum(0) == 1).all()
    width = 6 + (len(weights) == 2)
    assert network.layer_shapes == ((width, 3),)
    assert network.jacobian_per_row == 8 * width
    assert network.inputs == 6


def test_a_scale_of_rows_divides_the_outputs():
    network = open_network(mlp(outputs=2), "last_layer", X)
    scale = RowScale(0.8, mean=1.5, least=0.0)
    phi = mlp(outputs=2)[:2](X).detach()
    s = scale.compute_scales(phi.square().sum(1))
    scaled = replace(network, row_scale=scale)
    expected = network.evaluate(X, network.theta) / s[:, None]
    assert torch.allclose(scaled.evaluate(X, network.theta), expected, atol=1e-14)


def test_outputs_have_a_graph_only_if_asked():
    network, x = open_network(mlp(), "last_layer", X), X.clone().requires_grad_(True)
    f, J = network.linearise(x, network.theta)
    assert not f.requires_grad
    assert not J.phi.requires_grad
    f, J = network.linearise(x, network.theta, graph=True)
    (found,) = torch.autograd.grad(f.sum(), x)
    (expected,) = torch.autograd.grad(mlp()(x).sum(), x)
    assert torch.allclose(found, expected, atol=1e-14)


def test_features_beyond_the_largest_are_moved_along_their_ray():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    network = open_network(net, ["2.weight"], X)
    far = 1e100 * X
    f, J = network.linearise(far, network.theta)
    assert torch.isfinite(f).all()
    assert float(J.phi.abs().max()) <= LARGEST * (1 + 1e-12)
    with torch.no_grad():
        expected = net(far) - net[2].bias
    some = expected.abs().amax(1) > 0
    found = (f - network.offset)[some]
    ratio = found / expected[some]
    assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-9)  # the same direction
    assert (ratio > 0).all()


@pytest.mark.parametrize("budget", [1, 5000, 1 << 30])
def test_chunks_fit_the_budget_or_have_one_row(budget):
    network = open_network(mlp(), "last_layer", X)
    chunks = list(network.chunks(X, budget))
    assert torch.equal(torch.cat(chunks), X)
    assert all(len(c) == 1 or len(c) * network.bytes_per_row <= budget for c in chunks)
    assert (len(chunks) == 1) == (9 * network.bytes_per_row <= budget)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = TwoInputs()

    def forward(self, *, left, right):
        return self.inner(left, right)


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_inputs_of_the_last_layer_as_a_module(form):
    parts = {"tensor": X, "tuple": (X[:, :1], X[:, 1:])}
    parts["dict"] = {"left": X[:, :1], "right": X[:, 1:]}
    x = parts[form]
    model = {"tensor": mlp, "tuple": TwoInputs, "dict": Named}[form]()
    network = open_network(model, "last_layer", x)
    module = LayerInputs(network, x)
    given = (x,) if form == "tensor" else tuple(x.values() if form == "dict" else x)
    assert torch.equal(module(*given), mlp()[:2](X))
    assert torch.equal(module(*given), network.linearise(x, network.theta)[1].phi)
    assert module.weight.endswith("2.weight")
