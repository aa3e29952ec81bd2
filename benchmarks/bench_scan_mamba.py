"""mamba2_scan by itself: python benchmarks/bench_scan_mamba.py [--device cpu|cuda]

The shape is that of a layer of Mamba-2 with 64 heads. floor_of has the fewest bytes and operations of a call: 0.68 GB
and 79 GFLOP forward, 1.09 GB and 232 GFLOP backward for the first shape. A copy of as many bytes is timed beside it.
The peer is the formula of transformers, as it is and under torch.compile, for one document of 4,096 tokens: a longer
one takes it a second. mamba_ssm has no binary on the index and is not run.
"""

import inspect

import torch
from bench_scan import sft_lengths
from harness import Case, fits, run

import packing_ops as po

TOTAL = 32_768


def inputs_of(device, lengths, heads, dims, dtype):
    """As a layer has them: dt, A, D and dt_bias in float32."""
    total, (groups, num_heads), (dim_s, dim) = sum(lengths), heads, dims
    x, dout = (torch.randn(total, num_heads, dim, device=device).to(dtype) for _ in range(2))
    B, C = (torch.randn(total, groups, dim_s, device=device).to(dtype) for _ in range(2))
    dt, dt_bias = torch.randn(total, num_heads, device=device), torch.full((num_heads,), -2.0, device=device)
    A, D = -torch.rand(num_heads, device=device), torch.ones(num_heads, device=device)
    return [x, dt, A, B, C, D, dt_bias], dout, po.PackedMetadata.from_lengths(lengths, device=device)


def floor_of(tokens, heads, dims, element=2):
    """(bytes, floating-point operations) of the forward and of the backward: each tensor read and written once, and the
    products of chunks of 64 tokens."""
    (groups, num_heads), (dim_s, dim), chunk = heads, dims, 64
    rows, keys, gates = tokens * num_heads * dim * element, tokens * groups * dim_s * element, tokens * num_heads * 4
    forward = 2 * rows + 2 * keys + gates
    backward = 3 * rows + 4 * keys + 2 * gates
    with_state, in_chunk = 2 * tokens * num_heads * dim_s * dim, tokens * num_heads * chunk * dim
    scores = tokens * groups * chunk * dim_s
    return {
        "forward": (forward, 2 * with_state + in_chunk + scores),
        "backward": (backward, 5 * with_state + 3 * in_chunk + 2 * num_heads // groups * scores),
    }


def formula():
    """transformers' function without the library that stands in for it, or None."""
    try:
        from transformers.models.mamba2 import modeling_mamba2
    except ImportError:
        return None
    return inspect.unwrap(modeling_mamba2.mamba2_chunk_scan)


def formula_call(scan, tensors, documents):
    """Documents of one length are rows of its batch. In 5.17 it holds tokens * chunk_size * heads * state numbers at
    once.
    """
    x, dt, A, B, C, D, dt_bias = tensors
    x, dt, B, C = (t.unflatten(0, (documents, -1)) for t in (x, dt, B, C))
    return lambda: scan(x, dt, A, B, C, chunk_size=64, D=D, dt_bias=dt_bias, dt_softplus=True)


def cases_of(device, name, lengths, heads, dims, dtype, with_formula=False):
    tensors, dout, metadata = inputs_of(device, lengths, heads, dims, dtype)
    x, dt, A, B, C, D, dt_bias = tensors
    shape = f"T={sum(lengths)} {name} G={heads[0]} H={heads[1]} N={dims[0]} P={dims[1]}"
    forward = {"packing_ops": lambda: po.mamba2_scan(x, dt, A, B, C, metadata, D=D, dt_bias=dt_bias, dt_softplus=True)}
    given = [each.clone().requires_grad_() for each in tensors]
    out, _ = po.mamba2_scan(*given[:5], metadata, D=given[5], dt_bias=given[6], dt_softplus=True)
    backward = {"packing_ops": lambda: torch.autograd.grad(out, given, dout, retain_graph=True)}
    scan = formula() if with_formula else None
    if scan is not None:
        peers = {"torch formula": scan, "torch formula, torch.compile": torch.compile(scan)}
        calls = {name: formula_call(peer, tensors, len(lengths)) for name, peer in peers.items()}
        forward |= {name: call for name, call in calls.items() if fits(call)}
    floor = floor_of(sum(lengths), heads, dims, x.element_size())
    return [
        Case(op, shape, str(dtype)[6:], providers, bytes=floor[op][0], runs=11)
        for op, providers in (("forward", forward), ("backward", backward))
    ]


def cases(device):
    if device == "cpu":
        yield from cases_of(device, "1 document", [256], (1, 2), (64, 64), torch.float32, True)
        return
    sft, heads, dims = sft_lengths(TOTAL), (8, 64), (128, 64)
    for name, lengths in (("1 document", [TOTAL]), ("8 documents", [TOTAL // 8] * 8), (f"{len(sft)} documents", sft)):
        yield from cases_of(device, name, lengths, heads, dims, torch.bfloat16)
    yield from cases_of(device, "1 document", [4096], heads, dims, torch.bfloat16, with_formula=True)
    for groups in (1, 64):
        yield from cases_of(device, "8 documents", [TOTAL // 8] * 8, (groups, 64), dims, torch.bfloat16)
    for dims in ((16, 64), (64, 64), (256, 64), (128, 128)):
        yield from cases_of(device, "8 documents", [TOTAL // 16] * 8, heads, dims, torch.bfloat16)
    yield from cases_of(device, "8 documents, float32", [TOTAL // 16] * 8, heads, (128, 64), torch.float32)


if __name__ == "__main__":
    run("scan_mamba", cases)
