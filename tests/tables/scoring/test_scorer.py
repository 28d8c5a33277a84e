"""One code from predictive to columns: the scorer gives what `ssla predict` writes, in the form
in which the rows came.
"""

import pickle

import numpy as np
import pandas
import polars
import pyarrow.parquet
import pytest
import torch
from sklearn.ensemble import (
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)

import ssla
from ssla.sklearn import PredictiveClassifier, PredictiveRegressor, SSLARegressor
from ssla.tables.cli.train import Request
from ssla.tables.cli.work import predict_file, train_file
from ssla.tables.columns import TableError
from ssla.tables.scoring import saved_models as models


def frame(rows=60, seed=0):
    rng = np.random.default_rng(seed)
    x, kind = rng.normal(size=rows), rng.choice(["cat", "dog", "eel"], rows)
    return pandas.DataFrame(
        {
            "id": np.arange(rows),
            "x": x,
            "kind": kind,
            "y": 3 * x + (kind == "cat") + 0.1 * rng.normal(size=rows),
        }
    )


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    room = tmp_path_factory.mktemp("scoring")
    frame().to_csv(room / "data.csv", index=False)
    for target, name in (("y", "numbers"), ("kind", "classes")):
        train_file(
            Request(room / "data.csv", target, room / name, ("id",), max_epochs=5), quiet=True
        )
    return room


@pytest.mark.parametrize("name", ["numbers", "classes"])
def test_the_scorer_gives_what_the_command_writes(room, tmp_path, name):
    table = frame(40, 1)
    table.to_parquet(tmp_path / "new.parquet", index=False)
    predict_file(
        room / name, tmp_path / "new.parquet", tmp_path / "out.parquet", (0.5, 0.95), keep=("id",)
    )
    written = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pandas()
    scorer = ssla.Scorer(room / name, (0.5, 0.95), keep=["id"])
    again = pickle.loads(pickle.dumps(scorer))
    found = again(table.set_index(np.arange(40) + 7))
    assert list(found.index) == list(range(7, 47))
    pandas.testing.assert_frame_equal(
        found.reset_index(drop=True), written, check_dtype=False, check_exact=True
    )
    by_name = scorer({column: table[column].to_numpy() for column in table})
    framed = scorer(polars.from_pandas(table))
    assert list(by_name) == framed.columns == list(written)
    for column in written:
        assert by_name[column].tolist() == framed[column].to_list() == written[column].tolist()
    assert list(scorer(table.head(0))) == list(written)  # no rows, the same columns


@pytest.mark.parametrize("name", ["numbers", "classes"])
def test_partitions_of_dask_give_the_bits_of_their_rows(room, name):
    """Two threads share a scorer that was pickled and has not opened its model."""
    frames = pytest.importorskip("dask.dataframe")
    table = frame(3000, 4)
    scorer = ssla.Scorer(room / name, 0.9, keep=["id"])
    parts = frames.from_pandas(table, npartitions=3)
    lazy = parts.map_partitions(pickle.loads(pickle.dumps(scorer)), meta=scorer(table.head(0)))
    found = lazy.compute(scheduler="threads", num_workers=2)
    expected = pandas.concat(
        [scorer(table[start : start + 1000]) for start in range(0, 3000, 1000)]
    )
    pandas.testing.assert_frame_equal(found, expected, check_dtype=False, check_exact=True)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_blocks_of_a_file_give_the_bits_of_the_table(room, tmp_path, suffix, monkeypatch):
    """The first block has only whole numbers, and the only gap and unknown category are in the
    third.
    """
    monkeypatch.setattr(models, "BLOCK", 16)
    monkeypatch.setattr("ssla.tables.cli.work.BLOCK", 16)
    table = frame(55, 2)
    table.loc[:15, "x"] = np.arange(16)
    table.loc[35, "x"], table.loc[40, "kind"] = np.nan, "yak"
    write = table.to_csv if suffix == ".csv" else table.to_parquet
    write(tmp_path / f"new{suffix}", index=False)
    done = predict_file(
        room / "numbers", tmp_path / f"new{suffix}", tmp_path / "out.parquet", keep=("id",)
    )
    assert (done["rows"], done["rows_with_unknown_inputs"], done["rows_mixed"]) == (55, 2, 2)
    assert (done["missing"], done["unknown_categories"]) == ({"x": 1}, {"kind": 1})
    written = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pandas()
    found = ssla.Scorer(room / "numbers")(table)
    pandas.testing.assert_frame_equal(
        written[list(found)], found, check_dtype=False, check_exact=True
    )
    monkeypatch.setattr(models, "BLOCK", 1000)
    whole = ssla.Scorer(room / "numbers")(table)
    np.testing.assert_allclose(whole["upper_95"], found["upper_95"], rtol=1e-10)


def test_an_error_in_the_third_block_names_its_row_and_leaves_no_file(room, tmp_path, monkeypatch):
    monkeypatch.setattr("ssla.tables.cli.work.BLOCK", 16)
    table = frame(55, 2).astype({"x": object})
    table.loc[37, "x"] = "many"
    table.to_csv(tmp_path / "new.csv", index=False)
    with pytest.raises(TableError, match=r"row 38 of .*'many' \(1 such cells up to row 48\)"):
        predict_file(room / "numbers", tmp_path / "new.csv", tmp_path / "out.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]


@pytest.mark.parametrize(
    ("text", "message"), [("", "is empty"), ("x,kind\n", "has a header but no rows")]
)
def test_files_without_rows_are_refused(room, tmp_path, text, message):
    (tmp_path / "new.csv").write_text(text)
    with pytest.raises(TableError, match=message):
        predict_file(room / "numbers", tmp_path / "new.csv", tmp_path / "out.csv")
    (tmp_path / "new.csv").write_text("x,kind\n1,cat\n")
    assert predict_file(room / "numbers", tmp_path / "new.csv", tmp_path / "out.csv")["rows"] == 1


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_an_estimator_of_a_data_frame_reads_texts_gaps_and_dates(library, tmp_path):
    table = frame(60, 3).assign(
        when=pandas.Timestamp("2024-01-01") + pandas.to_timedelta(np.arange(60), "D"),
        code=pandas.Categorical(np.arange(60) % 3),
        same=1.0,
    )
    X = table.drop(columns=["id", "y"])
    estimator = SSLARegressor("gaussian", max_epochs=3, random_state=0).fit(X, table["y"])
    estimator.save(tmp_path / "estimator")
    new = X[:9].copy()
    new.loc[2, "x"], new.loc[3, "kind"] = np.nan, "yak"
    new = new if library == "pandas" else polars.from_pandas(new)
    scorer = ssla.Scorer(tmp_path / "estimator", 0.9)
    found = scorer(new)
    ends = np.stack([found["lower_90"], found["upper_90"]], 1)
    np.testing.assert_array_equal(ends, estimator.predict_interval(new, 0.9))
    assert [bool(note) for note in found["notes"]] == [row in (2, 3) for row in range(9)]
    with pytest.raises(ValueError, match="no column 'kind'"):
        scorer(new[["x", "when", "code"]])
    with pytest.raises(ValueError, match="has 5 inputs, but 2 were given"):
        scorer(np.zeros((3, 2)))


def test_estimators_and_posteriors(tmp_path):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(50, 2))
    estimator = SSLARegressor(max_epochs=3, random_state=0).fit(
        X, X[:, 0] + 0.1 * rng.normal(size=50)
    )
    estimator.save(tmp_path / "estimator")
    found = ssla.Scorer(tmp_path / "estimator", 0.9)(X)
    np.testing.assert_array_equal(
        np.stack([found["lower_90"], found["upper_90"]], 1), estimator.predict_interval(X, 0.9)
    )
    named = ssla.Scorer(tmp_path / "estimator", 0.9, inputs=["a", "b"])(
        pandas.DataFrame(X, columns=["a", "b"])
    )
    assert named["mean"].tolist() == found["mean"].tolist()
    gap = np.where(np.arange(2) == 1, np.nan, X[:4])  # a gap that the fit did not have
    ends = ssla.Scorer(tmp_path / "estimator", 0.9)(gap)
    np.testing.assert_array_equal(
        np.stack([ends["lower_90"], ends["upper_90"]], 1), estimator.predict_interval(gap, 0.9)
    )
    with pytest.raises(ValueError, match="has no names of inputs"):
        ssla.Scorer(tmp_path / "estimator")(pandas.DataFrame(X, columns=["a", "b"]))
    torch.manual_seed(0)
    network = torch.nn.Linear(2, 1).eval()
    x = torch.from_numpy(X).float()
    post = ssla.fit(network, (x, x[:, 0]), likelihood=ssla.likelihoods.Gaussian(noise=0.1))
    post.save(tmp_path / "posterior")
    scorer = pickle.loads(pickle.dumps(ssla.Scorer(tmp_path / "posterior", model=network)))
    assert scorer(x)["lower_95"].tolist() == post.predict(x).interval(0.95)[:, 0].double().tolist()
    with pytest.raises(ssla.FileError, match="Give the module as model="):
        ssla.Scorer(tmp_path / "posterior")(x)


def test_trees_with_a_last_layer(tmp_path):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    y = X[:, 0] + 0.1 * rng.normal(size=60)
    trees = PredictiveRegressor(RandomForestRegressor(5, random_state=0), cv=2, random_state=0).fit(
        X, y
    )
    trees.save(tmp_path / "trees")
    with pytest.raises(ssla.FileError, match=r"Scorer\(path, models=…\)"):
        ssla.Scorer(tmp_path / "trees")(X)
    scorer = pickle.loads(pickle.dumps(ssla.Scorer(tmp_path / "trees", 0.9, models=trees.models_)))
    found = scorer(X)
    np.testing.assert_array_equal(
        np.stack([found["lower_90"], found["upper_90"]], 1), trees.predict_interval(X, 0.9)
    )
    named = pandas.DataFrame(X, columns=["a", "b"])
    opened = ssla.Scorer(
        tmp_path / "trees", 0.9, refit="none", inputs=["a", "b"], models=lambda: trees.models_
    )(named)
    assert opened["rung"].tolist() == ["none"] * 60
    assert opened["mean"].tolist() == trees.set_params(refit="none").predict(X).tolist()
    with pytest.raises(ValueError, match="has no names of inputs"):
        scorer(named)
    with pytest.raises(ssla.FileError, match="must be the models_"):
        ssla.Scorer(tmp_path / "trees", models={"mean": ()})(X)


def test_trees_of_a_data_frame_read_columns_by_name(tmp_path):
    """Gaps are for the trees to decide; the order of the columns is that of the fit."""
    table = frame()[["x", "id", "y", "kind"]].astype({"id": float})
    X = table[["x", "id"]].mask(np.arange(60)[:, None] % 7 == [0, 3])
    trees = PredictiveRegressor(
        HistGradientBoostingRegressor(max_iter=5), cv=2, random_state=0
    ).fit(X, table["y"])
    trees.save(tmp_path / "trees")
    scorer = ssla.Scorer(tmp_path / "trees", keep=["id"], models=trees.models_)
    found, expected = scorer(X[["id", "x"]]), trees.predict_interval(X)
    np.testing.assert_array_equal(found[["lower_95", "upper_95"]].to_numpy(), expected)
    by_name = scorer({name: X[name].to_numpy() for name in X})
    framed = scorer(polars.from_pandas(X, nan_to_null=False))
    for column in found:
        np.testing.assert_array_equal(by_name[column], found[column].to_numpy())
        np.testing.assert_array_equal(framed[column].to_numpy(), found[column].to_numpy())
    in_order = ssla.Scorer(tmp_path / "trees", models=trees.models_)
    assert in_order(X.to_numpy())["mean"].tolist() == found["mean"].tolist()
    assert list(scorer(X.head(0))) == list(found)
    with pytest.raises(ValueError, match="has no column 'x'"):
        scorer(X.rename(columns={"x": "xx"}))
    with pytest.raises(ValueError, match="The model has 2 inputs"):
        in_order(X.to_numpy()[:, :1])
    with pytest.raises(ValueError, match="Omit inputs="):
        ssla.Scorer(tmp_path / "trees", inputs=["a", "b"], models=trees.models_)(X)

    classes = PredictiveClassifier(RandomForestClassifier(5, random_state=0), cv=2, random_state=0)
    classes.fit(table[["x", "y"]], table["kind"]).save(tmp_path / "classes")
    scorer = ssla.Scorer(tmp_path / "classes", models=classes.models_)
    found = scorer(table)
    assert found["label"].tolist() == classes.predict(table[["x", "y"]]).tolist()
    np.testing.assert_array_equal(
        found[["p(cat)", "p(dog)", "p(eel)"]].to_numpy(), classes.predict_proba(table[["x", "y"]])
    )
    assert list(scorer(table.head(0))) == list(found)
