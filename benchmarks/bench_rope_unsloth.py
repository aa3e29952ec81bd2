"""python benchmarks/bench_rope_unsloth.py --device cuda: fast_rope_embedding beside Unsloth's function of that name.

Its kernels are Triton's and need a GPU. unsloth and unsloth_zoo are installed, or their checkouts are on PYTHONPATH.
"""

import importlib
import importlib.util
import sys
import types

import torch
from harness import Case, run

from packing_ops.contrib.unsloth import fast_rope_embedding
from packing_ops.reference import rope as reference

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LENGTHS = [2**power for power in range(10, 17)]
DOCUMENT = 300  # tokens of the packed documents that position ids count through


def function_of_unsloth():
    """Return it from its module alone: importing unsloth patches torch, transformers and trl."""
    for name in ("unsloth_zoo", "unsloth", "unsloth.kernels"):
        package = types.ModuleType(name)
        package.__path__ = list(importlib.util.find_spec(name).submodule_search_locations)
        sys.modules[name] = package
    return importlib.import_module("unsloth.kernels.rope_embedding").fast_rope_embedding


def case(theirs, seqlen, positions):
    """Forward and backward in place, q and k contiguous, as Unsloth's models call it; the same tensors each time."""
    q, k = (torch.randn(1, n, seqlen, HEAD_DIM, device="cuda").bfloat16() for n in (HEADS, KV_HEADS))
    cos, sin = (
        reference.full_table(table).bfloat16()
        for table in reference.rotary_tables(seqlen, HEAD_DIM, dtype=torch.float32, device="cuda")
    )
    position_ids = (torch.arange(seqlen, device="cuda", dtype=torch.int32) % DOCUMENT)[None] if positions else None
    grads = [torch.randn_like(q), torch.randn_like(k)]
    leaf_q, leaf_k = (t.requires_grad_() for t in (q, k))

    def both(function, **options):
        def step():
            # A copy, as in a model, where q and k are no leaves
            rotated = function(leaf_q.clone(), leaf_k.clone(), cos, sin, position_ids, **options)
            return torch.autograd.grad(rotated, (leaf_q, leaf_k), grads)

        return step

    shape = f"S={seqlen} H={HEADS}+{KV_HEADS} D={HEAD_DIM} {'with' if positions else 'without'} position ids"
    providers = {"packing_ops": both(fast_rope_embedding, inplace=True), "unsloth": both(theirs)}
    return Case("forward and backward", shape, "bfloat16", providers, bytes=8 * (q.nbytes + k.nbytes))


def cases(device):
    if device != "cuda":
        sys.exit("Unsloth's kernels need a GPU: --device cuda")
    theirs = function_of_unsloth()
    return [case(theirs, seqlen, positions) for positions in (True, False) for seqlen in LENGTHS]


if __name__ == "__main__":
    run("rope_unsloth", cases)
