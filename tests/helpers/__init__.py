"""What tests of several families need: lengths, packed rows, comparisons."""

import contextlib
import gc
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]

# Lengths with the edges that kernels trip over.
lengths_strategy = st.lists(
    st.one_of(st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65]), st.integers(0, 200)), min_size=0, max_size=12
)

MASK_DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32]
MASK_DTYPES += [torch.float64, torch.bfloat16, torch.float16]


def cu_seqlens_of(lengths, device="cpu"):
    """int32 cumulated lengths, by plain Python."""
    cu_seqlens = [0]
    for length in lengths:
        cu_seqlens.append(cu_seqlens[-1] + length)
    return torch.tensor(cu_seqlens, dtype=torch.int32, device=device)


def mask_of(kind, batch, seqlen, device="cpu"):
    """int64 mask: padding right, left, on both sides, anywhere; some rows may be all padding."""
    column = torch.arange(seqlen)[None]
    first, second = torch.randint(0, seqlen + 1, (2, batch, 1)).sort(dim=0).values
    real = {
        "right": column < first,
        "left": column >= first,
        "both": (column >= first) & (column < second),
        "holes": torch.rand(batch, seqlen) < 0.6,
    }[kind]
    return real.to(device, torch.int64)


masks = st.tuples(
    st.sampled_from(["right", "left", "both", "holes"]), st.integers(0, 5), st.integers(0, 40), st.integers(0, 999)
)


def drawn_mask(drawn, device):
    kind, batch, seqlen, seed = drawn
    torch.manual_seed(seed)
    return mask_of(kind, batch, seqlen, device)


def non_contiguous(tensor):
    """The same values with a stride of 2 in the last dimension."""
    return torch.stack([tensor, torch.zeros_like(tensor)], dim=-1)[..., 0]


def captured(call, before=None):
    """(a CUDA graph of ``call``, what its replays write). ``before``, or the call, runs once on another stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        (before or call)()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return graph, found


def assert_same(actual, expected):
    """Bit-equal, with dtype, shape and device."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_error_within(actual, torch_low, oracle, factor=2.0, floor=0.0):
    """Against an fp64 oracle, at most ``factor`` times the error that torch itself makes in that dtype."""
    oracle = oracle.double()
    ours = (actual.double() - oracle).abs().max().item() if actual.numel() else 0.0
    theirs = (torch_low.double() - oracle).abs().max().item() if actual.numel() else 0.0
    assert ours == ours, "NaN in the result"
    assert ours <= factor * theirs + floor, f"error {ours:.3e}, torch's own {theirs:.3e}"


BY_ROWS = "packing_ops::mm_by_rows_"


def rows_of_products(call):
    """The number of rows of each product that call() runs on the CPU, forward and backward: 16 for mm_by_rows_.
    Those with one term, which add nothing up, are left out: transformers 5.17 makes RoPE's angles by one.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as found:
        call()
    first = {
        "aten::mm": 0,
        "aten::bmm": 0,
        "aten::addmm": 1,
        "aten::addmm_": 1,
        "aten::baddbmm": 1,
        "aten::_grouped_mm": 0,
    }
    events = found.profiler.kineto_results.events()  # found.events() makes a tree of them, which takes seconds
    names = {*first, BY_ROWS}
    shapes = [(name, event.shapes()[first.get(name, 1)]) for event in events if (name := event.name()) in names]
    return [16 if name == BY_ROWS else shape[-2] for name, shape in shapes if shape[-1] > 1]


def products_by_pairs(monkeypatch):
    """torch.mm, torch.addmm and mm_by_rows_ as oneDNN has them for half types on a CPU with AMX: the last term of an
    odd row is paired with the first of the row after it, times 0.
    """

    def by_pairs(real, first):
        def product(*given, **named):
            found, x = real(*given, **named), given[first]
            if x.is_cpu and x.element_size() == 2 and x.shape[1] % 2:
                found[:-1] += 0 * x[1:, :1]
            return found

        return product

    for name, first in (("mm", 0), ("addmm", 1)):
        monkeypatch.setattr(torch, name, by_pairs(getattr(torch, name), first))
    from packing_ops._runtime import gate  # not for the tests that import packing_ops themselves

    by_rows = gate.mm_by_rows_
    monkeypatch.setattr(gate, "mm_by_rows_", by_pairs(lambda out, *rest: (by_rows(out, *rest), out)[1], 1))


def cpu_seconds(call, runs=3):
    """The least time of this thread that ``call`` takes: compare it with another call's, never with a number."""
    times = []
    for _ in range(runs):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)


@contextlib.contextmanager
def only_generation_0():
    """Put what the block makes into generation 0, with nothing else: ``gc.get_objects(0)`` and ``gc.collect(0)`` need
    not visit the million objects of other tests.
    """
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def copy_of_package(folder):
    """packing_ops and its library in another folder."""
    package = folder / "packing_ops"
    shutil.copytree(ROOT / "packing_ops", package, ignore=shutil.ignore_patterns("__pycache__"))
    return package


def has_every_instance():
    """Whether the library has the attention kernels of GPUs with less shared memory than those it was built for."""
    import packing_ops  # not for the scripts that need none of it

    return " for " not in packing_ops.build_info()["attention_kernels"]


def pytest_of_its_own(tests, selected, before=(), **environment):
    """What another pytest process printed, up to its first failure; ``before``: a command that runs it."""
    if "PACKING_OPS_SHARED_MEMORY" in environment and not has_every_instance():
        pytest.skip("the library was built without PACKING_OPS_EVERY_INSTANCE=1")
    command = [*before, sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-k", selected, *tests]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout
