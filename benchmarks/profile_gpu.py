"""Why a kernel takes the time it takes: python benchmarks/profile_gpu.py [--out FOLDER] [--only TEXT]

Runs the cases below once under ncu (Nsight Compute, on PATH) and writes results/profile_cuda.csv: per kernel its
time, how busy DRAM, the tensor cores and the instruction issue were, and the stalls that warps spent most cycles in.
"""

import argparse
import csv
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from harness import RESULTS, commit, write_csv

METRICS = {
    "gpu__time_duration.sum": "us",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": "tensor_percent",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "launch__registers_per_thread": "registers",
}
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = ["long_scoreboard", "short_scoreboard", "wait", "barrier", "math_pipe_throttle", "lg_throttle", "mio_throttle",
          "not_selected", "membar", "drain", "sleeping", "branch_resolving", "dispatch_stall"]  # fmt: skip


def cases():
    """name -> a function that makes the inputs and returns the call to profile."""
    import bench_attention
    import bench_boundaries
    import bench_logps
    import bench_padding
    import bench_rope

    import packing_ops as po

    def boundaries(op):
        return next(case for case in bench_boundaries.cases("cuda") if case.op == op).providers["packing_ops"]

    def rope(seqlen, sizes):
        q, k, (cos, sin), position_ids, _ = bench_rope.inputs_of("cuda", seqlen, sizes, torch.bfloat16)
        return lambda: po.apply_rotary_qk(q, k, cos, sin, position_ids)

    def pad(batch, seqlen, width):
        mask = bench_padding.ragged_mask(batch, seqlen, 0.5, "cuda")
        hidden = torch.randn(*mask.shape, width, device="cuda", dtype=torch.bfloat16)
        packed, indices, *_ = po.unpad_input(hidden, mask)
        return lambda: po.pad_input(packed, indices, batch, seqlen)

    def logps(size):
        """One of the ten chunks that the benchmark's vocabulary is taken in."""
        hidden, weight, labels, metadata = bench_logps.batch("cuda", size)
        leaves = hidden, weight[:15_232].detach().requires_grad_()
        labels, grad = labels % 15_232, torch.ones(len(labels), device="cuda")
        return lambda: torch.autograd.grad(po.token_logps(*leaves, labels, metadata), leaves, grad)

    return {
        "segment_sum T=1048576": lambda: boundaries("segment_sum"),
        "seq_idx T=1048576": lambda: boundaries("seq_idx_from_cu_seqlens"),
        "rope T=8192 32+8 D128": lambda: rope(8192, (32, 8, 128)),
        "rope T=65536 14+2 D64": lambda: rope(65536, (14, 2, 64)),
        "pad_input 256x512x1024": lambda: pad(256, 512, 1024),
        **{f"token_logps T=16384 V=15232 hidden={size}": lambda size=size: logps(size) for size in (1024, 4096)},
        **bench_attention.profiled_calls(),
    }


def run_case(name: str) -> None:
    """What ncu watches: one call between the profiler's start and stop."""
    call = cases()[name]()
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def profiled(name: str) -> list[dict]:
    metrics = [*METRICS, *(STALL.format(stall) for stall in STALLS)]
    done = subprocess.run(
        ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--print-units", "base",
         "--metrics", ",".join(metrics), sys.executable, __file__, "--case", name],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if not lines:
        raise RuntimeError(f"ncu found nothing in {name}: {done.stdout[-500:]}{done.stderr[-500:]}")
    kernels = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        kernels.setdefault((row["ID"], row["Kernel Name"]), {})[row["Metric Name"]] = row["Metric Value"]
    rows = []
    for (_, kernel), values in kernels.items():
        number = {metric: float(value.replace(",", "")) for metric, value in values.items() if value[:1].isdigit()}
        kernel = re.split(r"[(<]", kernel.replace("(anonymous namespace)::", ""))[0]
        row = {"case": name, "kernel": kernel.split("::")[-1].removeprefix("void ")}
        for metric, column in METRICS.items():
            scale = 1e-3 if column == "us" else 1
            row[column] = f"{number[metric] * scale:.1f}" if metric in number else ""
        stalls = sorted(((number.get(STALL.format(stall), 0.0), stall) for stall in STALLS), reverse=True)
        row["stalls"] = " ".join(f"{stall}={cycles:.1f}" for cycles, stall in stalls[:4])
        rows.append({**row, "device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit()})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", default="", help="cases whose name contains this; rows of others stay")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        return run_case(arguments.case)
    if shutil.which("ncu") is None:
        sys.exit("profile_gpu: needs ncu on PATH")
    names = [name for name in cases() if arguments.only in name]
    path, failed = arguments.out / "profile_cuda.csv", []
    rows = list(csv.DictReader(path.open())) if path.exists() else []
    for name in names:
        try:
            found = profiled(name)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            failed.append(name)
            continue
        rows = [row for row in rows if row["case"] != name] + found
        write_csv(path, rows, show=False)
    if failed:
        sys.exit(f"failed: {failed}")


if __name__ == "__main__":
    main()
