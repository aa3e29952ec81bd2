"""Attention and a whole model on several GPUs against one, in the same run:
torchrun --nproc-per-node 2 benchmarks/bench_parallel.py [--device cuda] [--only attention train long] [--tiny]

Every row has the time of one rank that does all (each rank does, at the same time, so that clocks are alike), and of
all ranks together; efficiency is the first over ranks times the second. GPU clocks, the host ahead of them, the slowest
rank, the median of the runs. One more call on CUDA is profiled: what its kernels compute and send. Writes
results/parallel_<device>.csv after every row.

bench_parallel_host.py measures on one GPU what host and kernels take of it.
"""

import datetime
import functools
import os
from pathlib import Path

import torch
import torch.distributed as dist
from harness import bench_parser, measured_on, read_rows, write_csv
from parallel_timing import profiled, sft_lengths, timed_together
from parallel_training import train_rows
from parallel_wrappers import WRAPPERS

import packing_ops as po
from packing_ops.parallel import gathered_attention, ulysses_attention, varlen_attention_over

HEADS, TINY_HEADS = (32, 8, 128), (8, 4, 16)


class Results:
    """Rows of the CSV, written as they come; those that were there before stay until they are measured again."""

    def __init__(self, path: Path, device: str):
        self.path, self.device = path, device
        self.rows: list[dict] = [dict(row) for row in read_rows(path)] if path.exists() else []

    def add(self, op: str, shape: str, one_us: float, us: float, call, *, tokens: int, ranks: int = 0) -> None:
        ranks = ranks or dist.get_world_size()
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else 0.0
        figures = {
            "one_rank_us": f"{one_us:.1f}" if one_us else "", "p50_us": f"{us:.1f}",
            "efficiency": f"{one_us / (ranks * us):.3f}" if one_us else "",
            "tokens_per_second": f"{tokens / us * 1e6:.0f}", "peak_gib": f"{memory:.2f}", **profiled(call, self.device),
        }  # fmt: skip
        self.add_case({"op": op, "shape": shape, "ranks": ranks}, figures)

    def where(self) -> dict:
        return measured_on(self.device)

    def add_case(self, case: dict, figures: dict) -> None:
        case = {name: str(value) for name, value in case.items()}
        self.rows = [row for row in self.rows if not case.items() <= row.items()]
        self.rows.append({**case, **figures, **self.where()})
        if dist.get_rank() == 0:
            print(" ".join(f"{name}={value}" for name, value in {**case, **figures}.items()), flush=True)
            write_csv(self.path, self.rows, show=False)


# --- attention ---


def heads_of(rows, heads, device):
    """q, k, v and the gradient of out."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(rows, h, heads[2], device=device, dtype=dtype) for h in (heads[0], heads[1], heads[1]))
    return [t.requires_grad_() for t in (q, k, v)], torch.randn_like(q)


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
            "Ulysses attention": functools.partial(ulysses_attention, cu_seqlens=metadata),
            f"gathered attention, {scheme}": functools.partial(gathered_attention, cu_seqlens=metadata, scheme=scheme),
            "varlen_attention_over": functools.partial(varlen_attention_over, None, cu_seqlens=metadata),
        }
        for op, call in calls.items():
            step = functools.partial(forward_backward, call, tensors, dout)
            together = timed_together(step, device, runs)
            results.add(f"{op}, forward + backward", shape, one, together, step, tokens=sum(lengths))


def long_rows(results, device, tiny):
    """A document of 262,144 tokens, which one GPU need not hold."""
    tokens, heads = (8192, TINY_HEADS) if tiny else (262_144, HEADS)
    ranks = dist.get_world_size()
    metadata = po.PackedMetadata.from_lengths([tokens], device=device)
    tensors, dout = heads_of(tokens // ranks, heads, device)
    shape = f"one document: T={tokens} heads={heads[0]}/{heads[1]} D={heads[2]}"
    for op, call in {
        "Ulysses attention": functools.partial(ulysses_attention, cu_seqlens=metadata),
        "gathered attention, zigzag": functools.partial(gathered_attention, cu_seqlens=metadata, scheme="zigzag"),
    }.items():
        step = functools.partial(forward_backward, call, tensors, dout)
        together = timed_together(step, device, 2, warm_up=1)
        results.add(f"{op}, forward + backward", shape, 0.0, together, step, tokens=tokens)


FAMILIES = {"attention": attention_rows, "long": long_rows, "train": train_rows}


def main():
    parser = bench_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--wrappers", nargs="+", choices=WRAPPERS, default=list(WRAPPERS), help="of train")
    parser.add_argument("--tiny", action="store_true", help="sizes for the CPU")
    arguments = parser.parse_args()
    families = FAMILIES | {"train": functools.partial(train_rows, wrappers=arguments.wrappers)}
    device = arguments.device
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=datetime.timedelta(seconds=120))
    results = Results(arguments.out / f"parallel_{device}.csv", device)
    for family in arguments.only:
        families[family](results, device, arguments.tiny or device == "cpu")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
