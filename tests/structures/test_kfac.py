"""KFAC where it is exact, on real modules, and beside plain differentiation."""

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.structures import Kfac, LowRank
from ssla.structures.jacobians import Features
from support.oracles import jacobian

DOUBLE = torch.float64


def classes(n, count, seed=0):
    return torch.randint(count, (n,), generator=torch.Generator().manual_seed(seed))


class Attention(nn.Module):
    """A small transformer: embedding, self-attention, LayerNorm, feed-forward, pooling."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.encoder(self.table(x)).mean(1))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding="same", bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(x + self.second(x))
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(3)), nn.Linear(3, 1)

    def forward(self, x):
        return torch.tanh(self.head(x * self.scale))


class TwiceUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 3, dilation=2), nn.ReLU(inplace=True),
        nn.Flatten(), nn.Linear(4 * 2 * 2, 5), nn.ReLU(), nn.Linear(5, 3),
    )  # fmt: skip


X = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)  # noqa: E731
IDS = torch.randint(7, (9, 4), generator=torch.Generator().manual_seed(3))
MODULES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), X(9, 3)),
    "lenet": (lenet, X(9, 1, 12, 12)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(15, 3)), X(9, 2, 5)),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)), X(9, 1, 3, 3, 3)),
    "grouped": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)), X(9, 2, 5)),
    "residual": (Residual, X(9, 2, 5, 5)),
    "transformer": (Attention, IDS),
    "recurrent": (Recurrent, X(9, 4, 2)),
    "bare parameter": (Bare, X(9, 3)),
    "weight used twice": (TwiceUsed, X(9, 3)),
}


def made(name):
    torch.manual_seed(0)
    make, x = MODULES[name]
    model = make().double().eval()
    likelihood = L.Categorical() if model(x).shape[1] == 3 else L.Gaussian(noise=0.7)
    y = classes(9, 3) if model(x).shape[1] == 3 else X(9)
    return model, x, y, likelihood


@pytest.mark.filterwarnings("ignore:The network is")
@pytest.mark.parametrize("structure", ["dense", "diag", LowRank(rank=10_000)], ids=["dense", "diag", "low_rank"])
@pytest.mark.parametrize("name", MODULES)
def test_layerwise_jacobians_equal_plain_differentiation(name, structure):
    """dense and diag over all weights of every module, against one backward pass for each output of each row."""
    model, x, y, likelihood = made(name)
    post = ssla.fit(
        model,
        (x, y),
        likelihood=likelihood,
        prior=priors.Gaussian(),
        gaussian="laplace",
        weights="all",
        structure=structure,
        mode="as_is",
    )
    J = jacobian(model, x, [name for name, _ in model.named_parameters()])
    H = torch.einsum("ncp,ncd,ndq->pq", J, likelihood.fisher(model(x).detach()), J)
    H = (torch.diag(H.diagonal()) if structure == "diag" else H) + torch.eye(len(H), dtype=DOUBLE)
    assert torch.allclose(post.marginal(x).covariance, J @ torch.linalg.solve(H, J.mT), rtol=1e-8, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The network is")
@pytest.mark.parametrize("regression", [False, True], ids=["as it is", "regression"])
@pytest.mark.parametrize("name", MODULES)
def test_every_module_fits_and_predicts_with_kfac(name, regression):
    model, x, y, likelihood = made(name)
    if regression:
        y, likelihood = X(9, model(x).shape[1]), L.Gaussian(noise=0.7)
    post = ssla.fit(
        model, (x, y), likelihood=likelihood, weights="all", structure="kfac", prior=priors.Gaussian(5.0), gaussian="laplace"
    )
    p = post.predict(x)
    assert torch.isfinite(p.log_prob(y)).all()
    assert (post.marginal(x).covariance.diagonal(dim1=1, dim2=2) > 0).all()
    kinds = set(post.report.blocks.values())
    assert "kfac" in kinds
    assert ("diag" in kinds) == (name in ("grouped", "residual", "transformer", "recurrent", "bare parameter"))


def test_exact_for_one_row():
    """One datum: the GGN of each layer is a Kronecker product, so kfac is the block diagonal of dense."""
    model = MODULES["mlp"][0]().double()
    x, y = X(1, 3), classes(1, 3)
    names = [name for name, _ in model.named_parameters()]
    J = jacobian(model, x, names)[0]
    H = J.mT @ L.Categorical().fisher(model(x).detach())[0] @ J
    with pytest.warns(UserWarning, match="one row only"):
        post = ssla.fit(
            model,
            (x, y),
            likelihood=L.Categorical(),
            prior=priors.Gaussian(),
            gaussian="laplace",
            weights="all",
            structure="kfac",
            mode="tilt",
        )
    blocks = torch.zeros_like(H)
    split = 3 * 4 + 4
    blocks[:split, :split], blocks[split:, split:] = H[:split, :split], H[split:, split:]
    new = X(5, 3) + 1
    J_new = jacobian(model, new, names)
    expected = J_new @ torch.linalg.solve(blocks + torch.eye(len(H), dtype=DOUBLE), J_new.mT)
    assert torch.allclose(post.marginal(new).covariance, expected, rtol=1e-9)


@pytest.mark.parametrize("outputs", [1, 3])
def test_exact_for_a_linear_model_with_constant_noise(outputs):
    x, y = X(30, 4), X(30, outputs)
    model, noise = nn.Linear(4, outputs).double(), L.Gaussian(noise=0.6)
    posts = [
        ssla.fit(model, (x, y.squeeze(1)), likelihood=noise, prior=priors.Gaussian(), structure=s) for s in ("dense", "kfac")
    ]
    assert torch.allclose(posts[0].theta, posts[1].theta, atol=1e-10)
    assert torch.allclose(posts[0].marginal(x).covariance, posts[1].marginal(x).covariance, rtol=1e-9)
    assert abs(posts[0].log_evidence() - posts[1].log_evidence()) < 1e-8
    estimated = [
        ssla.fit(model, (x, y.squeeze(1)), likelihood=L.Gaussian(noise="estimate"), prior=priors.Gaussian(), structure=s)
        for s in ("dense", "kfac")
    ]
    assert torch.allclose(
        torch.as_tensor(estimated[0].likelihood.noise), torch.as_tensor(estimated[1].likelihood.noise), rtol=1e-8
    )


def test_reduce_and_expand_agree_where_each_row_has_one_place():
    model, (x, y) = MODULES["mlp"][0]().double(), (X(20, 3), classes(20, 3))
    one, two = (
        ssla.fit(
            model,
            (x, y),
            likelihood=L.Categorical(),
            prior=priors.Gaussian(),
            gaussian="laplace",
            weights="all",
            structure=Kfac(sharing=s),
        )
        for s in ("expand", "reduce")
    )
    assert torch.allclose(one.marginal(x).covariance, two.marginal(x).covariance, rtol=1e-10)
    with pytest.raises(ValueError, match=r"Unknown sharing 'reduced'. Did you mean 'reduce'\?"):
        Kfac(sharing="reduced")


def test_reduce_is_exact_for_pooled_linear_layers():
    """f = mean over places of W a_t: J depends on the mean input alone, which is what `reduce` keeps."""

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x):
            return self.inner(x).mean(1)

    model, x, y = Pooled().double(), X(12, 5, 3), X(12, 2)
    dense, reduced, expanded = (
        ssla.fit(
            model, (x, y), likelihood=L.Gaussian(noise=0.5), weights="all", structure=s, mode="tilt", prior=priors.Gaussian(20.0)
        )
        for s in ("dense", Kfac(sharing="reduce"), "kfac")
    )
    truth = dense.marginal(x).covariance
    assert torch.allclose(reduced.marginal(x).covariance, truth, rtol=1e-9)
    assert not torch.allclose(expanded.marginal(x).covariance, truth, rtol=1e-2)


def test_row_weights_count_as_rows():
    model, x, y = MODULES["mlp"][0]().double(), X(10, 3), classes(10, 3)
    weights = torch.tensor([2.0] * 4 + [1.0] * 6)
    options = {
        "likelihood": L.Categorical(),
        "prior": priors.Gaussian(),
        "gaussian": "laplace",
        "weights": "all",
        "structure": "kfac",
    }
    twice = ssla.fit(model, (torch.cat([x, x[:4]]), torch.cat([y, y[:4]])), **options)
    weighted = ssla.fit(model, (x, y, weights), **options)
    assert torch.allclose(twice.marginal(x).covariance, weighted.marginal(x).covariance, rtol=1e-10)


def test_a_prior_that_varies_inside_a_layer_is_refused():
    model, x, y = MODULES["mlp"][0]().double(), X(10, 3), classes(10, 3)
    prior = priors.Gaussian(precision={"0": 1.0, "2.weight": 2.0, "2.bias": 3.0})
    with pytest.raises(ValueError, match="one prior precision for each layer"):
        ssla.fit(model, (x, y), likelihood=L.Categorical(), weights="all", structure="kfac", prior=prior, gaussian="laplace")


def test_a_last_layer_needs_only_the_sum_of_the_precisions():
    generator = torch.Generator().manual_seed(0)
    J = Features(torch.randn(7, 4, dtype=torch.float64, generator=generator), 3, True)
    half = torch.randn(7, 3, 3, dtype=torch.float64, generator=generator)
    weights = torch.rand(7, dtype=torch.float64, generator=generator)
    precision = weights[:, None, None] * (half @ half.mT)
    for w in (weights, None):
        (each,), (pooled,) = (Kfac().zero(15).add(J, part, w).layers for part in (precision, precision.sum(0, keepdim=True)))
        for name in ("A", "G"):
            torch.testing.assert_close(getattr(pooled, name), getattr(each, name), rtol=1e-13, atol=1e-13)
        assert pooled.count == each.count
