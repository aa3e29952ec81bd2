"""What bench_logps times next to our op runs, and computes the same."""

import functools

import pytest
import torch

pytest.importorskip("rich")

import bench_logps as bench
from compiled_code import compiled_alone


def test_backward_of_a_compiled_peer_runs_again(device, monkeypatch):
    """On a GPU it may overwrite what the graph keeps. On the CPU it does not, and needs no compiler of C++."""
    if device == "cpu":
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    hidden, weight = (torch.randn(rows, 16, device=device).requires_grad_() for rows in (32, 64))
    targets, grad = torch.randint(0, 64, (32,), device=device), torch.randn(32, device=device)
    leaves = hidden, weight
    peers = [compiled_alone(bench.eager_logps) for _ in range(2)]
    bench.without_gradient(lambda: peers[0](hidden, weight, targets))()  # fills torch's caches
    backward = bench.backward_of(lambda: peers[1](hidden, weight, targets), leaves, grad)
    wanted = bench.gradients_of(lambda: bench.eager_logps(hidden, weight, targets), leaves, grad)()
    for _ in range(3):
        for found, expected in zip(backward(), wanted, strict=True):
            torch.testing.assert_close(found, expected)
