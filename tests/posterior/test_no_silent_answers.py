"""Wrong answers that came without a word: gradients, covariances, conventions, scales, frozen
and half-precision networks.
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.fitting.watching import Spread
from ssla.maths.digests import digest
from ssla.predictive import affine, from_marginal, mixture
from support.networks import TwoInputs, data, mlp

GAUSSIAN = L.Gaussian(noise=0.3)
X, Y = data(60)


@pytest.fixture(scope="module")
def post():
    return ssla.fit(mlp(), (X, Y), likelihood=GAUSSIAN, prior=priors.Gaussian())


# --- gradients -----------------------------------------------------------------------------

NO_GRADIENT = r"gradient would be zero here. Gradients need differentiable=True, .* give x.detach"


def questions(post):
    return {
        "predict": lambda x: post.predict(x).mean,
        "newton": lambda x: post.predict(x, refit="newton").variance,
        "marginal": lambda x: post.marginal(x).mean,
        "increments": lambda x: post.predict(x).increments(Y[:2]).total,
        "ssla": lambda x: ssla.ssla(post, x, Y[:2]).total,
        "assla": lambda x: ssla.assla(post, x, Y[:2]).total,
    }


@pytest.mark.filterwarnings("ignore:`torch.jit")  # of torch.func.jacfwd itself
@pytest.mark.parametrize("name", ["predict", "newton", "marginal", "increments", "ssla", "assla"])
def test_a_gradient_in_x_is_refused_and_not_zero(post, name):
    ask = questions(post)[name]
    with pytest.raises(ValueError, match=NO_GRADIENT):
        ask(X[:2].clone().requires_grad_(True))
    for transform in (
        torch.func.jacrev,
        torch.func.jacfwd,
        lambda f: torch.func.vmap(lambda x: f(x[None])),
    ):
        with pytest.raises(ValueError, match=NO_GRADIENT):
            transform(ask)(X[:2])
    with torch.no_grad():
        free = ask(X[:2].clone().requires_grad_(True))
    assert torch.equal(free, ask(X[:2]))


@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_answers_under_no_grad_are_the_same(weights):
    post = ssla.fit(mlp(), (X, Y), likelihood=GAUSSIAN, prior=priors.Gaussian(), weights=weights)
    with torch.no_grad():
        found = post.predict(X[:2]).variance
    assert torch.equal(found, post.predict(X[:2]).variance)


def test_a_gradient_in_one_part_of_x_is_refused():
    a, b = X[:, :1], X[:, 1:]
    post = ssla.fit(TwoInputs(), ((a, b), Y), likelihood=GAUSSIAN, prior=priors.Gaussian())
    assert post.predict((a, b)).mean.shape == (60,)
    with pytest.raises(ValueError, match=NO_GRADIENT):
        post.predict((a, b.clone().requires_grad_(True)))
    named = ssla.fit(
        TwoInputs(), [({"a": a, "b": b}, Y)], likelihood=GAUSSIAN, prior=priors.Gaussian()
    )
    with pytest.raises(ValueError, match=NO_GRADIENT):
        named.predict({"a": a.clone().requires_grad_(True), "b": b})


def test_a_gradient_in_y_is_refused_where_it_would_be_lost(post):
    gaussian, grid = (
        post.predict(X[:2]),
        from_marginal(L.StudentT(4.0, 0.5), X[:2, :1], torch.ones(2, 1, 1)),
    )
    asks = [
        p.log_prob
        for p in (gaussian, grid, affine(gaussian, 1.0, 2.0), mixture([gaussian, gaussian]))
    ]
    for ask in [
        *asks,
        gaussian.cdf,
        lambda y: gaussian.increments(y).total,
        lambda y: ssla.assla(post, X[:2], y).total,
    ]:
        with pytest.raises(ValueError, match=NO_GRADIENT):
            ask(Y[:2].clone().requires_grad_(True))
        with pytest.raises(ValueError, match=NO_GRADIENT):
            torch.func.grad(lambda y, ask=ask: ask(y).sum())(Y[:2])


def test_rows_of_a_fit_may_carry_a_graph(post):
    graph = ssla.fit(
        mlp(),
        (X.clone().requires_grad_(True), Y.clone().requires_grad_(True) * 1),
        likelihood=GAUSSIAN,
        prior=priors.Gaussian(),
    )
    assert torch.equal(graph.theta, post.theta)


# --- covariances from elsewhere ------------------------------------------------------------


@pytest.mark.parametrize(
    ("K", "message"),
    [
        (
            [[[-0.5]], [[1.0]]],
            r"positive semi-definite .* 1 of 2 are not \(row 0: its smallest eigenvalue is -0.5",
        ),
        ([[[1.0]], [[-1e-3]]], r"positive semi-definite .*row 1"),
        ([[[1.0, 2.0], [2.0, 1.0]]], "positive semi-definite .* eigenvalue is -1"),
        ([[[1.0, 0.5], [-0.2, 1.0]]], "symmetric .* transpose by 0.7"),
        ([[[float("nan")]]], "must be finite"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_no_covariance_is_refused(K, message, dtype):
    K = torch.tensor(K, dtype=dtype)
    noise = L.Gaussian(noise=torch.ones(K.shape[-1]))
    with pytest.raises(ValueError, match=message):
        from_marginal(noise, torch.zeros(K.shape[:2], dtype=dtype), K)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_covariances_that_are_only_rounded_pass(dtype):
    """Singular ones too, in any unit: J Jᵀ of fewer directions than outputs, rounded to the
    dtype.
    """
    J = (
        torch.randn(50, 5, 2, dtype=torch.float64)
        * torch.logspace(-6, 6, 50, dtype=torch.float64)[:, None, None]
    )
    K = (J @ J.mT).to(dtype)
    found = from_marginal(L.Gaussian(noise=torch.ones(5)), torch.zeros(50, 5, dtype=dtype), K)
    assert torch.isfinite(found.log_prob(torch.zeros(50, 5))).all()
    variances = torch.tensor(
        [[[1.0]], [[-1e-17]]], dtype=torch.float64
    )  # 1 − (1 + ε) in a Gaussian process, say
    assert from_marginal(GAUSSIAN, torch.zeros(2, 1).double(), variances).epistemic[1] == 0


# --- conventions ---------------------------------------------------------------------------


def test_conventions_stay_with_rescaled_and_mixed_predictives(post):
    exact = post.predict(X[:2])
    for name in ("paper", "additive"):
        own = post.with_prior(priors.Gaussian(2.0), name).predict(X[:2])
        changed = affine(own, 1.0, 2.0)
        assert changed.diagnostics.convention == changed.increments(Y[:2]).convention == name
        assert mixture([own, own]).diagnostics.convention == name
        assert mixture([own]).increments(Y[:2]).convention == name
        assert mixture([own, exact]).diagnostics.convention == f"{name}, exact"
        assert f"prior {name}, exact:" in str(affine(mixture([own, exact]), 0.0, 2.0).diagnostics)
    assert mixture([exact, exact]).diagnostics.convention == "exact"


# --- digests -------------------------------------------------------------------------------

SCALE = 2.0


def closing_over(value, other=0):
    return lambda y: y * value + other


class Plain:
    def __init__(self, **held):
        vars(self).update(held)


@pytest.mark.parametrize(
    ("make", "same", "unlike"),
    [
        (lambda v: v, (1, 1.0), (1.0, 1.0 + 2**-52)),
        (lambda v: torch.tensor(v), ([1.0, 2.0], [1.0, 2.0]), ([1.0, 2.0], [2.0, 1.0])),
        (lambda v: dict(v), ([("a", 1), ("b", 2)], [("b", 2), ("a", 1)]), ([("a", 1)], [("a", 2)])),
        (closing_over, (0.1, 0.1), (0.1, 0.2)),
        (lambda v: [lambda y: y + SCALE, lambda y: y - SCALE][v], (0, 0), (0, 1)),
        (lambda v: partial(closing_over, v), (1, 1), (1, 2)),
        (lambda v: Plain(a=v, b=torch.ones(2)), (1, 1), (1, 2)),
        (lambda v: torch.distributions.Normal(0.0, v), (1.0, 1.0), (1.0, 1.1)),
        (lambda v: [torch.softmax, torch.sigmoid][v], (0, 0), (0, 1)),
        (lambda v: np.float32(v), (0.5, 0.5), (0.5, 0.25)),
        (lambda v: np.arange(v), (3, 3), (3, 4)),
    ],
)
def test_digests_are_equal_for_equal_content_only(make, same, unlike):
    assert digest(make(same[0])) == digest(make(same[1]))
    assert digest(make(unlike[0])) != digest(make(unlike[1]))


def test_digests_leave_out_caches_and_end_on_cycles():
    one, two = (
        torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2)) for _ in range(2)
    )
    assert two.precision_matrix.shape == (2, 2)
    assert digest(one) == digest(two)
    ring = Plain()
    ring.me = ring
    assert digest(ring) == digest(ring)


# --- outputs that have passed through a link already ----------------------------------------


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


# --- another scale of y --------------------------------------------------------------------


def trained(x=X, y=Y, width=16, steps=300):
    net = mlp(width=width)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(steps):
        optimiser.zero_grad()
        ((net(x).squeeze(1) - y) ** 2).mean().backward()
        optimiser.step()
    return net


@pytest.mark.filterwarnings("ignore:polish moved", "ignore:The network is not at the mode")
@pytest.mark.parametrize(
    ("noise", "options"),
    [
        ("estimate", {"weights": "all"}),
        ("estimate", {}),
        (5.0, {"weights": "all"}),
        (5.0, {"mode": "tilt"}),
    ],
)
def test_targets_on_another_scale_are_warned_about(noise, options):
    net = trained()
    with pytest.warns(
        UserWarning, match="times as large as the spread of the targets.*another scale or unit"
    ):
        post = ssla.fit(
            net,
            (X, 77 * Y + 150),
            likelihood=L.Gaussian(noise=noise),
            prior=priors.Gaussian(),
            **options,
        )
    assert any("spread of the targets" in note for note in post.report.notes)


@pytest.mark.filterwarnings("ignore:The network is")
def test_a_poor_network_is_not_said_to_have_another_scale():
    """Untrained, constant and unlucky ones; and a last layer that is polished to the scale by a
    weak prior.
    """
    for seed in range(20):
        x, y = data(8 + 4 * seed, seed=seed)
        for net in (mlp(seed=seed), mlp(seed=seed, width=200)):
            ssla.fit(
                net,
                (x, y),
                likelihood=GAUSSIAN,
                prior=priors.Gaussian(),
                weights="all",
                structure="diag",
            )
    found = ssla.fit(
        mlp(),
        (X, 77 * Y + 150),
        likelihood=L.Gaussian(noise="estimate"),
        prior=priors.Gaussian(1e-8),
    )
    assert float(found.likelihood.noise) < 60


def test_the_spread_of_shards_is_that_of_all_rows():
    y, f = (
        1e6 + torch.randn(50, 2, dtype=torch.float64),
        1e6 + torch.randn(50, 2, dtype=torch.float64),
    )
    w = torch.rand(50, dtype=torch.float64)
    parts = [
        Spread.of(y[s], f[s], w[s], 1e-16, f[s].abs())
        for s in (slice(0, 7), slice(7, 30), slice(30, 50))
    ]
    merged, mean = parts[0].merge(parts[1].merge(parts[2])), (w @ y) / w.sum()
    assert torch.allclose(merged.mean, mean, rtol=1e-14)
    assert torch.allclose(merged.squares, w @ (y - mean) ** 2, rtol=1e-8)
    assert torch.allclose(merged.missed, w @ (y - f) ** 2, rtol=1e-10)


# --- frozen parameters ---------------------------------------------------------------------


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


def test_a_frozen_body_leaves_the_last_layer_on_workers_too():
    net = mlp()
    net[0].requires_grad_(False)
    last = ssla.fit(net, (X, Y), likelihood=GAUSSIAN, prior=priors.Gaussian())
    with ThreadPoolExecutor(1) as pool:
        shards = [(X[:30], Y[:30]), (X[30:], Y[30:])]
        many = ssla.distributed.fit(
            net, shards, client=pool, likelihood=GAUSSIAN, prior=priors.Gaussian(), weights="all"
        )
    assert torch.allclose(many.theta, last.theta, rtol=1e-10)


# --- half precision ------------------------------------------------------------------------


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


# --- digits --------------------------------------------------------------------------------


def around_a_million(n=400):
    """float32 with a bias of 10⁶, its double, and targets with a noise of 0.01 in float64."""
    x, y = data(n)
    y = 1e6 + 0.05 * torch.sin(x[:, 0]) + 0.01 * torch.randn(n, dtype=torch.float64)
    net = mlp(dtype=torch.float32, width=16)
    with torch.no_grad():
        net[2].weight.zero_()
        net[2].bias.fill_(1e6)
    return net, copy.deepcopy(net).double(), x.float(), y


WEAK = {"prior": priors.Gaussian(1e-6)}


def test_answers_beside_a_large_offset_keep_their_digits():
    net, double, x, y = around_a_million()
    for likelihood in (L.Gaussian(noise=0.01), L.Gaussian(noise="estimate"), L.StudentT(8.0, 0.01)):
        one, two = (
            ssla.fit(m, (x.to(d), y), likelihood=likelihood, gaussian="laplace", **WEAK)
            for m, d in ((net, x.dtype), (double, y.dtype))
        )
        for refit in ("output", "none"):
            a, b = one.predict(x[:50], refit), two.predict(x[:50].double(), refit)
            assert a.mean.dtype == torch.float64
            assert ((a.mean - b.mean) / b.stddev).abs().max() < 1e-3
            assert torch.allclose(
                a.interval(0.9).diff(dim=1), b.interval(0.9).diff(dim=1), rtol=1e-3
            )
        f = one.marginal(x[:50]).mean
        assert f.dtype == torch.float64
        assert (f - two.marginal(x[:50].double()).mean).abs().max() < 1e-5


def test_answers_stay_in_the_models_dtype_where_it_holds_them():
    post = ssla.fit(mlp(dtype=torch.float32), (X, Y), likelihood=GAUSSIAN, prior=priors.Gaussian())
    assert post.predict(X).mean.dtype == post.marginal(X).mean.dtype == torch.float32
    assert (
        mixture([post.predict(X)] * 2).mean.dtype
        == affine(post.predict(X), 100.0, 2.0).mean.dtype
        == torch.float32
    )


def test_an_offset_added_to_a_predictive_keeps_its_digits():
    post = ssla.fit(mlp(dtype=torch.float32), (X, Y), likelihood=GAUSSIAN, prior=priors.Gaussian())
    base, moved = post.predict(X[:9]), affine(post.predict(X[:9]), 1e6, 0.01)
    exact = 1e6 + 0.01 * base.law.log_density.marginal.mean.squeeze(1)
    assert torch.allclose(moved.mean, exact, rtol=0, atol=1e-8)
    assert (
        mixture(
            [base, from_marginal(GAUSSIAN, torch.zeros(9, 1).double(), torch.ones(9, 1, 1))]
        ).mean.dtype
        == torch.float64
    )


@pytest.mark.filterwarnings("ignore:The network is")
def test_a_noise_finer_than_the_rounding_is_warned_about():
    net, double, x, y = around_a_million()
    fine = {"likelihood": L.Gaussian(noise=0.01), **WEAK}
    with pytest.warns(
        UserWarning,
        match=r"noise \(0.01\) is finer than the rounding of the network's outputs, in float32 \(0.119\)",
    ):
        ssla.fit(net, (x, y), weights="all", **fine)
    for model, inputs in ((net, x), (double, x.double())):
        with pytest.warns(UserWarning, match="rounding of the targets.*Give y in float64"):
            ssla.fit(model, (inputs, y.float()), **fine)
    with pytest.warns(
        UserWarning, match="rounding of the targets"
    ):  # the estimate has the rounding in it
        ssla.fit(net, (x, y.float()), likelihood=L.Gaussian(noise="estimate"), **WEAK)
    ssla.fit(double, (x.double(), y), weights="all", **fine)  # nothing to say
    ssla.fit(net, (x, y.float()), weights="all", likelihood=L.Gaussian(noise=1.0), **WEAK)
