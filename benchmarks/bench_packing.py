"""python benchmarks/bench_packing.py [--device cpu|cuda]: pack_sequences on one core, on a GPU pack_ffd.

Where trl is installed its best-fit-decreasing stands beside it, lengths against lengths and data set against data set.
"""

import importlib.util
from collections import defaultdict, deque

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


def best_fit_by_trls_tree(lengths):
    """What trl packs by, on lengths alone: its tree finds the fullest row with room, a queue of rows for every room."""
    from trl.data_utils import _SegmentTree

    rooms, rows_of, rows = _SegmentTree(CAPACITY), defaultdict(deque), []
    rooms.add(CAPACITY)  # of a new row
    order = lengths.argsort(descending=True, stable=True).tolist()
    for document, length in zip(order, lengths[order].tolist(), strict=True):
        room = rooms.search(length)
        if room == CAPACITY:
            row = []
            rows.append(row)
        else:
            row = rows_of[room].popleft()
            if not rows_of[room]:
                rooms.remove(room)
        row.append(document)
        if room > length:
            rows_of[room - length].append(row)
            rooms.add(room - length)
    return rows


def dataset_of(lengths):
    """A column of int32 tokens, in memory."""
    import datasets
    import pyarrow as pa

    datasets.disable_progress_bars()
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32).numpy()
    tokens = pa.array(torch.zeros(int(lengths.sum()), dtype=torch.int32).numpy())
    return datasets.Dataset(pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens)}))


def trl_cases(lengths):
    if importlib.util.find_spec("trl") is None or importlib.util.find_spec("datasets") is None:
        print("trl or datasets is not installed: no comparison with trl")
        return []
    import trl

    from packing_ops.integrations.trl import pack_dataset

    n, ours = len(lengths), packer(lengths, "bfd")
    assert len(best_fit_by_trls_tree(lengths)) == ours().num_bins
    found = [Case("pack_sequences", f"n={n} bfd", "int64", {
        "packing_ops": ours, "trl's tree in a plain loop": lambda: best_fit_by_trls_tree(lengths),
    })]  # fmt: skip
    dataset = dataset_of(lengths)
    for kind, batch_size in (("rows packed 1,000 at a time by trl, all at once by ours", 1000), ("all at once", n)):
        options = {"map_kwargs": {"batch_size": batch_size, "keep_in_memory": True, "load_from_cache_file": False}}
        found.append(Case("pack_dataset", f"n={n} tokens={int(lengths.sum())} bfd, {kind}", "int32", {
            "packing_ops": lambda options=options: pack_dataset(dataset, CAPACITY, **options),
            "trl pack_dataset": lambda options=options: trl.pack_dataset(dataset, CAPACITY, **options),
        }, runs=7))  # fmt: skip
    return found


def device_cases():
    """Lengths that live on the GPU: packed there without a synchronisation, or copied and packed on the host."""
    found = []
    for count in (4096, 65_536):
        lengths = lengths_of(count).cuda()
        found.append(Case("pack_ffd", f"n={count}", "int64", {
            "packing_ops": lambda lengths=lengths: po.pack_ffd(lengths, CAPACITY),
            "copy and pack_sequences": packer(lengths),
        }))  # fmt: skip
    return found


def cases(device):
    if device == "cuda":
        return device_cases()
    torch.set_num_threads(1)
    million = lengths_of(1_000_000)
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
        *trl_cases(lengths_of(100_000)),
        Case("pack_sequences", "n=3 ffd (call overhead)", "int64", {"packing_ops": packer(tiny)}),
    ]  # fmt: skip


if __name__ == "__main__":
    run("packing", cases)
