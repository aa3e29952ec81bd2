"""python benchmarks/bench_stream.py: rows of a PackedStream on one CPU core, results/stream_cpu.csv.

Padding, and tokens per second of the processor, for the rows alone and with PaddingFreeCollator. Lengths are drawn from
workloads.json.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch
from harness import RESULTS, device_name, write_csv
from provenance import ROOT, commit

from packing_ops.data import PackedStream, PaddingFreeCollator

EXAMPLES, RUNS = 20_000, 5


def examples_of(workload):
    lengths = json.loads((ROOT / "benchmarks" / "workloads.json").read_text())["workloads"][workload]
    draw = random.Random(0)
    return [{"input_ids": [7] * draw.choice(lengths)} for _ in range(EXAMPLES)]


def seconds_of(stream, collate):
    start = time.process_time()
    for row in stream:
        collate(row)
    return time.process_time() - start


def rows_of(workload, capacity, buffer):
    examples, collator = examples_of(workload), PaddingFreeCollator()
    for name, collate in ("rows", len), ("rows and PaddingFreeCollator", collator):
        stream = PackedStream(examples, capacity, buffer=buffer)
        median = statistics.median(seconds_of(stream, collate) for _ in range(RUNS))
        yield {
            "workload": workload, "capacity": capacity, "buffer": buffer, "measured": name,
            "tokens": stream.progress.tokens, "padding_percent": f"{100 * stream.progress.padding:.2f}",
            "million_tokens_per_second": f"{stream.progress.tokens / median / 1e6:.1f}",
            "device": device_name("cpu"), "threads": 1, "torch": torch.__version__, "commit": commit(),
        }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = [("sft", 4096, 100), ("sft", 4096, 1000), ("sft", 8192, 1000), ("chat", 8192, 1000), ("short", 4096, 1000)]
    write_csv(arguments.out / "stream_cpu.csv", [row for case in cases for row in rows_of(*case)])


if __name__ == "__main__":
    main()
