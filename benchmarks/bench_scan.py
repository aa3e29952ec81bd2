"""python benchmarks/bench_scan.py [--device cpu|cuda]"""

import json
from pathlib import Path

import torch
from harness import Case, run

import packing_ops as po
from packing_ops.reference import scan as reference

SFT = json.loads((Path(__file__).parent / "workloads.json").read_text())["workloads"]["sft"]


def sft_lengths(total):
    """The first documents of the workload, and a last one that fills the row."""
    lengths = []
    while sum(lengths) + SFT[len(lengths)] <= total:
        lengths.append(SFT[len(lengths)])
    return [*lengths, total - sum(lengths)]


def inputs_of(device, lengths, heads, dim, dtype):
    """As a layer has them: k and q in the dtype, g and beta in float32."""
    total, (k_heads, v_heads) = sum(lengths), heads
    q, k = (torch.randn(total, k_heads, dim, device=device).to(dtype) for _ in range(2))
    v, dout = (torch.randn(total, v_heads, dim, device=device).to(dtype) for _ in range(2))
    g, beta = -0.1 * torch.rand(total, v_heads, device=device), torch.rand(total, v_heads, device=device)
    return [q, k, v, g, beta], dout, po.PackedMetadata.from_lengths(lengths, device=device)


def peer():
    """flash-linear-attention's op, where it is installed and serves this GPU."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except Exception:  # it fails in as many ways as there are versions of Triton
        return None
    return chunk_gated_delta_rule


def fla_call(rule, tensors, metadata):
    given = [t[None].requires_grad_() for t in tensors]
    return given, lambda: rule(*given, cu_seqlens=metadata.cu_seqlens.long(), use_qk_l2norm_in_kernel=True)[0]


def runs(call):
    try:
        call()
    except Exception:
        return False
    return True


def cases_of(device, name, lengths, heads, dim, dtype):
    tensors, dout, metadata = inputs_of(device, lengths, heads, dim, dtype)
    shape = f"T={sum(lengths)} {name} H={heads[0]}/{heads[1]} D={dim}"
    options = metadata.cu_seqlens, None, dim**-0.5, True
    forward = {"packing_ops": lambda: po.gated_delta_rule(*tensors, metadata, use_qk_l2norm=True)}
    backward = {"packing_ops": lambda: torch.ops.packing_ops.gated_delta_rule_backward(dout, None, *tensors, *options)}
    if len(lengths) < 10:  # it loops over chunks and documents
        cu_seqlens = metadata.cu_seqlens.cpu()
        forward["torch formula in chunks"] = lambda: reference.gated_delta_rule(
            *tensors, cu_seqlens, use_qk_l2norm=True, chunk=64
        )
    rule = peer() if device == "cuda" else None
    if rule is not None:
        given, call = fla_call(rule, tensors, metadata)
        if runs(call):
            forward["flash-linear-attention"] = call
            out = call()
            theirs = lambda: torch.autograd.grad(out, given, dout[None], retain_graph=True)  # noqa: E731
            if runs(theirs):
                backward["flash-linear-attention"] = theirs
    return [
        Case(op, shape, str(dtype)[6:], providers, runs=11)
        for op, providers in (("forward", forward), ("backward", backward))
    ]


def cases(device):
    if device == "cpu":
        yield from cases_of(device, "1 document", [256], (1, 2), 64, torch.float32)
        return
    total, heads = 32_768, (16, 32)
    sft = sft_lengths(total)
    for name, lengths in (("1 document", [total]), ("8 documents", [total // 8] * 8), (f"{len(sft)} documents", sft)):
        yield from cases_of(device, name, lengths, heads, 128, torch.bfloat16)
    yield from cases_of(device, "8 documents", [total // 8] * 8, (16, 16), 64, torch.bfloat16)
    yield from cases_of(device, "8 documents", [total // 16] * 8, (8, 8), 256, torch.bfloat16)
    yield from cases_of(device, "8 documents", [total // 16] * 8, heads, 128, torch.float32)


if __name__ == "__main__":
    run("scan", cases)
