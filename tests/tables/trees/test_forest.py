"""Trees as tensors: against scikit-learn's own predictions, and beside the networks of a
classifier.
"""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn.ensemble import GradientBoostingRegressor, RandomForestClassifier

from ssla.files import FileError
from ssla.predictive import mixture
from ssla.predictive.normals import pool_normals
from ssla.sklearn import SSLAClassifier, SSLARegressor, load
from ssla.tables.trees.beside_networks import estimate_move_share
from ssla.tables.trees.forest import Forest, join_forests
from ssla.tables.trees.growing import BOOSTED, grow_forest
from ssla.tables.trees.out_of_fold import fit_number_layer


def rows(n=300, d=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d))


def steps(x):
    """Classes that trees find at once and small networks do not: the parity of narrow steps,
    with 5% of other labels.
    """
    y = (np.floor(5 * x[:, 0]) % 2).astype(int)
    flip = np.random.default_rng(1).uniform(size=len(y)) < 0.05
    return np.where(flip, 1 - y, y)


@pytest.fixture(scope="module")
def grown():
    x, w = rows(), np.random.default_rng(2).integers(1, 4, 300).astype(float)
    y = steps(x) + 2 * (x[:, 2] > 1)
    return (
        x,
        y,
        w,
        grow_forest(8, 5, torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(w), 3),
    )


def test_predictions_are_those_of_scikit_learn(grown):
    x, y, w, forest = grown
    new = rows(1000, seed=5)
    own = RandomForestClassifier(8, random_state=3).fit(x, y, sample_weight=w)
    found = forest(torch.from_numpy(new)).numpy()
    np.testing.assert_allclose(found[:, own.classes_], own.predict_proba(new), atol=1e-14)
    assert found[:, 4].max() == 0  # a class that no row has


def test_values_at_a_threshold_go_where_scikit_learn_sends_them():
    """It rounds inputs to single precision before it compares."""
    x = np.array([[0.0], [0.1], [0.2], [0.3]])
    y = np.array([0, 0, 1, 1])
    own = RandomForestClassifier(20, random_state=0).fit(x, y, sample_weight=np.ones(4))
    forest = grow_forest(
        20, 2, torch.from_numpy(x), torch.from_numpy(y), torch.ones(4, dtype=torch.float64), 0
    )
    places = np.unique(forest.threshold.numpy())
    new = np.concatenate(
        [places, np.nextafter(places, 1), np.nextafter(places, -1), np.float32(places)]
    )[:, None]
    np.testing.assert_array_equal(forest(torch.from_numpy(new)).argmax(1).numpy(), own.predict(new))


def test_joined_trees_average(grown):
    x = torch.from_numpy(rows(50, seed=6))
    one = grown[3]
    other = grow_forest(
        3, 5, torch.from_numpy(grown[0]), torch.from_numpy(grown[1]), torch.from_numpy(grown[2]), 4
    )
    torch.testing.assert_close(
        join_forests([one, other])(x), (8 * one(x) + 3 * other(x)) / 11, atol=1e-14, rtol=0
    )


def test_rows_at_once_change_nothing(grown, monkeypatch):
    x = torch.from_numpy(rows(50, seed=6))
    whole = grown[3](x)
    monkeypatch.setattr("ssla.tables.trees.forest.AT_ONCE", 24)
    assert torch.equal(grown[3](x), whole)


@pytest.mark.parametrize(
    "change",
    [
        {"left": torch.tensor([9])},
        {"feature": torch.tensor([1])},
        {"feature": torch.tensor([-1])},
        {"value": torch.tensor([[math.nan, 1.0]], dtype=torch.float64)},
        {"value": torch.ones(1, 3, dtype=torch.float64)},
        {"roots": torch.zeros(0, dtype=torch.int64)},
        {"roots": torch.tensor([0.0])},
        {"depth": 10**9},
    ],
    ids=str,
)
def test_forged_trees_are_refused(change):
    zero = torch.zeros(1, dtype=torch.int64)
    leaf = Forest(zero, zero, zero.double(), zero, zero, torch.ones(1, 2, dtype=torch.float64), 0)
    leaf.check_tensors(1, 2)
    with pytest.raises(ValueError, match="trees do not fit"):
        replace(leaf, **change).check_tensors(1, 2)


@pytest.mark.parametrize("trees", [200, 4])
def test_boosted_predictions_are_those_of_scikit_learn(trees):
    x, w = rows(), np.random.default_rng(2).integers(1, 4, 300).astype(float)
    y = 5 + np.sin(3 * x[:, 0]) * x[:, 1]
    own = GradientBoostingRegressor(
        n_estimators=trees, learning_rate=10 / max(trees, 20), random_state=3, **BOOSTED
    )
    own.fit(x, y.round(10), sample_weight=w)
    forest = grow_forest(trees, 0, torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(w), 3)
    new = rows(500, seed=5)
    np.testing.assert_allclose(
        forest(torch.from_numpy(new))[:, 0].numpy(), own.predict(new), atol=1e-10
    )


@pytest.mark.parametrize("classes", [0, 2])
def test_large_tables_grow_on_some_rows(classes, monkeypatch):
    monkeypatch.setattr("ssla.tables.trees.growing.MOST_ROWS", 50)
    x = rows()
    y = steps(x) if classes else x[:, 0]
    forest = grow_forest(
        3,
        classes,
        torch.from_numpy(x),
        torch.from_numpy(y),
        torch.ones(300, dtype=torch.float64),
        0,
    )
    forest.check_tensors(4, max(classes, 1))
    assert len(forest.feature) < 3 * 2 * 50


@pytest.fixture(scope="module")
def fitted():
    x = rows(600)
    return SSLAClassifier(members=2, max_epochs=15, trees=50, random_state=0).fit(x, steps(x))


def numbers(x):
    """Steps in x₀, with noise that grows with x₁."""
    return np.floor(3 * x[:, 0]) % 2 + np.exp(x[:, 1] - 2) * np.random.default_rng(3).normal(
        size=len(x)
    )


@pytest.fixture(scope="module")
def regressor():
    x = rows(600)
    return SSLARegressor(
        "heteroscedastic", members=2, max_epochs=15, trees=100, random_state=0
    ).fit(x, numbers(x))


def test_trees_help_for_numbers(regressor):
    new = rows(500, seed=9)
    truth = np.floor(3 * new[:, 0]) % 2
    alone = replace(regressor.ensemble_, trees=None).predict(torch.from_numpy(new)).mean.numpy()
    assert 0.3 < regressor.ensemble_.trees.pull <= 1
    assert ((regressor.predict(new) - truth) ** 2).mean() < 0.9 * ((alone - truth) ** 2).mean()


def moved(predictive, move):
    """A mixture of normals with each of its means moved by the same (N,)."""
    return replace(
        predictive, law=replace(predictive.law, means=predictive.law.means + move[:, None])
    )


def test_the_mixture_of_numbers_is_that_of_its_parts(regressor):
    """Against the general mixture, and of its moments against the parts' own."""
    new = torch.from_numpy(rows(20, seed=9))
    ensemble = regressor.ensemble_
    z, trees = ensemble.inputs(new), ensemble.trees
    own, move = trees.predict(z, ensemble.modules, None)
    with torch.no_grad():
        centre = sum(module(z)[:, 0] for module in ensemble.modules) / len(ensemble.modules)
    torch.testing.assert_close(
        move, trees.pull * (trees.forest(z)[:, 0] - centre), atol=1e-12, rtol=0
    )
    networks = moved(replace(ensemble, trees=None, target=None).predict(new), move)
    whole, general = (
        pool_normals(networks, own, trees.share),
        mixture([networks, own], [1 - trees.share, trees.share]),
    )
    y = torch.linspace(-2, 2, 20, dtype=torch.float64)
    for ask in (
        lambda p: p.log_prob(y),
        lambda p: p.cdf(y),
        lambda p: p.mean,
        lambda p: p.variance,
        lambda p: p.epistemic,
    ):
        torch.testing.assert_close(ask(whole), ask(general), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(
        whole.icdf([0.1, 0.9]), general.icdf([0.1, 0.9]), atol=1e-6, rtol=1e-6
    )
    scale, shift = ensemble.target.scale[0], ensemble.target.shift[0]
    torch.testing.assert_close(
        regressor.predict_dist(new.numpy()).mean, shift + scale * whole.mean, atol=1e-12, rtol=0
    )


def test_the_pull_minimises_the_weighted_squares():
    """Against a search by scipy: rows with weights and variances, and ten rows of no move."""
    rng = np.random.default_rng(4)
    d, r, v, w = (
        rng.normal(size=80),
        rng.normal(size=80),
        rng.normal(size=80),
        rng.integers(1, 4, 80).astype(float),
    )
    for wanted in (0.3, -2.0, 5.0):
        errors = wanted * d + 0.1 * r
        c = w * np.exp(-v)

        def squares(b, errors=errors, c=c):
            return c @ (errors - b * d) ** 2 + 10 / w.sum() * (c @ d**2) * b**2

        best = minimize_scalar(squares, bounds=(0, 1), method="bounded", options={"xatol": 1e-10}).x
        found = estimate_move_share(*(torch.from_numpy(part) for part in (d, errors, v, w)))
        assert found == pytest.approx(best, abs=1e-5)
        twice = estimate_move_share(
            *(
                torch.from_numpy(np.repeat(part, w.astype(int)))
                for part in (d, errors, v, np.ones(80))
            )
        )
        assert found == pytest.approx(twice, abs=1e-12)  # a weight is a number of rows
    same = torch.zeros(3, dtype=torch.float64)
    assert estimate_move_share(same, same + 1, same, same + 1) == 0


def test_the_closed_form_of_a_layer_is_near_its_refits():
    """An average over the posterior and a refit differ by the second order of its uncertainty:
    little for 400 rows.
    """
    rng = np.random.default_rng(0)
    m, v = (torch.from_numpy(rng.normal(size=400)) for _ in range(2))
    y = 3 + 2 * (m + torch.exp(0.5 * v) * torch.from_numpy(rng.normal(size=400)))
    layer = fit_number_layer(m, v, y, torch.ones(400, dtype=torch.float64))
    closed, refitted = layer.average_predictive(m[:30], v[:30]), layer.predict(m[:30], v[:30])
    torch.testing.assert_close(closed.mean, refitted.mean, atol=1e-2, rtol=0)
    torch.testing.assert_close(closed.stddev, refitted.stddev, atol=0, rtol=2e-2)


def test_other_refits_have_the_trees_too(regressor):
    new = rows(3, seed=9)
    other = SSLARegressor(**regressor.get_params() | {"refit": "newton"})
    other.__dict__ |= {name: value for name, value in vars(regressor).items() if name.endswith("_")}
    np.testing.assert_allclose(
        other.predict(new), regressor.predict(new), atol=0.1 * regressor.predict(new).std()
    )


def test_files_hold_the_trees_of_numbers(regressor, tmp_path):
    new = rows(20, seed=9)
    regressor.save(tmp_path / "model")
    assert np.array_equal(
        load(tmp_path / "model").predict_interval(new), regressor.predict_interval(new)
    )


def test_trees_help_where_networks_fail(fitted):
    new = rows(500, seed=9)
    y = steps(new)
    alone = SSLAClassifier(members=2, max_epochs=15, random_state=0, trees=0).fit(
        rows(600), steps(rows(600))
    )
    assert alone.ensemble_.trees is None
    assert fitted.ensemble_.trees.share > 0.5
    assert fitted.score(new, y) > alone.score(new, y) + 0.1
    p = fitted.predict_proba(new)
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-12)


def test_the_mixture_is_that_of_its_parts(fitted):
    new = torch.from_numpy(rows(20, seed=9))
    whole, trees = fitted.ensemble_, fitted.ensemble_.trees
    networks = replace(whole, trees=None).predict(new).probs
    own = trees.layer.predict(trees.forest(whole.inputs(new))).probs
    torch.testing.assert_close(
        whole.predict(new).probs,
        (1 - trees.share) * networks + trees.share * own,
        atol=1e-12,
        rtol=0,
    )


def test_files_hold_the_trees(fitted, tmp_path):
    new = rows(20, seed=9)
    fitted.save(tmp_path / "model")
    assert np.array_equal(load(tmp_path / "model").predict_proba(new), fitted.predict_proba(new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r'"share": 0\.', '"share": 7.'),
        (r'"pull": 0\.', '"pull": 7.'),
        (r'"floor",\s*0\.', '"floor", 9.'),
    ],
)
def test_forged_files_are_refused(fitted, tmp_path, old, new):
    place = fitted.save(tmp_path / "model")
    text, times = re.subn(old, new, (place / "manifest.json").read_text())
    assert times == 1
    (place / "manifest.json").write_text(text)
    with pytest.raises(FileError):
        load(place)


def test_few_rows_and_many_classes_have_no_trees_by_themselves():
    x = rows(29)
    assert (
        SSLAClassifier(members=1, max_epochs=1, random_state=0)
        .fit(x, steps(x))
        .ensemble_.settings.trees
        == 0
    )
    x = rows(104)
    many = SSLAClassifier(members=1, max_epochs=1, random_state=0, tune=False).fit(
        x, np.arange(104) % 52
    )
    assert many.ensemble_.settings.trees == 0


@pytest.mark.parametrize("trees", [-1, 2.5, "many", True])
def test_a_wrong_number_of_trees_is_refused(trees):
    with pytest.raises(ValueError, match="trees must be a whole number of at least 0"):
        SSLAClassifier(trees=trees).fit(rows(40), steps(rows(40)))
