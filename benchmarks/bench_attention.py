"""python benchmarks/bench_attention.py [--device cpu|cuda]"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from harness import Case, commit, device_name, run, write_csv

import packing_ops as po


def packed(lengths, heads, dim, device, dtype=torch.float32):
    """q, k, v, dout and cu_seqlens of documents of these lengths; heads = (num_q_heads, num_kv_heads)."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(sum(lengths), count, dim) for count in (heads[0], heads[1], heads[1], heads[0])]
    tensors = [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]
    q, k, v = (tensor.requires_grad_() for tensor in tensors[:3])
    return q, k, v, tensors[3], po.cu_seqlens_from_lengths(lengths).to(device)


def sdpa_loop(q, k, v, lengths):
    """One call per document. split, not slices: the backward of a slice would fill a whole row with zeros each time."""
    outs = []
    for rows in zip(*(t.split(lengths) for t in (q, k, v)), strict=True):
        rows = (t.transpose(0, 1)[None] for t in rows)
        outs.append(F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(outs)


def sdpa_block_mask(q, k, v, mask):
    rows = (t.transpose(0, 1)[None] for t in (q, k, v))
    return F.scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def case(op, lengths, heads, dim, device, dtype=torch.float32, *, backward=True, block_mask=False, runs=21):
    q, k, v, dout, cu_seqlens = packed(lengths, heads, dim, device, dtype)
    calls = {"packing_ops": lambda: po.varlen_attention(q, k, v, cu_seqlens)}
    if block_mask:
        mask = po.block_causal_mask(cu_seqlens, q.shape[0])
        calls["torch SDPA block mask"] = lambda: sdpa_block_mask(q, k, v, mask)
    else:
        calls["torch SDPA loop"] = lambda: sdpa_loop(q, k, v, lengths)

    def timed(call):
        if backward:
            return lambda: torch.autograd.grad(call(), (q, k, v), dout)
        return torch.no_grad()(call)

    shape = f"T={sum(lengths)} docs={len(lengths)} heads={heads[0]}/{heads[1]} D={dim}"
    name = str(dtype).removeprefix("torch.")
    return Case(op, shape, name, {provider: timed(call) for provider, call in calls.items()}, runs=runs)


def ragged(count, median=200):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp(torch.randn(count, generator=generator) * 0.9) * median
    return [max(1, int(size)) for size in sizes]


# --- CUDA: the ops themselves, forward and backward apart, beside torch's built-in FlashAttention-2 ---

WORKLOADS = json.loads((Path(__file__).parent / "workloads.json").read_text())["workloads"]
PEER = "torch FlashAttention-2"


def flex_attention_calls(q, k, v, dout, cu_seqlens):
    """FlexAttention compiled with a document mask: forward and backward."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    document = po.seq_idx_from_cu_seqlens(cu_seqlens, len(q))

    def sees(batch, head, row, key):
        return (document[row] == document[key]) & (row >= key)

    mask = torch.compile(create_block_mask)(sees, None, None, len(q), len(k), device="cuda")
    compiled = torch.compile(flex_attention)
    rows = [t.detach().transpose(0, 1)[None].requires_grad_() for t in (q, k, v)]
    out, dout = compiled(*rows, block_mask=mask, enable_gqa=True), dout.transpose(0, 1)[None]
    return (
        torch.no_grad()(lambda: compiled(*rows, block_mask=mask, enable_gqa=True)),
        lambda: torch.autograd.grad(out, rows, dout, retain_graph=True),
    )


def sdpa_mask_calls(q, k, v, dout, cu_seqlens):
    """torch's SDPA under the mask of all pairs, which fits short rows only."""
    mask = po.block_causal_mask(cu_seqlens, len(q))
    tensors = [t.detach().requires_grad_() for t in (q, k, v)]
    out = sdpa_block_mask(*tensors, mask)
    return (
        torch.no_grad()(lambda: sdpa_block_mask(*tensors, mask)),
        lambda: torch.autograd.grad(out, tensors, dout, retain_graph=True),
    )


def check_same(ours, theirs):
    """No figure of a wrong result."""
    for mine, other in zip(ours, theirs, strict=False):
        error = (mine.float() - other.float()).norm() / other.float().norm()
        if not error < 0.02:
            sys.exit(f"results apart by {error:.3f}")


def op_cases(name, lengths, heads, dim, *, peer_fits=True, others=None):
    q, k, v, dout, cu_seqlens = packed(lengths, heads, dim, "cuda", torch.bfloat16)
    q, k, v = q.detach(), k.detach(), v.detach()
    total, longest = sum(lengths), max(lengths)
    plan = po.attention_plan(cu_seqlens, total_q=total, num_heads=heads[0], num_kv_heads=heads[1], head_dim=dim)
    ops, options = torch.ops.packing_ops, (True, None, -1, -1, 0.0, plan)
    documents = (cu_seqlens, cu_seqlens)
    out, lse = ops.varlen_attention(q, k, v, *documents, None, *options)
    shape = f"{name}: T={total} docs={len(lengths)} heads={heads[0]}/{heads[1]} D={dim} causal"
    forward = {"packing_ops": lambda: ops.varlen_attention(q, k, v, *documents, None, *options)}
    backward = {
        "packing_ops": lambda: ops.varlen_attention_backward(dout, None, q, k, v, out, lse, *documents, None, *options)
    }
    if peer_fits:
        peer = (*documents, longest, longest, 0.0, True)
        peer_out, peer_lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(q, k, v, *peer, False)
        check_same([out], [peer_out])
        forward[PEER] = lambda: torch.ops.aten._flash_attention_forward(q, k, v, *peer, False)
        backward[PEER] = lambda: torch.ops.aten._flash_attention_backward(
            dout, q, k, v, peer_out, peer_lse, *peer, seed, offset
        )
        check_same(backward["packing_ops"](), backward[PEER]())
    for provider, calls in (others or {}).items():
        forward[provider], backward[provider] = calls(q, k, v, dout, cu_seqlens)
    yield Case("varlen_attention", shape, "bfloat16", forward, runs=7)
    yield Case("varlen_attention_backward", shape, "bfloat16", backward, runs=7)


def cuda_cases():
    """One workload after the other, so that only one is in memory."""
    for name, lengths in WORKLOADS.items():
        yield from op_cases(name, lengths, (32, 8), 128, others={"FlexAttention": flex_attention_calls})
    for name in ("short", "sft", "mid4k"):
        yield from op_cases(name, WORKLOADS[name], (16, 16), 128)
        yield from op_cases(name, WORKLOADS[name], (32, 8), 64)
        yield from op_cases(name, WORKLOADS[name], (16, 4), 256)
    yield from op_cases("tiny", [100, 156, 200, 56], (32, 8), 128, others={"torch SDPA block mask": sdpa_mask_calls})
    # FlashAttention-2 pads its float32 sums to 128 rows per document, which does not fit any GPU here.
    yield from op_cases("one token", [1] * 65_536, (32, 8), 128, peer_fits=False)


def extra_bytes(call):
    """The most memory that a call held at a time beyond what was there before and what it returned."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    returned = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    held = torch.cuda.memory_allocated() - before
    del returned
    return peak - before - held


def memory_rows():
    """Extra memory in bytes per element of q."""
    rows = []
    for name, lengths in WORKLOADS.items():
        for case in op_cases(name, lengths, (32, 8), 128):
            for provider, call in case.providers.items():
                call()
                rows.append({
                    "op": case.op, "shape": case.shape, "provider": provider,
                    "extra_bytes_per_q_element": f"{extra_bytes(call) / (sum(lengths) * 32 * 128):.3f}",
                    "device": device_name("cuda"), "torch": torch.__version__, "commit": commit(),
                })  # fmt: skip
    return rows


def profiled_calls():
    """For profile_gpu.py."""
    return {
        f"{op} {name}": lambda op=op, name=name: next(
            case for case in op_cases(name, WORKLOADS[name], (32, 8), 128, peer_fits=False) if case.op == op
        ).providers["packing_ops"]
        for name in ("short", "sft", "mid4k")
        for op in ("varlen_attention", "varlen_attention_backward")
    }


def cases(device):
    if device == "cuda":
        return cuda_cases()
    even, forward, both = [256] * 32, "attention forward", "attention forward + backward"
    return [
        case(forward, even, (4, 4), 64, device, backward=False),
        case(both, even, (4, 4), 64, device),
        case(both, even, (4, 4), 64, device, block_mask=True, runs=3),
        case(both, even, (8, 2), 64, device, runs=11),
        case(both, even, (4, 4), 128, device, runs=11),
        case(both, [32] * 256, (4, 4), 64, device, runs=11),
        case(both, ragged(40), (4, 4), 64, device, runs=11),
        case(both, [2048] * 2, (4, 4), 64, device, runs=5),
        case(both, even, (4, 4), 64, device, torch.bfloat16, runs=5),
        case("attention forward (call overhead)", [3, 5], (2, 2), 16, device, backward=False),
    ]


if __name__ == "__main__":
    arguments = run("attention", cases)
    if arguments.device == "cuda":
        write_csv(arguments.out / "attention-memory_cuda.csv", memory_rows())
