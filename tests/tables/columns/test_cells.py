"""Cells and files: the functions that tables are made of, each by itself."""

from decimal import Decimal

import numpy as np
import pandas
import pytest

from ssla.tables.columns.frames import has_only_numbers, is_frame, is_gap, replace_masked
from ssla.tables.columns.kinds import NUMBER, Column, TableError, check_column_finite
from ssla.tables.columns.writing import check_output, escape_formula, open_table


@pytest.mark.parametrize("cell", [None, float("nan"), pandas.NA, pandas.NaT])
def test_gaps_of_python_and_pandas_are_gaps(cell):
    assert is_gap(cell)


@pytest.mark.parametrize("cell", ["NA", "", 0, False, Decimal("1.5")])
def test_texts_and_values_are_no_gaps(cell):
    assert not is_gap(cell)


def test_masked_cells_become_gaps_of_their_type():
    mask = [False, True]
    numbers = replace_masked(np.ma.array([1, 2], mask=mask))
    assert numbers[0] == 1
    assert np.isnan(numbers[1])
    moments = replace_masked(np.ma.array(np.array(["2024-01-01"] * 2, dtype="M8[D]"), mask=mask))
    assert np.isnat(moments).tolist() == mask
    assert replace_masked(np.ma.array(["a", "b"], mask=mask)).tolist() == ["a", None]
    plain = np.arange(3)
    assert replace_masked(plain) is plain


def test_frames_are_recognised_with_the_types_of_their_columns():
    frame = pandas.DataFrame({"a": [1.0, None], "b": [True, False]})
    assert is_frame(frame)
    assert not is_frame(frame.to_numpy())
    assert has_only_numbers(frame)
    assert not has_only_numbers(frame.assign(c=["x", "y"]))


def test_an_infinite_number_is_refused_with_its_row():
    column = Column("a", NUMBER, np.array([1.0, np.nan, np.inf]))
    with pytest.raises(TableError, match=r"'a' has an infinite value in row 3"):
        check_column_finite(column)
    finite = Column("a", NUMBER, np.array([1.0, np.nan]))
    assert check_column_finite(finite) is finite


@pytest.mark.parametrize("cell", ["=1+1", "+cmd", "@x", "-1+2", "\tx"])
def test_texts_that_a_spreadsheet_would_execute_get_an_apostrophe(cell):
    assert escape_formula(cell) == f"'{cell}"


@pytest.mark.parametrize("cell", ["-1.5", "+1e5", "-", "text", "1.234,5", -1.5, None])
def test_numbers_and_other_cells_are_written_as_they_are(cell):
    assert escape_formula(cell) == cell


def test_a_table_is_written_in_parts_and_appears_at_the_end(tmp_path):
    path = tmp_path / "out.csv"
    with open_table(path) as add_rows:
        add_rows({"a": np.array([1.0]), "b": np.array(["x"])})
        add_rows({"a": np.array([2.0]), "b": np.array(["=y"])})
        assert not path.exists()
    assert path.read_text().splitlines() == ["a,b", "1.0,x", "2.0,'=y"]


def test_an_error_while_a_table_is_written_leaves_the_old_file(tmp_path):
    def write_and_fail(path):
        with open_table(path) as add_rows:
            add_rows({"a": np.array([3.0])})
            raise RuntimeError

    path = tmp_path / "out.csv"
    path.write_text("a\n1.0\n")
    with pytest.raises(RuntimeError):
        write_and_fail(path)
    assert path.read_text() == "a\n1.0\n"


def test_an_output_needs_a_supported_ending(tmp_path):
    with pytest.raises(TableError, match=r"must end in \.csv or \.parquet"):
        check_output(tmp_path / "out.xlsx")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(TableError, match="is a directory"):
        check_output(tmp_path / "folder.csv")
