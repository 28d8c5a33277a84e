"""Refits of the network linearised at θ̂: against last layers, closed forms, and SciPy with P×P
determinants.
"""

import dataclasses
import math

import pytest
import torch
from scipy.optimize import minimize
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla.refit.weights import linearised_covariance
from ssla.refit.weights.linearised import open_linearised
from ssla.refit.weights.solved import Options
from support.refits import FAMILIES, T, inputs, last_layer, seeded

WEIGHTS = 0.5 + torch.rand(70, dtype=torch.float64, generator=seeded(8))


def options(logdet="exact", tolerance=1e-9):
    return Options(tolerance, 100, "observed", logdet, 6)


def tasks(name):
    candidates = FAMILIES[name][4]
    y = candidates[[0, 1, -1, 1]]
    return torch.tensor([0, 1, 2, 0]), y.long() if name == "categorical" else y


@pytest.mark.parametrize("way", ["weights", "outputs"])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("name", ["gaussian", "poisson", "bernoulli", "categorical"])
def test_a_last_layer_is_refitted_as_by_the_dense_engine(name, weights, way, monkeypatch):
    """f is linear in a last layer: the same modes and the same three increments, by both ways
    to form K.
    """
    monkeypatch.setattr(linearised_covariance, "is_from_outputs", lambda R, P: way == "outputs")
    monkeypatch.setattr(linearised_covariance, "LEAST_WEIGHTS", 4)
    post = last_layer(name, weights=weights, mode="tilt")[0]
    post = dataclasses.replace(post, memory_budget=40_000)  # G is a sum over groups of weights
    x = inputs(3, 6)
    monkeypatch.setattr(
        "ssla.refit.weights.linearised.find_obstacle_to_linearising", lambda *_: None
    )
    refit = open_linearised(post, x, options(), None, single=False)
    dense = ssla.WeightRefit(tolerance=1e-9).open_engine(
        dataclasses.replace(post, memory_budget=1 << 30), x
    )
    where, y = tasks(name)
    answer, expected = refit.solve(where, y), dense.solve(where, y)
    assert bool(answer.converged.all())
    for part in ("likelihood", "prior", "curvature"):
        assert (getattr(answer, part) - getattr(expected, part)).abs().max() < 1e-7
    assert (
        refit.find_weights_at_modes(where, y) - dense.find_weights_at_modes(where, y)
    ).abs().max() < 1e-7


def digits_like(n=60, outputs=3, width=8, dtype=torch.float64, convolutions=False):
    """A network trained by Adam for some steps, not to its end, and its data."""
    torch.manual_seed(0)
    if convolutions:
        net = nn.Sequential(
            nn.Unflatten(1, (1, 6, 6)),
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(54, outputs),
        )
        x = inputs(n, 1, 36).to(dtype)
    else:
        net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, outputs))
        x = inputs(n, 1).to(dtype)
    net = net.to(dtype)
    signal = x[:, :2].sum(1) + 0.5 * torch.randn(n, generator=seeded(2)).to(dtype)
    y = (signal > -0.7).long() + (signal > 0.7).long()
    optimiser = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    return net.eval(), x, y


def fitted(net, x, y, precision=2.0, **settings):
    return ssla.fit(
        net,
        (x, y),
        likelihood=L.Categorical(),
        prior=ssla.priors.Gaussian(precision=precision, mean=0.05),
        weights="all",
        gaussian="laplace",
        mode="tilt",
        **settings,
    )


def by_scipy(net, x, y, new, target, precision):
    """log p(target | new) un-normalised: one refit of the linearised network by SciPy, P×P
    determinants.
    """
    theta = torch.cat([p.detach().flatten() for p in net.parameters()])
    names = [(name, p.shape, p.numel()) for name, p in net.named_parameters()]

    def run(weights, rows):
        parts = weights.split([size for *_, size in names])
        named = {name: v.reshape(shape) for (name, shape, _), v in zip(names, parts, strict=True)}
        return torch.func.functional_call(net, named, (rows,))

    rows = torch.cat([x, new])
    f = run(theta, rows).detach()
    J = torch.func.jacrev(lambda weights: run(weights, rows))(theta).detach()
    labels = torch.cat([y, target])

    def terms(step, count):
        """ℓ + log π of the first rows of the linearised network at θ̂ + step."""
        logits = f[:count] + J[:count] @ step
        log_prob = logits.log_softmax(-1).gather(1, labels[:count, None]).sum()
        return log_prob - 0.5 * precision * ((theta + step - 0.05) ** 2).sum()

    zero = torch.zeros_like(theta)
    g0 = torch.func.grad(lambda step: terms(step, len(x)))(zero)

    def objective(step):
        value = lambda s: -(terms(s, len(rows)) - g0 @ s)
        at = torch.from_numpy(step)
        return float(value(at)), torch.func.grad(value)(at).numpy()

    best = minimize(
        objective, zero.numpy(), jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 5000}
    )
    step = torch.from_numpy(best.x)

    def logdet(step, count):
        p = (f[:count] + J[:count] @ step).softmax(-1)
        Lambda = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
        H = torch.einsum("ncp,ncd,ndq->pq", J[:count], Lambda, J[:count])
        return torch.linalg.slogdet(H + precision * torch.eye(len(theta)))[1]

    total = terms(step, len(rows)) - terms(zero, len(x)) - g0 @ step
    return float(total - 0.5 * (logdet(step, len(rows)) - logdet(zero, len(x))))


@pytest.mark.parametrize("logdet", ["exact", "traces"])
def test_log_densities_are_those_of_scipy(logdet):
    """51 weights and 60 rows, not at a mode; the tilt and a prior that is not centred at zero
    included.
    """
    net, x, y = digits_like()
    post = fitted(net, x, y)
    new, targets = inputs(2, 7), torch.tensor([0, 2])
    refit = ssla.WeightRefit(tolerance=1e-8, linearised=True, logdet=logdet)
    increments = ssla.ssla(post, new, targets, refit)
    total = increments.likelihood + increments.prior + increments.curvature
    for row in range(2):
        expected = by_scipy(net, x, y, new[row : row + 1], targets[row : row + 1], 2.0)
        assert float(total[row]) == pytest.approx(expected, abs=1e-6 if logdet == "exact" else 4e-3)


def test_the_gaussian_predictive_is_the_closed_form():
    """N(f̂, σ² + J H⁻¹ Jᵀ) for Gaussian noise, whatever the network."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 9), nn.Tanh(), nn.Linear(9, 1)).double()
    x = inputs(25, 1)
    y = x[:, 0].sin() + 0.3 * torch.randn(25, dtype=torch.float64, generator=seeded(2))
    prior = ssla.priors.Gaussian(precision=3.0)
    post = ssla.fit(
        net.eval(),
        (x, y),
        likelihood=L.Gaussian(noise=0.3),
        prior=prior,
        weights="all",
        structure="dense",
    )
    new, targets = inputs(3, 7), T(-2.0, 0.1, 1.5)
    increments = ssla.ssla(post, new, targets, ssla.WeightRefit(linearised=True))
    total = increments.likelihood + increments.prior + increments.curvature
    mean, K = post.marginal(new)
    variance = 0.09 + K[:, 0, 0]
    expected = -0.5 * (targets - mean[:, 0]) ** 2 / variance - 0.5 * (2 * math.pi * variance).log()
    assert (total - expected).abs().max() < 1e-9


def test_the_stated_error_of_a_determinant_holds(monkeypatch):
    """Directions are left out, as of a large problem, on rows whose curvature changes a lot."""
    net, x, y = digits_like(n=120)
    post = fitted(net, x, y, precision=0.05)
    new = 2 * inputs(8, 7)
    where, targets = torch.arange(8), torch.arange(8) % 3
    solved = {
        logdet: open_linearised(post, new, options(logdet), None, single=False).solve(
            where, targets
        )
        for logdet in ("exact", "traces", "frozen")
    }
    exact = solved["exact"].curvature
    off = (solved["traces"].curvature - exact).abs()
    error = solved["traces"].error
    assert bool((solved["exact"].error == 0).all())
    assert bool((error > 0).any())
    assert bool((off <= 4 * error + 1e-9).all())
    assert bool((error <= 0.02 + 1e-9).all())
    # What the estimate is for is much larger than its error.
    assert (solved["frozen"].curvature - exact).abs().max() > 20 * error.max()


def test_a_float32_cnn_converges_and_is_not_changed():
    net, x, y = digits_like(n=80, dtype=torch.float32, convolutions=True)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    post = fitted(net, x, y, precision=5.0, structure="kfac")
    new = inputs(6, 7, 36).float()
    answer = post.predict(new, refit=ssla.WeightRefit(linearised=True))
    flags = answer.diagnostics
    assert set(flags.rung) == {"weights"}
    assert not bool(flags.unconverged.any())
    assert bool((flags.refits > 1).all())
    assert bool(flags.linearised.all())
    assert "of the linearised network in 6 rows" in str(flags)
    assert bool(torch.isfinite(answer.mass).all())
    assert answer.probs.sum(1) == pytest.approx(torch.ones(6), abs=1e-5)
    output = post.predict(new)
    assert (answer.probs - output.probs).abs().max() > 1e-3  # it is another answer
    fine = post.predict(new, refit=ssla.WeightRefit(linearised=True, tolerance=1e-8))
    assert (answer.probs - fine.probs).abs().max() < 1e-3  # float32 is enough
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


def saddle():
    """A wide network on few rows under a weak prior, stopped early: its Hessian is indefinite."""
    net, x, y = digits_like(n=60, width=110)
    return fitted(net, x, y, precision=1e-2, structure="kfac")


@pytest.mark.filterwarnings("ignore:The network is not at the mode")
def test_a_network_without_a_mode_is_linearised_with_a_warning(monkeypatch):
    """Refits that are all stuck, as in a large network on few rows."""
    post = saddle()
    new = inputs(5, 7)
    monkeypatch.setattr(
        "ssla.refit.weights.all_weights.AllWeightsRefit.find_stuck",
        lambda self, where, y: torch.ones(len(where), dtype=torch.bool),
    )
    with pytest.warns(
        RuntimeWarning, match="linearised at the trained weights was refitted in its place"
    ):
        answer = post.predict(new, refit="weights")
    assert bool((answer.diagnostics.linearised == (answer.diagnostics.refits > 0)).all())
    assert bool(answer.diagnostics.linearised.any())
    assert set(answer.diagnostics.rung) == {"weights"}
    asked = post.predict(new, refit=ssla.WeightRefit(linearised=True))
    assert torch.equal(answer.probs, asked.probs)
    with pytest.warns(RuntimeWarning, match="use the output rung"):
        never = post.predict(new, refit=ssla.WeightRefit(linearised=False))
    assert never.diagnostics.linearised is None
    assert set(never.diagnostics.rung) == {"output"}


@pytest.mark.filterwarnings("ignore:The network is not at the mode")
def test_beyond_the_memory_budget_the_output_refit_answers_and_the_reason_is_given(monkeypatch):
    post = saddle()
    new = inputs(5, 7)
    small = dataclasses.replace(post, memory_budget=400_000)
    monkeypatch.setattr(
        "ssla.refit.weights.all_weights.AllWeightsRefit.find_stuck",
        lambda self, where, y: torch.ones(len(where), dtype=torch.bool),
    )
    with pytest.warns(
        RuntimeWarning, match=r"use the output rung.*need .* GiB for the covariance of 120 outputs"
    ):
        answer = small.predict(new, refit="weights")
    assert set(answer.diagnostics.rung) == {"output"}
    with pytest.raises(
        ValueError, match=r"need .* GiB for the covariance of 120 outputs.*larger memory_budget"
    ):
        small.predict(new, refit=ssla.WeightRefit(linearised=True))


def test_what_linearised_refits_do_not_support_is_refused_in_words():
    net, x, y = digits_like()
    new = inputs(2, 7)
    post = fitted(net, x, y)
    with pytest.raises(ValueError, match="linearised must be True, False or None"):
        ssla.WeightRefit(linearised="yes")
    with pytest.raises(ValueError, match="no logdet='structure'"):
        post.predict(new, refit=ssla.WeightRefit(linearised=True, logdet="structure"))
    as_is = dataclasses.replace(post, mode="as_is")
    with pytest.raises(ValueError, match="mode='as_is'"):
        as_is.predict(new, refit=ssla.WeightRefit(linearised=True))
