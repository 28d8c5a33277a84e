"""Conjugate gradients against a direct solve, and where there is no minimum."""

import pytest
import torch

from ssla.maths.conjugate import conjugate_gradients
from support.oracles import random_spd


def _right(size):
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("preconditioned", [False, True])
def test_they_solve_a_linear_system(preconditioned):
    A, b = random_spd(30, 30, seed=0), _right(30)
    near = A.diagonal() if preconditioned else torch.ones(30, dtype=torch.float64)
    found = conjugate_gradients(lambda v: A @ v, b, lambda v: v / near, tolerance=1e-12)
    torch.testing.assert_close(found, torch.linalg.solve(A, b), rtol=1e-8, atol=1e-8)


def test_an_exact_preconditioner_needs_one_product():
    A, b = random_spd(30, 30, seed=0), _right(30)
    products = []

    def product(v):
        products.append(v)
        return A @ v

    found = conjugate_gradients(product, b, lambda v: torch.linalg.solve(A, v))
    assert len(products) == 1
    torch.testing.assert_close(found, torch.linalg.solve(A, b))


def test_negative_curvature_ends_with_a_direction_of_ascent():
    values = torch.tensor([3.0, 2.0, -1.0], dtype=torch.float64)
    b = torch.tensor([1.0, 1.0, 0.1], dtype=torch.float64)
    found = conjugate_gradients(lambda v: values * v, b, lambda v: v)
    assert found is not None
    assert float(found @ b) > 0
    assert conjugate_gradients(lambda v: -v, b, lambda v: v) is None


def test_nothing_to_solve():
    assert torch.equal(
        conjugate_gradients(lambda v: v, torch.zeros(3), lambda v: v), torch.zeros(3)
    )
