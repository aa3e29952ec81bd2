"""python benchmarks/bench_rope.py [--device cpu|cuda]"""

import torch
from harness import Case, run

import packing_ops as po
from packing_ops.reference import rope as reference

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
MAX_POSITIONS = 8192


def heads_of(num_heads, seqlen, dtype, device, *, requires_grad=False):
    """[1, num_heads, seqlen, head_dim] as models have it: a view of [1, seqlen, num_heads, head_dim]."""
    x = torch.randn(1, seqlen, num_heads, HEAD_DIM, device=device).to(dtype).transpose(1, 2)
    return x.requires_grad_(requires_grad)


def cache_of(device):
    return reference.rotary_tables(MAX_POSITIONS, HEAD_DIM, dtype=torch.float32, device=device)


def gathered(position_ids, cos, sin, dtype):
    """What transformers makes once per step: full tables in the dtype of the model."""
    return [reference.full_table(table)[position_ids].to(dtype) for table in (cos, sin)]


def forward_case(device, seqlen, dtype, *, contiguous=False, interleaved=False):
    q, k = (heads_of(n, seqlen, dtype, device) for n in (HEADS, KV_HEADS))
    if contiguous:
        q, k = q.contiguous(), k.contiguous()
    cos, sin = cache_of(device)
    position_ids = torch.arange(seqlen, device=device)[None]
    full_cos, full_sin = gathered(position_ids, cos, sin, dtype)
    name = f"forward{' interleaved' if interleaved else ''}"
    providers = {
        "packing_ops": lambda: po.apply_rotary_qk(q, k, cos, sin, position_ids, interleaved=interleaved),
        "packing_ops in place": lambda: po.apply_rotary_qk(
            q, k, cos, sin, position_ids, interleaved=interleaved, inplace=True
        ),
    }
    if not interleaved:
        providers["transformers formula"] = lambda: reference.transformers_rotary(q, k, full_cos, full_sin)
    shape = f"S={seqlen} H={HEADS}+{KV_HEADS} D={HEAD_DIM}{' heads first' if contiguous else ''}"
    return Case(name, shape, str(dtype)[6:], providers, bytes=2 * (q.nbytes + k.nbytes))


def backward_case(device, seqlen, dtype):
    q, k = (heads_of(n, seqlen, dtype, device, requires_grad=True) for n in (HEADS, KV_HEADS))
    cos, sin = cache_of(device)
    position_ids = torch.arange(seqlen, device=device)[None]
    tables = gathered(position_ids, cos, sin, dtype)
    grads = torch.randn_like(q), torch.randn_like(k)
    ours = po.apply_rotary_qk(q, k, cos, sin, position_ids)
    theirs = reference.transformers_rotary(q, k, *tables)
    return Case("backward", f"S={seqlen} H={HEADS}+{KV_HEADS} D={HEAD_DIM}", str(dtype)[6:], {
        "packing_ops": lambda: torch.autograd.grad(ours, (q, k), grads, retain_graph=True),
        "transformers formula": lambda: torch.autograd.grad(theirs, (q, k), grads, retain_graph=True),
    }, bytes=2 * (q.nbytes + k.nbytes))  # fmt: skip


def tiny_case(device, *, requires_grad):
    q, k = (torch.randn(4, n, 8, device=device, requires_grad=requires_grad) for n in (2, 1))
    cos, sin = (table[:, :4].contiguous() for table in cache_of(device))
    position_ids = torch.arange(4, device=device)
    full_cos, full_sin = gathered(position_ids, cos, sin, torch.float32)
    return Case(f"forward{' with grad' if requires_grad else ''}", "T=4 H=2+1 D=8 (call overhead)", "float32", {
        "packing_ops": lambda: po.apply_rotary_qk(q, k, cos, sin, position_ids),
        "transformers formula": lambda: reference.transformers_rotary(q, k, full_cos, full_sin),
    })  # fmt: skip


def cases(device):
    seqlen = 65_536 if device == "cuda" else 4096
    wide = torch.bfloat16 if device == "cuda" else torch.float32
    return [
        forward_case(device, seqlen, torch.float32),
        forward_case(device, seqlen, torch.bfloat16),
        forward_case(device, seqlen, wide, contiguous=True),
        forward_case(device, seqlen, wide, interleaved=True),
        backward_case(device, seqlen, torch.float32),
        backward_case(device, seqlen, torch.bfloat16),
        tiny_case(device, requires_grad=False),
        tiny_case(device, requires_grad=True),
    ]


if __name__ == "__main__":
    run("rope", cases)
