"""A network opened again from its description answers bit by bit as before."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from ssla.network import (
    RowScale,
    describe_opening,
    get_module,
    get_output_argument,
    open_network,
    reopen_network,
)
from ssla.network.any_parameters import LayerPlan, NormPlan
from ssla.network.reopening import describe_output_argument
from support.networks import data, mlp

X, _ = data(12)


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()


SCOPES = {
    "last layer": "last_layer",
    "weight alone": ["3.weight"],
    "all": "all",
    "a norm": ["1.weight", "1.bias"],
    "first layer": ["0.weight"],
}


@pytest.mark.parametrize("name", SCOPES)
def test_a_reopened_network_is_the_network(name):
    model = normed()
    network = open_network(model, SCOPES[name], X)
    again = reopen_network(model, describe_opening(network))
    assert type(again) is type(network)
    assert torch.equal(again.theta, network.theta)
    assert again.layout.names == network.layout.names
    theta = network.theta + 0.1
    (f, J), (g, Q) = (one.linearise(X, theta) for one in (network, again))
    assert torch.equal(f, g)
    assert torch.equal(J.to_dense().values, Q.to_dense().values)
    assert torch.equal(again.parameter_outputs, network.parameter_outputs)
    assert again.layer_shapes == network.layer_shapes
    assert again.kronecker_names == network.kronecker_names
    assert again.bytes_per_row == network.bytes_per_row
    assert get_module(again) is not model
    assert all(
        torch.equal(value, model.state_dict()[key])
        for key, value in get_module(again).state_dict().items()
    )


def test_a_scale_of_rows_and_an_output_are_kept():
    scale = RowScale(0.5, 2.0, 0.1)
    network = replace(open_network(normed(), "last_layer", X), row_scale=scale)
    again = reopen_network(normed(), describe_opening(network), output=None)
    assert again.row_scale == scale
    assert torch.equal(again.evaluate(X, network.theta), network.evaluate(X, network.theta))


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp(outputs=2)

    def forward(self, x):
        return {"f": self.inner(x)}


def first(result):
    return result["f"]


@pytest.mark.parametrize(
    ("output", "words"), [("f", "'f'"), (first, "first"), (lambda r: r["f"], "<lambda>")]
)
def test_outputs_have_words(output, words):
    network = open_network(Parts(), "last_layer", X, output=output)
    assert get_output_argument(network) is output
    assert describe_output_argument(network).endswith(words)
    again = reopen_network(Parts(), describe_opening(network), output)
    assert torch.equal(again.evaluate(X, again.theta), network.evaluate(X, network.theta))
    assert describe_output_argument(open_network(mlp(), "last_layer", X)) == ""


def test_other_networks_have_no_description():
    with pytest.raises(TypeError, match="A object cannot be saved"):
        describe_opening(object())
    with pytest.raises(TypeError, match="A object has no module"):
        get_module(object())
    assert get_output_argument(object()) is None


def whole():
    return describe_opening(open_network(normed(), "all", X))


def last():
    return describe_opening(open_network(normed(), "last_layer", X))


def with_layer(opening, place=0, **changes):
    layers = list(opening.layers)
    layers[place] = replace(layers[place], **changes)
    return replace(opening, layers=tuple(layers))


def with_norm(opening, **changes):
    return replace(opening, norms=(replace(opening.norms[0], **changes),))


PARAMETERS = "are not those of the network"
FORGED = {
    "an unknown parameter": (lambda o: replace(o, names=("0.weigth",)), PARAMETERS),
    "no parameter": (lambda o: replace(o, names=()), PARAMETERS),
    "a parameter twice": (lambda o: replace(o, names=(*o.names, o.names[0])), PARAMETERS),
    "others that are not free": (
        lambda o: replace(o, names=("0.weight",), others=("1.weight",)),
        PARAMETERS,
    ),
    "a layer of no parameter": (lambda o: with_layer(o, weight="9.weight"), PARAMETERS),
    "another head": (lambda o: replace(o, head=("0.weight",)), "the last layer is not one"),
    "a head that is not free": (lambda o: replace(o, head=("9.weight",)), "last layer is not one"),
    "no integers": (lambda o: replace(o, integers={"x": "float32"}), "have no integer type"),
    "no outputs": (lambda o: replace(o, outputs=0, head=()), "sizes must be positive"),
    "no bytes": (lambda o: replace(o, bytes_per_row=0), "sizes must be positive"),
    "endless bytes": (lambda o: replace(o, bytes_per_row=1 << 63), "fit 64 bits"),
    "negative bytes": (lambda o: replace(o, extra_per_row=-1), "sizes must be positive"),
    "a scale of all weights": (
        lambda o: replace(o, row_scale=RowScale(1.0, 1.0, 0.0)),
        "the scale of rows is not one",
    ),
    "positions outside": (
        lambda o: with_layer(o, positions=o.layers[0].positions + 1000),
        "outside the parameters",
    ),
    "positions below": (
        lambda o: with_layer(o, positions=o.layers[0].positions - 1),
        "outside the parameters",
    ),
    "positions of fractions": (
        lambda o: with_layer(o, positions=o.layers[0].positions.double()),
        "outside the parameters",
    ),
    "positions twice": (
        lambda o: with_layer(o, positions=torch.zeros_like(o.layers[0].positions)),
        "do not cover the free parameters once each",
    ),
    "a layer missing": (
        lambda o: replace(o, layers=o.layers[:1]),
        "do not cover the free parameters once each",
    ),
    "transposed positions": (
        lambda o: with_layer(o, 1, positions=o.layers[1].positions.mT.contiguous()),
        "plan of '3.weight' does not fit its shape",
    ),
    "an axis beyond": (lambda o: with_layer(o, axis=8), "plan of '0.weight' does not fit"),
    "a first row in the middle": (lambda o: with_layer(o, first=1), "does not fit its shape"),
    "a norm of nothing": (lambda o: with_norm(o, weight="9.weight"), "norm with the scale"),
    "a norm of another bias": (lambda o: with_norm(o, bias="0.bias"), "norm with the scale"),
    "a norm beyond": (lambda o: with_norm(o, axis=-1), "norm with the scale"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_description_that_cannot_be_true_is_refused(name):
    forge, words = FORGED[name]
    opening = whole()
    assert [type(part) for part in (opening.layers[0], opening.norms[0])] == [LayerPlan, NormPlan]
    reopen_network(normed(), opening)
    with pytest.raises(ValueError, match=words):
        reopen_network(normed(), forge(opening))


@pytest.mark.parametrize(
    ("forge", "words"),
    [
        (lambda o: replace(o, names=("1.weight",)), "not the weight of a last layer with 2"),
        (lambda o: replace(o, names=("0.weight", "0.bias")), "not the weight of a last layer"),
        (lambda o: replace(o, row_scale=RowScale(-1.0, 1.0, 0.0)), "scale of rows is not one"),
        (lambda o: replace(o, row_scale=RowScale(1.0, 0.0, 0.0)), "scale of rows is not one"),
        (lambda o: replace(o, row_scale=RowScale(1.0, torch.nan, 0.0)), "scale of rows is not"),
    ],
)
def test_a_last_layer_that_cannot_be_true_is_refused(forge, words):
    opening = last()
    reopen_network(normed(), opening)
    with pytest.raises(ValueError, match=words):
        reopen_network(normed(), forge(opening))
