"""Timing that every benchmark shares: providers taken in turn in one run, medians, one CSV per family.

A bench file lists cases and calls ``run(family, cases)``. A case is one shape with several providers that compute the
same thing; the first provider is ours. On CUDA the L2 cache is flushed before every run, events do the timing with the
host ahead of the GPU, and the clock of the multiprocessors right after the runs stands beside the time.
"""

import argparse
import csv
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from provenance import commit
from result_rows import COPY, RESULTS, read_rows
from rich.console import Console
from rich.progress import track
from rich.table import Table

L2_FLUSH_BYTES = 256 << 20
SPIN_CYCLES = 2_000_000  # 1 ms at 2 GHz: what the host may take to enqueue a call before the GPU waits for it
SLOW_US, SLOW_RUNS = 200_000, 3  # a provider whose call takes longer runs so often


@dataclass
class Case:
    """One shape. ``bytes``: the fewest bytes the work must read and write, 0 where that is not the measure."""

    op: str
    shape: str
    dtype: str
    providers: dict[str, Callable[[], object]]
    bytes: int = 0
    runs: int = 21


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()


def measured_on(device: str) -> dict[str, str]:
    """The columns that say where figures come from."""
    return {"device": device_name(device), "torch": torch.__version__, "commit": commit() or ""}


def bench_parser(description: str | None) -> argparse.ArgumentParser:
    """A command line with the options of every bench file."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the CSV")
    return parser


def percentiles(samples_us: list[float]) -> tuple[float, float, float]:
    ordered = sorted(samples_us)
    return tuple(ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.2, 0.5, 0.8))


def seconds(call: Callable, device: str) -> float:
    """The time of a call, of several ranks that of the slowest."""
    if dist.is_initialized():
        dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - start


def time_cpu(call: Callable, inner: int) -> float:
    start = time.perf_counter()
    for _ in range(inner):
        call()
    return (time.perf_counter() - start) / inner * 1e6


def time_cuda(call: Callable, flush: torch.Tensor) -> tuple[float, float]:
    """Microseconds of the GPU, and the MHz that its multiprocessors run at when the call is done."""
    start, end, after = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    flush.zero_()
    torch.cuda._sleep(SPIN_CYCLES)  # so that the call is enqueued before the GPU gets to it
    start.record()
    call()
    end.record()
    torch.cuda._sleep(SPIN_CYCLES)  # so many cycles, timed
    after.record()
    after.synchronize()
    return start.elapsed_time(end) * 1e3, SPIN_CYCLES / (end.elapsed_time(after) * 1e3)


def warmed_up(call: Callable, device: str) -> float:
    """Microseconds of a call by the host's clock, after calls that compile and fill caches: one before a slow call,
    else three.
    """
    took = 0.0
    for _ in range(4):
        if device == "cuda":
            torch.cuda.synchronize()
        start, before = time.perf_counter(), took
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        took = (time.perf_counter() - start) * 1e6
        if before and took >= SLOW_US:
            break
    return took


def measure(case: Case, device: str) -> dict[str, tuple[float, float, float, float | None]]:
    """p20, p50, p80 in microseconds and the median clock in MHz per provider; they take turns, so that drift hits them
    alike, and in another order each time, so that none always runs at the clocks that a hotter one leaves it."""
    flush = torch.empty(L2_FLUSH_BYTES if device == "cuda" else 1, dtype=torch.uint8, device=device)
    inner, runs = {}, {}
    for name, call in case.providers.items():
        took = warmed_up(call, device)
        inner[name] = 1 if device == "cuda" else max(1, min(1000, int(2000 / max(took, 1e-3))))
        runs[name] = case.runs if took < SLOW_US else min(case.runs, SLOW_RUNS)
    samples, clocks = {name: [] for name in case.providers}, {name: [] for name in case.providers}
    turns, order = list(case.providers.items()), random.Random(0)
    for run in range(case.runs):
        order.shuffle(turns)
        for name, call in turns:
            if run >= runs[name]:
                continue
            if device == "cuda":
                sample, clock = time_cuda(call, flush)
                clocks[name].append(clock)
            else:
                sample = time_cpu(call, inner[name])
            samples[name].append(sample)
    return {
        name: (*percentiles(values), statistics.median(clocks[name]) if clocks[name] else None)
        for name, values in samples.items()
    }


def peak_mib(call: Callable, device: str) -> str:
    """The most memory that a call holds at once, beyond what was there before it. "" on the CPU."""
    if device == "cpu":
        return ""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return f"{peak / 2**20:.1f}"


def fits(call: Callable) -> bool:
    """Whether this device has the memory for it."""
    try:
        call()
    except torch.OutOfMemoryError:
        return False
    return True


def matmuls(heads: list[tuple], logits: torch.Tensor, forward: int, backward: bool) -> Callable:
    """A call of the products of (hidden, weight) alone, as often as said, and of the first one's gradients."""
    (hidden, weight), *_ = heads = [(hidden.detach(), weight.detach()) for hidden, weight in heads]
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def products():
        for _ in range(forward):
            for each, its_weight in reversed(heads):
                torch.mm(each, its_weight.t(), out=logits)
        if backward:
            torch.mm(logits, weight, out=grad_hidden)
            torch.mm(logits.t(), hidden, out=grad_weight)

    return products


def copy_provider(total_bytes: int, device: str) -> Callable:
    """A copy that reads and writes ``total_bytes`` in all: what this device makes of that much traffic."""
    source = torch.empty(total_bytes // 2, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def rows_of(case: Case, device: str) -> list[dict]:
    if case.bytes:
        case.providers[COPY] = copy_provider(case.bytes, device)
    timings = measure(case, device)
    ours = next(iter(timings.values()))[1]
    rows = []
    for provider, (p20, p50, p80, clock) in timings.items():
        rows.append({
            "op": case.op, "shape": case.shape, "dtype": case.dtype, "provider": provider,
            "p20_us": f"{p20:.2f}", "p50_us": f"{p50:.2f}", "p80_us": f"{p80:.2f}",
            "bytes": case.bytes or "", "ratio_to_ours": f"{p50 / ours:.3f}",
            "peak_mib": peak_mib(case.providers[provider], device),
            "sm_mhz": f"{clock:.0f}" if clock else "",
            "device": device_name(device), "threads": torch.get_num_threads() if device == "cpu" else "",
            "torch": torch.__version__, "commit": commit(),
        })  # fmt: skip
    return rows


def run(family: str, cases_of: Callable[[str], Iterable[Case]]) -> argparse.Namespace:
    """Command line of a bench file: measures ``cases_of(device)`` and writes results/<family>_<device>.csv."""
    parser = bench_parser(f"Benchmarks of packing_ops.{family}")
    parser.add_argument("--only", help="cases whose op or shape contains this; the CSV keeps its rows of the others")
    arguments = parser.parse_args()
    rows, path = [], arguments.out / f"{family}_{arguments.device}.csv"
    kept = read_rows(path) if arguments.only and path.exists() else []
    for case in track(cases_of(arguments.device), description=f"bench {family} on {arguments.device}"):
        if arguments.only and arguments.only not in f"{case.op} {case.shape}":
            continue
        measured = rows_of(case, arguments.device)
        for row in measured:
            print(*(row[name] for name in ("op", "shape", "dtype", "provider", "p50_us")), "us", flush=True)
        rows += measured
        kept = [row for row in kept if (row["op"], row["shape"], row["dtype"]) != (case.op, case.shape, case.dtype)]
        write_csv(path, rows + kept, show=False)  # what is measured stays, whatever a later case does
    if not rows:
        parser.error(f"--only: expected a part of a case's op and shape, got {arguments.only!r}")
    write_csv(path, rows + kept)
    return arguments


def write_csv(path: Path, rows: list[dict], show: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    if not show:
        return
    shown = [
        name for name in rows[0] if name not in ("p20_us", "p80_us", "bytes", "device", "threads", "torch", "commit")
    ]
    table = Table(*shown, title=path.name)
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in shown))
    Console(width=140).print(table)
