"""The collators take ``[1, length]``, which iter_microbatches takes and yields, as the sequence of its one row."""

import numpy as np
import pytest
import torch

import packing_ops as po
from packing_ops.data import PackedCollator, PaddingFreeCollator, PaddingFreeDPOCollator, count_within_token_budget

LISTS = [
    {"input_ids": [5, 6], "labels": [-100, 6], "attention_mask": [1, 1]},
    {"input_ids": [7, 8, 9], "labels": [7, 8, 9], "attention_mask": [1, 1, 1]},
    {"input_ids": [3], "labels": [3], "attention_mask": [1]},
]
KINDS = pytest.mark.parametrize("kind", [torch.tensor, np.array, list], ids=["tensors", "arrays", "lists"])


def plain(batch):
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def rows(examples, kind):
    """Each sequence as [1, length]; numbers as they are."""
    return [{n: kind([v]) if isinstance(v, list) else v for n, v in example.items()} for example in examples]


@KINDS
def test_padding_free(kind):
    assert plain(PaddingFreeCollator()(rows(LISTS, kind))) == plain(PaddingFreeCollator()(LISTS))
    cut = PaddingFreeCollator(capacity=4, overlong="truncate")
    with pytest.warns(UserWarning, match="capacity=4"):
        assert plain(cut(rows(LISTS, kind)))["input_ids"] == [[5, 6, 7, 8]]
    assert cut.selection(rows(LISTS, kind)) == cut.selection(LISTS)
    assert count_within_token_budget(rows(LISTS, kind), 4) == 1


@KINDS
def test_pairs(kind):
    pairs = [{"chosen_input_ids": [1, 2], "rejected_input_ids": [3], "index": 4}]
    assert plain(PaddingFreeDPOCollator()(rows(pairs, kind))) == plain(PaddingFreeDPOCollator()(pairs))


@KINDS
def test_packed(kind):
    examples = [
        {"input_ids": [5, 6, 7], "num_actions": 2, "loss_mask": [0, 1]},
        {"input_ids": [8, 9], "num_actions": 1, "loss_mask": [1]},
    ]
    assert plain(PackedCollator(8)(rows(examples, kind))) == plain(PackedCollator(8)(examples))


def test_micro_batches_of_one_example_are_examples():
    micro_batches = list(po.iter_microbatches(LISTS, 1, pad_values={"input_ids": 0, "labels": -100}))
    assert micro_batches[1]["input_ids"].shape == (1, 3)
    assert plain(PaddingFreeCollator()(micro_batches)) == plain(PaddingFreeCollator()(LISTS))
    actions = [{"input_ids": [5, 6, 7], "num_actions": 2}, {"input_ids": [8, 9], "num_actions": 1}]
    micro_batches = list(po.iter_microbatches(actions, 1, pad_values={"input_ids": 0}))
    assert plain(PackedCollator(8)(micro_batches)) == plain(PackedCollator(8)(actions))
