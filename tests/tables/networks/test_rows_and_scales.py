"""Rows that are held out, and scalings: the functions below a fit, each by itself."""

import math

import pytest
import torch

from ssla.predictive.transformed import Exponential
from ssla.tables.networks.embeddings import draw_first_embeddings
from ssla.tables.networks.ensemble import scale_targets
from ssla.tables.networks.folds import find_latest_rows
from ssla.tables.networks.scaling import find_column_units, fit_scaling
from ssla.tables.networks.threads import limit_threads


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def test_rows_of_the_time_at_the_border_stay_together():
    time = torch.tensor([1, 2, 2, 3])
    assert find_latest_rows(time, 1).tolist() == [False, False, False, True]
    assert find_latest_rows(time, 2).tolist() == [False, True, True, True]


def test_the_earliest_time_is_left_for_the_training():
    time = torch.tensor([1, 1, 2])
    assert find_latest_rows(time, 2).tolist() == [False, False, True]
    with pytest.raises(ValueError, match="one value only"):
        find_latest_rows(torch.tensor([5, 5]), 1)


def test_the_unit_of_a_column_is_a_power_of_two():
    units = find_column_units(double([[3.0, -4.0, 0.0], [1.0, 1.0, 0.0]]))
    assert units.tolist() == [2.0, 4.0, 0.5]
    assert float(find_column_units(double([[5e-324]]))) == 2.0**-1022


def test_scalings_of_huge_and_constant_columns_are_finite():
    x = double([[1e300, 7.0, 2.0], [-1e300, 7.0, 1.0]])
    scaling = fit_scaling(x, double([1.0, 1.0]), levels=(0, 0, 2))
    assert scaling.scale.tolist() == [1e300, 1.0, 1.0]
    assert scaling.shift.tolist() == [0.0, 7.0, 0.0]
    assert scaling(x)[:, 0].tolist() == [1.0, -1.0]


def test_targets_are_brought_to_their_scale():
    y = double([1.0, math.e])
    assert scale_targets(y, None, "gaussian") is y
    assert torch.allclose(scale_targets(y, Exponential(), "log_normal"), double([0.0, 1.0]))
    for wrong in (double([0.0, 1.0]), y[:, None]):
        with pytest.raises(ValueError, match="'log_normal' needs one target"):
            scale_targets(wrong, Exponential(), "log_normal")


def test_embeddings_start_small_and_at_zero_for_code_zero():
    shape = torch.Size([3, 2])
    generator = torch.Generator().manual_seed(0)
    drawn = draw_first_embeddings(4, shape, generator, torch.float64)
    assert drawn.shape == (4, 6)
    assert not bool(drawn[:, :2].any())
    assert 0 < float(drawn.abs().max()) < 1


def test_threads_are_limited_inside_the_block_only():
    def fail_with_one_thread():
        with limit_threads(small=True):
            assert torch.get_num_threads() == 1
            raise RuntimeError

    before = torch.get_num_threads()
    with pytest.raises(RuntimeError):
        fail_with_one_thread()
    assert torch.get_num_threads() == before
    with limit_threads(small=False):
        assert torch.get_num_threads() == before
