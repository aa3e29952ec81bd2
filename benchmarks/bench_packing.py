"""python benchmarks/bench_packing.py: pack_sequences on one core; beside it trl's pack_dataset where trl is installed."""

import importlib.util

import torch
from harness import Case, run

import packing_ops as po

CAPACITY = 8192
STRATEGIES = ["ffd", "bfd", "next_fit", "first_fit", "balanced"]


def lengths_of(count, median=300, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=generator) * 0.9).exp().mul(median).long().clamp(1, CAPACITY)


def packer(lengths, strategy="ffd", capacity=CAPACITY, **options):
    return lambda: po.pack_sequences(lengths, capacity, strategy=strategy, **options)


def trl_providers(lengths):
    """trl's best-fit decreasing over the same lengths, with tokens of one byte so that moving them costs little."""
    if importlib.util.find_spec("trl") is None or importlib.util.find_spec("datasets") is None:
        print("trl or datasets is not installed: no comparison with pack_dataset")
        return {}
    import datasets
    import pyarrow as pa
    import trl

    datasets.disable_progress_bars()
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32).numpy()
    tokens = pa.array(torch.zeros(int(lengths.sum()), dtype=torch.uint8).numpy())
    dataset = datasets.Dataset(pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens)}))
    once = {"batch_size": len(lengths), "keep_in_memory": True, "load_from_cache_file": False}
    return {"trl pack_dataset": lambda: trl.pack_dataset(dataset, CAPACITY, strategy="bfd", map_kwargs=once)}


def cases(device):
    torch.set_num_threads(1)
    million = lengths_of(1_000_000)
    compared = lengths_of(100_000)
    distinct = torch.randperm(1_000_000) + 1
    tiny = torch.tensor([820, 410, 520])
    return [
        *(
            Case("pack_sequences", f"n=1000000 {strategy}", "int64", {"packing_ops": packer(million, strategy)})
            for strategy in STRATEGIES
        ),
        Case("pack_sequences", "n=1000000 ffd balance=flops", "int64", {
            "packing_ops": packer(million, bins_multiple_of=8, balance="flops"),
        }),
        Case("pack_sequences", "n=1000000 ffd all lengths distinct", "int64", {
            "packing_ops": packer(distinct, capacity=2_000_000),
        }),
        # Cost per sequence in n: with n log n it grows by 1.15 from one line to the next at most.
        *(
            Case("pack_sequences", f"n={n} ffd", "int64", {"packing_ops": packer(lengths_of(n))})
            for n in (125_000, 250_000, 500_000, 2_000_000, 4_000_000)
        ),
        Case("pack_sequences", "n=100000 bfd", "int64", {
            "packing_ops": packer(compared, "bfd"),
            **trl_providers(compared),
        }, runs=5),
        Case("pack_sequences", "n=3 ffd (call overhead)", "int64", {"packing_ops": packer(tiny)}),
    ]  # fmt: skip


if __name__ == "__main__":
    run("packing", cases)
