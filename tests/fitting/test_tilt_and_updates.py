"""Variational Gaussians that must not run away: tilted fits, updates, merges and other priors.

The oracles are SciPy's maximum of the bound over the covariance alone, the fit of all rows, and
the posterior itself by quadrature.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import Tensor, nn

import ssla
from ssla.fitting.variational import BoundAscent
from ssla.likelihoods import (
    Bernoulli,
    Categorical,
    HeteroscedasticGaussian,
    Likelihood,
    NegativeBinomial,
    Poisson,
    StudentT,
)

STRUCTURES = ("dense", "kfac", "diag", "low_rank")
UNIT = ssla.priors.Gaussian(1.0)


def overfitted(
    seed: int, likelihood: Likelihood, decay: float = 0.0, dtype: torch.dtype = torch.float64
) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A 2–6–2 network after 600 steps on 20 rows: far from the mode under a unit prior."""
    torch.manual_seed(seed)
    x = torch.randn(20, 2, dtype=dtype)
    y = torch.sin(x[:, 0]) + 0.2 * torch.randn(20, dtype=dtype)
    outputs = 2 if isinstance(likelihood, HeteroscedasticGaussian) else 1
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).to(dtype)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(600):
        optimiser.zero_grad()
        squares = sum((p**2).sum() for p in model.parameters())
        loss = 0.5 * decay * squares - likelihood.log_prob(y, model(x)).sum()
        loss.backward()
        optimiser.step()
    return model.eval(), x, y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("prior", [UNIT, None], ids=["unit prior", "no prior"])
@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("likelihood", [HeteroscedasticGaussian(), StudentT(4.0, 0.2)], ids=repr)
@pytest.mark.filterwarnings("ignore:The network is not at the mode")
def test_a_tilted_gaussian_stays_at_the_network(
    likelihood: Likelihood, seed: int, prior: ssla.priors.Prior | None, dtype: torch.dtype
) -> None:
    """Intervals were 1e42 wide, the evidence 1e9, and some standard deviations zero."""
    model, x, y = overfitted(seed, likelihood, 0.05, dtype)
    post = ssla.fit(model, (x, y), likelihood=likelihood, prior=prior, weights="all")
    plug_in = likelihood.log_prob(y, model(x).detach()).sum()
    assert post.gaussian == "variational"
    assert torch.equal(post.mean, post.theta)
    predictive = post.predict(x)
    spread = float(y.std())
    widths = predictive.interval(0.9).diff(dim=1)
    assert bool((widths > 0).all())
    assert (
        float(widths.max()) < 8 * spread
    )  # of 3.3 for a normal law with the spread of the targets
    assert bool(torch.isfinite(predictive.stddev).all())
    # The bound is below the average log likelihood, which is below that of weights without doubt.
    assert post.log_evidence() < float(plug_in) + 1.0


def bound_of_covariance(
    factor: Tensor,
    J: Tensor,
    f: Tensor,
    y: Tensor,
    theta: Tensor,
    likelihood: Likelihood,
    tau: float,
) -> Tensor:
    """E log p + E log π + entropy of N(θ̂, L Lᵀ), with 20 Gauss–Hermite nodes an axis of the
    outputs.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    C = f.shape[1]
    z = torch.tensor(list(itertools.product(nodes, repeat=C)))
    w = torch.tensor(
        [math.prod(part) for part in itertools.product(weights / weights.sum(), repeat=C)]
    )
    R = torch.linalg.cholesky(J @ factor @ factor.mT @ J.mT + 1e-13 * torch.eye(C))
    points = f[:, None] + z @ R.mT
    average = likelihood.log_prob(y[:, None].expand(len(y), len(z)), points) @ w
    P = len(theta)
    prior = 0.5 * P * math.log(tau / (2 * math.pi)) - 0.5 * tau * (
        (theta**2).sum() + (factor**2).sum()
    )
    entropy = 0.5 * P * (1 + math.log(2 * math.pi)) + factor.diagonal().abs().log().sum()
    return average.sum() + prior + entropy


@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [
        (HeteroscedasticGaussian(), 2),
        (StudentT(4.0, 0.5), 1),
        (Bernoulli(), 1),
        (NegativeBinomial(0.5), 1),
    ],
    ids=repr,
)
def test_the_covariance_of_a_tilted_fit_has_the_highest_bound(
    likelihood: Likelihood, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SciPy over a Cholesky factor, with autograd: no formula of the library."""
    monkeypatch.setattr(BoundAscent.__init__, "__defaults__", (None, 1e-12, 400, None, None))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 2, dtype=torch.float64, generator=generator)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, outputs)).double().eval()
    y = likelihood.sample(model(x).detach() * 1.5, 1, generator)[0].reshape(12)
    post = ssla.fit(
        model,
        (x, y),
        likelihood=likelihood,
        prior=ssla.priors.Gaussian(0.7),
        mode="tilt",
        gaussian="variational",
    )
    phi = torch.cat([x, torch.ones(12, 1, dtype=torch.float64)], 1)
    J = torch.stack([torch.block_diag(*[row[None]] * outputs) for row in phi])
    P = 3 * outputs
    theta = torch.cat([model[0].weight, model[0].bias[:, None]], 1).detach().flatten()
    low = torch.tril_indices(P, P)

    def objective(values: np.ndarray) -> tuple[float, np.ndarray]:
        entries = torch.tensor(values, requires_grad=True)
        factor = torch.zeros(P, P, dtype=torch.float64).index_put((low[0], low[1]), entries)
        value = -bound_of_covariance(factor, J, model(x).detach(), y, theta, likelihood, 0.7)
        (slope,) = torch.autograd.grad(value, entries)
        return float(value.detach()), slope.numpy()

    start = torch.eye(P, dtype=torch.float64)[low[0], low[1]].numpy() * 0.3
    best = optimize.minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-7})
    factor = torch.zeros(P, P, dtype=torch.float64)
    factor[low[0], low[1]] = torch.tensor(best.x)
    covariance = post.covariance.solve_many(torch.eye(P, dtype=torch.float64))
    torch.testing.assert_close(covariance, factor @ factor.mT, rtol=2e-3, atol=2e-4)
    assert post.log_evidence() == pytest.approx(-best.fun, abs=1e-3)


def two_halves(likelihood: Likelihood, n: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Twice n rows, and a 3–8–C network that was trained on the first half."""
    torch.manual_seed(0)
    x = torch.randn(2 * n, 3, dtype=torch.float64)
    outputs = 3 if isinstance(likelihood, Categorical) else 1
    f = torch.stack([0.8 * x[:, 0], -0.6 * x[:, 1], 0.5 * x[:, 2]], 1)[:, :outputs]
    y = likelihood.sample(f, 1, torch.Generator().manual_seed(0))[0].reshape(2 * n)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)).double()
    optimiser = torch.optim.Adam(model.parameters(), 2e-2)
    for _ in range(200):
        optimiser.zero_grad()
        squares = sum((p**2).sum() for p in model.parameters())
        loss = 0.5 * squares - likelihood.log_prob(y[:n], model(x[:n])).sum()
        loss.backward()
        optimiser.step()
    return model.eval(), x, y


def distance(found: ssla.Posterior, truth: ssla.Posterior, x: Tensor) -> tuple[float, float]:
    """The largest distance of the outputs' means in standard deviations, and the median ratio
    of their variances.
    """
    f, K = truth.marginal(x)
    variance = K.diagonal(dim1=-2, dim2=-1)
    own = found.marginal(x)
    off = float(((own.mean - f) / variance.sqrt()).abs().max())
    return off, float((own.covariance.diagonal(dim1=-2, dim2=-1) / variance).median())


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("n", [100, 20])
@pytest.mark.parametrize("likelihood", [Poisson(), Categorical()], ids=repr)
class TestUpdate:
    """The fit of all rows at once is the oracle.

    Means were up to 93 sd away, variances up to 2.5e28 times as large.
    """

    def test_all_weights(self, likelihood: Likelihood, n: int, structure: str) -> None:
        model, x, y = two_halves(likelihood, n)
        options = {
            "likelihood": likelihood,
            "prior": UNIT,
            "weights": "all",
            "structure": structure,
        }
        half = ssla.fit(model, (x[:n], y[:n]), **options)  # type: ignore[arg-type]
        whole = ssla.fit(model, (x, y), **options)  # type: ignore[arg-type]
        off, ratio = distance(half.update((x[n:], y[n:])), whole, x)
        assert off == 0.0
        assert 0.9 < ratio < 1.1  # the averages of 20 rows were taken under a wider Gaussian

    def test_a_polished_last_layer(self, likelihood: Likelihood, n: int, structure: str) -> None:
        model, x, y = two_halves(likelihood, n)
        options = {
            "likelihood": likelihood,
            "prior": UNIT,
            "mode": "polish",
            "structure": structure,
        }
        half = ssla.fit(model, (x[:n], y[:n]), **options)  # type: ignore[arg-type]
        whole = ssla.fit(model, (x, y), **options)  # type: ignore[arg-type]
        before, _ = distance(half, whole, x)
        off, ratio = distance(half.update((x[n:], y[n:])), whole, x)
        # What is kept of the earlier rows is as good as the structure: its quadratic is not theirs.
        assert off < (0.12 if structure in ("dense", "low_rank") else 1.0) * before
        assert 0.9 < ratio < 1.1


@pytest.mark.parametrize("structure", STRUCTURES)
def test_an_update_raises_the_bound_of_all_rows(structure: str) -> None:
    """The averages of the earlier rows count as a quadratic, with the trace of its curvature."""
    model, x, y = two_halves(Poisson(), 60)
    options = {"likelihood": Poisson(), "prior": UNIT, "mode": "polish", "structure": structure}
    half = ssla.fit(model, (x[:60], y[:60]), **options)  # type: ignore[arg-type]
    whole = ssla.fit(model, (x, y), **options)  # type: ignore[arg-type]
    both = half.update((x[60:], y[60:]))
    slack = 0.3 if structure in ("dense", "low_rank") else 3.0
    assert both.log_evidence() == pytest.approx(whole.log_evidence(), abs=slack)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", [Poisson(), Categorical(), Bernoulli()], ids=repr)
def test_merging_is_free_of_order_and_of_brackets(likelihood: Likelihood, structure: str) -> None:
    """kfac was up to 0.19 sd apart at 40 rows."""
    model, x, y = two_halves(likelihood, 30)
    options = {"likelihood": likelihood, "prior": UNIT, "mode": "tilt", "structure": structure}
    if structure == "low_rank":
        options["structure"] = ssla.structures.LowRank(rank=8)
    parts = [slice(0, 20), slice(20, 40), slice(40, 60)]
    a, b, c = (ssla.fit(model, (x[r], y[r]), **options) for r in parts)  # type: ignore[arg-type]
    left, right, other = a.merge(b).merge(c), a.merge(b.merge(c)), c.merge(b).merge(a)
    for one in (right, other):
        assert torch.equal(left.mean, one.mean)
        torch.testing.assert_close(
            left.marginal(x).covariance, one.marginal(x).covariance, rtol=1e-9, atol=1e-12
        )
    whole = ssla.fit(model, (x, y), **options)  # type: ignore[arg-type]
    off, ratio = distance(left, whole, x)
    assert off == 0.0
    assert 0.8 < ratio < 1.25  # the averages of each third were taken under a wider Gaussian


@pytest.mark.parametrize("structure", STRUCTURES)
def test_another_prior_says_how_the_mean_was_moved(structure: str) -> None:
    """Exact to first order with dense curvature only; others say so, and data= fits again."""
    model, x, y = two_halves(Poisson(), 60)
    options = {"likelihood": Poisson(), "mode": "polish", "structure": structure}
    post = ssla.fit(model, (x, y), prior=UNIT, **options)  # type: ignore[arg-type]
    truth = ssla.fit(model, (x, y), prior=ssla.priors.Gaussian(1.3), **options)  # type: ignore[arg-type]
    kept = post.with_prior(ssla.priors.Gaussian(1.3))
    stays, moved = (distance(p, truth, x)[0] for p in (post, kept))
    approximate = structure in ("kfac", "diag")
    assert ("only approximately" in str(kept.report)) == approximate
    assert moved < (stays if approximate else 0.1 * stays) + 0.01
    again = post.with_prior(ssla.priors.Gaussian(1.3), data=(x, y))
    assert distance(again, truth, x)[0] < 0.02


@pytest.mark.parametrize("structure", ["dense", "kfac"])
@pytest.mark.parametrize(
    "likelihood", [Categorical(), HeteroscedasticGaussian(), StudentT(4.0, 0.5)], ids=repr
)
@pytest.mark.filterwarnings("ignore:The network is not at the mode")
def test_local_sensitivity_of_a_tilted_gaussian_is_that_of_other_priors(
    likelihood: Likelihood, structure: str
) -> None:
    """The mean moved in `with_prior`, while the derivative took it as fixed: off by as much as
    the slope.
    """
    torch.manual_seed(0)
    outputs = {"Categorical": 3, "HeteroscedasticGaussian": 2}.get(type(likelihood).__name__, 1)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double().eval()
    x = torch.randn(40, 2, dtype=torch.float64)
    y = likelihood.sample(model(x).detach(), 1, torch.Generator().manual_seed(0))[0].reshape(40)
    post = ssla.fit(
        model, (x, y), likelihood=likelihood, prior=UNIT, weights="all", structure=structure
    )
    h = 1e-3
    above, below = (
        post.with_prior(ssla.priors.Gaussian(math.exp(k * h))).predict(x[:6]).log_prob(y[:6])
        for k in (1, -1)
    )
    found = ssla.local_sensitivity(post, x[:6], y[:6])
    # Probabilities of classes and their slopes are two sums over the same few nodes, each with its
    # error.
    nodes = 3e-4 if isinstance(likelihood, Categorical) else 0.0
    torch.testing.assert_close(
        found.log_prob, (above - below) / (2 * h), rtol=1e-3, atol=1e-5 + nodes
    )
