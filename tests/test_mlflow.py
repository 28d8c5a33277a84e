"""A model that went through MLflow gives the same bits."""

import numpy as np
import pandas
import pytest

from ssla.cli.train import Request
from ssla.cli.work import train_file

pytest.importorskip("mlflow", reason="needs mlflow-skinny: pip install 'ssla[mlflow]'")


@pytest.mark.filterwarnings("ignore")  # of MLflow: no input example
def test_intervals_are_the_same_bits(tmp_path):
    from mlflow import pyfunc

    import ssla.mlflow

    rng = np.random.default_rng(0)
    x, kind = rng.normal(size=60), rng.choice(["cat", "dog"], 60)
    table = pandas.DataFrame({"x": x, "kind": kind, "y": 2 * x + (kind == "cat") + 0.1 * rng.normal(size=60)})
    table.to_csv(tmp_path / "data.csv", index=False)
    train_file(Request(tmp_path / "data.csv", "y", tmp_path / "model", max_epochs=5), quiet=True)
    ssla.mlflow.save_model(tmp_path / "model", tmp_path / "flavour", level=0.9)
    loaded = pyfunc.load_model(str(tmp_path / "flavour"))
    new = table.drop(columns="y")
    for params, level in ((None, 0.9), ({"level": 0.5}, 0.5)):
        expected = ssla.Scorer(tmp_path / "model", level)(new)
        pandas.testing.assert_frame_equal(loaded.predict(new, params=params), expected, check_exact=True)
    assert [column.name for column in loaded.metadata.signature.inputs] == ["x", "kind"]
    assert f"ssla[sklearn]=={ssla.__version__}" in (tmp_path / "flavour" / "requirements.txt").read_text()
