import pytest
import torch

torch.set_num_threads(1)  # the matrices are small: a second thread waits more than it works


@pytest.fixture(autouse=True)
def _quiet_and_repeatable():
    """Each test starts from the same seed; default dtype is float32, as users have it."""
    torch.manual_seed(0)
    yield
    assert torch.get_default_dtype() == torch.float32
