"""Row weights: frequencies, or relative ones where they cannot be frequencies."""

import numpy as np
import pytest
import torch

import ssla
from ssla import likelihoods as L
from ssla import metrics, priors
from ssla.sklearn import PredictiveClassifier, PredictiveRegressor, SSLAClassifier, SSLARegressor
from ssla.tables.estimators.row_weights import choose_weight_factor, find_weighted_rows
from ssla.tables.report.table_models import describe_estimator
from support.networks import data, mlp

QUICK = {"members": 1, "max_epochs": 30, "hidden": (8,), "trees": 0, "random_state": 0}
RNG = np.random.default_rng(0)
N = 200
X = RNG.normal(size=(N, 2))
Y = X @ [1.0, -2.0] + 0.3 * RNG.normal(size=N)
LABELS = (Y + 0.5 * RNG.normal(size=N) > 0).astype(int)
W = RNG.uniform(0.5, 1.5, N)
NORMALISED = W / W.sum()
RESCALED = "sums to 1, less than half of the 200 rows .* multiplied by 200, to a mean of one"
ESTIMATORS = {
    "regressor": (lambda **o: SSLARegressor("gaussian", **QUICK | o), Y),
    "classifier": (lambda **o: SSLAClassifier(**QUICK | o), LABELS),
    "wrapped regressor": (lambda **o: PredictiveRegressor(cv=2, random_state=0, **o), Y),
    "wrapped classifier": (lambda **o: PredictiveClassifier(cv=2, random_state=0, **o), LABELS),
}


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_normalised_weights_are_rescaled_and_reported(name):
    make, y = ESTIMATORS[name]
    with pytest.warns(UserWarning, match=RESCALED):
        model = make().fit(X, y, sample_weight=NORMALISED)
    assert model.weight_factor_ == pytest.approx(N)
    assert "multiplied by 200" in describe_estimator(model)[0][1]
    expected = make().fit(X, y, sample_weight=NORMALISED / NORMALISED.mean())
    relative = make(row_weights="relative").fit(X, y, sample_weight=NORMALISED)  # no warning
    for other in (expected, relative):
        assert np.allclose(model.predict(X), other.predict(X))
        assert torch.allclose(model.predict_dist(X).log_prob(y), other.predict_dist(X).log_prob(y))
    assert expected.weight_factor_ == 1.0


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_frequencies_are_as_given_if_asked_for(name):
    """No warning, neither of the estimator nor of the fits inside it, and a posterior of forty
    rows' worth of data.
    """
    make, y = ESTIMATORS[name]
    model = make(row_weights="frequencies").fit(X, y, sample_weight=40 * NORMALISED)
    assert model.weight_factor_ == 1.0
    posterior = model.ensemble_.components[0].posterior
    assert posterior.report.weight == pytest.approx(40.0)


def test_equal_weights_of_one_nth_equal_no_weights():
    """The figures of a user who gives 1/n: errors and coverage are those without weights."""
    held = np.random.default_rng(1).normal(size=(500, 2))
    y = held @ [1.0, -2.0] + 0.3 * np.random.default_rng(2).normal(size=500)
    with pytest.warns(UserWarning, match="sample_weight sums to 1,"):
        weighted = SSLARegressor(random_state=0, members=1, max_epochs=40, trees=0).fit(
            X, Y, sample_weight=np.full(N, 1 / N)
        )
    plain = SSLARegressor(random_state=0, members=1, max_epochs=40, trees=0).fit(X, Y)
    p, q = weighted.predict_dist(held), plain.predict_dist(held)
    assert float(metrics.rmse(p, y)) == pytest.approx(float(metrics.rmse(q, y)), rel=1e-3)
    assert float(metrics.coverage(p, y, 0.9)) == pytest.approx(
        float(metrics.coverage(q, y, 0.9)), abs=0.005
    )


def test_a_weight_of_two_is_still_a_row_twice():
    whole = {
        "early_stopping": False,
        "batch_size": None,
    } | QUICK  # rows are held out by their number otherwise
    weighted = SSLARegressor("gaussian", **whole).fit(X, Y, sample_weight=np.full(N, 2.0))
    twice = SSLARegressor("gaussian", **whole).fit(np.repeat(X, 2, 0), np.repeat(Y, 2))
    assert np.allclose(
        weighted.predict(X, return_std=True), twice.predict(X, return_std=True), rtol=1e-5
    )


def test_the_limit_is_half_of_the_rows_with_a_weight():
    """At the limit weights are frequencies; rows of weight 0 are no rows."""
    half = np.full(10, 0.5)
    assert choose_weight_factor(half, "auto") == 1.0
    assert choose_weight_factor(np.full(10, 0.75), "auto") == 1.0
    assert choose_weight_factor(np.full(10, 2.0), "auto") == 1.0
    assert choose_weight_factor(np.array([1.0] * 3 + [0.0] * 97), "auto") == 1.0
    with pytest.warns(UserWarning, match="sums to 4.999"):
        assert choose_weight_factor(np.append(half[1:], 0.499), "auto") == pytest.approx(10 / 4.999)
    with pytest.warns(UserWarning, match="less than half of the 10 rows"):
        assert choose_weight_factor(np.append(half * 0.4, np.zeros(90)), "auto") == pytest.approx(
            5.0
        )
    assert choose_weight_factor(half * 0.1, "frequencies") == 1.0
    assert choose_weight_factor(half, "relative") == 2.0


def test_rows_of_weight_zero_do_not_change_the_scale():
    kept = np.arange(N) < 120
    weights = np.where(kept, NORMALISED, 0.0)
    with pytest.warns(UserWarning, match="120 rows"):
        masked = SSLARegressor("gaussian", **QUICK).fit(X, Y, sample_weight=weights)
    with pytest.warns(UserWarning, match="120 rows"):
        alone = SSLARegressor("gaussian", **QUICK).fit(
            X[kept], Y[kept], sample_weight=weights[kept]
        )
    assert np.allclose(masked.predict(X), alone.predict(X))


def test_weights_of_classes_are_rescaled_with_those_of_rows():
    """Later rows have the same factor, so that the ratio of the classes stays."""
    tiny = {0: 0.003, 1: 0.001}
    with pytest.warns(UserWarning, match="sample_weight times class_weight sums to"):
        model = SSLAClassifier(class_weight=tiny, **QUICK).fit(X, LABELS)
    factor = N / np.where(LABELS == 0, 0.003, 0.001).sum()
    assert np.allclose(model.class_weights_, factor * np.array([0.003, 0.001]))
    expected = SSLAClassifier(class_weight={k: factor * v for k, v in tiny.items()}, **QUICK).fit(
        X, LABELS
    )
    assert np.allclose(model.predict_proba(X), expected.predict_proba(X))
    more, other = (one.partial_fit(X[:20], LABELS[:20]) for one in (model, expected))
    assert np.allclose(more.predict_proba(X), other.predict_proba(X))


def test_partial_fit_rescales_too():
    make = ESTIMATORS["regressor"][0]
    with pytest.warns(UserWarning, match="sums to 1, less than half of the 50 rows"):
        model = make().fit(X, Y).partial_fit(X[:50], Y[:50], sample_weight=np.full(50, 0.02))
    assert np.allclose(model.predict(X), make().fit(X, Y).partial_fit(X[:50], Y[:50]).predict(X))


def test_fit_of_a_network_warns_and_keeps_frequencies():
    x, y = data(60)
    given = {"likelihood": L.Gaussian(noise=0.3), "prior": priors.Gaussian()}
    with pytest.warns(
        UserWarning,
        match="Row weights sum to 1, less than half of the 60 rows with a positive weight",
    ):
        post = ssla.fit(mlp(), (x, y, torch.full((60,), 1 / 60)), **given)
    assert any("Row weights sum to 1" in note for note in post.report.notes)
    assert post.report.weight == pytest.approx(1.0)
    batches = [
        (x[:30], y[:30], torch.full((30,), 1 / 60)),
        (x[30:], y[30:], torch.full((30,), 1 / 60)),
    ]
    with pytest.warns(UserWarning, match="60 rows"):  # counted over the batches
        ssla.fit(mlp(), batches, **given)
    for weights in (
        torch.full((60,), 0.5),
        torch.full((60,), 2.0),
        (torch.arange(60) < 10).float(),
    ):
        ssla.fit(mlp(), (x, y, weights), **given)  # no warning


def test_a_fit_needs_two_rows_with_a_positive_weight():
    assert find_weighted_rows(np.array([0.0, 2.0, 0.5])).tolist() == [False, True, True]
    with pytest.raises(ValueError, match="at least two rows with a positive weight, but n_sam"):
        find_weighted_rows(np.array([0.0, 2.0, 0.0]))
