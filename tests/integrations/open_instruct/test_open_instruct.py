"""open-instruct's collators: its keys and fillings, and its loader's accounting."""

import doctest

import pytest
import torch

from packing_ops.integrations import open_instruct
from packing_ops.integrations.open_instruct import (
    TensorDataCollatorWithFlattening,
    TensorDataCollatorWithFlatteningDPO,
)


def test_examples_of_the_docstrings():
    assert doctest.testmod(open_instruct, extraglobs={"torch": torch}).failed == 0


def documents(*lengths, device="cpu", **more):
    return [{"input_ids": torch.arange(1, n + 1, device=device) + 10 * i, **more} for i, n in enumerate(lengths)]


def plain(batch):
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def test_flattened_examples(device):
    batch = TensorDataCollatorWithFlattening()(documents(2, 3, device=device))
    assert plain(batch) == {
        "input_ids": [[1, 2, 11, 12, 13]],
        "labels": [[-100, 2, -100, 12, 13]],
        "position_ids": [[0, 1, 0, 1, 2]],
        "seq_idx": [[0, 0, 1, 1, 1]],
        "cu_seq_lens_q": [0, 2, 5],
        "cu_seq_lens_k": [0, 2, 5],
        "max_length_q": 3,
        "max_length_k": 3,
    }
    assert {name: value.dtype for name, value in batch.items() if isinstance(value, torch.Tensor)} == {
        **dict.fromkeys(("input_ids", "labels", "position_ids"), torch.int64),
        **dict.fromkeys(("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"), torch.int32),
    }
    assert batch["input_ids"].device.type == batch["cu_seq_lens_q"].device.type == device


def test_options_leave_keys_out_and_own_labels_are_taken():
    options = {"return_flash_attn_kwargs": False, "return_position_ids": False, "return_seq_idx": False}
    examples = [{"input_ids": [1, 2, 3], "labels": [7, -100, 9]}]
    batch = TensorDataCollatorWithFlattening(**options)(examples, separator_id=-1)
    assert plain(batch) == {"input_ids": [[1, 2, 3]], "labels": [[-1, -100, 9]]}


def test_short_rows_are_filled():
    batch = plain(TensorDataCollatorWithFlattening(max_seq_length=7)(documents(2, 3)))
    assert batch["input_ids"] == [[1, 2, 11, 12, 13, 0, 0]]
    assert batch["labels"] == [[-100, 2, -100, 12, 13, -100, -100]]
    assert batch["position_ids"] == [[0, 1, 0, 1, 2, 0, 0]]
    assert batch["seq_idx"] == [[0, 0, 1, 1, 1, -1, -1]]
    assert (batch["cu_seq_lens_q"], batch["max_length_q"]) == ([0, 2, 5], 3)
    batch = plain(TensorDataCollatorWithFlattening(max_seq_length=9, pad_segment=True)(documents(2, 3)))
    assert batch["position_ids"] == [[0, 1, 0, 1, 2, 0, 1, 2, 3]]
    assert (batch["cu_seq_lens_k"], batch["max_length_k"]) == ([0, 2, 5, 9], 4)


def test_long_rows_are_cut_and_lost_documents_told():
    with pytest.warns(UserWarning, match="max_seq_length=4: 0 of 2 examples dropped and 1 cut, 1 of 5 tokens lost"):
        batch = plain(TensorDataCollatorWithFlattening(max_seq_length=4)(documents(2, 3)))
    assert batch["input_ids"] == [[1, 2, 11, 12]]
    assert (batch["cu_seq_lens_q"], batch["max_length_q"]) == ([0, 2, 4], 2)
    with pytest.warns(UserWarning, match="max_seq_length=2: 2 of 3 examples dropped and 0 cut, 4 of 6 tokens lost"):
        batch = plain(TensorDataCollatorWithFlattening(max_seq_length=2)(documents(2, 3, 1)))
    assert (batch["cu_seq_lens_q"], batch["seq_idx"]) == ([0, 2], [[0, 0]])


def preference_pairs(chosen, rejected):
    sides = documents(*chosen), documents(*rejected)
    return [
        {"chosen_input_ids": c["input_ids"], "rejected_input_ids": r["input_ids"], "index": i + 40}
        for i, (c, r) in enumerate(zip(*sides, strict=True))
    ]


def test_preference_pairs_stay_pairs():
    batch = plain(TensorDataCollatorWithFlatteningDPO()(preference_pairs([2, 3], [4, 1])))
    assert (batch["chosen_cu_seq_lens_q"], batch["rejected_cu_seq_lens_k"]) == ([0, 2, 5], [0, 4, 5])
    assert batch["index"] == [40, 41]
    batch = plain(TensorDataCollatorWithFlatteningDPO(max_seq_length=6)(preference_pairs([2, 3], [6, 1])))
    assert batch["index"] == [40]
    assert (batch["chosen_cu_seq_lens_q"], batch["rejected_cu_seq_lens_q"]) == ([0, 2], [0, 6])
    assert batch["chosen_labels"] == [[-100, 2, -100, -100, -100, -100]]  # nothing of the unpaired one is summed


@pytest.mark.filterwarnings("error")
def test_the_loader_of_open_instruct_trains_on_every_token():
    """It collates what is left over and the next examples, and carries all but the ``index`` of the batch."""
    chosen, rejected = [30, 50, 10, 20, 10, 5], [40, 60, 5, 30, 15, 15]
    examples, collator = preference_pairs(chosen, rejected), TensorDataCollatorWithFlatteningDPO(max_seq_length=55)
    overflow, tokens, indices = [], 0, []
    for first in (0, 3, 6):
        pending = [*overflow, *examples[first : first + 3]]
        while pending:
            batch = collator(pending)
            overflow = pending[len(batch["index"]) :]
            assert len(overflow) == len(collator.selection(pending).carried)
            indices.append(batch["index"].tolist())
            tokens += int(batch["chosen_cu_seq_lens_k"][-1] + batch["rejected_cu_seq_lens_k"][-1])
            pending = overflow if first == 6 else []
    # The second pair is over the budget alone: whole, in a longer row. After it both budgets bind, in turn.
    assert indices == [[40], [41], [42, 43, 44], [45]]
    assert tokens == sum(chosen) + sum(rejected) == 290


def test_examples_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="labels: expected 3 values like input_ids, got 2 in example 0"):
        TensorDataCollatorWithFlattening()([{"input_ids": [1, 2, 3], "labels": [1, 2]}])
    with pytest.raises(ValueError, match="features: expected at least one example, got none"):
        TensorDataCollatorWithFlattening()([])
    with pytest.raises(ValueError, match="max_seq_length: expected at least 1 token or None, got 0"):
        TensorDataCollatorWithFlattening(max_seq_length=0)
