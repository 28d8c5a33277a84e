"""Both estimators as they are shipped, from fit to file: no setting but the seed is given.

Elsewhere `conftest.py` replaces members="auto" by one network and trees="auto" by three trees.
"""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from ssla.sklearn import SSLAClassifier, SSLARegressor, load

pytestmark = pytest.mark.usefixtures("shipped_defaults")
TRAIN, TEST = 100, 300
LEVEL = 0.9


def numbers(seed=0):
    """Inputs, and a target with noise of standard deviation 0.3."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(TRAIN + TEST, 3))
    return x, 2 * x[:, 0] - x[:, 1] + 0.3 * rng.normal(size=len(x))


def frame(seed=1):
    """Texts, categories, gaps and numbers; the target depends on the first three."""
    rng = np.random.default_rng(seed)
    n = TRAIN + TEST
    table = pd.DataFrame(
        {
            "colour": rng.choice(["red", "green", "blue"], n),
            "grade": pd.Categorical(rng.choice(["low", "high"], n)),
            "age": np.where(rng.random(n) < 0.2, np.nan, rng.normal(size=n)),
            "other": rng.normal(size=n),
        }
    )
    signal = (
        3.0 * (table["colour"] == "red")
        + 2.0 * (table["grade"] == "high")
        + table["age"].fillna(0.0)
    ).to_numpy()
    return table, signal, rng


def check_shipped(model):
    """Ten networks with fifty trees each, and not those of the other tests."""
    assert model.get_params() == {**type(model)().get_params(), "random_state": 0}
    assert model.ensemble_.settings.members == 10
    assert model.ensemble_.settings.trees == 50


def check_regression(model, x, y, baseline, path):
    """Errors, coverage and files on held-out rows."""
    mean = model.predict(x)
    assert mean.shape == (len(y),)
    assert np.sqrt(np.mean((mean - y) ** 2)) < baseline
    ends = model.predict_interval(x, LEVEL)
    assert (ends[:, 0] < ends[:, 1]).all()
    inside = ((ends[:, 0] <= y) & (y <= ends[:, 1])).sum()
    # The true coverage may be a twentieth off after a fit to so few rows; the share of the
    # held-out rows then leaves these limits once in a thousand times.
    low, high = (stats.binom(len(y), LEVEL + d).ppf(q) for d, q in ((-0.05, 1e-3), (0.05, 0.999)))
    assert low <= inside <= high
    narrow = model.predict_interval(x, 0.5)
    assert ((ends[:, 0] <= narrow[:, 0]) & (narrow[:, 1] <= ends[:, 1])).all()
    assert (ends[:, 1] - ends[:, 0]).mean() < 2 * (np.quantile(y, 0.95) - np.quantile(y, 0.05))
    again = load(model.save(path))
    assert np.array_equal(again.predict(x), mean)
    assert np.array_equal(again.predict_interval(x, LEVEL), ends)


def check_classes(model, x, y, least, path):
    """Probabilities, accuracy and files on held-out rows."""
    p = model.predict_proba(x)
    assert p.shape == (len(y), len(model.classes_))
    assert np.allclose(p.sum(1), 1, atol=1e-6)
    assert (p > 0).all()
    labels = model.predict(x)
    assert np.array_equal(labels, model.classes_[p.argmax(1)])
    assert (labels == y).mean() > least
    # a probability that is claimed is about the share that is right
    claimed, right = p.max(1).mean(), (labels == y).mean()
    assert abs(claimed - right) < 0.12
    again = load(model.save(path))
    assert np.array_equal(again.predict_proba(x), p)
    assert np.array_equal(again.classes_, model.classes_)


def test_regression_on_arrays(tmp_path):
    x, y = numbers()
    model = SSLARegressor(random_state=0).fit(x[:TRAIN], y[:TRAIN])
    check_shipped(model)
    # the noise is 0.3; a constant has 2.1
    check_regression(model, x[TRAIN:], y[TRAIN:], 0.5, tmp_path / "model")


def test_regression_on_a_frame_with_categories_and_gaps(tmp_path):
    x, signal, rng = frame()
    y = signal + 0.5 * rng.normal(size=len(x))
    model = SSLARegressor(random_state=0).fit(x[:TRAIN], y[:TRAIN])
    check_shipped(model)
    # the noise is 0.5; a constant has 1.9, and a model without the ages 1.0
    check_regression(model, x[TRAIN:], y[TRAIN:], 0.8, tmp_path / "model")


def test_classes_on_arrays(tmp_path):
    x, y = numbers()
    labels = np.select([y < -1, y < 1], [2, 5], 7)
    model = SSLAClassifier(random_state=0).fit(x[:TRAIN], labels[:TRAIN])
    check_shipped(model)
    assert model.classes_.tolist() == [2, 5, 7]
    check_classes(model, x[TRAIN:], labels[TRAIN:], 0.7, tmp_path / "model")


def test_classes_on_a_frame_with_categories_and_gaps(tmp_path):
    x, signal, rng = frame()
    y = np.where(signal + 0.5 * rng.normal(size=len(x)) > 2, "yes", "no")
    model = SSLAClassifier(random_state=0).fit(x[:TRAIN], y[:TRAIN])
    check_shipped(model)
    assert model.classes_.tolist() == ["no", "yes"]
    check_classes(model, x[TRAIN:], y[TRAIN:], 0.75, tmp_path / "model")
