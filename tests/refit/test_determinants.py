"""Determinants of refits of all weights, each function alone, against dense matrices that are built
row by row from autograd.
"""

from functools import cache

import numpy as np
import pytest
import torch

import ssla
from ssla import priors
from support.oracles import jacobian
from support.reference_problems import problem
from support.refits import seeded

CLOSE = 1e-10  # relative, of matrices; absolute, of log determinants


@cache
def posterior():
    """A mean and a log variance with all weights free, and rows that count with weights."""
    return problem("heteroscedastic", "all", row_weights=row_weights())


def row_weights():
    return 0.5 + torch.rand(80, dtype=torch.float64, generator=seeded(8))


def opened(post=None, **options):
    base, new, _ = posterior()
    return ssla.WeightRefit(**options).open_engine((post or base), new).determinants


def steps(count=2):
    """θ − θ̂ of some tasks (m, P)."""
    size = posterior()[0].theta.numel()
    return 0.05 * torch.randn(count, size, dtype=torch.float64, generator=seeded(4))


def module_at(theta):
    """The user's network with other weights."""
    post, _, _ = posterior()
    network = post.network
    module = torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 2)
    ).double()
    with torch.no_grad():
        for name, value in module.named_parameters():
            value.copy_(theta[network.layout.positions[name]])
    return module


def log_likelihood(theta, x, y, weights):
    """Σ w log N(y; f₁, e^f₂) by torch.distributions."""
    network = posterior()[0].network
    module = module_at(theta.detach())
    f = torch.func.functional_call(module, network.layout.unpack(theta), (x,))
    law = torch.distributions.Normal(f[:, 0], (f[:, 1] / 2).exp())
    return (weights * law.log_prob(y)).sum()


def dense_rows(kind, theta, x, y, weights):
    """Σ w JᵀΛJ, or −∇² of the log likelihood (P, P)."""
    if kind == "hessian":
        return -torch.autograd.functional.hessian(lambda t: log_likelihood(t, x, y, weights), theta)
    network = posterior()[0].network
    named = jacobian(module_at(theta), x, network.layout.names)  # in the order of the names
    order = torch.cat([network.layout.positions[name].flatten() for name in network.layout.names])
    J = torch.empty_like(named)
    J[..., order] = named
    f = module_at(theta)(x).detach()
    total = torch.zeros(len(theta), len(theta), dtype=torch.float64)
    for i in range(len(x)):
        r, p = float(y[i] - f[i, 0]), float(torch.exp(-f[i, 1]))
        observed = torch.tensor([[p, r * p], [r * p, r * r * p / 2]], dtype=torch.float64)
        fisher = torch.tensor([[p, 0.0], [0.0, 0.5]], dtype=torch.float64)
        total += weights[i] * J[i].mT @ (fisher if kind == "fisher" else observed) @ J[i]
    return total


def dense(kind, theta, task=None):
    """H of the data and the prior at θ; with a task (x, y) also its own curvature."""
    post, _, _ = posterior()
    batch = next(iter(post.source))
    H = dense_rows(kind, theta, batch.x, batch.y.double(), row_weights())
    H = H + 0.5 * torch.eye(len(theta), dtype=torch.float64)
    if task is not None:
        x, y = task
        H = H + dense_rows(kind, theta, x, y.reshape(1), torch.ones(1))
    return H


def close(found, expected):
    return torch.allclose(found, expected, rtol=CLOSE, atol=CLOSE * float(expected.abs().max()))


KINDS = pytest.mark.parametrize("kind", ["observed", "fisher", "hessian"])
Y = torch.tensor([0.4, 1.2], dtype=torch.float64)


@KINDS
def test_curvature_of_data_and_prior(kind):
    theta = posterior()[0].theta + steps()
    found = opened()._compute_posterior_curvature(kind, theta)
    assert found.shape[0] == 2
    assert all(close(found[k], dense(kind, theta[k])) for k in range(2))
    assert not close(found[0], found[1])


@KINDS
def test_curvature_of_the_new_observation(kind):
    post, new, _ = posterior()
    theta = post.theta + steps()
    found = opened()._compute_new_row_curvature(kind, theta, Y, new)
    for k in range(2):
        expected = dense_rows(kind, theta[k], new[k : k + 1], Y[k : k + 1], torch.ones(1))
        assert close(found[k], expected)


@KINDS
def test_full_is_the_sum_of_both(kind):
    post, new, _ = posterior()
    theta = post.theta + steps()
    found = opened().compute_augmented_curvature(kind, theta, Y, new)
    assert all(close(found[k], dense(kind, theta[k], (new[k : k + 1], Y[k]))) for k in range(2))


def test_the_curvature_of_a_prior_that_changes():
    """−∇² log π at θ, not at θ̂: Student's t by autograd."""
    post = posterior()[0].with_prior(priors.StudentT(df=4.0, scale=0.7))
    theta = post.theta + steps()
    found = opened(post)._compute_posterior_curvature("fisher", theta)
    bound = post.bound_prior
    for k in range(2):
        by_data = dense("fisher", theta[k]) - 0.5 * torch.eye(len(theta[k]), dtype=torch.float64)
        prior = -torch.autograd.functional.hessian(bound.log_prob, theta[k])
        assert close(found[k], by_data + prior)


def expected_increment(kind, step, task):
    theta = posterior()[0].theta
    before, after = dense(kind, theta), dense(kind, theta + step, task)
    eigenvalues = [np.linalg.eigvalsh(H.numpy()) for H in (after, before)]
    assert all(values[0] > 0 for values in eigenvalues)
    return -0.5 * float(np.log(eigenvalues[0]).sum() - np.log(eigenvalues[1]).sum())


@KINDS
def test_exact_increments_are_those_of_dense_determinants(kind):
    _, new, _ = posterior()
    found, positive = opened(logdet="exact")._compute_exact_increments(steps(), Y, new, kind)
    assert positive.all()
    for k in range(2):
        expected = expected_increment(kind, steps()[k], (new[k : k + 1], Y[k]))
        assert float(found[k]) == pytest.approx(expected, abs=CLOSE)


def test_tasks_one_after_the_other_have_the_same_determinants(monkeypatch):
    _, new, _ = posterior()
    together, _ = opened(logdet="exact")._compute_exact_increments(steps(), Y, new, "observed")
    monkeypatch.setattr("ssla.refit.weights.determinants.JACOBIANS_AT_ONCE", 1)
    alone, _ = opened(logdet="exact")._compute_exact_increments(steps(), Y, new, "observed")
    assert torch.allclose(together, alone, rtol=0, atol=1e-12)


def test_the_preconditioner_is_the_factor_of_the_hessian():
    factor = opened().start_factor
    assert close(factor @ factor.mT, dense("hessian", posterior()[0].theta))


def test_a_saddle_is_preconditioned_by_the_fitted_curvature(monkeypatch):
    determinants = opened()
    for name in ("start_factor", "_start_factors"):  # cached when the engine was opened
        del determinants.__dict__[name]
    monkeypatch.setattr(
        type(determinants), "_compute_posterior_curvature", lambda self, kind, thetas: -_eye(thetas)
    )
    assert determinants.start_factor is posterior()[0].operator.factor
    assert determinants._factorise_start("hessian") is None


def _eye(thetas):
    return torch.eye(thetas.shape[1], dtype=torch.float64).expand(len(thetas), -1, -1)


def called(determinants, step):
    """`Determinants.__call__` with the outputs at θ and the root of K = J H⁻¹ Jᵀ at θ̂."""
    post, new, _ = posterior()
    own = torch.stack([module_at(post.theta + step[k])(new[k]).detach() for k in range(2)])
    K = torch.cat([post.operator.covariance(J.double()) for _, J in post.linearised(new)])
    return determinants(step, own, Y, new, torch.linalg.cholesky(K))


@KINDS
def test_the_call_takes_the_kind_asked_for(kind):
    _, new, _ = posterior()
    value, fallback, positive = called(opened(logdet="exact", curvature=kind), steps())
    assert positive.all()
    assert not fallback.any()
    for k in range(2):
        expected = expected_increment(kind, steps()[k], (new[k : k + 1], Y[k]))
        assert float(value[k]) == pytest.approx(expected, abs=CLOSE)


def test_an_indefinite_task_uses_the_fisher_alone_and_is_counted():
    """A mean that is far off: Λ of N(μ, e^s) has the determinant −r²e^{−2s}/2 (method.md, 3)."""
    _, new, _ = posterior()
    step = steps()
    bias_of_the_mean = posterior()[0].network.layout.positions["2.bias"][0]
    step[1, bias_of_the_mean] = 5.0
    with pytest.raises(AssertionError):
        expected_increment("observed", step[1], (new[1:2], Y[1]))
    value, fallback, positive = called(opened(logdet="exact"), step)
    assert fallback.tolist() == [False, True]
    assert positive.all()
    for k, kind in enumerate(("observed", "fisher")):
        expected = expected_increment(kind, step[k], (new[k : k + 1], Y[k]))
        assert float(value[k]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("kind", ["observed", "fisher"])
def test_a_frozen_determinant_is_that_of_theta_hat_and_the_new_row(kind):
    """log|H + JᵀΛ(f̃)J| − log|H| with H and J at θ̂: Λ alone is taken at θ̃."""
    post, new, _ = posterior()
    value, _, _ = called(opened(logdet="frozen", curvature=kind), steps())
    H = dense("fisher", post.theta)
    for k in range(2):
        f = module_at(post.theta + steps()[k])(new[k : k + 1]).detach()
        law = post.likelihood
        Lambda = law.fisher(f) if kind == "fisher" else law.precision(Y[k : k + 1], f)
        J = torch.cat([J.double().to_dense().values for _, J in post.linearised(new)])[k]
        after = np.linalg.slogdet((H + J.mT @ Lambda[0] @ J).numpy())[1]
        expected = -0.5 * (after - np.linalg.slogdet(H.numpy())[1])
        assert float(value[k]) == pytest.approx(expected, abs=1e-9)


def test_the_dense_structure_at_theta_tilde_is_the_fisher():
    _, new, _ = posterior()
    value, fallback, positive = called(opened(logdet="structure"), steps())
    assert positive.all()
    assert not fallback.any()
    for k in range(2):
        expected = expected_increment("fisher", steps()[k], (new[k : k + 1], Y[k]))
        assert float(value[k]) == pytest.approx(expected, abs=1e-9)
