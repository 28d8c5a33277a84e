"""The page of an estimator that was fitted on a data frame is that of `ssla report`."""

import json
import re

import numpy as np
import pandas as pd
import polars as pl
import pytest
from typer.testing import CliRunner

import ssla
from ssla.sklearn import SSLAClassifier, SSLARegressor
from ssla.tables.cli.app import app
from ssla.tables.cli.train import shuffle_rows

TRAINED, TESTED, SEED, EPOCHS = 90, 12, 3, 6


def table(rows, seed):
    """A number with gaps, a category with gaps, yes or no, a date, and two targets."""
    rng = np.random.default_rng(seed)
    size = rng.integers(-24, 25, rows) / 8
    colour = rng.choice(["red", "green", "blue"], rows)
    price = 10 + 3 * size + 2 * (colour == "red") + rng.normal(size=rows)
    return pd.DataFrame(
        {
            "size": np.where(np.arange(rows) % 4 == 1, np.nan, size),
            "colour": np.where(np.arange(rows) % 11 == 3, None, colour),
            "sold": rng.choice(["yes", "no"], rows),
            "day": pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 90, rows), "D"),
            "price": price,
            "kind": np.array(["low", "middle", "high"])[np.digitize(price, [9, 12])],
        }
    )


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output


def facts_of_the_command(folder, train, test, target, other):
    """The numbers that the page of `ssla report` embeds."""
    train.to_csv(folder / "train.csv", index=False)
    test.to_csv(folder / "test.csv", index=False)
    options = ["--test-fraction", 0, "--seed", SEED, "--max-epochs", EPOCHS, "--quiet"]
    model, page = folder / "model", folder / "page.html"
    run("train", folder / "train.csv", "-t", target, "--drop", other, "-o", model, *options)
    run("report", model, folder / "test.csv", "-o", page)
    data = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S
    )
    return json.loads(data[1])


@pytest.mark.parametrize("library", ["pandas", "polars"])
@pytest.mark.parametrize(("target", "other"), [("price", "kind"), ("kind", "price")])
def test_the_page_of_a_frame_has_the_numbers_of_the_command(tmp_path, library, target, other):
    """The settings that make them equal, to the last digit:

    - `--test-fraction 0`: the command trains on all rows, and its plan is that of all rows.
    - `random_state` is `--seed`, `max_epochs` is `--max-epochs`; all else are the defaults of both.
    - The rows are in the order in which the command shuffles them, because a network depends on
      the order of its rows.
    - The order of rows must not change the plan. So the numbers are eighths, whose mean is exact
      in any order, and no test row has two gaps that training did not teach: such rows are mixed
      over complete rows of the training table, which are drawn by their places.
    """
    train, test = table(TRAINED, 1), table(TESTED, 2)
    test.loc[2, "colour"] = "violet"
    expected = facts_of_the_command(tmp_path, train, test, target, other)
    order, _ = shuffle_rows(
        train[target].to_numpy(), "classes" if target == "kind" else "auto", SEED
    )
    make = SSLAClassifier if target == "kind" else SSLARegressor
    frames = [part.drop(columns=["price", "kind"]) for part in (train.iloc[order], test)]
    if library == "polars":
        frames = [pl.from_pandas(part) for part in frames]
    model = make(random_state=SEED, max_epochs=EPOCHS).fit(frames[0], train[target].iloc[order])
    page = ssla.html_report(model, frames[1], test[target].to_numpy(), target=target)
    found = json.loads(json.dumps(page.facts))
    cells = [facts["rows"].pop("inputs") for facts in (found, expected)]
    assert found == expected
    assert [row[1:3] for row in cells[0]] == [row[1:3] for row in cells[1]]  # texts, as written
    assert "Rows with missing or unknown inputs" in page.text
    assert "category: 3 values, one input for each" in page.text


def test_the_page_of_a_frame_shows_its_cells_and_explains_doubt_by_whole_columns():
    frame = table(TRAINED, 1)
    inputs = frame.drop(columns=["price", "kind"])
    model = SSLARegressor("gaussian", random_state=0, max_epochs=EPOCHS)
    model.fit(inputs, frame["price"])
    test = inputs.iloc[:8]
    facts = ssla.html_report(model, test, frame["price"].iloc[:8], names=list("abcd")).facts
    assert facts["inputNames"] == list("abcd")
    assert facts["rows"]["inputs"][0][1:3] == [inputs["colour"][0], inputs["sold"][0]]
    assert facts["rows"]["inputs"][1][0] == ""  # a gap
    place = facts["doubtful"][0]
    column, fall = facts["why"][str(place)]["inputs"][0]
    rows = model.plan_.encode(model.as_table(test))[np.array([place])]
    at = model.plan_.column_slices[column]
    doubt = float(model.predict_dist(rows).epistemic)
    rows.values[:, at] = model.ensemble_.inputs.shift.numpy()[at]
    rows.unlearned[:, column] = False
    less = float(model.predict_dist(rows).epistemic)
    assert fall == pytest.approx(1 - less / doubt, rel=1e-4)
    with pytest.raises(ValueError, match="names must have 4 entries"):
        ssla.html_report(model, test, frame["price"].iloc[:8], names=["a"])
