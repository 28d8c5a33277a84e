"""What the command can do with a table, the estimators can: encoded rows, tables, scores."""

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import ssla
from ssla.sklearn import SSLAClassifier, SSLARegressor, TableEncoder, load
from ssla.tables.cli.app import app
from ssla.tables.cli.train import shuffle_rows
from ssla.tables.columns import TableError, read_table
from ssla.tables.estimators.loading import load_trained

QUICK = {"max_epochs": 4, "random_state": 0}
N = 60
RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "size": RNG.integers(0, 80, N) / 8,
        "colour": RNG.choice(["red", "green", "blue"], N),
        "price": [f"{cents // 100}.{cents % 100:02}" for cents in RNG.integers(0, 9999, N)],
    }
)
Y = FRAME["size"].to_numpy() + 2.0 * (FRAME["colour"] == "red") + RNG.normal(size=N)


def test_a_fit_on_encoded_rows_is_that_on_the_frame():
    encoder = TableEncoder(codes=True).fit(FRAME)
    plain = SSLARegressor(**QUICK).fit(FRAME, Y)
    model = SSLARegressor(**QUICK).fit(encoder.encode(FRAME), Y)
    assert model.plan_ == plain.plan_
    assert model.feature_names_in_.tolist() == list(FRAME.columns)
    for rows in (FRAME, model.encode(FRAME), model.as_table(FRAME)):
        assert np.array_equal(model.predict(rows), plain.predict(FRAME))


def test_rows_of_another_plan_are_refused():
    model = SSLARegressor(**QUICK).fit(FRAME, Y)
    other = TableEncoder(codes=True).fit(FRAME.iloc[:30])
    with pytest.raises(ValueError, match="plan of another table"):
        model.predict(other.encode(FRAME))
    with pytest.raises(TypeError, match="encoded already"):
        TableEncoder().fit(other.encode(FRAME))


def test_the_encoder_drops_columns_and_reads_given_marks():
    encoder = TableEncoder(drop=["size"], decimal=",", thousands=".").fit(
        FRAME.assign(price=["1.234", "2,5"] * 30)
    )
    assert encoder.get_feature_names_out()[-1] == "price"
    later = FRAME.assign(price="3.000,5")
    assert set(encoder.transform(later)[:, -1]) == {3000.5}
    with pytest.raises(TableError, match=r"no column 'sizes'\. Did you mean 'size'"):
        TableEncoder(drop=["sizes"]).fit(FRAME)


def test_only_the_given_rows_decide_the_plan():
    junk = FRAME.assign(colour=["violet"] * 10 + FRAME["colour"].tolist()[10:])
    rows = np.arange(N) >= 10
    plan = TableEncoder().fit(junk, rows=rows).plan_
    assert plan == TableEncoder().fit(junk[rows]).plan_


def test_a_model_of_the_command_is_an_estimator_that_reads_frames_and_tables(tmp_path):
    """`ssla train` gives encoded rows to `fit`: with the same rows in its order, the same bits."""
    data = tmp_path / "data.csv"
    FRAME.assign(y=Y, note="same").to_csv(data, index=False)
    options = ["-o", str(tmp_path / "m"), "--max-epochs", "4", "--test-fraction", "0", "-q"]
    done = CliRunner().invoke(app, ["train", str(data), "-t", "y", *options])
    assert done.exit_code == 0, done.output
    model, training = load_trained(tmp_path / "m")
    assert (training.target, training.facts["rows"]) == ("y", N)
    assert model.feature_names_in_.tolist() == ["size", "colour", "price"]
    assert model.plan_.left_out == {"note": "constant"}
    table = read_table(data)
    encoder = TableEncoder(drop=["y"], codes=True).fit(table)
    order, _ = shuffle_rows(Y, "auto", 0)
    y = table.interpret_column("y").values
    again = SSLARegressor(**QUICK).fit(encoder.encode(table)[order], y[order])
    assert np.array_equal(again.predict(table), model.predict(table))
    read = pd.read_csv(data, dtype={"price": str})[model.feature_names_in_]
    assert np.array_equal(load(tmp_path / "m").predict(read), model.predict(table))
    page = ssla.html_report(model, table, y)
    assert page.facts["inputNames"] == ["size", "colour", "price"]


def test_scores_are_those_of_the_metrics():
    model = SSLARegressor(**QUICK).fit(FRAME, Y)
    scores = model.evaluate(FRAME, Y)
    assert scores == dict(ssla.metrics.summary(model.predict_dist(FRAME), Y).scores)
    labels = np.where(Y.mean() < Y, "high", "low")
    chosen = SSLAClassifier(**QUICK).fit(FRAME, labels)
    labels[0] = "none"
    scores = chosen.evaluate(FRAME, labels)
    assert scores["unknown labels"] == 1
    assert scores["accuracy"] == (chosen.predict(FRAME[1:]) == labels[1:]).mean()
    with pytest.raises(ValueError, match="None of the labels"):
        chosen.evaluate(FRAME, ["other"] * N)


def test_scores_of_a_conformal_model_name_what_they_are_of():
    model = SSLARegressor("gaussian", conformal=True, calibration_fraction=0.4, **QUICK)
    model.fit(FRAME, Y)
    scores = model.evaluate(FRAME, Y)
    low, high = model.predict_interval(FRAME, 0.5).T
    assert scores["conformal coverage 50%"] == ((low <= Y) & (high >= Y)).mean()
    assert "predictive coverage 50%" in scores


def test_the_sensitivity_of_each_member_is_that_of_its_posterior():
    model = SSLARegressor("gaussian", members=2, **QUICK).fit(FRAME, Y)
    compared = model.sensitivity(FRAME.iloc[:3], (0.1, 10.0))
    assert list(compared) == [0, 1]
    assert compared[0].mean.shape[1] == 3
    first = model.ensemble_.components[0].posterior
    z = model.ensemble_.inputs(ssla.data.as_tensor(model.encode(FRAME.iloc[:3]).values))
    assert str(compared[0]) == str(ssla.sensitivity(first, z, (0.1, 10.0)))


def test_epochs_are_reported_to_a_function():
    done = []
    SSLARegressor("gaussian", **QUICK).fit(FRAME, Y, on_epoch=done.append)
    assert done == [1, 2, 3, 4]
