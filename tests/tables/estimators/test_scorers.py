"""Scorers: greater is better, equal to the metrics, and usable in cross-validation, searches
and pipelines.
"""

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from ssla import metrics
from ssla.sklearn import SSLAClassifier, SSLARegressor, crps_scorer, nll_scorer, pinball_scorer

QUICK = {"max_epochs": 8, "hidden": (8,), "random_state": 0}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, 2))
Y = X[:, 0] + 0.3 * RNG.normal(size=90)
LABELS = np.where(Y > 0, "b", "a")


def test_scores_are_the_negated_metrics():
    model = SSLARegressor(**QUICK).fit(X, Y)
    p = model.predict_dist(X)
    assert nll_scorer(model, X, Y) == pytest.approx(-float(metrics.nll(p, Y)))
    assert crps_scorer(model, X, Y) == pytest.approx(-float(metrics.crps(p, Y)))
    low = p.icdf(0.1).numpy()
    by_hand = np.mean(np.where(low <= Y, 0.1 * (Y - low), 0.9 * (low - Y)))
    assert pinball_scorer(0.1)(model, X, Y) == pytest.approx(-by_hand)
    weights = RNG.integers(0, 4, size=90)
    repeated = np.repeat(np.arange(90), weights)
    assert crps_scorer(model, X, Y, sample_weight=weights) == pytest.approx(
        crps_scorer(model, X[repeated], Y[repeated])
    )
    assert repr(pinball_scorer(0.1)) == "neg_pinball_0.1"


def test_the_mean_of_pinball_losses_is_half_the_crps():
    """CRPS = 2 ∫ pinball(q) dq, an identity for every distribution."""
    p = SSLARegressor(**QUICK).fit(X, Y).predict_dist(X[:10])
    nodes, weights = np.polynomial.legendre.leggauss(60)
    losses = [metrics.pinball(p, Y[:10], float((q + 1) / 2), reduce=False).numpy() for q in nodes]
    assert np.allclose(weights @ np.array(losses), metrics.crps(p, Y[:10], reduce=False), rtol=2e-3)


def test_classes_are_scored_by_their_labels():
    model = SSLAClassifier(**QUICK).fit(X, LABELS)
    probs = model.predict_proba(X)
    assert nll_scorer(model, X, LABELS) == pytest.approx(
        np.log(np.where(LABELS == "b", probs[:, 1], probs[:, 0])).mean()
    )
    with pytest.raises(ValueError, match="first is 'c'"):
        nll_scorer(model, X[:1], ["c"])
    with pytest.raises(TypeError, match="ordered targets"):
        crps_scorer(model, X, LABELS)


def test_cross_validation_searches_and_pipelines():
    scores = cross_val_score(SSLARegressor(**QUICK), X, Y, scoring=nll_scorer, cv=2)
    assert scores.shape == (2,)
    pipe = make_pipeline(StandardScaler(), SSLARegressor(**QUICK))
    search = GridSearchCV(
        pipe, {"sslaregressor__max_epochs": [1, 30]}, scoring=crps_scorer, cv=2
    ).fit(X, Y)
    found = search.cv_results_["mean_test_score"]
    assert (found < 0).all()
    assert search.best_index_ == found.argmax()  # greater is better
    assert crps_scorer(search, X, Y) == crps_scorer(search.best_estimator_, X, Y)
    with pytest.raises(TypeError, match="LinearRegression has no predict_dist"):
        nll_scorer(LinearRegression().fit(X, Y), X, Y)
    with pytest.raises(ValueError, match="between 0 and 1"):
        pinball_scorer(1.5)
