"""Positions of parameters in θ: against reshapes, concatenations and F.linear."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ssla.network.layout import make_contiguous_layout, make_last_layer_layout

F64 = torch.float64


def conv_and_linear():
    torch.manual_seed(0)
    net = nn.Module()
    net.scale = nn.Parameter(torch.randn(2))
    net.body = nn.Conv1d(2, 3, 4)
    net.inner = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))
    return net


def contiguous(net):
    return make_contiguous_layout({name: p.shape for name, p in net.named_parameters()})


LAYOUTS = {
    "contiguous": lambda: (contiguous(net := conv_and_linear()), dict(net.named_parameters())),
    "last layer": lambda: (
        make_last_layer_layout("w", "b", 3, 4),
        {"w": torch.randn(3, 4), "b": torch.randn(3)},
    ),
    "last layer without a bias": lambda: (
        make_last_layer_layout("w", None, 3, 4),
        {"w": torch.randn(3, 4)},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_entry_has_one_place_and_comes_back(name):
    layout, values = LAYOUTS[name]()
    places = torch.cat([index.flatten() for index in layout.positions.values()])
    assert torch.equal(places.sort().values, torch.arange(layout.size))
    assert layout.size == sum(value.numel() for value in values.values())
    assert layout.names == tuple(values)
    theta = layout.pack(values)
    assert theta.shape == (layout.size,)
    assert theta.dtype == F64
    assert not theta.requires_grad
    again = layout.unpack(theta)
    assert {key: value.shape for key, value in again.items()} == {
        key: value.shape for key, value in values.items()
    }
    assert all(torch.equal(again[key].float(), value) for key, value in values.items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_named_order_is_the_concatenation_of_the_parameters(name):
    layout, values = LAYOUTS[name]()
    flat = torch.cat([values[key].detach().flatten() for key in layout.names])
    assert torch.equal(layout.from_named_order(flat), layout.pack(values))
    assert torch.equal(layout.from_named_order(flat), flat.double()) == (name != "last layer")


def test_a_contiguous_layout_is_torchs_own_vector():
    net = conv_and_linear()
    expected = nn.utils.parameters_to_vector(net.parameters()).detach().double()
    assert torch.equal(contiguous(net).pack(dict(net.named_parameters())), expected)


def test_the_last_layers_theta_is_a_matrix_with_the_bias_as_its_last_column():
    weight, bias, phi = torch.randn(3, 4), torch.randn(3), torch.randn(7, 4)
    theta = make_last_layer_layout("w", "b", 3, 4).pack({"w": weight, "b": bias}).reshape(3, 5)
    ones = torch.ones(7, 1, dtype=F64)
    found = torch.cat([phi.double(), ones], 1) @ theta.mT
    assert torch.allclose(found, F.linear(phi.double(), weight.double(), bias.double()), atol=1e-14)


def test_unpacking_keeps_the_dtype_and_the_graph():
    layout, _ = LAYOUTS["last layer"]()
    theta = torch.arange(15, dtype=torch.float32, requires_grad=True)
    parts = layout.unpack(theta)
    assert parts["w"].dtype == torch.float32
    (gradient,) = torch.autograd.grad((2 * parts["w"]).sum() + (3 * parts["b"]).sum(), theta)
    assert torch.equal(gradient, torch.tensor([2.0, 2, 2, 2, 3] * 3))


def test_parameters_are_grouped_by_their_module():
    assert contiguous(conv_and_linear()).names_by_layer == {
        "": ("scale",),
        "body": ("body.weight", "body.bias"),
        "inner.0": ("inner.0.weight", "inner.0.bias"),
        "inner.1": ("inner.1.weight",),
    }
