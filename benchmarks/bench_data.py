"""python benchmarks/bench_data.py: the data path on one CPU core; beside it transformers' collator where it is installed."""

import importlib.util

import torch
from harness import Case, run

from packing_ops.data import PackedCollator, PaddingFreeCollator

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
    return Case("PackedCollator", f"n=1024 dp={DP_SIZE} {sum(lengths)} tokens, {kind}", "int64", {
        "packing_ops": lambda: collator(examples),
        "one document at a time, without packing": one_at_a_time(collator, examples),
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
    return Case("PaddingFreeCollator", f"n={count} {sum(lengths)} tokens, {kind}", "int64", providers)


def collator_cases():
    return [
        *(packed_case(median, as_tensors) for median in (100, 300) for as_tensors in (False, True)),
        *(padding_free_case(count, as_tensors) for count in (8, 64) for as_tensors in (False, True)),
    ]


def cases(device):
    torch.set_num_threads(1)
    return collator_cases()


if __name__ == "__main__":
    run("data", cases)
