"""PaddingFreeDPOCollator(share_prompt=True): pairs as prefix trees, against the same pairs without sharing."""

import pytest
import torch
from helpers import assert_same

from packing_ops._runtime import gate, plain
from packing_ops.data import PaddingFreeDPOCollator


def pairs_of_prompts(*prompts):
    """Chosen and rejected answers of 3 and 2 tokens to prompts of these lengths."""
    examples = []
    for i, length in enumerate(prompts):
        prompt = [1000 * (i + 1) + depth for depth in range(length)]
        chosen, rejected = [*prompt, 5, 6, 7], [*prompt, 8, 9]
        labels = [-100] * len(prompt) + chosen[-3:]
        examples.append({"chosen_input_ids": chosen, "rejected_input_ids": rejected, "chosen_labels": labels,
                         "rejected_labels": [-100] * len(prompt) + rejected[-2:], "index": 40 + i})  # fmt: skip
    return examples


def test_pairs_that_share_their_prompt(device):
    examples = [
        {name: torch.tensor(value, device=device) if name != "index" else value for name, value in each.items()}
        for each in pairs_of_prompts(130, 5)
    ]
    batch = PaddingFreeDPOCollator(share_prompt=True, return_packed_metadata=True, capacity=200)(examples)
    unshared = PaddingFreeDPOCollator(concatenated=True)(examples)
    assert batch["cu_seq_lens_q"].tolist() == [0, 128, 133, 137, 145, 152]
    assert batch["segment_parents"].tolist() == [-1, 0, 0, -1, -1]
    assert (batch["max_length_q"], batch["max_length_k"]) == (133, 133)
    rows = batch["slot_of_token"]
    for name in ("input_ids", "position_ids"):
        assert_same(batch[name][:, rows], unshared[name])
    assert_same(batch["labels"], unshared["labels"])
    assert_same(batch["sample_cu_seqlens"], unshared["cu_seq_lens_q"])
    assert batch["index"].tolist() == [40, 41]
    assert {t.device.type for t in batch.values() if isinstance(t, torch.Tensor) and t is not batch["index"]} == {
        device
    }
    assert_same(batch["prefix_tree"].slot_of_token, rows)
    assert "prefix_tree" not in PaddingFreeDPOCollator(share_prompt=True)(examples)


def test_pairs_that_share_are_chosen_as_without():
    """The limit is on the documents of a side: 133 and 132 tokens of the first pair leave no room for the second."""
    examples = pairs_of_prompts(130, 130)
    with pytest.warns(UserWarning, match="1 of 2 examples dropped"):
        batch = PaddingFreeDPOCollator(share_prompt=True, capacity=140, overlong="drop")(examples)
    assert (batch["index"].tolist(), batch["sample_cu_seqlens"].tolist()) == ([40], [0, 133, 265])
    assert batch["input_ids"].shape == (1, 128 + 5 + 4)
    alone = {"chosen_input_ids": [1, 2], "rejected_input_ids": [3]}
    separated = PaddingFreeDPOCollator(share_prompt=True)([alone], separator_id=-7)
    assert separated["labels"].tolist() == [[-7, 2, -7]]
    assert separated["segment_parents"].tolist() == [-1, -1]


def test_pairs_that_share_without_the_library(monkeypatch):
    examples = pairs_of_prompts(130, 5)
    expected = PaddingFreeDPOCollator(share_prompt=True)(examples)
    monkeypatch.setattr(gate, "pack_prefix_tree", plain.pack_prefix_tree)
    found = PaddingFreeDPOCollator(share_prompt=True)(examples)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected[name]))
