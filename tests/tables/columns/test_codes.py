"""Categories with many levels: one column of codes, for models that learn an effect of each
level.
"""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ssla.tables.cli.app import app
from ssla.tables.columns import Plan, Table, make_plan
from ssla.tables.columns.plan import ENOUGH, FEWEST_ROWS, MOST_LEVELS
from ssla.tables.estimators.loading import load_trained
from ssla.tables.estimators.saving import save
from ssla.tables.scoring.saved_models import open_trained


def table(**cells):
    return Table(
        Path("some.csv"),
        {name: list(column) for name, column in cells.items()},
        len(next(iter(cells.values()))),
    )


def cities(rare=3):
    """City 0 in the most rows, city 79 in the fewest; some in one row only."""
    return [f"city {i}" for i in range(80) for _ in range(100 - i)] + [
        f"rare {i}" for i in range(rare)
    ]


def coded(**cells):
    return make_plan(table(**cells), set(), codes=True)


def test_the_most_frequent_level_has_code_1_and_rare_ones_code_0():
    plan = coded(city=cities(), size=range(len(cities())))
    (city, _) = plan.features
    assert plan.level_counts == (80, 0)
    assert city.encoded_names == ["city: code"]
    assert city.codes == tuple(f"city {i}" for i in range(80))
    assert city.levels == ()
    assert city.rare == ("rare 0", "rare 1", "rare 2")
    assert (
        plan.interpretation["city"]
        == "80 of 83 categories have an effect of their own, which is learned; the others (3 rows) "
        "share one"
    )
    found = plan.encode(table(city=["city 0", "city 79", "rare 1", "Rome", ""], size=[1] * 5))
    assert found.values[:, 0].tolist() == [1, 80, 0, 0, 0]
    assert found.unlearned[:, 0].tolist() == [False, False, True, True, True]
    assert found.unknown == {"city": 1}
    assert found.missing == {"city": 1}


def test_gaps_have_the_last_code_if_training_had_any():
    names = cities() + [""] * ENOUGH
    plan = coded(city=names, size=range(len(names)))
    assert plan.level_counts == (81, 0)
    found = plan.encode(table(city=["", "city 3"], size=[1, 2]))
    assert found.values[:, 0].tolist() == [81, 4]
    assert not found.mixed_rows.any()


def test_enough_rare_rows_teach_what_a_new_level_is():
    names = cities(rare=ENOUGH)
    found = coded(city=names, size=range(len(names))).encode(
        table(city=["rare 1", "Rome"], size=[1, 2])
    )
    assert found.values[:, 0].tolist() == [0, 0]
    assert not found.mixed_rows.any()
    assert found.notes.tolist() == ["", "city: unknown category 'Rome', treated as a rare one"]


def test_codes_are_a_choice_and_few_levels_have_none():
    assert make_plan(table(city=cities()), set()).level_counts == ()
    assert make_plan(table(city=cities()), set()).width == MOST_LEVELS + 1
    few = coded(city=[f"city {i % MOST_LEVELS}" for i in range(1000)])
    assert few.level_counts == ()
    assert few.width == MOST_LEVELS


def test_texts_are_kept_if_half_of_the_rows_have_a_code():
    often = [f"name {i}" for i in range(30) for _ in range(FEWEST_ROWS)]
    seldom = [f"other {i}" for i in range(len(often))]
    plan = coded(name=often + seldom, size=range(2 * len(often)))
    assert plan.level_counts == (30, 0)
    plan = coded(name=[*often, *seldom, "one more"], size=range(2 * len(often) + 1))
    assert plan.left_out == {
        "name": f"{30 + len(often) + 1} different texts in {2 * len(often) + 1} rows"
    }
    without = make_plan(table(name=often + seldom, size=range(2 * len(often))), set())
    assert list(without.left_out) == ["name"]


def test_the_target_does_not_decide_the_codes():
    names = cities()
    one = make_plan(table(city=names, y=range(len(names))), {"y"}, codes=True)
    other = make_plan(table(city=names, y=range(len(names))[::-1]), {"y"}, codes=True)
    assert one.features == other.features


def test_copies_of_rows_have_codes_of_the_training_table():
    rng = np.random.default_rng(0)
    names = rng.permutation(cities()).tolist()
    plan = coded(
        city=names, size=rng.normal(size=len(names)).tolist(), old=["", *range(1, len(names))]
    )
    found = plan.encode(table(city=["Rome", "Rome"], size=[1.0, 2.0], old=[3, ""]))
    copies, shares = np.stack(list(found.make_filled_copies())), found.copy_weights
    assert set(copies[..., 0].ravel()) <= set(range(81))
    assert len(set(copies[:, 0, 0])) == len(copies)
    assert np.allclose(shares.sum(0), 1)
    assert set(copies[:, 0, 1]) == {1.0}
    assert all(isinstance(row[0], str) for row in plan.rows)


def test_a_plan_with_codes_is_the_same_after_json():
    plan = coded(city=cities(), size=range(len(cities())))
    content = json.loads(json.dumps(plan.as_json()))
    assert Plan.from_json(content) == plan
    assert make_plan(table(city=["a", "b"] * 10), set()).level_counts == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"codes": ["a", "a"]},
        {"codes": ["a", 1]},
        {"codes": "ab"},
        {"codes": []},
        {"levels": ["x", "y"]},
        {"rare": ["city 3"]},
        {"kind": "number"},
    ],
)
def test_a_forged_plan_is_refused(wrong):
    content = json.loads(json.dumps(coded(city=cities()).as_json()))
    content["features"][0] |= wrong
    with pytest.raises(ValueError, match=r"categories|kind|list"):
        Plan.from_json(content)


def test_the_command_learns_codes_and_every_other_command_reads_them(tmp_path):
    rng = np.random.default_rng(0)
    effects = rng.normal(size=60)
    level = np.repeat(np.arange(60), 10)
    rows = [
        [f"c{i}", f"{x:.4f}", f"{effects[i] + 0.1 * x:.4f}"]
        for i, x in zip(level, rng.normal(size=600), strict=True)
    ]
    data = tmp_path / "a.csv"
    with data.open("w", newline="") as stream:
        csv.writer(stream).writerows([["city", "size", "y"], *rows])

    def call(*arguments):
        done = CliRunner().invoke(app, [str(a) for a in arguments])
        assert done.exit_code == 0, done.output
        return done.output

    model = tmp_path / "m"
    call("train", data, "--target", "y", "-o", model, "--max-epochs", 20, "--members", 1)
    opened, _ = open_trained(model)
    assert opened.plan.level_counts == opened.estimator.ensemble_.architecture.levels == (60, 0)
    call("predict", model, data, "-o", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open() as stream:
        mean = np.array([float(row["mean"]) for row in csv.DictReader(stream)])
    assert np.corrcoef(mean, [float(row[2]) for row in rows])[0, 1] > 0.9
    call("evaluate", model, data)
    call("sensitivity", model, data)
    call("cost", data, "--target", "y")
    call("report", model)
    call("report", model, data, "-o", tmp_path / "r.html")
    assert "60 values, a learned effect for each" in (tmp_path / "r.html").read_text()
    estimator, training = load_trained(model)
    codes = estimator.plan_.features[0]
    features = (replace(codes, codes=codes.codes[:-1]), *estimator.plan_.features[1:])
    estimator.plan_ = replace(estimator.plan_, features=features)
    save(estimator, tmp_path / "forged", training)
    done = CliRunner().invoke(
        app, ["predict", str(tmp_path / "forged"), str(data), "-o", str(tmp_path / "other.csv")]
    )
    assert done.exit_code == 1
    assert "the codes of the plan are not those of the network" in " ".join(done.output.split())
