"""A model that went through MLflow gives the same bits."""

import numpy as np
import pandas
import pytest

from ssla.sklearn import SSLAClassifier, SSLARegressor
from ssla.tables.cli.train import Request
from ssla.tables.cli.work import train_file

pytest.importorskip("mlflow", reason="needs mlflow-skinny: pip install 'ssla[mlflow]'")


@pytest.mark.filterwarnings("ignore")  # of MLflow: no input example
def test_intervals_are_the_same_bits(tmp_path):
    from mlflow import pyfunc

    import ssla.mlflow

    rng = np.random.default_rng(0)
    x, kind = rng.normal(size=60), rng.choice(["cat", "dog"], 60)
    table = pandas.DataFrame(
        {"x": x, "kind": kind, "y": 2 * x + (kind == "cat") + 0.1 * rng.normal(size=60)}
    )
    table.to_csv(tmp_path / "data.csv", index=False)
    train_file(Request(tmp_path / "data.csv", "y", tmp_path / "model", max_epochs=5), quiet=True)
    ssla.mlflow.save_model(tmp_path / "model", tmp_path / "flavour", level=0.9)
    loaded = pyfunc.load_model(str(tmp_path / "flavour"))
    new = table.drop(columns="y")
    for params, level in ((None, 0.9), ({"level": 0.5}, 0.5)):
        expected = ssla.Scorer(tmp_path / "model", level)(new)
        pandas.testing.assert_frame_equal(
            loaded.predict(new, params=params), expected, check_exact=True
        )
    assert [column.name for column in loaded.metadata.signature.inputs] == ["x", "kind"]
    assert (
        f"ssla[sklearn]=={ssla.__version__}"
        in (tmp_path / "flavour" / "requirements.txt").read_text()
    )


@pytest.mark.filterwarnings("ignore")  # of MLflow: no input example
@pytest.mark.parametrize("kind", ["numbers", "classes"])
def test_a_served_model_gives_what_predict_gives(kind, tmp_path):
    """With gaps, unknown categories, dates, weights and other levels; the rows one by one too."""
    from mlflow import pyfunc

    import ssla.mlflow

    rng = np.random.default_rng(0)
    X = pandas.DataFrame({"x": rng.normal(size=60), "kind": rng.choice(["cat", "dog", "eel"], 60)})
    X["when"] = pandas.Timestamp("2024-01-01") + pandas.to_timedelta(np.arange(60), "D")
    y = 3 * X["x"].to_numpy() + (X["kind"] == "cat") + 0.1 * rng.normal(size=60)
    made = SSLARegressor if kind == "numbers" else SSLAClassifier
    estimator = made(max_epochs=2, members=2, random_state=0)
    estimator.fit(
        X,
        y if kind == "numbers" else np.where(y > 0, "high", "low"),
        sample_weight=rng.integers(1, 4, 60),
    )
    ssla.mlflow.save_model(estimator, tmp_path / "flavour", level=0.8)
    loaded = pyfunc.load_model(str(tmp_path / "flavour"))
    new = X[:6].copy()
    new.loc[1, "x"], new.loc[2, "kind"], new.loc[3, "kind"], new.loc[4, "when"] = (
        np.nan,
        "yak",
        None,
        pandas.NaT,
    )
    for params, level in ((None, 0.8), ({"level": 0.975}, 0.975)):
        found = loaded.predict(new, params=params)
        assert [bool(note) for note in found["notes"]] == [False, True, True, True, True, False]
        if kind == "numbers":
            ends = found[[f"lower_{100 * level:g}", f"upper_{100 * level:g}"]]
            np.testing.assert_array_equal(ends, estimator.predict_interval(new, level))
            np.testing.assert_array_equal(found["mean"], estimator.predict(new))
        else:
            np.testing.assert_array_equal(
                found[["p(high)", "p(low)"]], estimator.predict_proba(new)
            )
            np.testing.assert_array_equal(found["label"], estimator.predict(new))
            sets = [
                {str(c) for c in estimator.classes_[row]}
                for row in estimator.predict_set(new, level)
            ]
            assert [set(text.split("|")) for text in found[f"set_{100 * level:g}"]] == sets
        single = pandas.concat(
            [loaded.predict(new.iloc[i : i + 1], params=params) for i in range(6)]
        )
        for name in found.select_dtypes("number"):
            np.testing.assert_allclose(single[name], found[name], rtol=1e-6, atol=1e-9)
