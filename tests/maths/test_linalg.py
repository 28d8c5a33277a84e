"""Roots, determinants, ascent."""

import pytest
import torch

from ssla.maths import linalg
from support.oracles import random_spd

SIZES = [1, 2, 3, 5]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["regular", "singular", "zero"])
def test_root_squares_to_the_matrix(size, kind):
    K = random_spd(7, size, size, singular=kind == "singular") * (kind != "zero")
    R = linalg.covariance_root(K)
    assert torch.isfinite(R).all()
    assert torch.allclose(R @ R.mT, K, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("size", SIZES)
def test_identity_plus_equals_dense_factorisation(size):
    R = linalg.covariance_root(random_spd(9, size, size, seed=1))
    precision = random_spd(9, size, size, seed=2) - 0.3 * torch.eye(size)  # some indefinite
    b = torch.randn(9, size, dtype=torch.float64)
    factor = linalg.factorise_identity_plus(R, precision)
    A = torch.eye(size, dtype=torch.float64) + R.mT @ precision @ R
    positive = torch.linalg.eigvalsh(A)[:, 0] > 0
    assert torch.equal(factor.positive, positive)
    assert int(positive.sum()) > 0
    assert torch.allclose(
        factor.logdet()[positive], torch.logdet(A)[positive], rtol=1e-11, atol=1e-12
    )
    assert torch.allclose(
        factor.solve(b)[positive],
        torch.linalg.solve(A, b.unsqueeze(-1)).squeeze(-1)[positive],
        rtol=1e-10,
    )


def test_indefinite_matrices_are_found():
    R = torch.eye(2, dtype=torch.float64)[None]
    assert not linalg.factorise_identity_plus(
        R, torch.tensor([[[-2.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    ).positive
    assert not linalg.factorise_identity_plus(
        R, torch.tensor([[[1.0, 3.0], [3.0, 1.0]]], dtype=torch.float64)
    ).positive


@pytest.mark.parametrize("size", SIZES)
def test_tiny_determinants_keep_their_digits(size):
    """log|I + S| for S of 1e-18 is the trace; a determinant of I + S would be exactly 1."""
    K = 1e-18 * random_spd(4, size, size, seed=3)
    precision = random_spd(4, size, size, seed=4)
    trace = (K @ precision).diagonal(dim1=-2, dim2=-1).sum(-1)
    assert torch.allclose(
        linalg.factorise_identity_plus(linalg.covariance_root(K), precision).logdet(),
        trace,
        rtol=1e-9,
        atol=0,
    )


@pytest.mark.parametrize("size", SIZES)
def test_products_equal_matmul(size):
    R = linalg.covariance_root(random_spd(6, size, size, seed=5))
    v = torch.randn(6, size, dtype=torch.float64)
    assert torch.allclose(linalg.multiply_root(R, v), (R @ v.unsqueeze(-1)).squeeze(-1), rtol=1e-13)
    assert torch.allclose(
        linalg.multiply_root_transposed(R, v), (R.mT @ v.unsqueeze(-1)).squeeze(-1), rtol=1e-13
    )
    assert torch.allclose(linalg.dot(v, v), (v * v).sum(-1), rtol=1e-13)


def _objective(a):
    """−a e^x + x·a·e^{t} − ½x² … concave with a known stationarity condition: gradient 3 − a
    e^x − x.
    """

    def evaluate(x, rows):
        scale = a if rows is None else a[rows]
        value = 3 * x[:, 0] - scale * x[:, 0].exp() - 0.5 * x[:, 0] ** 2
        gradient = 3 - scale * x[:, 0].exp() - x[:, 0]
        bend = 1 + scale * x[:, 0].exp()
        return linalg.Evaluation(value, gradient.unsqueeze(1), lambda b: b / bend.unsqueeze(1))

    return evaluate


def test_ascent_reaches_every_optimum_from_far_away():
    a = torch.logspace(-6, 6, 200, dtype=torch.float64)
    start = torch.linspace(-50, 50, 200, dtype=torch.float64).unsqueeze(1)
    ascent = linalg.newton_ascent(_objective(a), start)
    x = ascent.point[:, 0]
    assert ascent.converged.all()
    assert (3 - a * x.exp() - x).abs().max() < 1e-6


def test_ascent_says_when_it_ran_out_of_rounds():
    a = torch.full((3,), 1e-6, dtype=torch.float64)
    ascent = linalg.newton_ascent(
        _objective(a), torch.full((3, 1), 60.0, dtype=torch.float64), max_rounds=2
    )
    assert not ascent.converged.any()
    assert torch.isfinite(ascent.point).all()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_steps_of_the_factorisation_by_components(size):
    R = linalg.covariance_root(random_spd(5, size, size, seed=7))
    precision = random_spd(5, size, size, seed=8)
    expected = R.mT @ precision @ R
    S = linalg._compute_congruence_entries(R, precision)
    assert torch.allclose(linalg.stack_square(S), expected, rtol=1e-12)
    L, excess, pivots = linalg._factorise_unit_lower(S)
    lower = torch.eye(size, dtype=torch.float64).repeat(5, 1, 1)
    for i in range(size):
        for j in range(i):
            lower[:, i, j] = L[i][j]
    D = torch.diag_embed(torch.stack(pivots, -1))
    assert torch.allclose(lower @ D @ lower.mT, expected + torch.eye(size), rtol=1e-12)
    assert all(torch.allclose(e, d - 1) for e, d in zip(excess, pivots, strict=True))
