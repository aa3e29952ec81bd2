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


def kernels(call) -> list[tuple[str, float, float]]:
    """Name, start and end in microseconds of each kernel and copy that a call runs on the GPU, profiled."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [
        (each.name, each.time_range.start, each.time_range.end)
        for each in profile.events()
        if each.device_type == torch.autograd.DeviceType.CUDA and not each.is_user_annotation
    ]


def profiled(call, device: str) -> dict[str, str]:
    """Microseconds of one call on this rank's GPU, by kind: in which any kernel or copy runs, one that computes, one
    of NCCL, one of NCCL beside none that computes, and none at all between the first and the last.
    """
    if device == "cpu":
        return {}
    found = [(start, end, name.startswith("nccl")) for name, start, end in kernels(call)]
    busy, computing, sending = (
        covered([(start, end) for start, end, sends in found if sends in kinds])
        for kinds in ((True, False), (False,), (True,))
    )
    span = max((end for _, end, _ in found), default=0.0) - min((start for start, _, _ in found), default=0.0)
    times = {"busy": busy, "computing": computing, "sending": sending, "exposed": busy - computing, "idle": span - busy}
    return {f"{name}_us": f"{value:.1f}" for name, value in times.items()}


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union. Example: of (0, 2), (1, 3) and (5, 6) it is 4."""
    length, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, until))
        until = max(until, end)
    return length


def sft_lengths(tokens):
    """Of the workload, over again, the last one cut."""
    workload, lengths = json.loads((Path(__file__).parent / "workloads.json").read_text())["workloads"]["sft"], []
    for length in itertools.cycle(workload):
        lengths.append(min(length, tokens - sum(lengths)))
        if sum(lengths) == tokens:
            return lengths
