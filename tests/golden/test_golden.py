"""Files of an earlier version load, and answer as they did."""

import json

import pytest
import torch

import ssla
from golden.saved import CASES, FOLDER, answers, get_module


@pytest.mark.parametrize("name", CASES)
def test_a_posterior_saved_by_an_earlier_version_predicts_the_same(name):
    expected = json.loads((FOLDER / f"{name}.json").read_text())
    found = answers(ssla.load(FOLDER / name, get_module(name)), name)
    for what, values in expected.items():
        torch.testing.assert_close(
            torch.tensor(found[what]), torch.tensor(values), rtol=1e-10, atol=1e-12
        )
