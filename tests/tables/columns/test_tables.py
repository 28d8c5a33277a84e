"""Tables of the command: labels as written, numbers as meant, and unknown inputs that widen the
answer and are marked.
"""

import csv
import datetime
import json
import math
import warnings
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

from ssla import likelihoods as L
from ssla import metrics
from ssla.predictive import from_marginal, mixture
from ssla.predictive.joined import join_predictives
from ssla.tables.cli.app import app
from ssla.tables.cli.train import Request, prepare_table
from ssla.tables.columns import (
    Plan,
    Style,
    Table,
    TableError,
    make_plan,
    read_later_labels,
    read_later_numbers,
    read_table,
    read_target,
)
from ssla.tables.columns.kinds import interpret_cells, parse_date, read_as_kind
from ssla.tables.columns.plan import DRAWS, ENOUGH, MOST_LEVELS
from ssla.tables.estimators.loading import load_trained
from ssla.tables.estimators.saving import save
from ssla.tables.networks import predict_with_gaps

RUN = CliRunner()
F64 = torch.float64


def call(*arguments):
    done = RUN.invoke(app, [str(a) for a in arguments])
    assert done.exit_code == 0, done.output
    return done


def refused(*arguments):
    done = RUN.invoke(app, [str(a) for a in arguments])
    assert done.exit_code == 1, done.output
    return " ".join(done.output.split())


def table(**cells):
    """Of columns given as lists."""
    return Table(
        Path("some.csv"),
        {name: list(column) for name, column in cells.items()},
        len(next(iter(cells.values()))),
    )


def write(path, **columns):
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def read(path):
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


# --- labels


WRITTEN = {
    "seven digits": ["1234567", "1234568"],
    "huge": ["12345678901234567890", "12345678901234567891"],
    "negative and decimal": ["-1", "0.1234567891"],
    "leading zeros": ["007", "010"],
    "yes and no": ["yes", "no"],
    "True and False": ["True", "False"],
    "unicode": ["größer", "小さい", 'p(x), "y"'],
    "numbers and texts": ["1", "2", "A"],
}


@pytest.mark.parametrize("name", WRITTEN)
def test_labels_are_the_texts_of_the_column(name):
    written = WRITTEN[name] * 20
    target = read_target(table(k=written), "k", True)
    assert target.y.tolist() == written
    again, given = read_later_labels(table(k=written), "k", sorted(WRITTEN[name]))
    assert again.tolist() == written
    assert given.all()


def test_labels_go_through_the_command_and_its_files(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=60)
    k = np.where(x > 0, "1234567", "1234568")
    data = write(tmp_path / "a.csv", x=x.round(4), k=k)
    facts = json.loads(
        call(
            "train",
            data,
            "-t",
            "k",
            "-o",
            tmp_path / "m",
            "--likelihood",
            "classes",
            "--max-epochs",
            15,
            "--json",
        ).stdout
    )
    assert facts["read_as"] == {"k (target)": "2 classes"}
    call("predict", tmp_path / "m", data, "-o", tmp_path / "o.csv")
    out = read(tmp_path / "o.csv")
    assert {row["label"] for row in out} == {"1234567", "1234568"}
    assert {"p(1234567)", "p(1234568)"} <= set(out[0])
    assert list(out[0])[-1] == "notes"
    accuracy = json.loads(call("evaluate", tmp_path / "m", data, "--json").stdout)["accuracy"]
    assert accuracy == pytest.approx(
        np.mean([row["label"] == label for row, label in zip(out, k, strict=True)])
    )
    parquet = tmp_path / "a.parquet"  # the same labels as integers
    pyarrow.parquet.write_table(pyarrow.table({"x": x.round(4), "k": k.astype(int)}), parquet)
    assert (
        json.loads(call("evaluate", tmp_path / "m", parquet, "--json").stdout)["accuracy"]
        == accuracy
    )


def test_parquet_labels_are_their_exact_text():
    target = read_target(table(k=[2**60, 2**60 + 1] * 10), "k", True)
    assert set(target.y.tolist()) == {"1152921504606846976", "1152921504606846977"}
    assert set(read_target(table(k=[True, False] * 10), "k", None).y.tolist()) == {"true", "false"}
    assert set(read_target(table(k=[1.0, 2.5] * 10), "k", True).y.tolist()) == {"1.0", "2.5"}


def test_one_class_written_in_two_ways_is_refused():
    for a, b in (("1", "1.0"), ("007", "7"), ("yes", "Yes"), ("true", "yes")):
        with pytest.raises(TableError, match=f"two ways: '{a}' and '{b}'"):
            read_target(table(k=[a, b, "no" if a in ("yes", "true") else "3"] * 10), "k", True)
    labels = ["1", "1.0", "x"] * 10  # texts, not numbers: as written
    assert read_target(table(k=labels), "k", True).y.tolist() == labels


def test_later_labels_are_matched_by_value_where_all_classes_have_one():
    cells = table(k=["1.0", 2, "yes", "3", "", "02"])
    labels, given = read_later_labels(cells, "k", ["1", "2"])
    assert labels.tolist() == ["1", "2", "yes", "3", "2"]
    assert given.tolist() == [True, True, True, True, False, True]
    assert read_later_labels(table(k=[True, "no"]), "k", ["no", "yes"])[0].tolist() == [
        "yes",
        "no",
    ]
    assert read_later_labels(table(k=["true"]), "k", ["maybe", "no", "yes"])[0].tolist() == ["true"]
    rounded = ["0.333333", "1.23457e+06"]
    assert read_later_labels(table(k=["0.33333333"]), "k", rounded)[0].tolist() == ["0.33333333"]


# --- numbers written as texts

READINGS = {
    "1,234.5|12": ([1234.5, 12], Style(".", ",")),
    "1,234,567|950": ([1234567, 950], Style(".", ",")),
    "12,5|1,234": ([12.5, 1.234], Style(",")),
    "0,123|1,234": ([0.123, 1.234], Style(",")),
    "1.234,5|7": ([1234.5, 7], Style(",", ".")),
    "1.234.567|1.234": ([1234567, 1234], Style(",", ".")),
    "1 234|12,5": ([1234, 12.5], Style(",", " ")),
    "1'234.5|3": ([1234.5, 3], Style(".", "'")),
    "12.3%|-4%": ([12.3, -4], Style(after="%")),
    "123 EUR|4 EUR": ([123, 4], Style(after="EUR")),
    "$1,234.50|-$3|$ 4": ([1234.5, -3, 4], Style(".", ",", "$")),
    "1e3|2.5": ([1000, 2.5], Style()),
}


@pytest.mark.parametrize("cells", READINGS)
def test_numbers_as_texts_have_one_reading_for_the_column(cells):
    values, style = READINGS[cells]
    column = interpret_cells("c", cells.split("|"))
    assert column.kind == "number"
    assert column.values.tolist() == values
    assert column.style == style
    assert read_as_kind("c", cells.split("|"), "number", style).values.tolist() == values


def test_an_ambiguous_column_is_refused_with_both_options():
    with pytest.raises(
        TableError, match=r"'1,234' is 1234 with --thousands ',', but 1.234 with --decimal ','"
    ):
        interpret_cells("c", ["950", "1,234"])
    assert interpret_cells("c", ["950", "1,234"], Style(".", ",")).values.tolist() == [950, 1234]
    assert interpret_cells("c", ["950", "1,234"], Style(",")).values.tolist() == [950, 1.234]
    with pytest.raises(TableError, match="not in the format --decimal ','"):
        interpret_cells("c", ["1.5", "2.5"], Style(","))


def test_several_units_and_single_texts_are_refused():
    for cells in (
        ["5 EUR", "6 EUR", "5 USD"],
        ["1", "13%", "2"],
        ["12,5", "13", "x"],
        ["2024-01-01", "2024-02-30", "2024-01-03"],
    ):
        with pytest.raises(TableError, match="mixes"):
            interpret_cells("c", cells)
    assert interpret_cells("c", ["A1", "A2", "B 3"]).kind == "text"
    assert interpret_cells("c", [Decimal("1.50"), None]).values.tolist()[0] == 1.5


def test_a_later_table_is_read_as_at_training():
    train = table(price=["12,5", "13", "14,25"] * 10, y=range(30))
    plan = Plan.from_json(json.loads(json.dumps(make_plan(train, {"y"}).as_json())))
    assert plan.interpretation == {"price": "numbers ('12,5' is 12.5)"}
    assert plan.encode(table(price=["1,234"])).values.tolist() == [[1.234]]
    assert plan.encode(table(price=[7.5])).values.tolist() == [[7.5]]
    with pytest.raises(
        TableError, match=r"written like 1234,5 at training, but row 2 of some\.csv is '12\.5'"
    ):
        plan.encode(table(price=["1,5", "12.5"]))
    stated = Table(Path("b.csv"), {"price": ["1,234.5"]}, 1, Style(".", ","))
    assert plan.encode(stated).values.tolist() == [[1234.5]]
    assert read_later_numbers(table(y=["12,5", ""]), "y", Style(","))[0].tolist() == [12.5]


def test_text_targets_with_too_many_values_are_refused(tmp_path):
    data = write(tmp_path / "a.csv", x=range(60), y=[f"{i} kg" for i in range(60)])
    text = refused("train", data, "-t", "y", "-o", tmp_path / "m")
    assert "60 different values ('0 kg', '1 kg', '2 kg', …) in 60 rows" in text
    assert "--decimal" in text
    many = [f"class {i % 120}" for i in range(1200)]
    with pytest.raises(TableError, match=r"120 different texts .* or give --likelihood classes"):
        read_target(table(k=many), "k", None)
    assert len(set(read_target(table(k=many), "k", True).y.tolist())) == 120
    with pytest.raises(TableError, match="holds dates"):
        read_target(table(k=["2024-01-01", "2024-01-02"] * 10), "k", None)
    with pytest.raises(TableError, match=r"row 1 is 'a'\), but this likelihood needs numbers"):
        read_target(table(k=["a", "b"] * 10), "k", False)


def test_a_memory_error_advises_what_the_command_has(tmp_path):
    k = [f"c{i % 300}" for i in range(1500)]
    data = write(tmp_path / "a.csv", x=range(1500), k=k)
    text = refused("train", data, "-t", "k", "-o", tmp_path / "m", "--likelihood", "classes")
    assert "300 classes" in text
    assert "Group the rare classes" in text
    assert "structure" not in text
    assert "memory_budget" not in text


def test_a_zero_one_target_gets_a_note_and_a_percent_target_is_a_number(tmp_path):
    rng = np.random.default_rng(0)
    data = write(
        tmp_path / "a.csv",
        x=rng.normal(size=30).round(3),
        k=[0, 1] * 15,
        p=[f"{i}.5%" for i in range(30)],
    )
    done = call("train", data, "-t", "k", "-o", tmp_path / "m", "--max-epochs", 1, "--drop", "p")
    assert "only the values 0 and 1: it is predicted as a number" in " ".join(done.stderr.split())
    assert "--likelihood classes" in " ".join(done.stderr.split())
    done = call("train", data, "-t", "p", "-o", tmp_path / "m2", "--max-epochs", 1, "--json")
    facts = json.loads(done.stdout)
    assert facts["likelihood"] == "gaussian"
    assert facts["read_as"] == {"p (target)": "numbers ('0.5%' is 0.5)"}
    assert "rmse" in json.loads(call("evaluate", tmp_path / "m2", data, "--json").stdout)
    assert "p' held numbers written like 1234.5%" in refused(
        "evaluate", tmp_path / "m2", write(tmp_path / "b.csv", x=[1], p=["0.5"])
    )


# --- numbers and texts in one column


def test_numbers_with_few_frequent_texts_are_categories():
    doors = ["2", "3", "4", "5more"] * 30
    train = table(doors=doors, y=range(120))
    plan = Plan.from_json(json.loads(json.dumps(make_plan(train, {"y"}).as_json())))
    assert plan.interpretation == {"doors": "4 categories, because some values are texts ('5more')"}
    assert plan.features[0].levels == ("2", "3", "4", "5more")
    later = plan.encode(table(doors=["2", "5more", "7", 3, ""]))
    assert later.values.tolist() == [[1, 0, 0, 0], [0, 0, 0, 1], [0] * 4, [0, 1, 0, 0], [0] * 4]
    assert later.notes.tolist() == ["", "", "doors: unknown category '7'", "", "doors: missing"]
    assert (
        make_plan(table(doors=[2, 3, 4, "5more"] * 30, y=range(120)), {"y"}).features
        == plan.features
    )  # as in Excel
    with pytest.raises(
        TableError, match="'y' mixes numbers and texts: row 4 is '5more', 30 such cells"
    ):
        read_target(table(y=doors), "y", None)  # a target is classes only if that is clear


def test_a_typing_error_is_not_a_category():
    def column(texts, numbers):
        return table(c=[*texts, *numbers], y=range(len(texts) + len(numbers)))

    few = [str(i % 5) for i in range(400)]
    for texts, numbers, refused in [
        (["x"] * 5, few, False),
        (["x"] * 4, few, True),  # too few rows
        (["x"] * 5, few * 2, True),  # less than 1% of the rows
        (["x"] * 9, few * 2, False),
        (["x"] * 50 + ["l"], few, True),  # one of the texts is rare
        (["x"] * 50, [str(i % 19) for i in range(400)], False),
        (["x"] * 50, [str(i % 20) for i in range(400)], True),  # 21 different values
        (["soon"] * 50, ["2024-01-01", "2024-01-02"] * 50, True),  # dates
    ]:
        if refused:
            with pytest.raises(TableError, match="mixes"):
                make_plan(column(texts, numbers), {"y"})
        else:
            assert (
                "because some values are texts ('x')"
                in make_plan(column(texts, numbers), {"y"}).interpretation["c"]
            )


# --- cells of another kind


def test_cells_of_another_kind_are_refused_with_their_row():
    plan = make_plan(
        table(size=range(30), sold=["yes", "no"] * 15, when=["2024-01-01", "2024-01-05"] * 15),
        set(),
    )
    good = {"size": [1.0, 2.0], "sold": ["no", "yes"], "when": ["2024-01-02", "2024-01-03"]}
    assert plan.encode(table(**good)).values.tolist() == [[1, 0, 1], [2, 1, 2]]
    assert plan.encode(table(**good | {"sold": [0, "1"]})).values.tolist() == [[1, 0, 1], [2, 1, 2]]
    assert plan.encode(table(**good | {"sold": [False, True]})).values.tolist() == [
        [1, 0, 1],
        [2, 1, 2],
    ]
    for name, cells, words in [
        ("size", ["3", "yes"], "'size' held numbers at training, but row 2 of some.csv is 'yes'"),
        ("size", [3, True], "row 2 of some.csv is 'True'"),
        ("sold", [0, 2], "'sold' held true or false at training, but row 2 of some.csv is '2'"),
        ("sold", ["yes", "maybe"], "is 'maybe'"),
        ("when", ["2024-01-02", "soon"], "'when' held dates"),
        ("size", [1, math.inf], "infinite value in row 2"),
    ]:
        with pytest.raises(TableError, match=words):
            plan.encode(table(**good | {name: cells}))


# --- dates and rare categories


def test_days_of_dates():
    for text in (
        "2024-03-01",
        "2024-03-01T12:30",
        "2024-03-01 12:30:15",
        "2024-03-01T12:30:15.5+02:00",
        "2024-03-01T12:30:15Z",
    ):
        moment = datetime.datetime.fromisoformat(text.replace("Z", "+00:00").replace(".5", ".500"))
        utc = moment.replace(tzinfo=moment.tzinfo or datetime.timezone.utc)
        assert parse_date(text) == pytest.approx(utc.timestamp() / 86400, abs=1e-12)
    assert parse_date("2024-03-01T12:30:15.123456789+0200") == pytest.approx(
        parse_date("2024-03-01T10:30:15.123456Z"), abs=1e-12
    )
    assert parse_date(datetime.date(1970, 1, 3)) == 2
    assert [parse_date(text) for text in ("2024-02-30", "20240301", "2024-03", "12:30", 7)] == [
        None
    ] * 5


def test_dates_are_a_trend_with_the_time_of_the_year():
    first = datetime.date(2020, 1, 1)
    days = [first + datetime.timedelta(days=11 * i) for i in range(100)]
    for cells in (days, [str(one) for one in days]):
        plan = make_plan(table(when=cells, y=range(100)), {"y"})
        assert plan.width == 3
        assert plan.interpretation == {
            "when": "dates, as days since 2020-01-01, with the time of the year"
        }
        values = plan.encode(table(when=cells)).values
        assert values[:, 0].tolist() == [11 * i for i in range(100)]
        angle = (
            2 * np.pi * np.array([(d - datetime.date(1970, 1, 1)).days for d in days]) / 365.2425
        )
        assert np.allclose(values[:, 1:], np.stack([np.sin(angle), np.cos(angle)], 1), atol=1e-12)
    short = make_plan(table(when=[str(one) for one in days[:30]], y=range(30)), {"y"})
    assert short.interpretation == {"when": "dates, as days since 2020-01-01"}
    assert short.width == 1
    hours = [f"2024-01-0{1 + i % 9}T{i % 24:02d}:00" for i in range(60)]
    assert (
        make_plan(table(when=hours, y=range(60)), {"y"})
        .interpretation["when"]
        .endswith("with the time of the day")
    )


def rare_cities(rows_each=25, frequent=MOST_LEVELS, rare=10):
    names = [f"city {i:02d}" for i in range(frequent)] * rows_each
    return names + [f"rare {i}" for i in range(rare)] * 3


def test_rare_categories_are_counted_and_have_a_column_of_their_own():
    cells = rare_cities()
    plan = make_plan(table(city=cells, y=range(len(cells))), {"y"})
    assert plan.interpretation == {
        "city": "the 50 most frequent of 60 categories; the others (30 rows) share one column"
    }
    assert plan.width == MOST_LEVELS + 1
    encoded = plan.encode(table(city=["rare 3", "city 07", "Rome", ""]))
    assert encoded.values[:, -1].tolist() == [
        1,
        0,
        1,
        0,
    ]  # thirty rows are enough: a new one counts as a rare one
    assert encoded.values[1].argmax() == 7
    assert encoded.notes.tolist() == [
        "",
        "",
        "city: unknown category 'Rome', treated as a rare one",
        "city: missing",
    ]
    assert encoded.mixed_rows.tolist() == [False, False, False, True]
    few = make_plan(table(city=rare_cities(rare=2), y=range(1256)), {"y"}).encode(
        table(city=["rare 1", "Rome"])
    )
    assert few.values[:, -1].tolist() == [1, 0]
    assert few.mixed_rows.tolist() == [False, True]


# --- unknown inputs


def test_gaps_that_training_had_are_learned_and_others_are_mixed():
    n = 100
    often = ["" if i < ENOUGH else i for i in range(n)]
    seldom = ["" if i < ENOUGH - 1 else i for i in range(n)]
    city = ["" if i < ENOUGH else "AB"[i % 2] for i in range(n)]
    plan = make_plan(table(often=often, seldom=seldom, city=city, size=range(n)), set())
    row = {"often": [5], "seldom": [5], "city": ["A"], "size": [5]}
    assert not plan.encode(table(**row)).mixed_rows.any()
    for name, cell, mixed, note in [
        ("often", "", False, "often: missing"),
        ("seldom", "", True, "seldom: missing"),
        ("city", "", False, "city: missing"),
        ("city", "Rome", True, "city: unknown category 'Rome'"),
        ("size", "NA", True, "size: missing"),
    ]:
        encoded = plan.encode(table(**row | {name: [cell]}))
        assert encoded.mixed_rows.tolist() == [mixed], name
        assert encoded.notes.tolist() == [note]
        assert encoded.noted_row_count == 1


def test_copies_hold_the_training_distribution_of_what_is_missing():
    rng = np.random.default_rng(0)
    size = rng.normal(3, 2, 500)
    city = rng.choice(["A", "B", "C"], 500, p=[0.7, 0.2, 0.1])
    plan = make_plan(table(size=size.tolist(), city=city.tolist(), twin=(2 * size).tolist()), set())
    cells = table(size=["", 1.0, "", 1.0], city=["B", "Rome", "", "B"], twin=[8.0, 8.0, "", 8.0])
    encoded = plan.encode(cells)
    assert encoded.mixed_rows.tolist() == [True, True, True, False]
    copies, shares = np.stack(list(encoded.make_filled_copies())), encoded.copy_weights
    assert copies.shape == (DRAWS, 3, 5)
    assert np.allclose(shares.sum(0), 1)
    assert np.array_equal(
        copies[:, 0, 1:], np.tile([0, 1, 0, 8.0], (DRAWS, 1))
    )  # what is known stays
    middles = np.quantile(size, (np.arange(DRAWS) + 0.5) / DRAWS, method="inverted_cdf")
    assert np.allclose(copies[:, 0, 0], middles)
    frequency = shares[:, 1] @ copies[:, 1, 1:4]
    assert np.allclose(frequency, [np.mean(city == name) for name in "ABC"])
    assert set(copies[:, 1, 0]) == {1.0}
    joint = copies[:, 2]  # whole rows: the columns go together
    assert np.allclose(joint[:, 4], 2 * joint[:, 0])
    assert abs(joint[:, 0].mean() - 3) < 0.5
    assert 1.5 < joint[:, 0].std() < 2.5
    assert set(joint[:, 1:4].sum(1)) == {1.0}
    again = Plan.from_json(json.loads(json.dumps(plan.as_json()))).encode(cells)
    assert np.array_equal(np.stack(list(again.make_filled_copies())), copies)
    part = encoded[np.array([2, 3])]
    assert np.array_equal(np.stack(list(part.make_filled_copies())), copies[:, 2:])


def test_rows_without_a_target_are_not_in_the_plan():
    cells = table(size=[1.0] * 20 + [5.0] * 5 + [3.0] * 5, y=[1] * 13 + [2] * 12 + [""] * 5)
    plan = make_plan(cells, {"y"}, np.arange(30) < 25)
    assert plan.features[0].draws == (1.0, 5.0)
    assert plan.features[0].shares == (0.8, 0.2)
    assert (
        prepare_table(cells, Request(Path("some.csv"), "y", Path(), likelihood="classes")).plan
        == plan
    )


def linear(noise):
    """y = x₀ + 2 x₁ with known doubt."""

    def predict(x):
        f = torch.from_numpy(x @ np.array([[1.0], [2.0]]))
        return from_marginal(
            L.Gaussian(noise=noise), f, torch.full((len(f), 1, 1), 0.04, dtype=F64)
        )

    return predict


def test_gaps_widen_a_predictive_by_what_the_value_is_worth():
    x = np.array([[0.0, 0.0], [1.0, 3.0], [2.0, 1.0]])
    copies = [np.array([[0.0, a], [1.0, -a]]) for a in (-1.0, 0.0, 5.0)]
    weights = np.array([[0.2, 0.5], [0.3, 0.5], [0.5, 0.0]])
    p = predict_with_gaps(linear(0.5), x, np.array([True, True, False]), copies, weights)
    sd = math.sqrt(0.25 + 0.04)
    means = np.stack([[c[0] @ [1, 2], c[1] @ [1, 2]] for c in copies])
    mean = (weights * means).sum(0)
    assert np.allclose(p.mean, [*mean, 4.0], rtol=1e-12)
    assert np.allclose(
        p.variance, [*(sd**2 + (weights * (means - mean) ** 2).sum(0)), sd**2], rtol=1e-12
    )
    y = np.array([0.3, 1.2, 5.0])
    law = [
        sum(
            w * stats.norm(m, sd).cdf(y[i]) for w, m in zip(weights[:, i], means[:, i], strict=True)
        )
        for i in range(2)
    ]
    assert np.allclose(p.cdf(y), [*law, stats.norm(4, sd).cdf(5)], rtol=1e-10)
    assert np.allclose(p.cdf(p.icdf([0.1, 0.9])), [[0.1, 0.9]] * 3, rtol=1e-9)
    whole = linear(0.5)(x[2:])
    assert float(p.interval(0.9)[2, 0]) == float(whole.interval(0.9)[0, 0])
    assert float(metrics.crps(p, y, reduce=False)[2]) == float(
        metrics.crps(whole, y[2:], reduce=False)[0]
    )


def test_weights_by_row_equal_one_mixture_a_row():
    for likelihood, outputs in ((L.Gaussian(noise=0.3), 1), (L.Poisson(), 1), (L.Categorical(), 3)):
        g = torch.Generator().manual_seed(0)
        f = torch.randn(2, 3, outputs, dtype=F64, generator=g)
        K = 0.1 * torch.eye(outputs, dtype=F64).expand(3, outputs, outputs)
        w = torch.rand(2, 3, dtype=F64, generator=g)
        p = mixture([from_marginal(likelihood, part, K) for part in f], w)
        y = torch.tensor([0.0, 1.0, 2.0], dtype=F64)
        for i in range(3):
            one = mixture(
                [from_marginal(likelihood, part[i : i + 1], K[:1]) for part in f], w[:, i]
            )
            assert torch.allclose(p.log_prob(y)[i], one.log_prob(y[i : i + 1])[0], rtol=1e-12)
            assert torch.allclose(p.variance[i], one.variance[0], rtol=1e-12)
    sharp = [
        from_marginal(
            L.Gaussian(noise=1e-3), torch.full((2, 1), c, dtype=F64), K[:2, :1, :1] * 1e-6
        )
        for c in (0.0, 1.0)
    ]
    draws = mixture(sharp, [[0.25, 1.0], [0.75, 0.0]]).sample(
        4000, torch.Generator().manual_seed(0)
    )
    assert torch.allclose(draws.mean(0), torch.tensor([0.75, 0.0], dtype=F64), atol=0.03)
    for bad in ([[0.0, 1.0], [0.0, 1.0]], [[1.0], [1.0]]):
        with pytest.raises(ValueError, match="weights must"):
            mixture([linear(1.0)(np.zeros((2, 2)))] * 2, bad)


@pytest.mark.parametrize("kind", ["gaussian", "student", "poisson", "classes"])
def test_joined_rows_answer_as_the_predictive_of_all(kind):
    likelihood = {
        "gaussian": L.Gaussian(noise=0.4),
        "student": L.StudentT(df=4.0, scale=0.5),
        "poisson": L.Poisson(),
    }.get(kind, L.Categorical())
    outputs = 3 if kind == "classes" else 1
    f = torch.randn(5, outputs, dtype=F64, generator=torch.Generator().manual_seed(1))
    K = 0.1 * torch.eye(outputs, dtype=F64).expand(5, outputs, outputs)
    rows = [torch.tensor([3, 0]), torch.tensor([1, 2, 4])]
    whole = from_marginal(likelihood, f, K)
    p = join_predictives([from_marginal(likelihood, f[i], K[i]) for i in rows], rows)
    y = torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0], dtype=F64)
    names = ["mean", "variance", "stddev", "mode", "mass", "epistemic", "aleatoric"] + ["probs"] * (
        kind == "classes"
    )
    for name in names:
        assert torch.allclose(getattr(p, name), getattr(whole, name), rtol=1e-9), name
    assert torch.allclose(p.log_prob(y), whole.log_prob(y), rtol=1e-9)
    assert torch.equal(p.diagnostics.inaccurate, whole.diagnostics.inaccurate)
    assert torch.allclose(p.interval(0.8).double(), whole.interval(0.8).double(), rtol=1e-9)
    assert p.sample(7, torch.Generator().manual_seed(0)).shape[:2] == (7, 5)
    scores, expected = (metrics.summary(one, y).scores for one in (p, whole))
    assert scores == pytest.approx(expected, rel=1e-9)
    region, other = p.hdr(0.8), whole.hdr(0.8)
    if kind == "classes":
        assert torch.equal(region, other)
    else:
        assert torch.allclose(
            p.cdf(torch.stack([y, y + 1], 1)), whole.cdf(torch.stack([y, y + 1], 1)), rtol=1e-9
        )
        assert torch.allclose(region.lower.nan_to_num(), other.lower.nan_to_num(), rtol=1e-9)


@pytest.fixture(scope="module")
def cities(tmp_path_factory):
    """Three cities at 0, 50 and 100; a size that matters little."""
    room = tmp_path_factory.mktemp("cities")
    rng = np.random.default_rng(0)
    city, size = rng.choice(["A", "B", "C"], 150), rng.normal(size=150)
    y = 50.0 * (city == "B") + 100.0 * (city == "C") + size + 0.5 * rng.normal(size=150)
    data = write(room / "data.csv", city=city, size=size.round(4), y=y.round(4))
    new = write(
        room / "new.csv",
        city=["A", "B", "C", "Rome", "", "B", ""],
        size=["0", "0", "0", "0", "0", "", ""],
    )
    call("train", data, "-t", "y", "-o", room / "m", "--max-epochs", 60, "--conformal", "-q")
    return room, data, new, y


@pytest.mark.parametrize("conformal", [True, False])
def test_an_unknown_city_gets_an_interval_over_all_cities(cities, tmp_path, conformal):
    room, _, new, y = cities
    model = room / "m"
    if not conformal:
        estimator, training = load_trained(model)
        estimator.conformal_ = None
        model = tmp_path / "m"
        save(estimator, model, training)
    facts = json.loads(call("predict", model, new, "-o", tmp_path / "o.csv", "--json").stdout)
    assert facts["rows_with_unknown_inputs"] == 4
    assert facts["rows_mixed"] == 4
    out = read(tmp_path / "o.csv")
    note = "city: unknown category 'Rome'"
    assert [row["notes"] for row in out] == [
        "",
        "",
        "",
        note,
        "city: missing",
        "size: missing",
        "city: missing; size: missing",
    ]
    names = ("lower_95", "upper_95", "sd", "epistemic")
    lower, upper, sd, epistemic = (np.array([float(row[name]) for row in out]) for name in names)
    for row in (3, 4, 6):
        assert lower[row] < 5
        assert upper[row] > 95
        assert sd[row] == pytest.approx(y.std(), rel=0.1)
    assert (upper - lower)[:3].max() < 15
    assert sd[1] < sd[5] < 5  # size is worth about one
    assert epistemic[3] > 10 * epistemic[:3].max()  # standard deviations


def test_evaluate_scores_rows_with_gaps_by_the_same_mixture(cities, tmp_path):
    room, *_ = cities
    gaps = write(
        tmp_path / "gaps.csv",
        city=["Rome"] * 20 + ["A"],
        size=["0"] * 21,
        y=[0, 50, 100, 50] * 5 + [0],
    )
    scores = json.loads(call("evaluate", room / "m", gaps, "--json").stdout)
    assert scores["rows_with_unknown_inputs"] == scores["rows_mixed"] == 20
    assert scores["nll"] < 5  # of a complete row's interval: hundreds


def test_a_classifier_is_unsure_about_an_unknown_category(tmp_path):
    rng = np.random.default_rng(0)
    city = rng.choice(["A", "B"], 80)
    data = write(
        tmp_path / "a.csv",
        city=city,
        x=rng.normal(size=80).round(3),
        k=np.where(city == "A", "yes", "no"),
    )
    call("train", data, "-t", "k", "-o", tmp_path / "m", "--max-epochs", 40, "-q")
    new = write(tmp_path / "new.csv", city=["A", "Rome"], x=[0, 0])
    call("predict", tmp_path / "m", new, "-o", tmp_path / "o.csv")
    known, unknown = read(tmp_path / "o.csv")
    assert float(known["p(yes)"]) > 0.9
    assert float(unknown["p(yes)"]) == pytest.approx(np.mean(city == "A"), abs=0.1)
    assert unknown["notes"] == "city: unknown category 'Rome'"


def test_a_damaged_plan_is_refused():
    plan = make_plan(table(a=range(30), b=["x", "y"] * 15), set()).as_json()
    for wrong in (plan["rows"][:3], [row[:1] for row in plan["rows"]]):
        with pytest.raises(ValueError, match="do not fit the columns"):
            Plan.from_json(plan | {"rows": wrong})


def test_reading_warns_of_nothing(tmp_path):
    data = write(tmp_path / "a.csv", a=["1", "2"], b=["x", ""])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [read_table(data).interpret_column(name).kind for name in "ab"] == ["number", "text"]
