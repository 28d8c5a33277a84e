"""Any free parameters: half precision, and layers that differ from backpropagation."""

import copy

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.network import open_network
from ssla.network.any_parameters import collect_fixed_tensors
from support.networks import data, mlp, trained
from support.oracles import jacobian

GAUSSIAN = L.Gaussian(noise=0.3)
X, Y = data(60)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("structure", ["kfac", "diag", "dense", "low_rank"])
def test_half_precision_keeps_its_structure_and_the_variances_of_double(dtype, structure):
    net = trained().to(dtype)
    options = {
        "likelihood": GAUSSIAN,
        "prior": priors.Gaussian(),
        "weights": "all",
        "structure": structure,
    }
    half = ssla.fit(net, (X, Y), **options)
    exact = ssla.fit(
        copy.deepcopy(net).double(), (X.to(dtype).double(), Y), **options
    )  # the same numbers, rounded nowhere else
    assert half.report.blocks == exact.report.blocks == dict.fromkeys(("0", "2"), structure)
    for scale in (1, 300):  # squares of the larger are beyond what float16 holds
        x = (scale * X[:20]).to(dtype)
        (f, K), (g, Q) = half.outputs_at(x), exact.outputs_at(x.double())
        eps = torch.finfo(dtype).eps
        assert ((f - g).abs().max() / g.abs().max()) < 4 * eps
        assert ((K - Q).abs().max() / Q.abs().max()) < 4 * eps


def test_layers_that_disagree_with_backpropagation_are_noted():
    class Odd(nn.Module):
        """Uses its weight once more where no watcher of torch functions sees it."""

        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

        def forward(self, x):
            with torch._C.DisableTorchFunction():
                more = x @ self.body.weight.mT
            return self.head((self.body(x) + more).tanh())

    post = ssla.fit(
        Odd().double().eval(),
        (X, Y),
        likelihood=GAUSSIAN,
        prior=priors.Gaussian(),
        weights="all",
        structure="kfac",
    )
    assert post.report.blocks == {"body": "diag", "head": "kfac"}
    assert any(
        "do not agree with backpropagation" in note and "body.weight" in note
        for note in post.report.notes
    )


# --- one network alone -----------------------------------------------------------------------


class Mixed(nn.Module):
    """A layer that is used twice, norms, an embedding, a bare parameter and a grouped
    convolution.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)
        self.table = nn.Parameter(torch.randn(4, 3))
        self.grouped, self.batch = nn.Conv1d(2, 4, 2, groups=2), nn.BatchNorm1d(4)
        self.head = nn.Linear(8, 2)
        self.double().eval()

    def forward(self, x):
        h = self.norm(self.twice(torch.tanh(self.twice(x)))) + self.table[:1]
        both = torch.stack([h, x], 1)
        return self.head(torch.tanh(self.batch(self.grouped(both))).flatten(1))


def opened(model, weights="all"):
    return open_network(model, weights, X)


def test_the_jacobian_is_that_of_backpropagation_for_every_kind_of_parameter():
    model = Mixed()
    network = opened(model)
    assert {"table", "grouped.weight", "norm.weight", "batch.bias"} <= set(
        network.without_kronecker
    )
    assert set(network.unplanned_names) == {"table", "grouped.weight", "grouped.bias"}
    assert {"twice.weight", "head.bias"} <= network.kronecker_names
    assert network.kronecker_names | set(network.without_kronecker) == set(network.layout.names)
    f, J = network.linearise(X[:6], network.theta)
    assert torch.allclose(f, model(X[:6]).detach(), atol=1e-14)
    expected = jacobian(model, X[:6], network.layout.names)
    assert torch.allclose(J.to_dense().values, expected, atol=1e-12)


@pytest.mark.parametrize(
    "names",
    [["norm.weight"], ["norm.bias"], ["batch.bias", "twice.bias"], ["head.weight", "table"]],
)
def test_part_of_a_layer_may_be_free(names):
    model = Mixed()
    network = opened(model, names)
    found = network.linearise(X[:6], network.theta)[1].to_dense().values
    assert torch.allclose(found, jacobian(model, X[:6], network.layout.names), atol=1e-12)


def test_the_jacobian_at_other_weights_is_that_of_the_network_with_them():
    network, twin = opened(Mixed()), Mixed()
    theta = network.theta + 0.1 * torch.cos(torch.arange(len(network.theta), dtype=torch.float64))
    with torch.no_grad():
        for name, value in network.layout.unpack(theta).items():
            twin.get_parameter(name).copy_(value)
    f, J = network.linearise(X[:6], theta)
    assert torch.allclose(f, twin(X[:6]).detach(), atol=1e-13)
    assert torch.allclose(network.evaluate(X[:6], theta), f, atol=1e-13)
    expected = jacobian(twin, X[:6], network.layout.names)
    assert torch.allclose(J.to_dense().values, expected, atol=1e-12)


def test_columns_by_row_are_those_of_vmap():
    network = opened(Mixed())
    free = network.split_into_parameters(network.theta)
    chosen = {name: free[name] for name in network.unplanned_names}
    found = network._compute_columns_by_row(X[:4], free, chosen, graph=False)
    for name, part in found.items():
        expected = jacobian(Mixed(), X[:4], [name])
        assert torch.allclose(part.flatten(2), expected, atol=1e-12)


def test_outputs_of_parameters_are_those_that_change():
    model = mlp(outputs=3)
    network = opened(model)
    changes = (jacobian(model, X[:9], network.layout.names) != 0).any(0)  # (C, P)
    found = network.parameter_outputs
    alone = changes.sum(0) == 1
    assert torch.equal(found >= 0, alone)
    assert torch.equal(found[alone], changes.int().argmax(0)[alone])
    assert network.layer_shapes == ((4, 6), (7, 3))


def test_a_tied_last_layer_has_no_outputs_of_its_own():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(self.one(x).tanh())

    model = Tied()
    network = opened(model)
    assert (network.parameter_outputs == -1).all()
    found = network.linearise(X[:4], network.theta)[1].to_dense().values
    assert torch.allclose(found, jacobian(model, X[:4], network.layout.names), atol=1e-13)


def test_what_is_not_free_stays_as_it_is():
    model = Mixed()
    rest = collect_fixed_tensors(model, ("table", "head.weight"))
    expected = dict(model.state_dict())
    del expected["table"], expected["head.weight"]
    assert sorted(rest) == sorted(expected)
    assert all(torch.equal(rest[name], value) for name, value in expected.items())
    assert not any(value.requires_grad for value in rest.values())


def test_gradients_in_x_only_if_asked():
    network, x = opened(Mixed()), X[:3].clone().requires_grad_(True)
    f, J = network.linearise(x, network.theta)
    assert not f.requires_grad
    assert not J.to_dense().values.requires_grad
    f, J = network.linearise(x, network.theta, graph=True)
    (found,) = torch.autograd.grad(f.square().sum(), x, retain_graph=True)
    own = X[:3].clone().requires_grad_(True)
    (expected,) = torch.autograd.grad(Mixed()(own).square().sum(), own)
    assert torch.allclose(found, expected, atol=1e-12)
    assert J.to_dense().values.requires_grad


def test_vmap_over_rows_is_refused_in_words():
    network = opened(mlp())
    with pytest.raises(ValueError, match="vmap over inputs is for posteriors of a last layer"):
        torch.func.vmap(lambda x: network.linearise(x[None], network.theta)[0])(X[:3])


def test_outputs_beyond_the_largest_are_moved_along_their_ray():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    network = opened(model)
    f, J = network.linearise(1e100 * X, network.theta)
    assert torch.isfinite(f).all()
    assert torch.isfinite(J.to_dense().values.square().sum())


@pytest.mark.parametrize("budget", [1, 40_000, 1 << 30])
def test_chunks_take_a_part_of_the_budget(budget):
    network = opened(mlp())
    chunks = list(network.chunks(X, budget))
    assert torch.equal(torch.cat(chunks), X)
    assert max(map(len, chunks)) == min(network.rows_at_once(budget), 60)
    assert network.rows_at_once(budget) == max(min(budget // 4 // network.bytes_per_row, 65536), 1)


class DifferentPath(nn.Module):
    """Its layers depend on the number of rows, so that rows are looked for in the first
    dimension alone.
    """

    def __init__(self, fails):
        super().__init__()
        self.fails = fails
        self.one, self.head = nn.Linear(3, 3).double(), nn.Linear(3, 2).double()

    def forward(self, x):
        if len(x) == 2:
            if self.fails:
                raise RuntimeError("two rows")
            return self.head(x @ self.one.weight.mT + self.one.bias)
        return self.head(self.one(x))


@pytest.mark.parametrize("fails", [False, True])
def test_a_second_pass_that_takes_another_path_leaves_the_first_dimension(fails):
    model = DifferentPath(fails)
    network = opened(model)
    assert network.kronecker_names == set(network.layout.names)
    found = network.linearise(X[:5], network.theta)[1].to_dense().values
    assert torch.allclose(found, jacobian(model, X[:5], network.layout.names), atol=1e-13)


class Scalar(nn.Module):
    """A parameter without dimensions: a learned temperature."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.scale = mlp(), nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x):
        return self.scale * self.body(x)


def test_a_parameter_without_dimensions_may_be_free():
    network = opened(Scalar())
    found = network.linearise(X[:4], network.theta)[1].to_dense().values
    assert torch.allclose(found, jacobian(Scalar(), X[:4], network.layout.names), atol=1e-13)


class Unlike(nn.Module):
    """Detaches one use of its layers, so that no plan of layers is right for any of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()

    def forward(self, x):
        with torch._C.DisableTorchFunction():
            inner = x @ self.one.weight.mT
            more = inner[:, :2] @ self.two.weight[:, :2].mT
        return self.two(self.one(x).tanh()) + more


def test_where_every_layer_disagrees_with_backpropagation_none_has_a_form():
    model = Unlike()
    network = opened(model)
    assert "one.weight" in network.without_kronecker
    assert "two.weight" in network.without_kronecker
    assert any("do not agree with backpropagation" in note for note in network.notes)
    found = network.linearise(X[:4], network.theta)[1].to_dense().values
    assert torch.allclose(found, jacobian(model, X[:4], network.layout.names), atol=1e-13)
