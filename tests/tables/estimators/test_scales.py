"""Targets on the log and the logit scale, and the choice of a scale."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import special

from ssla import metrics
from ssla.files import FileError
from ssla.predictive.positive import Censored
from ssla.sklearn import SSLARegressor, load
from ssla.tables.estimators import saving

QUICK = {"max_epochs": 40, "hidden": (16,), "random_state": 0}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(400, 2))
Z = 1 + X[:, 0] + 0.5 * RNG.normal(size=400)
Y = {"log_normal": np.exp(Z), "logit_normal": special.expit(Z)}
BELOW = {"log_normal": np.inf, "logit_normal": 1.0}


@pytest.mark.parametrize("likelihood", list(Y))
def test_intervals_stay_in_the_support_and_cover(likelihood):
    y = Y[likelihood]
    model = SSLARegressor(likelihood, members=2, **QUICK).fit(X[:300], y[:300])
    p = model.predict_dist(X[300:])
    ends = model.predict_interval(X, 0.999)
    assert (ends[:, 0] > 0).all()
    assert (ends[:, 1] < BELOW[likelihood]).all()
    assert 0.85 < float(metrics.coverage(p, y[300:], 0.95)) <= 1
    plain = (
        SSLARegressor("gaussian", members=2, **QUICK).fit(X[:300], y[:300]).predict_dist(X[300:])
    )
    assert float(metrics.nll(p, y[300:])) < float(metrics.nll(plain, y[300:])) - 0.1
    assert float(metrics.crps(p, y[300:])) < 1.05 * float(metrics.crps(plain, y[300:]))


def test_the_fit_is_that_of_the_logarithm():
    """The change of variable: log p(y) = log p(log y) − log y, and quantiles are those of log y."""
    one = SSLARegressor("log_normal", members=2, **QUICK).fit(X, Y["log_normal"])
    other = SSLARegressor("gaussian", members=2, **QUICK).fit(X, Z)
    assert np.allclose(np.log(one.predict_quantiles(X)), other.predict_quantiles(X))
    logs = other.predict_dist(X).log_prob(Z) - torch.from_numpy(Z)
    assert torch.allclose(one.predict_dist(X).log_prob(Y["log_normal"]), logs)
    draws = other.predict_dist(X[:2]).sample(400_000, torch.Generator().manual_seed(0)).exp()
    mean, sd = one.predict(X[:2], return_std=True)
    assert np.allclose(draws.mean(0), mean, rtol=0.01)
    assert np.allclose(draws.std(0), sd, rtol=0.05)


def test_conformal_gaps_and_files(tmp_path):
    frame = pd.DataFrame({"a": X[:, 0], "b": np.where(X[:, 1] > 0, "up", "down")})
    model = SSLARegressor("log_normal", conformal=True, **QUICK).fit(frame, Y["log_normal"])
    new = frame.iloc[:5].assign(b=["left", "up", "up", "down", "down"])
    new.loc[1, "a"] = np.nan
    ends = model.predict_interval(new, 0.95)
    assert (ends[:, 0] > 0).all()
    assert np.log(ends[1, 1] / ends[1, 0]) > 1.5 * np.log(ends[2, 1] / ends[2, 0])
    again = load(model.save(tmp_path / "model"))
    assert np.array_equal(again.predict_interval(new, 0.95), ends)
    assert np.array_equal(again.predict(new), model.predict(new))


@pytest.mark.parametrize(
    ("likelihood", "y", "match"),
    [
        ("log_normal", Z, "needs targets that are positive, but y is from -"),
        ("logit_normal", np.exp(Z), "strictly between 0 and 1"),
        ("log_normal", np.exp(np.stack([Z, Z], 1)), "needs one target"),
        ("positive", Z, "needs targets that are zero or positive, but y is from -"),
        ("positive", np.exp(np.stack([Z, Z], 1)), "needs one target"),
    ],
)
def test_other_targets_are_refused(likelihood, y, match):
    with pytest.raises(ValueError, match=match):
        SSLARegressor(likelihood, **QUICK).fit(X, y)


def additive():
    """Positive, and many times larger in some rows than in others, but with constant noise on
    its own scale.
    """
    return 12 + 5 * np.tanh(2 * X[:, 0]) + 0.5 * np.random.default_rng(3).normal(size=400)


@pytest.mark.parametrize(
    ("y", "chosen"),
    [(Y["log_normal"], "positive"), (additive(), "heteroscedastic"), (Z, "heteroscedastic")],
)
def test_held_out_rows_choose_the_scale(y, chosen):
    """Noise in proportion to the target, constant noise, and a target that can be negative."""
    model = SSLARegressor(members=2, trees=0, **QUICK).fit(X[:300], y[:300])
    assert model.ensemble_.settings.likelihood == chosen
    assert model.ensemble_.settings.members == len(model.ensemble_.modules) == 2
    assert 0.8 < float(metrics.coverage(model.predict_dist(X[300:]), y[300:], 0.9)) < 0.98


def test_the_chosen_scale_is_that_of_a_fit_to_the_logarithm():
    """Exact: where all targets are in the logarithmic part, as with log y for the fit, up to
    the units of the training loss.
    """
    y = Y["log_normal"]
    one = SSLARegressor("positive", members=2, trees=0, **QUICK).fit(X, y)
    scale = one.ensemble_.scale
    other = SSLARegressor("heteroscedastic", members=2, trees=0, **QUICK).fit(
        X, scale.to_z(torch.from_numpy(y)).numpy()
    )
    z = other.predict_dist(X)
    logs = z.log_prob(scale.to_z(torch.from_numpy(y))) - scale.log_slope(
        scale.to_z(torch.from_numpy(y))
    )
    assert torch.allclose(one.predict_dist(X).log_prob(y), logs)
    assert np.allclose(
        one.predict_quantiles(X), scale.to_y(torch.from_numpy(other.predict_quantiles(X))).numpy()
    )


def test_zeros_are_predicted_and_no_bound_is_negative(tmp_path):
    y = np.maximum(np.exp(Z) - 1.5, 0)
    assert (y == 0).mean() > 0.1
    model = SSLARegressor("positive", members=2, **QUICK).fit(X, y)
    assert model.ensemble_.scale.closed
    assert (model.predict_interval(X, 0.9999) >= 0).all()
    assert (model.predict(X) > 0).all()
    assert np.isfinite(float(metrics.nll(model.predict_dist(X), y)))
    again = load(model.save(tmp_path / "model"))
    assert again.ensemble_.scale == model.ensemble_.scale
    assert np.array_equal(again.predict_interval(X), model.predict_interval(X))
    more = model.partial_fit(X[:3], y[:3])
    assert np.isfinite(more.predict(X)).all()
    with pytest.raises(ValueError, match="zero or positive"):
        model.partial_fit(X[:3], -1 - y[:3])


def test_a_scale_is_open_where_the_table_cannot_show_that_negative_targets_are_impossible():
    """Narrow targets far from zero: a model expects no negative row, and neither should a later
    one be refused.
    """
    y = 50 * np.exp(0.5 * X[:, 0] + 0.3 * np.random.default_rng(1).normal(size=400))
    model = SSLARegressor(members=4, trees=0, **QUICK).fit(X, y)
    assert model.ensemble_.settings.likelihood == "positive"
    assert not model.ensemble_.scale.closed
    assert np.isfinite(float(model.predict_dist(X[:1]).log_prob(np.array([-1.0]))))


@pytest.mark.parametrize(
    "scale", [{"low": 5.0, "high": 1.0}, {"low": "a", "high": 1.0}, {"low": 0.0, "high": 1e9}, None]
)
def test_a_forged_scale_is_refused(tmp_path, monkeypatch, scale):
    model = SSLARegressor("positive", members=1, trees=0, **QUICK).fit(X, Y["log_normal"])
    pack = saving._pack_ensemble
    monkeypatch.setattr(saving, "_pack_ensemble", lambda *args: pack(*args) | {"scale": scale})
    with pytest.raises(FileError):
        load(model.save(tmp_path / "model"))


def test_bounds_are_not_negative_on_the_scale_of_the_target_itself_where_the_table_shows_it(
    tmp_path,
):
    """Constant noise cut at zero: the model would expect negative rows, and there is none."""
    y = np.maximum(3 + 2 * X[:, 0] + 1.5 * np.random.default_rng(5).normal(size=400), 0)
    model = SSLARegressor(members=2, trees=0, **QUICK).fit(X, y)
    if model.ensemble_.settings.likelihood == "heteroscedastic":
        assert isinstance(model.ensemble_.scale, Censored)
    assert (model.predict_interval(X, 0.999) >= 0).all()
    assert (model.predict(X) >= 0).all()
    again = load(model.save(tmp_path / "model"))
    assert again.ensemble_.scale == model.ensemble_.scale
    assert np.array_equal(again.predict_interval(X), model.predict_interval(X))
    far = SSLARegressor(members=2, trees=0, **QUICK).fit(X, additive())
    assert far.ensemble_.scale is None
