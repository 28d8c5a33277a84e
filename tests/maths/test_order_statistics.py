"""Quantiles that leave room for one more row."""

import math

import pytest
import torch

from ssla.maths.order_statistics import conformal_quantile, describe_row_shortage


@pytest.mark.parametrize("level", [0.05, 0.5, 0.55, 0.9, 0.99])
def test_weights_of_one_give_an_order_statistic(level):
    values = torch.randn(3, 99, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    k = math.ceil(100 * level - 1e-9)
    assert torch.equal(
        conformal_quantile(values, torch.ones(99, dtype=torch.float64), level),
        values.sort(1).values[:, k - 1],
    )


def test_weights_are_frequencies():
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(2, 20, dtype=torch.float64, generator=generator)
    weights = torch.randint(0, 5, (20,), generator=generator)
    repeated = values.repeat_interleave(weights, 1)
    ones = torch.ones(repeated.shape[1], dtype=torch.float64)
    for level in (0.1, 0.5, 0.9):
        assert torch.equal(
            conformal_quantile(values, weights.double(), level),
            conformal_quantile(repeated, ones, level),
        )


def test_too_few_rows_are_named():
    few = torch.ones(8, dtype=torch.float64)
    assert bool(conformal_quantile(torch.arange(8.0), few, 0.9).isinf())
    assert describe_row_shortage(few, 0.9, "rows") == "needs at least 9 rows, but there are 8"
    assert (
        describe_row_shortage(few / 4, 0.9, "rows")
        == "needs at least 9 rows, but there are 8 with a total weight of 2"
    )
    assert describe_row_shortage(torch.ones(9), 0.9, "rows") is None
    assert conformal_quantile(torch.arange(9.0), torch.ones(9), 0.9) == 8
