"""python benchmarks/bench_megatron.py [--device cpu|cuda], and for context parallelism
torchrun --nproc-per-node 2 benchmarks/bench_megatron.py [--device cpu|cuda]
"""

import functools
import importlib.util
import json
import os
import types
from pathlib import Path

import attention_peers as peers
import torch
import torch.distributed as dist
from harness import Case, bench_parser, fits, measured_on, percentiles, run, time_cpu, time_cuda, write_csv
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

import packing_ops as po
from packing_ops.integrations.megatron import PackingDotProductAttention

WORKLOADS = json.loads((Path(__file__).parent / "workloads.json").read_text())["workloads"]
ALONE = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)  # a process group of this process
SCORE_BYTES = 20 << 30  # of a padded batch; megatron-core's own attention holds a few copies of them
LARGE, SMALL = (32, 8, 128), (8, 2, 64)  # query heads, key heads, head_dim


def config_of(heads, **more):
    num_heads, groups, head_dim = heads
    return TransformerConfig(
        num_layers=1,
        hidden_size=num_heads * head_dim,
        num_attention_heads=num_heads,
        num_query_groups=groups,
        attention_dropout=0.0,
        **more,
    )


def core_attention(heads, cp_group=ALONE):
    groups = types.SimpleNamespace(tp=ALONE, cp=cp_group)
    config = config_of(heads, context_parallel_size=cp_group.size())
    return PackingDotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)


def heads_of(total, heads, device, dtype):
    """q, k, v and the gradient of the output."""
    num_heads, groups, head_dim = heads
    shapes = [(total, count, head_dim) for count in (num_heads, groups, groups)]
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v, torch.randn(total, num_heads * head_dim, device=device).to(dtype)


def params_of(lengths, device):
    cu_seqlens = po.cu_seqlens_from_lengths(lengths).to(device)
    return PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))


def shape_of(lengths, heads, name=""):
    return f"{name}T={sum(lengths)} docs={len(lengths)} heads={heads[0]}/{heads[1]} D={heads[2]}"


def attention_case(name, lengths, heads, device, *, backward=True, runs=11):
    """The module beside what else a user of megatron-core has, and beside varlen_attention called directly."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v, dout = heads_of(sum(lengths), heads, device, dtype)
    params, module = params_of(lengths, device), core_attention(heads)
    calls = {
        "PackingDotProductAttention": lambda: module(q, k, v, None, packed_seq_params=params),
        "varlen_attention": lambda: po.varlen_attention(q, k, v, params.cu_seqlens_q).flatten(1),
        **packed_peers(q, k, v, params, heads),
    }

    def timed(call):
        return (lambda: torch.autograd.grad(call(), (q, k, v), dout)) if backward else torch.no_grad()(call)

    op = "core attention forward" + " + backward" * backward
    providers = {provider: timed(call) for provider, call in calls.items()}
    if device == "cuda":  # where alone they run
        providers |= flash_attention_calls((q, k, v, dout), params, heads[0], backward=backward)
        padded = padded_call(q, k, v, dout, lengths, heads, backward=backward)
        providers |= {"megatron-core, padded": padded} if fits(padded) else {}
    return Case(op, shape_of(lengths, heads, name), str(dtype)[6:], providers, runs=runs)


def packed_peers(q, k, v, params, heads):
    """{provider: call}: TransformerEngine's module over the same packed rows, where it is installed."""
    if not (q.is_cuda and importlib.util.find_spec("transformer_engine")):
        return {}
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    start_megatron()
    mask = AttnMaskType.padding_causal
    engine = TEDotProductAttention(config_of(heads), 1, mask, "self")
    return {"TransformerEngine": lambda: engine(q, k, v, None, mask, packed_seq_params=params)}


def flash_attention_calls(heads, params, num_heads, *, backward):
    """{provider: call} of FlashAttention's kernels over the same packed rows: torch's, and those that are installed."""
    q, k, v, dout = (t.detach() for t in heads)
    batch = peers.Batch(q, k, v, dout.view(len(q), num_heads, -1), params.cu_seqlens_q, params.max_seqlen_q)
    found = {}
    for make in (peers.flash_2, peers.flash_3, peers.flash_4):
        for name, calls in make(batch):
            parts = calls[:2] if backward else calls[:1]
            if all(parts):
                found[name] = lambda parts=parts: [part() for part in parts]
    return found


def padded_call(q, k, v, dout, lengths, heads, *, backward):
    """megatron-core's own attention, which takes no packed rows: documents padded to the longest, in batches that
    fit.
    """
    start_megatron()
    config = config_of(heads)
    config.sequence_parallel = True  # it draws no numbers for dropout then, of which there is none
    seqlen = max(lengths)
    scores = heads[0] * seqlen**2 * q.element_size()  # of a document
    step = max(1, SCORE_BYTES // scores)
    mask = torch.ones(1, 1, seqlen, seqlen, dtype=torch.bool, device=q.device).triu(1)
    module = DotProductAttention(config, 1, AttnMaskType.causal, "self")

    @functools.cache
    def batches():
        made = []
        for first in range(0, len(lengths), step):
            spans = [(sum(lengths[:i]), lengths[i]) for i in range(first, min(first + step, len(lengths)))]
            parts = [t.new_zeros(seqlen, len(spans), *t.shape[1:]) for t in (q, k, v, dout)]
            for part, t in zip(parts, (q, k, v, dout), strict=True):
                for column, (start, length) in enumerate(spans):
                    part[:length, column] = t.detach()[start : start + length]
            made.append([*(part.requires_grad_() for part in parts[:3]), parts[3]])
        return made

    def call():
        found = []
        for *given, gradient in batches():
            out = module(*given, mask)
            found.append(torch.autograd.grad(out, given, gradient) if backward else out)
        return found

    return call if backward else torch.no_grad()(call)


def start_megatron():
    """megatron-core's groups of this process alone."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


def rope_case(lengths, heads, device):
    """q and k through megatron-core's hook, ours and its own."""
    from packing_ops.integrations.megatron import patch_rope

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, *_ = (t.detach() for t in heads_of(sum(lengths), heads, device, dtype))
    cu_seqlens = params_of(lengths, device).cu_seqlens_q
    frequencies = 1e4 ** (-torch.arange(0, heads[2], 2, device=device).float() / heads[2])
    angles = torch.outer(torch.arange(max(lengths), device=device).float(), frequencies)
    angles = torch.cat([angles, angles], -1)[:, None, None]
    patch_rope()

    def hook(fused):
        config = types.SimpleNamespace(
            apply_rope_fusion=fused, rotary_interleaved=False, multi_latent_attention=False, mrope_section=None
        )
        options = {"config": config, "cu_seqlens": cu_seqlens, "cp_group": ALONE}
        return lambda: [rope_utils.apply_rotary_pos_emb(t, angles, **options) for t in (q, k)]

    providers = {"packing_ops": hook(True), "megatron-core unfused": hook(False)}
    return Case("RoPE hook", shape_of(lengths, heads), str(dtype)[6:], providers, bytes=2 * (q.nbytes + k.nbytes))


def cases(device):
    if device == "cuda":
        for name, lengths in WORKLOADS.items():
            for backward in (False, True):
                yield attention_case(f"{name}: ", lengths, LARGE, device, backward=backward)
    else:
        yield attention_case("", [256] * 8, SMALL, device, backward=False)
        yield attention_case("", [256] * 8, SMALL, device)
    yield attention_case("", [3, 5], (2, 2, 16), device, backward=False)
    if importlib.util.find_spec("packing_ops.integrations.megatron.rope"):
        yield rope_case([4096] * 16 if device == "cuda" else [256] * 8, LARGE if device == "cuda" else SMALL, device)


# --- under torchrun: the same row on one rank and on all of them ---


def timed_together(call, device, runs=11):
    """Median microseconds of the slowest rank."""
    flush = torch.empty(256 << 20 if device == "cuda" else 1, dtype=torch.uint8, device=device)
    samples = []
    for _ in range(runs + 2):
        dist.barrier()
        sample = time_cuda(call, flush)[0] if device == "cuda" else time_cpu(call, 1)
        slowest = torch.tensor(sample, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        samples.append(slowest.item())
    return percentiles(samples[2:])[1]


def context_parallel_rows(device):
    """Forward and backward of the module; efficiency is one rank's time over ranks times theirs."""
    dtype, heads, total = (torch.bfloat16, LARGE, 65_536) if device == "cuda" else (torch.float32, SMALL, 2048)
    ranks, rows = dist.get_world_size(), []
    for count in (1, 2, 4, 8, 16):
        lengths, times = [total // count] * count, {}
        for group in (ALONE, dist.group.WORLD):
            q, k, v, dout = heads_of(total // group.size(), heads, device, dtype)
            params, module = params_of(lengths, device), core_attention(heads, group)

            def call(q=q, k=k, v=v, dout=dout, params=params, module=module):
                torch.autograd.grad(module(q, k, v, None, packed_seq_params=params), (q, k, v), dout)

            times[group.size()] = timed_together(call, device)
        for size, p50 in times.items():
            rows.append({
                "op": "core attention forward + backward", "shape": shape_of(lengths, heads), "dtype": str(dtype)[6:],
                "ranks": size, "p50_us": f"{p50:.2f}", "efficiency": f"{times[1] / (size * p50):.3f}",
                **measured_on(device),
            })  # fmt: skip
    assert len(times) == 2, f"expected more than {ranks} process"
    return rows


def run_context_parallel():
    parser = bench_parser(__doc__)
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
    rows = context_parallel_rows(arguments.device)
    if dist.get_rank() == 0:
        write_csv(arguments.out / f"megatron-context-parallel_{arguments.device}.csv", rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_context_parallel() if "LOCAL_RANK" in os.environ else run("megatron", cases)
