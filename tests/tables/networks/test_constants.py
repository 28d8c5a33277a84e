"""Networks that predict worse than a constant have no share; and without any other network the
constant is predicted.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from ssla.sklearn import SSLARegressor, load
from ssla.tables.networks import building
from ssla.tables.networks.constant_members import is_worse_than_constant, make_constant_network
from ssla.tables.networks.count_targets import compute_member_gains

ROWS, MEMBERS = 150, 3


def table(seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(2 * ROWS, 4))
    y = 5 + 2 * X[:, 0] + X[:, 1] + 0.5 * rng.normal(size=2 * ROWS)
    return X[:ROWS], y[:ROWS], X[ROWS:], y[ROWS:]


def estimator(**options) -> SSLARegressor:
    usual = {"members": MEMBERS, "max_epochs": 30, "trees": 10, "random_state": 0}
    return SSLARegressor("heteroscedastic", **(usual | options))


def spoil(monkeypatch: pytest.MonkeyPatch, members: tuple[int, ...]) -> None:
    """After training, the given networks have means with 300 times their weights in the last
    layer.
    """
    honest = building.train_networks

    def train(*arguments, **options):
        trained = honest(*arguments, **options)
        for member in members:
            with torch.no_grad():
                trained.modules[member][-1].weight[0].mul_(300.0)
        return replace(trained, modules=trained.modules)

    monkeypatch.setattr(building, "train_networks", train)


def rmse(predicted: np.ndarray, y: np.ndarray) -> float:
    return float(np.sqrt(np.mean((predicted - y) ** 2)))


def test_comparison_is_that_of_weighted_squared_errors():
    rng = np.random.default_rng(1)
    for scale in np.linspace(0.1, 2, 50):
        y, means, weights = (
            rng.normal(size=(20, 2)),
            scale * rng.normal(size=(20, 2)),
            rng.uniform(0.1, 3, size=20),
        )
        constant = 0.3 * rng.normal(size=2)
        errors, allowed = 0.0, 0.0
        for i in range(20):
            errors += weights[i] * sum((y[i, d] - means[i, d]) ** 2 for d in range(2))
            allowed += weights[i] * sum((y[i, d] - constant[d]) ** 2 for d in range(2))
        found = is_worse_than_constant(
            *(torch.from_numpy(part) for part in (y, means, weights, constant))
        )
        assert found == (errors > allowed * (1 + (2 / weights.sum()) ** 0.5))


def test_means_that_are_not_finite_are_worse():
    y, weights, constant = torch.zeros(3, 1), torch.ones(3), torch.ones(1)
    for value in (torch.nan, torch.inf):
        assert is_worse_than_constant(y, torch.full((3, 1), value), weights, constant)


def test_constant_network_predicts_its_bias_and_leaves_the_network_as_it_was():
    network = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    before = [p.clone() for p in network.parameters()]
    bias = torch.tensor([1.5, -2.0], dtype=torch.float64)
    x = 100 * torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(make_constant_network(network, bias)(x), bias.expand(7, 2))
    assert not make_constant_network(network, None)(x).any()
    assert all(torch.equal(*pair) for pair in zip(before, network.parameters(), strict=True))


def test_a_network_with_wild_locations_has_no_share(monkeypatch):
    X, y, X_new, y_new = table()
    usual = estimator().fit(X, y)
    spoil(monkeypatch, (1,))
    model = estimator().fit(X, y)
    assert usual.ensemble_.left_out == ()
    assert usual.ensemble_.remark == ""
    assert model.ensemble_.left_out == (1,)
    assert model.ensemble_.kept_members == (0, 2)
    assert len(model.ensemble_.modules) == model.ensemble_.settings.members == 2
    assert sum(component.weight for component in model.ensemble_.components) == pytest.approx(1)
    assert "1 of 3 networks" in model.ensemble_.remark
    # of the mean, which the wild network would have moved by many standard deviations
    assert rmse(model.predict(X_new), y_new) < 1.3 * rmse(usual.predict(X_new), y_new)
    assert np.isfinite(model.predictive_set(X_new[:5], 0.9)).all()


def test_without_any_network_the_constant_is_predicted(monkeypatch):
    X, y, X_new, _ = table()
    spoil(monkeypatch, tuple(range(MEMBERS)))
    with pytest.warns(
        UserWarning, match="All 3 networks predict their held-out rows worse than the mean of y"
    ):
        model = estimator(trees=0).fit(X, y)
    assert model.ensemble_.constant
    assert "All 3 networks" in model.ensemble_.remark
    p = model.predict_dist(X_new)
    # the mean of y and its spread, up to the prior of the bias and the spreads that held-out rows
    # choose
    np.testing.assert_allclose(p.mean.numpy(), y.mean(), atol=0.02 * y.std())
    np.testing.assert_allclose(p.stddev.numpy(), y.std(), rtol=0.1)
    lower, upper = model.predict_interval(X_new, 0.9).T
    assert 0.85 <= np.mean((y >= lower[0]) & (y <= upper[0])) <= 0.95


def test_trees_are_mixed_with_the_constant(monkeypatch):
    X, y, X_new, y_new = table()
    spoil(monkeypatch, tuple(range(MEMBERS)))
    with pytest.warns(UserWarning, match="All 3 networks"):
        model = estimator(trees=50).fit(X, y)
    assert rmse(model.predict(X_new), y_new) < 0.7 * rmse(np.full(ROWS, y.mean()), y_new)


@pytest.mark.parametrize("spoiled", [(0,), (0, 1, 2)])
@pytest.mark.filterwarnings("ignore:All 3 networks")
def test_files_hold_which_members_are_left_out(monkeypatch, tmp_path, spoiled):
    X, y, X_new, _ = table()
    spoil(monkeypatch, spoiled)
    model = estimator(max_epochs=5).fit(X, y)
    opened = load(model.save(tmp_path / "model"))
    for name in ("left_out", "constant", "kept_members", "remark"):
        assert getattr(opened.ensemble_, name) == getattr(model.ensemble_, name)
    assert np.array_equal(opened.predict(X_new), model.predict(X_new))


def test_counts_are_compared_by_the_members_that_both_have_kept(monkeypatch):
    rng = np.random.default_rng(3)
    X = rng.normal(size=(ROWS, 3))
    counts = rng.poisson(np.exp(0.5 + 0.7 * X[:, 0])).astype(float)
    x, y, w = (torch.from_numpy(part) for part in (X, counts, np.ones(ROWS)))
    poisson = SSLARegressor("poisson", members=MEMBERS, max_epochs=30, hidden=(10,), random_state=0)
    whole = compute_member_gains(
        estimator().fit(X, counts).ensemble_, poisson.fit(X, counts).ensemble_, x, y, w
    )
    spoil(monkeypatch, (1,))
    numbers = estimator().fit(X, counts).ensemble_
    monkeypatch.undo()
    spoil(monkeypatch, (2,))
    kept = compute_member_gains(numbers, poisson.fit(X, counts).ensemble_, x, y, w)
    assert len(whole) == 3
    torch.testing.assert_close(kept, whole[:1])
