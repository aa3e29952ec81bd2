"""count_tokens: what a batch of any kind holds, without a look at the device."""

import doctest

import pytest
import torch
from helpers import cu_seqlens_of
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.data import (
    PackedCollator,
    PaddingFreeCollator,
    PaddingFreeDPOCollator,
    count_tokens,
    counts,
    empty_like_batch,
    pad_batch_to_multiple,
    slice_batch,
)


def counted(batch, **options):
    found = count_tokens(batch, **options)
    assert all(count.dtype == torch.int64 and count.dim() == 0 for count in found)
    return tuple(count.item() for count in found)


def examples_of(lengths):
    return [{"input_ids": list(range(1, n + 1)), "num_actions": n - 1} for n in lengths]


def test_examples_of_the_docstrings():
    assert doctest.testmod(counts).failed == 0


def test_padded_rows(device):
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]], device=device)
    ids = torch.ones(3, 3, dtype=torch.int64, device=device)
    for form in (mask, mask.bool(), mask.float()):
        assert counted({"input_ids": ids, "attention_mask": form}) == (3, 6, 2)
    assert counted({"input_ids": ids}) == (9, 0, 3)
    assert counted({"input_ids": ids[0]}) == (3, 0, 1)
    assert count_tokens({"input_ids": ids, "attention_mask": mask}).tokens.device == ids.device


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), padding=st.integers(0, 3))
def test_rows_of_collators(lengths, padding):
    """A row that is filled up holds one more document there, of only pad_token_id."""
    total, documents = sum(lengths), len(lengths)
    for pad_token_id in (0, 99):
        row = PaddingFreeCollator(capacity=total + padding, pad_token_id=pad_token_id)(examples_of(lengths))
        for names in (row, ["input_ids", "cu_seq_lens_q"]):
            batch = {name: row[name] for name in names}
            assert counted(batch, pad_token_id=pad_token_id) == (total, padding, documents)
    batch = PackedCollator(8, tp_size=2)(examples_of(lengths))
    rows, width = batch["sequences"].shape
    assert counted(batch, tokens="sequences") == (total, rows * width - total, documents)
    one = slice_batch(batch, 0, 1)
    assert counted(one, tokens="sequences")[2] == len(batch["sub_seq_lengths"][0])


def test_pairs(device):
    pairs = [
        {"chosen_input_ids": [5, 6], "rejected_input_ids": [5, 7, 8]},
        {"chosen_input_ids": [4], "rejected_input_ids": [9]},
    ]
    assert counted(PaddingFreeDPOCollator(capacity=6)(pairs)) == (7, 5, 4)
    assert counted(PaddingFreeDPOCollator(capacity=6, concatenated=True)(pairs)) == (7, 5, 4)
    padded = {
        "chosen_input_ids": torch.ones(2, 3, dtype=torch.int64, device=device),
        "chosen_attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]], device=device),
        "rejected_input_ids": torch.ones(2, 4, dtype=torch.int64, device=device),
        "rejected_attention_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]], device=device),
    }
    assert counted(padded) == (8, 6, 4)


def test_a_document_of_the_padding_token_is_no_padding():
    """num_tokens says what is; without it, and without labels, nobody can."""
    row = PaddingFreeCollator(capacity=8)([{"input_ids": [0, 0]}, {"input_ids": [0]}])
    batch = {name: row[name] for name in ("input_ids", "cu_seq_lens_q", "num_tokens")}
    assert counted(batch) == (3, 5, 2)
    collator = PackedCollator(12, tp_size=4)
    packed = collator([{"input_ids": [0] * n, "num_actions": 0} for n in (6, 3, 1)])
    slots = packed["sequences"].numel()
    assert counted(collator.model_inputs(packed)) == (10, slots - 10, 3)
    assert counted({"input_ids": packed["sequences"], "layout": collator.packed_metadata(packed)}) == (
        10,
        slots - 10,
        3,
    )
    empty = empty_like_batch(collator.model_inputs(packed), padding=1)
    assert counted(empty) == (0, 1, 0)
    assert counted(empty_like_batch(row, padding=1)) == (0, 1, 0)


def test_a_prefix_tree_is_refused():
    """Its segments are no samples, and its rows fewer than their tokens."""
    prompt = list(range(1, 200))
    pairs = [{"chosen_input_ids": [*prompt, 7], "rejected_input_ids": [*prompt, 8, 9]}] * 2
    tree = PaddingFreeDPOCollator(share_prompt=True, return_packed_metadata=True)(pairs)
    with pytest.raises(ValueError, match="segment_parents: expected packed documents, got a prefix tree"):
        count_tokens(tree)
    with pytest.raises(ValueError, match="layout: expected packed documents, got a prefix tree"):
        count_tokens(
            {"input_ids": tree["input_ids"], "layout": po.PackedMetadata.from_prefix_tree(tree["prefix_tree"])}
        )
    samples = {"input_ids": tree["input_ids"][:, tree["slot_of_token"]], "cu_seqlens": tree["sample_cu_seqlens"]}
    assert counted(samples) == counted(PaddingFreeDPOCollator(concatenated=True)(pairs)) == (802, 0, 4)


def test_layouts_that_end_before_the_row(device):
    """open-instruct's cu_seq_lens, ours and a PackedMetadata: slots after them are padding."""
    ids = torch.arange(1, 8, device=device)
    cu_seqlens = cu_seqlens_of([2, 0, 3], device)
    layout = po.PackedMetadata.from_cu_seqlens(cu_seqlens, total=7, max_seqlen=3, num_tokens=5)
    for told in ({"cu_seq_lens_k": cu_seqlens}, {"cu_seqlens": cu_seqlens}, {"layout": layout}):
        for row in (ids, ids[None]):
            assert counted({"input_ids": row, **told}) == (5, 2, 2)
    assert counted(empty_like_batch({"input_ids": ids, "cu_seqlens": cu_seqlens})) == (0, 0, 0)
    assert counted(empty_like_batch({"input_ids": ids, "cu_seq_lens_q": cu_seqlens}, padding=1)) == (0, 1, 0)


def test_a_mask_beside_cu_seqlens_says_what_is_padding(device):
    ids, cu_seqlens = torch.zeros(1, 6, dtype=torch.int64, device=device), cu_seqlens_of([4, 2], device)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0]], device=device)
    assert counted({"input_ids": ids, "cu_seqlens": cu_seqlens, "attention_mask": mask}) == (3, 3, 1)


def test_dummy_rows_are_sequences():
    batch = PackedCollator(8)(examples_of([5, 3, 6]))
    assert counted(batch, tokens="sequences")[2] == 3
    assert counted(pad_batch_to_multiple(batch, 3), tokens="sequences")[2] == 3 + len(batch["sub_seq_lengths"][0])


def test_nothing_is_read():
    """On the meta device, where a number that is asked for is an error: nothing waits for a GPU."""
    row = PaddingFreeCollator(capacity=9)(examples_of([4, 2]))
    layout = po.PackedMetadata(torch.empty(3, dtype=torch.int32, device="meta"), total=9, max_seqlen=4)
    ids = row["input_ids"].to("meta")
    for batch in (
        {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in row.items()},
        {"input_ids": ids, "attention_mask": ids},
        {"input_ids": ids, "layout": layout},
        {"input_ids": ids, "sub_seq_lengths": [[4, 2]]},
    ):
        assert all(count.device.type == "meta" for count in count_tokens(batch))


def test_a_default_device_is_the_callers():
    with torch.device("meta"):
        row = PaddingFreeCollator(capacity=9)(examples_of([4, 2]))
        assert counted(row) == (6, 3, 2)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"ids": torch.ones(2, 2)}, r"input_ids: expected a tensor \[total\] or \[rows, seqlen\], got only \['ids'\]"),
        ({"input_ids": [[1, 2]]}, r"input_ids: expected a tensor .*, got \[\[1, 2\]\] \(list\)"),
        ({"input_ids": torch.ones(1, 2, 3)}, r"input_ids: expected a tensor .*, got float32 \[1, 2, 3\]"),
        (
            {"input_ids": torch.ones(2, 2), "attention_mask": torch.ones(2, 3)},
            r"attention_mask: expected \[2, 2\] like input_ids, got \[2, 3\]",
        ),
        ({"input_ids": torch.ones(2), "cu_seqlens": torch.ones(2, 2)}, "cu_seqlens: expected int32 or int64"),
    ],
)
def test_bad_input_is_named(batch, message):
    with pytest.raises((ValueError, TypeError), match=message):
        count_tokens(batch)


@pytest.mark.parametrize("cu_seqlens", [[0, 2, 9], [-3, 2, 5], [0, 4, 2, 5], [1, 5]])
def test_cu_seqlens_that_are_none_are_named(cu_seqlens):
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        count_tokens({"input_ids": torch.arange(1, 6), "cu_seqlens": torch.tensor(cu_seqlens)})


def test_names_may_be_numbers():
    assert count_tokens({0: 3, "input_ids": torch.arange(1, 6)}).tokens == 5
