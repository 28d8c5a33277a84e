"""Batches and blocks: the forms of rows that a scorer takes, and the names of its columns."""

from collections import Counter

import numpy as np
import pandas
import pytest

from ssla.tables.scoring.answer_columns import format_percent
from ssla.tables.scoring.batches import (
    ARRAY,
    MAPPING,
    PANDAS,
    list_cells,
    name_kept_columns,
    read_batch,
)
from ssla.tables.scoring.saved_models import BLOCK, Counts, predict_in_blocks, replace_refit
from ssla.tables.scoring.scorer import check_levels


class Model:
    refit = "output"


def test_a_batch_is_recognised_by_its_class():
    frame = pandas.DataFrame({"a": [1.0, 2.0]})
    for content, form, rows in [
        (frame, PANDAS, 2),
        ({"a": np.zeros(3)}, MAPPING, 3),
        (np.zeros((4, 2)), ARRAY, 4),
    ]:
        batch = read_batch(content)
        assert (batch.form, batch.rows) == (form, rows)
    with pytest.raises(TypeError, match="The batch must be a data frame"):
        read_batch("rows")
    with pytest.raises(ValueError, match="several columns of one name"):
        read_batch(pandas.DataFrame(np.zeros((1, 2)), columns=["a", "a"]))


def test_cells_are_numbers_by_their_type_or_python_objects():
    assert isinstance(list_cells(np.arange(2.0)), np.ndarray)
    assert list_cells(pandas.Series(["x", None])) == ["x", None]
    assert list_cells(np.array(["2024-01-01", "NaT"], dtype="M8[ns]"))[1] is None
    assert list_cells((np.float64(1.5), "x")) == [1.5, "x"]


def test_kept_columns_with_the_name_of_an_output_get_a_prefix():
    assert name_kept_columns(["id"], ["mean"]) == {"id": "id"}
    with pytest.warns(UserWarning, match="'mean' is written as 'input_input_mean'"):
        names = name_kept_columns(["mean", "input_mean"], ["mean"])
    assert names == {"mean": "input_input_mean", "input_mean": "input_mean"}


def test_rows_are_predicted_in_blocks_of_fixed_size():
    sizes = []

    def predict_block(rows):
        block = np.arange(BLOCK + 3)[rows]
        sizes.append(len(block))
        return {"a": block}

    columns = predict_in_blocks(predict_block, BLOCK + 3)
    assert sizes == [BLOCK, 3]
    assert columns["a"].tolist() == list(range(BLOCK + 3))


def test_without_rows_there_is_one_empty_block():
    columns = predict_in_blocks(lambda rows: {"a": np.zeros(0)[rows]}, 0)
    assert columns["a"].shape == (0,)


def test_counts_of_parts_add_up():
    counts = Counts(2, Counter(a=1), rows_noted=1)
    counts.add_counts(Counts(3, Counter(a=2, b=1), rows_mixed=1))
    assert (counts.rows, counts.rows_noted, counts.rows_mixed) == (5, 1, 1)
    assert counts.missing == {"a": 3, "b": 1}


def test_another_refit_does_not_change_the_model():
    model = Model()
    assert replace_refit(model, "newton").refit == "newton"
    assert model.refit == "output"


def test_levels_are_probabilities_each_once():
    assert check_levels(0.9) == (0.9,)
    assert check_levels([0.5, 0.9, 0.5]) == (0.5, 0.9)
    for wrong in ([], 1.0, [0.5, 0.0]):
        with pytest.raises(ValueError):
            check_levels(wrong)


def test_a_level_is_written_in_per_cent():
    assert [format_percent(level) for level in (0.95, 0.975, 0.29)] == ["95", "97.5", "29"]
