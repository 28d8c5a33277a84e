"""The rule by which validation rows choose: a function of a table of log densities."""

from __future__ import annotations

import math

import pytest
import torch

from ssla.fitting.choice import (
    MOST_LOSS,
    Setting,
    choose_setting,
    compute_mean_and_error,
    cross_fit_scores,
    find_parabola_top,
    refine_spread,
)
from ssla.report import LAPLACE, POLISH, TILT, VARIATIONAL

ROWS = 400
ONES = torch.ones(ROWS, dtype=torch.float64)


def _row(mean: float, noise: float = 0.1, seed: int = 0) -> torch.Tensor:
    """Log densities with exactly that mean, and differences between seeds of about that size."""
    values = noise * torch.randn(
        ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return values - values.mean() + mean


def test_mean_and_error_are_those_of_a_sample() -> None:
    values = _row(0.3, 2.0)
    found = compute_mean_and_error(values, ONES)
    assert found.mean == pytest.approx(0.3)
    assert found.error == pytest.approx(float(values.std()) / math.sqrt(ROWS))


def test_a_weight_of_two_is_the_row_twice_in_the_mean() -> None:
    weights = torch.ones(ROWS, dtype=torch.float64)
    weights[:7] = 2
    values = _row(0.0, 1.0)
    twice = torch.cat([values, values[:7]])
    assert compute_mean_and_error(values, weights).mean == pytest.approx(float(twice.mean()))


def test_the_smallest_precision_within_one_error_and_the_best_spread_there() -> None:
    settings = [
        Setting(TILT, LAPLACE, spread, level) for level in (4.0, 2.0, 1.0) for spread in (1.0, 1.5)
    ]
    error = 0.1 * math.sqrt(2 / ROWS)  # of a difference of two rows
    means = [0.0, -0.2, -0.2 * error, -0.1, -4 * error, -5 * error]
    assert 0.2 * error < MOST_LOSS
    scores = torch.stack([_row(mean, seed=i) for i, mean in enumerate(means)])
    assert settings[choose_setting(settings, scores, ONES)] == Setting(TILT, LAPLACE, 1.0, 2.0)


def test_the_price_of_doubt_is_limited() -> None:
    """Few noisy rows would allow more than MOST_LOSS."""
    settings = [Setting(TILT, LAPLACE, 1.0, level) for level in (2.0, 1.0)]
    for loss, chosen in ((0.9 * MOST_LOSS, 1), (1.1 * MOST_LOSS, 0)):
        scores = torch.stack([_row(0.0, 2.0, seed=0), _row(-loss, 2.0, seed=1)])
        assert choose_setting(settings, scores, ONES) == chosen


def test_the_best_is_taken_where_the_others_are_far() -> None:
    settings = [Setting(TILT, LAPLACE, 1.0, level) for level in (4.0, 2.0, 1.0)]
    scores = torch.stack([_row(mean, seed=i) for i, mean in enumerate((-0.5, 0.0, -0.5))])
    assert choose_setting(settings, scores, ONES) == 1


@pytest.mark.parametrize(("loss", "mode"), [(0.2, TILT), (1.8, TILT), (2.3, POLISH), (5.0, POLISH)])
def test_the_trained_head_is_kept_within_two_errors(loss: float, mode: str) -> None:
    error = 0.1 * math.sqrt(2 / ROWS)
    settings = [Setting(POLISH, LAPLACE, 1.0, 0.1), Setting(TILT, LAPLACE, 1.0, 1.0)]
    scores = torch.stack([_row(0.0, seed=0), _row(-loss * error, seed=1)])
    assert settings[choose_setting(settings, scores, ONES)].mode == mode


def test_the_variational_gaussian_is_preferred_within_one_error() -> None:
    error = 0.1 * math.sqrt(2 / ROWS)
    settings = [Setting(TILT, LAPLACE, 1.0, 1.0), Setting(TILT, VARIATIONAL, 1.0, 1.0)]
    scores = torch.stack([_row(0.0, seed=0), _row(-0.2 * error, seed=1)])
    assert settings[choose_setting(settings, scores, ONES)].gaussian == VARIATIONAL


def test_cross_fitting_scores_each_half_by_the_choice_of_the_other() -> None:
    even = (torch.arange(ROWS) % 2 == 0).double()
    # The first setting is good on even rows, the second on odd ones: each half chooses wrongly for
    # the other.
    scores = torch.stack([even, 1 - even])
    settings = [Setting(TILT, LAPLACE, 1.0, 1.0), Setting(TILT, LAPLACE, 2.0, 1.0)]
    assert float(cross_fit_scores(settings, scores, ONES).sum()) == 0
    assert float(scores[choose_setting(settings, scores, ONES)].mean()) == 0.5


def test_the_spread_is_the_top_of_a_parabola() -> None:
    top = 1.3
    spreads = (1.0, 1.25, 1.6)
    settings = [Setting(TILT, LAPLACE, s, 1.0) for s in spreads]
    scores = torch.stack([_row(-3 * math.log(s / top) ** 2) for s in spreads])
    chosen = choose_setting(settings, scores, ONES)
    assert refine_spread(settings, scores, ONES, chosen) == pytest.approx(top)
    edge = settings[:2]
    assert refine_spread(edge, scores[:2], ONES, 1) == 1.25


def test_the_top_of_a_parabola_is_where_its_slope_is_zero():
    a, b, c = -1.0, 0.5, 2.0
    heights = [3 - 2 * (t - 0.8) ** 2 for t in (a, b, c)]
    assert find_parabola_top(a, b, c, *heights) == pytest.approx(0.8)
    assert find_parabola_top(a, b, c, a, b, c) is None
