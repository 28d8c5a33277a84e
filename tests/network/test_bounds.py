"""Features so large that their squares overflow."""

import math

import pytest
import torch

from ssla.network.bounds import LARGEST, LARGEST_FLOAT32, shrink_factors, shrink_rows

F64 = torch.float64


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(torch.float32, LARGEST_FLOAT32), (torch.bfloat16, LARGEST_FLOAT32 / 2), (F64, LARGEST)],
)
def test_rows_within_the_bound_of_their_dtype_are_left_alone(dtype, largest):
    part = torch.tensor([[1.0, -largest], [0.0, 3.0]], dtype=dtype)
    assert shrink_factors(part) is None
    assert shrink_factors(part, torch.empty(2, 0)) is None
    assert shrink_factors() is None


def test_a_float32_row_beyond_the_room_is_kept_at_its_size_in_float64():
    part = torch.tensor([[2 * LARGEST_FLOAT32, 1.0], [1.0, 1.0]])
    factors = shrink_factors(part)
    assert torch.equal(factors, torch.ones(2, dtype=F64))
    assert torch.equal(shrink_rows(part, factors), part.double())
    assert torch.isfinite(shrink_rows(part, factors) ** 4).all()


def test_each_row_is_moved_along_its_ray_to_the_largest_size():
    one = torch.tensor([[1e70, -1e65], [1.0, 2.0], [0.0, -1e80]], dtype=F64)
    two = torch.tensor([[[3.0]], [[1e61]], [[1e90]]], dtype=F64)
    factors = shrink_factors(one, two)
    assert torch.allclose(factors, torch.tensor([1e-10, 1e-1, 1e-30], dtype=F64), rtol=1e-14)
    for part in (one, two):
        found = shrink_rows(part, factors)
        assert found.shape == part.shape
        assert float(found.abs().max()) <= LARGEST * (1 + 1e-14)
        ratio = found.flatten(1) / part.flatten(1)
        known = part.flatten(1) != 0
        assert torch.allclose(ratio[known], factors[:, None].expand_as(ratio)[known], rtol=1e-14)


def test_an_infinite_entry_is_the_largest_number():
    part = torch.tensor([[math.inf, 1.0], [-math.inf, 0.0]])
    factors = shrink_factors(part)
    found = shrink_rows(part, factors)
    assert torch.allclose(found[:, 0], torch.tensor([LARGEST, -LARGEST], dtype=F64), rtol=1e-12)
    assert torch.isfinite(found).all()


def test_inside_vmap_nothing_is_done():
    seen = []
    huge = torch.full((2, 3, 1), 1e80, dtype=F64)
    torch.func.vmap(lambda part: seen.append(shrink_factors(part)) or part)(huge)
    assert seen == [None]
    assert shrink_factors(huge[0]) is not None
