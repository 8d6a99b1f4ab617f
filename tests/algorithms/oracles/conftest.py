import pytest
import torch


@pytest.fixture(autouse=True)
def double():
    """Models, and so whole simulations, are in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
