"""Estimators: scikit-learn's own checks, what they promise beyond them, files."""

import json
import pickle

import joblib
import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from scipy import stats
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import (
    check_sample_weight_equivalence_on_dense_data,
    parametrize_with_checks,
)

import ssla
from ssla import metrics
from ssla.sklearn import SSLAClassifier, SSLARegressor, load
from ssla.tables.networks import Settings, fit_ensemble
from ssla.tables.networks.folds import hold_out_rows
from ssla.tables.networks.held_out_noise import change_noise, estimate_held_out_noise
from ssla.tables.networks.training import Architecture, Rows, Schedule, train_networks

QUICK = {"max_epochs": 25, "hidden": (16,), "random_state": 0}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(160, 3)) * [1.0, 10.0, 0.1] + [0.0, 5.0, 100.0]
Y = 50 + 8 * np.sin(X[:, 0]) + 0.5 * X[:, 1] + RNG.normal(size=160)
LABELS = np.array(["low", "middle", "high"])[np.digitize(Y, [50, 55])]


# MLPRegressor and MLPClassifier pass the equivalence of weights and repetitions with full batches
# only; so do these (below)
BATCHES = {
    "check_sample_weight_equivalence_on_dense_data": "rows are shuffled into batches and left out "
    "at random"
}


@pytest.mark.filterwarnings(
    "ignore:the variational Gaussian did not converge"
)  # in a handful of rows
@parametrize_with_checks(
    [make(max_epochs=25, hidden=(16,), batch_size=64) for make in (SSLARegressor, SSLAClassifier)],
    expected_failed_checks=lambda estimator: BATCHES,
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.mark.filterwarnings(
    "ignore:the variational Gaussian did not converge"
)  # in a handful of rows
@pytest.mark.parametrize("make", [SSLARegressor, SSLAClassifier])
def test_the_check_of_weights_passes_in_settings_like_those_scikit_learn_runs_its_mlp_in(make):
    """scikit-learn runs this check of MLPClassifier with solver="lbfgs", of MLPRegressor with
    full batches of sgd.
    """
    estimator = make(
        max_epochs=25, hidden=(4,), batch_size=None, early_stopping=False
    )  # the check has 15 rows
    check_sample_weight_equivalence_on_dense_data(make.__name__, estimator)


@pytest.mark.parametrize("members", [1, 3])
def test_weights_equal_repetitions_with_all_rows_at_once(members):
    options = QUICK | {"batch_size": None, "early_stopping": False, "members": members}
    w = RNG.integers(0, 4, size=len(X))
    repeated = np.repeat(np.arange(len(X)), w)
    for make, y in ((SSLARegressor, Y), (SSLAClassifier, LABELS)):
        one = make(**options).fit(X, y, sample_weight=w).predict_dist(X)
        two = make(**options).fit(X[repeated], y[repeated]).predict_dist(X)
        assert torch.allclose(one.mean, two.mean, rtol=1e-6, atol=1e-8)
        assert torch.allclose(one.variance, two.variance, rtol=1e-6, atol=1e-8)


def test_the_regressor_answers_in_the_units_of_the_table():
    model = SSLARegressor(random_state=0, members=3).fit(X[:120], Y[:120])
    mean, sd = model.predict(X[120:], return_std=True)
    p = model.predict_dist(X[120:])
    assert np.allclose(mean, p.mean)
    assert np.allclose(sd, p.stddev)
    assert model.score(X[120:], Y[120:]) > 0.9
    assert 0.7 < float(sd.mean()) < 2.5  # the noise is 1
    interval = model.predict_interval(X[120:], 0.9)
    quantiles = model.predict_quantiles(X[120:], [0.05, 0.95])
    assert interval.shape == (40, 2)
    assert np.allclose(interval, quantiles)
    assert model.predict_quantiles(X[120:], 0.5).shape == (40,)
    far = X[:1] + 50 * X.std(0)
    assert float(model.predict_dist(far).epistemic) > 3 * float(p.epistemic.mean())
    grid = mean[:, None] + sd[:, None] * np.linspace(-100, 100, 20001)  # the tails are heavy
    area = torch.trapezoid(p.log_prob(grid).exp(), torch.from_numpy(grid))
    assert torch.allclose(area, torch.ones(40, dtype=area.dtype), atol=1e-6)


def test_the_unit_of_the_target_does_not_matter():
    one = SSLARegressor(**QUICK).fit(X, Y)
    other = SSLARegressor(**QUICK).fit(X * 4.0, 1000 * Y - 7)
    assert np.allclose(
        1000 * one.predict_interval(X) - 7, other.predict_interval(X * 4.0), rtol=1e-3
    )
    assert (
        abs(
            float(metrics.nll(one.predict_dist(X), Y))
            + np.log(1000)
            - float(metrics.nll(other.predict_dist(X * 4), 1000 * Y - 7))
        )
        < 1e-2
    )


def test_intervals_cover_new_rows():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(2600, 3))
    y = 8 * np.sin(x[:, 0]) + x[:, 1] + rng.normal(size=2600)
    p = SSLARegressor(random_state=0, max_epochs=60).fit(x[:600], y[:600]).predict_dist(x[600:])
    assert 0.91 < float(metrics.coverage(p, y[600:], 0.95)) < 0.99
    assert 0.9 < float(p.stddev.mean()) < 1.3


@pytest.mark.parametrize("likelihood", ["heteroscedastic", "poisson"])
def test_other_targets(likelihood):
    y = np.round(Y / 8) if likelihood == "poisson" else Y
    model = SSLARegressor(likelihood, members=2, **QUICK).fit(X, y)
    p = model.predict_dist(X)
    assert p.kind == ("count" if likelihood == "poisson" else "scalar")
    assert model.predict_interval(X).shape == (160, 2)
    assert torch.isfinite(p.log_prob(y)).all()
    two = SSLARegressor(**QUICK).fit(X, np.stack([Y, -2 * Y], 1))
    assert two.predict(X).shape == (160, 2)
    assert two.predict_interval(X).shape == (160, 2, 2)


def test_the_classifier_keeps_labels():
    model = SSLAClassifier(members=2, **QUICK).fit(X, LABELS)
    assert list(model.classes_) == ["high", "low", "middle"]
    probs = model.predict_proba(X)
    assert probs.shape == (160, 3)
    assert np.allclose(probs.sum(1), 1)
    assert model.score(X, LABELS) > 0.7
    assert model.predict_dist(X).interval(0.9).shape == (160, 3)
    binary = SSLAClassifier(**QUICK).fit(X, Y > 53)
    assert binary.predict(X).dtype == bool


def test_frames_pipelines_searches_and_pickles():
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    model = SSLARegressor(**QUICK).fit(frame, pd.Series(Y))
    expected = SSLARegressor(**QUICK).fit(X, Y).predict(X)
    assert list(model.feature_names_in_) == ["a", "b", "c"]
    assert np.array_equal(model.predict(frame), expected)
    assert np.array_equal(
        SSLARegressor(**QUICK)
        .fit(pl.from_pandas(frame), pl.Series(Y))
        .predict(pl.from_pandas(frame)),
        expected,
    )
    assert np.array_equal(clone(model).fit(frame, Y).predict(frame), expected)
    assert np.array_equal(
        pickle.loads(pickle.dumps(model)).predict_interval(frame), model.predict_interval(frame)
    )
    search = GridSearchCV(
        make_pipeline(StandardScaler(), SSLARegressor(**QUICK | {"max_epochs": 3})),
        {"sslaregressor__hidden": [(4,), (8,)]},
        cv=2,
    )
    assert search.fit(X, Y).best_params_["sslaregressor__hidden"] in [(4,), (8,)]
    done = joblib.Parallel(n_jobs=2, backend="threading")(
        joblib.delayed(clone(model).fit)(X, Y) for _ in range(2)
    )
    assert np.array_equal(done[0].predict(X), done[1].predict(X))


def test_fitting_draws_no_global_random_number_and_keeps_threads():
    torch.manual_seed(3)
    state, threads = torch.get_rng_state().clone(), torch.get_num_threads()
    numpy_state = np.random.get_state()[1].copy()
    SSLARegressor(**QUICK).fit(X, Y)
    assert torch.equal(state, torch.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("options", "y", "match"),
    [
        ({"likelihood": "gausian"}, Y, "Did you mean 'gaussian'"),
        ({"members": 0}, Y, "members must be a whole number"),
        ({"hidden": (0,)}, Y, "hidden must be positive"),
        ({"activation": "gelu"}, Y, "Unknown activation"),
        ({"refit": "outputs"}, Y, "Did you mean 'output'"),
        ({"learning_rate": -1.0}, Y, "learning_rate"),
        ({"batch_size": 0}, Y, "batch_size"),
        ({"validation_fraction": 1.5}, Y, "validation_fraction"),
        ({}, np.ones(160), "constant"),
        ({"likelihood": "poisson"}, Y, "counts"),
        ({"conformal": True, "calibration_fraction": 2}, Y, "calibration_fraction"),
    ],
)
def test_bad_settings_are_named(options, y, match):
    with pytest.raises(ValueError, match=match):
        SSLARegressor(**QUICK | options).fit(X, y)


# --- conformal -------------------------------------------------------------------------------


def test_conformal_intervals_cover_whatever_the_model():
    """A bad model and skewed noise: the mean coverage over many test rows is the level or more."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3000, 1))
    y = np.abs(x[:, 0]) * rng.exponential(size=3000) ** 2
    model = SSLARegressor(
        conformal=True, calibration_fraction=0.3, max_epochs=1, hidden=(2,), random_state=0
    ).fit(x[:700], y[:700])
    ends = model.predict_interval(x[700:], 0.8)
    assert np.mean((ends[:, 0] <= y[700:]) & (y[700:] <= ends[:, 1])) > 0.8 - 3 * np.sqrt(
        0.16 / 210
    )
    assert len(model.conformal_.scores) == 210
    with pytest.warns(UserWarning, match="at least 999"):
        assert np.isinf(model.predict_interval(x[:2], 0.999)[:, 1]).all()


# --- the parts -------------------------------------------------------------------------------


def test_members_train_as_if_alone_and_keep_their_best_epoch():
    x, y = torch.randn(60, 2, dtype=torch.float64), torch.randn(60, dtype=torch.float64)
    held = hold_out_rows(60, 3, 0.2, torch.Generator().manual_seed(0))
    assert held.sum(1).tolist() == [12, 12, 12]
    assert not (held[0] & held[1]).any()
    trained = train_networks(
        Architecture(2, 1, (8,)),
        None,
        Rows(x, y, torch.ones(60), held),
        Schedule(30, 16, patience=30),
        0,
    )
    assert torch.equal(trained.losses.argmin(0) + 1, trained.best_epoch)
    full = Schedule(20, None, precision=2.0)
    nothing = torch.zeros(3, 60, dtype=torch.bool)
    together = train_networks(
        Architecture(2, 1, (8,)),
        None,
        Rows(x, y, torch.ones(60, dtype=torch.float64), nothing),
        full,
        0,
    )
    assert not torch.equal(together.modules[0][0].weight, together.modules[1][0].weight)


def test_full_batch_training_reaches_the_mode_of_the_prior_it_names():
    """A linear network with known weights: weight decay is the Gaussian prior, so training ends
    at ridge regression.
    """
    x = torch.randn(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.poisson(
        (x @ torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64) + 1).exp(),
        generator=torch.Generator().manual_seed(1),
    )
    nothing = torch.zeros(1, 50, dtype=torch.bool)
    rows = Rows(x, y, torch.ones(50, dtype=torch.float64), nothing)
    likelihood = ssla.likelihoods.Poisson()
    trained = train_networks(
        Architecture(3, 1, ()), likelihood, rows, Schedule(800, None, 0.1, precision=4.0), 0
    )
    post = ssla.fit(
        trained.modules[0],
        (x, y),
        likelihood=likelihood,
        prior=ssla.priors.Gaussian(4.0),
        gaussian="laplace",
    )
    assert post.report.residual < 1e-3


def test_noise_of_known_size_is_found_and_its_error_is_honest():
    draws = torch.randn(400, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = [
        estimate_held_out_noise((2.0 * d[:, None]) ** 2, torch.ones(200), torch.zeros(1))
        for d in draws
    ]
    logs = torch.tensor([float(n.scale.log()) for n in found])
    assert abs(float(logs.mean()) - np.log(2)) < 0.01
    assert abs(float(logs.std()) / np.mean([n.error for n in found]) - 1) < 0.25
    heavy = torch.from_numpy(stats.t.rvs(3, size=2000, random_state=0) ** 2)[:, None]
    assert estimate_held_out_noise(heavy, torch.ones(2000), torch.zeros(1)).error > 1.2 * np.sqrt(
        0.5 / 2000
    )
    inside, V = torch.full((1,), 0.5), torch.full((1,), 0.2)
    assert float(
        estimate_held_out_noise(torch.ones(50, 1), torch.ones(50), inside, V).scale
    ) ** 2 == pytest.approx(0.6)
    assert float(
        estimate_held_out_noise(torch.ones(50, 1), torch.ones(50), inside, 2 * V).scale
    ) ** 2 == pytest.approx(0.5)


def test_another_noise_without_a_pass_equals_another_fit():
    module = torch.nn.Sequential(
        torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)
    ).double()
    data = torch.from_numpy((X - X.mean(0)) / X.std(0)), torch.from_numpy((Y - Y.mean()) / Y.std())
    first, second = (ssla.likelihoods.Gaussian(noise=s) for s in (0.5, 0.8))
    moved = change_noise(
        ssla.fit(module, data, likelihood=first, prior=ssla.priors.Gaussian()), second
    )
    direct = ssla.fit(module, data, likelihood=second, prior=ssla.priors.Gaussian())
    assert torch.allclose(moved.theta, direct.theta, atol=1e-10)
    assert abs(moved.log_evidence() - direct.log_evidence()) < 1e-8
    assert torch.allclose(
        moved.predict(data[0]).variance, direct.predict(data[0]).variance, rtol=1e-10
    )
    assert moved.report.likelihood == direct.report.likelihood


def test_an_ensemble_needs_no_scikit_learn():
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    fitted = fit_ensemble(
        x, y, torch.ones(160, dtype=torch.float64), Settings(members=2, schedule=Schedule(5))
    )
    assert fitted.predict(x).mean.shape == (160,)
    assert sum(c.weight for c in fitted.components) == pytest.approx(1)


# --- files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gaussian", "conformal", "poisson", "classes"])
def test_saved_estimators_predict_bit_by_bit_as_before(kind, tmp_path):
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    if kind == "classes":
        model = SSLAClassifier(members=2, **QUICK).fit(frame, LABELS)
    else:
        y = np.round(Y / 8) if kind == "poisson" else Y
        options = {"conformal": True} if kind == "conformal" else {"likelihood": kind}
        model = SSLARegressor(members=2, **options, **QUICK).fit(frame, y)
    again = load(model.save(tmp_path / "model"))
    assert type(again) is type(model)
    assert again.get_params() == model.get_params()
    ask = "predict_proba" if kind == "classes" else "predict_interval"
    assert np.array_equal(getattr(again, ask)(frame), getattr(model, ask)(frame))
    assert np.array_equal(again.predict(frame), model.predict(frame))
    with pytest.raises(ssla.FileError, match="holds a saved 'estimator'"):
        ssla.load(tmp_path / "model", torch.nn.Linear(1, 1))


def test_damaged_estimators_end_in_our_error(tmp_path):
    path = SSLARegressor(**QUICK).fit(X, Y).save(tmp_path / "model")
    text = (path / "manifest.json").read_text()
    rng = np.random.default_rng(0)
    for _ in range(200):
        at = int(rng.integers(len(text)))
        (path / "manifest.json").write_text(
            text[:at] + chr(int(rng.integers(32, 126))) + text[at + 1 :]
        )
        try:
            load(path)
        except ssla.FileError:
            continue
        assert json.loads((path / "manifest.json").read_text()) == json.loads(text)


# --- classes ---------------------------------------------------------------------------------


def test_log_probabilities_are_finite_and_sets_hold_their_probability():
    model = SSLAClassifier(members=2, **QUICK).fit(X, LABELS)
    probs, logs = model.predict_proba(X), model.predict_log_proba(X)
    assert np.allclose(np.exp(logs), probs)
    far = X[:1] + 1e6 * X.std(0)
    assert np.isfinite(model.set_params(refit="plug_in").predict_log_proba(far)).all()
    model.set_params(refit="output")
    chosen = model.predict_set(X, 0.9)
    assert chosen.shape == (160, 3)
    assert chosen.dtype == bool
    assert ((probs * chosen).sum(1) >= 0.9).all()
    assert (
        (probs * chosen).sum(1) - np.where(chosen, probs, 1).min(1) < 0.9
    ).all()  # no smaller set has


def test_class_weights_are_row_weights(tmp_path):
    options = QUICK | {"batch_size": None, "early_stopping": False}
    weights = {"low": 2.0, "middle": 1.0, "high": 3.0}
    one = SSLAClassifier(class_weight=weights, **options).fit(X, LABELS)
    two = SSLAClassifier(**options).fit(
        X, LABELS, sample_weight=[weights[label] for label in LABELS]
    )
    assert np.array_equal(one.predict_proba(X), two.predict_proba(X))
    rare = np.arange(160) % 8 == 0  # unrelated to X: the share of the class is its probability
    plain, balanced = (
        SSLAClassifier(class_weight=w, **options).fit(X, rare).predict_proba(X)[:, 1].mean()
        for w in (None, "balanced")
    )
    assert plain == pytest.approx(1 / 8, abs=0.03)
    assert balanced == pytest.approx(1 / 2, abs=0.1)
    assert np.array_equal(load(one.save(tmp_path / "model")).predict_proba(X), one.predict_proba(X))
    with pytest.raises(ValueError, match="class_weight"):
        SSLAClassifier(class_weight="equal", **options).fit(X, LABELS)


@pytest.mark.parametrize("gap", [None, pd.NA, pd.NaT, np.nan])
def test_missing_labels_are_refused(gap):
    for labels in (
        np.array(["a", "b", gap] * 20, dtype=object),
        pd.Series(["a", "b", gap] * 20, dtype="string"),
    ):
        with pytest.raises(ValueError, match=r"20 labels of y are missing \(first: row 2\)"):
            SSLAClassifier().fit(np.zeros((60, 2)), labels)
