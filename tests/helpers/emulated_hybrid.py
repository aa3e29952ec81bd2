"""The CUDA kernels of convolutions and scans on the CPU, as tests/helpers/emulated.py has those of attention."""

import ctypes
import functools
from pathlib import Path

import torch
from emulator.build import compiled

from helpers.emulated import DTYPES, GPUS


@functools.cache
def library(headers: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(compiled(headers, "hybrid")))
    for call in (loaded.emulated_conv, loaded.emulated_scan, loaded.emulated_mamba, loaded.emulated_gate):
        call.restype = ctypes.c_char_p
    loaded.emulated_scan.argtypes = [ctypes.c_void_p, ctypes.c_double, ctypes.c_void_p]
    loaded.emulated_mamba.argtypes = [ctypes.c_void_p, ctypes.c_double, ctypes.c_double, ctypes.c_void_p]
    return loaded


schedule = [True, 0]  # whether copies arrive late, and the seed of the threads' turns


def _run(headers: Path, gpu: str, call: str, sizes: list[int], options: list[float], tensors: list) -> None:
    code = library(headers)
    code.emulator_configure(GPUS.index(gpu), *schedule)
    numbers = (ctypes.c_int64 * len(sizes))(*map(int, sizes))
    pointers = (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))
    error = getattr(code, call)(numbers, *options, pointers)
    if error:
        raise RuntimeError(error.decode())


def like(*tensors):
    """Memory for their gradients, filled with what must not stay there."""
    return [None if t is None else torch.full_like(t, torch.nan) for t in tensors]


def conv(headers: Path, x, weight, bias, cu_seqlens, initial_state, dout, dfinal_state, *, silu: bool, gpu="sm_90"):
    """out, final_state, and the gradients of x, weight, bias and initial_state."""
    documents, (channels, width) = len(cu_seqlens) - 1, weight.shape
    results = [*like(dout, dfinal_state, x, weight, bias, initial_state)]
    sizes = [x.shape[0], documents, channels, width, silu, DTYPES[x.dtype]]
    _run(
        headers,
        gpu,
        "emulated_conv",
        sizes,
        [],
        [cu_seqlens, x, weight, bias, initial_state, dout, dfinal_state, *results],
    )
    return results


def scan(
    headers: Path,
    q,
    k,
    v,
    g,
    beta,
    cu_seqlens,
    initial_state,
    dout,
    dfinal_state,
    *,
    l2norm: bool,
    scale: float,
    gpu="sm_90",
):
    """out, final_state, and the gradients of q, k, v, g, beta and initial_state; without dout only the first two."""
    documents, (total, k_heads, dim), (_, heads, dim_v) = len(cu_seqlens) - 1, q.shape, v.shape
    final_state = q.new_full((documents, heads, dim, dim_v), torch.nan, dtype=torch.float32)
    results = [*like(v), final_state, *(like(q, k, v, g, beta, initial_state) if dout is not None else [None] * 6)]
    sizes = [total, documents, k_heads, heads, dim, dim_v, l2norm, DTYPES[q.dtype]]
    inputs = [cu_seqlens, q, k, v, g, beta, initial_state, dout, dfinal_state]
    _run(headers, gpu, "emulated_scan", sizes, [scale], [*inputs, *results])
    return results


def mamba(headers: Path, tensors: dict, cu_seqlens, dout, dfinal_state, *, softplus: bool, limit, gpu="sm_90"):
    """{"out", "final_state" and names of the tensors that were given: its gradient}; without dout the first two
    alone.
    """
    x, dt, _, b, _, _, z, _, initial_state = tensors.values()
    given = [t for name, t in tensors.items() if name != "z"]
    documents, (total, heads, dim), (_, groups, dim_s) = len(cu_seqlens) - 1, x.shape, b.shape
    final_state = dt.new_full((documents, heads, dim, dim_s), torch.nan)
    gradients = like(x, dt, dt, b, b, dt, initial_state) if dout is not None else [None] * 7
    sizes = [total, documents, groups, heads, dim_s, dim, softplus, DTYPES[x.dtype]]
    (out,) = like(x)

    def run(dout):
        inputs = [cu_seqlens, *given, dout, dfinal_state]
        _run(headers, gpu, "emulated_mamba", sizes, [*limit], [*inputs, out, final_state, *gradients])

    def gated(dout, *results):
        sizes = [total, documents, heads, dim, DTYPES[x.dtype]]
        _run(headers, gpu, "emulated_gate", sizes, [], [cu_seqlens, out, z, dout, *results])

    found, dz = {"out": out, "final_state": final_state}, None
    if z is None or dout is None:
        run(dout)
    else:
        run(None)
        dscanned, dz = like(x, z)
        gated(dout, None, dscanned, dz)
        run(dscanned)
    if z is not None:
        (found["out"],) = like(x)
        gated(None, found["out"], None, None)
    if dout is None:
        return found
    dx, ddt, to_da, db, dc, to_dd, dinitial = gradients
    of = [dx, ddt, to_da.sum(0), db, dc, to_dd.sum(0), dz, ddt.sum(0), dinitial]
    return found | {name: t for (name, given), t in zip(tensors.items(), of, strict=True) if given is not None}
