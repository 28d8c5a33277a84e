"""From a module and data to a Posterior: scopes, sources, modes, noise, and nothing touched."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.fitting import mode as modes
from support.networks import data, mlp
from support.oracles import jacobian

GAUSSIAN = L.Gaussian(noise=0.3)


@pytest.mark.filterwarnings("ignore:The network is not at the mode")
@pytest.mark.parametrize("structure", ["dense", "diag"])
@pytest.mark.parametrize(
    "weights", ["last_layer", "all", ["0.weight", "2.bias"], ["2.weight"], "2"]
)
def test_marginal_equals_brute_force(weights, structure):
    """K = J H⁻¹ Jᵀ with J by one backward pass an output and H summed densely, for every scope."""
    model, (x, y) = mlp(outputs=2), data()
    prior = priors.Gaussian(precision=30.0)
    likelihood = L.HeteroscedasticGaussian()
    post = ssla.fit(
        model,
        (x, y),
        likelihood=likelihood,
        prior=prior,
        gaussian="laplace",
        weights=weights,
        structure=structure,
        mode="as_is",
    )
    names = list(post.network.layout.names)
    J = jacobian(model, x, names)
    Lam = L.HeteroscedasticGaussian().fisher(model(x).detach())
    H = torch.einsum("ncp,ncd,ndq->pq", J, Lam, J)
    if structure == "diag":
        H = torch.diag(H.diagonal())
    H = H + 30.0 * torch.eye(len(H), dtype=torch.float64)
    new = torch.randn(4, 3, dtype=torch.float64)
    J_new = jacobian(model, new, names)
    mean, covariance = post.marginal(new)
    assert torch.allclose(mean, model(new).detach(), atol=1e-12)
    assert torch.allclose(
        covariance, J_new @ torch.linalg.solve(H, J_new.mT), rtol=1e-8, atol=1e-12
    )


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 4), nn.Linear(1, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, left, right):
        return self.head(torch.relu(self.a(left) + self.b(right)))


class TakesDict(TwoInputs):
    def forward(self, batch):
        return super().forward(batch["left"], batch["right"])


class WithEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.table(x))


def all_sources(x, y):
    pairs = [(x[i : i + 7], y[i : i + 7]) for i in range(0, len(x), 7)]
    return {
        "tensors": (x, y),
        "column of y": (x, y[:, None]),
        "arrays": (x.numpy(), y.numpy()),
        "list of two": [x, y],
        "loader": DataLoader(TensorDataset(x, y), batch_size=16),
        "shuffled loader": DataLoader(
            TensorDataset(x, y),
            batch_size=16,
            shuffle=True,
            generator=torch.Generator().manual_seed(0),
        ),
        "list of batches": pairs,
        "dict batches": [{"x": a, "y": b} for a, b in pairs],
        "unit weights": (x, y, torch.ones(len(x))),
        "generator": (pair for pair in pairs),
        "dataset": TensorDataset(x, y),
        "lists": (x.tolist(), y.tolist()),
    }


@pytest.mark.parametrize("source", list(all_sources(*data())))
def test_every_source_gives_the_same_posterior(source):
    model, (x, y) = mlp(), data()
    reference = ssla.fit(model, (x, y), likelihood=GAUSSIAN, prior=priors.Gaussian())
    post = ssla.fit(model, all_sources(x, y)[source], likelihood=GAUSSIAN, prior=priors.Gaussian())
    assert post.report.n == 60
    assert post.report.passes == 1
    assert torch.allclose(post.theta, reference.theta, atol=1e-10)
    assert torch.allclose(post.marginal(x).covariance, reference.marginal(x).covariance, rtol=1e-9)
    assert abs(post.log_evidence() - reference.log_evidence()) < 1e-8


def test_tuples_dicts_and_integers_reach_the_module():
    left, right, y = torch.randn(20, 2), torch.randn(20, 1), torch.randn(20)
    model = TwoInputs().eval()
    by_tuple = ssla.fit(model, ((left, right), y), likelihood=GAUSSIAN, prior=priors.Gaussian())
    by_dict = ssla.fit(
        model, ({"left": left, "right": right}, y), likelihood=GAUSSIAN, prior=priors.Gaussian()
    )
    whole = TakesDict().eval()
    whole.load_state_dict(model.state_dict())
    by_whole = ssla.fit(
        whole,
        [{"left": left, "right": right, "y": y}],
        likelihood=GAUSSIAN,
        prior=priors.Gaussian(),
    )
    expected = by_tuple.predict((left, right)).mean
    assert torch.allclose(expected, by_dict.predict({"left": left, "right": right}).mean, atol=1e-5)
    assert torch.allclose(
        expected, by_whole.predict({"left": left, "right": right}).mean, atol=1e-5
    )
    ids = torch.randint(5, (20,))
    assert ssla.fit(
        WithEmbedding().eval(), (ids, y), likelihood=GAUSSIAN, prior=priors.Gaussian()
    ).predict(ids).mean.shape == (20,)
    assert (
        ssla.fit(
            nn.Linear(2, 1),
            (torch.randint(5, (20, 2)), y),
            likelihood=GAUSSIAN,
            prior=priors.Gaussian(),
        ).report.n
        == 20
    )


class Masked(nn.Module):
    """Attention to the past alone, by a mask of −inf or of booleans in a buffer."""

    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", mask)
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        q = self.body(x)
        return self.head(
            nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=self.mask)[:, -2]
        )


@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_a_buffer_may_be_infinite(weights, tmp_path):
    """An attention mask of −inf: the same posterior as with booleans, and no influence of what
    is masked.
    """
    past = torch.ones(5, 5).tril().bool()
    infinite = Masked(torch.zeros(5, 5).masked_fill(~past, -torch.inf)).double().eval()
    boolean = Masked(past).double().eval()
    boolean.load_state_dict(infinite.state_dict() | {"mask": past})
    x, y = torch.randn(30, 5, 3, dtype=torch.float64), torch.randn(30, dtype=torch.float64)
    options = {"likelihood": GAUSSIAN, "prior": priors.Gaussian(), "weights": weights}
    post, same = (ssla.fit(model, (x, y), **options) for model in (infinite, boolean))
    for one, other in zip(post.marginal(x), same.marginal(x), strict=True):
        torch.testing.assert_close(one, other)
    changed = x.clone()
    changed[:, -1] += 1  # the position after the one that is read
    assert torch.equal(post.marginal(changed).covariance, post.marginal(x).covariance)
    post.save(tmp_path / "posterior")
    assert torch.equal(
        ssla.load(tmp_path / "posterior", infinite).marginal(x).covariance,
        post.marginal(x).covariance,
    )


class Squeezed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return self.inner(x).squeeze()


@pytest.mark.filterwarnings("ignore:The network is")
@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_a_forward_that_ends_in_squeeze(weights):
    x, y = data()
    plain, squeezed = (
        ssla.fit(m, (x, y), likelihood=GAUSSIAN, prior=priors.Gaussian(), weights=weights)
        for m in (mlp(), Squeezed().eval())
    )
    assert torch.allclose(plain.predict(x[:1]).variance, squeezed.predict(x[:1]).variance)


def test_data_are_cast_to_the_model():
    model = mlp(dtype=torch.float32)
    x, y = data()
    post = ssla.fit(model, (x, y), likelihood=GAUSSIAN, prior=priors.Gaussian())
    p = post.predict(x.numpy())
    assert p.mean.dtype == p.stddev.dtype == p.interval().dtype == torch.float32
    assert post.marginal(x).covariance.dtype == torch.float32


def test_rows_are_counted_as_seen():
    x, y = data(50)
    dataset = TensorDataset(x, y)
    dropped = ssla.fit(
        mlp(),
        DataLoader(dataset, batch_size=16, drop_last=True),
        likelihood=GAUSSIAN,
        prior=priors.Gaussian(),
    )
    assert dropped.report.n == 48
    sampler = WeightedRandomSampler(
        torch.ones(50), num_samples=120, generator=torch.Generator().manual_seed(0)
    )
    assert (
        ssla.fit(
            mlp(),
            DataLoader(dataset, batch_size=16, sampler=sampler),
            likelihood=GAUSSIAN,
            prior=priors.Gaussian(),
        ).report.n
        == 120
    )


def test_a_weight_of_two_counts_as_two_rows():
    model, (x, y) = mlp(), data(30)
    weights = torch.ones(30)
    weights[:10] = 2
    weights[10:15] = 0
    repeated = torch.cat([torch.arange(10), torch.arange(10), torch.arange(15, 30)])
    for likelihood in (GAUSSIAN, L.Gaussian(noise="estimate")):
        by_weight = ssla.fit(
            model,
            (x, y, weights),
            likelihood=likelihood,
            prior=priors.Gaussian(),
            gaussian="laplace",
        )
        by_rows = ssla.fit(
            model,
            (x[repeated], y[repeated]),
            likelihood=likelihood,
            prior=priors.Gaussian(),
            gaussian="laplace",
        )
        assert by_weight.report.n == 30
        assert by_weight.report.weight == 35
        assert torch.allclose(by_weight.theta, by_rows.theta, atol=1e-9)
        assert torch.allclose(by_weight.predict(x).variance, by_rows.predict(x).variance, rtol=1e-9)
        assert abs(by_weight.log_evidence() - by_rows.log_evidence()) < 1e-8


@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [
        (GAUSSIAN, 1),
        (L.HeteroscedasticGaussian(), 2),
        (L.Poisson(), 1),
        (L.Bernoulli(), 1),
        (L.Categorical(), 3),
        (L.StudentT(4, 0.3), 1),
    ],
)
@pytest.mark.parametrize("structure", ["dense", "diag"])
def test_polish_reaches_the_mode_of_the_last_layer(likelihood, outputs, structure):
    """The gradient of ℓ + log π at the kept θ̂ is zero, by autograd through the user's own
    module.
    """
    model, (x, y) = mlp(outputs=outputs), data()
    kind = likelihood.support_for(outputs).kind
    y = {"real": y, "count": y.abs().mul(3).round(), "class": (y > 0).long()}[kind]
    post = ssla.fit(
        model,
        (x, y),
        likelihood=likelihood,
        structure=structure,
        prior=priors.Gaussian(0.5, mean=0.1),
        gaussian="laplace",
    )
    assert post.report.mode == "polish"
    assert post.report.residual_after < 1e-6
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for name, value in post.parameters.items():
            dict(moved.named_parameters())[name].copy_(value)
    head = [dict(moved.named_parameters())[name] for name in post.parameters]
    total = likelihood.log_prob(y, moved(x)).sum() - 0.25 * sum(
        ((p - 0.1) ** 2).sum() for p in head
    )
    for gradient in torch.autograd.grad(total, head):
        assert gradient.abs().max() < 1e-5


def test_polish_of_all_weights_reaches_a_mode():
    model, (x, y) = mlp(width=3), data()
    post = ssla.fit(
        model, (x, y), likelihood=GAUSSIAN, prior=priors.Gaussian(), weights="all", mode="polish"
    )
    assert post.report.residual_after <= 1e-5 < post.report.residual


def test_tilt_and_as_is_keep_the_point_prediction():
    model, (x, y) = mlp(), data()
    for options in ({"mode": "tilt"}, {"weights": "all"}):
        post = ssla.fit(model, (x, y), likelihood=GAUSSIAN, prior=priors.Gaussian(), **options)
        assert post.report.mode == "tilt"
        assert torch.allclose(post.predict(x).mean, model(x).detach().flatten(), atol=1e-12)
    with pytest.warns(
        UserWarning,
        match=r"not at the mode: its residual gradient is [\d.]+ posterior standard deviations",
    ):
        ssla.fit(model, (x, y), likelihood=GAUSSIAN, prior=priors.Gaussian(), mode="as_is")


def test_noise_is_estimated_with_the_degrees_of_freedom():
    """Flat-ish prior on a linear model: σ̂² is the unbiased RSS/(n − p) of ordinary least
    squares.
    """
    x, y = data(25)
    post = ssla.fit(
        nn.Linear(3, 1, dtype=torch.float64),
        (x, y),
        likelihood=L.Gaussian(noise="estimate"),
        prior=priors.Gaussian(1e-9),
    )
    design = np.column_stack([x.numpy(), np.ones(25)])
    rss = np.linalg.lstsq(design, y.numpy(), rcond=None)[1][0]
    assert abs(post.likelihood.noise - (rss / 21) ** 0.5) < 1e-7
    assert "Gaussian(noise=0." in repr(post.likelihood)


def test_noise_is_estimated_per_output_and_recovered():
    torch.manual_seed(3)
    x = torch.randn(4000, 2, dtype=torch.float64)
    sigma = torch.tensor([0.2, 1.5], dtype=torch.float64)
    y = x @ torch.randn(2, 2, dtype=torch.float64) + sigma * torch.randn(
        4000, 2, dtype=torch.float64
    )
    post = ssla.fit(
        nn.Linear(2, 2, dtype=torch.float64),
        (x, y),
        likelihood=L.Gaussian(noise="estimate"),
        prior=priors.Gaussian(),
    )
    assert torch.allclose(post.likelihood.noise, sigma, rtol=0.05)
    body = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64))
    with torch.no_grad():
        body[0].weight.copy_(post.parameters["weight"])
        body[0].bias.copy_(post.parameters["bias"])
    for weights in ("all", ["0.bias"]):
        again = ssla.fit(
            body,
            (x, y),
            likelihood=L.Gaussian(noise="estimate"),
            prior=priors.Gaussian(),
            weights=weights,
            mode="tilt",
        )
        assert torch.allclose(again.likelihood.noise, sigma, rtol=0.05)


def test_evidence_at_an_estimated_noise_is_that_of_a_fit_with_it_given():
    x, y = data()
    post = ssla.fit(mlp(), (x, y), likelihood=L.Gaussian(noise="estimate"), prior=priors.Gaussian())
    given = ssla.fit(
        mlp(), (x, y), likelihood=L.Gaussian(noise=post.likelihood.noise), prior=priors.Gaussian()
    )
    assert abs(post.log_evidence() - given.log_evidence()) < 1e-9
    assert torch.allclose(post.theta, given.theta, atol=1e-10)
    for scope in ("all",):
        one = ssla.fit(
            mlp(),
            (x, y),
            likelihood=L.Gaussian(noise="estimate"),
            prior=priors.Gaussian(),
            weights=scope,
        )
        two = ssla.fit(
            mlp(),
            (x, y),
            likelihood=L.Gaussian(noise=one.likelihood.noise),
            prior=priors.Gaussian(),
            weights=scope,
        )
        assert abs(one.log_evidence() - two.log_evidence()) < 1e-8


def test_evidence_with_noise_estimated_for_several_outputs_of_all_weights():
    torch.manual_seed(0)
    x = torch.randn(80, 3, dtype=torch.float64)
    y = torch.stack([torch.sin(x[:, 0]), x[:, 1]], 1) + torch.tensor([0.2, 0.8]) * torch.randn(
        80, 2, dtype=torch.float64
    )
    model = mlp(outputs=2, width=4)
    one = ssla.fit(
        model,
        (x, y),
        likelihood=L.Gaussian(noise="estimate"),
        prior=priors.Gaussian(),
        weights="all",
    )
    two = ssla.fit(
        model,
        (x, y),
        likelihood=L.Gaussian(noise=one.likelihood.noise),
        prior=priors.Gaussian(),
        weights="all",
    )
    assert abs(one.log_evidence() - two.log_evidence()) < 1e-8
    polished = ssla.fit(
        model,
        (x, y),
        likelihood=L.Gaussian(noise="estimate"),
        prior=priors.Gaussian(),
        weights="all",
        mode="polish",
    )
    f = polished.marginal(x).mean
    used = 1 - polished.operator.variances()
    ratio = ((y - f) ** 2).sum(0) / polished.likelihood.noise**2
    assert torch.allclose(ratio, (80 - used.sum() / 2).expand(2), rtol=2e-3)


def test_tempering_equals_weighting_every_row():
    model, (x, y) = mlp(), data()
    y = y.abs().mul(3).round()
    hot = ssla.fit(
        model,
        (x, y),
        likelihood=L.Tempered(L.Poisson(), 0.3),
        prior=priors.Gaussian(),
        gaussian="laplace",
    )
    with pytest.warns(UserWarning, match="Row weights sum to 18"):
        weighted = ssla.fit(
            model,
            (x, y, torch.full((60,), 0.3)),
            likelihood=L.Poisson(),
            prior=priors.Gaussian(),
            gaussian="laplace",
        )
    assert torch.allclose(hot.theta, weighted.theta, atol=1e-6)
    assert torch.allclose(hot.predict(x).mean, weighted.predict(x).mean, rtol=1e-6)


def test_chunks_do_not_change_the_answer():
    model, (x, y) = mlp(outputs=2), data(300)
    whole = ssla.fit(
        model,
        (x, y),
        likelihood=L.HeteroscedasticGaussian(),
        prior=priors.Gaussian(),
        gaussian="laplace",
    )
    small = ssla.fit(
        model,
        (x, y),
        likelihood=L.HeteroscedasticGaussian(),
        prior=priors.Gaussian(),
        gaussian="laplace",
        memory_budget=30_000,
    )
    assert small.network.rows_at_once(30_000) < 100
    assert torch.allclose(whole.theta, small.theta, atol=1e-9)
    for refit in ("none", "output"):
        a, b = whole.predict(x, refit=refit), small.predict(x, refit=refit)
        assert torch.allclose(a.mean, b.mean, atol=1e-8)
        assert torch.allclose(a.stddev, b.stddev, rtol=1e-7)


def test_the_report_can_be_read():
    text = str(
        ssla.fit(
            mlp(), data(), likelihood=L.Gaussian(noise="estimate"), prior=priors.Gaussian()
        ).report
    )
    for words in (
        "60 rows",
        "7 free",
        "polished in 1 Newton step",
        "your module is unchanged",
        "posterior sd from the mode",
        "MiB",
    ):
        assert words in text


def test_progress_shows_a_bar(capsys):
    ssla.fit(mlp(), data(), likelihood=GAUSSIAN, prior=priors.Gaussian(), progress=True)
    assert "pass 1" in capsys.readouterr().err


# --- nothing of the user's is touched ---------------------------------------------------------


def snapshot(module):
    state = {name: value.clone() for name, value in module.state_dict().items()}
    flags = {
        name: (m.training, dict(vars(m)).keys(), len(m._forward_hooks), len(m._forward_pre_hooks))
        for name, m in module.named_modules()
    }
    grads = {
        name: (p.requires_grad, p.grad is None, id(p), p._version)
        for name, p in module.named_parameters()
    }
    return state, flags, grads


class Busy(nn.Module):
    """Counts its calls and has batch norm and dropout."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.body = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        self.calls += 1
        return self.head(self.body(x))


@pytest.mark.filterwarnings(
    "ignore:The network is not at the mode", "ignore:polish did not reach", "ignore:polish stopped"
)
@pytest.mark.parametrize("weights", ["last_layer", "all"])
@pytest.mark.parametrize("mode", ["polish", "tilt"])
def test_module_and_data_are_bit_identical_afterwards(weights, mode):
    model, (x, y) = Busy().eval(), data(dtype=torch.float32)
    before, x_before, y_before, calls = snapshot(model), x.clone(), y.clone(), model.calls
    rng = torch.get_rng_state()
    post = ssla.fit(
        model,
        (x, y),
        likelihood=L.HeteroscedasticGaussian(),
        prior=priors.Gaussian(),
        gaussian="laplace",
        weights=weights,
        mode=mode,
    )
    for refit in ("none", "newton", "output"):
        p = post.predict(x, refit=refit)
        p.interval(), p.hdr(), p.epistemic, p.increments(y)
    after = snapshot(model)
    assert before[1:] == after[1:]
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert torch.equal(x, x_before)
    assert torch.equal(y, y_before)
    assert model.calls == calls
    assert torch.equal(rng, torch.get_rng_state())


def test_training_on_does_not_change_a_posterior():
    model, (x, y) = mlp(), data()
    post = ssla.fit(model, (x, y), likelihood=GAUSSIAN, prior=priors.Gaussian())
    before = post.predict(x).mean
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    model.train()
    assert torch.equal(before, post.predict(x).mean)


def test_same_input_same_result():
    model, (x, y) = mlp(outputs=2), data()
    a, b = (
        ssla.fit(
            model,
            (x, y),
            likelihood=L.HeteroscedasticGaussian(),
            prior=priors.Gaussian(),
            gaussian="laplace",
        ).predict(x)
        for _ in range(2)
    )
    assert torch.equal(a.log_prob(y), b.log_prob(y))
    assert torch.equal(a.interval(), b.interval())


def test_polish_that_runs_away_says_so():
    """62 weights predict mean and variance of 150 rows: under a prior of next to nothing the
    variance of some goes to zero.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 2)).double().eval()
    x = torch.randn(150, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = x[:, 0] + 0.4 * torch.randn(
        150, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    weak, noise = ssla.priors.Gaussian(precision=1e-4), ssla.likelihoods.HeteroscedasticGaussian()
    with pytest.raises(ValueError, match=r"polish diverges: after \d+ Newton steps.*mode='tilt'"):
        ssla.fit(net, (x, y), likelihood=noise, prior=weak, gaussian="laplace")
    assert (
        ssla.fit(
            net, (x, y), likelihood=noise, prior=weak, gaussian="laplace", mode="tilt"
        ).statistics.n
        == 150
    )
    with pytest.raises(ValueError, match="polish diverges"):
        ssla.fit(net, (x, y), likelihood=noise, prior=weak, mode="polish")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may need more passes than it has
        post = ssla.fit(net, (x, y), likelihood=noise, prior=weak)  # variational: it needs no mode
    assert post.gaussian == "variational"
    assert any("no mode nearby" in note for note in post.report.notes)
    assert torch.equal(post.theta, post.network.theta)
    assert bool((post.predict(x).interval(0.9).diff(dim=-1) > 0).all())


def test_a_mode_that_is_not_reached(monkeypatch):
    """A warning where the fit needs it; a line in the report where a variational Gaussian
    starts from the trained weights.
    """
    model, (x, y) = mlp(outputs=2), data()
    settings = {"likelihood": L.HeteroscedasticGaussian(), "prior": priors.Gaussian()}
    reached = ssla.fit(model, (x, y), **settings)
    assert reached.report.residual_after < 1e-6
    monkeypatch.setattr(modes, "MOST_NEWTON_STEPS", 1)
    for needed in ({"gaussian": "laplace"}, {"mode": "polish"}):
        with pytest.warns(RuntimeWarning, match="polish did not reach the mode in 1 Newton steps"):
            ssla.fit(model, (x, y), **settings, **needed)
    post = ssla.fit(model, (x, y), **settings)
    assert any("no mode nearby" in note for note in post.report.notes)
    assert torch.equal(post.theta, post.network.theta)
    p, wanted = post.predict(x), reached.predict(x)  # the same nearest Gaussian, from elsewhere
    assert torch.allclose(p.mean, wanted.mean, atol=0.02 * float(wanted.stddev.mean()))
    assert torch.allclose(p.stddev, wanted.stddev, rtol=0.02)
    counts = mlp(outputs=1)
    with pytest.warns(
        RuntimeWarning, match="polish did not reach the mode"
    ):  # a log-concave likelihood has one
        ssla.fit(counts, (x, y.abs().round()), likelihood=L.Poisson(), prior=priors.Gaussian())


@pytest.mark.parametrize(("distance", "raises"), [(0.2, True), (0.05, False)])
def test_a_polish_that_stops_where_no_step_rises(distance, raises):
    """So close to the mode that rounding hides the gain, it is a mode."""
    notes = []
    polish = modes.Polish(lambda theta: None, True, False, notes, refuses=True)
    if raises:
        with pytest.raises(modes.NoModeError, match="stopped"):
            polish._report_stop(3, distance**2)
    else:
        polish._report_stop(3, distance**2)
    stopped = "polish stopped after 3 steps: no smaller step raises the log posterior"
    assert notes == ([] if raises else [stopped])
