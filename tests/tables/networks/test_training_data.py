"""Rows of members: selections keep what belongs together."""

import pytest
import torch

from ssla.tables.networks.training import Schedule, _compute_learning_rate
from ssla.tables.networks.training_data import TrainingData, thin_out


def test_few_chosen_rows_are_all_kept():
    chosen = torch.tensor([True, False, True])
    assert thin_out(chosen, 2) is chosen


def test_many_chosen_rows_are_thinned_evenly_with_the_first_and_the_last():
    chosen = torch.ones(100, dtype=torch.bool)
    chosen[::2] = False
    kept = thin_out(chosen, 5).nonzero().flatten()
    assert kept.tolist() == [1, 25, 49, 73, 99]
    assert bool(chosen[kept].all())


def test_selected_rows_keep_their_targets_weights_and_members():
    rows = torch.arange(6)
    held = torch.stack([rows < 2, rows > 3])
    data = TrainingData(rows[:, None].double(), rows.double(), 10 * rows.double(), held)
    part = data.select_rows(rows % 2 == 1)
    assert part.y.tolist() == [1, 3, 5]
    assert part.held.tolist() == [[True, False, False], [False, False, True]]
    z, y, weights = data.take_rows(held[1])
    assert z[:, 0].tolist() == y.tolist() == [4, 5]
    assert weights.tolist() == [40, 50]
    assert torch.equal(data.take_rows()[1], data.y)


def test_the_learning_rate_falls_from_the_first_epoch_to_a_small_share():
    schedule = Schedule(max_epochs=10, learning_rate=0.5)
    rates = [_compute_learning_rate(schedule, epoch) for epoch in range(1, 11)]
    assert rates[0] == pytest.approx(0.5)
    assert rates == sorted(rates, reverse=True)
    assert rates[5] == pytest.approx(0.5 * 0.51)
    assert rates[-1] > 0.5 * 0.02
