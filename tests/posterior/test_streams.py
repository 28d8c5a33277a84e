"""More data later, and shards: update and merge."""

import copy
import math
import resource
import warnings

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.curvature import LowRank
from support.networks import data, mlp

GAUSSIAN = L.Gaussian(noise=0.3)
X, Y = data(90)
PARTS = [(X[:40], Y[:40]), (X[40:55], Y[40:55]), (X[55:], Y[55:])]


def assert_same(a, b, tolerance=1e-10):
    assert a.report.n == b.report.n
    assert torch.allclose(a.theta, b.theta, atol=tolerance)
    assert torch.allclose(a.marginal(X).covariance, b.marginal(X).covariance, rtol=1e-9)
    assert abs(a.log_evidence() - b.log_evidence()) < 1e-8


def test_update_equals_one_fit_of_all_data():
    whole = ssla.fit(mlp(), (X, Y), likelihood=GAUSSIAN, prior=priors.Gaussian())
    post = ssla.fit(mlp(), PARTS[0], likelihood=GAUSSIAN, prior=priors.Gaussian())
    for part in PARTS[1:]:
        post = post.update(part)
    assert_same(post, whole)
    assert "moved to the mode of all" in str(post.report)


@pytest.mark.filterwarnings("ignore:The network is")
@pytest.mark.parametrize("structure", ["dense", "diag", "kfac", LowRank(rank=40)])
@pytest.mark.parametrize(
    ("likelihood", "options"), [(GAUSSIAN, {"weights": "all"}), (L.Poisson(), {"mode": "tilt"})]
)
def test_merge_is_associative_order_free_and_equal_to_one_fit(structure, likelihood, options):
    target = Y.abs().round() if isinstance(likelihood, L.Poisson) else Y
    options = {
        "likelihood": likelihood,
        "prior": priors.Gaussian(),
        "gaussian": "laplace",
        "structure": structure,
        **options,
    }
    a, b, c = (
        ssla.fit(mlp(), (x, target[: len(X)][s]), **options)
        for (x, _), s in zip(PARTS, (slice(0, 40), slice(40, 55), slice(55, 90)), strict=True)
    )
    whole = ssla.fit(mlp(), (X, target), **options)
    for merged in (a.merge(b).merge(c), a.merge(b.merge(c)), c.merge(a).merge(b)):
        assert_same(merged, whole)
    assert_same(a.update((X[40:], target[40:])), whole)


def test_polished_gaussian_shards_merge_exactly():
    a, b, c = (
        ssla.fit(mlp(), part, likelihood=GAUSSIAN, prior=priors.Gaussian()) for part in PARTS
    )
    whole = ssla.fit(mlp(), (X, Y), likelihood=GAUSSIAN, prior=priors.Gaussian())
    for merged in (a.merge(b).merge(c), c.merge(b).merge(a)):
        assert_same(merged, whole)


def test_a_stream_of_unknown_length():
    def rows():
        yield from PARTS

    assert_same(
        ssla.fit(mlp(), rows(), likelihood=GAUSSIAN, prior=priors.Gaussian()),
        ssla.fit(mlp(), (X, Y), likelihood=GAUSSIAN, prior=priors.Gaussian()),
    )


def test_what_does_not_fit_together_is_refused():
    one = ssla.fit(mlp(), PARTS[0], likelihood=GAUSSIAN, prior=priors.Gaussian())
    for other, message in (
        (
            ssla.fit(mlp(), PARTS[1], likelihood=L.Gaussian(noise=0.5), prior=priors.Gaussian()),
            "likelihoods differ",
        ),
        (
            ssla.fit(mlp(seed=1), PARTS[1], likelihood=GAUSSIAN, prior=priors.Gaussian()),
            "weights differ",
        ),
        (
            ssla.fit(
                mlp(), PARTS[1], likelihood=GAUSSIAN, prior=priors.Gaussian(), structure="diag"
            ),
            "structure differ",
        ),
        (
            ssla.fit(mlp(), PARTS[1], likelihood=GAUSSIAN, prior=priors.Gaussian(2.0)),
            "priors differ",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            one.merge(other)
    counts = [
        ssla.fit(
            mlp(),
            (x, y.abs().round()),
            likelihood=L.Poisson(),
            prior=priors.Gaussian(),
            gaussian="laplace",
        )
        for x, y in PARTS[:2]
    ]
    with pytest.raises(ValueError, match=r"different modes.*mode='tilt'"):
        counts[0].merge(counts[1])


def changed(what):
    net = mlp()
    with torch.no_grad():
        {"body": net[0].weight, "head": net[-1].bias}[what].add_(1e-12)
    return net


def own(width):
    return L.custom(
        lambda y, f: -0.5 * ((y - f[..., 0]) / width) ** 2 - math.log(width) - 0.919, support="real"
    )


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (
            {"net": changed("body")},
            {},
            "networks differ: the layers are equal, but the values of buffers or weights differ",
        ),
        ({"net": changed("head")}, {}, "weights differ"),
        (
            {"net": nn.Sequential(mlp(), nn.Identity()).eval()},
            {},
            "parameters or buffers differ|names differ",
        ),
        (
            {},
            {"likelihood": L.Gaussian(noise=0.3 + 1e-12)},
            "likelihoods differ, if only in digits that are not shown",
        ),
        (
            {"likelihood": L.Tempered(GAUSSIAN, 0.5)},
            {"likelihood": L.Tempered(GAUSSIAN, 0.6)},
            "likelihoods differ",
        ),
        ({"likelihood": own(0.3)}, {"likelihood": own(0.4)}, "likelihoods differ"),
        ({}, {"prior": priors.Gaussian(1 + 1e-12)}, "priors differ"),
        ({"prior": priors.StudentT(3.0)}, {"prior": priors.StudentT(3.1)}, "priors differ"),
        ({"mode": "tilt"}, {"mode": "as_is"}, "mode differ"),
        (
            {"structure": LowRank(3, columns=6)},
            {"structure": LowRank(4, columns=6)},
            "rank=4, tail=0.1",
        ),
        ({}, {"convention": "paper"}, "convention differ"),
    ],
)
def test_merge_refuses_what_differs_in_the_last_digit(one, other, message):
    posts = []
    for part, options in zip(PARTS[:2], (one, other), strict=True):
        settings = {
            "likelihood": GAUSSIAN,
            "prior": priors.Gaussian(),
            "gaussian": "laplace",
            "mode": "tilt",
            **options,
        }
        net, convention = settings.pop("net", None), settings.pop("convention", "exact")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The network is not at the mode")
            post = ssla.fit(mlp() if net is None else net, part, **settings)
        posts.append(
            post if convention == "exact" else post.with_prior(priors.Gaussian(1.0), convention)
        )
    for a, b in (posts, posts[::-1]):
        with pytest.raises(ValueError, match=message):
            a.merge(b)


def test_merge_takes_the_same_settings_written_in_another_way():
    """Two functions with the same code, and one prior by number and by layer."""
    options = [
        {"likelihood": own(0.3), "mode": "tilt", "gaussian": "laplace", "prior": priors.Gaussian()},
        {
            "likelihood": own(0.3),
            "mode": "tilt",
            "gaussian": "laplace",
            "prior": priors.Gaussian({"2": 1}),
        },
    ]
    a, b = (
        ssla.fit(mlp(), part, **settings) for part, settings in zip(PARTS[:2], options, strict=True)
    )
    assert a.merge(b).report.n == 55


# --- ten million rows ----------------------------------------------------------------------


class Rows:
    """Rows that are made as they are read: (x, y) in float32, never held together."""

    def __init__(self, count, batch=100_000):
        self.count, self.batch = count, batch

    def __iter__(self):
        for start in range(0, self.count, self.batch):
            generator = torch.Generator().manual_seed(start)
            x = torch.randn(self.batch, 2, generator=generator)
            yield x, 3 * x[:, 0].sin() + 0.5 * torch.randn(self.batch, generator=generator)


@pytest.mark.filterwarnings("ignore:polish moved")
def test_ten_million_float32_rows_stream_in_flat_memory_to_six_digits():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).eval()
    new = torch.randn(50, 2)
    ssla.fit(
        net, Rows(200_000), likelihood=L.Gaussian(noise=0.5), prior=priors.Gaussian()
    )  # warm up: the libraries' own memory
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    post = ssla.fit(
        net, Rows(10_000_000), likelihood=L.Gaussian(noise=0.5), prior=priors.Gaussian()
    )
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert post.report.n == 10_000_000
    assert grown < 64  # MiB; the rows alone are 114
    # the reference: normal equations in float64, from features in float64
    double = copy.deepcopy(net).double()
    S, b = torch.eye(7, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    with torch.no_grad():
        for x, y in Rows(10_000_000):
            phi = features(double, x)
            S += phi.mT @ phi / 0.25
            b += phi.mT @ y.double() / 0.25
        phi = features(double, new)
    mean, variance = phi @ torch.linalg.solve(S, b), 0.25 + (phi @ torch.linalg.inv(S) * phi).sum(1)
    y = mean + torch.linspace(-2, 2, 50, dtype=torch.float64)
    exact = torch.distributions.Normal(mean, variance.sqrt()).log_prob(y)
    found = post.predict(new)
    assert found.log_prob(y).dtype == torch.float32
    unrounded = ssla.predictive.from_marginal(post.likelihood, *post.outputs_at(new)).log_prob(y)
    assert (unrounded - exact).abs().max() < 1e-6
    assert (found.log_prob(y) - exact).abs().max() < 2e-6  # the answer itself is float32


def features(net, x):
    with torch.no_grad():
        phi = net[1](net[0](x.double()))
    return torch.cat([phi, torch.ones_like(phi[:, :1])], 1)


# --- what the report says afterwards --------------------------------------------------------


@pytest.mark.filterwarnings(
    "ignore:The network is",
    "ignore:The data hold one row",
    "ignore:low_rank",
    "ignore:polish moved",
)
def test_notes_stay_true_when_data_are_added_or_the_prior_is_changed():
    fixed = X[:40].clone()
    fixed[:, 1] = 0.5
    first = ssla.fit(mlp(), (fixed, Y[:40]), likelihood=GAUSSIAN, prior=priors.Gaussian())
    assert "constant input columns: 1" in first.report.notes
    both = first.merge(ssla.fit(mlp(), PARTS[1], likelihood=GAUSSIAN, prior=priors.Gaussian()))
    one = ssla.fit(mlp(), (X[:1], Y[:1]), likelihood=GAUSSIAN, prior=priors.Gaussian())
    for grown in (
        first.update(PARTS[1]),
        both,
        one.update(PARTS[1]),
        ssla.fit(mlp(), PARTS[1], likelihood=GAUSSIAN, prior=priors.Gaussian()).merge(one),
    ):
        assert not any(note.startswith(("constant", "only one row")) for note in grown.report.notes)
        assert any(note.startswith("before data were added: ") for note in grown.report.notes)
        assert grown.report.n == grown.report.weight == grown.statistics.n
    assert sum("data were added" in note for note in both.update(PARTS[2]).report.notes) == 2

    wide = ssla.fit(
        mlp(),
        PARTS[0],
        likelihood=GAUSSIAN,
        prior=priors.Gaussian(),
        weights="all",
        structure=LowRank(rank=2),
    )
    for other in (wide.with_prior(priors.Gaussian(0.01)), wide.update(PARTS[2])):
        (note,) = [note for note in other.report.notes if note.startswith("low_rank")]
        least = float(other.bound_prior.precision(other.theta).min())
        assert f"{100 * other.statistics.curvature.largest_variance_excess(least):.2g}%" in note
        assert note not in wide.report.notes

    right = mlp()(X).squeeze(1).detach() + 0.01 * Y
    strong = ssla.fit(
        mlp(),
        (X, right),
        likelihood=L.Gaussian(noise=0.05),
        prior=priors.Gaussian(1e6),
        mode="polish",
    )
    assert any(note.startswith("polish moved") for note in strong.report.notes)
    assert not any(
        "polish moved" in note for note in strong.with_prior(priors.Gaussian(1e-3)).report.notes
    )
