"""Fingerprints: equal for equal networks; a difference is named."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from ssla.network import RowScale, open_network
from ssla.network.fingerprint import VALUES, compute_merge_digests, describe_difference, fingerprint
from support.networks import data, mlp

X, _ = data(8)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).eval()


def changed(change):
    net = network()
    change(net)
    return net


def nudge(net):
    with torch.no_grad():
        net[3].bias[1] += 1e-7


def swap(net):
    net[2] = nn.Tanh()


def smooth(net):
    net[1].eps = 1e-3


def count(net):
    net[1].num_batches_tracked += 1


def transpose_memory(net):
    net[0].weight = nn.Parameter(net[0].weight.detach().mT.contiguous().mT)


def test_copies_and_other_memory_layouts_are_the_same_network():
    net = network()
    assert fingerprint(copy.deepcopy(net)) == fingerprint(net)
    strided = changed(transpose_memory)
    assert not strided[0].weight.is_contiguous()
    assert fingerprint(strided) == fingerprint(net)
    assert describe_difference(fingerprint(strided), fingerprint(net)) == ""
    assert fingerprint(net.requires_grad_(False)) == fingerprint(network())


def test_tensors_are_named_with_dtype_and_shape():
    assert fingerprint(network())["tensors"] == [
        [name, str(value.dtype)[6:], list(value.shape)]
        for part in (network().named_parameters(), network().named_buffers())
        for name, value in part
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (nudge, VALUES),
        (count, VALUES),
        (swap, "parameters have the same names and shapes, but the layers differ"),
        (smooth, "parameters have the same names and shapes, but the layers differ"),
        (lambda net: net.double(), "8 parameters or buffers differ; '0.weight' was float32"),
        (
            lambda net: net.register_buffer("more", torch.zeros(2)),
            "1 parameters or buffers differ; 'more' was absent and is float32",
        ),
        (
            lambda net: setattr(net[3], "bias", None),
            "1 parameters or buffers differ; '3.bias' was float32 .2. and is absent",
        ),
    ],
)
def test_a_difference_is_named(change, words):
    one, other = fingerprint(network()), fingerprint(changed(change))
    assert one != other
    found = describe_difference(one, other)
    assert words.replace(".2.", "[2]") in found


def test_the_order_of_tensors_counts():
    one = fingerprint(network())
    other = {**one, "tensors": one["tensors"][::-1]}
    assert describe_difference(one, other) == "0 parameters or buffers differ; their order differs"


def test_classes_of_the_same_tensors_differ_by_name_alone():
    class Other(nn.Linear):
        pass

    one, other = nn.Linear(2, 1), Other(2, 1)
    other.load_state_dict(one.state_dict())
    assert "layers differ" in describe_difference(fingerprint(one), fingerprint(other))


def pair(x):
    return {"logits": x, "other": 2 * x}


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp(outputs=2)

    def forward(self, x):
        return pair(self.inner(x))


def opened(weights="last_layer", net=None, **options):
    return open_network(mlp(outputs=2) if net is None else net, weights, X, **options)


def test_marks_name_what_differs_between_two_networks():
    def unlike(one, other):
        return {
            name
            for name, mark in compute_merge_digests(one).items()
            if mark != compute_merge_digests(other)[name]
        }

    whole = opened("all")
    last = opened()
    assert not unlike(whole, opened("all"))
    assert unlike(whole, opened("all", mlp(outputs=2, seed=1))) == {"networks"}
    assert unlike(last, replace(last, row_scale=RowScale(1.0, 2.0, 0.5))) == {"scales of rows"}
    assert unlike(whole, replace(whole, layers=whole.layers[:1])) == {
        "layers with a Kronecker form"
    }
    assert unlike(opened(["2.weight"]), last) == {"free parameters"}
    parts = [opened("all", Named(), output=name) for name in ("logits", "other")]
    assert unlike(*parts) == {"part of the result (output=)"}
