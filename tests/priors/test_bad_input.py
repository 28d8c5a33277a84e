"""Settings of priors that are refused, and the remedy."""

import pytest

from ssla import priors
from support.bad_input import assert_message, fit

CASES = {
    "negative precision": (
        lambda: priors.Gaussian(precision=-1.0),
        r"prior precision must be positive.*Flat\(\)",
    ),
    "a number for a prior": (lambda: fit(prior=1.0), "prior must be an object such as"),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case):
    assert_message(*CASES[case])
