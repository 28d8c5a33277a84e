"""Values of the report: rounded numbers, names, targets and hashes."""

import math

import pytest
import torch

from ssla.tables.report.shown_rows import list_rounded_numbers, round_number, shorten_inputs
from ssla.tables.report.subject import check_names, check_targets, hash_tensors


def test_numbers_are_rounded_for_json():
    assert round_number(1234.5678, 6) == 1234.57
    assert round_number(2.0) == 2
    assert isinstance(round_number(2.0), int)
    assert round_number(1e20) == 1e20
    assert isinstance(round_number(1e20), float)
    assert round_number(math.nan) is None
    assert list_rounded_numbers(torch.tensor([[1.0, math.inf]])) == [[1, None]]


def test_long_texts_of_inputs_are_cut():
    rows = shorten_inputs([["x" * 100, None, 1 / 3, True]])
    assert rows == [["x" * 59 + "…", "", 0.33333, 1]]


def test_names_are_those_given_or_numbers():
    assert check_names(None, 2) == ("input 0", "input 1")
    assert check_names(["a", 1], 2) == ("a", "1")
    with pytest.raises(ValueError, match="names must have 2 entries"):
        check_names(["a"], 2)


def test_targets_are_one_finite_number_for_each_row():
    assert check_targets([[1.0], [2.0]], 2).tolist() == [1.0, 2.0]
    for y, rows, message in [
        (torch.ones(2, 2), 2, "one target"),
        ([1.0], 2, "X has 2 rows, but y has 1"),
        ([], 0, "at least one row"),
        ([math.nan, 1.0], 2, "missing or infinite"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_targets(y, rows)


def test_the_hash_is_that_of_the_numbers_in_double_precision():
    x = torch.tensor([[1.0, 2.0]])
    assert hash_tensors(x) == hash_tensors(x.double()) == hash_tensors([x])
    assert hash_tensors({"b": x, "a": 2 * x}) == hash_tensors([2 * x, x])
    assert hash_tensors(x) != hash_tensors(2 * x)
