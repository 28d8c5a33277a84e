"""Layers whose weights come later."""

import torch
from torch import nn

from ssla.network.unset import make_unset_linear


def test_a_plain_linear_layer_and_no_random_number():
    before = torch.get_rng_state()
    layer = make_unset_linear(3, 4, torch.float64)
    assert type(layer) is nn.Linear
    assert torch.equal(torch.get_rng_state(), before)
    assert {name: p.shape for name, p in layer.named_parameters()} == {
        "weight": (4, 3),
        "bias": (4,),
    }
    assert layer.weight.dtype == torch.float64
    assert make_unset_linear(1, 1).weight.dtype == torch.get_default_dtype()


def test_loaded_weights_give_the_layer_they_came_from():
    torch.manual_seed(0)
    source, x = nn.Linear(3, 4), torch.randn(5, 3)
    layer = make_unset_linear(3, 4)
    layer.load_state_dict(source.state_dict())
    assert torch.equal(layer(x), source(x))
    assert repr(layer) == repr(source)
    assert all(p.requires_grad for p in layer.parameters())
