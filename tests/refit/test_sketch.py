"""Determinants of refits by a sketch: against explicit eigenvalues, and the errors that it states."""

import pytest
import torch

import ssla
from ssla.refit import last_layer_products as engine
from ssla.refit.last_layer_sketch import from_products, sampling, systematic
from support.refits import all_classes, class_problem, seeded


def products(eigenvalues, vectors, seed):
    """w_sᵀ A w_t of Gaussian vectors, and w_sᵀ A w_s − tr A."""
    z = torch.randn(len(eigenvalues), vectors, generator=seeded(seed), dtype=torch.float64)
    Q = z.mT @ (eigenvalues.unsqueeze(1) * z)
    return Q, (Q.diagonal() - eigenvalues.sum()).unsqueeze(1)


def test_products_of_many_vectors_give_the_determinant():
    """Over many sketches: no bias beyond the noise, and deviations as large as stated."""
    eigenvalues = 0.1 * torch.randn(300, generator=seeded(1), dtype=torch.float64)
    expected = float((eigenvalues.log1p() - eigenvalues).sum())
    found = [from_products(*products(eigenvalues, 64, seed)) for seed in range(2, 42)]
    off = torch.tensor([one.value - expected for one in found])
    stated = torch.tensor([one.error for one in found])
    assert abs(float(off.mean())) < 3 * float(off.std()) / 40**0.5 + 0.01 * abs(expected)
    assert 0.5 < float((off / stated).square().mean().sqrt()) < 1.5


def test_large_eigenvalues_have_a_large_stated_error():
    eigenvalues = torch.cat([torch.full((5,), 8.0), 0.01 * torch.ones(100)]).double()
    expected = float((eigenvalues.log1p() - eigenvalues).sum())
    found = from_products(*products(eigenvalues, 64, 3))
    assert found.error > 0.2 * abs(found.value - expected)
    assert found.error > 1


def test_nothing_that_changes_has_no_remainder():
    found = from_products(torch.zeros(8, 8, dtype=torch.float64), torch.zeros(8, 1, dtype=torch.float64))
    assert found == (0.0, 0.0)


def test_rows_are_sampled_with_their_probabilities():
    size = torch.rand(500, generator=seeded(1)).double() ** 12
    pi = sampling(size, 100)
    assert float(pi.max()) == 1
    assert float(pi.sum()) == pytest.approx(100, rel=1e-3)
    counts = torch.zeros(500, dtype=torch.float64)
    offsets = torch.rand(400, generator=seeded(2)).tolist()
    for offset in offsets:
        counts[systematic(pi, offset)] += 1
    assert torch.allclose(counts / len(offsets), pi, atol=0.12)
    assert torch.equal(sampling(size, 500), torch.ones(500).double())


@pytest.mark.filterwarnings("ignore:On the training rows the predictive is worse")
def test_a_sketched_determinant_is_that_of_the_dense_engine(monkeypatch):
    """With sampled rows and with weights of rows: within the stated error."""
    weights = 0.5 + torch.rand(1500, generator=seeded(8)).double()
    post, new = class_problem(n=1500, width=30, classes=5, noise=2.5, weights=weights)
    monkeypatch.setattr(engine, "LARGE", 0.0)
    monkeypatch.setattr(engine, "ENOUGH", 1e9)
    y = all_classes(post, new)
    found = ssla.WeightRefit(logdet="traces", tolerance=1e-4)(post.state, new)
    assert found._engine.vectors is not None
    sketched = found.solve(y)
    exact = ssla.WeightRefit(logdet="exact")(post.state, new).solve(y)
    off = sketched.curvature - exact.curvature
    assert float(sketched.error.max()) > 1e-3
    assert float(sketched.error.max()) < 0.05
    assert (off.abs() <= 4 * sketched.error + 1e-3).all()
    assert float(exact.curvature.max() - exact.curvature.min()) > 0.5
