"""Opening a module: links that a likelihood would apply again, and frozen parameters."""

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.network import AnyParameters, LastLayer, open_network
from ssla.network.frozen import call_by_keyword, call_by_position, call_with_one_argument
from ssla.network.opening import (
    OPENING_ROWS,
    check_evaluation_mode,
    describe_frozen_parameters,
    list_trainable_names,
)
from support.networks import TwoInputs, data, mlp
from support.oracles import jacobian

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


# --- functions alone -------------------------------------------------------------------------


def test_trainable_parameters_are_those_that_require_a_gradient():
    net = mlp()
    names = tuple(name for name, _ in net.named_parameters())
    assert list_trainable_names(net) == names
    assert describe_frozen_parameters(net) is None
    net[0].weight.requires_grad_(False)
    assert list_trainable_names(net) == names[1:]
    assert "18 frozen parameters (requires_grad=False: 0.weight)" in describe_frozen_parameters(net)
    net.requires_grad_(False)
    assert list_trainable_names(net) == names
    assert "every parameter is frozen" in describe_frozen_parameters(net)


def test_the_note_names_four_frozen_parameters_at_most():
    net = nn.Sequential(mlp(), mlp(1), nn.Linear(1, 1))
    net[:2].requires_grad_(False)
    assert "0.0.weight, 0.0.bias, 0.2.weight, 0.2.bias, …)" in describe_frozen_parameters(net)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.Dropout(0.1), "has dropout"),
        (nn.RReLU(), "has dropout"),
        (nn.GRU(2, 2, num_layers=2, dropout=0.1), "has dropout"),
        (nn.BatchNorm2d(2), "has batch norm"),
        (nn.InstanceNorm1d(2), "has batch norm"),
    ],
)
def test_layers_that_are_random_or_mix_rows_must_be_in_evaluation_mode(layer, words):
    net = nn.Sequential(nn.Linear(2, 2), layer)
    with pytest.raises(ValueError, match=rf"{words} \(1\), so its .* model.eval\(\) first"):
        check_evaluation_mode(net)
    with pytest.raises(ValueError, match=rf"{words} \({type(layer).__name__}\)"):
        check_evaluation_mode(layer)
    check_evaluation_mode(net.eval())


def test_layers_without_randomness_may_be_in_training_mode():
    check_evaluation_mode(nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2), nn.LayerNorm(2)).train())


@pytest.mark.parametrize("weights", ["last_layer", ["2.weight", "2.bias"], ["2.weight"]])
def test_the_last_layer_is_opened_as_one(weights):
    net = mlp(outputs=2)
    network = open_network(net, weights, X)
    assert isinstance(network, LastLayer)
    f, J = network.linearise(X, network.theta)
    with torch.no_grad():
        assert torch.allclose(f, net(X), atol=1e-14)
    names = ["2.weight", "2.bias"] if "2.bias" in network.layout.names else ["2.weight"]
    expected = jacobian(net, X[:7], names)
    order = torch.cat([network.layout.positions[name].flatten() for name in names])
    assert torch.allclose(J.to_dense().values[:7][:, :, order], expected, atol=1e-13)
    if len(names) == 1:
        assert torch.equal(network.offset, net[2].bias.detach())
    else:
        assert network.offset is None


@pytest.mark.parametrize(
    "weights", ["all", ["0.weight"], ["0.bias", "2.bias"], ["2.bias"], ("2.bias", "0.weight")]
)
def test_other_parameters_are_opened_with_their_jacobian(weights):
    net = mlp(outputs=2)
    network = open_network(net, weights, X)
    assert isinstance(network, AnyParameters)
    names = [name for name, _ in net.named_parameters()] if weights == "all" else list(weights)
    assert sorted(network.layout.names) == sorted(names)
    f, J = network.linearise(X, network.theta)
    with torch.no_grad():
        assert torch.allclose(f, net(X), atol=1e-14)
    expected = jacobian(net, X[:7], network.layout.names)
    assert torch.allclose(J.to_dense().values[:7], expected, atol=1e-13)


class Extra(nn.Module):
    """A linear layer that is called after the one that makes the outputs."""

    def __init__(self):
        super().__init__()
        self.body, self.other = mlp(outputs=2), nn.Linear(2, 2).double()

    def forward(self, x):
        f = self.body(x)
        return {"f": f, "other": self.other(f)}


def test_the_head_is_the_layer_that_makes_the_outputs_and_not_the_last_that_is_called():
    found = open_network(Extra(), "last_layer", X, output="f")
    assert found.layout.names == ("body.2.weight", "body.2.bias")
    found = open_network(Extra(), "last_layer", X, output="other")
    assert found.layout.names == ("other.weight", "other.bias")


class Places(nn.Module):
    """A last linear layer over several places of a row."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 1).double()

    def forward(self, x):
        return self.head(x.unsqueeze(-1)).squeeze(-1)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3).double()

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Places, r"inputs of shape \(16, 3, 1\), not one row for each observation"),
        (Twice, "the weight 'layer.weight' of its last linear layer is used 2 times"),
    ],
)
def test_why_there_is_no_last_layer(make, words):
    with pytest.raises(ValueError, match=f"no last layer .*{words}"):
        open_network(make(), "last_layer", X)


class OneArgument(nn.Module):
    """Takes its parts as one argument, which it takes apart itself."""

    def __init__(self):
        super().__init__()
        self.body = TwoInputs()

    def forward(self, both):
        a, b = both.values() if isinstance(both, dict) else both
        return self.body(a, b)


def test_inputs_are_unpacked_or_given_as_one_argument():
    parts, named = (X[:, :1], X[:, 1:]), {"a": X[:, :1], "b": X[:, 1:]}
    expected = TwoInputs()(*parts).detach()
    for make, x, call in (
        (TwoInputs, parts, call_by_position),
        (TwoInputs, named, call_by_keyword),
        (OneArgument, parts, call_with_one_argument),
        (OneArgument, named, call_with_one_argument),
    ):
        network = open_network(make(), "last_layer", x)
        assert network.frozen.call_module is call
        assert torch.equal(network.frozen.forward(x), expected)
        assert len(network.frozen.shapes) == 2


def test_integers_are_kept_where_the_module_takes_them_and_cast_where_it_does_not():
    class Ids(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 1)

        def forward(self, ids):
            return self.head(self.table(ids))

    ids = open_network(Ids(), "last_layer", torch.arange(8) % 5)
    assert ids.frozen.keep_integers
    assert ids.frozen.integers == {"x": "int64"}
    whole_numbers = open_network(mlp(), "last_layer", torch.arange(12).reshape(4, 3))
    assert not whole_numbers.frozen.keep_integers
    assert whole_numbers.frozen.integers == {}


def test_no_more_than_the_first_rows_are_run_and_all_are_checked():
    class Sizes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.seen = mlp(), []

        def forward(self, x):
            self.seen.append(len(x))
            return self.inner(x)

    model = Sizes()
    network = open_network(model, "last_layer", X)
    assert model.seen == []  # the copy is run
    assert max(network.frozen.module.seen) == OPENING_ROWS
    spoiled = X.clone()
    spoiled[-1, 0] = torch.nan
    with pytest.raises(ValueError, match=r"x must be finite.*\[59, 0\]"):
        open_network(mlp(), "last_layer", spoiled)


def test_parameters_without_values_are_refused():
    with pytest.raises(ValueError, match=r"'0.weight' is on the device 'meta'.*to_empty"):
        open_network(nn.Sequential(nn.Linear(3, 1, device="meta")), "last_layer", X)
    with pytest.raises(ValueError, match="no floating-point parameters"):
        open_network(nn.Sequential(nn.Tanh()), "last_layer", X)


def test_outputs_that_are_not_finite_are_refused():
    net = nn.Sequential(mlp(), nn.Linear(1, 1).double())
    with torch.no_grad():
        net[1].weight.fill_(1e308)
        net[1].bias.fill_(1e308)
        net[0][2].bias.fill_(100.0)
    with pytest.raises(ValueError, match=r"output must be finite.*scale of the inputs"):
        open_network(net, "last_layer", X)


def test_one_row_is_enough_to_open_a_network():
    network = open_network(mlp(), "all", X[:1])
    expected = jacobian(mlp(), X[:3], network.layout.names)
    assert torch.allclose(
        network.linearise(X[:3], network.theta)[1].to_dense().values, expected, atol=1e-13
    )


def test_a_modules_name_is_all_of_its_parameters():
    net = nn.Sequential(mlp(outputs=4), nn.Tanh(), nn.Linear(4, 2).double())
    for name in ("0", "0.2"):
        network = open_network(net, name, X)
        expected = [n for n, _ in net.named_parameters() if n.startswith(name + ".")]
        assert list(network.layout.names) == expected
    assert isinstance(open_network(net, "2", X), LastLayer)
