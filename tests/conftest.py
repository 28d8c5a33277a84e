import pytest
import torch


@pytest.fixture(autouse=True)
def _quiet_and_repeatable():
    """Each test starts from the same seed; default dtype is float32, as users have it."""
    torch.manual_seed(0)
    yield
    assert torch.get_default_dtype() == torch.float32
