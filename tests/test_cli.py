"""The command: from a table to a table, and a sentence for everything that is wrong with one."""

import json
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from ssla.cli.app import app
from ssla.tables import TableError, make_plan, read_table

RUN = CliRunner()
RNG = np.random.default_rng(0)


def call(*arguments):
    return RUN.invoke(app, [str(a) for a in arguments])


def lines(rows=80, target=True):
    colours = RNG.choice(["red", "green", "blue"], rows)
    size, sold = RNG.normal(size=rows), RNG.choice(["yes", "no"], rows)
    price = 10 + 3 * size + 2 * (colours == "red") + 0.3 * RNG.normal(size=rows)
    head = "id,size,colour,sold" + ",price" * target
    body = []
    for i in range(rows):
        cells = [f"row number {i}", "" if i % 11 == 5 else f"{size[i]:.4f}", colours[i], sold[i]]
        body.append(",".join(cells + [f"{price[i]:.4f}"] * target))
    return "\n".join([head, *body]) + "\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    room = tmp_path_factory.mktemp("cli")
    (room / "data.csv").write_text(lines())
    done = call("train", room / "data.csv", "-t", "price", "-o", room / "model", "--max-epochs", 40, "--json")
    assert done.exit_code == 0, done.output
    return room, json.loads(done.stdout)


def test_train_says_what_it_did_with_every_column(trained):
    _, facts = trained
    assert facts["left_out"] == {"id": "80 different texts in 80 rows"}
    assert facts["missing"] == {"size": 7}
    assert facts["inputs"] == 2 + 3 + 1  # size and its flag, three colours, sold
    assert facts["likelihood"] == "gaussian"
    assert {"nll", "crps", "coverage 95%"} <= set(facts["scores"])


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_predict_writes_intervals_and_counts_the_unknown(trained, tmp_path, ending):
    room, _ = trained
    text = lines(30, target=False).replace("blue", "violet")
    (tmp_path / "new.csv").write_text(text)
    done = call("predict", room / "model", tmp_path / "new.csv", "-o", tmp_path / f"out.{ending}", "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["unknown_categories"] == {"colour": text.count("violet")}
    assert facts["missing"] == {"size": 3}
    if ending == "parquet":
        table = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pydict()
        assert all(a < m < b for a, m, b in zip(table["lower_95"], table["mean"], table["upper_95"], strict=True))
        assert set(table["rung"]) == {"output"}
        assert {"sd", "q0.5", "q0.975", "mass"} <= set(table)
    else:
        assert len((tmp_path / "out.csv").read_text().splitlines()) == 31
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.csv", f"out.{ending}"]


def test_evaluate_report_cost_and_people(trained):
    room, _ = trained
    scores = json.loads(call("evaluate", room / "model", room / "data.csv", "--json").stdout)
    assert scores["rows"] == 80
    assert scores["rmse"] < 1.5
    plain = call("evaluate", room / "model", room / "data.csv", "--refit", "plug_in")
    assert "coverage 95%" in plain.stdout
    assert "SSLARegressor" in call("report", room / "model").stdout
    assert "51 free" in call("cost", room / "data.csv", "-t", "price").stdout


def test_classes_and_parquet_and_a_study_that_goes_on(trained, tmp_path):
    room, _ = trained
    options = ("-t", "colour", "-o", tmp_path / "model", "--drop", "id", "--max-epochs", 3, "--json")
    first = call("train", room / "data.csv", *options, "--tune-trials", 2)
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout)["likelihood"] == "classes"
    start = time.perf_counter()
    again = call("train", room / "data.csv", *options, "--tune-trials", 2)  # both trials are there already
    assert json.loads(again.stdout)["tuned"] == json.loads(first.stdout)["tuned"]
    assert time.perf_counter() - start < 20
    done = call("predict", tmp_path / "model", room / "data.csv", "-o", tmp_path / "out.parquet")
    assert done.exit_code == 0, done.output
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert {"label", "p(red)", "mass", "rung"} <= set(table.column_names)
    assert call("evaluate", tmp_path / "model", room / "data.csv").exit_code == 0
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    assert read_table(tmp_path / "data.parquet").column("p(red)").kind == "number"


MALFORMED = {
    "empty": (b"", "is empty"),
    "header only": (b"a,price\n", "no rows"),
    "one row": (b"a,price\n1,2\n", "at least 10 are needed"),
    "all missing": (b"a,b,price\n" + b"".join(b"%d,,%d\n" % (i, i) for i in range(20)), "empty in every row"),
    "mixed": (b"a,price\n" + b"".join(b"%s,%d\n" % (b"x" if i == 7 else b"%d" % i, i) for i in range(20)), "row 8 is 'x'"),
    "million columns": (b",".join(b"c%d" % i for i in range(10**6)) + b"\n", "1,000,000 columns"),
    "nul": (b"a,price\n1,2\n\x00,3\n", "NUL"),
    "nul header": (b"a\x00,price\n1,2\n", "NUL"),
    "wrong target": (b"a,prise\n" + b"".join(b"%d,%d\n" % (i, i) for i in range(20)), "Did you mean 'prise'"),
    "constant": (b"a,price\n" + b"".join(b"%d,5\n" % i for i in range(20)), "constant"),
    "duplicate": (b"a,a,price\n1,2,3\n", "several columns named 'a'"),
    "infinite": (
        b"a,price\n" + b"".join(b"%s,%d\n" % (b"inf" if i == 3 else b"%d" % i, i) for i in range(20)),
        "infinite value in row 4",
    ),
    "infinite target": (
        b"a,price\n" + b"".join(b"%d,%s\n" % (i, b"-inf" if i == 3 else b"%d" % i) for i in range(20)),
        "infinite",
    ),
    "ragged": (b"a,price\n1,2\n1,2,3\n", "line 3: 3 cells"),
    "binary": (b"\xff\xfe\x00a,b", "UTF-8"),
    "no name": (b"a,,price\n1,2,3\n", "has no name"),
    "nothing to learn from": (b"a,price\n" + b"".join(b"1,%d\n" % i for i in range(20)), "no column to learn from"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_tables_get_a_sentence_and_nothing_is_written(name, tmp_path):
    data, match = MALFORMED[name]
    (tmp_path / "data.csv").write_bytes(data)
    done = call("train", tmp_path / "data.csv", "-t", "price", "-o", tmp_path / "model", "--json")
    assert done.exit_code == 1
    assert match in json.loads(done.stdout)["error"]
    assert "Traceback" not in done.output
    assert [p.name for p in tmp_path.iterdir()] == ["data.csv"]


def test_wrong_usage_and_wrong_files(trained, tmp_path):
    room, _ = trained
    assert call("train", room / "data.csv").exit_code == 2
    for arguments, match in [
        (("predict", tmp_path / "nowhere", room / "data.csv", "-o", tmp_path / "o.csv"), "no saved model"),
        (("predict", room / "model", room / "data.csv", "-o", tmp_path / "o.xlsx"), ".csv or .parquet"),
        (("predict", room / "model", room / "data.csv", "-o", tmp_path / "o.csv", "--level", 95), "strictly between"),
        (("predict", room / "model", tmp_path / "none.csv", "-o", tmp_path / "o.csv"), "no file"),
        (("train", room / "data.csv", "-t", "price", "-o", tmp_path / "m", "--likelihood", "gauss"), "Did you mean"),
        (("train", room / "data.csv", "-t", "price", "-o", tmp_path / "m", "--drop", "colr"), "Did you mean 'colour'"),
        (("train", room / "data.csv", "-t", "price", "-o", room / "data.csv"), "is a file"),
    ]:
        done = call(*arguments)
        assert done.exit_code == 1, done.output
        assert match in " ".join(done.output.split())
    (tmp_path / "short.csv").write_text("size,sold\n1,yes\n")
    done = call("predict", room / "model", tmp_path / "short.csv", "-o", tmp_path / "o.csv")
    assert "no column 'colour'" in " ".join(done.output.split())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["short.csv"]


def test_an_interruption_leaves_nothing(trained, tmp_path, monkeypatch):
    room, _ = trained

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("ssla.ensemble.building.train", interrupted)
    done = call("train", room / "data.csv", "-t", "price", "-o", tmp_path / "model")
    assert done.exit_code == 130
    assert not list(tmp_path.iterdir())


def test_categories_that_look_like_numbers_are_met_again(tmp_path):
    (tmp_path / "a.csv").write_text("code,y\n" + "".join(f"{c},1\n" for c in ["x", "1", "z"] * 5))
    plan = make_plan(read_table(tmp_path / "a.csv"), {"y"})
    (tmp_path / "b.csv").write_text("code\n1\n1\n7\n")
    encoded = plan.encode(read_table(tmp_path / "b.csv"))
    assert encoded.values.tolist() == [[1, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert encoded.unknown == {"code": 1}
    (tmp_path / "c.csv").write_text("other\n1\n")
    with pytest.raises(TableError, match="no column 'code'"):
        plan.encode(read_table(tmp_path / "c.csv"))


def test_help_does_not_wait_for_torch():
    code = "import sys; from ssla.cli.app import app; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
