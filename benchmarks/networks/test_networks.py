"""The scores and the prototype of the networks benchmark against independent oracles.

PYTHONPATH=src:. python -m pytest -q -p no:cacheprovider benchmarks/networks/test_networks.py
"""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks.networks import prototype, scores, tasks
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score
from torch import nn

import ssla
from ssla.likelihoods import Categorical


@pytest.fixture
def probs():
    generator = torch.Generator().manual_seed(0)
    return torch.softmax(2 * torch.randn(200, 4, generator=generator).double(), -1)


@pytest.fixture
def y():
    return torch.randint(0, 4, (200,), generator=torch.Generator().manual_seed(1))


def test_losses_are_those_of_scikit_learn(probs, y):
    losses = scores.log_losses(probs, y)
    assert float(losses.mean()) == pytest.approx(log_loss(y, probs), rel=1e-12)
    found = scores.brier(probs, y)
    assert found == pytest.approx(brier_score_loss(y, probs, scale_by_half=False), rel=1e-12)


def test_ece_of_one_bin_is_the_gap_between_confidence_and_accuracy():
    probs = torch.tensor([[0.81, 0.19]]).repeat(10, 1)
    y = torch.tensor([0] * 6 + [1] * 4)
    assert scores.calibration_error(probs, y) == pytest.approx(0.21, abs=1e-6)


def test_auroc_is_that_of_scikit_learn():
    inside = torch.tensor([0.1, 0.2, 0.3])
    outside = torch.tensor([0.25, 0.9])
    together = [0.1, 0.2, 0.3, 0.25, 0.9]
    assert scores.auroc(inside, outside) == roc_auc_score([0, 0, 0, 1, 1], together)


def test_best_temperature_has_a_zero_derivative():
    f = 3 * torch.randn(200, 4, generator=torch.Generator().manual_seed(2)).double()
    y = (f + 6 * torch.randn(f.shape, generator=torch.Generator().manual_seed(3))).argmax(1)
    log_t = torch.tensor(math.log(scores.best_temperature(f, y)), requires_grad=True).double()
    loss = nn.functional.cross_entropy(f / log_t.exp(), y)
    (slope,) = torch.autograd.grad(loss, log_t)
    assert abs(float(slope)) < 1e-6


def test_loss_and_coverage_of_a_gaussian():
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(20_000, generator=generator)
    y = mean + 2 * torch.randn(20_000, generator=generator)
    prediction = scores.RealPrediction(mean, torch.full_like(mean, 2.0), torch.zeros_like(mean))
    oracle = -torch.distributions.Normal(mean, 2.0).log_prob(y)
    torch.testing.assert_close(prediction.losses(y), oracle)
    assert prediction.coverage(y, 0.9) == pytest.approx(0.9, abs=0.01)


def test_prototype_has_the_covariance_of_ssla():
    """kfac at the trained head, temperature 1, one precision for weights and bias."""
    torch.manual_seed(0)
    phi = torch.relu(torch.randn(300, 5))
    y = torch.randint(0, 3, (300,))
    layer = nn.Linear(5, 3)
    prior = ssla.priors.Gaussian(precision=2.0)
    posterior = ssla.fit(
        nn.Sequential(layer).eval(),
        (phi, y),
        likelihood=Categorical(),
        prior=prior,
        structure="kfac",
        gaussian="laplace",
        mode="tilt",
    )
    with torch.no_grad():
        head = prototype.Head(phi, layer(phi))
        cov = head.covariance(head.laplace(1.0), 2.0)
        v = cov.variances(prototype.with_ones(phi[:20]))
        K = torch.einsum("ij,nj,kj->nik", cov.basis_b, v, cov.basis_b)
    oracle = posterior.marginal(phi[:20]).covariance
    torch.testing.assert_close(K.double(), oracle.double(), rtol=1e-3, atol=1e-5)


def test_predict_with_a_narrow_covariance_is_the_plug_in():
    torch.manual_seed(0)
    phi = torch.randn(50, 4)
    f = torch.randn(50, 3)
    head = prototype.Head(phi, f)
    probs, entropy = prototype.predict(head.covariance(head.laplace(1.5), 1e12), phi, f, 1.5)
    torch.testing.assert_close(probs, torch.softmax(f / 1.5, -1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy, torch.special.entr(probs).sum(-1), rtol=1e-3, atol=1e-4)


def test_chosen_takes_the_smallest_precision_within_the_tolerance():
    def candidate(precision, temperature, loss):
        return prototype.Candidate(precision, temperature, torch.full((100,), loss), torch.eye(2))

    found = [
        candidate(100.0, 1.0, 0.2000),
        candidate(10.0, 1.0, 0.2008),
        candidate(10.0, 1.2, 0.2006),
        candidate(1.0, 1.0, 0.3000),
    ]
    assert prototype.chosen(found, 0.0, 0.0).precision == 100.0
    pick = prototype.chosen(found, 1.0, 0.005)
    assert (pick.precision, pick.temperature) == (10.0, 1.2)


@pytest.mark.parametrize("rows", [tasks.cnn_rows, tasks.sequence_rows])
def test_rows_are_the_same_in_every_call_and_apart(rows):
    first = rows()
    second = rows()
    assert torch.equal(first.train[0], second.train[0])
    assert torch.equal(first.ood, second.ood)
    parts = [{tuple(row.tolist()) for row in x} for x in (first.train[0], first.test[0])]
    assert len(parts[0] & parts[1]) <= 1  # scikit-learn's digits may hold equal pictures
