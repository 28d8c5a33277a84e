"""The scale of rows: its formula by NumPy, and outputs divided by it."""

import numpy as np
import pytest
import torch

from ssla.curvature.jacobians import Features
from ssla.network.row_scale import RowScale, compute_squared_lengths

F64 = torch.float64


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("strength", [0.0, 0.3, 5.0])
def test_the_scale_is_its_formula(strength):
    squares = np.array([0.0, 0.1, 0.5, 2.0, 50.0])
    found = RowScale(strength, mean=2.0, least=0.5).compute_scales(torch.from_numpy(squares))
    h = np.maximum(squares, 0.5) / 2.0
    assert np.allclose(found, np.sqrt((1 + strength * h) / (1 + strength)), rtol=1e-14)
    assert float(found[3]) == pytest.approx(1.0, abs=1e-15)  # a row of mean length
    assert (float(found[4]) > 2) == (strength > 0)
    assert found[0] == found[1] == found[2]  # shorter than the least


def test_a_large_strength_gives_features_of_equal_length():
    phi = numbers(6, 4) * torch.tensor([[0.5], [1.0], [2.0], [4.0], [8.0], [16.0]], dtype=F64)
    scale = RowScale(1e12, mean=3.0, least=0.0)
    found = scale.scale_features(Features(phi, 2), 4).phi
    assert torch.allclose(found.square().sum(1), torch.full((6,), 3.0, dtype=F64), rtol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_ones_are_divided_by_the_scale(bias):
    phi, theta = numbers(5, 3), numbers(2 * (3 + bias), seed=1)
    J = Features(phi, 2, bias)
    scale = RowScale(0.7, mean=2.0, least=0.1)
    scaled = scale.scale_features(J, 3)
    s = scale.compute_scales(phi.square().sum(1))
    assert torch.allclose(scaled.push(theta), J.push(theta) / s[:, None], atol=1e-14)
    assert scaled.width == J.width
    assert not scaled.bias  # the column of 1/s is stored
    assert torch.allclose(
        scaled.to_dense().values, J.to_dense().values / s[:, None, None], atol=1e-14
    )


def test_lengths_leave_out_stored_ones_and_are_float64():
    phi = numbers(5, 3).float()
    stored = torch.cat([phi, torch.ones(5, 1)], 1)
    expected = torch.linalg.vector_norm(phi.double(), dim=1) ** 2
    for J in (Features(phi, 2), Features(phi, 2, bias=True), Features(stored, 2)):
        found = compute_squared_lengths(J, 3)
        assert found.dtype == F64
        assert torch.allclose(found, expected, rtol=1e-14)


def test_the_dtype_and_the_memory_of_features_stay():
    J = Features(numbers(5, 3).float(), 2, keeps_squares=True)
    scaled = RowScale(0.7, mean=2.0, least=0.1).scale_features(J, 3)
    assert scaled.dtype == torch.float32
    assert scaled.keeps_squares
