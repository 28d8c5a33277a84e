"""ASSLA with the observed curvature of the data: autograd's Hessian of a linear last layer, and a
model written by hand.
"""

import numpy as np
import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.refit.observed_curvature import factorise_observed_curvature
from support.reference_problems import problem
from support.refits import T, inputs, last_layer, noisy, seeded, small_network

OBSERVED = ssla.NoRefit(data_curvature="observed")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["heteroscedastic", "student"])
def test_a_linear_last_layer_equals_autograds_hessian(name, weighted):
    """log p(y|f̂) − ½[log|H + JᵀΛJ| − log|H|] with both matrices by autograd, on
    torch.distributions.
    """
    weights = 0.5 + torch.rand(70, dtype=torch.float64, generator=seeded(8)) if weighted else None
    post, new, candidates, log_joint, log_new = last_layer(name, weights=weights)
    found = ssla.assla(post, new, candidates.expand(len(new), -1), OBSERVED)
    fisher = ssla.assla(post, new, candidates.expand(len(new), -1))
    hessian = lambda f: -torch.func.jacrev(torch.func.grad(f))(post.theta).numpy()
    H = hessian(log_joint)
    assert np.linalg.eigvalsh(H)[0] > 0
    checked = 0
    for i in range(len(new)):
        for j, y in enumerate(candidates):
            after = H + hessian(log_new(i, y))
            if np.linalg.eigvalsh(after)[0] <= 0:  # the Fisher of the new row, and counted
                continue
            expected = -0.5 * (np.linalg.slogdet(after)[1] - np.linalg.slogdet(H)[1])
            assert float(found.curvature[i, j]) == pytest.approx(expected, abs=1e-8)
            assert float(found.likelihood[i, j]) == pytest.approx(
                float(log_new(i, y)(post.theta)), abs=1e-8
            )
            checked += 1
    assert checked > 6
    assert (found.curvature - fisher.curvature).abs().max() > 1e-3


def test_it_equals_the_model_written_by_hand():
    """ExplicitModel(refit=False): f = (θ₀ + θ₁x, θ₂ + θ₃x), mean and log variance."""
    x = inputs(60, 1, 1)
    y = noisy(torch.cat([x, x], 1), seed=4)
    model = nn.Linear(1, 2).double()
    prior = priors.Gaussian(0.7)
    post = ssla.fit(
        model,
        (x, y),
        likelihood=L.HeteroscedasticGaussian(),
        prior=prior,
        gaussian="laplace",
        mode="polish",
    )

    def log_prob(row, t):
        mean, s = t[0] + t[1] * row[0], t[2] + t[3] * row[0]
        return -0.5 * (np.log(2 * np.pi) + s + (row[1] - mean) ** 2 * torch.exp(-s))

    explicit = ssla.ExplicitModel(log_prob, torch.cat([x, y[:, None]], 1), torch.zeros(4), prior)
    new, candidates = T([0.3], [-0.8]), T(-0.6, 0.0, 0.7)
    found = ssla.assla(post, new, candidates.expand(2, -1), OBSERVED).total
    for i in range(2):
        rows = torch.stack([new[i].expand(3), candidates], 1)
        expected = explicit.increments(rows, refit=False).total
        assert (found[i] - expected).abs().max() < 1e-8


@pytest.mark.parametrize("structure", ["dense", "kfac", "diag"])
def test_structures_hold_the_observed_curvature(structure):
    """Their matrices written out from the rows: dense; Σ φφᵀ/n ⊗ ΣΛ; the diagonal."""
    likelihood = L.StudentT(4.0, 0.4)
    post, *_ = last_layer("student")
    model = post.network.frozen.module
    x, y = next(iter(post.source))[:2]
    post = ssla.fit(
        model,
        (x, y),
        likelihood=likelihood,
        prior=priors.Gaussian(0.8),
        gaussian="laplace",
        structure=structure,
        mode="polish",
    )
    theta = torch.cat([post.parameters["2.weight"], post.parameters["2.bias"][:, None]], 1)
    phi = torch.cat([model[:2](x), torch.ones(len(x), 1)], 1).detach()
    f = (phi @ theta[0]).unsqueeze(-1)
    Lambda = -torch.func.vmap(
        torch.func.jacrev(torch.func.grad(lambda f, y: likelihood.log_prob(y, f)))
    )(f, y.double())[:, 0, 0]
    dense = (phi * Lambda[:, None]).mT @ phi
    S = {
        "dense": dense,
        "kfac": phi.mT @ phi / len(phi) * Lambda.sum(),
        "diag": torch.diag(dense.diagonal()),
    }[structure]
    expected = torch.linalg.slogdet(S + 0.8 * torch.eye(len(S), dtype=torch.float64))[1]
    found = factorise_observed_curvature(post, None)
    assert found.logdet() == pytest.approx(float(expected), abs=1e-9)
    assert abs(post.operator.logdet() - found.logdet()) > 1e-2


@pytest.mark.parametrize("name", ["gaussian", "poisson", "bernoulli", "categorical"])
def test_with_a_canonical_link_nothing_changes(name):
    post, new, candidates, *_ = last_layer(name)
    y = candidates.expand(len(new), -1)
    assert torch.allclose(
        ssla.assla(post, new, y, OBSERVED).total,
        ssla.assla(post, new, y).total,
        rtol=0,
        atol=1e-10,
    )


def test_all_weights_in_the_networks_own_structure():
    post, new, *_ = small_network("heteroscedastic", n=150)
    x, y = next(iter(post.source))[:2]
    f, J = post.network.linearise(post.network.cast(x), post.theta)
    Lambda = post.likelihood.precision(y, f)
    values = J.to_dense().values
    H = torch.einsum("bcp,bcd,bdq->pq", values, Lambda, values) + 0.3 * torch.eye(
        len(post.theta), dtype=torch.float64
    )
    assert torch.linalg.eigvalsh(H)[0] > 0
    Jx = torch.cat([J.to_dense().values for _, J in post.linearised(new)])
    K = Jx @ torch.linalg.solve(H, Jx.mT)
    assert torch.allclose(OBSERVED(post, new).marginal.covariance, K, rtol=1e-9)


def test_a_predictive_and_a_second_source():
    """The predictive is the normalised density, and given data are the posterior's own."""
    post, new, *_ = last_layer("heteroscedastic")
    p = post.predict(new, refit=OBSERVED)
    y = T(-0.3, 0.4).expand(len(new), -1)
    expected = ssla.assla(post, new, y, OBSERVED).total - p.mass.log()[:, None]
    assert torch.allclose(p.log_prob(y), expected, rtol=0, atol=1e-10)
    given = ssla.NoRefit(data_curvature="observed", data=next(iter(post.source))[:2])
    assert torch.equal(
        ssla.assla(post, new, y, given).total, ssla.assla(post, new, y, OBSERVED).total
    )


def test_without_the_prior_in_the_curvature():
    post, new, candidates, log_joint, log_new = last_layer("student", n=200)
    y = candidates.expand(len(new), -1)
    found = ssla.assla(post.with_prior(post.prior, "paper"), new, y, OBSERVED)

    def log_likelihood(t):
        return log_joint(t) + 0.4 * ((t - 0.1) ** 2).sum()

    hessian = lambda f: -torch.func.jacrev(torch.func.grad(f))(post.theta).numpy()
    H = hessian(log_likelihood)
    for i in range(len(new)):
        for j, value in enumerate(candidates):
            after = np.linalg.slogdet(H + hessian(log_new(i, value)))
            if after[0] > 0:
                expected = -0.5 * (after[1] - np.linalg.slogdet(H)[1])
                assert float(found.curvature[i, j]) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("structure", ["dense", "kfac", "diag"])
def test_an_indefinite_sum_is_an_error(structure):
    """A StudentT far from its data: every row has a negative curvature."""
    x = inputs(40, 1)
    post = ssla.fit(
        nn.Linear(2, 1).double(),
        (x, 50 + x[:, 0]),
        likelihood=L.StudentT(4.0, 0.4),
        prior=priors.Gaussian(1e-6),
        gaussian="laplace",
        mode="tilt",
        structure=structure,
    )
    with pytest.raises(ValueError, match=r"training rows is not positive definite at θ̂.*polish"):
        ssla.assla(post, x[:1], T(0.3), OBSERVED)


def test_a_variational_gaussian_is_refused():
    post, new, _ = problem("student")
    data = next(iter(post.source))[:2]
    module = post.network.frozen.module
    variational = ssla.fit(
        module, data, likelihood=post.likelihood, prior=post.prior, gaussian="variational"
    )
    with pytest.raises(ValueError, match=r"is the curvature at θ̂.*gaussian='laplace'"):
        ssla.assla(variational, new, T(0.1, 0.2), OBSERVED)
