import functools

import pytest
import torch

from ssla.tables.estimators import estimator

torch.set_num_threads(1)  # the matrices are small: a second thread waits more than it works
SHIPPED = {"choose_member_count": estimator.choose_member_count, "AUTO_TREES": estimator.AUTO_TREES}


@pytest.fixture(autouse=True)
def _quiet_and_repeatable():
    """Each test starts from the same seed; default dtype is float32, as users have it."""
    torch.manual_seed(0)
    yield
    assert torch.get_default_dtype() == torch.float32


@pytest.fixture(autouse=True, scope="session")
def _one_member():
    """members="auto" is one network here, trees="auto" three: tests of more say how many.

    The rule itself is `__wrapped__`; `shipped_defaults` undoes this for one test.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            estimator,
            "choose_member_count",
            functools.wraps(estimator.choose_member_count)(lambda rows: 1),
        )
        patch.setattr(estimator, "AUTO_TREES", dict.fromkeys(estimator.AUTO_TREES, 3))
        yield


@pytest.fixture
def shipped_defaults(monkeypatch):
    """Both estimators as a user has them: undoes `_one_member` for one test."""
    for name, value in SHIPPED.items():
        monkeypatch.setattr(estimator, name, value)
