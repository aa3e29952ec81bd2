"""python benchmarks/compare_builds.py OLD NEW [--rounds 3]: two checkouts with their built libraries, in turn, in one
run.

OLD and NEW are folders that hold packing_ops. Each round measures both in fresh processes, so that drift of the clocks
hits them alike; what is printed are medians in microseconds and NEW over OLD. Kernels by the GPU's clock, "host" by the
CPU's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

WORKLOADS = Path(__file__).parent / "workloads.json"
HOST_CALLS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
    for _ in range(arguments.rounds):
        for name, rows in found.items():
            root = getattr(arguments, name).resolve()
            # From nowhere in particular: else this checkout's package would be found first.
            command = [sys.executable, "-P", __file__, "--measure"]
            environment = os.environ | {"PYTHONPATH": str(root)}
            done = subprocess.run(command, env=environment, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{'':34s} {'old us':>10s} {'new us':>10s}  new / old")
    for row in found["new"][0]:
        old, new = (statistics.median(measured[row] for measured in found[name]) for name in ("old", "new"))
        print(f"{row:34s} {old:10.2f} {new:10.2f}  {new / old:.4f}")


def measure() -> dict[str, float]:
    """{row: median microseconds} of the package that PYTHONPATH names."""
    import torch

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return attention_rows(device) | row_rows(device) | host_rows(device)


def timed(call, device: str, runs: int = 11) -> float:
    import torch

    if device == "cpu":
        return host_time(call, inner=1, runs=runs)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    samples = []
    for run in range(runs + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(400_000)  # the host is ahead when the call begins
        start.record()
        call()
        end.record()
        end.synchronize()
        if run >= 3:
            samples.append(start.elapsed_time(end) * 1e3)
    return statistics.median(samples)


def host_time(call, inner: int = HOST_CALLS, runs: int = 9) -> float:
    """The least of several: what other processes do only adds."""
    import torch

    samples = []
    for run in range(runs + 1):
        start = time.perf_counter()
        for _ in range(inner):
            call()
        if run:
            samples.append((time.perf_counter() - start) / inner * 1e6)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return min(samples)


def attention_rows(device: str) -> dict[str, float]:
    import torch

    import packing_ops as po

    ops, dtype = torch.ops.packing_ops, torch.bfloat16 if device == "cuda" else torch.float32
    names = ("short", "sft", "mid1k", "mid4k", "long16k") if device == "cuda" else ("short",)
    rows = {}
    for name in names:
        lengths = json.loads(WORKLOADS.read_text())["workloads"][name]
        lengths = lengths if device == "cuda" else lengths[:8]
        total = sum(lengths)
        q, k, v, dout = (torch.randn(total, heads, 128, device=device, dtype=dtype) for heads in (32, 8, 8, 32))
        cu_seqlens = po.cu_seqlens_from_lengths(lengths).to(device)
        sizes = {"total_q": total, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
        plan = po.attention_plan(cu_seqlens, **sizes) if device == "cuda" else None
        options = (cu_seqlens, cu_seqlens, None, True, None, -1, -1, 0.0, plan)
        out, lse = ops.varlen_attention(q, k, v, *options)
        backward = (dout, None, q, k, v, out, lse, *options)
        rows[f"attention {name}"] = timed(lambda q=q, k=k, v=v, o=options: ops.varlen_attention(q, k, v, *o), device)
        rows[f"attention backward {name}"] = timed(lambda b=backward: ops.varlen_attention_backward(*b), device)
    return rows


def row_rows(device: str) -> dict[str, float]:
    """RoPE and padding, which move rows."""
    import torch

    import packing_ops as po
    from packing_ops.reference.rope import rotary_tables

    tokens, batch, seqlen, width = (65_536, 64, 2048, 4096) if device == "cuda" else (1024, 4, 128, 64)
    q, k = (torch.randn(1, tokens, heads, 128, device=device).transpose(1, 2) for heads in (32, 8))
    cos, sin = rotary_tables(8192, 128, dtype=torch.float32, device=device)
    position_ids = torch.arange(tokens, device=device)[None] % 300
    x = torch.randn(batch, seqlen, width, device=device)
    mask = (torch.arange(seqlen, device=device) < torch.randint(1, seqlen, (batch, 1), device=device)).int()
    rows, indices, *_ = po.unpad_input(x, mask)
    return {
        "apply_rotary_qk": timed(lambda: po.apply_rotary_qk(q, k, cos, sin, position_ids), device),
        "unpad_input": timed(lambda: po.unpad_input(x, mask), device),
        "pad_input": timed(lambda: po.pad_input(rows, indices, batch, seqlen), device),
    }


def host_rows(device: str) -> dict[str, float]:
    """Tiny calls: what the host does."""
    import torch

    import packing_ops as po
    from packing_ops.reference.rope import rotary_tables

    cu_seqlens = po.cu_seqlens_from_lengths([20, 44]).to(device)
    q, k, v = (torch.randn(64, heads, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2))
    heads = [torch.randn(4, count, 8, device=device) for count in (2, 1)]
    cos, sin = rotary_tables(16, 8, dtype=torch.float32, device=device)
    position_ids = torch.arange(4, device=device)
    rows, indices = torch.randn(20, 16, device=device), torch.arange(20, device=device)
    labels = torch.arange(64, device=device)
    return {
        "host varlen_attention": host_time(lambda: po.varlen_attention(q, k, v, cu_seqlens)),
        "host apply_rotary_qk": host_time(lambda: po.apply_rotary_qk(*heads, cos, sin, position_ids)),
        "host pad_input": host_time(lambda: po.pad_input(rows, indices, 4, 8)),
        "host shift_labels": host_time(lambda: po.shift_labels(labels, cu_seqlens)),
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        print(json.dumps(measure()))
    else:
        main()
