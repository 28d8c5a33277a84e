"""Targets on the log and the logit scale."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import special

from ssla import metrics
from ssla.sklearn import SSLARegressor, load

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
    plain = SSLARegressor("gaussian", members=2, **QUICK).fit(X[:300], y[:300]).predict_dist(X[300:])
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
    ],
)
def test_other_targets_are_refused(likelihood, y, match):
    with pytest.raises(ValueError, match=match):
        SSLARegressor(likelihood, **QUICK).fit(X, y)
