"""Two multiples, of documents and of rows: SkyRL's numbers, and the same rule in everything that packs."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.data import (
    PackedCollator,
    PackedStream,
    PaddingFreeCollator,
    PaddingFreeDPOCollator,
    packed_alignment,
    token_budget_microbatches,
)

# What NovaSky-AI/SkyRL gives (megatron/packing_utils.py): of a sequence, then of the packed row in bf16 and in FP8.
SKYRL = {
    (1, 1): (1, 1, 16),
    (2, 1): (1, 2, 16),
    (3, 1): (1, 3, 48),
    (8, 1): (1, 8, 16),
    (1, 2): (4, 4, 32),
    (2, 2): (8, 8, 32),
    (4, 2): (16, 16, 32),
    (1, 4): (8, 8, 64),
    (3, 2): (12, 12, 96),
    (8, 4): (64, 64, 64),
}
# Its multiples for the two other recipes, of a row.
RECIPES = {(1, 1): (32, 16), (2, 1): (64, 256), (1, 2): (64, 32), (2, 2): (128, 512), (4, 2): (256, 1024)}


@pytest.mark.parametrize(("tp", "cp"), SKYRL)
def test_multiples_are_those_of_skyrl(tp, cp):
    document, row, fp8 = SKYRL[tp, cp]
    assert packed_alignment(tp=tp, cp=cp, fp8=None) == (document, row)
    assert packed_alignment(tp=tp, cp=cp, fp8="tensor") == (document, fp8)


@pytest.mark.parametrize(("tp", "cp"), RECIPES)
def test_multiples_of_other_recipes(tp, cp):
    for name, row in zip(("mxfp8", "blockwise"), RECIPES[tp, cp], strict=True):
        assert packed_alignment(tp=tp, cp=cp, fp8=name) == (packed_alignment(tp=tp, cp=cp, fp8=None)[0], row)


def test_one_multiple_for_both():
    assert (packed_alignment(), packed_alignment(4, 1), packed_alignment(3, 2, True)) == (1, 4, 96)
    assert packed_alignment(tp=3, cp=2, fp8=True) == packed_alignment(3, 2, fp8=True) == 96
    assert packed_alignment(2, 2, fp8="tensor") == packed_alignment(tp=2, cp=2, fp8="tensor")
    with pytest.raises(
        ValueError, match=r"^fp8: expected 'tensor', 'mxfp8', 'blockwise', None or a bool, got 'delayed'$"
    ):
        packed_alignment(tp=1, fp8="delayed")
    with pytest.raises(ValueError, match=r"^cp: expected at least 1, got 0$"):
        packed_alignment(cp=0)
    with pytest.raises(TypeError, match=r"^tp: expected None beside tp_size=2, got 2$"):
        packed_alignment(2, tp=2)


def up(length, multiple):
    return -(-length // multiple) * multiple


LENGTHS = st.lists(st.integers(1, 48), min_size=1, max_size=40)
MULTIPLES = {"document_multiple": st.sampled_from([1, 4, 8]), "row_multiple": st.sampled_from([1, 3, 16])}


@given(
    lengths=LENGTHS,
    capacity=st.integers(64, 130),
    strategy=st.sampled_from(["ffd", "bfd", "next_fit", "balanced"]),
    **MULTIPLES,
)
def test_rows_of_pack_sequences_are_within_the_capacity(lengths, capacity, strategy, document_multiple, row_multiple):
    multiples = {"document_multiple": document_multiple, "row_multiple": row_multiple}
    packing = po.pack_sequences(lengths, capacity, strategy=strategy, **multiples)
    assert sorted(itertools.chain(*packing.bins)) == list(range(len(lengths)))
    slots = [sum(up(lengths[i], document_multiple) for i in row) for row in packing.bins]
    assert max(up(own, row_multiple) for own in slots) <= capacity
    assert packing.num_slots == packing.num_bins * (capacity // row_multiple * row_multiple)
    assert (
        po.pack_sequences(lengths, capacity, strategy=strategy, alignment=document_multiple).num_bins
        <= packing.num_bins
    )


def test_multiples_of_rows_cost_less_than_those_of_documents():
    """Of #2108: 41 documents of 33 tokens at a row multiple of 32 take 1,376 slots, each rounded up 2,624."""
    assert po.pack_sequences([33] * 41, 2048, row_multiple=32).num_bins == 1
    assert po.pack_sequences([33] * 41, 2048, document_multiple=32).num_bins == 2


def test_longer_rows_are_rounded_up_too():
    packing = po.pack_sequences([5, 41, 7], 40, document_multiple=4, row_multiple=16, overlong="own")
    assert (packing.own.tolist(), packing.own_slots, packing.num_slots) == ([1], 48, 48 + 32)
    pairs = po.pack_sequences([[5, 41], [7, 8]], 40, document_multiple=4, row_multiple=16, overlong="own")
    assert pairs.own_slots == 32 + 48


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"row_multiple": 41}, "row_multiple: expected at most capacity=40, got 41"),
        ({"row_multiple": 0}, "row_multiple: expected at least 1, got 0"),
        ({"document_multiple": 0}, "document_multiple: expected at least 1, got 0"),
        ({"document_multiple": 4, "alignment": 2}, "alignment: expected document_multiple=4 alone, got 2 too"),
        ({"row_multiple": 16}, r"lengths: expected at most 32 slots of capacity=40 \(row_multiple=16\), got 39 at index 1"),
        ({"document_multiple": 32}, "lengths: expected at most capacity=40 after rounding up to a multiple of document_multiple=32"),
    ],
)  # fmt: skip
def test_bad_multiples_are_named(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        po.pack_sequences([5, 39], 40, **options)


@given(lengths=LENGTHS, capacity=st.integers(64, 130), dp_size=st.integers(1, 3), **MULTIPLES)
def test_micro_batches_are_within_the_budget(lengths, capacity, dp_size, document_multiple, row_multiple):
    multiples = {"document_multiple": document_multiple, "row_multiple": row_multiple}
    ranks, statistics = token_budget_microbatches(
        lengths, capacity, dp_size=dp_size, return_statistics=True, **multiples
    )
    steps = list(itertools.chain(*ranks))
    assert sorted(itertools.chain(*steps)) == list(range(len(lengths)))
    slots = [sum(up(lengths[i], document_multiple) for i in step) for step in steps]
    assert max(up(own, row_multiple) for own in slots) <= capacity
    assert sum(statistics.cost_per_rank) == sum(slots)  # the padding of a row counts nowhere


EXAMPLES = [
    {"input_ids": [number + 1] * length, "num_actions": length} for number, length in enumerate([5, 9, 3, 14, 6])
]


def test_the_padding_of_a_packed_collator_s_row_is_one_document_at_its_end():
    plain = PackedCollator(40, cp_size=2)
    collator = PackedCollator(40, cp_size=2, **packed_alignment(cp=2, fp8="tensor")._asdict())
    assert (collator.alignment, collator.row_multiple) == (4, 32)
    batch, wanted = collator(EXAMPLES), plain(EXAMPLES)
    width = batch["sequences"].shape[1]
    assert width == 32
    assert all(sum(up(n, 4) for n in row) <= 32 for row in batch["sub_seq_lengths"])
    assert batch["loss_mask"].sum().item() == pytest.approx(wanted["loss_mask"].sum().item())
    lengths = collator.packed_metadata(batch).lengths.tolist()
    assert sum(lengths) == batch["sequences"].numel()
    assert len(lengths) == len(EXAMPLES) + sum(sum(up(n, 4) for n in row) < width for row in batch["sub_seq_lengths"])
    shares = [collator.context_parallel_split(batch, rank)["sequences"] for rank in range(2)]
    assert sum(share.numel() for share in shares) == batch["sequences"].numel()
    with pytest.raises(ValueError, match=r"^document_multiple: expected a multiple of 2 \* cp_size = 4, got 6$"):
        PackedCollator(40, cp_size=2, document_multiple=6)
    with pytest.raises(ValueError, match=r"^input_ids: expected at most capacity=40 slots, got 64 for 33 tokens"):
        collator([{"input_ids": [1] * 33, "num_actions": 1}])
    assert PackedCollator(33, row_multiple=32, round_capacity=True).capacity == 64


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("capacity", [None, 70])
def test_a_padding_free_row_with_both_multiples(labels, capacity):
    examples = [{"input_ids": example["input_ids"]} for example in EXAMPLES]
    if labels:
        examples = [{**example, "labels": [-100] + [7] * (len(example["input_ids"]) - 1)} for example in examples]
    collator = PaddingFreeCollator(document_multiple=4, row_multiple=32, capacity=capacity, pad_token_id=99)
    batch = collator(examples)
    assert batch["input_ids"].shape == (1, 64)
    assert batch["cu_seq_lens_q"].diff().tolist() == [8, 12, 4, 16, 8, 16]
    plain = PaddingFreeCollator()(examples)
    is_token = batch["input_ids"] != 99
    for name in ("input_ids", "labels", "position_ids", "seq_idx"):
        assert torch.equal(batch[name][is_token], plain[name][0]), name
    assert (batch["labels"][~is_token] == -100).all()
    assert batch["num_targets"] == plain["num_targets"]
    assert batch["num_tokens"].tolist() == [5, 9, 3, 14, 6, 0]  # of each document: what a balance loss counts


@given(lengths=LENGTHS, overlong=st.sampled_from(["truncate", "drop", "carry", "own"]), **MULTIPLES)
@pytest.mark.filterwarnings("ignore:capacity")
def test_no_padding_free_row_is_over_its_limit(lengths, overlong, **multiples):
    examples = [{"input_ids": [1] * length} for length in lengths]
    collator = PaddingFreeCollator(capacity=50, overlong=overlong, **multiples)
    row = 50 // multiples["row_multiple"] * multiples["row_multiple"]
    assert collator(examples)["input_ids"].shape[1] == row
    chosen = collator.selection(examples)
    assert len(chosen.kept) + len(chosen.dropped) + len(chosen.carried) == len(lengths)
    assert chosen.own == []


def test_preference_pairs_with_both_multiples():
    pair = {"chosen_input_ids": [1] * 5, "rejected_input_ids": [2] * 9}
    multiples = {"document_multiple": 4, "row_multiple": 16}
    sides = PaddingFreeDPOCollator(**multiples)([pair])
    assert [sides[f"{side}_cu_seq_lens_q"].tolist() for side in ("chosen", "rejected")] == [[0, 8, 16], [0, 12, 16]]
    together = PaddingFreeDPOCollator(concatenated=True, **multiples)([pair])
    assert together["cu_seq_lens_q"].tolist() == [0, 8, 20, 32]
    with pytest.raises(ValueError, match=r"^document_multiple: expected 1 beside share_prompt, got 4$"):
        PaddingFreeDPOCollator(share_prompt=True, **multiples)


def test_rows_of_a_stream_fit_the_collator():
    multiples = packed_alignment(tp=2, cp=2, fp8="tensor")._asdict()
    examples = [{"input_ids": [1] * length} for length in (5, 30, 41, 9, 22, 17, 60, 3)]
    stream = PackedStream(examples, 100, **multiples)
    assert stream.slots == 96
    collator = PaddingFreeCollator(capacity=100, **multiples)
    rows = list(stream)
    assert sum(map(len, rows)) == len(examples)
    assert {collator(row)["input_ids"].shape[1] for row in rows} == {96}
