"""What the estimators do with data and options that look like numbers and are not: masks,
dates, texts as flags.
"""

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse
import torch

import ssla
from ssla import metrics
from ssla.sklearn import (
    PredictiveClassifier,
    PredictiveRegressor,
    SSLAClassifier,
    SSLARegressor,
    TableEncoder,
    nll_scorer,
)

QUICK = {"members": 1, "max_epochs": 10, "hidden": (8,), "trees": 0, "random_state": 0}
RNG = np.random.default_rng(0)
N = 80
X = RNG.normal(size=(N, 2))
Y = X @ [1.0, -2.0] + 0.3 * RNG.normal(size=N)
LABELS = (Y > 0).astype(int)
MASK = np.arange(N) < 20
FILLED = np.where(MASK, -9999.0, Y)
MASKED = np.ma.array(FILLED, mask=MASK)
DAYS = pd.Series(pd.date_range("2020-01-01", periods=N))


def masked_inputs():
    """A quarter of the first column is behind a mask, with an absurd fill value."""
    mask = np.column_stack([MASK, np.zeros(N, bool)])
    return np.ma.array(np.where(mask, 1e20, X), mask=mask), np.where(mask, np.nan, X)


def regressor(**options):
    return SSLARegressor(**QUICK | options)


def classifier(**options):
    return SSLAClassifier(**QUICK | options)


@pytest.fixture(scope="module")
def fitted():
    return regressor().fit(X, Y), classifier().fit(X, LABELS)


# --- masks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [regressor, lambda: PredictiveRegressor(cv=2, random_state=0)])
def test_masked_targets_are_refused_with_their_number(make):
    with pytest.raises(ValueError, match=r"y must not have masked values, but 20 of 80 .* \[0\]"):
        make().fit(X, MASKED)
    unmasked = np.ma.array(Y, mask=False)
    assert np.array_equal(make().fit(X, unmasked).predict(X), make().fit(X, Y).predict(X))


@pytest.mark.parametrize("make", [classifier, lambda: PredictiveClassifier(cv=2, random_state=0)])
def test_masked_labels_are_no_class(make):
    with pytest.raises(ValueError, match="y must not have masked values, but 20 of 80"):
        make().fit(X, np.ma.array(np.where(MASK, 7, LABELS), mask=MASK))


def test_masked_targets_weights_and_groups_are_refused_everywhere(fitted):
    numbers, classes = fitted
    for model, y in ((numbers, MASKED), (classes, np.ma.array(LABELS, mask=MASK))):
        with pytest.raises(ValueError, match="masked"):
            model.partial_fit(X, y)
        with pytest.raises(ValueError, match="masked"):
            nll_scorer(model, X, y)
        with pytest.raises(ValueError, match="masked"):
            metrics.nll(model.predict_dist(X), y)
    ones = np.ma.array(np.ones(N), mask=MASK)
    with pytest.raises(ValueError, match="sample_weight must not have masked"):
        regressor().fit(X, Y, sample_weight=ones)
    with pytest.raises(ValueError, match="groups must not have masked"):
        regressor().fit(X, Y, groups=ones)


@pytest.mark.parametrize("make", [regressor, lambda: PredictiveRegressor(cv=2, random_state=0)])
def test_masked_inputs_are_gaps(make):
    masked, gaps = masked_inputs()
    before = masked.copy()
    by_mask, by_nan = make().fit(masked, Y), make().fit(gaps, Y)
    assert np.array_equal(by_mask.predict(masked), by_nan.predict(gaps))
    assert np.array_equal(masked.data, before.data)  # the user's data are not changed
    assert np.array_equal(masked.mask, before.mask)


def test_masked_texts_and_dates_are_gaps():
    mask = np.array([[True], [False], [False]])
    texts, dates = (
        np.array([["a"], ["b"], ["c"]]),
        np.array([["2020"], ["2021"], ["2022"]], dtype="datetime64[D]"),
    )
    for values, gap in ((texts, None), (dates, np.datetime64("NaT"))):
        plain = values.astype(object) if gap is None else values.copy()
        plain[0, 0] = gap
        encoded = TableEncoder().fit(plain)
        masked = TableEncoder().fit(np.ma.array(values, mask=mask))
        assert np.array_equal(
            masked.transform(np.ma.array(values, mask=mask)), encoded.transform(plain)
        )


def test_the_scorer_reads_masked_cells_as_gaps(tmp_path):
    masked, gaps = masked_inputs()
    frame = pd.DataFrame(gaps, columns=["a", "b"])
    model = regressor().fit(frame, Y)
    scorer = ssla.Scorer(model.save(tmp_path / "named"))
    expected = scorer(frame)
    found = scorer({"a": masked[:, 0], "b": masked[:, 1]})
    assert np.array_equal(found["mean"], expected["mean"])
    nameless = regressor().fit(gaps, Y)
    scorer = ssla.Scorer(nameless.save(tmp_path / "nameless"))
    assert np.array_equal(scorer(masked)["mean"], nameless.predict(gaps))
    with pytest.raises(TypeError, match="layout sparse_coo"):
        scorer(torch.from_numpy(X).to_sparse())


# --- dates ---------------------------------------------------------------------------------

DATES = {
    "numpy days": DAYS.to_numpy().astype("datetime64[D]"),
    "numpy durations": np.arange(N).astype("timedelta64[s]"),
    "pandas": DAYS,
    "pandas frame": DAYS.to_frame(),
    "pandas with a time zone": DAYS.dt.tz_localize("UTC"),
    "pandas durations": DAYS - DAYS[0],
    "pandas periods": DAYS.dt.to_period("D"),
    "pandas timestamps": DAYS.tolist(),
    "polars": pl.Series(DAYS.tolist()),
    "polars dates": pl.Series(DAYS.tolist()).cast(pl.Date),
    "python dates": DAYS.dt.date.tolist(),
    "some": [*Y[1:].tolist(), DAYS[0]],
}


@pytest.mark.parametrize("kind", list(DATES))
@pytest.mark.parametrize("make", [regressor, PredictiveRegressor])
def test_dates_are_no_numbers(make, kind):
    with pytest.raises(TypeError, match="must be numbers, but holds dates, times or durations"):
        make().fit(X, DATES[kind])


def test_dates_are_no_numbers_later(fitted):
    with pytest.raises(TypeError, match="holds dates"):
        fitted[0].partial_fit(X, DATES["numpy days"])
    with pytest.raises(TypeError, match="holds dates"):
        nll_scorer(fitted[0], X, DATES["pandas"])


# --- options -------------------------------------------------------------------------------

WRONG = {
    "members": ["x", 0, True, 2.0, None, np.array([1, 2])],
    "hidden": ["ab", "", None, 2.5, (0,), (True,), (8.0,)],
    "activation": [3, "sigmoid", None],
    "refit": [5, "x", None],
    "weights": [3, None],
    "structure": [3, "x", None],
    "prior_precision": ["x", 0.0, -1.0, np.inf, np.nan, None, True],
    "tune": ["x", 1, None],
    "max_epochs": ["x", 0, 2.5, None],
    "batch_size": ["x", 0, 2.5, np.array([1, 2])],
    "learning_rate": ["x", 0.0, np.inf, np.nan, None],
    "early_stopping": ["x", "False", 1, None],
    "validation_fraction": ["x", 0.0, 1.0, None],
    "patience": ["x", 0, None],
    "trees": ["x", -1, 2.5],
    "row_weights": ["x", 3, None],
    "random_state": ["x"],
    "verbose": ["x", -1, None],
}
ONLY_NUMBERS = {
    "likelihood": [3, "x", None, np.array(["poisson", "auto"])],
    "conformal": ["x", "False", 1, None],
    "calibration_fraction": ["x", 0.0, 1.0, None],
}
ONLY_CLASSES = {"class_weight": ["x", 3, [1.0, 2.0]]}


@pytest.mark.parametrize("name", [*WRONG, *ONLY_NUMBERS])
def test_wrong_options_of_the_regressor_are_refused(name):
    for value in (WRONG | ONLY_NUMBERS)[name]:
        needed = {"conformal": True} if name == "calibration_fraction" else {}
        with pytest.raises(
            (ValueError, TypeError), match=name if name != "random_state" else "seed"
        ):
            regressor(**needed | {name: value}).fit(X, Y)


@pytest.mark.parametrize("name", [*WRONG, *ONLY_CLASSES])
def test_wrong_options_of_the_classifier_are_refused(name):
    for value in (WRONG | ONLY_CLASSES)[name]:
        with pytest.raises(
            (ValueError, TypeError), match=name if name != "random_state" else "seed"
        ):
            classifier(**{name: value}).fit(X, LABELS)


def test_every_option_has_a_wrong_value_here():
    assert set(SSLARegressor().get_params()) == {*WRONG, *ONLY_NUMBERS}
    assert set(SSLAClassifier().get_params()) == {*WRONG, *ONLY_CLASSES}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("base", 3),
        ("noise_base", 3),
        ("cv", "x"),
        ("cv", 1),
        ("final", 3),
        ("refit", 3),
        ("prior_strength", "x"),
        ("row_weights", 1),
    ],
)
def test_wrong_options_of_wrapped_models_are_refused(name, value):
    with pytest.raises((ValueError, TypeError), match=name):
        PredictiveRegressor(**{name: value}).fit(X, Y)


# --- shapes --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [regressor, classifier, PredictiveRegressor, PredictiveClassifier])
def test_weights_that_are_no_weights_are_refused(make):
    y = LABELS if make in (classifier, PredictiveClassifier) else Y
    with pytest.raises(
        ValueError,
        match=r"sample_weight must have shape \(80,\), one weight for each row, but has \(5,\)",
    ):
        make().fit(X, y, sample_weight=np.ones(5))
    with pytest.raises(ValueError, match="sample_weight must be numbers"):
        make().fit(X, y, sample_weight=["a"] * N)


def test_sparse_inputs_are_refused(fitted):
    for make, y in ((regressor, Y), (classifier, LABELS), (PredictiveRegressor, Y)):
        with pytest.raises(TypeError, match="dense"):
            make().fit(scipy.sparse.csr_matrix(X), y)
    with pytest.raises(TypeError, match="dense"):
        fitted[0].predict(scipy.sparse.csr_matrix(X))


def test_the_number_of_draws(fitted):
    for model in fitted:
        p = model.predict_dist(X[:3])
        for n in (0, 2, np.int64(2), torch.tensor(2)):
            assert p.sample(n).shape == (int(n), 3)
        for n in ((5,), [5], 2.5, "x", None, True):
            with pytest.raises(TypeError, match="number of draws must be a whole number"):
                p.sample(n)
        with pytest.raises(ValueError, match="at least 0, but is -1"):
            p.sample(-1)
        with pytest.raises(TypeError, match=r"Write sample\(5\)"):
            p.sample((5,))
