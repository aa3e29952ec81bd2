"""Times of ranks that run together, and the lengths that they run on."""

import itertools
import json
from pathlib import Path

import torch
import torch.distributed as dist
from harness import percentiles, time_cpu

SPIN_CYCLES = 20_000_000  # 10 ms at 2 GHz, in which the host enqueues a call


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
    """Median microseconds of the slowest rank. Peak memory is counted from here on."""
    samples = []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(warm_up + runs):
        dist.barrier()
        slowest = torch.tensor(microseconds(call, device, spin), device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        samples.append(slowest.item())
    return percentiles(samples[warm_up:])[1]


def sft_lengths(tokens):
    """Of the workload, over again, the last one cut."""
    workload, lengths = json.loads((Path(__file__).parent / "workloads.json").read_text())["workloads"]["sft"], []
    for length in itertools.cycle(workload):
        lengths.append(min(length, tokens - sum(lengths)))
        if sum(lengths) == tokens:
            return lengths
