"""Predictions follow the unit of the targets: predictive(c·y) = c·predictive(y), for every
likelihood of numbers.

The network's outputs are brought to the unit of the targets exactly, through its last layer. The
oracle is the same fit in unit scale; for Gaussian noise on a last layer also the conjugate
predictive at the prior and the noise that were chosen.
"""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.curvature import Dense

N, TESTS = 60, 7
UNITS = (1e-30, 1e-12, 1e-6, 1e8, 1e12, 1e30)
G = torch.Generator().manual_seed(0)
X = torch.randn(N, 2, generator=G, dtype=torch.float64)
NEW = 2 * torch.randn(TESTS, 2, generator=G, dtype=torch.float64)
NOISE = torch.randn(N, 2, generator=G, dtype=torch.float64)
Y = torch.sin(X[:, 0]) + 0.5 * X[:, 1] + 0.3 * (0.3 + X[:, 1].abs()) * NOISE[:, 0]
OTHER = 3 * torch.cos(X[:, 0]) + X[:, 1] + 0.2 * NOISE[:, 1]
BOTH = torch.stack([Y, OTHER], 1)


def trained(targets: Tensor, log_variance: bool = False) -> nn.Sequential:
    """A tanh network after some training, so that its weights have a scale."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        outputs = 2 if log_variance or targets.dim() == 2 else 1
        module = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).double()
    optimiser = torch.optim.Adam(module.parameters(), lr=0.03)
    for _ in range(150):
        optimiser.zero_grad()
        f = module(X)
        loss = (
            ((f - targets.reshape(f.shape)) ** 2).mean() if not log_variance else -het(f, targets)
        )
        loss.backward()
        optimiser.step()
    return module.eval()


def het(f: Tensor, y: Tensor) -> Tensor:
    return L.HeteroscedasticGaussian().log_prob(y, f).mean()


ONE, TWO, VARYING = trained(Y), trained(BOTH), trained(Y, log_variance=True)


def in_unit(
    module: nn.Sequential, factor: float | list[float], shift: float | list[float] = 0.0
) -> nn.Sequential:
    """The network whose outputs are shift + factor · f."""
    other = copy.deepcopy(module)
    a, b = (torch.as_tensor(value, dtype=torch.float64) for value in (factor, shift))
    with torch.no_grad():
        other[2].weight.mul_(a.reshape(-1, 1))
        other[2].bias.mul_(a).add_(b)
    return other


def fit_in(case: str, c: float, dtype=torch.float64, **settings):
    """The posterior with targets in units of 1/c, and the units of the targets."""
    module, y, unit, likelihood = {
        "gaussian": (in_unit(ONE, c), Y, c, L.Gaussian(noise="estimate")),
        "known noise": (in_unit(ONE, c), Y, c, L.Gaussian(noise=0.3 * c)),
        "student": (in_unit(ONE, c), Y, c, L.StudentT(df=4.0, scale=0.25 * c)),
        "heteroscedastic": (
            in_unit(VARYING, [c, 1.0], [0.0, 2 * math.log(c)]),
            Y,
            c,
            L.HeteroscedasticGaussian(),
        ),
        "two targets": (
            in_unit(TWO, [c, 1 / c]),
            BOTH,
            torch.tensor([c, 1 / c]).double(),
            L.Gaussian(noise="estimate"),
        ),
    }[case]
    data = X.to(dtype), (y * unit).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ssla.fit(module.to(dtype), data, likelihood=likelihood, **settings), unit


def answers(
    case: str, c: float, dtype=torch.float64, tune=None, **settings
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard deviation and 90% interval at new inputs, in unit scale."""
    posterior, unit = fit_in(case, c, dtype, **settings)
    if tune is not None:
        posterior = tune(posterior, unit)
    p = posterior.predict(NEW.to(dtype))
    ends = unit.unsqueeze(-1) if isinstance(unit, Tensor) else unit
    return p.mean.double() / unit, p.stddev.double() / unit, p.interval(0.9).double() / ends


def assert_same(found, expected, tolerance: float) -> None:
    """To the tolerance in standard deviations of the predictive."""
    (mean, sd, ends), (mean_0, sd_0, ends_0) = found, expected
    assert float(((mean - mean_0) / sd_0).abs().max()) < tolerance
    assert float((sd / sd_0 - 1).abs().max()) < tolerance
    assert float(((ends - ends_0) / sd_0.unsqueeze(-1)).abs().max()) < tolerance


CASES = ("gaussian", "known noise", "student", "heteroscedastic", "two targets")


@pytest.mark.parametrize("case", CASES)
def test_predictions_of_a_last_layer_follow_the_unit_of_the_targets(case):
    expected = answers(case, 1.0)
    for c in UNITS:
        assert_same(answers(case, c), expected, 1e-6)


@pytest.mark.parametrize("case", CASES)
def test_predictions_of_all_weights_follow_the_unit_of_the_targets(case):
    """A unit scales the last layer alone, by output: each output of it needs a precision of its
    own.
    """
    settings = {"weights": "all", "gaussian": "laplace"}
    expected = answers(case, 1.0, **settings)
    for c in (1e-12, 0.01, 1e8, 1e12):
        assert_same(answers(case, c, **settings), expected, 1e-6)


@pytest.mark.parametrize("case", ["student", "heteroscedastic"])
def test_variational_gaussians_of_all_weights_follow_the_unit(case):
    expected = answers(case, 1.0, weights="all")
    for c in (1e-12, 0.01, 1e12):
        assert_same(answers(case, c, weights="all"), expected, 1e-6)


@pytest.mark.parametrize("case", ["gaussian", "two targets", "student"])
def test_predictions_in_single_precision_follow_the_unit(case):
    """To the rounding of single precision: the unit is no power of two."""
    expected = answers(case, 1.0, torch.float32)
    for c in (1e-12, 1e8):
        assert_same(answers(case, c, torch.float32), expected, 1e-5)


@pytest.mark.parametrize("structure", ["kfac", "diag"])
def test_other_structures_follow_the_unit(structure):
    for case in (
        "gaussian",
        "student",
        *(["heteroscedastic", "two targets"] if structure == "diag" else []),
    ):
        for weights in ("last_layer", "all"):
            settings = {"structure": structure, "weights": weights}
            assert_same(answers(case, 1e-12, **settings), answers(case, 1.0, **settings), 1e-6)


@pytest.mark.parametrize("c", UNITS)
def test_the_predictive_is_the_conjugate_one_at_the_chosen_prior_and_noise(c):
    """N(φᵀm, φᵀAφ + σ²) from the features, computed in unit scale, where the arithmetic is easy."""
    posterior, _ = fit_in("gaussian", c, mode="polish")
    p, prior = posterior.predict(NEW), posterior.prior
    assert isinstance(prior, priors.Gaussian)
    assert isinstance(posterior.likelihood.noise, float)
    sigma = posterior.likelihood.noise / c
    bound = prior.bind(posterior.network.layout)
    with torch.no_grad():
        phi, new = (
            torch.cat([ONE[1](ONE[0](x)), torch.ones(len(x), 1).double()], 1) for x in (X, NEW)
        )
    tau, centre = torch.diag(bound.scale_precision * c**2), bound.mean / c
    H = phi.mT @ phi / sigma**2 + tau
    m = torch.linalg.solve(H, phi.mT @ Y / sigma**2 + tau @ centre)
    variance = (new @ torch.linalg.inv(H) * new).sum(1) + sigma**2
    assert torch.allclose(p.mean / c, new @ m, rtol=1e-9, atol=1e-9)
    assert torch.allclose(p.stddev / c, variance.sqrt(), rtol=1e-9)


@pytest.mark.parametrize("case", ["gaussian", "student"])
def test_predictions_follow_a_shift_of_the_targets(case):
    """An offset is in the last bias, on which the prior is centred."""
    expected = answers(case, 1.0)
    likelihood = (
        L.StudentT(df=4.0, scale=0.25) if case == "student" else L.Gaussian(noise="estimate")
    )
    p = ssla.fit(in_unit(ONE, 1.0, 1e5), (X, Y + 1e5), likelihood=likelihood).predict(NEW)
    assert_same((p.mean - 1e5, p.stddev, p.interval(0.9) - 1e5), expected, 1e-6)


@pytest.mark.parametrize("objective", ["evidence", "nll", "crps"])
@pytest.mark.parametrize("case", ["gaussian", "student"])
def test_tuning_follows_the_unit_of_the_targets(case, objective):
    """From a prior that knows the unit; crps itself is in that unit, and log densities are
    shifted by it.
    """

    def tune(posterior, unit):
        data = None if objective == "evidence" else (X[::2], Y[::2] * unit)
        return posterior.tune(objective, data=data)

    expected = answers(case, 1.0, tune=tune)
    # A search by a score ends where a step gains less than 1e-9: within about its root of the
    # maximum.
    tolerance = 1e-5 if objective == "evidence" else 1e-4
    for c in (1e-12, 1e12):
        assert_same(answers(case, c, tune=tune), expected, tolerance)


def test_the_evidence_finds_the_same_precision_from_a_prior_that_ignores_the_unit():
    """The range of the search is around the trained weights' scale and not around 1."""
    found = []
    for c in (1.0, 1e-9, 1e9):
        posterior, _ = fit_in("known noise", c, prior=priors.Gaussian(1.0))
        tuned = posterior.tune(over="prior")
        assert not tuned.tuning_history.at_bound
        found.append(float(tuned.tuning_history.points[-1, 0]) * c**2)
    assert found[1:] == pytest.approx(2 * found[:1], rel=1e-6)


@pytest.mark.parametrize("case", ["student", "heteroscedastic"])
def test_refits_of_the_weights_follow_the_unit(case):
    """log p(c·y) = log p(y) − log c.

    Beyond what single precision holds, refits are in double precision throughout.
    """
    y = torch.linspace(-2.0, 3.0, 5, dtype=torch.float64)
    x = NEW[:1].expand(5, 2)
    expected = ssla.ssla(fit_in(case, 1.0)[0], x, y).total
    for c in (1e-30, 1e-12, 1e12):
        found = ssla.ssla(fit_in(case, c)[0], x, c * y).total
        assert torch.allclose(found + math.log(c), expected, rtol=0, atol=1e-6)


def test_the_positive_part_of_a_curvature_follows_the_units_of_its_parameters():
    """D S₊ D for D S D: parameters in units of 1e-12 keep their part."""
    A = torch.randn(6, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    S = A + A.mT + 2 * torch.eye(6, dtype=torch.float64)
    unit = torch.tensor([1.0, 1.0, 1.0, 1e-12, 1e-12, 1e-12], dtype=torch.float64)
    plain = Dense(False, S, (), 6).positive_part().as_matrix()
    other = Dense(False, S * unit * unit[:, None], (), 6).positive_part().as_matrix()
    assert float(torch.linalg.eigvalsh(S)[0]) < -0.1
    assert float(torch.linalg.eigvalsh(plain)[0]) > -1e-12
    assert torch.allclose(other / unit / unit[:, None], plain, rtol=1e-9, atol=1e-9)


def test_each_output_of_the_last_layer_has_its_own_precision_with_all_weights():
    posterior, _ = fit_in("heteroscedastic", 0.01, weights="all", gaussian="laplace")
    names = posterior.tuning_history.names
    assert names == ("precision of 0", "precision of output 0", "precision of output 1")
    start = posterior.tuning_history.points[0]
    squares = torch.stack([0.01 * VARYING[2].weight[0], VARYING[2].weight[1]]).square().mean(1)
    assert torch.allclose(start[1:], 1 / squares.detach())


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e6])
def test_targets_of_any_scale(scale):
    """With a prior that fits the scale of the weights the answer scales with the targets."""
    x = torch.randn(60, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = x[:, 0] + 0.3 * torch.randn(
        60, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    one = ssla.fit(model, (x, y), likelihood=L.Gaussian(noise="estimate"), prior=priors.Gaussian())
    scaled = ssla.fit(
        model,
        (x, scale * y),
        likelihood=L.Gaussian(noise="estimate"),
        prior=priors.Gaussian(1 / scale**2),
    )
    assert torch.allclose(scaled.predict(x).stddev / scale, one.predict(x).stddev, rtol=1e-6)
