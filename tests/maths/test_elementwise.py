"""Functions of entries: exact at extremes, accurate where a plain formula cancels."""

import math

import pytest
import torch

from ssla.maths.elementwise import (
    capped_exp,
    common_shape,
    largest_exponent,
    softplus_difference,
    uniform_numbers,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_capped_exp_is_exp_up_to_the_cap_and_its_fourth_power_is_finite(dtype):
    cap = largest_exponent(dtype)
    inside = torch.linspace(-cap, cap, 50, dtype=dtype)
    assert torch.equal(capped_exp(inside), inside.exp())
    beyond = capped_exp(torch.tensor([cap, cap + 1, torch.inf], dtype=dtype))
    assert torch.equal(beyond, beyond[:1].expand(3))
    assert bool((0.99 * beyond).pow(4).isfinite().all())
    assert cap == pytest.approx(math.log(torch.finfo(dtype).max) / 4)


def test_softplus_difference_equals_the_integral_of_its_slope():
    old = torch.tensor([-600.0, -40.0, -1.0, 0.0, 2.0, 40.0, 600.0]).double()[:, None]
    step = torch.tensor([-3.0, -1.0, -1e-3, -1e-13, 0.0, 1e-13, 0.4, 1.0, 3.0]).double()
    # softplus(old + step) − softplus(old) = ∫₀¹ σ(old + t·step) step dt, by Simpson's rule.
    t = torch.linspace(0, 1, 2001, dtype=torch.float64)
    weights = torch.full((2001,), 2.0, dtype=torch.float64)
    weights[1::2] = 4.0
    weights[[0, -1]] = 1.0
    slopes = torch.sigmoid(old[..., None] + t * step[:, None])
    expected = (slopes * weights).sum(-1) / 6000 * step
    # Beyond |step| = 1 the difference is the plain one, which rounds softplus(old).
    short = step.abs() <= 1
    found = softplus_difference(old, step)
    torch.testing.assert_close(found[:, short], expected[:, short], rtol=1e-11, atol=0.0)
    torch.testing.assert_close(found[:, ~short], expected[:, ~short], rtol=1e-11, atol=1e-15)


def test_softplus_difference_has_finite_gradients_for_large_steps():
    step = torch.tensor([-900.0, 0.5, 900.0], dtype=torch.float64, requires_grad=True)
    softplus_difference(torch.zeros(3, dtype=torch.float64), step).sum().backward()
    torch.testing.assert_close(step.grad, torch.sigmoid(step.detach()))


def test_uniform_numbers_are_inside_the_interval_and_follow_the_generator(monkeypatch):
    template = torch.zeros(2, 3)
    draws = [uniform_numbers(template, 5, torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*draws)
    assert draws[0].shape == (5, 2, 3)
    assert draws[0].dtype == torch.float64
    assert bool(((draws[0] > 0) & (draws[0] < 1)).all())
    # torch.rand may return 0. 1 is refused too, so that no rounding of a generator can reach it.
    for extreme in (0.0, 1.0):
        value = torch.tensor(extreme, dtype=torch.float64)
        monkeypatch.setattr(torch, "rand", lambda *_, value=value, **__: value)
        u = uniform_numbers(template, 1, None)
        assert 0 < float(u) < 1
        assert bool(torch.special.ndtri(u).isfinite())


def test_the_common_shape_is_that_of_broadcasting():
    shapes = [(3, 1), (1, 4), (2, 1, 1)]
    assert common_shape(*map(torch.zeros, shapes)) == (2, 3, 4)
