"""A training step of a Qwen3 model on packed and padded rows: python benchmarks/bench_e2e.py [--device cuda] [--tiny]

Documents of lognormal lengths, forward and backward over all of them, tokens that are not padding per second, the most
memory held, and of our own rows the share of the step that our kernels and host waits take. Needs transformers.
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from harness import RESULTS, commit, device_name, write_csv
from rich.progress import track

import packing_ops as po
from packing_ops.integrations.transformers import apply_packing_ops, register, revert_packing_ops

TOKENS, CAPACITY, PADDED_BATCH = 65_536, 8192, 8
SHAPE = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32_000}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}  # fmt: skip


@dataclass
class Provider:
    """How the model is set up: its attention, what is swapped, and how rows reach it."""

    attention: str
    padded: bool = False
    explicit: bool = True  # cu_seqlens passed along; else position_ids alone tell the documents
    swaps: dict | None = None  # arguments of apply_packing_ops
    compiled_rope: bool = False
    fused_norm: bool = False
    compiled: bool = False
    checkpointing: bool = False
    capacity: int = CAPACITY
    cuda_only: bool = False


PROVIDERS = {
    "padded batches of 8, sdpa": Provider("sdpa", padded=True),
    "packed, sdpa mask": Provider("sdpa", explicit=False),
    "packed, flex_attention": Provider("flex_attention", explicit=False, cuda_only=True),
    "packed, torch FlashAttention-2": Provider("torch_fa2", cuda_only=True),
    "packed, torch FlashAttention-2, compiled rope": Provider("torch_fa2", compiled_rope=True, cuda_only=True),
    "packed, torch FlashAttention-2, compiled rope, F.rms_norm": Provider(
        "torch_fa2", compiled_rope=True, fused_norm=True, cuda_only=True
    ),
    "packing_ops": Provider("packing_ops", swaps={"rms_norm": False}),
    "packing_ops, rms_norm=True": Provider("packing_ops", swaps={"rms_norm": True}),
    "packing_ops, rows of twice the capacity": Provider(
        "packing_ops", swaps={"rms_norm": False}, capacity=2 * CAPACITY
    ),
    "packing_ops, gradient checkpointing": Provider("packing_ops", swaps={"rms_norm": False}, checkpointing=True),
    "packing_ops, torch.compile": Provider("packing_ops", swaps={"rms_norm": False}, compiled=True),
}


def lengths_of(total: int, most: int, median: int = 300) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    lengths = []
    while sum(lengths) < total:
        length = int(torch.exp(torch.randn((), generator=generator) * 0.9) * median)
        lengths.append(max(2, min(length, most, total - sum(lengths))))
    return lengths


def padded_batches(documents: list[torch.Tensor]) -> Iterator[dict]:
    for first in range(0, len(documents), PADDED_BATCH):
        group = documents[first : first + PADDED_BATCH]
        ids = torch.nn.utils.rnn.pad_sequence(group, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(d) for d in group], batch_first=True)
        yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed_rows(documents: list[torch.Tensor], capacity: int, explicit: bool) -> Iterator[dict]:
    packing = po.pack_sequences([len(document) for document in documents], capacity)
    for items in packing.bins:
        row = [documents[i] for i in items]
        ids = torch.cat(row)[None]
        cu_seqlens = po.cu_seqlens_from_lengths([len(document) for document in row])
        labels = po.mask_boundary_labels(ids[0], cu_seqlens)[None]
        batch = {"input_ids": ids, "labels": labels}
        batch["position_ids"] = po.position_ids_from_cu_seqlens(cu_seqlens, ids.shape[1])[None]
        if explicit:
            longest = max(len(document) for document in row)
            batch |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
            batch |= {"max_length_q": longest, "max_length_k": longest}
        yield batch


def torch_fa2(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, max_length_q=None, **_):
    """torch's built-in FlashAttention-2 over the row's documents."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    out = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, is_causal=True)
    return out[None], None


def setup(provider: Provider, shape: dict, device: str):
    from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM
    from transformers.models.qwen3 import modeling_qwen3

    register()
    AttentionInterface.register("torch_fa2", torch_fa2)
    torch.manual_seed(0)
    config = Qwen3Config(**shape, max_position_embeddings=40_960, use_cache=False)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype).to(device).train()
    undo = contextlib.ExitStack()
    if provider.swaps is not None:
        apply_packing_ops(model, **provider.swaps)
        undo.callback(revert_packing_ops, model)
    else:
        model.set_attn_implementation(provider.attention)
    if provider.fused_norm:
        apply_packing_ops(model, rope=False, attention=False, rms_norm=True)
        undo.callback(revert_packing_ops, model)
    if provider.compiled_rope:
        stock = modeling_qwen3.apply_rotary_pos_emb
        modeling_qwen3.apply_rotary_pos_emb = torch.compile(stock, dynamic=True)
        undo.callback(setattr, modeling_qwen3, "apply_rotary_pos_emb", stock)
    if provider.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if provider.compiled:
        model.compile(dynamic=True)
    return model, undo


@dataclass
class Measured:
    tokens_per_second: float
    peak_gib: float
    loss: float
    shares: dict = field(default_factory=dict)


def step(model, batches) -> float:
    loss = 0.0
    for batch in batches:
        out = model(**batch)
        out.loss.backward()
        loss += out.loss.detach()
    model.zero_grad(set_to_none=True)
    return float(loss) / len(batches)


def seconds(call: Callable, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def shares_of(call: Callable) -> dict:
    """Of the GPU's busy time, what our kernels take; of the step, what the host waits in synchronisations."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        elapsed = seconds(call, "cuda") * 1e6
    events = trace.key_averages()
    busy = sum(event.self_device_time_total for event in events)
    ours = sum(event.self_device_time_total for event in events if "packing_ops" in event.key)
    waits = sum(event.self_cpu_time_total for event in events if "Synchronize" in event.key)
    return {"our_kernels_percent": f"{100 * ours / busy:.1f}", "host_waits_percent": f"{100 * waits / elapsed:.1f}"}


def measure(provider: Provider, documents, shape, device: str, runs: int) -> Measured:
    model, undo = setup(provider, shape, device)
    with undo:
        if provider.padded:
            batches = list(padded_batches(documents))
        else:
            batches = list(packed_rows(documents, provider.capacity, provider.explicit))
        batches = [{k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()} for batch in batches]
        loss = step(model, batches)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = sorted(seconds(lambda: step(model, batches), device) for _ in range(runs))
        peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
        ours = device == "cuda" and provider.swaps is not None
        shares = shares_of(lambda: step(model, batches)) if ours else {}
    return Measured(sum(len(d) for d in documents) / times[len(times) // 2], peak, loss, shares)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="a small model and few tokens, to see that it runs")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="", help="providers whose name contains this")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    shape, total = (TINY, 2048) if arguments.tiny else (SHAPE, TOKENS)
    lengths = lengths_of(total, CAPACITY if not arguments.tiny else 256)
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, shape["vocab_size"], (n,), generator=generator) for n in lengths]
    chosen = {name: p for name, p in PROVIDERS.items() if arguments.only in name}
    chosen = {name: p for name, p in chosen.items() if arguments.device == "cuda" or not p.cuda_only}
    rows = []
    for name, provider in track(chosen.items(), description=f"training steps on {arguments.device}"):
        found = measure(provider, documents, shape, arguments.device, arguments.runs)
        rows.append({
            "provider": name, "tokens": sum(lengths), "documents": len(documents),
            "tokens_per_second": f"{found.tokens_per_second:.0f}", "peak_gib": f"{found.peak_gib:.2f}",
            "loss": f"{found.loss:.4f}", "our_kernels_percent": found.shares.get("our_kernels_percent", ""),
            "host_waits_percent": found.shares.get("host_waits_percent", ""),
            "device": device_name(arguments.device), "torch": torch.__version__, "commit": commit(),
        })  # fmt: skip
    write_csv(arguments.out / f"e2e_{arguments.device}.csv", rows)


if __name__ == "__main__":
    main()
