"""The profile of log p over the mean, from which output refits start."""

import torch

from ssla.likelihoods.heteroscedastic import _Profile


def profile():
    generator = torch.Generator().manual_seed(3)
    r, beta = 3 * torch.randn(2, 40, dtype=torch.float64, generator=generator)
    c, q = 0.1 + 4 * torch.rand(2, 40, dtype=torch.float64, generator=generator)
    return _Profile(r, torch.zeros_like(r), c, beta, q)


def test_the_highest_maximum_is_that_of_a_grid_and_newton_steps_stay_there():
    task = profile()
    start = task.find_lambert_start()
    d = task.find_highest_maximum(start)
    grid = torch.linspace(-25, 25, 20_001, dtype=torch.float64)
    on_grid = torch.stack([task.compute_height(value.expand(40)) for value in grid])
    assert bool((task.compute_height(d) >= on_grid.amax(0) - 1e-9).all())
    assert torch.allclose(task.take_newton_step(d), d, atol=1e-8)


def test_an_impossible_change_has_no_height():
    task = profile()
    heights = task.compute_height(torch.full((40,), torch.nan, dtype=torch.float64))
    assert bool((heights == -torch.inf).all())
