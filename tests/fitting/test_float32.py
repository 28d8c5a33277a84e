"""Tuning of float32 networks, as users have them: it ends, it is never worse, and it agrees with
float64.

Every structure, Gaussian, likelihood and objective. The oracles are the same network in float64
and, for held-out scores, `predict` of the tuned posterior, which computes in the network's dtype
and does not share the code of the search.
"""

import copy
import warnings

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla.fitting.held_out_scores import INDEFINITE, HeldOutScore
from ssla.maths.bfgs import maximise_in_box

ROWS, NEW = 12, 6
ACCURACY = (
    2e-5  # of 1 + |score|: errors of 1e-7 in features and outputs, times a few tens of parameters
)
MOST = 400  # evaluations; a search by two coordinates takes about 100

# name: (likelihood, outputs, kind of target)
LIKELIHOODS = {
    "gaussian": (L.Gaussian(noise="estimate"), 1, "real"),
    "heteroscedastic": (L.HeteroscedasticGaussian(), 2, "real"),
    "student": (L.StudentT(df=4.0, scale=0.3), 1, "real"),
    "poisson": (L.Poisson(), 1, "count"),
    "negative binomial": (L.NegativeBinomial(dispersion=0.3), 1, "count"),
    "bernoulli": (L.Bernoulli(), 1, "binary"),
    "3 classes": (L.Categorical(), 3, "class"),
    "10 classes": (L.Categorical(), 10, "class"),
}
STRUCTURES = ("dense", "kfac", "diag", "low_rank")
GAUSSIANS = ("laplace", "variational")
SLOW = (
    "negative binomial",
    "student",
    "poisson",
    "heteroscedastic",
)  # their predictives need a search over y


def problem(outputs, kind, rows=ROWS + NEW):
    """A float32 network with random weights, and rows that it half explains."""
    generator = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).eval()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.7 * torch.randn(p.shape, generator=generator))
    x = torch.randn(rows, 3, generator=generator)
    with torch.no_grad():
        f = module(x) + 0.5 * torch.randn(rows, outputs, generator=generator)
    y = {
        "real": f[:, 0],
        "count": torch.poisson(f[:, 0].exp(), generator=generator),
        "binary": (torch.rand(rows, generator=generator) < torch.sigmoid(f[:, 0])).float(),
        "class": f.argmax(1),
    }[kind]
    return module, x, y


def in_dtype(dtype, module, x, y):
    y = y.to(dtype) if y.is_floating_point() else y
    return (
        copy.deepcopy(module).to(dtype),
        (x[:ROWS].to(dtype), y[:ROWS]),
        (x[ROWS:].to(dtype), y[ROWS:]),
    )


def options(objective, train, new):
    return {"nll": {"data": new}, "crps": {"data": new}, "folds": {"data": train, "folds": 2}}.get(
        objective, {}
    )


def quiet(function, *args, **kwargs):
    """Few rows end at edges and warn about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def objectives(name, structure, gaussian):
    """The evidence and nll always.

    Slow likelihoods take each of the others with one pair of structure and Gaussian.
    """
    others = (
        ("loo", "crps", "folds") if LIKELIHOODS[name][2] in ("real", "count") else ("loo", "folds")
    )
    if name in SLOW:
        place = STRUCTURES.index(structure) + len(STRUCTURES) * GAUSSIANS.index(gaussian)
        others = tuple(
            objective
            for k, objective in enumerate(others)
            if place == (3 * k + 2 * SLOW.index(name) + 4) % 8
        )
    return ("evidence", "nll", *others)


def check_tuning(name, structure, gaussian, objective, posts, data):
    """Of float32 and float64 posteriors, with (train, new) of each."""
    asked = "nll" if objective == "folds" else objective
    tuned, exact = (
        quiet(post.tune, asked, **options(objective, *rows))
        for post, rows in zip(posts, data, strict=True)
    )
    values, truth = tuned.tuning_history.values, exact.tuning_history.values
    room = ACCURACY * (1 + float(truth[-1].abs()))
    assert float(values[-1]) >= float(values[0]) - 1e-6 * (1 + abs(float(values[0])))
    assert abs(float(values[-1] - truth[-1])) <= room
    assert tuned.tuning_history.evaluations <= MOST
    assert tuned.tuning_history.converged == exact.tuning_history.converged
    if objective != "nll":
        return
    reached, expected = (
        float(quiet(post.predict, x).log_prob(y).double().mean())
        for post, (_, (x, y)) in zip((tuned, exact), data, strict=True)
    )
    # Rounding errors decide whether the ascent to the last Gaussian takes one round more, where the
    # bound is flat: float32 may end anywhere on the way that float64 went, from its search's score.
    last_ascent = 0.0 if gaussian == "laplace" else abs(expected - float(truth[-1]))
    assert abs(reached - expected) <= room + last_ascent
    if (
        gaussian == "laplace" and name != "heteroscedastic"
    ):  # whose score is an integral, and whose predictive a refit
        assert abs(reached - float(values[-1])) <= room


@pytest.mark.parametrize("gaussian", GAUSSIANS)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_float32_networks_are_tuned_as_float64_ones(name, structure, gaussian):
    likelihood, outputs, kind = LIKELIHOODS[name]
    cases = [in_dtype(dtype, *problem(outputs, kind)) for dtype in (torch.float32, torch.float64)]
    posts = [
        quiet(
            ssla.fit, module, train, likelihood=likelihood, structure=structure, gaussian=gaussian
        )
        for module, train, _ in cases
    ]
    for objective in objectives(name, structure, gaussian):
        check_tuning(name, structure, gaussian, objective, posts, [case[1:] for case in cases])


def trained(width, classes, seed, rows=300, new=200):
    """A float32 classifier after 200 steps of training, with the rows of its training and
    others.
    """
    torch.manual_seed(seed)
    x = torch.randn(rows + new, 5)
    y = (x @ torch.randn(5, classes) + torch.randn(rows + new, classes)).argmax(1)
    module = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, classes))
    weights = list(module.parameters())
    for _ in range(200):
        slopes = torch.autograd.grad(
            nn.functional.cross_entropy(module(x[:rows]), y[:rows]), weights
        )
        with torch.no_grad():
            for weight, slope in zip(weights, slopes, strict=True):
                weight -= 0.5 * slope
    return module.eval(), (x[:rows], y[:rows]), (x[rows:], y[rows:])


@pytest.mark.parametrize(("width", "classes", "seed"), [(32, 4, 3), (10, 12, 0)])
def test_a_held_out_search_of_132_parameters_ends(width, classes, seed, monkeypatch):
    """At the mode, in float32.

    Differences of float32 scores led the search on and on: it did not end in 400 s.
    """
    module, train, new = trained(width, classes, seed)
    post = ssla.fit(module, train, likelihood=L.Categorical(), gaussian="laplace")
    score, calls = HeldOutScore.__call__, []

    def counted(self, space, point):
        calls.append(point)
        assert len(calls) <= 60
        return score(self, space, point)

    monkeypatch.setattr(HeldOutScore, "__call__", counted)
    history = quiet(post.tune, "nll", data=new).tuning_history
    assert post.report.parameters == 132
    assert history.converged
    assert float(history.values[-1]) > float(history.values[0])


def test_folds_take_the_positive_part_of_an_indefinite_curvature_and_say_so():
    """Mean and log variance: averages of Λ over some rows are indefinite where those over all
    rows are not.
    """
    module, x, y = problem(2, "real", 24)
    post = quiet(
        ssla.fit,
        module,
        (x[:16], y[:16]),
        likelihood=L.HeteroscedasticGaussian(),
        structure="dense",
    )
    history = quiet(post.tune, "nll", data=(x[:16], y[:16]), folds=2).tuning_history
    assert INDEFINITE in history.notes
    assert float(history.values[-1]) >= float(history.values[0])


class TestAscent:
    """`maximise` on functions whose maximum is known."""

    LOW, HIGH = (
        torch.tensor([-12.0], dtype=torch.float64),
        torch.tensor([12.0], dtype=torch.float64),
    )

    @staticmethod
    def bell(point):
        """exp(−t²/2) is convex beyond one standard deviation: its slope is 1.3e-3 at −4."""
        value = torch.exp(-0.5 * point**2)
        return float(value), -point * value

    def test_it_does_not_creep_where_the_function_is_convex(self):
        start = torch.tensor([-4.0], dtype=torch.float64)
        for scale in (None, torch.ones(1, dtype=torch.float64)):
            found = maximise_in_box(
                self.bell, start, self.LOW, self.HIGH, scale, tolerance=1e-6, rounds=100
            )
            assert found.converged
            assert found.value == pytest.approx(1.0, abs=1e-10)
            assert found.evaluations <= 30

    def test_it_does_not_search_among_errors(self):
        """A bell with errors of ±1e-9 in its values and ±1e-5 in its slopes, as differences
        over 1e-4 give.
        """
        generator = torch.Generator().manual_seed(0)

        def noisy(point):
            value, slope = self.bell(point)
            errors = 2 * torch.rand(2, dtype=torch.float64, generator=generator) - 1
            return value + 1e-9 * float(errors[0]), slope + 1e-5 * errors[1]

        start = torch.tensor([-3.0], dtype=torch.float64)
        found = maximise_in_box(
            noisy, start, self.LOW, self.HIGH, tolerance=1e-8, noise=1e-9, rounds=100
        )
        assert found.converged
        assert found.value == pytest.approx(1.0, abs=1e-8)
        assert found.evaluations <= 60
