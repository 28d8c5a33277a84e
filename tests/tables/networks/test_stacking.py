"""Stacking weights: against a grid, against an independent solver, the conditions of the
maximum, and bad input.
"""

import numpy as np
import pytest
import torch
from scipy import optimize

from ssla.tables.networks import stacking_weights

GENERATOR = torch.Generator().manual_seed(0)


def densities(rows, models, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(rows, generator=generator, dtype=torch.float64)
    centre, scale = (
        torch.randn(models, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return torch.distributions.Normal(centre, (0.5 * scale).exp()).log_prob(y[:, None])


def objective(L, w, c=None):
    value = torch.logsumexp(L + w.log(), 1)
    return float(value.mean() if c is None else c @ value / c.sum())


@pytest.mark.parametrize("seed", range(4))
def test_two_models_agree_with_a_grid(seed):
    L = densities(60, 2, seed)
    w = stacking_weights(L)
    share = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    values = torch.stack(
        [torch.logaddexp(a + share.log(), b + (1 - share).log()) for a, b in L]
    ).mean(0)
    assert objective(L, w) >= float(values.max()) - 2e-7
    assert abs(float(w[0] - share[values.argmax()])) < 2e-3


@pytest.mark.parametrize("models", [2, 3, 8])
def test_the_maximum_has_its_conditions(models):
    """g = 1 where w > 0 and g ≤ 1 elsewhere; c are row weights."""
    L = densities(200, models, 3)
    c = torch.rand(200, generator=GENERATOR, dtype=torch.float64)
    w = stacking_weights(L, c)
    assert float(w.sum()) == pytest.approx(1)
    assert bool((w >= 0).all())
    g = (c / c.sum() / (L.exp() @ w)) @ L.exp()
    assert float(g.max()) <= 1 + 1e-7
    assert float(w @ g) == pytest.approx(1)
    assert torch.allclose(g[w > 1e-2], torch.ones_like(g[w > 1e-2]), atol=1e-4)


def test_no_point_of_the_simplex_is_better_and_the_objective_is_concave():
    L = densities(80, 4, 1)
    w = stacking_weights(L)
    points = torch.distributions.Dirichlet(torch.ones(4, dtype=torch.float64)).sample((300,))
    found = [objective(L, point) for point in points]
    assert max(found) <= objective(L, w) + 1e-7
    for a, b in zip(points, points.flip(0), strict=True):
        assert objective(L, (a + b) / 2) >= (objective(L, a) + objective(L, b)) / 2 - 1e-12


def test_it_agrees_with_a_solver_of_scipy():
    L = densities(150, 3, 5)
    P = L.exp().numpy()
    found = optimize.minimize(
        lambda w: -np.log(P @ w).mean(),
        np.full(3, 1 / 3),
        method="SLSQP",
        bounds=[(1e-12, 1)] * 3,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-14},
    )
    assert objective(L, stacking_weights(L)) == pytest.approx(-found.fun, abs=1e-7)


def test_row_weights_equal_repetitions_and_scales_of_rows_do_not_matter():
    L = densities(40, 3, 2)
    times = torch.arange(40) % 3
    one, two = stacking_weights(L, times), stacking_weights(L.repeat_interleave(times, 0))
    assert torch.allclose(one, two, atol=1e-9)
    far = stacking_weights(
        L - 1e4 * torch.rand(40, 1, generator=GENERATOR, dtype=torch.float64), times
    )
    assert torch.allclose(one, far, atol=1e-6)


def test_plain_cases():
    assert stacking_weights([[-1.0], [-2.0]]).tolist() == [1.0]
    equal = stacking_weights(torch.zeros(5, 4))
    assert torch.allclose(equal, torch.full((4,), 0.25, dtype=torch.float64))
    dominated = stacking_weights([[-1.0, -3.0], [-1.0, -2.0]])
    assert float(dominated[0]) == pytest.approx(1, abs=1e-6)
    exclusive = stacking_weights([[0.0, -torch.inf]] * 3 + [[-torch.inf, 0.0]])
    assert torch.allclose(exclusive, torch.tensor([0.75, 0.25], dtype=torch.float64))


@pytest.mark.parametrize(
    ("given", "weights", "message"),
    [
        ([1.0, 2.0], None, "shape"),
        ([[0.0, float("nan")]], None, "NaN"),
        ([[0.0, float("inf")]], None, "inf"),
        ([[0.0, 0.0], [-float("inf"), -float("inf")]], None, "density zero to 1 rows"),
        ([[0.0, 0.0]], [1.0, 2.0], "row_weights must have shape"),
        ([[0.0, 0.0]], [-1.0], "negative"),
        ([[0.0, 0.0]], [0.0], "positive"),
    ],
)
def test_bad_input_has_a_message(given, weights, message):
    with pytest.raises(ValueError, match=message):
        stacking_weights(given, weights)


def test_too_few_steps_are_warned_about():
    with pytest.warns(UserWarning, match="did not converge in 1 steps"):
        stacking_weights(densities(60, 3, 1), steps=1)
