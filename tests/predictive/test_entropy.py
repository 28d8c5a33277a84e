"""Entropy and mutual information of classes: against Monte Carlo and quadrature, their bounds
and limits.
"""

import math
from functools import cache

import numpy as np
import pytest
import torch
from scipy import special
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.maths.quadrature.logistic import expected_entropy
from ssla.predictive import from_marginal

T = {"dtype": torch.float64}


def problem(classes, rows=6, variance=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    A = torch.randn(rows, classes, 2 * classes, generator=g, **T)
    return 2 * torch.randn(rows, classes, generator=g, **T), A @ A.mT * (variance / (2 * classes))


@cache
def posterior(classes, dtype=torch.float64, structure="dense", bernoulli=False):
    torch.manual_seed(0)
    outputs = 1 if bernoulli else classes
    # of float32 weights
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).to(dtype).eval()
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(1), **T)
    data = x.to(dtype), torch.arange(60) % classes
    likelihood = L.Bernoulli() if bernoulli else L.Categorical()
    return ssla.fit(
        model,
        data,
        likelihood=likelihood,
        prior=priors.Gaussian(0.3),
        structure=structure,
        mode="tilt",
    )


def entropy(p):
    return torch.special.entr(p).sum(-1)


def check_bounds(p):
    information, whole, classes = p.mutual_information, p.entropy, p.probs.shape[1]
    assert information.shape == whole.shape == p.probs.shape[:1]
    assert (information >= 0).all()
    assert (information <= whole).all()
    assert (whole <= math.log(classes) * (1 + 1e-6)).all()
    assert whole.dtype == information.dtype == p.probs.dtype


@pytest.mark.parametrize("sd", [0.0, 0.1, 1.0, 3.99, 4.01, 10.0, 100.0])
@pytest.mark.parametrize("mean", [0.0, -2.0, 7.0, -60.0])
def test_expected_entropy_of_a_coin_equals_quadrature(mean, sd):
    found = expected_entropy(torch.tensor([mean], **T), torch.tensor([sd], **T))
    z = np.linspace(-40, 40, 400_001)
    f = mean + sd * z
    h = -special.expit(f) * special.log_expit(f) - special.expit(-f) * special.log_expit(-f)
    assert abs(float(found) - special.softmax(-0.5 * z**2) @ h) < 2e-8


@pytest.mark.parametrize(
    "classes", [2, 3, 10, 40, 200]
)  # binary, small, and many with and without whitened nodes
@pytest.mark.parametrize("variance", [0.1, 1.0, 9.0])
def test_mutual_information_equals_monte_carlo(classes, variance):
    f, K = problem(classes, rows=3, variance=variance)
    p = from_marginal(L.Categorical(), f, K)
    g, R = torch.Generator().manual_seed(5), torch.linalg.cholesky(K)
    draws = torch.softmax(
        f.unsqueeze(1)
        + torch.randn(3, 40_000 // (1 + classes // 20), classes, generator=g, **T) @ R.mT,
        -1,
    )
    noise, spread = entropy(draws).mean(1), entropy(draws).std(1)
    error = (
        5 * spread / math.sqrt(draws.shape[1])
        + classes / draws.shape[1]
        + (2e-2 if variance > 1 else 2e-3)
    )
    assert ((p.entropy - p.mutual_information - noise).abs() < error).all()
    assert ((p.mutual_information - (entropy(draws.mean(1)) - noise)).abs() < error).all()
    assert torch.allclose(p.entropy, entropy(p.probs))
    check_bounds(p)


def test_bernoulli_equals_two_classes():
    f, K = problem(2, variance=20.0)
    a = torch.tensor([-1.0, 1.0], **T)
    two, one = (
        from_marginal(L.Categorical(), f, K),
        from_marginal(L.Bernoulli(), (f @ a)[:, None], (K @ a @ a)[:, None, None]),
    )
    assert torch.allclose(two.entropy, one.entropy)
    assert torch.allclose(two.mutual_information, one.mutual_information)


@pytest.mark.parametrize("classes", [2, 5, 40, 700])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_doubt_has_no_mutual_information(classes, dtype):
    f = problem(classes)[0].to(dtype)
    p = from_marginal(L.Categorical(), f, torch.zeros(6, classes, classes, dtype=dtype))
    assert torch.allclose(p.entropy, entropy(torch.softmax(f, 1)))
    assert p.mutual_information.max() < 1e-6


@pytest.mark.parametrize("classes", [3, 40])
def test_much_doubt_is_all_mutual_information(classes):
    """f̂ = 0 and K = v I, v → ∞: every draw of f names one class for certain, and each class is
    as likely.
    """
    p = from_marginal(
        L.Categorical(), torch.zeros(1, classes, **T), 1e8 * torch.eye(classes, **T)[None]
    )
    assert abs(float(p.entropy) - math.log(classes)) < 0.1
    assert abs(float(p.mutual_information / p.entropy) - 1) < 1e-2


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_temperature_divides_the_outputs(temperature):
    f, K = problem(7)
    p = from_marginal(L.Categorical(temperature=temperature), f, K)
    q = from_marginal(L.Categorical(), f / temperature, K / temperature**2)
    assert torch.allclose(p.mutual_information, q.mutual_information)


@pytest.mark.parametrize("structure", ["dense", "kfac"])
@pytest.mark.parametrize("classes", [3, 40])
def test_float32_is_near_float64(structure, classes):
    x = torch.randn(50, 2, **T)
    double, single = (
        posterior(classes, torch.float64, structure),
        posterior(classes, torch.float32, structure),
    )
    p, q = double.predict(x), single.predict(x.float())
    assert q.mutual_information.dtype == torch.float32
    assert (p.mutual_information - q.mutual_information).abs().max() < 1e-4
    check_bounds(p)
    check_bounds(q)


@pytest.mark.parametrize("bernoulli", [False, True])
def test_every_rung_has_both(bernoulli):
    post, x = posterior(2 if bernoulli else 3, bernoulli=bernoulli), torch.randn(5, 2, **T)
    for refit in ("output", "newton", "weights", "auto"):
        p = post.predict(x, refit=refit)
        check_bounds(p)
        assert torch.allclose(p.entropy, entropy(p.probs))
        assert p.mutual_information.min() > 0
    for refit in ("none", ssla.PlugIn()):
        assert post.predict(x, refit=refit).mutual_information.abs().max() == 0  # no doubt of f
    # the share of the entropy that is doubt is that of the Gaussian in both
    by_output, by_newton = post.predict(x), post.predict(x, refit="newton")
    shares = [p.mutual_information / p.entropy for p in (by_output, by_newton)]
    assert (shares[0] - shares[1]).abs().max() < 1e-4


def test_own_likelihoods_of_classes_equal_the_library_s():
    own = L.custom(
        lambda y, f: -torch.nn.functional.softplus((1 - 2 * y) * f[..., 0]),
        support="classes",
        classes=2,
    )
    f, K = problem(1, variance=3.0)
    p, q = from_marginal(own, f, K), from_marginal(L.Bernoulli(), f, K, refit="newton")
    assert (p.mutual_information / p.entropy - q.mutual_information / q.entropy).abs().max() < 1e-6
    check_bounds(p)


def test_a_mixture_adds_the_disagreement_of_its_members():
    f = torch.tensor([[4.0, 0.0, 0.0], [0.0, 0.0, 0.0]], **T)
    turned, no = f.roll(1, 1), torch.zeros(2, 3, 3, **T)
    members = [from_marginal(L.Categorical(), part, no) for part in (f, turned)]
    p = ssla.mixture(members)
    noise = (members[0].entropy + members[1].entropy) / 2
    assert torch.allclose(p.entropy, entropy(p.probs))
    assert torch.allclose(p.mutual_information, entropy(p.probs) - noise, atol=1e-12)
    assert p.mutual_information[0] > 0.5
    assert p.mutual_information[1] < 1e-12
    g, K = problem(3, rows=2)
    same = ssla.mixture([from_marginal(L.Categorical(), g, K)] * 2, [0.3, 0.7])
    assert torch.allclose(
        same.mutual_information, from_marginal(L.Categorical(), g, K).mutual_information
    )
    check_bounds(same)


def test_joined_rows_keep_their_own():
    from ssla.predictive.joined import join_predictives

    f, K = problem(4)
    p = from_marginal(L.Categorical(), f, K)
    parts, rows = [], [torch.tensor([0, 3]), torch.tensor([1, 2, 4, 5])]
    for index in rows:
        parts.append(from_marginal(L.Categorical(), f[index], K[index]))
    both = join_predictives(parts, rows)
    assert torch.allclose(both.entropy, p.entropy)
    assert torch.allclose(both.mutual_information, p.mutual_information)


def test_gradients_in_x():
    for classes in (3, 2):
        post, x = posterior(classes), torch.randn(4, 2, **T, requires_grad=True)
        p = post.predict(x, differentiable=True)
        assert torch.allclose(p.mutual_information, post.predict(x.detach()).mutual_information)
        assert torch.autograd.gradcheck(
            lambda z: post.predict(z, differentiable=True).mutual_information, x
        )


def test_rows_without_an_answer_are_nan():
    from dataclasses import replace

    f, K = problem(4)
    p = from_marginal(L.Categorical(), f, K)
    logs = p.law.log_weights.clone()
    logs[2] = torch.nan
    failed = replace(p, law=replace(p.law, log_weights=logs))
    for values in (failed.entropy, failed.mutual_information):
        assert values.isnan().tolist() == [False, False, True, False, False, False]


def test_numbers_have_neither():
    p = from_marginal(L.Gaussian(noise=1.0), torch.zeros(2, 1, **T), torch.ones(2, 1, 1, **T))
    for name in ("entropy", "mutual_information"):
        assert not hasattr(p, name)
        with pytest.raises(AttributeError, match=f"no '{name}'.*classes only.*`epistemic`"):
            getattr(p, name)
        with pytest.raises(AttributeError, match="`epistemic`"):
            getattr(ssla.mixture([p, p]), name)
