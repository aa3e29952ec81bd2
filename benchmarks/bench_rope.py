"""python benchmarks/bench_rope.py [--device cpu|cuda]"""

import torch
from compiled_code import compiled_alone
from harness import Case, run

import packing_ops as po
from packing_ops.reference import rope as reference

LARGE = (32, 8, 128)  # q heads, kv heads, head_dim
SMALL, MANY = (14, 2, 64), (16, 16, 64)
ODD = (32, 32, 96)  # no power of two, as Phi-3's; vision towers have 72 and 80
MAX_POSITIONS = 8192
DOCUMENT = 300  # tokens of the packed documents that position_ids count through


def heads_of(num_heads, seqlen, head_dim, dtype, device, *, requires_grad=False):
    """[1, num_heads, seqlen, head_dim] as models have it: a view of [1, seqlen, num_heads, head_dim]."""
    x = torch.randn(1, seqlen, num_heads, head_dim, device=device).to(dtype).transpose(1, 2)
    return x.requires_grad_(requires_grad)


def cache_of(head_dim, device):
    return reference.rotary_tables(MAX_POSITIONS, head_dim, dtype=torch.float32, device=device)


def gathered(position_ids, cos, sin, dtype):
    """What transformers makes once per step: full tables in the dtype of the model."""
    return [reference.full_table(table)[position_ids].to(dtype) for table in (cos, sin)]


def inputs_of(device, seqlen, sizes, dtype, **options):
    heads, kv_heads, head_dim = sizes
    q, k = (heads_of(n, seqlen, head_dim, dtype, device, **options) for n in (heads, kv_heads))
    position_ids = torch.arange(seqlen, device=device)[None] % DOCUMENT
    shape = f"S={seqlen} H={heads}+{kv_heads} D={head_dim}"
    return q, k, cache_of(head_dim, device), position_ids, shape


def forward_case(device, seqlen, dtype, sizes=LARGE, *, contiguous=False, interleaved=False):
    q, k, (cos, sin), position_ids, shape = inputs_of(device, seqlen, sizes, dtype)
    if contiguous:
        q, k = q.contiguous(), k.contiguous()
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
        if device == "cuda":
            compiled = compiled_alone(reference.transformers_rotary)
            providers["transformers formula, torch.compile"] = lambda: compiled(q, k, full_cos, full_sin)
    shape += " heads first" if contiguous else ""
    return Case(name, shape, str(dtype)[6:], providers, bytes=2 * (q.nbytes + k.nbytes))


def backward_case(device, seqlen, dtype, sizes=LARGE):
    """The kernels that autograd runs, without autograd's own time on the host."""
    q, k, (cos, sin), position_ids, shape = inputs_of(device, seqlen, sizes, dtype)
    full_cos, full_sin = gathered(position_ids, cos, sin, dtype)
    options = (cos, sin, position_ids, [], None, False, 1, True)
    return Case("backward", shape, str(dtype)[6:], {
        "packing_ops": lambda: torch.ops.packing_ops.rope_qk(q, k, *options),
        "transformers formula": lambda: reference.transformers_rotary(q, k, full_cos, -full_sin),
    }, bytes=2 * (q.nbytes + k.nbytes))  # fmt: skip


def tiny_case(device, *, requires_grad):
    q, k = (torch.randn(4, n, 8, device=device, requires_grad=requires_grad) for n in (2, 1))
    cos, sin = cache_of(8, device)
    position_ids = torch.arange(4, device=device)
    full_cos, full_sin = gathered(position_ids, cos, sin, torch.float32)
    return Case(f"forward{' with grad' if requires_grad else ''}", "T=4 H=2+1 D=8 (call overhead)", "float32", {
        "packing_ops": lambda: po.apply_rotary_qk(q, k, cos, sin, position_ids),
        "transformers formula": lambda: reference.transformers_rotary(q, k, full_cos, full_sin),
    })  # fmt: skip


def cases(device):
    seqlen = 65_536 if device == "cuda" else 4096
    wide = torch.bfloat16 if device == "cuda" else torch.float32
    found = [
        forward_case(device, seqlen, torch.float32),
        forward_case(device, seqlen, torch.bfloat16),
        forward_case(device, seqlen, wide, contiguous=True),
        forward_case(device, seqlen, wide, interleaved=True),
        backward_case(device, seqlen, torch.float32),
        backward_case(device, seqlen, torch.bfloat16),
        tiny_case(device, requires_grad=False),
        tiny_case(device, requires_grad=True),
    ]
    if device == "cuda":
        found += [
            forward_case(device, seqlen, torch.bfloat16, SMALL),
            backward_case(device, seqlen, torch.bfloat16, SMALL),
            forward_case(device, seqlen, torch.bfloat16, ODD),
            backward_case(device, seqlen, torch.bfloat16, ODD),
            forward_case(device, 131_072, torch.bfloat16, MANY),
            backward_case(device, 131_072, torch.bfloat16, MANY),
            *(
                case(device, tokens, torch.bfloat16)
                for tokens in (8192, 4096)
                for case in (forward_case, backward_case)
            ),
        ]
    return found


if __name__ == "__main__":
    run("rope", cases)
