"""Fixtures that the tests of TRL share."""

import pytest


@pytest.fixture(autouse=True)
def trainers_with_one_gpu(one_gpu):
    """TRL refuses several in one process."""
