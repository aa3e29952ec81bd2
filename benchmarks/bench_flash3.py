"""python benchmarks/bench_flash3.py: attention's forward beside FlashAttention-3's, of the package fa3-fwd (no backward).

Needs fa3-fwd: pip install fa3-fwd.
"""

import torch
from attention_peers import FLASH_2, FLASH_3, Batch, flash_2
from bench_attention import WORKLOADS, check_same, out_of, packed
from harness import Case, run

import packing_ops as po


def cases(device):
    from fa3_fwd_interface import flash_attn_varlen_func

    for heads, dim in (((32, 8), 128), ((32, 8), 64), ((16, 4), 256)):
        for name, lengths in WORKLOADS.items():
            q, k, v, dout, cu_seqlens = packed(lengths, heads, dim, device, torch.bfloat16)
            rows, longest = (q.detach(), k.detach(), v.detach()), max(lengths)
            plan = po.attention_plan(
                cu_seqlens, total_q=len(q), num_heads=heads[0], num_kv_heads=heads[1], head_dim=dim
            )
            (_, theirs), *_ = flash_2(Batch(*rows, dout, cu_seqlens, longest))
            calls = {
                "packing_ops": lambda rows=rows, cu=cu_seqlens, plan=plan: po.varlen_attention(*rows, cu, plan=plan),
                FLASH_3: lambda rows=rows, cu=cu_seqlens, n=longest: flash_attn_varlen_func(
                    *rows, cu, cu, n, n, causal=True
                ),
                FLASH_2: theirs.forward,
            }
            ours, *others = (out_of(call()) for call in calls.values())
            for other in others:
                check_same([ours], [other])
            shape = f"{name}: T={len(q)} docs={len(lengths)} heads={heads[0]}/{heads[1]} D={dim} causal"
            yield Case("varlen_attention", shape, "bfloat16", calls, runs=7)


if __name__ == "__main__":
    run("flash3", cases)
