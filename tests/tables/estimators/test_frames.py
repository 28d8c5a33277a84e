"""Estimators and the encoder on data frames: texts, categories, booleans, dates and gaps."""

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from ssla.files import FileError, read_model, write_model
from ssla.predictive import mixture
from ssla.sklearn import SSLAClassifier, SSLARegressor, TableEncoder, load
from ssla.tables.columns import TableError
from ssla.tables.columns.frames import make_table
from ssla.tables.columns.plan import DRAWS
from ssla.tables.estimators.saving import KIND
from ssla.tables.networks.training import Architecture

QUICK = {"max_epochs": 12, "hidden": (12,), "random_state": 0}
N = 150
RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "size": RNG.normal(50, 10, N),
        "colour": RNG.choice(["red", "green", "blue"], N),
        "grade": pd.Categorical(RNG.integers(1, 4, N)),
        "new": RNG.random(N) < 0.5,
        "sold": pd.Timestamp("2020-03-01") + pd.to_timedelta(RNG.integers(0, 900, N), "D"),
        "age": np.where(RNG.random(N) < 0.25, np.nan, RNG.normal(size=N)),
    }
)
Y = (
    0.2 * FRAME["size"]
    + 3.0 * (FRAME["colour"] == "red")
    + FRAME["grade"].astype(int)
    + np.nan_to_num(FRAME["age"])
    + RNG.normal(size=N)
).to_numpy()
NAMES = [
    "size",
    "colour=blue",
    "colour=green",
    "colour=red",
    "grade=1",
    "grade=2",
    "grade=3",
    "new",
    "sold",
    "sold: sine of the year",
    "sold: cosine of the year",
    "age",
    "age: missing",
]


def polars(frame):
    return pl.DataFrame(
        {
            name: pl.Series(column.astype(str).tolist()).cast(pl.Categorical)
            if column.dtype == "category"
            else pl.Series(
                None if gap else value
                for value, gap in zip(column.tolist(), column.isna(), strict=True)
            )
            for name, column in frame.items()
        }
    )


@parametrize_with_checks([TableEncoder()])
def test_scikit_learns_own_checks_of_the_encoder(estimator, check):
    check(estimator)


def test_the_encoder_gives_each_column_its_numbers():
    encoder = TableEncoder().fit(FRAME)
    numbers = encoder.transform(FRAME)
    assert encoder.get_feature_names_out().tolist() == NAMES
    column = dict(zip(NAMES, numbers.T, strict=True))
    assert np.array_equal(column["size"], FRAME["size"])
    assert np.array_equal(column["colour=red"], FRAME["colour"] == "red")
    assert np.array_equal(column["grade=2"], FRAME["grade"].astype(int) == 2)
    assert np.array_equal(column["new"], FRAME["new"])
    assert np.array_equal(column["sold"], (FRAME["sold"] - FRAME["sold"].min()).dt.days)
    assert np.array_equal(column["age: missing"], FRAME["age"].isna())
    assert np.array_equal(column["age"], FRAME["age"].fillna(FRAME["age"].mean()))
    assert list(encoder.set_output(transform="pandas").transform(FRAME).columns) == NAMES


@pytest.mark.parametrize(
    "make",
    [polars, lambda frame: frame.to_numpy(dtype=object), lambda frame: frame.convert_dtypes()],
)
def test_polars_arrays_and_nullable_types_are_encoded_alike(make):
    expected = TableEncoder().fit_transform(FRAME)
    other = make(FRAME)
    encoder = TableEncoder().fit(other)
    if isinstance(
        other, np.ndarray
    ):  # a category has no type of its own in an array: its levels 1, 2, 3 are numbers
        assert encoder.transform(other).shape == (N, 11)
        assert encoder.get_feature_names_out()[:2].tolist() == ["x0", "x1=blue"]
        assert encoder.get_feature_names_out(list("abcdef"))[1] == "b=blue"
    else:
        assert np.allclose(encoder.transform(other), expected, rtol=1e-14)
        assert encoder.get_feature_names_out().tolist() == NAMES


def test_types_of_columns():
    frame = pd.DataFrame(
        {
            "aware": pd.date_range("2021-01-01", periods=4, tz="Europe/Berlin"),
            "waited": pd.to_timedelta([1, 2, None, 4], "D"),
            "float levels": pd.Categorical([1.0, 2.0, 2.0, None]),
            "texts of numbers": ["1,5", "2,5", "3", None],
            "flags": pd.array([True, None, False, True], dtype="boolean"),
        }
    )
    encoder = TableEncoder().fit(frame)
    assert [feature.kind for feature in encoder.plan_.features] == [
        "date",
        "number",
        "text",
        "number",
        "boolean",
    ]
    assert encoder.plan_.features[0].start == pytest.approx(18628 - 1 / 24)
    assert encoder.plan_.features[1].draws == (1.0, 2.0, 4.0)
    assert encoder.plan_.features[2].levels == ("1", "2")
    assert encoder.plan_.features[3].draws == (1.5, 2.5, 3.0)
    whole = frame.assign(**{"float levels": [1, 2, 2, 1]})  # later as integers
    assert np.array_equal(encoder.encode(whole).values[:, 5:7], [[1, 0], [0, 1], [0, 1], [1, 0]])
    kinds = (
        TableEncoder()
        .fit(pl.DataFrame({"d": pl.Series([1, 2], dtype=pl.Duration("ms")), "e": ["a", "b"]}))
        .plan_.features
    )
    assert (kinds[0].kind, kinds[0].draws[0]) == ("number", pytest.approx(1 / 86_400_000))


@pytest.mark.parametrize("members", [1, 2])
def test_frames_go_into_the_estimators_directly(members):
    model = SSLARegressor(members=members, **QUICK | {"max_epochs": 60}).fit(FRAME, Y)
    assert model.n_features_in_ == 6
    assert list(model.feature_names_in_) == list(FRAME)
    assert model.score(FRAME, Y) > 0.8
    by_hand = SSLARegressor(members=members, **QUICK | {"max_epochs": 60}).fit(
        TableEncoder().fit_transform(FRAME), Y
    )
    assert np.array_equal(
        by_hand.predict(TableEncoder().fit_transform(FRAME)), model.predict(FRAME)
    )
    pipe = make_pipeline(
        TableEncoder(), SSLARegressor(members=members, **QUICK | {"max_epochs": 60})
    ).fit(FRAME, Y)
    assert np.array_equal(pipe.predict(FRAME), model.predict(FRAME))


def test_classes_of_a_polars_frame():
    labels = np.where(np.median(Y) < Y, "high", "low")
    model = SSLAClassifier(**QUICK | {"max_epochs": 60}).fit(polars(FRAME), labels)
    assert model.score(polars(FRAME), labels) > 0.8
    assert np.array_equal(
        model.predict_proba(polars(FRAME)), model.predict_proba(FRAME)
    )  # the same names and values


def test_unlearned_values_widen_the_prediction_as_in_the_command():
    model = SSLARegressor(**QUICK | {"max_epochs": 60}).fit(FRAME, Y)
    new = FRAME.iloc[:3].copy()
    new["colour"] = ["purple", new["colour"][1], new["colour"][2]]
    new.loc[1, "size"] = np.nan
    found, usual = model.predict_dist(new), model.predict_dist(FRAME.iloc[:3])
    assert (found.stddev[:2] > 1.5 * usual.stddev[:2]).all()
    assert float(found.stddev[2]) == pytest.approx(float(usual.stddev[2]), rel=1e-12)
    # by definition: a mixture over the representative values of the training column
    feature = model.plan_.features[0]
    copies = [new.iloc[1:2].assign(size=value) for value in feature.draws]
    assert len(copies) == DRAWS
    expected = mixture([model.predict_dist(one) for one in copies], feature.shares)
    assert torch.allclose(found.mean[1:2], expected.mean, rtol=1e-12)
    assert torch.allclose(found.stddev[1:2], expected.stddev, rtol=1e-12)


def test_a_table_of_numbers_without_gaps_is_fitted_as_before_and_predicts_rows_with_gaps():
    """Constant columns included: the encoding of plain numbers is the identity."""
    X = np.column_stack([FRAME["size"], RNG.normal(size=N), np.ones(N)])
    model = SSLARegressor("gaussian", **QUICK).fit(X, Y)
    assert model.ensemble_.architecture == Architecture(3, 1, (12,))
    assert np.array_equal(model.plan_.encode(make_table(X, ["x0", "x1", "x2"])).values, X)
    assert np.array_equal(TableEncoder().fit_transform(X), X)
    gap = X[:2].copy()
    gap[0, 0] = np.nan
    found, usual = model.predict_dist(gap), model.predict_dist(X[:2])
    assert float(found.stddev[0]) > float(usual.stddev[0])
    assert float(found.stddev[1]) == float(usual.stddev[1])
    several = SSLARegressor(**QUICK).fit(X, np.stack([Y, -Y], 1)).predict_dist(gap)
    assert several.mean.shape == (2, 2)
    assert several.covariance.shape == (2, 2, 2)
    assert several.interval(0.9).shape == (2, 2, 2)


def test_conformal_intervals_of_a_frame_with_gaps():
    model = SSLARegressor(conformal=True, **QUICK).fit(FRAME, Y)
    assert len(model.conformal_.scores) == 30
    assert np.isfinite(model.predict_interval(FRAME, 0.9)).all()


def test_rows_of_weight_zero_are_absent_from_the_plan_too():
    junk = FRAME.iloc[:10].assign(colour="purple", size=1e6)
    both = pd.concat([FRAME, junk], ignore_index=True)
    weights = np.arange(len(both)) < N
    plain = SSLARegressor(**QUICK).fit(FRAME, Y)
    weighted = SSLARegressor(**QUICK).fit(
        both, np.append(Y, np.zeros(10)), sample_weight=weights.astype(float)
    )
    assert weighted.plan_ == plain.plan_
    assert np.array_equal(weighted.predict(FRAME), plain.predict(FRAME))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"size": np.inf}, ValueError, "infinite value in row 1"),
        (
            {"size": "big"},
            TableError,
            "Column 'size' held numbers at training, but row 1 of X is 'big'",
        ),
        ({"new": 2}, TableError, "held true or false at training"),
        ({"other": 1.0}, ValueError, "feature names"),
        ({"colour": [["red"]] * 3}, TypeError, "row 1 of column 'colour' is a list"),
    ],
)
def test_other_columns_and_kinds_are_refused(change, error, match):
    model = SSLARegressor(**QUICK).fit(FRAME, Y)
    new = FRAME.iloc[:3].assign(
        **{
            name: value if isinstance(value, list) else [value] * 3
            for name, value in change.items()
        }
    )
    with pytest.raises(error, match=match):
        model.predict(new)


def test_free_texts_are_left_out_with_a_warning():
    frame = FRAME.assign(id=[f"row {i}" for i in range(N)])
    with pytest.warns(UserWarning, match="'id' \\(150 different texts in 150 rows\\)"):
        model = SSLARegressor(**QUICK).fit(frame, Y)
    assert np.array_equal(model.predict(frame), SSLARegressor(**QUICK).fit(FRAME, Y).predict(FRAME))
    with pytest.raises(TableError, match="several columns named 'size'"):
        make_table(np.ones((2, 2)), ["size", "size"])


# --- files -----------------------------------------------------------------------------------


def test_files_keep_the_plan(tmp_path):
    model = SSLARegressor(conformal=True, **QUICK).fit(FRAME, Y)
    again = load(model.save(tmp_path / "model"))
    assert again.plan_ == model.plan_
    new = FRAME.iloc[:5].assign(colour="purple", age=np.nan)
    assert np.array_equal(again.predict_interval(new, 0.8), model.predict_interval(new, 0.8))
    assert again.n_features_in_ == 6


@pytest.mark.parametrize(("layout", "words"), [(None, "an earlier"), (99, "a newer")])
def test_files_of_other_layouts_are_refused_in_words(tmp_path, layout, words):
    model = SSLARegressor(**QUICK).fit(FRAME, Y)
    content, tensors = read_model(model.save(tmp_path / "model"), KIND)
    content["layout"] = layout
    if layout is None:
        del content["layout"]
    with pytest.raises(FileError, match=f"written by {words} version of ssla.*Train the model"):
        load(write_model(tmp_path / "other", KIND, content, tensors))


def test_verbose_shows_a_bar(capsys):
    SSLARegressor(verbose=1, **QUICK).fit(FRAME, Y)
    assert "training" in capsys.readouterr().err
    SSLARegressor(**QUICK).fit(FRAME, Y)
    assert not capsys.readouterr().err
