"""Probabilities of classes are integrals over f, in any number of classes and in bounded memory."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, special
from torch import nn

import ssla
import ssla.predictive.class_integrals as integrals
import ssla.predictive.many_classes as many_classes
from ssla import likelihoods as L
from ssla import priors
from ssla.maths.quadrature.logistic import logistic_normal
from ssla.maths.roots import FullRoot
from ssla.predictive import from_marginal

T = {"dtype": torch.float64}


def problem(classes, rows=6, variance=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    A = torch.randn(rows, classes, 2 * classes, generator=g, **T)
    return 2 * torch.randn(rows, classes, generator=g, **T), A @ A.mT * (variance / (2 * classes))


def kl(p, q):
    return (p * (p / q).log()).sum(1)


def posterior(classes, structure="dense", features=3, dtype=torch.float64, rows=40, **options):
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Linear(2, features), nn.Tanh(), nn.Linear(features, classes))
        .to(dtype)
        .eval()
    )
    data = torch.randn(rows, 2, dtype=dtype), torch.arange(rows) % classes
    return ssla.fit(
        model,
        data,
        likelihood=L.Categorical(),
        prior=priors.Gaussian(1.0),
        structure=structure,
        mode="tilt",
        **options,
    )


@pytest.mark.parametrize("variance", [0.0, 0.01, 1.0, 15.9, 16.1, 100.0, 2500.0])
@pytest.mark.parametrize("mean", [0.0, -2.0, 7.0, -60.0])
def test_sigmoid_equals_quadrature(mean, variance):
    sd = math.sqrt(variance)
    found = logistic_normal(torch.tensor([mean], **T), torch.tensor([sd], **T))
    z = np.linspace(-40, 40, 400_001)
    log_weights = special.log_softmax(-0.5 * z**2)
    one, zero = (
        special.logsumexp(log_weights + special.log_expit(sign * (mean + sd * z)))
        for sign in (1, -1)
    )
    for value, truth in ((found.log_one, one), (found.log_zero, zero)):
        assert abs(float(value) - truth) < (1e-7 if truth > -40 else 0.03)  # far out only about
    assert (
        abs(
            float(found.spread)
            - np.exp(log_weights) @ (special.expit(mean + sd * z) - np.exp(one)) ** 2
        )
        < 1e-7
    )


def test_two_classes_equal_bernoulli_on_the_difference():
    f, K = problem(2, variance=20.0)
    two = from_marginal(L.Categorical(), f, K)
    a = torch.tensor([-1.0, 1.0], **T)
    one = from_marginal(L.Bernoulli(), (f @ a)[:, None], (K @ a @ a)[:, None, None])
    assert (two.probs - one.probs).abs().max() < 1e-12
    assert (two.epistemic[:, 1] - one.epistemic).abs().max() < 1e-12
    assert (two.aleatoric[:, 0] - one.aleatoric).abs().max() < 1e-12


def test_three_classes_equal_scipy():
    """By the trapezoidal rule in three dimensions."""
    f, K = problem(3, variance=0.5)
    p = from_marginal(L.Categorical(), f, K)
    line = np.linspace(-6, 6, 61)
    z = np.stack(np.meshgrid(line, line, line), -1)
    density = np.exp(-0.5 * (z**2).sum(-1)) / (2 * np.pi) ** 1.5
    for row in range(6):
        values = (
            special.softmax(f[row].numpy() + z @ np.linalg.cholesky(K[row].numpy()).T, -1)
            * density[..., None]
        )
        for _ in range(3):
            values = integrate.trapezoid(values, line, axis=0)
        assert np.abs(p.probs[row].numpy() - values).max() < 5e-4


@pytest.mark.parametrize(
    ("classes", "variance", "error"),
    [(3, 25.0, 1e-4), (10, 1.0, 3e-5), (10, 4.0, 5e-4), (100, 1.0, 2e-4), (600, 0.3, 3e-4)],
)
def test_probabilities_equal_monte_carlo(classes, variance, error):
    f, K = problem(classes, rows=3, variance=variance)
    p = from_marginal(L.Categorical(), f, K)
    g, R = torch.Generator().manual_seed(5), torch.linalg.cholesky(K)
    total, count = torch.zeros_like(f), 0
    for _ in range(20):
        draws = torch.softmax(
            f.unsqueeze(1)
            + torch.randn(3, 20_000 // (1 + classes // 10), classes, generator=g, **T) @ R.mT,
            -1,
        )
        total, count = total + draws.sum(1), count + draws.shape[1]
    truth = total / count
    assert kl(truth, p.probs).max() < error + 2 * classes / count  # and the error of the draws
    assert (p.mass - 1).abs().max() < 1e-12
    assert torch.allclose(p.epistemic + p.aleatoric, p.probs * (1 - p.probs))


def test_no_uncertainty_gives_the_plug_in():
    for classes in (2, 3, 8, 700):
        f = problem(classes)[0]
        p = from_marginal(L.Categorical(), f, torch.zeros(6, classes, classes, **T))
        assert (p.probs - torch.softmax(f, 1)).abs().max() < 1e-14
        assert p.epistemic.max() < 1e-20


def test_order_of_the_classes_matters_only_by_the_error_of_the_integral():
    f, K = problem(6)
    order = torch.tensor([4, 0, 5, 1, 3, 2])
    p, q = (
        from_marginal(L.Categorical(), f, K),
        from_marginal(L.Categorical(), f[:, order], K[:, order][:, :, order]),
    )
    assert kl(p.probs[:, order], q.probs).max() < 1e-4


def test_tiny_probabilities_are_finite():
    f = torch.tensor([[0.0, -2000.0, -50.0, 1.0]], **T)
    for dtype in (torch.float64, torch.float32):
        root = FullRoot(torch.eye(4, dtype=dtype)[None])
        found = integrals.integrate_classes([(f, root)], 4, 1 << 30)
        assert torch.isfinite(found.log_probs).all()
        assert -2002 < found.log_probs[0, 1] < -1990
        assert -52 < found.log_probs[0, 2] < -45


@pytest.mark.parametrize("structure", ["dense", "kfac", "diag", "low_rank"])
@pytest.mark.parametrize("classes", [2, 3, 6])
def test_predict_equals_the_marginal_given_as_tensors(structure, classes):
    post = posterior(classes, structure)
    x = torch.randn(9, 2, **T)
    p, q = post.predict(x), from_marginal(L.Categorical(), *post.marginal(x))
    assert kl(q.probs, p.probs).max() < 1e-4  # kfac and diag take another root of K
    assert (p.epistemic - q.epistemic).abs().max() < 2e-3
    y = torch.arange(9) % classes
    assert torch.allclose(
        p.increments(y).total, post.predict(x, refit=ssla.OutputRefit()).increments(y).total
    )
    assert torch.allclose(p.increments(y).total, q.increments(y).total)
    assert torch.allclose(p.increments(y).total, p.log_prob(y), atol=0.1)
    every = torch.arange(classes).expand(9, -1)
    assert torch.allclose(
        p.increments(every).total.gather(1, y[:, None])[:, 0], p.increments(y).total
    )
    assert p.sample(4).shape == (4, 9)
    assert torch.equal(p.hdr(0.9), p.interval(0.9))
    mixed = ssla.mixture([p, q])
    assert torch.allclose(mixed.probs, (p.probs + q.probs) / 2)


def test_a_row_does_not_depend_on_the_others():
    post = posterior(12)
    x = torch.randn(30, 2, **T)
    whole, some = post.predict(x), post.predict(x[5:18])
    assert (
        whole.log_prob(torch.zeros(30))[5:18] - some.log_prob(torch.zeros(13))
    ).abs().max() < 1e-12
    assert post.predict(x[:0]).probs.shape == (0, 12)


def test_other_rungs_and_conventions_evaluate_every_class():
    f, K = problem(3)
    for refit in ("newton", "none"):
        p = from_marginal(L.Categorical(), f, K, refit=refit)
        every = torch.arange(3).expand(6, -1)
        assert torch.allclose(p.probs, torch.softmax(p.increments(every).total, 1))
        assert (p.mass - 1).abs().max() > 1e-6


@pytest.mark.parametrize("rows", [2, 20])  # too few for shared products, and enough
def test_memory_is_bounded(monkeypatch, rows):
    """300 classes under a budget of a few rows: no array is larger than one row's, or than the
    budget.
    """
    budget = 6 << 20  # eight copies of the factors
    post = posterior(300, "kfac", rows=10, memory_budget=budget)
    sizes = []

    def log_sum(logits, p, likeliest, inner=many_classes._log_sum_exp):
        sizes.append(many_classes.COPIES * logits.numel() * logits.element_size())
        return inner(logits, p, likeliest)

    monkeypatch.setattr(many_classes, "_log_sum_exp", log_sum)
    monkeypatch.setattr(type(post.operator), "covariance", None)  # K is never formed
    p = post.predict(torch.randn(rows, 2, **T))
    assert 0 < max(sizes) <= budget
    assert (p.probs.sum(1) - 1).abs().max() < 1e-12


def test_increments_of_many_classes_are_taken_in_portions(monkeypatch):
    from ssla.refit import outputs

    post = posterior(20, rows=30)
    x, y = torch.randn(5, 2, **T), torch.arange(20).expand(5, -1)
    whole = post.predict(x).increments(y)
    monkeypatch.setattr(outputs, "MATRICES", (1 << 30) // (8 * 20**2 * 7))  # seven tasks at once

    parts = post.predict(x).increments(y)
    assert torch.allclose(whole.total, parts.total, atol=1e-12)
