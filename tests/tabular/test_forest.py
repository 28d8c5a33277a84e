"""Trees as tensors: against scikit-learn's own predictions, and beside the networks of a classifier."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier

from ssla.persistence import FileError
from ssla.sklearn import SSLAClassifier, load
from ssla.sklearn.forests import grow
from ssla.tabular.forest import Forest, joined


def rows(n=300, d=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d))


def steps(x):
    """Classes that trees find at once and small networks do not: the parity of narrow steps, with 5% of other labels."""
    y = (np.floor(5 * x[:, 0]) % 2).astype(int)
    flip = np.random.default_rng(1).uniform(size=len(y)) < 0.05
    return np.where(flip, 1 - y, y)


@pytest.fixture(scope="module")
def grown():
    x, w = rows(), np.random.default_rng(2).integers(1, 4, 300).astype(float)
    y = steps(x) + 2 * (x[:, 2] > 1)
    return x, y, w, grow(8, 5, torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(w), 3)


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
    forest = grow(20, 2, torch.from_numpy(x), torch.from_numpy(y), torch.ones(4, dtype=torch.float64), 0)
    places = np.unique(forest.threshold.numpy())
    new = np.concatenate([places, np.nextafter(places, 1), np.nextafter(places, -1), np.float32(places)])[:, None]
    np.testing.assert_array_equal(forest(torch.from_numpy(new)).argmax(1).numpy(), own.predict(new))


def test_joined_trees_average(grown):
    x = torch.from_numpy(rows(50, seed=6))
    one = grown[3]
    other = grow(3, 5, torch.from_numpy(grown[0]), torch.from_numpy(grown[1]), torch.from_numpy(grown[2]), 4)
    torch.testing.assert_close(joined([one, other])(x), (8 * one(x) + 3 * other(x)) / 11, atol=1e-14, rtol=0)


def test_rows_at_once_change_nothing(grown, monkeypatch):
    x = torch.from_numpy(rows(50, seed=6))
    whole = grown[3](x)
    monkeypatch.setattr("ssla.tabular.forest.AT_ONCE", 24)
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
    leaf.check(1, 2)
    with pytest.raises(ValueError, match="trees do not fit"):
        replace(leaf, **change).check(1, 2)


@pytest.fixture(scope="module")
def fitted():
    x = rows(600)
    return SSLAClassifier(members=2, max_epochs=15, random_state=0).fit(x, steps(x))


def test_trees_help_where_networks_fail(fitted):
    new = rows(500, seed=9)
    y = steps(new)
    alone = SSLAClassifier(members=2, max_epochs=15, random_state=0, trees=0).fit(rows(600), steps(rows(600)))
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
    torch.testing.assert_close(whole.predict(new).probs, (1 - trees.share) * networks + trees.share * own, atol=1e-12, rtol=0)


def test_files_hold_the_trees(fitted, tmp_path):
    new = rows(20, seed=9)
    fitted.save(tmp_path / "model")
    assert np.array_equal(load(tmp_path / "model").predict_proba(new), fitted.predict_proba(new))


@pytest.mark.parametrize(("old", "new"), [('"share": 0.', '"share": 7.'), ('"floor": 0.', '"floor": 9.')])
def test_forged_files_are_refused(fitted, tmp_path, old, new):
    place = fitted.save(tmp_path / "model")
    for file in place.rglob("*.json"):
        text = file.read_text()
        assert text.count(old) <= 1
        file.write_text(text.replace(old, new))
    with pytest.raises(FileError):
        load(place)


def test_few_rows_and_many_classes_have_no_trees_by_themselves():
    x = rows(29)
    assert SSLAClassifier(members=1, max_epochs=1, random_state=0).fit(x, steps(x)).ensemble_.settings.trees == 0
    x = rows(104)
    many = SSLAClassifier(members=1, max_epochs=1, random_state=0, tune=False).fit(x, np.arange(104) % 52)
    assert many.ensemble_.settings.trees == 0


@pytest.mark.parametrize("trees", [-1, 2.5, "many", True])
def test_a_wrong_number_of_trees_is_refused(trees):
    with pytest.raises(ValueError, match="trees must be a whole number of at least 0"):
        SSLAClassifier(trees=trees).fit(rows(40), steps(rows(40)))
