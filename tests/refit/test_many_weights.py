"""Refits of more weights than have matrices of their own: float32 first, then float64."""

import dataclasses
import signal

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla.refit.weights.anderson import Slope, ascend
from support.refits import inputs, seeded

LAWS = {
    "gaussian": (1, lambda: L.Gaussian(noise=0.3), lambda s, e: s + 0.3 * e, [-0.6, 0.9]),
    "heteroscedastic": (2, L.HeteroscedasticGaussian, lambda s, e: s + 0.3 * e, [-0.6, 0.9]),
    "poisson": (1, L.Poisson, lambda s, e: torch.poisson(s.exp(), generator=seeded(4)), [0.0, 2.0]),
    "bernoulli": (1, L.Bernoulli, lambda s, e: (s + e > 0).double(), [0.0, 1.0]),
    "categorical": (
        3,
        lambda: L.Categorical(),
        lambda s, e: (s + e > 0).long() + (s + e > 1).long(),
        [0.0, 2.0],
    ),
}


def engine(name, tolerance, **options):
    """538 weights or more at the mode of 80 rows, under a strong prior."""
    outputs, law, target, candidates = LAWS[name]
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(2, 21), nn.Tanh(), nn.Linear(21, 21), nn.Tanh(), nn.Linear(21, outputs)
    ).double()
    x = inputs(80, 1)
    y = target(x[:, 0].sin(), torch.randn(80, dtype=torch.float64, generator=seeded(2)))
    likelihood, prior = law(), ssla.priors.Gaussian(precision=10.0)
    optimiser = torch.optim.LBFGS(
        net.parameters(), max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-9
    )

    def loss():
        optimiser.zero_grad()
        value = -likelihood.log_prob(y, net(x)).sum() + 5 * sum(
            (p**2).sum() for p in net.parameters()
        )
        value.backward()
        return value

    optimiser.step(loss)
    post = ssla.fit(
        net.eval(), (x, y), likelihood=likelihood, prior=prior, weights="all", gaussian="laplace"
    )
    where, kind = torch.tensor([0, 0, 1, 1]), torch.long if name == "categorical" else torch.float64
    made = ssla.WeightRefit(tolerance=tolerance, **options).open_engine(post, inputs(2, 7))
    return made, where, torch.tensor(candidates * 2).to(kind)


@pytest.mark.parametrize(
    ("name", "tolerance", "enough"),
    [
        ("gaussian", 1e-8, 1e-8),
        ("bernoulli", 1e-8, 1e-8),
        ("categorical", 1e-8, 1e-8),
        ("heteroscedastic", 1e-3, 1e-5),  # nearly flat directions: 1e-8 takes hundreds of gradients
        ("poisson", 1e-3, 1e-5),
    ],
)
def test_float32_with_a_float64_finish_ends_where_float64_ends(name, tolerance, enough):
    """Against the same ascent in float64 through `vmap`."""
    refit, where, y = engine(name, tolerance)
    assert refit.networks.chain is not None
    assert 0 < refit.float32_rounding < 1e-3
    plain = dataclasses.replace(refit, networks=dataclasses.replace(refit.networks, chain=None))
    plain.__dict__["float32_rounding"] = float("inf")  # no float32
    found, expected = refit.solve(where, y), plain.solve(where, y)
    assert bool(expected.converged.all())
    assert bool(found.converged.all())
    assert bool((found.norm <= tolerance).all())
    assert (found.total - expected.total).abs().max() < enough


def test_float64_decides_whether_a_refit_has_converged():
    refit, where, y = engine("gaussian", 1e-3)
    point = (refit.find_weights_at_modes(where, y) - refit.posterior.theta).double()
    from_scratch = dataclasses.replace(
        refit, networks=dataclasses.replace(refit.networks, chain=None)
    )
    solved = refit.solve(where, y)
    theta = refit.posterior.theta + point
    gradient = from_scratch.networks.compute_gradients(
        theta, refit.x[where], lambda f: refit.new_likelihood.score(y, f), one_row_each=True
    )[0]
    for block in refit.rows:
        gradient = (
            gradient
            + from_scratch.networks.compute_gradients(
                theta, block.x, lambda f, b=block: refit.posterior.likelihood.score(b.y, f)
            )[0]
        )
    gradient = gradient - refit.gradient - 10.0 * point
    assert bool(solved.converged.all())
    assert bool(((gradient * refit.precondition(gradient)).sum(-1).sqrt() < 2e-3).all())


def test_a_refit_does_not_take_more_gradients_than_it_may():
    refit, where, y = engine("gaussian", 1e-8, max_steps=5)
    solved = refit.solve(where, y)
    assert not bool(solved.converged.any())
    assert (
        int(solved.steps.max()) <= 6
    )  # the last one, in float64, gives the distance from the mode


@pytest.fixture
def ctrl_c():
    """Python's own handler of SIGINT: a shell starts a job in the background with the signal
    ignored.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_keeps_what_is_done():
    refit, where, y = engine("gaussian", 1e-8)
    ended = 0

    def progress(done):
        nonlocal ended
        ended += done
        if not refit.interrupted.asked and (ended or done):
            signal.raise_signal(signal.SIGINT)

    with pytest.warns(RuntimeWarning, match="interrupted: [1-4] of 4 under way were finished"):
        solved = refit.solve(where, y, progress)
    assert bool(solved.converged.any())
    later = refit.solve(where, y)
    assert not bool(later.converged.any())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_weak_directions_take_few_steps_also_when_float64_continues_float32():
    """A quadratic of six distinct eigenvalues, the least a 32nd of the preconditioner: few
    mixed steps.
    """
    H = torch.diag(torch.tensor([1.0, 2, 4, 8, 16, 32, 32, 32], dtype=torch.float64).repeat(5))
    mode = torch.randn(3, 40, dtype=torch.float64, generator=seeded(1))

    def evaluate(point, tasks):
        gradient = (mode[tasks] - point.double()) @ H
        return Slope(gradient.to(point.dtype), (gradient / 32).to(point.dtype))

    zero = torch.zeros(3, 40, dtype=torch.float32)
    first = ascend(evaluate, zero, tolerance=1e-2, max_steps=50, memory=12)
    both = ascend(
        evaluate, first.point.double(), tolerance=1e-9, max_steps=50, memory=12, earlier=first
    )
    assert bool(both.converged.all())
    assert (both.point - mode).abs().max() < 1e-8
    assert int(both.steps.max()) <= 20
