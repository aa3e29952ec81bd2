"""Attention and a whole model on several GPUs against one, in the same run:
torchrun --nproc-per-node 2 benchmarks/bench_parallel.py [--device cuda] [--only attention train long] [--tiny]

Every row has the time of one rank that does all (each rank does, at the same time, so that clocks are alike), and of all
ranks together; efficiency is the first over ranks times the second. GPU clocks, the host ahead of them, the slowest rank,
the median of the runs. Writes results/parallel_<device>.csv after every row.
"""

import argparse
import datetime
import functools
import itertools
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from bench_e2e import SHAPE, TINY
from e2e_providers import COMPILE
from harness import RESULTS, commit, device_name, percentiles, time_cpu, write_csv
from parallel_wrappers import WRAPPERS
from transformers import Qwen3Config, Qwen3ForCausalLM

import packing_ops as po
from packing_ops.integrations.transformers import apply_packing_ops
from packing_ops.parallel import choose_attention, gathered_attention, ulysses_attention

HEADS, TINY_HEADS = (32, 8, 128), (8, 4, 16)
SPIN_CYCLES = 20_000_000  # 10 ms at 2 GHz, in which the host enqueues a call


# --- timing ---


def microseconds(call, device: str, spin: int) -> float:
    if device == "cpu":
        return time_cpu(call, 1)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(spin)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def timed_together(call, device: str, runs: int, spin: int = SPIN_CYCLES, warm_up: int = 2) -> float:
    """Median microseconds of the slowest rank."""
    samples = []
    for _ in range(warm_up + runs):
        dist.barrier()
        slowest = torch.tensor(microseconds(call, device, spin), device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        samples.append(slowest.item())
    return percentiles(samples[warm_up:])[1]


class Results:
    """Rows of the CSV, written as they come."""

    def __init__(self, path: Path, device: str):
        self.path, self.device, self.rows = path, device, []

    def add(self, op: str, shape: str, one_us: float, us: float, *, tokens: int, ranks: int | None = None) -> None:
        ranks = ranks or dist.get_world_size()
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else 0.0
        row = {
            "op": op, "shape": shape, "ranks": ranks, "one_rank_us": f"{one_us:.1f}" if one_us else "",
            "p50_us": f"{us:.1f}", "efficiency": f"{one_us / (ranks * us):.3f}" if one_us else "",
            "tokens_per_second": f"{tokens / us * 1e6:.0f}", "peak_gib": f"{memory:.2f}",
            "device": device_name(self.device), "torch": torch.__version__, "commit": commit(),
        }  # fmt: skip
        self.rows.append(row)
        if dist.get_rank() == 0:
            print(" ".join(f"{name}={value}" for name, value in row.items() if name not in ("device", "torch", "commit")),
                  flush=True)  # fmt: skip
            write_csv(self.path, self.rows, show=False)


# --- attention ---


def heads_of(rows, heads, device):
    """q, k, v and the gradient of out."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(rows, h, heads[2], device=device, dtype=dtype) for h in (heads[0], heads[1], heads[1]))
    return [t.requires_grad_() for t in (q, k, v)], torch.randn_like(q)


def sft_lengths(tokens):
    """Of the workload, over again, the last one cut."""
    workload, lengths = json.loads((Path(__file__).parent / "workloads.json").read_text())["workloads"]["sft"], []
    for length in itertools.cycle(workload):
        lengths.append(min(length, tokens - sum(lengths)))
        if sum(lengths) == tokens:
            return lengths


def attention_cases(tokens):
    yield "one document", [tokens], "zigzag"
    yield "16 documents", [tokens // 16] * 16, "zigzag"
    yield "sft lengths", sft_lengths(tokens), "contiguous"


def forward_backward(call, tensors, dout):
    torch.autograd.grad(call(*tensors), tensors, dout)


def attention_rows(results, device, tiny):
    tokens, heads = (2048, TINY_HEADS) if tiny else (65_536, HEADS)
    ranks, runs = dist.get_world_size(), 3 if tiny else 9
    for name, lengths, scheme in attention_cases(tokens):
        total = -(-sum(lengths) // ranks) * ranks
        metadata = po.PackedMetadata.from_lengths(lengths, total=total, device=device)
        shape = f"{name}: T={sum(lengths)} docs={len(lengths)} heads={heads[0]}/{heads[1]} D={heads[2]}"
        tensors, dout = heads_of(total, heads, device)
        alone = functools.partial(po.varlen_attention, cu_seqlens_q=metadata)
        one = timed_together(functools.partial(forward_backward, alone, tensors, dout), device, runs)
        del tensors, dout
        tensors, dout = heads_of(total // ranks, heads, device)
        calls = {
            "Ulysses attention": functools.partial(ulysses_attention, documents=metadata),
            f"gathered attention, {scheme}": functools.partial(gathered_attention, documents=metadata, scheme=scheme),
        }
        for op, call in calls.items():
            together = timed_together(functools.partial(forward_backward, call, tensors, dout), device, runs)
            results.add(f"{op}, forward + backward", shape, one, together, tokens=sum(lengths))
        if dist.get_rank() == 0:
            sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": heads[2], "scheme": scheme}
            print(choose_attention(metadata, ranks=ranks, rows=total // ranks, **sizes), flush=True)


def long_rows(results, device, tiny):
    """A document of 262,144 tokens, which one GPU need not hold."""
    tokens, heads = (8192, TINY_HEADS) if tiny else (262_144, HEADS)
    ranks = dist.get_world_size()
    metadata = po.PackedMetadata.from_lengths([tokens], device=device)
    tensors, dout = heads_of(tokens // ranks, heads, device)
    shape = f"one document: T={tokens} heads={heads[0]}/{heads[1]} D={heads[2]}"
    for op, call in {
        "Ulysses attention": functools.partial(ulysses_attention, documents=metadata),
        "gathered attention, zigzag": functools.partial(gathered_attention, documents=metadata, scheme="zigzag"),
    }.items():
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        together = timed_together(functools.partial(forward_backward, call, tensors, dout), device, 2, warm_up=1)
        results.add(f"{op}, forward + backward", shape, 0.0, together, tokens=tokens)


# --- a whole model ---


def model_for(device, tiny):
    torch.manual_seed(0)
    config = Qwen3Config(**(TINY if tiny else SHAPE), max_position_embeddings=40_960, use_cache=False)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype).train()
    apply_packing_ops(model, rms_norm=True, fused_loss=True)
    for layer in model.model.layers:
        layer.compile(**COMPILE)
    return model


def rows_of_rank(tokens, capacity, device, vocabulary):
    """Full rows of ``capacity`` slots with sft lengths, other documents on each rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    lengths = [min(length, capacity) for length in sft_lengths(tokens * ranks)]
    packing = po.pack_sequences(lengths, capacity, bins_multiple_of=ranks)
    batches = []
    for row in packing.bins[rank::ranks]:
        metadata = po.PackedMetadata.from_lengths([lengths[i] for i in row], total=capacity)
        generator = torch.Generator().manual_seed(len(batches) + 1000 * rank)
        ids = torch.randint(vocabulary, (1, capacity), generator=generator)
        batch = {"input_ids": ids, "labels": ids, "position_ids": metadata.position_ids[None]}
        batch |= {**metadata.to_transformers(), "num_items_in_batch": capacity}
        batches.append({n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in batch.items()})
    return batches


def training_step(model, optimizer, batches):
    for batch in batches:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def host_milliseconds(step, device: str) -> float:
    """Until the host has enqueued it all: where that is as long as the step, the GPU waits for the host."""
    synchronize = torch.cuda.synchronize if device == "cuda" else dist.barrier
    synchronize()
    start = time.perf_counter()
    step()
    elapsed = time.perf_counter() - start
    synchronize()
    return elapsed * 1e3


def train_rows(results, device, tiny):
    tokens, capacity = (2048, 512) if tiny else (131_072, 16_384)
    batches, one = rows_of_rank(tokens, capacity, device, (TINY if tiny else SHAPE)["vocab_size"]), 0.0
    for name, wrap in WRAPPERS.items():
        torch._dynamo.reset()
        model = wrap(model_for(device, tiny), device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        step = functools.partial(training_step, model, optimizer, batches)
        us = timed_together(step, device, 3)
        host = host_milliseconds(step, device)
        if dist.get_rank() == 0:
            print(f"training, {name}: host={host:.0f} ms of {us / 1e3:.0f} ms", flush=True)
        shape = f"{'tiny' if tiny else 'Qwen3-0.6B'}: {len(batches)} rows of {capacity} a rank, sft lengths"
        shape += ", rms_norm, fused_loss, layers compiled"
        if name == "one rank":
            one = us * dist.get_world_size()  # what all ranks do together takes one so long
            results.add("training, one rank", shape, 0.0, us, tokens=len(batches) * capacity, ranks=1)
        else:
            results.add(f"training, {name}", shape, one, us, tokens=len(batches) * capacity * dist.get_world_size())
        del model, optimizer, step
        torch.cuda.empty_cache()


FAMILIES = {"attention": attention_rows, "long": long_rows, "train": train_rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--tiny", action="store_true", help="sizes for the CPU")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the CSV")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo", timeout=datetime.timedelta(seconds=120))
    results = Results(arguments.out / f"parallel_{arguments.device}.csv", arguments.device)
    for family in arguments.only:
        FAMILIES[family](results, arguments.device, arguments.tiny or arguments.device == "cpu")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
