"""Intercepted calls: inputs against unfolded convolutions, gradients against autograd."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ssla.network.watch import (
    CONVOLUTION,
    EXP,
    LINEAR,
    NORM,
    OTHER,
    SIGMOID,
    SOFTMAX,
    InputWatch,
    LayerWatch,
    Probe,
    arrange_inputs_by_position,
    arrange_values_by_position,
    find_row_axis,
    read_layer,
    read_norm,
)

F64 = torch.float64


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def call_of(layer, x):
    """The only call of a layer with parameters."""
    with torch.no_grad(), Probe() as probe:
        layer(x)
    (call,) = probe.calls
    return call


def test_linear_calls_are_read_by_position_and_by_name():
    x, weight, bias = numbers(2, 3), numbers(4, 3), numbers(4)
    result = F.linear(x, weight, bias)
    by_position = read_layer(F.linear, (x, weight, bias), {}, result)
    by_name = read_layer(F.linear, (x,), {"bias": bias, "weight": weight}, result)
    for call in (by_position, by_name):
        assert (call.operation, call.input, call.weight, call.bias) == (LINEAR, x, weight, bias)
        assert call.output_count == 4
        assert call.rows_key == (id(weight), 0)
    assert read_layer(F.linear, (x, weight), {}, result).bias is None


def test_what_has_no_kronecker_form_is_not_read():
    x, weight = numbers(2, 4, 5), numbers(4, 2, 3)
    assert read_layer(F.conv1d, (x, weight), {"groups": 2}, F.conv1d(x, weight, groups=2)) is None
    assert read_layer(torch.tanh, (x,), {}, x.tanh()) is None
    assert read_layer(F.linear, (x, weight), {}, "no tensor") is None
    assert read_norm(F.layer_norm, (x, (5,)), {}, F.layer_norm(x, (5,))) is None  # no scale
    assert read_norm(torch.tanh, (x,), {}, x.tanh()) is None


NORMS = {
    "layer": (lambda: nn.LayerNorm(6), (4, 3, 6), 1),
    "layer over two": (lambda: nn.LayerNorm((3, 6)), (4, 3, 6), 2),
    "group": (lambda: nn.GroupNorm(2, 6), (4, 6, 5), 0),
    "batch": (lambda: nn.BatchNorm1d(6).eval(), (4, 6, 5), 0),
}


@pytest.mark.parametrize("name", NORMS)
def test_the_input_of_a_norm_is_what_its_scale_multiplies(name):
    make, shape, dimensions = NORMS[name]
    layer, x = make().double(), numbers(*shape)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(numbers(*p.shape, seed=1))
        for b in layer.buffers():
            if b.is_floating_point():
                b.add_(0.5)
        with LayerWatch({id(layer.weight): "weight"}) as watch:
            result = layer(x)
    ((_, call, _),) = watch.calls
    assert (call.operation, call.dimensions) == (NORM, dimensions)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    if not dimensions:
        weight, bias = weight[:, None], bias[:, None]
    assert torch.allclose(call.input * weight + bias, result, atol=1e-14)
    plain = arrange_inputs_by_position(call, 4)  # (rows, T, out)
    whole = plain * layer.weight.detach().flatten() + layer.bias.detach().flatten()
    assert torch.allclose(whole, arrange_values_by_position(call, result, 4), atol=1e-14)


CONVOLUTIONS = {
    "1d": (lambda: nn.Conv1d(2, 3, 3), (4, 2, 9)),
    "1d same, even kernel": (lambda: nn.Conv1d(2, 3, 4, padding="same"), (4, 2, 9)),
    "1d valid, no bias": (lambda: nn.Conv1d(2, 3, 2, padding="valid", bias=False), (4, 2, 9)),
    "2d": (lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(0, 1)), (4, 2, 7, 5)),
    "2d dilated": (lambda: nn.Conv2d(2, 3, 3, dilation=(2, 1), padding=2), (4, 2, 7, 5)),
    "2d same, dilated": (lambda: nn.Conv2d(2, 3, (2, 3), padding="same", dilation=2), (4, 2, 7, 5)),
    "3d": (lambda: nn.Conv3d(1, 2, 2, stride=2), (4, 1, 4, 5, 6)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")  # of torch
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_is_its_weight_times_its_patches(name):
    make, shape = CONVOLUTIONS[name]
    torch.manual_seed(0)
    layer, x = make().double(), numbers(*shape)
    call = call_of(layer, x)
    assert call.operation == CONVOLUTION
    found = arrange_inputs_by_position(call, 4) @ layer.weight.detach().flatten(1).mT
    if layer.bias is not None:
        found = found + layer.bias.detach()
    assert torch.allclose(found, arrange_values_by_position(call, call.result, 4), atol=1e-13)
    assert torch.equal(arrange_values_by_position(call, call.result, 4), call.result.flatten(2).mT)
    assert call.output_count == layer.out_channels


@pytest.mark.parametrize(("axis", "shape"), [(0, (4, 5, 3)), (1, (5, 4, 3)), (0, (20, 3))])
def test_a_linear_layer_is_its_weight_times_its_inputs_at_each_place(axis, shape):
    layer, x = nn.Linear(3, 2).double(), numbers(*shape)
    call = call_of(layer, x)
    found = F.linear(
        arrange_inputs_by_position(call, 4, axis), layer.weight.detach(), layer.bias.detach()
    )
    assert found.shape == (4, 5, 2)
    assert torch.allclose(found, arrange_values_by_position(call, call.result, 4, axis), atol=1e-14)


def test_patches_have_a_graph_only_if_asked():
    layer, x = nn.Conv1d(2, 3, 3).double(), numbers(4, 2, 9).requires_grad_(True)
    with Probe() as probe:
        layer(x)
    assert not arrange_inputs_by_position(probe.calls[0], 4).requires_grad
    assert arrange_inputs_by_position(probe.calls[0], 4, graph=True).requires_grad


def linear_axis(shape, other, rows=4, other_rows=2):
    layer = nn.Linear(shape[-1], 2).double()
    return find_row_axis(
        call_of(layer, numbers(*shape)), rows, call_of(layer, numbers(*other)), other_rows
    )


def test_the_dimension_of_the_rows_is_the_one_that_follows_their_number():
    assert linear_axis((4, 5, 3), (2, 5, 3)) == 0
    assert linear_axis((5, 4, 3), (5, 2, 3)) == 1
    assert linear_axis((20, 3), (10, 3)) == 0  # five places of each row, beside each other
    assert linear_axis((5, 3), (5, 3)) is None  # the same for any rows
    assert linear_axis((4, 5, 3), (2, 6, 3)) is None  # two dimensions change
    assert linear_axis((6, 3), (4, 3)) is None  # not a multiple of the rows
    assert linear_axis((4, 5, 3), (2, 3)) is None  # another number of dimensions


def test_the_rows_of_channels_come_first():
    conv, norm = nn.Conv1d(2, 3, 3).double(), nn.GroupNorm(1, 2).double()
    for layer in (conv, norm):
        one, two = call_of(layer, numbers(4, 2, 9)), call_of(layer, numbers(2, 2, 9))
        assert find_row_axis(one, 4, two, 2) == 0
        shorter = call_of(layer, numbers(4, 2, 18))
        assert find_row_axis(one, 2, shorter, 4) is None  # the length follows the rows
    unbatched = [call_of(conv, numbers(2, size)) for size in (8, 4)]
    assert find_row_axis(unbatched[0], 4, unbatched[1], 2) is None
    layer = nn.LayerNorm(3).double()
    found = [call_of(layer, numbers(5, rows, 3)) for rows in (4, 2)]
    assert find_row_axis(found[0], 4, found[1], 2) == 1


class Linked(nn.Module):
    """Uses its first weight in a linear call and in a product, with several links on the way."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3).double(), nn.Linear(3, 2).double()

    def forward(self, x):
        h = torch.sigmoid(self.one(x)) + (x @ self.one.weight).exp()
        return torch.softmax(self.two(h), -1)


def test_a_probe_records_calls_uses_links_and_bytes():
    torch.manual_seed(0)
    net, x = Linked(), numbers(5, 3)
    with torch.no_grad():
        expected = net(x)
        with Probe() as probe:
            result = net(x)
    assert torch.equal(result, expected)
    assert [call.weight for call in probe.linears] == [net.one.weight, net.two.weight]
    assert probe.uses[id(net.one.weight)] == [LINEAR, OTHER]
    assert probe.uses[id(net.two.weight)] == probe.uses[id(net.two.bias)] == [LINEAR]
    assert [name for name, _ in probe.links] == [SIGMOID, EXP, SOFTMAX]
    assert torch.equal(probe.links[-1][1], result)
    assert probe.bytes == 8 * (5 * 3 * 5 + 5 * 2 * 2)  # five results of width 3, two of width 2


def test_the_input_of_one_layer_is_kept():
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), numbers(5, 3)
    with torch.no_grad(), InputWatch(net[2].weight) as seen:
        net(x)
    assert torch.equal(seen.input, net[:2](x))
    with torch.no_grad(), InputWatch(nn.Linear(3, 4).weight) as unseen:
        net(x)
    assert unseen.input is None


def test_gradients_at_the_added_zeros_are_those_of_the_results():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), numbers(5, 3)
    with LayerWatch({id(net[0].weight): "0.weight"}) as watch:
        f = net(x)
    ((name, call, zero),) = watch.calls
    assert name == "0.weight"
    (found,) = torch.autograd.grad(f[:, 1].sum(), zero, retain_graph=True)
    inner = net[0](x).detach().requires_grad_(True)
    (expected,) = torch.autograd.grad(net[2](inner.tanh())[:, 1].sum(), inner)
    assert torch.allclose(found, expected, atol=1e-14)
    assert torch.equal(f, net(x))
    assert torch.equal(call.input, x)
