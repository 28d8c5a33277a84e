"""Steps of the commands, each by itself: formats, warnings, and hashes."""

import hashlib
import warnings

import pytest

from ssla.tables.cli.console import show_progress
from ssla.tables.cli.report_command import hash_file, list_facts
from ssla.tables.cli.train import Request, make_estimator, make_one_network_request
from ssla.tables.cli.work import sum_warnings


def test_row_counts_of_warnings_with_one_text_are_added():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sum_warnings():
            for count in (1, 2):
                warnings.warn(f"{count} of 1,000 rows are far.", stacklevel=1)
                warnings.warn("twice", stacklevel=1)
    texts = sorted(str(warning.message) for warning in caught)
    assert texts == ["3 of 2000 rows are far.", "twice"]


def test_warnings_are_given_after_an_error_too():
    def warn_and_fail():
        with sum_warnings():
            warnings.warn("before", stacklevel=1)
            raise RuntimeError

    with pytest.warns(UserWarning, match="before"), pytest.raises(RuntimeError):
        warn_and_fail()


def test_facts_are_listed_without_dictionaries():
    text = list_facts({"rows_test": 5, "scores": {"nll": 1.0}})
    assert text.split() == ["rows", "test", "5"]


def test_a_file_is_hashed_as_a_whole(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * (2**20 + 1))
    assert hash_file(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_options_of_a_trial_replace_those_of_the_request(tmp_path):
    request = Request(tmp_path, "y", tmp_path, members=3, conformal=True, seed=7)
    estimator = make_estimator(request, "gaussian", {"members": 2})
    assert (estimator.likelihood, estimator.members) == ("gaussian", 2)
    assert (estimator.conformal, estimator.random_state) == (True, 7)
    with pytest.raises(ValueError, match="--conformal corrects intervals of numbers"):
        make_estimator(request, "classes", {})
    trial = make_one_network_request(request)
    assert (trial.members, trial.conformal, trial.seed) == (1, False, 7)


def test_a_quiet_progress_bar_has_a_function_that_does_nothing():
    with show_progress(3, "training", quiet=True) as advance:
        assert advance(1) is None
