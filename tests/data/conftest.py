"""Fixtures of the tests of data."""

import gc

import pytest
import torch
from helpers import only_generation_0


@pytest.fixture
def workers_end(monkeypatch):
    """Collects what an error leaves of a DataLoader: in a later test this would wait 5 s for each worker."""
    with only_generation_0():
        yield
        monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.01)
        gc.collect(0)
