"""Posteriors as BoTorch models: moments against J H⁻¹ Jᵀ by hand, gradients, conditioning
against fits on all rows, fantasies.
"""

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

import ssla
from ssla import likelihoods, priors
from ssla.network.layout import make_contiguous_layout
from support.networks import data, mlp

pytest.importorskip("botorch", reason="needs BoTorch: pip install 'ssla[botorch]'")

from botorch.acquisition import PosteriorMean, qLogExpectedImprovement, qUpperConfidenceBound
from botorch.acquisition.knowledge_gradient import qKnowledgeGradient
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.optim import optimize_acqf, optimize_acqf_mixed
from botorch.sampling import SobolQMCNormalSampler
from botorch.test_functions import Branin
from scipy.optimize import minimize

from ssla.botorch import SSLAModel, train
from ssla.integrations import cosine_networks

SCALE, OFFSET = torch.tensor([3.0, 0.5]).double(), torch.tensor([-2.0, 7.0]).double()
LINEAR = ("last_layer", "dense")
CASES = [LINEAR, ("last_layer", "kfac"), ("all", "dense"), ("all", "kfac"), ("all", "diag")]


def points(*shape, seed=3):
    return torch.randn(
        *shape, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def fitted(weights="last_layer", structure="dense", outputs=1, rows=40):
    x, y = data(rows)
    targets = y if outputs == 1 else torch.stack([y, x[:, 1] * y], 1)
    noise = 0.3 if outputs == 1 else torch.tensor([0.3, 0.4])
    return ssla.fit(
        mlp(outputs=outputs),
        (x, targets),
        likelihood=likelihoods.Gaussian(noise),
        prior=priors.Gaussian(2.0),
        weights=weights,
        structure=structure,
    )


def by_hand(posterior, X):
    """The mean (q·m,), and J H⁻¹ Jᵀ with autograd's J and the inverse of the P×P matrix that
    the sums and the prior make.
    """
    layout, network = posterior.network.layout, mlp(outputs=posterior.network.outputs)
    f = lambda theta: functional_call(network, layout.unpack(theta), X).flatten()
    J = torch.autograd.functional.jacobian(f, posterior.theta)
    eye = torch.eye(layout.size, dtype=torch.float64)
    S = torch.stack([posterior.statistics.curvature.push(column) for column in eye], 1)
    return f(posterior.theta), J @ torch.linalg.inv(S + 2.0 * eye) @ J.mT


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize(("weights", "structure"), CASES)
def test_moments_equal_brute_force_in_every_batch(weights, structure, outputs):
    posterior = fitted(weights, structure, outputs)
    model, X = SSLAModel(posterior, offset=OFFSET[:outputs], scale=SCALE[:outputs]), points(2, 5, 4)
    found, noisy = model.posterior(X), model.posterior(X, observation_noise=True)
    assert found.mean.shape == found.variance.shape == (2, 5, 4, outputs)
    stretch = SCALE[:outputs].repeat(4)
    sigma = torch.diag(torch.tensor([0.3, 0.4], dtype=torch.float64)[:outputs] ** 2)
    for i in range(2):
        for j in range(5):
            mean, K = by_hand(posterior, X[i, j])
            expected = stretch[:, None] * K * stretch
            torch.testing.assert_close(
                found.mean[i, j], OFFSET[:outputs] + SCALE[:outputs] * mean.view(4, outputs)
            )
            torch.testing.assert_close(
                found.distribution.covariance_matrix[i, j], expected, rtol=1e-7, atol=1e-9
            )
            more = stretch[:, None] * (K + torch.block_diag(*[sigma] * 4)) * stretch
            torch.testing.assert_close(
                noisy.distribution.covariance_matrix[i, j], more, rtol=1e-7, atol=1e-9
            )


def test_the_moments_are_those_of_predict():
    posterior, X = fitted(), points(6)
    found = SSLAModel(posterior).posterior(X[:, None], observation_noise=True)
    predictive = posterior.predict(X)
    torch.testing.assert_close(found.mean[:, 0, 0], predictive.mean)
    torch.testing.assert_close(found.variance[:, 0, 0], predictive.variance)


def test_given_noise_and_chosen_outputs():
    model, X = SSLAModel(fitted(outputs=2), scale=SCALE), points(3, 4)
    plain = model.posterior(X)
    noise = torch.rand(3, 1, 2, dtype=torch.float64)
    torch.testing.assert_close(
        model.posterior(X, observation_noise=noise).variance, plain.variance + noise
    )
    second = model.posterior(X, output_indices=[1])
    torch.testing.assert_close(second.mean, plain.mean[..., 1:])
    block = plain.distribution.covariance_matrix.view(3, 4, 2, 4, 2)[:, :, 1, :, 1]
    torch.testing.assert_close(second.distribution.covariance_matrix, block)
    both = model.posterior(
        X, posterior_transform=ScalarizedPosteriorTransform(torch.tensor([1.0, -2.0]).double())
    )
    torch.testing.assert_close(both.mean[..., 0], plain.mean @ torch.tensor([1.0, -2.0]).double())


@pytest.mark.parametrize(("weights", "structure"), CASES)
def test_gradients_of_mean_and_covariance(weights, structure):
    model = SSLAModel(fitted(weights, structure), scale=2.0)
    given = model.condition_on_observations(
        points(2, seed=5)[None], torch.tensor([[[0.5], [-1.0]]]).double()
    )
    X = points(2, 3).requires_grad_(True)
    for some in (model, given):
        moments = lambda x, some=some: (
            some.posterior(x).mean,
            some.posterior(x).distribution.covariance_matrix,
        )
        assert torch.autograd.gradcheck(moments, X)


@pytest.mark.parametrize("structure", ["dense", "kfac"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_conditioning_a_last_layer_equals_a_fit_on_all_rows(outputs, structure):
    """By `update`, and in batches by the Gaussian of f: both are exact for a linear model with
    Gaussian noise.
    """
    x, y = data(40)
    targets = y[:, None] if outputs == 1 else torch.stack([y, x[:, 1] * y], 1)
    noise = 0.3 if outputs == 1 else torch.tensor([0.3, 0.4])
    offset, scale, options = (
        OFFSET[:outputs],
        SCALE[:outputs],
        {"prior": priors.Gaussian(2.0), "structure": structure},
    )

    def model(n):
        rows = (x[:n], targets[:n].squeeze(1) if outputs == 1 else targets[:n])
        return SSLAModel(
            ssla.fit(mlp(outputs=outputs), rows, likelihood=likelihoods.Gaussian(noise), **options),
            offset=offset,
            scale=scale,
        )

    part, X, Y = model(34), points(2, 3), offset + scale * targets
    expected = model(40).posterior(X).distribution
    updated = part.condition_on_observations(x[34:], Y[34:])
    assert updated.fitted.report.n == 40
    assert updated.observations is None
    batches = part.condition_on_observations(x[None, 34:], Y[None, 34:])
    twice = part.condition_on_observations(
        x[None, 34:36], Y[None, 34:36]
    ).condition_on_observations(x[36:], Y[36:])
    for found in (updated, batches, twice):
        law = found.posterior(X).distribution
        torch.testing.assert_close(law.mean, expected.mean, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(
            law.covariance_matrix, expected.covariance_matrix, rtol=1e-6, atol=1e-9
        )


def test_conditioning_all_weights_is_that_of_the_gaussian_of_f():
    """Against the formulas with J H⁻¹ Jᵀ by hand, with the likelihood's noise and with a given
    one.
    """
    posterior, X, rows, Y = (
        fitted("all"),
        points(2),
        points(3, seed=8),
        torch.tensor([[0.1], [0.9], [-0.4]]).double(),
    )
    mean, K = by_hand(posterior, torch.cat([rows, X]))
    for noise in (None, torch.tensor([[0.5], [0.1], [2.0]]).double()):
        sigma = torch.diag(torch.full((3,), 0.09).double() if noise is None else noise[:, 0])
        gain = K[3:, :3] @ torch.linalg.inv(K[:3, :3] + sigma)
        found = SSLAModel(posterior).condition_on_observations(rows, Y, noise=noise).posterior(X)
        torch.testing.assert_close(found.mean[:, 0], mean[3:] + gain @ (Y[:, 0] - mean[:3]))
        torch.testing.assert_close(
            found.distribution.covariance_matrix, K[3:, 3:] - gain @ K[:3, 3:]
        )


@pytest.mark.parametrize("outputs", [1, 2])
def test_fantasies(outputs):
    """(fantasies, batch, q, m), and each is the model that was conditioned on that fantasy
    alone.
    """
    model, X, at = SSLAModel(fitted(outputs=outputs), scale=2.0), points(5, 2), points(5, 3, seed=9)
    sampler = SobolQMCNormalSampler(torch.Size([4]), seed=0)
    fantasies = model.fantasize(X, sampler)
    assert fantasies.batch_shape == (4, 5)
    found = fantasies.posterior(at)
    assert found.mean.shape == found.variance.shape == (4, 5, 3, outputs)
    assert fantasies.posterior(at[0]).mean.shape == (4, 5, 3, outputs)
    Y = sampler(model.posterior(X, observation_noise=True))
    for k, b in ((0, 0), (3, 2)):
        alone = model.condition_on_observations(X[b], Y[k, b]).posterior(at[b])
        torch.testing.assert_close(found.mean[k, b], alone.mean)
        torch.testing.assert_close(found.variance[k, b], alone.variance)
    known = model.fantasize(X, sampler, observation_noise=torch.full((1, outputs), 0.2).double())
    assert known.posterior(at).mean.shape == (4, 5, 3, outputs)


def test_acquisition_functions_are_optimised_and_repeat_bit_by_bit():
    model, bounds = SSLAModel(fitted()), torch.tensor([[-2.0] * 3, [2.0] * 3]).double()
    sampler = SobolQMCNormalSampler(torch.Size([16]), seed=0)
    options = {
        "bounds": bounds,
        "num_restarts": 2,
        "raw_samples": 16,
        "options": {"maxiter": 10, "seed": 1},
    }
    pending = points(1)
    for make in (
        lambda: qLogExpectedImprovement(model, best_f=0.5, sampler=sampler, X_pending=pending),
        lambda: qUpperConfidenceBound(model, beta=4.0, sampler=sampler),
        lambda: qKnowledgeGradient(model, num_fantasies=2),
    ):
        found = []
        for _ in range(2):
            torch.manual_seed(0)
            found.append(optimize_acqf(make(), q=2, **options))
        assert found[0][0].shape == (2, 3)
        assert bool(((found[0][0] >= bounds[0]) & (found[0][0] <= bounds[1])).all())
        assert torch.equal(found[0][0], found[1][0])
        assert bool(torch.isfinite(found[0][1]).all())


def test_thompson_sampling_maximises_one_drawn_function():
    model, bounds = (
        SSLAModel(fitted(), offset=1.0, scale=2.0),
        torch.tensor([[-2.0] * 3, [2.0] * 3]).double(),
    )
    draws = model.draw_functions(300, torch.Generator().manual_seed(0))
    X = points(2, 4)
    values = torch.stack([draw.posterior(X).mean for draw in draws])
    assert values.shape == (300, 2, 4, 1)
    expected = model.posterior(X)
    assert bool(
        ((values.mean(0) - expected.mean).abs() < 4.5 * (expected.variance / 300).sqrt()).all()
    )
    again = model.draw_functions(300, torch.Generator().manual_seed(0))[0]
    assert torch.equal(draws[0].posterior(X[0, :1]).mean, again(X[0, :1]))
    torch.manual_seed(0)
    best, value = optimize_acqf(
        PosteriorMean(draws[0]), bounds, q=1, num_restarts=4, raw_samples=64
    )
    grid = (
        4 * torch.rand(2000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 2
    )
    assert float(value) >= float(draws[0](grid).max()) - 1e-6
    torch.testing.assert_close(draws[0](best)[0, 0], value)


def test_training_is_repeatable_and_follows_the_scale_of_the_outcomes():
    x = Branin().bounds.double()[0] + 15 * torch.rand(
        16, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    Y, bounds, before = -Branin()(x)[:, None], Branin().bounds.double(), torch.get_rng_state()
    options = {"bounds": bounds, "hidden": (10,), "steps": 60}
    model = train(x, Y, **options)
    assert torch.equal(torch.get_rng_state(), before)
    at = x[:3] + 0.1
    assert torch.equal(train(x, Y, **options).posterior(at).mean, model.posterior(at).mean)
    other = train(x, 64 * Y, **options).posterior(at)  # in other units
    torch.testing.assert_close(other.mean, 64 * model.posterior(at).mean)
    residuals = (model.posterior(x).mean - Y).std()
    assert float(residuals) < 0.5 * float(Y.std())
    weights = deepcopy(model.fitted.parameters)
    later = train(x, Y, start=model, steps=20)
    assert all(torch.equal(weights[name], value) for name, value in model.fitted.parameters.items())
    assert float((later.posterior(x).mean - Y).std()) < 1.5 * float(residuals)
    exact = train(x, Y, noise=0.5, **options)
    torch.testing.assert_close(exact.likelihood.noise * exact.scale, torch.tensor([0.5]).double())


def by_autograd(network, x):
    """θ̂, the outputs and the Jacobian of a network's own weights, with outcomes in the order
    of y.flatten().
    """
    layout = make_contiguous_layout({name: p.shape for name, p in network.named_parameters()})
    theta = layout.pack({name: p.detach() for name, p in network.named_parameters()})
    f = lambda theta: functional_call(network, layout.unpack(theta), (x,)).flatten()
    return layout, theta, f(theta), torch.autograd.functional.jacobian(f, theta)


@pytest.mark.parametrize("rounds", [1, 3])
def test_the_mean_after_training_is_that_of_the_linearised_network(rounds):
    """(S + T)(m − θ̂) = ∇ℓ + ∇log π: with J by autograd at θ̂."""
    x, y = data(30)
    posterior = train(x, y[:, None], hidden=(5,), steps=15, rounds=rounds).fitted
    noise, prior = float(posterior.likelihood.noise), posterior.bound_prior
    _, theta, f, J = by_autograd(posterior.network.frozen.module, x)
    torch.testing.assert_close(theta, posterior.theta)
    target = (y - y.mean()) / y.std() - f + J @ (theta - prior.mean)
    expected = prior.mean + torch.linalg.solve(
        J.mT @ J / noise**2 + torch.diag(prior.scale_precision), J.mT @ target / noise**2
    )
    torch.testing.assert_close(posterior.mean, expected, rtol=1e-5, atol=1e-7)


def test_a_network_without_hidden_units_is_bayesian_linear_regression():
    """Exact linear algebra, in units of Y: the weights' columns are the inputs over their
    bounds and length scales.
    """
    x, y = data(30)
    bounds = torch.tensor([[-3.0] * 3, [3.0] * 3]).double()
    model = train(x, y[:, None], bounds=bounds, hidden=(), noise=0.4)
    lengths, prior = model.fitted.network.frozen.module[0].lengths, model.fitted.prior.precision
    columns = lambda x: torch.cat([x / 3 / lengths, torch.ones_like(x[:, :1])], 1)
    T = torch.diag(torch.tensor([prior["1.weight"]] * 3 + [prior["1.bias"]]).double()) / y.var()
    A, at = columns(x), columns(points(4))
    H = A.mT @ A / 0.4**2 + T
    found = model.posterior(points(4))
    torch.testing.assert_close(
        found.mean[:, 0], y.mean() + at @ torch.linalg.solve(H, A.mT @ (y - y.mean()) / 0.4**2)
    )
    torch.testing.assert_close(
        found.distribution.covariance_matrix, at @ torch.linalg.inv(H) @ at.mT
    )


@pytest.mark.parametrize("hidden", [(), (4,), (3, 5)])
@pytest.mark.parametrize("outcomes", [1, 2])
def test_the_evidence_is_that_of_the_linearised_network(hidden, outcomes):
    """log N(y; f + J(μ − θ̂), J T⁻¹ Jᵀ + Σ) with the whole J by autograd; and its gradients."""
    generator = torch.Generator().manual_seed(0)
    x, y = points(6), torch.randn(6, outcomes, dtype=torch.float64, generator=generator)
    x[:, 2] = torch.tensor([0, 1, 0, 1, 1, 0])
    network = cosine_networks.draw_network(x, outcomes, None, {2: 2}, hidden, 1)
    layout, theta, f, J = by_autograd(network, x)
    mean = 0.1 * torch.randn(layout.size, dtype=torch.float64, generator=generator)
    variances = {
        name: torch.tensor(0.3 + 0.2 * i).double() for i, name in enumerate(layout.positions)
    }
    lengths, noise = network[0].lengths, torch.tensor([0.3, 0.5]).double()[:outcomes]
    v = layout.pack(
        {name: variances[name].expand(p.shape) for name, p in network.named_parameters()}
    )
    K = J @ torch.diag(v) @ J.mT + torch.diag(noise.repeat(6) ** 2)
    expected = torch.distributions.MultivariateNormal(f + J @ (mean - theta), K).log_prob(
        y.flatten()
    )
    evidence = lambda lengths, noise, *v: cosine_networks.log_evidence(
        network, x, y, lengths, dict(zip(variances, v, strict=True)), layout.unpack(mean), noise
    )
    constant = 0.5 * y.numel() * math.log(2 * math.pi)
    torch.testing.assert_close(evidence(lengths, noise, *variances.values()) - constant, expected)
    assert torch.autograd.gradcheck(
        evidence, [v.clone().requires_grad_(True) for v in (lengths, noise, *variances.values())]
    )


def test_the_settings_are_those_of_the_largest_evidence():
    """No setting nearby is better, by SciPy's search without derivatives over brute-force
    evidences.
    """
    x = torch.linspace(-1, 1, 8, dtype=torch.float64)[:, None]
    y = torch.sin(4 * x) + 0.1 * torch.cos(40 * x)
    y = (y - y.mean()) / y.std()
    network = cosine_networks.draw_network(x, 1, None, {}, (6,), 0)
    found = cosine_networks.maximise_evidence(
        network, cosine_networks.make_expected_settings(network), x, y, None, 500
    )
    layout, theta, *_ = by_autograd(network, x)
    mean = found.prior.bind(layout).mean
    names = list(layout.positions)
    sizes = torch.tensor([p.shape[1] if p.dim() == 2 else 1 for p in network.parameters()]).double()

    def loss(flat):
        point = torch.from_numpy(flat)
        network[0].lengths.copy_(point[:1].exp())
        _, _, f, J = by_autograd(network, x)
        spread = dict(zip(names, point[1:-1].exp() ** 2 / sizes, strict=True))
        v = layout.pack(
            {name: spread[name].expand(p.shape) for name, p in network.named_parameters()}
        )
        K = J @ torch.diag(v) @ J.mT + torch.exp(2 * point[-1]) * torch.eye(8)
        height = torch.distributions.MultivariateNormal(f + J @ (mean - theta), K).log_prob(y[:, 0])
        expected = (
            ((point[0] - math.log(0.5)) / 0.7) ** 2
            + (point[1:-1] ** 2).sum()
            + (point[-1] + 4) ** 2
        )
        return float(0.5 * expected - height)

    spreads = [
        0.5 * math.log(float(size) / found.precision[name])
        for name, size in zip(names, sizes, strict=True)
    ]
    point = np.array([float(found.lengths.log()), *spreads, math.log(found.noise)])
    best = minimize(loss, point, method="Nelder-Mead", options={"maxfev": 400})
    assert best.fun > loss(point) - 1e-3


def test_noise_is_found_and_its_absence_too():
    """Without noise the mean interpolates, and the standard deviation at known inputs is small;
    otherwise noise is estimated.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(40, 1, dtype=torch.float64, generator=generator)
    plain = torch.sin(6 * x)
    model = train(x, plain, bounds=torch.tensor([[0.0], [1.0]]))
    assert float((model.posterior(x).mean - plain).abs().max()) < 1e-3
    assert float(model.posterior(x[:, None]).variance.max().sqrt()) < 1e-3
    noisy = train(x, plain + 0.3 * torch.randn(40, 1, dtype=torch.float64, generator=generator))
    assert 0.2 < float(noisy.likelihood.noise * noisy.scale) < 0.45


def test_settings_whose_covariance_is_singular_to_rounding_are_passed_over(monkeypatch):
    whole, refused = cosine_networks.log_evidence, []

    def evidence(network, x, y, lengths, *others):
        if float(lengths.detach()[0]) > 0.6:
            refused.append(float(lengths.detach()[0]))
            raise torch.linalg.LinAlgError("singular")
        return whole(network, x, y, lengths, *others)

    x = torch.linspace(0, 1, 20, dtype=torch.float64)[:, None]
    best = train(x, x**2).fitted.network.frozen.module[0].lengths
    assert float(best) > 0.6
    monkeypatch.setattr(cosine_networks, "log_evidence", evidence)
    model = train(x, x**2)
    assert refused
    assert float(model.fitted.network.frozen.module[0].lengths) <= 0.6
    assert float((model.posterior(x[:, None]).mean[:, 0] - x**2).abs().max()) < 1e-2


def test_two_outcomes_are_trained_together():
    x, y = data(30)
    model = train(x, torch.stack([10 * y, x[:, 0] - 5], 1), hidden=(30,), steps=40, rounds=2)
    found = model.posterior(x[:4])
    assert found.mean.shape == (4, 2)
    assert bool(((found.mean[:, 1] - x[:4, 0] + 5).abs() < 0.1).all())


def test_categories():
    """A column of whole numbers becomes one column for each of them, and `optimize_acqf_mixed`
    takes the model.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(24, 2, dtype=torch.float64, generator=generator)
    x[:, 1] = (x[:, 1] * 3).floor()
    Y = torch.stack([(x[:, 0] - 0.3) ** 2, 1 - x[:, 0], 0.5 + 0 * x[:, 0]], 1).gather(
        1, x[:, 1:].long()
    )
    bounds = torch.tensor([[0.0, 0.0], [1.0, 2.0]]).double()
    model = train(x, Y, bounds=bounds, categories={1: 3}, hidden=(10,), steps=60)
    torch.manual_seed(0)
    best, _ = optimize_acqf_mixed(
        qUpperConfidenceBound(
            model, beta=0.1, sampler=SobolQMCNormalSampler(torch.Size([16]), seed=0)
        ),
        bounds,
        q=1,
        num_restarts=2,
        raw_samples=16,
        fixed_features_list=[{1: float(k)} for k in range(3)],
    )
    assert best[0, 1] == 1
    assert best[0, 0] < 0.2


def test_the_users_network_is_not_written_to():
    network, (x, y) = mlp(), data(40)
    before = deepcopy(network.state_dict())
    posterior = ssla.fit(
        network, (x, y), likelihood=likelihoods.Gaussian(0.3), prior=priors.Gaussian(2.0)
    )
    model = SSLAModel(posterior)
    model.condition_on_observations(points(2), torch.zeros(2, 1).double()).posterior(
        points(2)
    ).rsample()
    assert list(model.parameters()) == []
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in network.parameters())


def test_a_single_precision_network_answers_in_the_dtype_of_x():
    x, y = data(40, dtype=torch.float32)
    posterior = ssla.fit(
        mlp(dtype=torch.float32),
        (x, y),
        likelihood=likelihoods.Gaussian(0.3),
        prior=priors.Gaussian(2.0),
    )
    assert SSLAModel(posterior).posterior(points(2)).mean.dtype == torch.float64
    assert SSLAModel(posterior).posterior(points(2).float()).variance.dtype == torch.float32


def refused(message):
    return pytest.raises((ValueError, TypeError), match=message)


def test_bad_input_is_refused_in_words():
    posterior, x, Y = fitted(), points(4), torch.zeros(4, 1).double()
    model = SSLAModel(posterior)
    with refused("takes a Posterior, as ssla.fit returns it, but got a Sequential"):
        SSLAModel(mlp())
    with refused(
        r"scale must be a number, or one for each of the 1 outcomes, but has shape \(2,\)"
    ):
        SSLAModel(posterior, scale=SCALE)
    with refused("scale must be positive and finite"):
        SSLAModel(posterior, scale=0.0)
    with refused("X must be finite, but 1 of 12 values"):
        model.posterior(torch.where(torch.arange(12).view(4, 3) == 5, torch.nan, x))
    with refused(
        r"X must be a tensor of floating-point numbers \(…, q, d\), but is torch.int64 of shape \(4, 3\)"
    ):
        model.posterior(x.long())
    with refused(
        r"Y must be \(…, n, m\) with n = 4 rows, as X has, and m = 1 outcomes, but has shape \(4,\)"
    ):
        model.condition_on_observations(x, Y[:, 0])
    with refused("Y must be finite"):
        model.condition_on_observations(x, Y / 0)
    # A tensor of shape (2, 1, 1) would broadcast, but the outcomes (4, 1) would not be its shape.
    for noise in (torch.ones(3, 1), torch.ones(4), torch.ones(2, 1, 1)):
        message = rf"noise must hold variances that broadcast to the outcomes \(4, 1\), but has shape \({noise.shape[0]},"
        with refused("observation_" + message):
            model.posterior(x, observation_noise=noise)
        with refused("^" + message):
            model.condition_on_observations(x, Y, noise=noise)
    with refused(r"x must have shape \(N, 3\) as at fit, but one row of it is \(2,\)"):
        model.posterior(x[:, :2])
    with refused("conditioned on fantasies"):
        model.condition_on_observations(x[None], Y[None]).draw_functions(1)
    with refused(
        r"train needs X \(n, d\) and Y \(n, m\) with the same n, at least 2, but X is \(4, 3\) and Y is \(4,\)"
    ):
        train(x, Y[:, 0])
    with refused("The standard deviation of Y must be positive"):
        train(x, Y)
    Y = x[:, :1]
    with refused(r"bounds must be \(2, 3\), lower before upper in every column"):
        train(x, Y, bounds=torch.zeros(2, 3))
    with refused("needs a column 1 of whole numbers from 0 to 2"):
        train(x, Y, categories={1: 3})
    with refused("bounds and categories are those of start"):
        train(x, Y, start=model, bounds=torch.zeros(2, 3))
    with refused("start must be a model of ssla.botorch.train"):
        train(x, Y, start=model)
    with refused("rounds and steps must be at least 1, but are 0 and 100"):
        train(x, Y, rounds=0)


@pytest.mark.parametrize(
    "likelihood", [likelihoods.Categorical(), likelihoods.Poisson(), likelihoods.StudentT(4.0, 1.0)]
)
def test_other_likelihoods_are_refused_in_words(likelihood):
    x, y = data(40)
    outputs = 2 if isinstance(likelihood, likelihoods.Categorical) else 1
    network = nn.Linear(3, outputs).double().eval()
    posterior = ssla.fit(
        network, (x, (y > 0).to(y if outputs == 1 else torch.long)), likelihood=likelihood
    )
    with refused("plus Gaussian noise, but the likelihood is"):
        SSLAModel(posterior)
