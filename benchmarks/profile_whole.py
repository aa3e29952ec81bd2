"""What bounds a step of compiled layers: python benchmarks/profile_whole.py [--only ours] [--out FOLDER]

Steps of the sweep's 0.6B (rows of 8,192, logits kept, vocabulary of 32,000), compiled with dynamic=True, without, and
with it again. Writes results/profile_whole_cuda.csv: milliseconds of the fastest and the slowest of four steps, of all
kernels of another step, and how many kernels. What a step takes beyond its kernels, the GPU waits for the host.
"""

import contextlib
import gc

import torch
from harness import bench_parser, measured_on, seconds, write_csv
from parallel_timing import kernels
from whole_cases import Case
from whole_model import batches, model_of, step

VOCABULARY = 32_000


def measured(provider: str, dynamic: bool) -> dict:
    torch._dynamo.reset()
    setting = {"tokens": 65_536, "vocabulary": VOCABULARY, "dynamic": dynamic, "fused_loss": False}
    case = Case("sweep", "Qwen3-0.6B", provider, 8192, **setting)
    made, *_ = batches(case, VOCABULARY, 0, "cuda")
    with contextlib.ExitStack() as undo:
        model, _ = model_of(case, "cuda", False, undo)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

        def once():
            return step(model, optimizer, made)

        times = [seconds(once, "cuda") * 1e3 for _ in range(6)][2:]
        on_gpu = kernels(once)
    kernels_ms = sum(end - start for _, start, end in on_gpu) / 1e3
    return {
        "provider": provider, "dynamic": int(dynamic), "fastest_ms": f"{min(times):.0f}", "slowest_ms": f"{max(times):.0f}",
        "kernels_ms": f"{kernels_ms:.0f}", "kernels": len(on_gpu), **measured_on("cuda"),
    }  # fmt: skip


def main():
    parser = bench_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=["ours", "fa2"], default=["ours", "fa2"])
    arguments, rows = parser.parse_args(), []
    for provider in arguments.only:
        for dynamic in (True, False, True):
            rows.append(measured(provider, dynamic))
            write_csv(arguments.out / "profile_whole_cuda.csv", rows)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
