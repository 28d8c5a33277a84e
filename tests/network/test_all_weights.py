"""All weights of real kinds of networks: what each block gets, that kfac is right where it is
exact, and that nothing changes.
"""

import copy

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.network import open_network
from support.oracles import jacobian

DOUBLE = torch.float64
CLASSES = 3


def randn(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


class Convolutional(nn.Module):
    """Convolutions with the given norm, and a residual connection."""

    def __init__(self, norm):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = norm(4)
        self.second = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.short = nn.Conv2d(4, 4, 1, stride=2)
        self.last_norm = norm(4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.last_norm(self.second(x)) + self.short(x))
        return self.head(x.mean((2, 3)))


def with_statistics(model):
    """Running statistics, scales and shifts other than their initial values."""
    with torch.no_grad():
        model.double().train()(randn(20, 2, 6, 6))
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.3 * torch.randn_like(p))
    return model


class Transformer(nn.Module):
    """Tokens with a mask for padding, positions, two encoder layers of torch."""

    def __init__(self, batch_first=True):
        super().__init__()
        self.table = nn.Embedding(7, 8, padding_idx=0)
        self.place = nn.Parameter(torch.randn(5, 8))
        layer = nn.TransformerEncoderLayer(
            8, 2, 12, dropout=0.1, batch_first=batch_first, activation="gelu"
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)
        self.batch_first = batch_first

    def forward(self, tokens):
        h = self.table(tokens) + self.place
        h = h if self.batch_first else h.transpose(0, 1)
        h = self.encoder(h, src_key_padding_mask=tokens == 0)
        return self.head(h[:, 0] if self.batch_first else h[0])


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body, self.head = kind(2, 3, batch_first=True), nn.Linear(3, CLASSES)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


class Adapter(nn.Module):
    """LoRA: a frozen linear layer, and two small ones beside it."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Linear(base.in_features, rank, bias=False)
        self.B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + 2.0 * self.B(self.A(x))


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.value = Adapter(nn.Linear(4, 4)), Adapter(nn.Linear(4, 4))
        self.norm = nn.LayerNorm(4).requires_grad_(False)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        mixed = torch.softmax(self.query(x) @ x.mT, -1) @ self.value(x)
        return self.head(self.norm(x + mixed).mean(1))


class Decoder(nn.Module):
    """Attention between two sequences, rows in the second dimension, with a causal mask."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 10, dropout=0.0)
        self.inside, self.head = nn.Linear(2, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        h = self.inside(x).transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=h.dtype)
        return self.head(self.layer(h[:3], h[1:], tgt_mask=mask, tgt_is_causal=True)[-1])


class Windows(nn.Module):
    """Windows of each row beside each other in the first dimension, as in Swin transformers."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, CLASSES)

    def forward(self, x):
        parts = x.reshape(-1, 2, 4)
        h = self.norm(parts + self.attention(parts, parts, parts, need_weights=False)[0])
        return self.head(h.reshape(len(x), -1, 4).mean(1))


TOKENS = torch.tensor([[1, 2, 3, 4, 5], [2, 3, 0, 0, 0], [6, 1, 6, 0, 0]] * 3)
NETWORKS = {
    "batch norm": (lambda: with_statistics(Convolutional(nn.BatchNorm2d)), randn(9, 2, 6, 6)),
    "group norm": (lambda: with_statistics(Convolutional(lambda n: nn.GroupNorm(2, n))), randn(9, 2, 6, 6)),
    "transformer": (Transformer, TOKENS),
    "transformer, rows second": (lambda: Transformer(batch_first=False), TOKENS),
    "LSTM": (lambda: Recurrent(nn.LSTM), randn(9, 4, 2)),
    "GRU": (lambda: Recurrent(nn.GRU), randn(9, 4, 2)),
    "RNN": (lambda: Recurrent(nn.RNN), randn(9, 4, 2)),
    "LoRA": (Adapted, randn(9, 5, 4)),
    "decoder": (Decoder, randn(9, 4, 2)),
    "windows": (Windows, randn(9, 6, 4)),
}  # fmt: skip
WITHOUT_FORM = ("norm", "table", "place")


def made(name):
    torch.manual_seed(0)
    make, x = NETWORKS[name]
    return make().double().eval(), x, torch.arange(9) % CLASSES


def fit(model, x, y, structure="kfac", **options):
    options = {"prior": priors.Gaussian(4.0), "gaussian": "laplace"} | options
    return ssla.fit(
        model, (x, y), likelihood=L.Categorical(), weights="all", structure=structure, **options
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_linear_and_convolutional_layers_have_factors_and_the_rest_is_diagonal(name):
    model, x, y = made(name)
    post = fit(model, x, y)
    free = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(post.report.names) == free
    assert "kfac" in post.report.blocks.values()
    for block, kind in post.report.blocks.items():
        assert kind == (
            "diag" if any(part in block for part in WITHOUT_FORM) or not block else "kfac"
        ), block
        assert f"{block or 'network'}: {kind}" in str(post.report)
    p = post.predict(x).probs
    assert torch.allclose(p.sum(1), torch.ones(9, dtype=DOUBLE))
    assert bool((post.marginal(x).covariance.diagonal(dim1=1, dim2=2) > 0).all())


@pytest.mark.parametrize("name", NETWORKS)
def test_jacobians_are_those_of_backpropagation(name):
    """J by layers, entry by entry, against one backward pass for each output of each row."""
    model, x, _ = made(name)
    network = open_network(model, "all", x, materialise=False)
    f, J = network.linearise(network.cast(x), network.theta)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    torch.testing.assert_close(
        J.to_dense().values, jacobian(model, x, names), rtol=1e-8, atol=1e-11
    )
    torch.testing.assert_close(f, model(x).detach(), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(
        network.evaluate(network.cast(x), network.theta), f, rtol=1e-9, atol=1e-11
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_float32_agrees_with_float64(name):
    model, x, y = made(name)
    wide = fit(model, x, y)
    narrow = fit(copy.deepcopy(model).float(), x if x.dtype == torch.long else x.float(), y)
    assert narrow.report.blocks == wide.report.blocks
    found = narrow.marginal(x if x.dtype == torch.long else x.float()).covariance.double()
    torch.testing.assert_close(found, wide.marginal(x).covariance, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["batch norm", "transformer", "LSTM", "LoRA"])
def test_the_module_is_bit_identical_after_fit_and_predict(name):
    model, x, y = made(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modules, free = (
        [type(m) for m in model.modules()],
        [p.requires_grad for p in model.parameters()],
    )
    outputs = model(x)
    fastpath = torch.backends.mha.get_fastpath_enabled()
    fit(model, x, y).predict(x)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [type(m) for m in model.modules()] == modules
    assert [p.requires_grad for p in model.parameters()] == free
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(model(x), outputs)
    assert torch.backends.mha.get_fastpath_enabled() == fastpath


@pytest.mark.parametrize("name", NETWORKS)
def test_files_have_the_same_bits(name, tmp_path):
    model, x, y = made(name)
    post = fit(model, x, y)
    post.save(tmp_path / "post")
    again = ssla.load(tmp_path / "post", model)
    assert torch.equal(again.marginal(x).covariance, post.marginal(x).covariance)
    assert torch.equal(again.predict(x).probs, post.predict(x).probs)
    assert again.report.blocks == post.report.blocks


@pytest.mark.parametrize("name", ["batch norm", "group norm", "LoRA", "LSTM"])
def test_one_row_and_one_place_give_the_blocks_of_the_dense_curvature(name):
    """With one row and no shared weights a layer's curvature is a Kronecker product; other
    parameters have its diagonal.
    """
    model, x, y = made(name)
    x = x[:1, :, :1, :1] if "norm" in name else x[:1, :1]
    with pytest.warns(UserWarning, match="one row only"):
        post = fit(model, x, y[:1], mode="tilt")
    names = list(post.report.names)
    J = jacobian(model, x, names)[0]
    H = J.mT @ L.Categorical().fisher(model(x).detach())[0] @ J
    kept = torch.eye(len(H), dtype=torch.bool)
    sizes = {name: dict(model.named_parameters())[name].numel() for name in names}
    owner = []
    for parameter in names:
        layer = parameter.rpartition(".")[0]
        block = layer + ("of the state" if "_hh" in parameter else "")
        owner += [
            block if post.report.blocks[layer] == "kfac" else f"{parameter} {i}"
            for i in range(sizes[parameter])
        ]
    kept |= torch.tensor([[a == b for b in owner] for a in owner])
    exact = torch.where(kept, H, 0.0) + 4.0 * torch.eye(len(H), dtype=DOUBLE)
    new = NETWORKS[name][1][1:]
    new = new[:, :, :1, :1] if "norm" in name else new[:, :1]
    J_new = jacobian(model, new, names)
    expected = J_new @ torch.linalg.solve(exact, J_new.mT)
    torch.testing.assert_close(post.marginal(new).covariance, expected, rtol=1e-8, atol=1e-12)


def test_predictions_in_chunks_are_those_of_all_rows_at_once():
    model, x, y = made("batch norm")
    post = fit(model, x, y)
    network = post.network
    budget = 4 * 2 * network.bytes_per_row
    assert network.rows_at_once(budget) == 2
    small = fit(model, x, y, memory_budget=max(budget, 200_000))
    torch.testing.assert_close(
        small.marginal(x).covariance, post.marginal(x).covariance, rtol=1e-9, atol=1e-12
    )


class TestTheDefaultGaussian:
    """Variational while the Jacobians of all rows can be kept; the Gaussian at the mode beyond,
    with a note.
    """

    def fit(self, **options):
        model, x, y = made("group norm")
        return fit(model, x, y, **({"gaussian": None} | options))

    def test_small_problems_are_variational(self):
        post = self.fit()
        assert post.report.gaussian == "variational"
        assert "backward passes" not in str(post.report)

    def test_beyond_the_budget_it_is_at_the_mode_and_says_so(self, monkeypatch):
        monkeypatch.setattr("ssla.fitting.fit_plan.KEPT_SHARE", 1 << 30)
        post = self.fit()
        assert post.report.gaussian == "laplace"
        assert post.report.passes == 1
        assert (
            "gaussian='laplace' was used in place of 'variational', which takes 3 backward passes"
            in str(post.report)
        )
        asked = self.fit(gaussian="laplace")
        assert torch.equal(
            asked.marginal(NETWORKS["group norm"][1]).covariance,
            post.marginal(NETWORKS["group norm"][1]).covariance,
        )
        assert self.fit(gaussian="variational").report.gaussian == "variational"

    def test_the_prior_is_chosen_without_further_passes(self, monkeypatch):
        monkeypatch.setattr("ssla.fitting.fit_plan.KEPT_SHARE", 1 << 30)
        post = self.fit(prior=None)
        assert post.report.gaussian == "laplace"
        assert post.report.passes == 1

    def test_a_dense_curvature_stays_variational(self, monkeypatch):
        monkeypatch.setattr("ssla.fitting.fit_plan.KEPT_SHARE", 1 << 30)
        assert self.fit(structure="dense").report.gaussian == "variational"


def test_a_large_first_batch_is_opened_with_few_rows():
    seen = []

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            seen.append(len(x))
            return self.head(torch.tanh(self.body(x)))

    open_network(Counting().double().eval(), "all", randn(500, 3))
    assert max(seen) == 16


@pytest.mark.parametrize("name", NETWORKS)
def test_the_estimate_of_memory_is_that_of_the_fit(name):
    model, x, y = made(name)
    post = fit(model, x, y)
    assert (
        ssla.estimate_cost(model, 9, weights="all", structure="kfac").statistics
        == post.report.memory
    )


def test_a_refusal_names_what_works():
    model, x, y = made("batch norm")
    needed = fit(model, x, y).report.memory
    expected = r"Use structure='diag' \(.*\), or fewer weights \(weights='last_layer', or a list of parameter names\)"
    with pytest.raises(ValueError, match=expected):
        fit(model, x, y, memory_budget=needed - 1)
