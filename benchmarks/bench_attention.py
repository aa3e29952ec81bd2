"""python benchmarks/bench_attention.py [--device cpu|cuda]"""

import json
from pathlib import Path

import attention_peers as peers
import torch
import torch.nn.functional as F
from harness import Case, measured_on, run, write_csv

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


def case(op, lengths, heads, dim, device, dtype=torch.float32, *, backward=True, block_mask=False, runs=21):
    q, k, v, dout, cu_seqlens = packed(lengths, heads, dim, device, dtype)
    calls = {"packing_ops": lambda: po.varlen_attention(q, k, v, cu_seqlens)}
    if block_mask:
        mask = po.block_causal_mask(cu_seqlens, q.shape[0])
        calls["torch SDPA block mask"] = lambda: peers.sdpa_block_mask(q, k, v, mask)
    else:
        calls["plain loop of torch SDPA"] = lambda: sdpa_loop(q, k, v, lengths)

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


# --- CUDA: the ops themselves, forward and backward apart, beside those of attention_peers.py ---

WORKLOADS = json.loads((Path(__file__).parent / "workloads.json").read_text())["workloads"]
FLASH = (peers.flash_2, peers.flash_3, peers.flash_4)
left_out = []  # peers that cannot run a case, or whose results are others


def check_same(mine, others) -> None:
    """No figure of a wrong result."""
    for ours, other in zip(mine, others, strict=False):
        error = float((ours.float() - other.float()).norm() / other.float().norm())
        if not error < 0.02:
            raise ValueError(f"results apart by {error:.3f}")


def peer_calls(make, batch: peers.Batch, forward: dict, backward: dict, shape: str) -> None:
    """Adds what ``make`` gives to the providers, if its results are ours."""
    try:
        for name, calls in make(batch):
            if calls.forward:
                check_same([peers.out_of(forward["packing_ops"]())], [peers.out_of(calls.forward())])
            if calls.backward:
                check_same(backward["packing_ops"](), calls.backward())
            forward.update(calls.more | ({name: calls.forward} if calls.forward else {}))
            backward.update({name: calls.backward} if calls.backward else {})
    except Exception as error:  # one peer that cannot run a case says nothing about the others
        left_out.append(f"{make.__name__} in {shape}: {type(error).__name__}: {str(error)[:300]}")
        print(left_out[-1], flush=True)


def op_cases(name, lengths, heads, dim, with_peers=FLASH, device="cuda"):
    q, k, v, dout, cu_seqlens = packed(lengths, heads, dim, device, torch.bfloat16)
    batch = peers.Batch(q.detach(), k.detach(), v.detach(), dout, cu_seqlens, max(lengths))
    sizes = {"total_q": sum(lengths), "num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": dim}
    plan = po.attention_plan(cu_seqlens, **sizes)
    ops, options = torch.ops.packing_ops, (cu_seqlens, cu_seqlens, None, True, None, -1, -1, 0.0, plan)
    rows = batch[:3]
    out, lse = ops.varlen_attention(*rows, *options)
    shape = f"{name}: T={sum(lengths)} docs={len(lengths)} heads={heads[0]}/{heads[1]} D={dim} causal"
    forward = {"packing_ops": lambda: ops.varlen_attention(*rows, *options)}
    backward = {"packing_ops": lambda: ops.varlen_attention_backward(dout, None, *rows, out, lse, *options)}
    for make in with_peers:
        peer_calls(make, batch, forward, backward, shape)
    if peers.flex in with_peers:  # both are made once per batch, before the first layer
        forward["packing_ops, its plan"] = lambda: po.attention_plan(cu_seqlens, **sizes)
    yield Case("varlen_attention", shape, "bfloat16", forward, runs=7)
    yield Case("varlen_attention_backward", shape, "bfloat16", backward, runs=7)


def image_cases(name, lengths, heads, dim, device="cuda", block=256):
    """Every other ``block`` tokens of a document are an image, whose tokens see each other.

    Beside it causal attention, and the same told by visible_end.
    """
    cu_seqlens = po.cu_seqlens_from_lengths(lengths).to(device)
    positions = po.position_ids_from_cu_seqlens(cu_seqlens, sum(lengths))
    ends = {
        "packing_ops": (0.0, po.visible_end_from_blocks(positions // block % 2, cu_seqlens)),
        "packing_ops, causal": (0.0, None),
        "packing_ops, causal by visible_end": (0.0, (positions + 1).int()),
    }
    yield from option_cases(f"{name}, images of {block}", lengths, heads, dim, ends, device)


def option_cases(name, lengths, heads, dim, options_of, device):
    """options_of: of a provider, (softcap, visible_end)."""
    q, k, v, dout, cu_seqlens = packed(lengths, heads, dim, device, torch.bfloat16)
    rows, heads_of = (q.detach(), k.detach(), v.detach()), {"num_heads": heads[0], "num_kv_heads": heads[1]}
    ops, forward, backward = torch.ops.packing_ops, {}, {}
    for provider, (softcap, end) in options_of.items():
        plan = po.attention_plan(cu_seqlens, total_q=sum(lengths), head_dim=dim, visible_end=end, **heads_of)
        options = (cu_seqlens, cu_seqlens, None, True, None, -1, -1, softcap, plan, end)
        out, lse = ops.varlen_attention(*rows, *options)
        forward[provider] = lambda options=options: ops.varlen_attention(*rows, *options)
        backward[provider] = lambda options=options, results=(out, lse): ops.varlen_attention_backward(
            dout, None, *rows, *results, *options
        )
    shape = f"{name}: T={sum(lengths)} docs={len(lengths)} heads={heads[0]}/{heads[1]} D={dim}"
    yield Case("varlen_attention", shape, "bfloat16", forward, runs=7)
    yield Case("varlen_attention_backward", shape, "bfloat16", backward, runs=7)


def cuda_cases():
    """One workload after the other, so that only one is in memory."""
    for name, lengths in WORKLOADS.items():
        yield from op_cases(name, lengths, (32, 8), 128, (*FLASH, peers.flex))
    for heads, dim in (((16, 16), 128), ((32, 8), 64), ((16, 4), 256)):
        for name in ("short", "sft", "mid4k", "long16k"):
            yield from op_cases(name, WORKLOADS[name], heads, dim)
    for heads, dim in (((32, 8), 80), ((32, 8), 96), ((16, 4), 192)):
        for name in ("mid4k", "long16k"):
            yield from op_cases(name, WORKLOADS[name], heads, dim)
    for name in ("chat", "mid4k", "long16k"):
        yield from image_cases(name, WORKLOADS[name], (32, 8), 128)
    yield from op_cases("one document", [2048], (32, 8), 128)
    yield from op_cases("tiny", [100, 156, 200, 56], (32, 8), 128, (*FLASH, peers.sdpa_mask))
    # FlashAttention-2 pads its float32 sums to 128 rows per document, which does not fit any GPU here.
    yield from op_cases("one token", [1] * 65_536, (32, 8), 128, ())


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
        for case in op_cases(name, lengths, (32, 8), 128, (peers.flash_2,)):
            for provider, call in case.providers.items():
                call()
                rows.append({
                    "op": case.op, "shape": case.shape, "provider": provider,
                    "extra_bytes_per_q_element": f"{extra_bytes(call) / (sum(lengths) * 32 * 128):.3f}",
                    **measured_on("cuda"),
                })  # fmt: skip
    return rows


def profiled_calls():
    """For profile_gpu.py."""
    return {
        f"{op} {name}": lambda op=op, name=name: next(
            case for case in op_cases(name, WORKLOADS[name], (32, 8), 128, ()) if case.op == op
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
    if left_out:
        raise SystemExit("\n".join(["left out:", *left_out]))
