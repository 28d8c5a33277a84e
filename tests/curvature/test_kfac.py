"""KFAC where it is exact, on real modules, and beside plain differentiation."""

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.curvature import Kfac, LowRank
from ssla.curvature.jacobians import Features
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


X = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)
IDS = torch.randint(7, (9, 4), generator=torch.Generator().manual_seed(3))
MODULES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), X(9, 3)),
    "lenet": (lenet, X(9, 1, 12, 12)),
    "conv1d": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(15, 3)
        ),
        X(9, 2, 5),
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)),
        X(9, 1, 3, 3, 3),
    ),
    "grouped": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)
        ),
        X(9, 2, 5),
    ),
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
@pytest.mark.parametrize(
    "structure", ["dense", "diag", LowRank(rank=10_000)], ids=["dense", "diag", "low_rank"]
)
@pytest.mark.parametrize("name", MODULES)
def test_layerwise_jacobians_equal_plain_differentiation(name, structure):
    """dense and diag over all weights of every module, against one backward pass for each
    output of each row.
    """
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
    assert torch.allclose(
        post.marginal(x).covariance, J @ torch.linalg.solve(H, J.mT), rtol=1e-8, atol=1e-12
    )


@pytest.mark.filterwarnings("ignore:The network is")
@pytest.mark.parametrize("regression", [False, True], ids=["as it is", "regression"])
@pytest.mark.parametrize("name", MODULES)
def test_every_module_fits_and_predicts_with_kfac(name, regression):
    model, x, y, likelihood = made(name)
    if regression:
        y, likelihood = X(9, model(x).shape[1]), L.Gaussian(noise=0.7)
    post = ssla.fit(
        model,
        (x, y),
        likelihood=likelihood,
        weights="all",
        structure="kfac",
        prior=priors.Gaussian(5.0),
        gaussian="laplace",
    )
    p = post.predict(x)
    assert torch.isfinite(p.log_prob(y)).all()
    assert (post.marginal(x).covariance.diagonal(dim1=1, dim2=2) > 0).all()
    kinds = set(post.report.blocks.values())
    assert "kfac" in kinds
    assert ("diag" in kinds) == (name in ("grouped", "residual", "transformer", "bare parameter"))


def test_exact_for_one_row():
    """One datum: the GGN of each layer is a Kronecker product, so kfac is the block diagonal of
    dense.
    """
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
        ssla.fit(model, (x, y.squeeze(1)), likelihood=noise, prior=priors.Gaussian(), structure=s)
        for s in ("dense", "kfac")
    ]
    assert torch.allclose(posts[0].theta, posts[1].theta, atol=1e-10)
    assert torch.allclose(
        posts[0].marginal(x).covariance, posts[1].marginal(x).covariance, rtol=1e-9
    )
    assert abs(posts[0].log_evidence() - posts[1].log_evidence()) < 1e-8
    estimated = [
        ssla.fit(
            model,
            (x, y.squeeze(1)),
            likelihood=L.Gaussian(noise="estimate"),
            prior=priors.Gaussian(),
            structure=s,
        )
        for s in ("dense", "kfac")
    ]
    assert torch.allclose(
        torch.as_tensor(estimated[0].likelihood.noise),
        torch.as_tensor(estimated[1].likelihood.noise),
        rtol=1e-8,
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
    """f = mean over places of W a_t: J depends on the mean input alone, which is what `reduce`
    keeps.
    """

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x):
            return self.inner(x).mean(1)

    model, x, y = Pooled().double(), X(12, 5, 3), X(12, 2)
    dense, reduced, expanded = (
        ssla.fit(
            model,
            (x, y),
            likelihood=L.Gaussian(noise=0.5),
            weights="all",
            structure=s,
            mode="tilt",
            prior=priors.Gaussian(20.0),
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
        ssla.fit(
            model,
            (x, y),
            likelihood=L.Categorical(),
            weights="all",
            structure="kfac",
            prior=prior,
            gaussian="laplace",
        )


def test_a_last_layer_needs_only_the_sum_of_the_precisions():
    generator = torch.Generator().manual_seed(0)
    J = Features(torch.randn(7, 4, dtype=torch.float64, generator=generator), 3, True)
    half = torch.randn(7, 3, 3, dtype=torch.float64, generator=generator)
    weights = torch.rand(7, dtype=torch.float64, generator=generator)
    precision = weights[:, None, None] * (half @ half.mT)
    for w in (weights, None):
        (each,), (pooled,) = (
            Kfac().zero(15).add(J, part, w).layers
            for part in (precision, precision.sum(0, keepdim=True))
        )
        for name in ("A", "G"):
            torch.testing.assert_close(
                getattr(pooled, name), getattr(each, name), rtol=1e-13, atol=1e-13
            )
        assert pooled.count == each.count


class TestManyClasses:
    """A last layer of more classes than `MANY_CLASSES`, which is set to fewer here."""

    CLASSES, FEATURES = 5, 3

    @pytest.fixture(autouse=True)
    def few(self, monkeypatch):
        monkeypatch.setattr("ssla.fitting.passes.MANY_CLASSES", self.CLASSES - 1)

    def data(self, n=60):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(self.FEATURES, self.CLASSES)).double().eval()
        return model, X(n, self.FEATURES), classes(n, self.CLASSES)

    def fit(self, structure="kfac", gaussian="laplace", likelihood=None, rows=None, **options):
        model, x, y = self.data()
        data = (x, y) if rows is None else [(x[rows], y[rows])]
        likelihood = likelihood or L.Categorical()
        options = {"prior": priors.Gaussian(2.0), "mode": "tilt"} | options
        return ssla.fit(
            model, data, likelihood=likelihood, structure=structure, gaussian=gaussian, **options
        )

    def twin(self, post, p, x, y):
        """H as a matrix: Σ φφᵀ/n ⊗ diag Σ E[p(1−p)], plus the prior's precision."""
        phi = torch.cat([x, torch.ones(len(x), 1, dtype=DOUBLE)], 1)
        G = (
            torch.diag((p * (1 - p)).sum(0))
            if p.dim() == 2
            else torch.diag((p * (1 - p)).mean(0).sum(0))
        )
        return torch.kron(G, phi.mT @ phi / len(phi)) + 2.0 * torch.eye(
            self.CLASSES * (self.FEATURES + 1), dtype=DOUBLE
        )

    def test_the_output_factor_is_diagonal_and_the_report_says_so(self):
        model, x, y = self.data()
        post = self.fit()
        assert post.statistics.curvature.diagonal_outputs
        assert "output factor of structure='kfac' is diagonal" in str(post.report)
        new = X(4, self.FEATURES)
        row = torch.cat([new, torch.ones(4, 1, dtype=DOUBLE)], 1)
        J = torch.einsum("cd,bf->bcdf", torch.eye(self.CLASSES, dtype=DOUBLE), row).flatten(2)
        H = self.twin(post, torch.softmax(model(x).detach(), 1), x, y)
        assert torch.allclose(
            post.marginal(new).covariance, J @ torch.linalg.inv(H) @ J.mT, rtol=1e-10, atol=1e-14
        )

    def test_averages_equal_those_of_random_draws(self):
        """S⁻¹ of the variational Gaussian, from draws of the outputs under that Gaussian itself."""
        _, x, y = self.data()
        post = self.fit(gaussian="variational")
        f, K = post.marginal(x)
        z = torch.randn(4000, *f.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
        p = torch.softmax(f + z * K.diagonal(dim1=1, dim2=2).sqrt(), -1)
        H = self.twin(post, p, x, y)
        v = X(len(post.theta))
        assert torch.allclose(
            post.covariance.solve(v), torch.linalg.solve(H, v), rtol=0.02, atol=2e-3
        )

    def test_the_full_factor_can_be_asked_for(self):
        full = self.fit(Kfac(output_factor="full"))
        assert not full.statistics.curvature.diagonal_outputs
        assert "output factor" not in str(full.report)
        with pytest.raises(ValueError, match="output_factor"):
            Kfac(output_factor="diag")

    def test_row_weights_tempering_updates_and_files(self, tmp_path):
        model, x, y = self.data()
        twice = ssla.fit(
            model, (torch.cat([x, x]), torch.cat([y, y])), likelihood=L.Tempered(L.Categorical(), 0.5), structure="kfac",
            gaussian="laplace", prior=priors.Gaussian(2.0), mode="tilt",
        )  # fmt: skip
        once = self.fit()
        new = X(4, self.FEATURES)
        assert torch.allclose(
            twice.marginal(new).covariance, once.marginal(new).covariance, rtol=1e-12
        )
        parts = self.fit(rows=slice(0, 25)).update((x[25:], y[25:]))
        assert torch.allclose(
            parts.marginal(new).covariance, once.marginal(new).covariance, rtol=1e-12
        )
        once.save(tmp_path / "many.ssla")
        again = ssla.load(tmp_path / "many.ssla", model)
        assert torch.equal(again.predict(new).probs, once.predict(new).probs)
        assert torch.allclose(once.tune().predict(new).probs.sum(1), torch.ones(4, dtype=DOUBLE))

    def test_structures_that_cannot_name_it(self):
        model = nn.Sequential(nn.Linear(8, 10_000)).eval()
        x, y = X(20, 8).float(), classes(20, 10_000)
        for structure in ("dense", "diag"):
            with pytest.raises(ValueError, match=r"memory budget.*structure='kfac'"):
                ssla.fit(model, (x, y), likelihood=L.Categorical(), structure=structure)

    def test_other_targets_keep_the_full_factor(self):
        model, x, _ = self.data()
        post = ssla.fit(
            model, (x, X(60, self.CLASSES)), likelihood=L.Gaussian(noise=1.0), structure="kfac"
        )
        assert not post.statistics.curvature.diagonal_outputs


def test_the_mode_of_many_classes_is_found_without_their_dense_curvature(monkeypatch):
    """Newton steps by conjugate gradients, preconditioned by Kronecker factors, end where those
    with the dense curvature do.
    """
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 20)).double().eval(), X(300, 6)
    y = (3 * X(6, 20).mT @ x.mT).argmax(
        0
    )  # classes that can be told apart: the curvature varies much from row to row
    options = {
        "likelihood": L.Categorical(),
        "prior": priors.Gaussian(0.1),
        "structure": "kfac",
        "gaussian": "laplace",
    }
    exact = ssla.fit(model, (x, y), **options)
    monkeypatch.setattr("ssla.fitting.passes.NEWTON_SHARE", 1 << 30)
    found = ssla.fit(model, (x, y), **options)
    assert (
        found.report.steps <= exact.report.steps
    )  # they end sooner, within 0.01 standard deviations of each parameter
    assert found.report.residual_after < 0.02 * len(found.theta) ** 0.5
    away = found.theta - exact.theta
    assert float(away @ exact.statistics.curvature.push(away)) < (0.05 * len(away) ** 0.5) ** 2
