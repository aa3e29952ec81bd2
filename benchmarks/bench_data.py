"""python benchmarks/bench_data.py: the data path on one CPU core; beside it transformers' collator where it is
installed.
"""

import heapq
import importlib.util

import torch
from harness import Case, run

from packing_ops.data import (
    PackedCollator,
    PaddingFreeCollator,
    normalize_advantages,
    pad_batch_to_multiple,
    token_budget_microbatches,
)

CAPACITY = 8192
DP_SIZE = 8


def lengths_of(count, median=300, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=generator) * 0.9).exp().mul(median).long().clamp(2, CAPACITY).tolist()


def examples_of(lengths, as_tensors=False):
    """The second half of every example is its answer."""
    examples = [
        {
            "input_ids": torch.randint(0, 150_000, (length,)).tolist(),
            "attention_mask": [1] * length,
            "num_actions": length // 2,
            "loss_mask": [1] * (length // 2),
        }
        for length in lengths
    ]
    if as_tensors:
        examples = [
            {name: torch.tensor(v) if isinstance(v, list) else v for name, v in example.items()} for example in examples
        ]
    return examples


def one_at_a_time(collator, examples):
    """The same rows, every document copied on its own."""
    order = collator(examples)
    shape, rows = order["sequences"].shape, order["sub_seq_lengths"]

    def collate():
        sequences = torch.full(shape, collator.pad_token_id)
        attention_mask = torch.zeros(shape, dtype=torch.int64)
        loss_mask = torch.zeros(shape[0], shape[1] - 1)
        documents = iter(order["order"])
        for r, lengths in enumerate(rows):
            slot = 0
            for length in lengths:
                example = examples[next(documents)]
                end, actions = slot + length, example["num_actions"]
                sequences[r, slot:end] = torch.as_tensor(example["input_ids"])
                attention_mask[r, slot:end] = torch.as_tensor(example["attention_mask"])
                loss_mask[r, end - 1 - actions : end - 1] = torch.as_tensor(example["loss_mask"])
                slot = end
        return sequences, attention_mask, loss_mask.mul_(1 / loss_mask.sum())

    return collate


def packed_case(median, as_tensors):
    collator, lengths = PackedCollator(CAPACITY, dp_size=DP_SIZE), lengths_of(1024, median)
    examples = examples_of(lengths, as_tensors)
    kind = "tensors" if as_tensors else "lists"
    return Case("PackedCollator", f"n=1024 dp={DP_SIZE} tokens={sum(lengths)} {kind}", "int64", {
        "packing_ops": lambda: collator(examples),
        "plain loop over documents, rows already packed": one_at_a_time(collator, examples),
    })  # fmt: skip


def padding_free_case(count, as_tensors):
    lengths = lengths_of(count)
    examples = [{"input_ids": example["input_ids"]} for example in examples_of(lengths, as_tensors)]
    collator = PaddingFreeCollator()
    providers = {"packing_ops": lambda: collator(examples)}
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed: no comparison with DataCollatorWithFlattening")
    else:
        from transformers import DataCollatorWithFlattening

        stock = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
        providers["transformers DataCollatorWithFlattening"] = lambda: stock(examples)
    kind = "tensors" if as_tensors else "lists"
    return Case("PaddingFreeCollator", f"n={count} tokens={sum(lengths)} {kind}", "int64", providers)


def collator_cases():
    return [
        *(packed_case(median, as_tensors) for median in (100, 300) for as_tensors in (False, True)),
        *(padding_free_case(count, as_tensors) for count in (8, 64) for as_tensors in (False, True)),
    ]


def largest_differencing(costs, parts):
    """Karmarkar and Karp 1982: the two partial partitions whose parts differ most in cost are merged, over and over."""
    heap = [(-cost, i, [(0, [])] * (parts - 1) + [(cost, [i])]) for i, cost in enumerate(costs)]
    heapq.heapify(heap)
    for i in range(len(costs), 2 * len(costs) - 1):
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        merged = sorted((a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True))
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], i, merged))
    return [indices for _, indices in heap[0][2]]


def micro_batches_case(cost):
    lengths, capacity = torch.tensor(lengths_of(4096)), 16_384

    def ours():
        return token_budget_microbatches(lengths, capacity, dp_size=DP_SIZE, cost=cost)

    a, b = (1, 0) if cost == "tokens" else (12 * 4096, 1)
    costs = [a * length + b * length**2 for length in lengths.tolist()]
    parts = DP_SIZE * len(ours()[0])
    return Case("token_budget_microbatches", f"n=4096 dp={DP_SIZE} {parts} micro-batches {cost}", "int64", {
        "packing_ops": ours,
        "Karmarkar-Karp, a plain loop in Python": lambda: largest_differencing(costs, parts),
    }, runs=7)  # fmt: skip


def pad_batch_case():
    rows, seqlen, missing = 1001, 2048, 7
    batch = {"input_ids": torch.randint(0, 150_000, (rows, seqlen)), "loss_mask": torch.ones(rows, seqlen)}

    def cat():
        ids, mask = batch.values()
        return torch.cat([ids, ids[:1].expand(missing, -1)]), torch.cat([mask, mask.new_zeros(missing, seqlen)])

    return Case("pad_batch_to_multiple", f"{rows} x {seqlen} to {DP_SIZE}", "int64, float32", {
        "packing_ops": lambda: pad_batch_to_multiple(batch, DP_SIZE), "torch.cat": cat,
    })  # fmt: skip


def normalize_case(reduction):
    """1024 rows of 256 prompts in 4 mini-batches, each a prompt, a response and padding; beside it the definition."""
    shape = 1024, 2048
    prompt, response = torch.randint(1, 1024, (2, 1024, 1))
    slot = torch.arange(2048)
    mask = ((slot >= prompt) & (slot < prompt + response)).float()
    advantages = torch.randn(shape) * mask
    boundaries = [(start, start + 256) for start in range(0, 1024, 256)]
    prompts = [(start, start + 4) for start in range(0, 1024, 4)]

    def by_definition():
        parts = []
        for start, end in boundaries:
            own = mask[start:end]
            if reduction == "token_mean":
                parts.append(advantages[start:end] * own / own.sum())
            else:
                tokens = own.view(-1, 4, shape[1]).sum((1, 2)).repeat_interleave(4)[:, None]
                parts.append(advantages[start:end] * own / tokens / (len(own) // 4))
        return torch.cat(parts)

    def ours():
        return normalize_advantages(advantages, mask, boundaries, reduction, prompt_boundaries=prompts)

    torch.testing.assert_close(ours(), by_definition())
    return Case("normalize_advantages", f"{shape[0]} x {shape[1]} {reduction}", "float32", {
        "packing_ops": ours, "plain loop over mini-batches in torch": by_definition,
    })  # fmt: skip


def rows_cases():
    return [
        *(micro_batches_case(cost) for cost in ("tokens", "flops")),
        pad_batch_case(),
        *(normalize_case(reduction) for reduction in ("token_mean", "prompt_mean")),
    ]


def cases(device):
    torch.set_num_threads(1)
    return [*collator_cases(), *rows_cases()]


if __name__ == "__main__":
    run("data", cases)
