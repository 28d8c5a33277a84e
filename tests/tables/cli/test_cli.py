"""The command: from a table to a table, and a sentence for everything that is wrong with one."""

import hashlib
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import optuna
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from ssla import metrics
from ssla.sklearn import SSLARegressor, load
from ssla.tables.cli.app import app
from ssla.tables.cli.train import Request, split_rows
from ssla.tables.columns import TableError, make_plan, read_table

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
    done = call(
        "train",
        room / "data.csv",
        "-t",
        "price",
        "-o",
        room / "model",
        "--max-epochs",
        40,
        "--json",
    )
    assert done.exit_code == 0, done.output
    return room, json.loads(done.stdout)


def test_train_says_what_it_did_with_every_column(trained):
    room, facts = trained
    assert facts["left_out"] == {"id": "80 different texts in 80 rows"}
    assert facts["missing"] == {"size": 7}
    assert facts["inputs"] == 2 + 3 + 1  # size and its flag, three colours, sold
    assert facts["likelihood"] == load(room / "model").ensemble_.settings.likelihood
    assert {"nll", "crps", "coverage 95%"} <= set(facts["scores"])


def test_train_says_which_scale_it_chose(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=120)
    price = np.exp(2 * x + 0.3 * rng.normal(size=120))  # noise grows with the price
    (tmp_path / "data.csv").write_text(
        "x,price\n" + "".join(f"{a:.4f},{b:.4f}\n" for a, b in zip(x, price, strict=True))
    )
    done = call(
        "train",
        tmp_path / "data.csv",
        "-t",
        "price",
        "-o",
        tmp_path / "model",
        "--max-epochs",
        40,
        "--json",
    )
    assert json.loads(done.stdout)["likelihood"] == "positive"


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_predict_writes_intervals_and_counts_the_unknown(trained, tmp_path, ending):
    room, _ = trained
    text = lines(30, target=False).replace("blue", "violet")
    (tmp_path / "new.csv").write_text(text)
    done = call(
        "predict", room / "model", tmp_path / "new.csv", "-o", tmp_path / f"out.{ending}", "--json"
    )
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["unknown_categories"] == {"colour": text.count("violet")}
    assert facts["missing"] == {"size": 3}
    if ending == "parquet":
        table = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pydict()
        assert all(
            a < m < b
            for a, m, b in zip(table["lower_95"], table["mean"], table["upper_95"], strict=True)
        )
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


def page_data(path):
    return json.loads(path.read_text().split('id="data">')[1].split("</script>")[0])


def test_a_page_of_a_table(trained, tmp_path):
    room, _ = trained
    text = lines(30).replace("blue", "violet").splitlines()
    text[4] = text[4].rpartition(",")[0] + ","  # no target
    (tmp_path / "test.csv").write_text("\n".join(text) + "\n")
    done = call(
        "report", room / "model", tmp_path / "test.csv", "-o", tmp_path / "report.html", "--json"
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rows"] == 29
    page, facts = (tmp_path / "report.html").read_text(), page_data(tmp_path / "report.html")
    assert facts["rows"]["id"] == [i for i in range(1, 31) if i != 4]
    predicted = call("predict", room / "model", tmp_path / "test.csv", "-o", tmp_path / "out.csv")
    assert predicted.exit_code == 0, predicted.output
    table = read_table(tmp_path / "out.csv")
    ends = np.array(
        [table.interpret_column(name).values for name in ("lower_95", "upper_95")], dtype=float
    ).T
    shown = [row[facts["own"]][-1] for row in facts["rows"]["interval"]]
    np.testing.assert_allclose(shown, np.delete(ends, 3, 0), rtol=1e-4, atol=1e-4)
    scores = json.loads(call("evaluate", room / "model", tmp_path / "test.csv", "--json").stdout)
    assert facts["scores"][0][1] == pytest.approx(scores["nll"])
    assert hashlib.sha256((tmp_path / "test.csv").read_bytes()).hexdigest() in page
    for sentence in (
        "rows without a target (1)",
        "left out: 80 different texts in 80 rows",
        "category: 3 values",
        "mixed over values",
    ):
        assert sentence in page
    assert [row[1] for row in facts["rows"]["inputs"]][:3] == [
        line.split(",")[2] for line in text[1:4]
    ]


def test_a_page_of_classes_and_what_a_page_needs(trained, tmp_path):
    room, _ = trained
    train = call(
        "train",
        room / "data.csv",
        "-t",
        "colour",
        "-o",
        tmp_path / "model",
        "--drop",
        "id",
        "--max-epochs",
        3,
    )
    assert train.exit_code == 0, train.output
    (tmp_path / "test.csv").write_text((room / "data.csv").read_text().replace("red", "pink", 1))
    done = call("report", tmp_path / "model", tmp_path / "test.csv", "-o", tmp_path / "report.html")
    assert done.exit_code == 0, done.output
    assert page_data(tmp_path / "report.html")["classes"] == ["blue", "green", "red"]
    assert (
        "rows with a label that is not in the training table (1)"
        in (tmp_path / "report.html").read_text()
    )
    for arguments, text in (
        ((room / "data.csv",), "A page needs a table and a file"),
        (("-o", tmp_path / "x.html"), "A page needs a table and a file"),
        ((room / "data.csv", "-o", tmp_path / "x.pdf"), "must be an .html file"),
        (("-", "-o", tmp_path / "x.html"), "it needs a file"),
    ):
        done = call("report", room / "model", *arguments)
        assert done.exit_code == 1
        assert text in done.output
    assert not list(tmp_path.glob("x.*"))


def test_classes_and_parquet_and_a_study_that_goes_on(trained, tmp_path):
    room, _ = trained
    options = (
        "-t",
        "colour",
        "-o",
        tmp_path / "model",
        "--drop",
        "id",
        "--max-epochs",
        3,
        "--json",
    )
    first = call("train", room / "data.csv", *options, "--tune-trials", 2)
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout)["likelihood"] == "classes"
    start = time.perf_counter()
    again = call(
        "train", room / "data.csv", *options, "--tune-trials", 2
    )  # both trials are there already
    assert json.loads(again.stdout)["tuned"] == json.loads(first.stdout)["tuned"]
    assert time.perf_counter() - start < 20
    done = call("predict", tmp_path / "model", room / "data.csv", "-o", tmp_path / "out.parquet")
    assert done.exit_code == 0, done.output
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert {"label", "p(red)", "mass", "rung"} <= set(table.column_names)
    assert call("evaluate", tmp_path / "model", room / "data.csv").exit_code == 0
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    assert read_table(tmp_path / "data.parquet").interpret_column("p(red)").kind == "number"


def numbers(path, rows=150, seed=0, slope=3.0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=rows)
    y = slope * x + rng.standard_t(3, size=rows)
    path.write_text("x,y\n" + "".join(f"{a:.6f},{b:.6f}\n" for a, b in zip(x, y, strict=True)))
    return path


def test_scores_of_a_conformal_model_are_those_of_the_intervals_it_gives(tmp_path):
    data = numbers(tmp_path / "data.csv")
    done = call(
        "train",
        data,
        "-t",
        "y",
        "-o",
        tmp_path / "model",
        "--conformal",
        "--max-epochs",
        5,
        "--json",
    )
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert (facts["rows_trained"], facts["rows_calibration"], facts["rows_test"]) == (108, 27, 15)
    assert facts["conformal"] is True
    assert {"conformal coverage 95%", "conformal width 95%", "predictive coverage 95%"} <= set(
        facts["scores"]
    )
    assert not {"coverage 95%", "width 95%"} & set(facts["scores"])  # of which intervals?
    scores = json.loads(call("evaluate", tmp_path / "model", data, "--json").stdout)
    call("predict", tmp_path / "model", data, "-o", tmp_path / "out.parquet", "--level", 0.9)
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pydict()
    low, high = np.array(table["lower_90"]), np.array(table["upper_90"])
    y = np.loadtxt(data, delimiter=",", skiprows=1)[:, 1]
    assert scores["conformal coverage 90%"] == np.mean((low <= y) & (y <= high))
    assert scores["conformal width 90%"] == pytest.approx(np.mean(high - low), rel=1e-12)
    assert scores["predictive width 90%"] != pytest.approx(scores["conformal width 90%"], rel=1e-3)
    other = json.loads(
        call("evaluate", tmp_path / "model", data, "--refit", "plug_in", "--json").stdout
    )
    assert "refit 'output'" in other["conformal intervals"]
    assert "conformal coverage 90%" not in other
    said = json.loads(call("report", tmp_path / "model", "--json").stdout)
    assert (said["conformal"], said["rows_calibration"], said["rows_trained"]) == (True, 27, 108)
    assert said["scores"] == facts["scores"]


def test_too_few_calibration_rows_are_an_infinite_width_and_a_note(tmp_path):
    data = numbers(tmp_path / "data.csv", 60)
    done = call(
        "train", data, "-t", "y", "-o", tmp_path / "model", "--conformal", "--max-epochs", 2
    )
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert "conformal width 95%: infinite" in text
    assert "needs at least 19 calibration rows, but there are 11" in text
    assert "rows calibration 11" in " ".join(call("report", tmp_path / "model").stdout.split())


def test_a_study_belongs_to_its_rows(tmp_path):
    """The same output folder, target, shape and likelihood: another table begins another study."""
    options = ("-t", "y", "-o", tmp_path / "model", "--max-epochs", 2, "--json", "--tune-trials")
    first, other = (
        numbers(tmp_path / "a.csv", 60),
        numbers(tmp_path / "b.csv", 60, seed=1, slope=-1.0),
    )
    assert json.loads(call("train", first, *options, 2).stdout)["study"] == "new study"
    assert json.loads(call("train", other, *options, 1).stdout)["study"] == "new study"
    assert (
        json.loads(call("train", first, *options, 1, "--seed", 1).stdout)["study"] == "new study"
    )  # other rows are test rows
    moved = first.rename(tmp_path / "c.csv")
    assert (
        json.loads(call("train", moved, *options, 3).stdout)["study"]
        == "continued with 2 earlier trials"
    )
    storage = f"sqlite:///{tmp_path / 'model.study.db'}"
    studies = {
        s.study_name: optuna.load_study(study_name=s.study_name, storage=storage)
        for s in optuna.get_all_study_summaries(storage)
    }
    assert sorted(len(study.trials) for study in studies.values()) == [1, 1, 3]
    for study in studies.values():
        rates = [trial.params["learning_rate"] for trial in study.trials]
        assert len(set(rates)) == len(rates)  # a continued study tries other settings
    said = json.loads(call("report", tmp_path / "model", "--json").stdout)
    assert said["study"] == "continued with 2 earlier trials"


def test_trials_see_training_rows_only(tmp_path, monkeypatch):
    data = numbers(tmp_path / "data.csv", 80)
    seen, scored = [], []
    fit, summary = SSLARegressor.fit, metrics.summary
    monkeypatch.setattr(
        SSLARegressor,
        "fit",
        lambda self, X, y, **given: (seen.append(y), fit(self, X, y, **given))[1],
    )
    monkeypatch.setattr(metrics, "summary", lambda p, y: (scored.append(y), summary(p, y))[1])
    options = ("--max-epochs", 2, "--tune-trials", 2, "--test-fraction", 0.25)
    done = call("train", data, "-t", "y", "-o", tmp_path / "model", *options)
    assert done.exit_code == 0, done.output
    *trials, final = seen
    *asides, test = scored
    assert (len(trials), len(asides), len(test), len(final)) == (2, 2, 20, 60)
    for kept, aside in zip(trials, asides, strict=True):
        assert len(kept) == 48
        assert set(kept) | set(aside) == set(final)
        assert not set(test) & (set(kept) | set(aside))


def request(**options):
    return Request(Path("data.csv"), "y", Path("model"), **options)


def test_every_class_keeps_its_share_and_a_row_for_training():
    sizes = {"a": 400, "b": 60, "c": 30, "d": 2, "e": 1}
    y = np.repeat(list(sizes), list(sizes.values()))
    for seed in range(20):
        train, test = split_rows(y, "classes", request(seed=seed))
        assert sorted([*train, *test]) == list(range(len(y)))
        assert len(test) == round(0.1 * len(y))
        counts = {name: int((y[test] == name).sum()) for name in sizes}
        assert counts == {"a": 40, "b": 6, "c": 3, "d": 0, "e": 0}
        assert all(
            np.array_equal(a, b)
            for a, b in zip(
                split_rows(y, "classes", request(seed=seed)), (train, test), strict=True
            )
        )
    most = split_rows(y, "classes", request(test_fraction=0.99))
    assert set(y[most[0]]) == set(sizes)
    assert not np.array_equal(
        split_rows(y, "classes", request(seed=0))[1], split_rows(y, "classes", request(seed=1))[1]
    )


def test_rare_classes_are_learned_and_tried_by_trials(tmp_path):
    rng = np.random.default_rng(0)
    labels = ["a"] * 60 + ["b"] * 38 + ["c"] * 2
    (tmp_path / "data.csv").write_text(
        "x,y\n" + "".join(f"{rng.normal():.4f},{label}\n" for label in labels)
    )
    for seed in range(3):
        options = ("--max-epochs", 1, "--seed", seed, "--tune-trials", 1, "--json")
        done = call(
            "train", tmp_path / "data.csv", "-t", "y", "-o", tmp_path / f"model{seed}", *options
        )
        assert done.exit_code == 0, done.output
        assert "unknown labels" not in json.loads(done.stdout)["scores"]
        assert load(tmp_path / f"model{seed}").classes_.tolist() == ["a", "b", "c"]


def test_sensitivity_is_read_at_80_columns(trained):
    room, _ = trained
    done = call("sensitivity", room / "model", room / "data.csv")
    assert done.exit_code == 0, done.output
    printed = done.stdout.splitlines()
    assert max(map(len, printed)) <= 80
    rows = [line.split() for line in printed if "precision" in line]
    assert [row[1] for row in rows] == [
        "0.01",
        "0.03162",
        "0.1",
        "0.3162",
        "1",
        "3.162",
        "10",
        "31.62",
        "100",
    ]
    # precision, its value, |Δmean|/sd, min … max, evidence, residual: no line is broken
    assert all(len(row) == 8 for row in rows)
    assert len(printed) == 1 + 1 + 3 + 9


def test_cost_in_seconds_grows_with_the_rows(trained, tmp_path, monkeypatch):
    room, _ = trained
    found = json.loads(call("cost", room / "data.csv", "-t", "price", "--json").stdout)
    assert found["seconds"] > 0
    assert "6 epochs and a fit of 80 rows on this machine" in found["measured"]
    ticks = itertools.count()
    monkeypatch.setattr(
        "ssla.tables.cli.work.time", SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    )
    monkeypatch.setattr("ssla.tables.cli.work.choose_batch_size", lambda rows: 4)
    for rows in (
        64,
        128,
        320,
    ):  # 16 batches of 4 rows are timed: 200 epochs of one tick, and one for the rest
        found = json.loads(
            call("cost", numbers(tmp_path / "data.csv", rows), "-t", "y", "--json").stdout
        )
        assert found["seconds"] == 201 * rows / 64


def test_cost_of_classes_times_rows_of_every_class(tmp_path, monkeypatch):
    monkeypatch.setattr("ssla.tables.cli.work.choose_batch_size", lambda rows: 2)
    (tmp_path / "data.csv").write_text(
        "x,y\n" + "".join(f"{i % 7},{'b' if i == 50 else 'a'}\n" for i in range(100))
    )
    done = call("cost", tmp_path / "data.csv", "-t", "y", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["seconds"] > 0


@pytest.mark.parametrize(
    ("rows", "members", "said"), [(110, 1, True), (110, 2, False), (112, 1, False)]
)
def test_one_network_on_a_small_table_gets_a_caution(tmp_path, rows, members, said):
    """99 rows are trained on of 110, 101 of 112."""
    data = numbers(tmp_path / "data.csv", rows)
    done = call(
        "train", data, "-t", "y", "-o", tmp_path / "model", "--members", members, "--max-epochs", 1
    )
    assert done.exit_code == 0, done.output
    assert ("--members 5" in done.stdout) == said
    assert (
        "coverage of a single network's intervals is below their level"
        in " ".join(done.stdout.split())
    ) == said


MALFORMED = {
    "empty": (b"", "is empty"),
    "header only": (b"a,price\n", "no rows"),
    "one row": (b"a,price\n1,2\n", "at least 10 are needed"),
    "all missing": (
        b"a,b,price\n" + b"".join(b",,%d\n" % i for i in range(20)),
        "no usable input column (a: empty in every row; b",
    ),
    "mixed": (
        b"a,price\n" + b"".join(b"%s,%d\n" % (b"x" if i == 7 else b"%d" % i, i) for i in range(20)),
        "row 8 is 'x'",
    ),
    "million columns": (b",".join(b"c%d" % i for i in range(10**6)) + b"\n", "1,000,000 columns"),
    "nul": (b"a,price\n1,2\n\x00,3\n", "NUL"),
    "nul header": (b"a\x00,price\n1,2\n", "NUL"),
    "wrong target": (
        b"a,prise\n" + b"".join(b"%d,%d\n" % (i, i) for i in range(20)),
        "Did you mean 'prise'",
    ),
    "constant": (b"a,price\n" + b"".join(b"%d,5\n" % i for i in range(20)), "constant"),
    "duplicate": (b"a,a,price\n1,2,3\n", "several columns named 'a'"),
    "infinite": (
        b"a,price\n"
        + b"".join(b"%s,%d\n" % (b"inf" if i == 3 else b"%d" % i, i) for i in range(20)),
        "infinite value in row 4",
    ),
    "infinite target": (
        b"a,price\n"
        + b"".join(b"%d,%s\n" % (i, b"-inf" if i == 3 else b"%d" % i) for i in range(20)),
        "infinite",
    ),
    "ragged": (b"a,price\n1,2\n1,2,3\n", "line 3: 3 cells"),
    "binary": (b"\xff\xfe\x00a,b", "UTF-8"),
    "no name": (b"a,,price\n1,2,3\n", "has no name"),
    "nothing to learn from": (
        b"a,price\n" + b"".join(b"1,%d\n" % i for i in range(20)),
        "no usable input column",
    ),
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


def test_an_empty_column_is_left_out_and_named(tmp_path):
    (tmp_path / "data.csv").write_text(
        "a,b,price\n" + "".join(f"{i},,{i % 7}\n" for i in range(40))
    )
    done = call(
        "train",
        tmp_path / "data.csv",
        "-t",
        "price",
        "-o",
        tmp_path / "model",
        "--max-epochs",
        1,
        "--json",
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["left_out"] == {"b": "empty in every row"}


def test_wrong_usage_and_wrong_files(trained, tmp_path):
    room, _ = trained
    assert call("train", room / "data.csv").exit_code == 2
    for arguments, match in [
        (
            ("predict", tmp_path / "nowhere", room / "data.csv", "-o", tmp_path / "o.csv"),
            "no saved model",
        ),
        (
            ("predict", room / "model", room / "data.csv", "-o", tmp_path / "o.xlsx"),
            ".csv or .parquet",
        ),
        (
            ("predict", room / "model", room / "data.csv", "-o", tmp_path / "o.csv", "--level", 95),
            "strictly between",
        ),
        (("predict", room / "model", tmp_path / "none.csv", "-o", tmp_path / "o.csv"), "no file"),
        (
            (
                "train",
                room / "data.csv",
                "-t",
                "price",
                "-o",
                tmp_path / "m",
                "--likelihood",
                "gauss",
            ),
            "Did you mean",
        ),
        (
            ("train", room / "data.csv", "-t", "price", "-o", tmp_path / "m", "--drop", "colr"),
            "Did you mean 'colour'",
        ),
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

    monkeypatch.setattr("ssla.tables.networks.building.train_networks", interrupted)
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
    code = (
        "import sys; from ssla.tables.cli.app import app; assert 'torch' not in sys.modules and "
        "'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
