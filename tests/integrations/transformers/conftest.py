"""Fixtures that the tests of transformers share."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """The figures of these tests hold for any number; one is faster where several tests run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_rank(tmp_path):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
