"""Fixtures that every test file shares."""

import gc
import os
import sys

# Before torch: its threads would spin while they wait, and where several processes share the cores that takes most of
# the time of all of them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Also in scripts: the compiler's workers would import torch for a few kernels.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Before torch's first product on a GPU, which reads it once: the tests of invariant() need it where torch has no
# setter.
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")

from helpers.gpus import rotated, slow_first

if {"CUDA_VISIBLE_DEVICES", "PYTEST_XDIST_WORKER"} <= os.environ.keys():  # before torch looks
    os.environ["CUDA_VISIBLE_DEVICES"] = rotated(os.environ["CUDA_VISIBLE_DEVICES"], os.environ["PYTEST_XDIST_WORKER"])

import pytest
import torch
from helpers import compiler, fresh_process, gpu_asserts
from hypothesis import HealthCheck, settings

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

# Shared machines stall; a deadline would fail a right answer.
settings.register_profile(
    "packing_ops",
    deadline=None,
    max_examples=30,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("packing_ops")

every_collection = gc.collect


def collection_of_tests(*generation: int) -> int:
    """Collect garbage, though not for a library, without a GPU: Trainer and continuous batching collect once or more a
    run, which visits all that earlier tests have left.
    """
    caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
    return 0 if caller in ("accelerate", "transformers") else every_collection(*generation)


if not torch.cuda.is_available():  # whose memory they free
    gc.collect = collection_of_tests

for absent in (torch.cuda, torch.mtia, torch.xpu):  # a seed would wait there with a traceback of all pytest's frames
    if not absent.is_available():
        absent.manual_seed_all = lambda seed: None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """In the process that starts xdist's workers: the server of fresh_process is one for all."""
    with fresh_process.silence():
        node.workerinput["fork_server"] = fresh_process.shared_server()


def pytest_configure(config):
    shared = getattr(config, "workerinput", {}).get("fork_server")  # none where xdist's process has no such file
    if shared:
        fresh_process.join_server(shared)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """No garbage collection during imports, nor later of the million objects that they leave: transformers and TRL
    collect often.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        compiler.quick()
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 10, 20)  # full collections are rare: much of what tests make stays too
        gc.enable()


@pytest.hookimpl(trylast=True)  # behind -k and -m
def pytest_collection_modifyitems(items):
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items[:] = slow_first(items, [item for item in items if item.get_closest_marker("slow")], workers)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    return gpu_asserts.runs_alone(pyfuncitem) or None


lost_gpu = gpu_asserts.LostGpu()


@pytest.fixture(params=DEVICES)
def device(request):
    """Every device that this machine has: the same test runs on each."""
    return request.param


@pytest.fixture(autouse=True)
def seed(request):
    lost_gpu.refuse_others()
    torch.manual_seed(0)
    yield
    lost_gpu.look(request.node.nodeid)


@pytest.fixture(autouse=True)
def values_checked_in_the_call(monkeypatch):
    """CUDA values are checked without a synchronisation and raised later; tests want the error where it happens."""
    monkeypatch.setenv("PACKING_OPS_CHECK", "1")


@pytest.fixture
def one_gpu(monkeypatch):
    """Trainers use one GPU: of several in a process transformers' make a DataParallel, which splits batches, and TRL's
    spread a model that they load over all.
    """
    count = min(torch.cuda.device_count(), 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.fixture
def fresh_compile():
    """Nothing compiled, and torch's limit of graphs, which transformers' generate raises where it compiles."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield
    torch._dynamo.reset()
