"""The joint Gaussian of f over several inputs, and draws of functions: against a dense P×P
inverse and autograd's Jacobian.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.func import functional_call

import ssla
from ssla import likelihoods, priors
from ssla.predictive.functions import compute_joint_of_groups
from support.networks import SCOPES, STRUCTURES, data, fitted_mlp, mlp

AT = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
every = [
    pytest.mark.parametrize("structure", STRUCTURES),
    pytest.mark.parametrize("scope", SCOPES),
    pytest.mark.parametrize("gaussian", ["laplace", "variational"]),
]


@cache
def fitted(structure="dense", scope="last layer", gaussian="laplace", outputs=3):
    x, y = data(40)
    classes = (y > 0).long() + (y > 0.5).long()
    likelihood = likelihoods.Categorical() if outputs == 3 else likelihoods.Poisson()
    return fitted_mlp((x, classes), likelihood, outputs, scope, structure, gaussian)


def everywhere(test):
    for mark in every:
        test = mark(test)
    return test


def brute_force(post, x):
    """The mean (N·C,), and J S Jᵀ with autograd's J and the inverse of the P×P matrix that the
    sums and the prior make.
    """
    outputs, layout = post.network.outputs, post.network.layout
    model = mlp(outputs=outputs)
    f = lambda theta: functional_call(model, layout.unpack(theta), x).flatten()
    J = torch.autograd.functional.jacobian(f, post.theta)
    eye = torch.eye(layout.size, dtype=torch.float64)
    S = torch.stack([post.sums.curvature.push(column) for column in eye], 1)
    covariance = torch.linalg.inv(S + 2.0 * eye)
    return f(post.theta) + J @ (post.mean - post.theta), J @ covariance @ J.mT


@everywhere
def test_the_joint_gaussian_equals_brute_force(structure, scope, gaussian):
    post = fitted(structure, scope, gaussian)
    mean, covariance = brute_force(post, AT)
    found = post.joint(AT)
    assert found.mean.shape == (15,)
    assert torch.allclose(found.mean, mean, atol=1e-10)
    assert torch.allclose(found.covariance, covariance, rtol=1e-8, atol=1e-10)
    assert torch.equal(found.covariance, found.covariance.mT)


@everywhere
def test_its_diagonal_blocks_are_those_of_the_marginals(structure, scope, gaussian):
    post = fitted(structure, scope, gaussian)
    found, marginal = post.joint(AT), post.marginal(AT)
    blocks = found.covariance.view(5, 3, 5, 3).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    assert torch.allclose(blocks, marginal.covariance, rtol=1e-9, atol=1e-11)
    assert torch.equal(found.mean.view(5, 3), marginal.mean)


@pytest.mark.parametrize("structure", ["dense", "diag"])
@pytest.mark.parametrize("scope", SCOPES)
def test_the_joint_gaussian_equals_the_one_of_autograds_curvature(structure, scope):
    """The Fisher information of a Poisson likelihood, summed over the rows by autograd: nothing
    is taken from the fit but θ̂.
    """
    post = fitted(structure, scope, outputs=1)
    x, _ = data(40)
    model, layout = mlp(), post.network.layout
    jacobian = lambda at: torch.autograd.functional.jacobian(
        lambda theta: functional_call(model, layout.unpack(theta), at).flatten(), post.theta
    )
    rate = functional_call(model, layout.unpack(post.theta), x).flatten().exp()
    H = jacobian(x).mT @ (rate[:, None] * jacobian(x))
    H = (torch.diag(H.diagonal()) if structure == "diag" else H) + 2.0 * torch.eye(len(H))
    assert torch.allclose(
        post.joint(AT).covariance,
        jacobian(AT) @ torch.linalg.solve(H, jacobian(AT).mT),
        rtol=1e-8,
        atol=1e-11,
    )


@everywhere
def test_draws_have_the_moments_of_the_joint_gaussian(structure, scope, gaussian):
    post, n = fitted(structure, scope, gaussian), 4000
    values = post.draw_functions(n, torch.Generator().manual_seed(3))(AT)
    assert values.shape == (n, 5, 3)
    mean, K = post.joint(AT)
    seen = values.flatten(1)
    sd = K.diagonal().sqrt()
    assert bool(((seen.mean(0) - mean).abs() <= 4.5 * sd / n**0.5 + 1e-12).all())
    error = ((sd[:, None] * sd) ** 2 + K**2).sqrt() / n**0.5  # the standard error of a covariance
    assert bool(((seen.mT.cov() - K).abs() <= 4.5 * error + 1e-12).all())


def test_draws_are_functions():
    """A draw is the same function in every call, whatever else is asked for, and the same for
    the same generator.
    """
    post = fitted("kfac", "all", "variational")
    draws = post.draw_functions(4, torch.Generator().manual_seed(0))
    values = draws(AT)
    assert len(draws) == 4
    assert torch.equal(draws(AT), values)
    assert torch.allclose(draws(AT[2:4]), values[:, 2:4], atol=1e-12)
    assert torch.allclose(draws[1](AT), values[1], atol=1e-12)
    assert torch.allclose(torch.stack([draw(AT) for draw in draws]), values, atol=1e-12)
    assert torch.equal(post.draw_functions(4, torch.Generator().manual_seed(0))(AT), values)
    assert not torch.equal(post.draw_functions(4, torch.Generator().manual_seed(1))(AT), values)
    with pytest.raises(IndexError, match="4 functions, numbered from 0, but number 4"):
        draws[4]


def test_draws_of_a_last_layer_are_the_network_with_other_weights():
    post = fitted("dense", "last layer", "variational")
    draws = post.draw_functions(2, torch.Generator().manual_seed(0))
    weights = post.network.layout.unpack(post.mean + draws.steps[1])
    assert torch.allclose(draws[1](AT), functional_call(mlp(outputs=3), weights, AT), atol=1e-12)


@pytest.mark.parametrize("scope", SCOPES)
def test_pieces_of_rows_give_the_same_matrix(scope):
    post = fitted("kfac", scope)
    whole, size = post.joint(AT), post.network.layout.size
    small = replace(post, memory_budget=4 * 8 * 3 * size * 2)  # two rows of the Jacobian
    assert torch.allclose(small.joint(AT).covariance, whole.covariance, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("scope", SCOPES)
def test_groups_are_blocks_of_the_joint_gaussian(structure, scope, rows):
    """With a budget for the Jacobian of 1, 3 and all rows; groups have 2 rows."""
    post, x = fitted(structure, scope), torch.cat([AT, AT[:1]])
    mean, K = post.joint(x)
    budget = 4 * 8 * 3 * post.network.layout.size * rows
    found = compute_joint_of_groups(replace(post, memory_budget=max(budget, 2 * 8 * 36)), x, 2)
    torch.testing.assert_close(found.mean, mean.view(3, 6))
    blocks = torch.stack([K[i : i + 6, i : i + 6] for i in (0, 6, 12)])
    torch.testing.assert_close(found.covariance, blocks, rtol=1e-8, atol=1e-11)
    assert torch.equal(found.covariance, found.covariance.mT)
    assert compute_joint_of_groups(post, x[:0], 2).covariance.shape == (0, 6, 6)


def test_a_single_precision_model_answers_in_its_dtype():
    x, y = data(40, dtype=torch.float32)
    post = ssla.fit(
        mlp(dtype=torch.float32),
        (x, y),
        likelihood=likelihoods.Gaussian(0.3),
        prior=priors.Gaussian(1.0),
        weights="all",
    )
    found = post.joint(x[:4])
    assert (
        found.covariance.dtype
        == found.mean.dtype
        == post.draw_functions(2)(x[:4]).dtype
        == torch.float32
    )
    assert torch.allclose(
        found.covariance.diagonal(), post.marginal(x[:4]).covariance.flatten(), rtol=1e-4
    )


def test_layers_without_a_kronecker_form_and_no_rows():
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    )
    x, y = data(40)
    post = ssla.fit(
        model,
        (x, torch.stack([y, -y], 1)),
        likelihood=likelihoods.Gaussian(torch.tensor([0.3, 0.4])),
        prior=priors.Gaussian(1.0),
        weights="all",
        structure="kfac",
    )
    blocks = post.joint(AT).covariance.view(5, 2, 5, 2).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    assert torch.allclose(blocks, post.marginal(AT).covariance, rtol=1e-9)
    assert post.joint(AT[:0]).covariance.shape == (0, 0)
    assert post.draw_functions(3)(AT[:0]).shape == (3, 0, 2)


def test_what_is_beyond_the_budget_is_refused():
    post = replace(fitted("kfac"), memory_budget=3000)
    with pytest.raises(
        ValueError,
        match=r"5 inputs with 3 outputs is a matrix of 15 × 15. It needs 3.52 KiB, .* at most 4 inputs",
    ):
        post.joint(AT)
    post = replace(post, memory_budget=1900)
    with pytest.raises(ValueError, match=r"Jacobian of one input takes 1.97 KiB, .*draw_functions"):
        post.joint(AT[:1])
    with pytest.raises(
        ValueError, match=r"100 draws of 21 weights need 32.8 KiB, .* Draw at most 5 at a time"
    ):
        post.draw_functions(100)
    for n in (0, 2.0, True):
        with pytest.raises(ValueError, match="n must be a whole number of functions, at least 1"):
            post.draw_functions(n)
