"""Determinants of refits by a sketch: against explicit eigenvalues, and the errors that it
states.
"""

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.refit.weights import last_layer_blocks
from ssla.refit.weights import last_layer_products as engine
from ssla.refit.weights import weight_refit as refits
from ssla.refit.weights.last_layer_blocks import (
    SharedBlocks,
    open_shared_blocks,
    solve_by_conjugate_gradients,
)
from ssla.refit.weights.last_layer_sketch import (
    compute_remainder_from_products,
    compute_sampling_probabilities,
    sample_systematically,
)
from ssla.refit.weights.refit_rows import Block
from support.refits import all_classes, class_problem, inputs, seeded


def products(eigenvalues, vectors, seed):
    """w_sᵀ A w_t of Gaussian vectors, and w_sᵀ A w_s − tr A."""
    z = torch.randn(len(eigenvalues), vectors, generator=seeded(seed), dtype=torch.float64)
    Q = z.mT @ (eigenvalues.unsqueeze(1) * z)
    return Q, (Q.diagonal() - eigenvalues.sum()).unsqueeze(1)


def test_products_of_many_vectors_give_the_determinant():
    """Over many sketches: no bias beyond the noise, and deviations as large as stated."""
    eigenvalues = 0.1 * torch.randn(300, generator=seeded(1), dtype=torch.float64)
    expected = float((eigenvalues.log1p() - eigenvalues).sum())
    found = [
        compute_remainder_from_products(*products(eigenvalues, 64, seed)) for seed in range(2, 42)
    ]
    off = torch.tensor([one.value - expected for one in found])
    stated = torch.tensor([one.error for one in found])
    assert abs(float(off.mean())) < 3 * float(off.std()) / 40**0.5 + 0.01 * abs(expected)
    assert 0.5 < float((off / stated).square().mean().sqrt()) < 1.5


def test_large_eigenvalues_have_a_large_stated_error():
    eigenvalues = torch.cat([torch.full((5,), 8.0), 0.01 * torch.ones(100)]).double()
    expected = float((eigenvalues.log1p() - eigenvalues).sum())
    found = compute_remainder_from_products(*products(eigenvalues, 64, 3))
    assert found.error > 0.2 * abs(found.value - expected)
    assert found.error > 1


def test_nothing_that_changes_has_no_remainder():
    found = compute_remainder_from_products(
        torch.zeros(8, 8, dtype=torch.float64), torch.zeros(8, 1, dtype=torch.float64)
    )
    assert found == (0.0, 0.0)


def test_rows_are_sampled_with_their_probabilities():
    size = torch.rand(500, generator=seeded(1)).double() ** 12
    pi = compute_sampling_probabilities(size, 100)
    assert float(pi.max()) == 1
    assert float(pi.sum()) == pytest.approx(100, rel=1e-3)
    counts = torch.zeros(500, dtype=torch.float64)
    offsets = torch.rand(400, generator=seeded(2)).tolist()
    for offset in offsets:
        counts[sample_systematically(pi, offset)] += 1
    assert torch.allclose(counts / len(offsets), pi, atol=0.12)
    assert torch.equal(compute_sampling_probabilities(size, 500), torch.ones(500).double())


@pytest.mark.filterwarnings("ignore:On the training rows the predictive is worse")
def test_a_sketched_determinant_is_that_of_the_dense_engine(monkeypatch):
    """With sampled rows and with weights of rows: within the stated error."""
    weights = 0.5 + torch.rand(1500, generator=seeded(8)).double()
    post, new = class_problem(n=1500, width=30, classes=5, noise=2.5, weights=weights)
    monkeypatch.setattr(engine, "LARGE", 0.0)
    monkeypatch.setattr(engine, "ENOUGH", 1e9)
    y = all_classes(post, new)
    found = ssla.WeightRefit(logdet="traces", tolerance=1e-4)(post, new)
    assert found._engine.shared_vectors is not None
    sketched = found.solve(y)
    exact = ssla.WeightRefit(logdet="exact")(post, new).solve(y)
    off = sketched.curvature - exact.curvature
    assert float(sketched.error.max()) > 1e-3
    assert float(sketched.error.max()) < 0.05
    assert (off.abs() <= 4 * sketched.error + 1e-3).all()
    assert float(exact.curvature.max() - exact.curvature.min()) > 0.5


@pytest.mark.filterwarnings("ignore:On the training rows the predictive is worse")
def test_blocks_of_the_curvature_have_the_dense_determinants_within_the_stated_error(monkeypatch):
    """Without a P×P matrix: modes are exact, determinants are corrected by vectors that
    conjugate gradients solve for.
    """
    weights = 0.5 + torch.rand(600, generator=seeded(8)).double()
    post, new = class_problem(n=600, width=15, classes=6, noise=2.5, weights=weights)
    y = all_classes(post, new)
    exact = ssla.WeightRefit(logdet="exact")(post, new).solve(y)
    monkeypatch.setattr(engine, "count_factor_bytes", lambda *_: 1 << 60)
    log_density = ssla.WeightRefit(logdet="traces")(post, new)
    assert isinstance(log_density._engine.shared, SharedBlocks)
    found = log_density.solve(y)
    assert found.converged.all()
    assert not found.fallback.any()
    assert torch.allclose(
        found.likelihood + found.prior, (exact.likelihood + exact.prior), rtol=0, atol=1e-3
    )
    off = (found.curvature - exact.curvature) / found.error
    assert 1e-3 < float(found.error.mean()) < 0.03
    assert float(off.abs().max()) < 5
    assert 0.2 < float(off.square().mean().sqrt()) < 2
    # Sampled rows a few at a time: the same sums.
    monkeypatch.setattr(last_layer_blocks, "NUMBERS_AT_ONCE", 5 * 6 * 64)
    by_parts = ssla.WeightRefit(logdet="traces")(post, new).solve(y)
    torch.testing.assert_close(by_parts.curvature, found.curvature, rtol=0, atol=1e-5)
    torch.testing.assert_close(by_parts.error, found.error, rtol=1e-4, atol=0)


def test_independent_outputs_need_no_correction():
    """Independent outputs (Gaussian noise): blocks are H itself, so u = z and nothing is
    estimated.
    """
    x = inputs(80, 1, 4)
    y = x[:, :3] + 0.3 * inputs(80, 2, 3)
    torch.manual_seed(0)
    post = ssla.fit(
        nn.Linear(4, 3).double(),
        (x, y),
        likelihood=L.Gaussian(noise=0.3),
        prior=priors.Gaussian(0.7),
    )
    blocks = [Block(torch.cat([x, torch.ones(80, 1).double()], 1), post.predict(x).mean, y, None)]
    prior = torch.diag_embed(torch.full((3, 5), 0.7).double())
    shared = open_shared_blocks(blocks, post.likelihood, prior, "fisher", 8)
    assert torch.allclose(shared.u, shared.z)
    assert shared.residual < 1e-6


def test_conjugate_gradients_solve():
    root = torch.randn(3, 12, 12, generator=seeded(4), dtype=torch.float64)[0]
    H = root @ root.mT + torch.eye(12)
    right = torch.randn(5, 12, generator=seeded(5), dtype=torch.float64)
    found, residual = solve_by_conjugate_gradients(
        lambda w: w @ H, lambda r: r / H.diagonal(), right, torch.zeros_like(right)
    )
    assert residual < 1e-3
    assert torch.allclose(found @ H, right, atol=2e-2)


def test_the_predictive_states_the_error(monkeypatch):
    post, new = class_problem(n=600, width=15, classes=6, noise=2.5)
    assert not post.predict(new, refit="weights").diagnostics.error.any()
    for module in (engine, refits):
        monkeypatch.setattr(module, "count_factor_bytes", lambda *_: 1 << 60)
    monkeypatch.setattr(refits, "count_dense_bytes", lambda *_: 1 << 60)
    found = post.predict(new, refit="weights").diagnostics
    assert 0 < float(found.error.max()) < 0.05
    assert "standard error of log probabilities at most" in str(found)
