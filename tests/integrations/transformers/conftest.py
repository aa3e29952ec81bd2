"""Fixtures that the tests of transformers share."""

import sys

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


@pytest.fixture(autouse=True)
def no_graphs_before(monkeypatch):
    """Each test's calls look whether our attention ran: what earlier tests compiled would switch that off."""
    versions = sys.modules.get("packing_ops.integrations.transformers.versions")
    if versions is not None:
        monkeypatch.setattr(versions, "graphs", [])
