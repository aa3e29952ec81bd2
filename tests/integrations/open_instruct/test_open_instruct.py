"""open-instruct's collators: its keys and fillings, and its loader's accounting."""

import doctest

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packing_ops import pack_sequences
from packing_ops.contrib import open_instruct
from packing_ops.contrib.open_instruct import (
    TensorDataCollatorWithFlattening,
    TensorDataCollatorWithFlatteningDPO,
    packing_advice,
    packs_for_ranks,
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
    with pytest.warns(UserWarning, match="capacity=4: 0 of 2 examples dropped and 1 cut, 1 of 5 tokens lost"):
        batch = plain(TensorDataCollatorWithFlattening(max_seq_length=4)(documents(2, 3)))
    assert batch["input_ids"] == [[1, 2, 11, 12]]
    assert (batch["cu_seq_lens_q"], batch["max_length_q"]) == ([0, 2, 4], 2)
    with pytest.warns(UserWarning, match="capacity=2: 2 of 3 examples dropped and 0 cut, 4 of 6 tokens lost"):
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
    # The second pair is over the budget by itself: whole, in a longer row. After it both budgets bind, in turn.
    assert indices == [[40], [41], [42, 43, 44], [45]]
    assert tokens == sum(chosen) + sum(rejected) == 290


def test_examples_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="labels: expected 3 values like input_ids, got 2 in example 0"):
        TensorDataCollatorWithFlattening()([{"input_ids": [1, 2, 3], "labels": [1, 2]}])
    with pytest.raises(ValueError, match="features: expected at least one example, got none"):
        TensorDataCollatorWithFlattening()([])
    with pytest.raises(ValueError, match="capacity: expected at least 1 token or None, got 0"):
        TensorDataCollatorWithFlattening(max_seq_length=0)


@given(lengths=st.lists(st.integers(0, 40), max_size=30), pack_length=st.integers(1, 32), num_ranks=st.integers(1, 5))
def test_packs_for_ranks_hold_each_sequence_once(lengths, pack_length, num_ranks):
    packs = packs_for_ranks(lengths, pack_length, num_ranks)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    for pack in packs:
        assert pack == sorted(pack)
        assert len(pack) == 1 or sum(lengths[i] for i in pack) <= pack_length
    strategy = "bfd" if num_ranks == 1 else "balanced"
    fewest = pack_sequences(lengths, pack_length, strategy=strategy, overlong="own").num_bins
    if lengths and -(-fewest // num_ranks) * num_ranks <= len(lengths):
        assert len(packs) % num_ranks == 0
        assert len(packs) >= fewest
    else:
        assert len(packs) == fewest


def test_packs_for_ranks_leave_no_rank_much_more_than_another():
    lengths = torch.randint(1, 200, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    packs = packs_for_ranks(lengths, 512, 8)
    share = len(packs) // 8
    tokens = [sum(lengths[i] for pack in packs[at : at + share] for i in pack) for at in range(0, len(packs), share)]
    assert max(tokens) <= 1.02 * min(tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3], 0), "pack_length: expected at least 1 token, got 0"),
        (([3], 4, 0), "num_ranks: expected at least 1, got 0"),
        (([-3], 4), "lengths"),
    ],
)
def test_packs_for_ranks_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        packs_for_ranks(*arguments)


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20), batch_size=st.integers(1, 6))
def test_packing_advice_counts_what_padding_takes(lengths, batch_size):
    padded = torch.nn.utils.rnn.pad_sequence
    batches = [lengths[at : at + batch_size] for at in range(0, len(lengths), batch_size)]
    slots = sum(padded([torch.ones(n) for n in batch], batch_first=True).numel() for batch in batches)
    filled = round(100 * sum(lengths) / slots)
    line = packing_advice(torch.tensor(lengths), batch_size)
    assert f"the first {len(lengths)} examples fill {filled}% of the slots" in line
    assert ("is recommended" in line) == (filled <= 90)


@pytest.mark.parametrize(
    ("lengths", "batch_size", "message"),
    [
        ([], 2, "lengths: expected at least one"),
        ([4, 0], 2, "got \\[4, 0\\]"),
        ([4], 0, "batch_size: expected at least 1"),
        (torch.ones(3), 2, "lengths: expected int32 or int64 \\[num_examples\\], got float32"),
        (torch.ones(2, 3, dtype=torch.int64), 2, "lengths: expected int32 or int64"),
    ],
)
def test_packing_advice_refuses(lengths, batch_size, message):
    with pytest.raises(ValueError, match=message):
        packing_advice(lengths, batch_size)
