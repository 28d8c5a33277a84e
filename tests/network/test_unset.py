"""Layers whose weights come later."""

import torch
from torch import nn

from ssla.network.unset import unset_linear


def test_a_plain_linear_layer_and_no_random_number():
    before = torch.get_rng_state()
    layer = unset_linear(3, 4, torch.float64)
    assert type(layer) is nn.Linear
    assert torch.equal(torch.get_rng_state(), before)
    assert {name: p.shape for name, p in layer.named_parameters()} == {
        "weight": (4, 3),
        "bias": (4,),
    }
    assert layer.weight.dtype == torch.float64
    assert unset_linear(1, 1).weight.dtype == torch.get_default_dtype()
