"""The CUDA kernels of attention on the CPU: their source, compiled for the emulator in tests/emulator."""

import ctypes
import functools
import os
from pathlib import Path

import torch
from emulator.build import compiled

from helpers.pages_case import Pages

DTYPES = {torch.bfloat16: 6, torch.float16: 7, torch.float32: 8}  # csrc/core/dtype.h
ROOT = Path(__file__).resolve().parents[2]
GPUS = ["sm_90", "sm_80", "sm_89", "sm_100"]  # emulator.cpp's


@functools.cache
def library(headers: Path) -> ctypes.CDLL:
    os.environ.pop("PACKING_OPS_SM90", None)  # read once, by the first call
    loaded = ctypes.CDLL(str(compiled(headers, "attention")))
    loaded.emulated_attention.restype = ctypes.c_char_p
    loaded.emulated_plan_size.argtypes = [ctypes.c_int64] * 6
    loaded.emulated_plan_size.restype = ctypes.c_int64
    loaded.emulated_kernels.argtypes = [*[ctypes.c_int64] * 5, ctypes.c_double, *[ctypes.c_int64] * 2]
    loaded.emulated_kernels.restype = loaded.emulated_launched.restype = ctypes.c_char_p
    return loaded


def attention(
    case,
    headers: Path,
    gpu: str,
    *,
    late_copies: bool,
    seed: int,
    planned_for: torch.Tensor | None = None,
    planned_ends: torch.Tensor | None = None,
    backward: bool = True,
    pages: Pages | None = None,
    row_of_key: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """out, lse and every gradient of an attention_case.Case, by the kernels that run on ``gpu``.

    planned_for, planned_ends: other cu_seqlens and visible_end that the plan is made of. Without ``backward`` out and
        lse alone.
    pages: the keys in pages instead, without a backward. row_of_key: k and v are in these rows; dk and dv are of keys.
    """
    backward = backward and pages is None
    window = case.options.get("window_size", (-1, -1))
    causal = case.options.get("causal", True)
    (total_q, heads, dim), (total_k, kv_heads, _) = case.q.shape, case.k.shape
    sizes = [total_q, total_k, len(case.cu_seqlens[0]) - 1, heads, kv_heads, dim, case.v.shape[-1]]
    sizes += [window[0], 0 if causal else window[1], DTYPES[case.q.dtype], GPUS.index(gpu)]
    keys = [case.k.contiguous(), case.v.contiguous()] if pages is None else [pages.k, pages.v]
    sizes += [0, 0, 0] if pages is None else [*pages.k.shape[:2], pages.block_table.shape[1]]
    sizes.append(total_k)
    if pages is not None:
        sizes[1] = pages.k.shape[:2].numel()
    if row_of_key is not None:
        sizes[1] = len(row_of_key)
    lengths_k = case.cu_seqlens[1] if pages is None else pages.seqused_k
    scale = case.options.get("softmax_scale")
    options = [dim**-0.5 if scale is None else scale, case.options.get("softcap", 0.0)]
    lse = torch.empty(heads, total_q)
    dsinks = None if case.sinks is None else torch.empty(heads)
    results = {
        "out": case.q.new_empty(total_q, heads, case.v.shape[-1]),
        "lse": lse,
        "dq": torch.empty_like(case.q),
        "dk": case.k.new_empty(sizes[1], *case.k.shape[1:]),
        "dv": case.v.new_empty(sizes[1], *case.v.shape[1:]),
        "dsinks": dsinks,
    }
    if not backward:
        results.update(dict.fromkeys(("dq", "dk", "dv", "dsinks")))
    dout = case.dout if backward else None
    inputs = [case.q, *keys, dout, case.cu_seqlens[0], lengths_k, case.sinks, case.dlse]
    table = None if pages is None else pages.block_table
    tensors = [
        *inputs,
        *results.values(),
        planned_for,
        case.options.get("visible_end"),
        planned_ends,
        table,
        row_of_key,
    ]
    pointers = (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))
    code = library(headers)
    code.emulator_configure(GPUS.index(gpu), late_copies, seed)
    error = code.emulated_attention((ctypes.c_int64 * len(sizes))(*sizes), (ctypes.c_double * 2)(*options), pointers)
    if error:
        raise RuntimeError(error.decode())
    return {name: value for name, value in results.items() if value is not None}


def kernels(case, headers: Path, gpu: str) -> str:
    """ "forward, backward": the folders of the kernels that would serve a case."""
    (_, heads, dim), kv_heads = case.q.shape, case.k.shape[1]
    code = library(headers)
    code.emulator_configure(GPUS.index(gpu), False, 0)
    softcap = case.options.get("softcap", 0.0)
    sizes = heads, kv_heads, dim, case.v.shape[-1]
    ends = "visible_end" in case.options
    return code.emulated_kernels(DTYPES[case.q.dtype], *sizes, softcap, GPUS.index(gpu), ends).decode()


def launched(headers: Path) -> str:
    """The symbols of the kernels that the last call ran, a line each."""
    return library(headers).emulated_launched().decode()
