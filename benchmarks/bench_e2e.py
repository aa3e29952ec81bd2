"""A training step of a Qwen3 model on packed and padded rows: python benchmarks/bench_e2e.py [--device cuda] [--tiny]

Documents of lognormal lengths, forward and backward over all of them, tokens that are not padding per second, the most
memory held, and of our own rows the share of the step that our kernels and host waits take; then what our attention
interface costs the host per layer. Every row is printed and in the CSV as soon as it is measured. Needs transformers.
"""

import argparse
import contextlib
import csv
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from adapter_overhead import overhead_us
from harness import RESULTS, commit, device_name, write_csv

import packing_ops as po
from packing_ops.integrations.transformers import apply_packing_ops, register, revert_packing_ops

TOKENS, CAPACITY, TINY_CAPACITY, PADDED_BATCH = 65_536, 8192, 512, 8
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
    compiled: str = ""  # "layers": each layer, one graph for all; "model": as a whole
    checkpointing: bool = False
    capacity: int = CAPACITY
    cuda_only: bool = False
    runs: int = 3  # of the whole step; a slow one is timed once
    profiled: bool = False
    on_request: bool = False  # by --only


PROVIDERS = {
    "padded batches of 8, sdpa": Provider("sdpa", padded=True, runs=1),
    "packed, sdpa mask": Provider("sdpa", explicit=False, runs=1),
    "packed, flex_attention": Provider("flex_attention", explicit=False, cuda_only=True),
    "packed, torch FlashAttention-2": Provider("torch_fa2", cuda_only=True),
    "packed, torch FlashAttention-2, compiled rope": Provider("torch_fa2", compiled_rope=True, cuda_only=True),
    "packed, torch FlashAttention-2, compiled rope, F.rms_norm": Provider(
        "torch_fa2", compiled_rope=True, fused_norm=True, cuda_only=True
    ),
    "packing_ops": Provider("packing_ops", swaps={"rms_norm": False}, profiled=True),
    "packing_ops, rms_norm=True": Provider("packing_ops", swaps={"rms_norm": True}, profiled=True),
    "packing_ops, rows of twice the capacity": Provider(
        "packing_ops", swaps={"rms_norm": False}, capacity=2 * CAPACITY
    ),
    "packing_ops, gradient checkpointing": Provider("packing_ops", swaps={"rms_norm": False}, checkpointing=True),
    "packing_ops, torch.compile of each layer": Provider("packing_ops", swaps={"rms_norm": False}, compiled="layers"),
    "packing_ops, torch.compile of the model": Provider(
        "packing_ops", swaps={"rms_norm": False}, compiled="model", on_request=True
    ),
}
OVERHEADS = {f"adapter overhead, {kind}": kind for kind in ("cu_seq_lens", "position_ids")}
COLUMNS = ("tokens", "documents", "tokens_per_second", "peak_gib", "loss", "our_kernels_percent", "host_waits_percent",
           "host_us_per_layer")  # fmt: skip
WARM_UP = 3  # batches: of several lengths, so that what is compiled is compiled for any


def lengths_of(total: int, most: int, median: int = 300) -> list[int]:
    """Lengths that fill total / most rows of ``most`` tokens and no row more."""
    generator = torch.Generator().manual_seed(0)
    lengths = []
    while sum(lengths) < total:
        length = int(torch.exp(torch.randn((), generator=generator) * 0.9) * median)
        lengths.append(max(2, min(length, most, total - sum(lengths))))
    while po.pack_sequences(lengths, most).num_bins > total // most:
        lengths.pop()
    return lengths


def padded_batches(documents: list[torch.Tensor]) -> Iterator[dict]:
    for first in range(0, len(documents), PADDED_BATCH):
        group = documents[first : first + PADDED_BATCH]
        ids = torch.nn.utils.rnn.pad_sequence(group, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(d) for d in group], batch_first=True)
        yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed_rows(documents: list[torch.Tensor], capacity: int, explicit: bool) -> Iterator[dict]:
    """Rows of one length, so that nothing has to be compiled for many; the end of a row is a document without targets."""
    packing = po.pack_sequences([len(document) for document in documents], capacity)
    for items in packing.bins:
        row = [documents[i] for i in items]
        rest = capacity - sum(map(len, row))
        row += [torch.zeros(rest, dtype=torch.int64)] if rest else []
        ids, metadata = torch.cat(row), po.PackedMetadata.from_lengths([len(document) for document in row])
        labels = po.mask_boundary_labels(ids, metadata.cu_seqlens)
        labels[capacity - rest :] = -100
        batch = {"input_ids": ids, "labels": labels, "position_ids": metadata.position_ids}
        batch = {name: tensor[None] for name, tensor in batch.items()}
        yield batch | metadata.to_transformers() if explicit else batch


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
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype).train()
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
    for module in {"": [], "layers": model.model.layers, "model": [model]}[provider.compiled]:
        module.compile(dynamic=True)
    return model, undo


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


def measure(provider: Provider, documents, shape, device: str) -> dict:
    model, undo = setup(provider, shape, device)
    with undo:
        if provider.padded:
            batches = list(padded_batches(documents))
        else:
            capacity = provider.capacity if shape is SHAPE else provider.capacity * TINY_CAPACITY // CAPACITY
            batches = list(packed_rows(documents, capacity, provider.explicit))
        batches = [{k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()} for batch in batches]
        step(model, batches[:WARM_UP])
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        losses = []
        times = sorted(seconds(lambda: losses.append(step(model, batches)), device) for _ in range(provider.runs))
        peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
        shares = shares_of(lambda: step(model, batches[:WARM_UP])) if device == "cuda" and provider.profiled else {}
    tokens = sum(map(len, documents))
    rate = f"{tokens / times[len(times) // 2]:.0f}"
    told = {"tokens": tokens, "documents": len(documents), "tokens_per_second": rate, "peak_gib": f"{peak:.2f}"}
    return {**told, "loss": f"{losses[0]:.4f}", **shares}


def chosen(wanted: list[str], device: str) -> list[str]:
    here = {name: p for name, p in PROVIDERS.items() if device == "cuda" or not p.cuda_only}
    names = [name for name, p in here.items() if wanted or not p.on_request]
    return [name for name in (*names, *OVERHEADS) if not wanted or any(part in name for part in wanted)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="a small model and few tokens, to see that it runs")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="rows whose name contains one of these; "
                        "the others of the CSV stay")  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    shape, *size = (TINY, 2048, TINY_CAPACITY) if arguments.tiny else (SHAPE, TOKENS, CAPACITY)
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, shape["vocab_size"], (n,), generator=generator) for n in lengths_of(*size)]
    path, rows = arguments.out / f"e2e_{arguments.device}.csv", {}
    if arguments.only and path.exists():
        with path.open(newline="") as file:
            rows = {row["provider"]: row for row in csv.DictReader(file)}
    names = chosen(arguments.only, arguments.device)
    if not names:
        parser.error(f"--only: expected parts of {[*PROVIDERS, *OVERHEADS]}, got {arguments.only}")
    failed = []
    for name in names:
        start = time.perf_counter()
        try:
            if name in OVERHEADS:
                found = {"host_us_per_layer": f"{overhead_us(OVERHEADS[name], arguments.device):.1f}"}
            else:
                found = measure(PROVIDERS[name], documents, shape, arguments.device)
        except Exception as error:  # one provider that cannot run here says nothing about the others
            failed.append(name)
            print(f"{name}: failed, {type(error).__name__}: {str(error)[:500]}", flush=True)
            continue
        where = {"device": device_name(arguments.device), "torch": torch.__version__, "commit": commit()}
        rows[name] = {"provider": name, **dict.fromkeys(COLUMNS, ""), **found, **where}
        print(f"{name}: {found} ({time.perf_counter() - start:.0f} s)", flush=True)
        write_csv(path, list(rows.values()), show=name == names[-1])
    if failed:
        raise SystemExit(f"failed: {failed}")


if __name__ == "__main__":
    main()
