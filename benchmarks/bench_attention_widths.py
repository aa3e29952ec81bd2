"""python benchmarks/bench_attention_widths.py --device cuda: v of another head_dim than q and k, and head_dim 512

192 / 128 beside the same call with v padded to 192 columns and out cut, as it is without kernels for two widths; 512
beside SDPA under the mask of all pairs, on fewer tokens, which that mask allows."""

import itertools

import attention_peers as peers
import torch
import torch.nn.functional as F
from bench_attention import WORKLOADS, left_out, peer_calls
from harness import Case, run

import packing_ops as po

PADDED = "packing_ops, v padded"


def rows_of(lengths, heads, dims, device):
    """Batch of documents of these lengths, bfloat16; dims = (head_dim, head_dim of v)."""
    generator = torch.Generator(device).manual_seed(0)
    counts = zip((heads[0], heads[1], heads[1], heads[0]), (dims[0], dims[0], dims[1], dims[1]), strict=True)
    shapes = [(sum(lengths), count, dim) for count, dim in counts]
    rows = [torch.randn(shape, generator=generator, device=device).bfloat16() for shape in shapes]
    return peers.Batch(*rows, po.cu_seqlens_from_lengths(lengths).to(device), max(lengths))


def our_calls(batch, dims):
    """Forward and backward of the op; v is padded where dims name more columns than it has."""
    q, k, v, dout, cu_seqlens, _ = batch
    sizes = {"total_q": len(q), "num_heads": q.shape[1], "num_kv_heads": k.shape[1]}
    plan = po.attention_plan(cu_seqlens, **sizes, head_dim=dims[0], head_dim_v=dims[1])
    ops, options = torch.ops.packing_ops, (cu_seqlens, cu_seqlens, None, True, None, -1, -1, 0.0, plan)
    width, pad = v.shape[-1], (0, dims[1] - v.shape[-1])
    if pad == (0, 0):
        out, lse = ops.varlen_attention(q, k, v, *options)
        return peers.Calls(
            lambda: ops.varlen_attention(q, k, v, *options),
            lambda: ops.varlen_attention_backward(dout, None, q, k, v, out, lse, *options),
        )
    kept = F.pad(v, pad)
    out, lse = ops.varlen_attention(q, k, kept, *options)

    def backward():
        dq, dk, dv, _ = ops.varlen_attention_backward(F.pad(dout, pad), None, q, k, kept, out, lse, *options)
        return dq, dk, dv[..., :width]

    return peers.Calls(lambda: ops.varlen_attention(q, k, F.pad(v, pad), *options)[0][..., :width], backward)


def width_cases(name, lengths, heads, dims, with_peers=(), device="cuda"):
    batch = rows_of(lengths, heads, dims, device)
    ours = our_calls(batch, dims)
    shape = f"{name}: T={sum(lengths)} docs={len(lengths)} heads={heads[0]}/{heads[1]} D={dims[0]}/{dims[1]} causal"
    forward, backward = {"packing_ops": ours.forward}, {"packing_ops": ours.backward}
    if dims[0] != dims[1]:
        peer_calls(lambda batch: [(PADDED, our_calls(batch, (dims[0], dims[0])))], batch, forward, backward, shape)
    for make in with_peers:
        peer_calls(make, batch, forward, backward, shape)
    yield Case("varlen_attention", shape, "bfloat16", forward, runs=7)
    yield Case("varlen_attention_backward", shape, "bfloat16", backward, runs=7)


def first_tokens(lengths, total):
    """The documents that fit into so many tokens."""
    return [length for length, end in zip(lengths, itertools.accumulate(lengths), strict=True) if end <= total]


def cases(device):
    if device == "cpu":
        yield from width_cases("small", [40, 9], (2, 1), (48, 32), (peers.sdpa_mask,), device)
        return
    for name in ("chat", "mid4k", "long16k"):
        yield from width_cases(name, WORKLOADS[name], (16, 16), (192, 128), (peers.flash_3, peers.flex))
    yield from width_cases("chat", WORKLOADS["chat"], (32, 8), (96, 64))
    chat = first_tokens(WORKLOADS["chat"], 16_384)
    yield from width_cases("chat, fewer tokens", chat, (16, 4), (512, 512), (peers.sdpa_mask, peers.flex))
    yield from width_cases("one document", [4096], (16, 4), (512, 512), (peers.sdpa_mask, peers.flex))
    yield from width_cases("chat", WORKLOADS["chat"], (16, 4), (512, 512), (peers.flex,))


if __name__ == "__main__":
    run("attention_widths", cases)
    if left_out:
        print("\n".join(["left out:", *left_out]))
