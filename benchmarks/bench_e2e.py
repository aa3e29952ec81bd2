"""A training step of a Qwen3 model on packed and padded rows: python benchmarks/bench_e2e.py [--device cuda] [--tiny]

Documents of the sft workload, forward and backward over all of them, tokens that are not padding per second, the most
memory held, and of our own rows the share of the step that our kernels and host waits take; before, what our attention
interface costs the host per layer. The loss of every token is compared with that of the run's first provider. A row
under torch.compile is one whose compiled code ran in every layer and was compiled before the timing, or it fails. Every
row is printed and in the CSV as soon as it is measured; one that fails leaves the others theirs. Needs transformers.
"""

import csv
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from adapter_overhead import overhead_us
from compiled_code import num_entries, num_graphs
from e2e_batches import Batches, by_document, documents_of, packed_rows, padded_batches, token_losses
from e2e_providers import PROVIDERS, Provider, model_of
from harness import bench_parser, measured_on, seconds, write_csv

TOKENS, CAPACITY = 65_536, 8192
# Qwen3-0.6B's. The logits of a padded batch take the most memory, an estimated 90 GiB in all: --vocabulary for less.
SHAPE = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True}  # fmt: skip
TINY_TOKENS, TINY_CAPACITY = 2048, 512
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}  # fmt: skip
OVERHEADS = {f"adapter overhead, {kind}": kind for kind in ("cu_seq_lens", "position_ids")}
COLUMNS = ("provider", "vocabulary", "tokens", "documents", "tokens_per_second", "peak_gib", "loss", "token_loss_difference",
           "compiled_calls", "our_kernels_percent", "host_waits_percent", "host_us_per_layer", "device", "torch",
           "commit")  # fmt: skip
WARM_UP = 3  # batches: the largest, of several lengths, so that what is compiled is compiled for any
# Root of the mean squared difference of a token's loss. Documents that see each other differ by some tenths.
TOLERANCE = {"cpu": 1e-4, "cuda": 0.1}


def step(model, batches: list[dict], shares: list[float]) -> torch.Tensor:
    """Forward and backward of the mean loss over all targets; reads nothing back."""
    model.zero_grad(set_to_none=True)
    loss = 0.0
    for batch, share in zip(batches, shares, strict=True):
        part = model(**batch).loss * share
        part.backward()
        loss += part.detach()
    return loss


def shares_of(call: Callable) -> dict:
    """Of the GPU's busy time, what our kernels take; of the step, what the host waits for results that it reads."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        elapsed = seconds(call, "cuda") * 1e6
    events = [event for event in trace.key_averages() if not event.is_user_annotation]
    kernels = {event.key: event.self_device_time_total for event in events if event.device_type == DeviceType.CUDA}
    if not kernels:
        raise RuntimeError("the profiler saw no kernel")
    ours = sum(time for name, time in kernels.items() if "packing_ops" in name)
    # The wait at the end of the step is the bench's own, cudaDeviceSynchronize.
    waits = ("cudaStreamSynchronize", "cudaEventSynchronize")
    waited = sum(event.self_cpu_time_total for event in events if event.key in waits)
    return {
        "our_kernels_percent": f"{100 * ours / sum(kernels.values()):.1f}",
        "host_waits_percent": f"{100 * waited / elapsed:.1f}",
    }


def compiled_calls(model, provider: Provider, batches: list[dict], new_graphs: int) -> int | str:
    """Of a forward over all batches; no figure of code that ran uncompiled, or was compiled in the time of a step."""
    expected = provider.compiled_calls(model.config.num_hidden_layers) * len(batches)
    if not expected:
        return ""

    def forward():
        for batch in batches:
            model(**batch)

    found = num_entries(forward)
    if found < expected:
        raise RuntimeError(f"compiled code: expected it to run {expected} times in {len(batches)} batches, got {found}")
    if new_graphs:
        raise RuntimeError(f"compiled code: expected all of it before the timing, got {new_graphs} more graphs in it")
    return found


def batches_of(provider: Provider, documents, capacity: int, device: str) -> Batches:
    made = (
        padded_batches(documents)
        if provider.padded
        else packed_rows(documents, capacity * provider.capacities, provider.explicit)
    )
    on_device = [{k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()} for batch in made.batches]
    return made._replace(batches=on_device)


def measure(provider: Provider, documents, shape: dict, capacity: int, device: str, reference: list) -> Iterator[dict]:
    """What is known of a row, each time that more of it is. ``reference``: losses of the first provider's tokens."""
    batches, shares, order = batches_of(provider, documents, capacity, device)
    tokens = sum(map(len, documents))
    with model_of(provider, shape, device) as model:
        losses = torch.cat([token_losses(model(**batch).logits, batch) for batch in batches])
        losses = by_document(losses, order, documents)
        reference[:] = reference or [losses]
        largest = sorted(range(len(batches)), key=lambda i: -batches[i]["input_ids"].numel())[:WARM_UP]
        few = [batches[i] for i in largest], [shares[i] for i in largest]
        step(model, *few)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        totals, graphs = [], num_graphs()
        times = sorted(
            seconds(lambda: totals.append(step(model, batches, shares)), device) for _ in range(provider.runs)
        )
        peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
        found = {
            "vocabulary": shape["vocab_size"],
            "tokens": tokens,
            "documents": len(documents),
            "tokens_per_second": f"{tokens / times[len(times) // 2]:.0f}",
            "peak_gib": f"{peak:.2f}",
            "loss": f"{float(totals[0]):.4f}",
            "token_loss_difference": f"{float((losses - reference[0]).square().mean().sqrt()):.2g}",
            "compiled_calls": compiled_calls(model, provider, batches, num_graphs() - graphs),
        }
        yield found
        if provider.profiled and device == "cuda":
            yield found | shares_of(lambda: step(model, *few))


def release(device: str) -> None:
    """What one provider compiled or left in memory is nothing to the next."""
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def chosen(wanted: list[str], unwanted: list[str], device: str) -> list[str]:
    here = {name: p for name, p in PROVIDERS.items() if device == "cuda" or not p.cuda_only}
    names = [*OVERHEADS, *(name for name, p in here.items() if wanted or not p.on_request)]
    names = [name for name in names if not any(part in name for part in unwanted)]
    return [name for name in names if not wanted or any(part in name for part in wanted)]


def rows_of(path: Path, vocabulary: int) -> dict[str, dict]:
    """Of this vocabulary; what a layer costs the host is of any."""
    with path.open(newline="") as file:
        rows = {row["provider"]: {name: row.get(name, "") for name in COLUMNS} for row in csv.DictReader(file)}
    return {name: row for name, row in rows.items() if row["vocabulary"] == str(vocabulary) or name in OVERHEADS}


def main():
    parser = bench_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="a small model and few tokens, to see that it runs")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="rows whose name contains one of these; "
                        "the others of the CSV stay")  # fmt: skip
    parser.add_argument("--skip", nargs="+", metavar="NAME", default=[], help="not those whose name contains one of "
                        "these; they stay too")  # fmt: skip
    parser.add_argument("--vocabulary", type=int, metavar="N", help=f"default: {SHAPE['vocab_size']:,}, Qwen3's")
    arguments = parser.parse_args()
    device = arguments.device
    shape, tokens, capacity = (TINY, TINY_TOKENS, TINY_CAPACITY) if arguments.tiny else (SHAPE, TOKENS, CAPACITY)
    shape = shape | {"vocab_size": arguments.vocabulary or shape["vocab_size"]}
    documents, reference = documents_of(tokens, capacity, shape["vocab_size"]), []
    path = arguments.out / f"e2e_{device}.csv"
    names = chosen(arguments.only, arguments.skip, device)
    if not names:
        parser.error(f"--only: expected parts of {[*PROVIDERS, *OVERHEADS]}, got {arguments.only}")
    rows = rows_of(path, shape["vocab_size"]) if (arguments.only or arguments.skip) and path.exists() else {}
    where = measured_on(device)

    def measured(name: str) -> Iterator[dict]:
        if name in OVERHEADS:
            yield {"host_us_per_layer": f"{overhead_us(OVERHEADS[name], device):.1f}"}
        else:
            yield from measure(PROVIDERS[name], documents, shape, capacity, device, reference)

    failed = []
    for name in names:
        start = time.perf_counter()
        try:
            for found in measured(name):
                rows[name] = {**dict.fromkeys(COLUMNS, ""), "provider": name, **found, **where}
                write_csv(path, list(rows.values()), show=False)
                print(f"{name}: {found} ({time.perf_counter() - start:.0f} s)", flush=True)
            if float(found.get("token_loss_difference", 0)) > TOLERANCE[device]:
                raise RuntimeError(f"token_loss_difference: expected at most {TOLERANCE[device]}")
        except Exception as error:  # one provider that cannot run here says nothing about the others
            failed.append(name)
            print(f"{name}: failed, {type(error).__name__}: {str(error)[:500]}", flush=True)
        release(device)
    if rows:
        write_csv(path, list(rows.values()))
    if failed:
        raise SystemExit(f"failed: {failed}")


if __name__ == "__main__":
    main()
