"""Split conformal intervals: row weights are frequencies, scores belong to one refit, and files
keep both. Sets without calibration rows, of numbers and of classes.
"""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ssla
from ssla.sklearn import SSLAClassifier, SSLARegressor, load
from ssla.tables.estimators.loading import _check_conformal
from ssla.tables.estimators.split_conformal import Conformal
from ssla.tables.networks.recalibration import predict_as_trained

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 2))
Y = X[:, 0] + 0.1 * RNG.normal(size=120)
LEVELS = (0.1, 0.5, 0.8, 0.9)
QUICK = {
    "hidden": (6,),
    "max_epochs": 4,
    "random_state": 0,
    "conformal": True,
    "calibration_fraction": 0.3,
}


def predictive(rows, targets):
    shape = (rows, targets) if targets > 1 else (rows,)
    zero = torch.zeros(shape, dtype=torch.float64)
    return SimpleNamespace(kind="vector" if targets > 1 else "scalar", mean=zero, stddev=zero + 1)


def conformal(y, weights):
    return Conformal.from_rows(
        predictive(len(y), y.shape[1] if y.ndim == 2 else 1),
        y,
        np.asarray(weights, dtype=float),
        "output",
    )


def by_definition(scores, weights, level):
    """The smallest score with Σ w_i·1{s_i ≤ s} ≥ level·(W + 1); infinite if there is none."""
    enough = [s for s in scores if weights[scores <= s].sum() >= level * (weights.sum() + 1)]
    return min(enough, default=np.inf)


# --- weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [1, 2])
def test_rows_of_weight_zero_count_as_absent(targets):
    """Junk of weight 0, scattered among the rows: the same posterior and the same intervals,
    bit for bit.
    """
    y = Y if targets == 1 else np.stack([Y, -Y], 1)
    junk = np.zeros(180, dtype=bool)
    junk[np.random.default_rng(1).permutation(180)[:60]] = True
    inputs, target = np.empty((180, 2)), np.empty((180, *y.shape[1:]))
    inputs[~junk], target[~junk] = X, y
    inputs[junk], target[junk] = 50.0, 1e4
    plain = SSLARegressor(**QUICK).fit(X, y)
    weighted = SSLARegressor(**QUICK).fit(inputs, target, sample_weight=(~junk).astype(float))
    assert np.array_equal(weighted.predict(X), plain.predict(X))
    assert np.array_equal(weighted.conformal_.scores, plain.conformal_.scores)
    assert np.array_equal(weighted.predict_interval(X, 0.9), plain.predict_interval(X, 0.9))


def test_a_target_of_weight_zero_is_not_checked():
    """A count of −1 marks a row without a count: it has no weight, so it is no reason to refuse."""
    y = np.round(np.exp(X[:, 0]) * 3)
    y[:20] = -1
    weights = (y >= 0).astype(float)
    model = SSLARegressor("poisson", **QUICK).fit(X, y, sample_weight=weights)
    assert np.array_equal(
        model.predict(X), SSLARegressor("poisson", **QUICK).fit(X[20:], y[20:]).predict(X)
    )
    with pytest.raises(ValueError, match="constant"):
        SSLARegressor(**QUICK).fit(X, np.where(weights > 0, 1.0, Y), sample_weight=weights)


def test_weights_of_the_calibration_rows_reach_the_interval():
    """A third of the rows have residuals ten times as large.

    Their weight decides how wide the intervals are.
    """
    wild = np.arange(120) % 3 == 0
    y = Y + np.where(wild, 10.0 * np.sign(X[:, 1]), 0.0)
    light, heavy = (
        SSLARegressor(**QUICK)
        .fit(X, y, sample_weight=np.where(wild, weight, 1.0))
        .conformal_.score_quantile(0.8)
        for weight in (0.01, 3.0)
    )
    assert heavy > 2 * light


@pytest.mark.parametrize("targets", [1, 2])
def test_integer_weights_equal_repeated_rows(targets):
    rng = np.random.default_rng(2)
    y = rng.normal(size=(40, targets)).squeeze()
    weights = rng.integers(1, 6, size=40)
    once, repeated = (
        conformal(y, weights),
        conformal(np.repeat(y, weights, axis=0), np.ones(weights.sum())),
    )
    for level in (*np.linspace(0.01, 0.99, 99), 0.5, weights.sum() / (weights.sum() + 1)):
        assert np.array_equal(once.score_quantile(level), repeated.score_quantile(level))


def test_weighted_quantiles_follow_their_definition():
    rng = np.random.default_rng(3)
    for rows in (3, 20, 57):
        y, weights = rng.normal(size=rows), rng.exponential(size=rows)
        found = conformal(y, weights)
        for level in LEVELS:
            expected = by_definition(np.abs(y), weights, level)
            if np.isfinite(expected):
                assert found.score_quantile(level)[0] == expected
            else:
                with pytest.warns(UserWarning, match="infinite"):
                    assert np.isinf(found.score_quantile(level)).all()


def test_unit_weights_give_the_order_statistic():
    """k = ⌈(n + 1)·level⌉. 100·0.55 is 55, although it is more in floating point."""
    assert 100 * 0.55 > 55
    found = conformal(np.arange(1.0, 100.0), np.ones(99))
    assert [found.score_quantile(level)[0] for level in (0.01, 0.5, 0.501, 0.55, 0.99)] == [
        1,
        50,
        51,
        55,
        99,
    ]


def test_a_small_total_weight_is_few_rows():
    with pytest.warns(
        UserWarning,
        match=r"needs at least 9 calibration rows, but there are 100 with a total weight of 1:",
    ):
        assert np.isinf(
            conformal(RNG.normal(size=100), np.full(100, 0.01)).score_quantile(0.9)
        ).all()


def test_too_few_rows_for_both_parts_are_refused():
    with pytest.raises(ValueError, match="leaves 1 of n_samples=2 for the fit"):
        SSLARegressor(**QUICK).fit(X[:2], Y[:2])
    with pytest.raises(ValueError, match="positive weight, but n_samples=1"):
        SSLARegressor(**QUICK).fit(X[:3], Y[:3], sample_weight=[1, 0, 0])


# --- refits and files ------------------------------------------------------------------------


def test_scores_of_one_refit_are_not_used_for_another(tmp_path):
    model = SSLARegressor(**QUICK).fit(X, Y)
    model.set_params(refit="plug_in")
    for one in (model, load(model.save(tmp_path / "model"))):
        with pytest.raises(
            ValueError, match="computed with refit='output', but refit is now 'plug_in'"
        ):
            one.predict_interval(X)
        one.set_params(refit="output").predict_interval(X, 0.9)
        one.set_params(refit="plug_in").predict(X)


def test_weighted_scores_survive_a_file(tmp_path):
    weights = RNG.integers(1, 4, size=120).astype(float)
    model = SSLARegressor(**QUICK).fit(X, Y, sample_weight=weights)
    again = load(model.save(tmp_path / "model"))
    assert np.array_equal(again.conformal_.weights, model.conformal_.weights)
    assert set(np.unique(model.conformal_.weights)) == {1, 2, 3}
    assert np.array_equal(again.predict_interval(X, 0.9), model.predict_interval(X, 0.9))


# --- without calibration rows ----------------------------------------------------------------


@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic", "log_normal", "poisson"])
def test_sets_without_calibration_rows(likelihood):
    y = {"log_normal": np.exp(Y), "poisson": np.round(np.exp(Y))}.get(likelihood, Y)
    model = SSLARegressor(likelihood, members=2, hidden=(6,), max_epochs=20, random_state=0).fit(
        X, y
    )
    small, large = (model.predictive_set(X, level) for level in (0.5, 0.9))
    assert small.shape == (120, 2)
    assert (large[:, 0] <= small[:, 0]).all()
    assert (large[:, 1] >= small[:, 1]).all()
    assert abs(((large[:, 0] <= y) & (y <= large[:, 1])).mean() - 0.9) < 0.1
    if likelihood in ("log_normal", "poisson"):
        assert (large >= 0).all()


def test_a_set_is_that_of_the_posteriors_and_their_held_out_rows():
    model = SSLARegressor("gaussian", members=1, hidden=(6,), max_epochs=20, random_state=0).fit(
        X, Y
    )
    ensemble = model.ensemble_
    assert int(ensemble.held.sum()) == 24
    z = ensemble.inputs(torch.from_numpy(X))
    found = ensemble.components[0].posterior.predictive_set(z, 0.8, rows=ensemble.held[0])
    expected = found * ensemble.target.scale + ensemble.target.shift
    np.testing.assert_allclose(model.predictive_set(X, 0.8), expected.numpy())


def test_sets_need_known_held_out_rows_and_complete_inputs(tmp_path):
    quick = {
        "likelihood": "gaussian",
        "members": 1,
        "hidden": (6,),
        "max_epochs": 4,
        "random_state": 0,
    }
    model = SSLARegressor(**quick).fit(X, Y)
    again = load(model.save(tmp_path / "model"))
    others = (
        again,
        model.partial_fit(X[:9], Y[:9]),
        SSLARegressor(early_stopping=False, **quick).fit(X, Y),
    )
    for one in others:
        with pytest.raises(ValueError, match="held out of its training, but these are not known"):
            one.predictive_set(X)
    gaps = np.where(np.arange(240).reshape(120, 2) == 6, np.nan, X)
    whole = SSLARegressor(**quick).fit(X, Y)
    with pytest.raises(ValueError, match="needs complete rows, but 1 of 120"):
        whole.predictive_set(gaps)
    with pytest.raises(TypeError, match="one number on the whole line"):
        SSLARegressor(**quick).fit(X, np.stack([Y, -Y], 1)).predictive_set(X)


# --- classes without calibration rows ---------------------------------------------------------


def noisy_classes(rows, seed=0):
    """Three classes of probabilities 0.7, 0.2 and 0.1, in an order that x decides: no set of
    one class covers 80%.
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 2))
    first = (x[:, 0] > 0).astype(int) + (x[:, 1] > 0)
    return x, np.array(["a", "b", "c"])[(first + rng.choice(3, rows, p=[0.7, 0.2, 0.1])) % 3]


@pytest.fixture(scope="module")
def classifier():
    return SSLAClassifier(members=5, hidden=(8,), max_epochs=30, random_state=0).fit(
        *noisy_classes(600)
    )


def test_sets_of_classes_cover(classifier):
    x, y = noisy_classes(2000, seed=1)
    sizes = []
    for level in (0.8, 0.9, 0.97):
        chosen = classifier.predictive_set(x, level)
        assert chosen.shape == (2000, 3)
        assert chosen.any(1).all()
        assert chosen[
            np.arange(2000), np.searchsorted(classifier.classes_, y)
        ].mean() == pytest.approx(level, abs=0.04)
        sizes.append(chosen.sum(1).mean())
    assert sizes == sorted(sizes)


def test_the_scores_are_those_of_the_networks_that_held_the_rows_out(classifier):
    """One posterior after the other, fitted without its rows; the mixture of the new row in
    place of the stored sums.
    """
    x, y = noisy_classes(600)
    ensemble, codes = (
        classifier.ensemble_,
        torch.from_numpy(np.searchsorted(classifier.classes_, y)),
    )
    scores, weights = ensemble.scores
    assert float(weights.sum()) == int(ensemble.held.any(0).sum())
    z, found = ensemble.inputs(torch.from_numpy(x)), []
    trees = len(ensemble.trees.forest.roots) // 5
    for m, held in enumerate(ensemble.held):
        prior = ensemble.components[m].posterior.prior
        module, law = ensemble.modules[m], ensemble.components[m].posterior.likelihood
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            post = ssla.fit(
                module, (z[~held], codes[~held]), likelihood=law, prior=prior, mode="polish"
            )
        forest = replace(
            ensemble.trees.forest, roots=ensemble.trees.forest.roots[m * trees : (m + 1) * trees]
        )
        parts = [
            post.predict(z[held]),
            predict_as_trained(module, law, z[held]),
            ensemble.trees.layer.predict(forest(z[held])),
        ]
        network, share = 1 - ensemble.trees.share, ensemble.trees.share
        shares = [network * ensemble.trust, network * (1 - ensemble.trust), share]
        found.append(1 - ssla.mixture(parts, shares).probs.gather(1, codes[held][:, None])[:, 0])
    torch.testing.assert_close(scores, torch.cat(found), atol=1e-3, rtol=0)


def test_no_set_of_classes_is_empty():
    """Where the model is right more often than the level, each set is the most probable class."""
    x = RNG.normal(size=(200, 2))
    y = (x[:, 0] > 0).astype(int)
    model = SSLAClassifier(members=2, hidden=(8,), max_epochs=30, random_state=0).fit(x, y)
    chosen = model.predictive_set(x, 0.3)
    assert np.array_equal(chosen.argmax(1), model.predict(x))
    assert (chosen.sum(1) == 1).all()


def test_sets_of_classes_need_known_held_out_rows_and_complete_inputs(tmp_path):
    x, y = noisy_classes(60)
    quick = {"members": 1, "hidden": (6,), "max_epochs": 4, "random_state": 0}
    model = SSLAClassifier(**quick).fit(x, y)
    with pytest.warns(UserWarning, match="needs at least 99 held-out rows, but there are 12"):
        assert model.predictive_set(x, 0.99).all()
    with pytest.raises(ValueError, match="level"):
        model.predictive_set(x, 90)
    with pytest.raises(ValueError, match=r"needs complete rows, but 1 of 60 .* use predict_set"):
        model.predictive_set(np.where(np.arange(120).reshape(60, 2) == 6, np.nan, x))
    others = (
        load(model.save(tmp_path / "model")),
        model.partial_fit(x[:9], y[:9]),
        SSLAClassifier(early_stopping=False, **quick).fit(x, y),
        SSLAClassifier(tune=False, **quick).fit(x, y),
    )
    for one in others:
        with pytest.raises(ValueError, match="these are not known"):
            one.predictive_set(x)


def test_a_file_whose_conformal_weights_do_not_fit_the_scores_is_refused():
    scores = np.array([[0.1], [0.4], [0.9]])
    _check_conformal(Conformal(scores, np.ones((3, 1)), "output"), targets=1)
    for weights in (np.ones((3, 3)), np.ones((2, 1)), np.ones(3)):
        with pytest.raises(ValueError, match="weights do not fit the scores"):
            _check_conformal(Conformal(scores, weights, "output"), targets=1)
    with pytest.raises(ValueError, match="conformal weights"):
        _check_conformal(Conformal(scores, -np.ones((3, 1)), "output"), targets=1)
