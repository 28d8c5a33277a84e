"""Trees of any library with a predictive: scikit-learn's checks, honesty, units, weights,
tables, files, reports.
"""

import json
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.ensemble import (
    ExtraTreesRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV, GroupKFold, KFold, PredefinedSplit, RepeatedKFold
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OrdinalEncoder
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor
from sklearn.utils.estimator_checks import (
    check_sample_weight_equivalence_on_dense_data,
    parametrize_with_checks,
)

import ssla
from ssla import metrics
from ssla.sklearn import PredictiveClassifier, PredictiveRegressor, load

RNG = np.random.default_rng(0)
N = 400
X = RNG.uniform(-2, 2, size=(2 * N, 3))
SPREAD = 0.2 + np.abs(X[:, 1])
Y = 50 + 8 * np.sin(2 * X[:, 0]) + SPREAD * RNG.normal(size=2 * N)
LABELS = np.array(["low", "middle", "high"])[np.digitize(Y + 2 * RNG.normal(size=2 * N), [47, 53])]
FOREST = RandomForestRegressor(30, random_state=0)
CLASS_FOREST = RandomForestClassifier(30, random_state=0)
BINS = {
    "check_sample_weight_equivalence_on_dense_data": "the bins of HistGradientBoosting do not "
    "depend on weights"
}


@parametrize_with_checks(
    [PredictiveRegressor(cv=2), PredictiveClassifier(cv=2)], expected_failed_checks=lambda _: BINS
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.mark.filterwarnings(
    "ignore:.*predictives are inaccurate"
)  # trees predict the repeated rows of this check exactly
@pytest.mark.parametrize(
    "estimator",
    [
        PredictiveRegressor(DecisionTreeRegressor(max_depth=3)),
        PredictiveClassifier(DecisionTreeClassifier(max_depth=3)),
    ],
)
def test_weights_equal_repetitions_for_trees_for_which_they_do(estimator):
    check_sample_weight_equivalence_on_dense_data(type(estimator).__name__, estimator)


@pytest.fixture(scope="module")
def regressor():
    return PredictiveRegressor(FOREST, random_state=0).fit(X[:N], Y[:N])


@pytest.fixture(scope="module")
def classifier():
    return PredictiveClassifier(CLASS_FOREST, random_state=0).fit(X[:N], LABELS[:N])


def test_intervals_cover_new_rows_where_training_residuals_do_not(regressor):
    new, y = X[N:], Y[N:]
    fitted = clone(FOREST).fit(X[:N], Y[:N])
    sd = np.std(Y[:N] - fitted.predict(X[:N]))
    assert np.mean(np.abs(y - fitted.predict(new)) <= 1.645 * sd) < 0.8
    p = regressor.predict_dist(new)
    assert 0.86 < float(metrics.coverage(p, y, 0.9)) < 0.96
    errors = Y[:N] - out_of_fold(regressor, FOREST)
    constant = -torch.distributions.Normal(
        torch.from_numpy(regressor.predict(new)), float(errors.std())
    ).log_prob(torch.from_numpy(y))
    assert float(metrics.nll(p, y)) < float(constant.mean()) - 0.05
    assert np.corrcoef(p.stddev.numpy(), SPREAD[N:])[0, 1] > 0.5  # the noise depends on x
    assert metrics.rmse(p, y) < 1.05 * np.sqrt(np.mean((y - fitted.predict(new)) ** 2))


def out_of_fold(model, base):
    """By scikit-learn's own means, with other folds."""
    out = np.empty(N)
    for train, test in KFold(5, shuffle=True, random_state=1).split(X[:N]):
        out[test] = clone(base).fit(X[train], Y[train]).predict(X[test])
    return out


def test_answers_agree_with_each_other_and_the_density_integrates_to_one(regressor):
    new = X[N : N + 30]
    mean, sd = regressor.predict(new, return_std=True)
    p = regressor.predict_dist(new)
    assert np.allclose(mean, p.mean)
    assert np.allclose(
        regressor.predict_interval(new, 0.9), regressor.predict_quantiles(new, [0.05, 0.95])
    )
    assert regressor.predict_quantiles(new, 0.5).shape == (30,)
    grid = mean[:, None] + sd[:, None] * np.linspace(-12, 12, 4001)
    area = torch.trapezoid(p.log_prob(grid).exp(), torch.from_numpy(grid))
    assert torch.allclose(area, torch.ones_like(area), atol=1e-3)
    assert torch.allclose(p.variance, p.epistemic + p.aleatoric)
    assert regressor.oof_log_prob_.shape == (N,)
    assert regressor.oof_log_prob_.mean() == pytest.approx(
        -float(metrics.nll(regressor.predict_dist(X[N:]), Y[N:])), abs=0.25
    )


def test_the_unit_of_the_target_does_not_matter():
    base = DecisionTreeRegressor(max_depth=4, random_state=0)
    one = PredictiveRegressor(base, random_state=0).fit(X[:N], Y[:N])
    other = PredictiveRegressor(base, random_state=0).fit(X[:N], 1024 * Y[:N])
    assert np.allclose(1024 * one.predict_interval(X[N:]), other.predict_interval(X[N:]), rtol=1e-6)


def test_a_last_layer_knows_a_base_that_is_right():
    """The base is the truth: mean m, and the noise model finds the constant noise."""
    x = RNG.normal(size=(600, 2))
    y = x @ [3.0, -2.0] + RNG.normal(size=600)
    p = (
        PredictiveRegressor(LinearRegression(), random_state=0)
        .fit(x[:300], y[:300])
        .predict_dist(x[300:])
    )
    truth = (
        -torch.distributions.Normal(torch.from_numpy(x[300:] @ [3.0, -2.0]), 1.0)
        .log_prob(torch.from_numpy(y[300:]))
        .mean()
    )
    assert float(metrics.nll(p, y[300:])) < float(truth) + 0.04
    assert torch.allclose(p.stddev, torch.ones(300, dtype=torch.float64), atol=0.25)


def test_heavy_tails_are_found():
    x = RNG.normal(size=(1500, 1))
    y = x[:, 0] + RNG.standard_t(2, size=1500)
    model = PredictiveRegressor(LinearRegression(), random_state=0).fit(x[:750], y[:750])
    assert int((model.ensemble_.shares > 0.02).sum()) >= 3
    p = model.predict_dist(x[750:])
    gaussian = -torch.distributions.Normal(
        torch.from_numpy(x[750:, 0]), float(np.std(y[:750] - x[:750, 0]))
    ).log_prob(torch.from_numpy(y[750:]))
    assert float(metrics.nll(p, y[750:])) < float(gaussian.mean()) - 0.1
    assert 0.87 < float(metrics.coverage(p, y[750:], 0.9)) < 0.94


def test_classes_are_no_less_calibrated_than_those_of_the_base(classifier):
    new, y = X[N:], LABELS[N:]
    own = clone(CLASS_FOREST).fit(X[:N], LABELS[:N])
    p = classifier.predict_proba(new)
    place = np.searchsorted(classifier.classes_, y)
    loss, base_loss = (
        -np.log(q.clip(1e-15)[np.arange(N), place]).mean() for q in (p, own.predict_proba(new))
    )
    assert loss < base_loss - 0.02  # a forest of thirty trees gives probabilities of zero
    assert list(classifier.classes_) == sorted(set(LABELS))
    assert np.allclose(p.sum(1), 1)
    assert (classifier.predict(new) == classifier.classes_[p.argmax(1)]).all()
    assert classifier.score(new, y) > own.score(new, y) - 0.03
    assert classifier.predict_dist(new).kind == "class"


def test_two_classes_and_a_rare_class():
    y = (Y > 50).astype(int)
    model = PredictiveClassifier(GradientBoostingClassifier(n_estimators=20), random_state=0).fit(
        X[:N], y[:N]
    )
    assert model.posterior_.parameters["weight"].shape == (1, 1)
    assert model.score(X[N:], y[N:]) > 0.8
    rare = LABELS[:N].copy()
    rare[0] = "once"
    probs = PredictiveClassifier(CLASS_FOREST, random_state=0).fit(X[:N], rare).predict_proba(X[N:])
    assert probs.shape == (N, 4)
    assert np.isfinite(np.log(probs)).all()


def test_a_fitted_base_predicts_and_is_not_changed():
    base = DecisionTreeRegressor(max_depth=4, random_state=0).fit(X[:N], Y[:N])
    before = base.predict(X)
    model = PredictiveRegressor(base, random_state=0).fit(X[:N], Y[:N])
    assert model.models_["mean"] == (base,)
    assert (base.predict(X) == before).all()
    assert np.corrcoef(model.predict(X[N:]), before[N:])[0, 1] > 0.999
    fresh = DecisionTreeRegressor(max_depth=4)
    PredictiveRegressor(fresh).fit(X[:N], Y[:N])
    assert not hasattr(fresh, "tree_")
    labelled = DecisionTreeClassifier(max_depth=3).fit(X[:N], LABELS[:N])
    assert PredictiveClassifier(labelled).fit(X[:N], LABELS[:N]).models_["classes"] == (labelled,)
    with pytest.raises(ValueError, match="base was fitted on the classes"):
        PredictiveClassifier(labelled).fit(X[:N], Y[:N] > 50)


def test_what_predicts_new_rows():
    folds = PredictiveRegressor(FOREST, cv=3, random_state=0).fit(X[:N], Y[:N])
    whole = PredictiveRegressor(FOREST, cv=3, final="all", random_state=0).fit(X[:N], Y[:N])
    assert [len(models) for models in folds.models_.values()] == [3, 3]
    assert [len(models) for models in whole.models_.values()] == [1, 1]
    assert torch.equal(
        folds.posterior_.theta, whole.posterior_.theta
    )  # the last layer sees out-of-fold predictions only
    assert not np.allclose(folds.predict(X[N:]), whole.predict(X[N:]))


@pytest.mark.parametrize(
    "base",
    [
        ExtraTreesRegressor(20),
        GradientBoostingRegressor(n_estimators=30),
        HistGradientBoostingRegressor(max_iter=30),
    ],
)
def test_other_bases_and_the_seed(base):
    one, two = (
        PredictiveRegressor(base, cv=3, random_state=3).fit(X[:N], Y[:N]).predict_interval(X[N:])
        for _ in range(2)
    )
    assert (one == two).all()
    assert 0.88 < np.mean((one[:, 0] <= Y[N:]) & (Y[N:] <= one[:, 1])) < 0.99


def test_lightgbm():
    lightgbm = pytest.importorskip("lightgbm")
    frame, new = (pd.DataFrame(part, columns=["a", "b", "c"]) for part in (X[:N], X[N:]))
    model = PredictiveRegressor(
        lightgbm.LGBMRegressor(n_estimators=40, verbose=-1, n_jobs=1), cv=3, random_state=0
    )
    assert (
        0.85 < float(metrics.coverage(model.fit(frame, Y[:N]).predict_dist(new), Y[N:], 0.9)) < 0.97
    )
    booster = lightgbm.LGBMClassifier(n_estimators=40, verbose=-1, n_jobs=1)
    assert PredictiveClassifier(booster, cv=3).fit(frame, LABELS[:N]).score(new, LABELS[N:]) > 0.6


def test_tables_with_texts_and_gaps():
    kind = np.array(["red", "green", "blue"])[RNG.integers(3, size=N)]
    frame = pd.DataFrame({"kind": kind, "x": np.where(RNG.uniform(size=N) < 0.1, np.nan, X[:N, 0])})
    y = Y[:N] + 5 * (kind == "red")
    base = make_pipeline(
        OrdinalEncoder(
            handle_unknown="use_encoded_value", unknown_value=-1, encoded_missing_value=-2
        ),
        HistGradientBoostingRegressor(max_iter=20),
    )
    model = PredictiveRegressor(base, random_state=0).fit(frame, y)
    assert list(model.feature_names_in_) == ["kind", "x"]
    assert model.predict_interval(frame.iloc[:5]).shape == (5, 2)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame.rename(columns={"x": "z"}))
    with pytest.raises(ValueError, match=r"table of numbers|could not convert"):
        ssla.html_report(model, frame, y)
    gaps = np.where(RNG.uniform(size=(N, 3)) < 0.1, np.nan, X[:N])
    assert np.isfinite(PredictiveRegressor(random_state=0).fit(gaps, y).predict(gaps)).all()
    with pytest.raises(ValueError, match="NaN"):
        PredictiveRegressor(KNeighborsRegressor()).fit(gaps, y)


def test_splitters():
    groups = np.arange(N) % 4
    inside = PredictiveRegressor(FOREST, cv=PredefinedSplit(groups)).fit(X[:N], Y[:N])
    assert len(inside.models_["mean"]) == 4
    pairs = list(GroupKFold(4).split(X[:N], Y[:N], groups))
    assert len(PredictiveRegressor(FOREST, cv=pairs).fit(X[:N], Y[:N]).models_["mean"]) == 4
    with pytest.raises(ValueError, match="more than once"):
        PredictiveRegressor(FOREST, cv=RepeatedKFold(n_splits=2, n_repeats=2)).fit(X[:N], Y[:N])


def test_rows_of_weight_zero_do_not_count():
    w = np.repeat([1.0, 0.0], N)
    base = DecisionTreeRegressor(max_depth=3, random_state=0)
    wild = np.where(w > 0, Y, 1e6)
    one = PredictiveRegressor(base, random_state=0).fit(X, wild, sample_weight=w).predict(X)
    two = (
        PredictiveRegressor(base, random_state=0).fit(X[:N], Y[:N], sample_weight=w[:N]).predict(X)
    )
    assert np.allclose(one, two)


def test_settings_can_be_searched():
    model = PredictiveRegressor(DecisionTreeRegressor(), cv=2, random_state=0)
    search = GridSearchCV(model, {"base__max_depth": [1, 5]}, cv=2).fit(X[:N], Y[:N])
    assert search.best_params_ == {"base__max_depth": 5}


class NoFinite(RegressorMixin, BaseEstimator):
    def fit(self, X, y):
        self.fitted_ = True
        return self

    def predict(self, X):
        return np.full(len(X), np.inf)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cv": 1}, "cv must be at least 2"),
        ({"final": "fold"}, "Unknown final 'fold'. Did you mean 'folds'"),
        ({"refit": "outptu"}, "Did you mean 'output'"),
        ({"prior_strength": 0}, "prior_strength must be a positive number"),
        ({"base": NoFinite()}, "NoFinite predicts values that are not finite"),
    ],
)
def test_bad_settings_have_messages(options, message):
    with pytest.raises(ValueError, match=message):
        PredictiveRegressor(**options).fit(X[:50], Y[:50])


def test_other_bad_input_has_messages():
    with pytest.raises(ValueError, match="constant"):
        PredictiveRegressor().fit(X[:50], np.ones(50))
    with pytest.raises(ValueError, match="one target, but has 2 columns"):
        PredictiveRegressor().fit(X[:50], X[:50, :2])
    with pytest.raises(ValueError, match="does not take it"):
        PredictiveRegressor(KNeighborsRegressor()).fit(X[:50], Y[:50], sample_weight=np.ones(50))
    with pytest.raises(TypeError, match="has no predict_proba"):
        PredictiveClassifier(LinearRegression()).fit(X[:50], LABELS[:50])
    with pytest.raises(ValueError, match="one class only for its model"):
        PredictiveClassifier().fit(X[:2], ["a", "b"])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a", None, "b", "a"], r"1 labels of y are missing \(first: row 1\)"),
        (pd.Series(["a", "b", pd.NA, "a"], dtype="string"), r"1 labels of y are missing"),
        (np.ma.masked_equal([0, 1, 9, 0], 9), r"must not have masked values"),
        ([0.0, 1.0, np.nan, 0.0], r"contains NaN"),
        ([0.5, 1.0, 2.0, 0.5], r"Unknown label type: continuous"),
        ([[0, 1], [1, 0], [0, 1], [1, 0]], r"should be a 1d array"),
    ],
)
def test_labels_that_are_not_those_of_classes_are_refused(labels, message):
    with pytest.raises(ValueError, match=message):
        PredictiveClassifier().fit(X[:4], labels)


@pytest.mark.parametrize("frame", [False, True])
def test_the_last_layer_is_saved_and_the_models_are_given(tmp_path, frame):
    pytest.importorskip("safetensors")
    table = pd.DataFrame(X, columns=["a", "b", "c"]) if frame else X
    cases = (
        PredictiveRegressor(DecisionTreeRegressor(max_depth=4), random_state=0).fit(
            table[:N], Y[:N]
        ),
        PredictiveClassifier(DecisionTreeClassifier(max_depth=4), random_state=0).fit(
            table[:N], LABELS[:N]
        ),
    )
    for i, model in enumerate(cases):
        path = model.save(tmp_path / f"model{i}")
        again = load(path, models=model.models_)
        assert torch.equal(again.predict_dist(table[N:]).mean, model.predict_dist(table[N:]).mean)
        assert (again.predict(table[N:]) == model.predict(table[N:])).all()
        with pytest.raises(ssla.FileError, match="not the models that it needs"):
            load(path)
        with pytest.raises(ssla.FileError, match="must be the models_"):
            load(path, models={})
        others = (
            clone(model)
            .set_params(base__max_depth=2)
            .fit(table[:N], Y[:N] if i == 0 else LABELS[:N])
        )
        with pytest.raises(ssla.FileError, match="do not predict what those of"):
            load(path, models=others.models_)
        bare = {kind: tuple(clone(m) for m in models) for kind, models in model.models_.items()}
        with pytest.raises(ssla.FileError, match="not fitted"):
            load(path, models=bare)
        names = {file.suffix for file in path.iterdir()}
        assert names == {".json", ".safetensors"}
        assert all(json.loads(file.read_text()) for file in path.glob("*.json"))


def test_the_posterior_has_its_own_methods_and_the_report_works(regressor, classifier):
    features = regressor.features(X[N : N + 5])
    assert features.shape == (5, 3)
    assert regressor.posterior_.predict(features).interval(0.9).shape == (5, 2)
    assert regressor.posterior_.loo().log_prob.shape == (N,)
    for model, y in ((regressor, Y), (classifier, LABELS)):
        page = str(ssla.html_report(model, X[N : N + 40], y[N : N + 40]))
        assert type(model).__name__ in page
        assert "given to the models as it is" in page


def test_nothing_is_written_and_no_warning_is_given(regressor):
    before = X.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        regressor.predict_dist(X[N:])
    assert (before == X).all()
