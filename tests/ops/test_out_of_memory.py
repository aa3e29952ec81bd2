"""No memory for a result: the error is torch's, its class and its text, on the CPU and on a GPU."""

import pytest
import torch
from helpers import ROOT, copy_of_package, cu_seqlens_of, fresh_process

import packing_ops as po
from packing_ops._runtime import library as _library

# 8 GiB or more each: a result, a copy of an expanded input, a result in the memory order of an expanded one.
CALLS = {
    "result": lambda device: po.position_ids_from_cu_seqlens(cu_seqlens_of([], device), 2**31 - 1),
    "copy": lambda device: po.segment_sum(torch.zeros(1, device=device).expand(2**31 - 1), cu_seqlens_of([], device)),
    "like": lambda device: po.apply_rotary_qk(
        torch.zeros(1, 1, 64, device=device).expand(2**25, 1, 64),
        None,
        *torch.zeros(2, 1, 32, device=device).expand(2, 2**25, 32),
    ),
}
WITHOUT_MEMORY = """
import resource, test_out_of_memory as test
resource.setrlimit(resource.RLIMIT_AS, (int(open("/proc/self/statm").read().split()[0]) * 4096 + (1 << 30),) * 2)
try:
    test.CALLS[{call!r}]("cpu")
except BaseException as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def told(tmp_path, request):
    """By a process that may have 1 GiB more, with the package of that folder."""

    def run(call, folder):
        paths = [folder, request.path.parent, ROOT / "tests"]
        return fresh_process.run("-c", WITHOUT_MEMORY.format(call=call), paths=paths, folder=tmp_path)

    return run


@pytest.mark.parametrize("call", CALLS)
def test_on_the_cpu(call, told):
    text = told(call, _library.PACKAGE.parent)
    assert text.startswith("RuntimeError")
    assert "DefaultCPUAllocator: can't allocate memory: you tried to allocate" in text
    assert "API call failed" not in text


def test_torch_without_its_function(tmp_path, told):
    """It tells the text at least (torch 2.13), or we do."""
    torch_function, torch_text = b"_ZN2at4_ops13empty_strided4call", b"torch_exception_get_what_without_backtrace"
    library = copy_of_package(tmp_path) / "_C.so"
    for name, message in ((torch_function, "memory"), (torch_text, "no memory for a tensor [2147483647]")):
        assert name in library.read_bytes()
        library.write_bytes(library.read_bytes().replace(name, name[:-1] + b"_"))
        text = told("result", tmp_path)
        assert text.startswith("RuntimeError")
        assert message in text
        assert "API call failed" not in text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("call", CALLS)
def test_on_a_gpu(call):
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**30) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried to allocate"):
            CALLS[call]("cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert po.position_ids_from_cu_seqlens(cu_seqlens_of([2], "cuda"), 2).tolist() == [0, 1]
