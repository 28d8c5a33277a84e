"""`partial_fit`, and held-out rows by groups and by time."""

import numpy as np
import pandas as pd
import pytest
import torch

import ssla
from ssla.sklearn import SSLAClassifier, SSLARegressor, load
from ssla.tables.networks import Settings, fit_ensemble, update_ensemble
from ssla.tables.networks.folds import hold_out_rows
from ssla.tables.networks.training import Schedule

QUICK = {"max_epochs": 15, "hidden": (10,), "random_state": 0}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(240, 2))
Y = np.sin(X[:, 0]) + 0.2 * RNG.normal(size=240)
FIRST, REST = slice(0, 100), slice(100, None)


# --- partial_fit -----------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [1, 2])
def test_more_rows_give_the_last_layer_of_all_rows(targets, tmp_path):
    """Gaussian noise: the posterior is that of a fit to all rows with the same features, prior
    and noise, also from a file.
    """
    y = Y if targets == 1 else np.stack([Y, X[:, 1] + Y], 1)
    model = SSLARegressor("gaussian", members=2, **QUICK).fit(X[FIRST], y[FIRST])
    again = load(model.save(tmp_path / "model"))
    for one in (model, again):
        one.partial_fit(X[100:180], y[100:180]).partial_fit(X[180:], y[180:])
        z = one.ensemble_.inputs(torch.from_numpy(X))
        target = one.ensemble_.target(torch.from_numpy(y).reshape(240, -1)).reshape(y.shape)
        for component in one.ensemble_.components:
            found = component.posterior
            module = one.ensemble_.modules[component.member]
            expected = ssla.fit(
                module, (z, target), likelihood=found.likelihood, prior=found.prior, mode="polish"
            )
            assert torch.allclose(found.theta, expected.theta, atol=1e-9)
            assert torch.allclose(
                found.predict(z[:5]).stddev, expected.predict(z[:5]).stddev, rtol=1e-9
            )
    assert np.array_equal(model.predict(X), again.predict(X))


def test_mean_and_log_variance_follow_few_rows_and_say_so_where_they_cannot():
    """The averages of the earlier rows are kept, which is exact to first order only."""
    model = SSLARegressor(members=2, **QUICK).fit(X[:170], Y[:170])
    before = float(ssla.metrics.nll(model.predict_dist(X[180:]), Y[180:]))
    model.partial_fit(X[170:180], Y[170:180])
    assert float(ssla.metrics.nll(model.predict_dist(X[180:]), Y[180:])) < before + 0.05
    with pytest.raises(ValueError, match="Fit again on all rows, or use likelihood='gaussian'"):
        SSLARegressor("heteroscedastic", members=2, **QUICK).fit(X[:30], Y[:30]).partial_fit(
            X[30:], 40 * Y[30:]
        )


def test_more_rows_narrow_the_doubt_and_weights_are_repetitions():
    """The trees stay as they were, so that the doubt of networks alone is compared."""
    model = SSLARegressor(**QUICK, trees=0).fit(X[FIRST], Y[FIRST])
    before = model.predict_dist(X[:20]).epistemic
    one = (
        SSLARegressor(**QUICK, trees=0)
        .fit(X[FIRST], Y[FIRST])
        .partial_fit(X[REST], Y[REST], sample_weight=np.arange(140) % 3)
    )
    model.partial_fit(
        np.repeat(X[REST], np.arange(140) % 3, axis=0), np.repeat(Y[REST], np.arange(140) % 3)
    )
    assert (model.predict_dist(X[:20]).epistemic < before).all()
    assert np.allclose(one.predict(X), model.predict(X))
    fresh = SSLARegressor(**QUICK).partial_fit(X[FIRST], Y[FIRST])
    assert np.array_equal(
        fresh.predict(X), SSLARegressor(**QUICK).fit(X[FIRST], Y[FIRST]).predict(X)
    )


def test_more_rows_of_classes_counts_and_frames():
    labels = np.where(Y > 0, "b", "a")
    model = SSLAClassifier(**QUICK).fit(X[FIRST], labels[FIRST])
    before = -np.log(model.predict_proba(X)[np.arange(240), (labels == "b").astype(int)]).mean()
    model.partial_fit(X[REST], labels[REST])
    assert (
        -np.log(model.predict_proba(X)[np.arange(240), (labels == "b").astype(int)]).mean() < before
    )
    counts = np.round(np.exp(Y))
    poisson = SSLARegressor("poisson", **QUICK).fit(X[FIRST], counts[FIRST])
    old = poisson.predict_dist(X).epistemic.mean()
    assert poisson.partial_fit(X[REST], counts[REST]).predict_dist(X).epistemic.mean() < old
    frame = pd.DataFrame({"a": X[:, 0], "b": np.where(X[:, 1] > 0, "up", "down")})
    logs = SSLARegressor("log_normal", **QUICK).fit(frame[FIRST], np.exp(Y[FIRST]))
    old = logs.predict_interval(frame)
    assert (logs.partial_fit(frame[REST], np.exp(Y[REST])).predict_interval(frame) != old).all()
    with pytest.warns(UserWarning, match="2 new rows have gaps or categories"):
        logs.partial_fit(frame[:2].assign(b="left"), np.exp(Y[:2]))


def test_what_cannot_be_updated_is_refused():
    labels = np.where(Y > 0, "b", "a")
    with pytest.raises(ValueError, match=r"new classes \['c'\]"):
        SSLAClassifier(**QUICK).fit(X, labels).partial_fit(X[:1], ["c"])
    with pytest.raises(ValueError, match=r"have none of \['c'\]"):
        SSLAClassifier(**QUICK).partial_fit(X, labels, classes=["a", "b", "c"])
    with pytest.raises(ValueError, match="features"):
        SSLARegressor(**QUICK).fit(X, Y).partial_fit(X[:, :1], Y)
    with pytest.raises(ValueError, match="conformal scores"):
        SSLARegressor(conformal=True, **QUICK).fit(X, Y).partial_fit(X, Y)
    with pytest.raises(ValueError, match="are positive"):
        SSLARegressor("log_normal", **QUICK).fit(X, np.exp(Y)).partial_fit(X[:2], [-1.0, 1.0])
    with pytest.raises(ValueError, match="cannot follow new rows"):
        SSLARegressor(weights="all", structure="diag", **QUICK).fit(X, Y).partial_fit(X, Y)


def test_an_ensemble_is_a_frozen_value():
    x, y, w = torch.from_numpy(X), torch.from_numpy(Y), torch.ones(240, dtype=torch.float64)
    first = fit_ensemble(x[:100], y[:100], w[:100], Settings(schedule=Schedule(5)))
    before = first.predict(x).mean
    assert not torch.equal(
        update_ensemble(first, x[100:], y[100:], w[100:]).predict(x).mean, before
    )
    assert torch.equal(first.predict(x).mean, before)


# --- groups and time -------------------------------------------------------------------------


def test_whole_groups_are_held_out():
    groups = torch.arange(100) // 7
    held = hold_out_rows(100, 4, 0.2, torch.Generator().manual_seed(0), groups=groups)
    assert (held.sum(1) >= 20).all()
    assert (held.sum(1) < 27).all()
    for label in groups.unique():
        inside = held[:, groups == label]
        assert (inside.all(1) | ~inside.any(1)).all()
    assert int(held.sum(0).max()) == 1  # disjoint, while there are enough groups
    two = hold_out_rows(10, 3, 0.2, torch.Generator().manual_seed(0), groups=torch.arange(10) % 2)
    assert two.sum(1).tolist() == [5, 5, 5]  # one of two groups, never both
    with pytest.raises(ValueError, match="one group only"):
        hold_out_rows(10, 1, 0.2, torch.Generator(), groups=torch.zeros(10))


def test_the_latest_rows_are_held_out():
    time = torch.tensor([5.0, 1.0, 4.0, 2.0, 5.0, 3.0, 0.0, 0.0, 0.0, 0.0])
    held = hold_out_rows(10, 2, 0.1, torch.Generator(), time=time)
    assert (
        held.tolist() == [[value == 5 for value in time.tolist()]] * 2
    )  # equal times are not divided
    flat = torch.tensor([0.0, 1.0, 1.0, 1.0])
    assert hold_out_rows(4, 1, 0.9, torch.Generator(), time=flat).tolist() == [
        [False, True, True, True]
    ]
    with pytest.raises(ValueError, match="one value only"):
        hold_out_rows(3, 1, 0.2, torch.Generator(), time=torch.ones(3))


def test_the_noise_of_a_group_effect_is_found_only_by_whole_groups():
    """Rows of a group share an input that identifies it and an effect: random held-out rows
    know it from their siblings.
    """
    rng = np.random.default_rng(1)
    groups = np.repeat(np.arange(40), 10)
    inputs = np.column_stack(
        [rng.normal(size=400), rng.normal(size=40)[groups], rng.normal(size=40)[groups]]
    )
    y = inputs[:, 0] + rng.normal(size=40)[groups] + 0.1 * rng.normal(size=400)
    options = {"max_epochs": 60, "random_state": 0}
    random, whole = (
        SSLARegressor(**options).fit(inputs, y, groups=g).predict_dist(inputs)
        for g in (None, groups.astype(str))
    )
    assert float(whole.aleatoric.mean()) > 1.5 * float(random.aleatoric.mean())


def test_conformal_rows_are_whole_groups_or_the_latest():
    groups = np.arange(240) // 12
    model = SSLARegressor(conformal=True, **QUICK).fit(X, Y, groups=groups)
    assert len(model.conformal_.scores) == 48
    dates = pd.Timestamp("2024-01-01") + pd.to_timedelta(np.arange(240), "D")
    late = SSLARegressor(conformal=True, **QUICK).fit(X, Y, time=dates)
    expected = SSLARegressor(conformal=True, calibration_fraction=0.2, **QUICK).fit(
        X, Y, time=np.arange(240)
    )
    assert np.array_equal(late.conformal_.scores, expected.conformal_.scores)
    shifted = SSLARegressor(conformal=True, **QUICK).fit(
        X, np.where(np.arange(240) >= 192, Y + 5, Y), time=np.arange(240)
    )
    assert shifted.conformal_.score_quantile(0.8) > 5 * late.conformal_.score_quantile(
        0.8
    )  # calibrated on the shifted rows


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"groups": np.arange(240), "time": np.arange(240)}, "but not both"),
        ({"groups": np.arange(10)}, r"shape \(240,\)"),
        ({"time": np.where(np.arange(240) == 3, np.nan, 1.0)}, "missing values"),
        ({"groups": np.zeros(240)}, "one group only"),
    ],
)
def test_bad_groups_and_times_are_refused(options, match):
    for conformal in (False, True):
        with pytest.raises(ValueError, match=match):
            SSLARegressor(conformal=conformal, **QUICK).fit(X, Y, **options)
