"""Tests that lose their process's GPU: what is said of it."""

import os
import types

import pytest
import torch
from helpers import gpu_asserts


@pytest.fixture
def gpu(monkeypatch):
    """Its errors, as torch would raise them of a GPU that does not answer."""
    errors = []

    def synchronize():
        if errors:
            raise RuntimeError(errors[-1])

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return errors


def test_later_tests_name_the_one_that_lost_it(gpu):
    lost = gpu_asserts.LostGpu()
    lost.look("first")
    lost.refuse_others()
    gpu.append("CUDA error: device-side assert triggered")
    with pytest.raises(pytest.fail.Exception, match="lost its GPU in second: CUDA error: device-side assert triggered"):
        lost.look("second")
    lost.look("third")
    with pytest.raises(pytest.fail.Exception, match="lost its GPU in an earlier test, second"):
        lost.refuse_others()


def test_what_the_gpu_prints_is_the_refusal(gpu, capfd):
    with gpu_asserts.refused("rows: expected 4", capfd):
        os.write(2, b"kernel.cu:109: Assertion `rows: expected 4, got 5` failed.\n")
        gpu.append("CUDA error: device-side assert triggered")
    with pytest.raises(AssertionError), gpu_asserts.refused("rows: expected 4", capfd):
        os.write(2, b"kernel.cu:109: Assertion `index out of bounds` failed.\n")
    with gpu_asserts.refused("rows: expected 4", capfd):
        os.write(2, b"kernel.cu:109: Assertion `rows: expected 4, got 5` failed.\n")
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    with gpu_asserts.refused("rows: expected 4", capfd):
        raise ValueError("rows: expected 4, got 5")


def item(nodeid, device, *marks):
    params = types.SimpleNamespace(params={"device": device})
    return types.SimpleNamespace(nodeid=nodeid, callspec=params, get_closest_marker=lambda name: name in marks or None)


def test_a_marked_test_of_the_gpu_runs_alone(monkeypatch):
    one = "tests/project/test_gpu_asserts.py::test_what_the_gpu_prints_is_the_refusal"
    assert not gpu_asserts.runs_alone(item(one, "cpu", "asserts_on_gpu"))
    assert not gpu_asserts.runs_alone(item(one, "cuda"))
    assert gpu_asserts.runs_alone(item(one, "cuda", "asserts_on_gpu"))
    failed = types.SimpleNamespace(stdout="1 failed", stderr="")
    monkeypatch.setattr(gpu_asserts.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(AssertionError, match="1 failed"):
        gpu_asserts.runs_alone(item(one, "cuda", "asserts_on_gpu"))
    monkeypatch.setenv("PACKING_OPS_TEST_ALONE", "1")
    assert not gpu_asserts.runs_alone(item(one, "cuda", "asserts_on_gpu"))
