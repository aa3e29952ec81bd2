"""A packed row over ranks, without processes: every slot once, equally many on each rank, targets that cross ranks."""

import dataclasses
import itertools
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from helpers import cu_seqlens_of
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.data import thd_partition_indices
from packing_ops.parallel import (
    choose,
    choose_attention,
    count_targets,
    shard_indices,
    shard_of,
    sharded_loss,
)
from packing_ops.parallel.key_layout import RowSpans, key_layout
from packing_ops.parallel.sharding import whole_row

SCHEMES = ("contiguous", "zigzag")
rows = st.lists(st.integers(0, 40), min_size=1, max_size=8)


@given(rows, st.integers(1, 5), st.sampled_from(SCHEMES))
def test_every_slot_is_on_one_rank(lengths, ranks, scheme):
    total = -(-sum(lengths) // ranks) * ranks
    parts = [shard_indices(cu_seqlens_of(lengths), ranks, r, scheme=scheme, total=total) for r in range(ranks)]
    assert {len(part) for part in parts} == {total // ranks}
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(total))
    assert all(torch.equal(part, part.sort().values) for part in parts)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("ranks", "rank", "error", "message"),
    [
        (2, 5, ValueError, "rank: expected 0 to 1 for ranks=2, got 5"),
        (2, -1, ValueError, "rank: expected 0 to 1 for ranks=2, got -1"),
        (2, 1.5, TypeError, "rank: expected an integer, got 1.5"),
        (0, 0, ValueError, "ranks: expected at least 1, got 0"),
    ],
)
def test_a_rank_is_one_of_the_ranks(scheme, ranks, rank, error, message):
    with pytest.raises(error, match=message):
        shard_indices(cu_seqlens_of([10, 6]), ranks, rank, scheme=scheme, total=16)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(2, 4))
def test_zigzag_is_megatron_s_where_that_divides(chunks, ranks):
    lengths = [2 * ranks * chunk for chunk in chunks]
    for rank in range(ranks):
        own = shard_indices(cu_seqlens_of(lengths), ranks, rank, scheme="zigzag", total=sum(lengths))
        expected, start = [], 0
        for chunk in chunks:
            for number in (rank, 2 * ranks - 1 - rank):
                expected += range(start + number * chunk, start + (number + 1) * chunk)
            start += 2 * ranks * chunk
        assert own.tolist() == expected
        assert torch.equal(own, thd_partition_indices(cu_seqlens_of(lengths), ranks, rank, total=sum(lengths)))


@given(rows, st.integers(2, 4))
def test_zigzag_spreads_causal_work(lengths, ranks):
    """The most that a rank attends to is within a query a document and rank of an even part."""
    total = -(-sum(lengths) // ranks) * ranks
    metadata = po.PackedMetadata.from_lengths(lengths, total=total)
    work = [
        int((metadata.position_ids[own] + 1)[own < sum(lengths)].sum())
        for own in (shard_indices(metadata, ranks, r, scheme="zigzag") for r in range(ranks))
    ]
    assert max(work) - min(work) <= sum(2 * length + ranks for length in lengths) + ranks


@given(rows, st.integers(2, 4), st.sampled_from(SCHEMES), st.booleans(), st.sampled_from([-1, 0, 5]))
def test_only_keys_that_are_seen_are_moved(lengths, ranks, scheme, causal, left):
    """The rows that a rank receives are those that one of its queries sees, and each key of its call is the right
    one.
    """
    left = left if causal else -1
    total = -(-sum(lengths) // ranks) * ranks
    metadata = po.PackedMetadata.from_lengths(lengths, total=total)
    cu_seqlens, position, document = metadata.cu_seqlens, metadata.position_ids, metadata.seq_idx
    spans = RowSpans.of(cu_seqlens, cu_seqlens, total // ranks, ranks, scheme)
    layouts = [key_layout(spans, r, causal=causal, left=left) for r in range(ranks)] if total else []
    own = [shard_indices(metadata, ranks, r, scheme=scheme) for r in range(ranks)]
    for rank, layout in enumerate(layouts):
        q, k = own[rank][:, None], torch.arange(total)
        seen = (document[q] == document[k]) & (document[k] < len(lengths))
        if causal:
            seen &= position[k] <= position[q]
        if left >= 0:
            seen &= position[k] >= position[q] - left
        needed = seen.any(0).nonzero()[:, 0].tolist()
        if layout.exchange is None:
            received = torch.cat(own)
        else:
            parts = [sender.exchange.index.split(sender.exchange.send)[rank] for sender in layouts]
            assert [len(part) for part in parts] == layout.exchange.receive
            received = torch.cat([own[r][part] for r, part in enumerate(parts)])
            assert sorted(received.tolist()) == needed
            in_order = received.tolist() == received[layout.key_index[:-1]].tolist()
            first = parts[rank].tolist() == list(range(len(parts[rank])))
            in_order = in_order and first and scheme == "contiguous"  # zigzag is never asked: one key is in any order
            assert (layout.exchange.to_others is not None) == in_order
        count = int(layout.cu_seqlens_k[-1])
        assert set(needed) <= set(received[layout.key_index[:count]].tolist())
        places = layout.key_positions.T
        for row, slot in enumerate(received.tolist()):
            for place in places[row].tolist():
                assert place == len(layout.key_index) - 1 or received[layout.key_index[place]] == slot


def batch_of(lengths, form):
    total = sum(lengths)
    metadata = po.PackedMetadata.from_lengths(lengths)
    batch = {"input_ids": torch.arange(total) + 5, "labels": torch.arange(total) + 5}
    if form == "metadata":
        return {**batch, "documents": metadata, "name": "kept"}
    batch = {name: value[None] for name, value in batch.items()}
    if form == "transformers":
        return {**batch, "position_ids": metadata.position_ids[None], **metadata.to_transformers()}
    return {**batch, "position_ids": metadata.position_ids[None]}


@pytest.mark.parametrize("form", ["metadata", "transformers", "positions"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_shards_of_a_batch(form, scheme):
    lengths, ranks = [5, 1, 7], 4  # three slots of padding
    batch = batch_of(lengths, form)
    shards = [shard_of(batch, ranks=ranks, rank=r, scheme=scheme, pad_token_id=2) for r in range(ranks)]
    order = torch.cat([shard_indices(cu_seqlens_of(lengths), ranks, r, scheme=scheme, total=16) for r in range(ranks)])

    def whole(name):
        return torch.cat([shard[name].flatten() for shard in shards])[order.argsort()].tolist()

    targets = po.shift_labels(batch["labels"].flatten(), cu_seqlens_of(lengths)).tolist()
    assert whole("input_ids") == [*range(5, 18), 2, 2, 2]
    assert whole("shift_labels") == whole("labels") == [*targets, -100, -100, -100]
    assert whole("position_ids")[:13] == [*range(5), 0, *range(7)]
    assert shards[0]["input_ids"].shape == ((4,) if form == "metadata" else (1, 4))
    if form == "transformers":
        assert shards[1]["cu_seq_lens_q"].tolist() == [0, 5, 6, 13]
    else:
        (metadata,) = [value for value in shards[1].values() if isinstance(value, po.PackedMetadata)]
        assert (metadata.total, metadata.num_tokens) == (16, 13)
    assert shards[0].get("name", "kept") == "kept"


@pytest.mark.parametrize("lengths", [[1, 2], [1, 1, 1, 2], [1, 1, 1], [1]])
def test_short_documents(lengths):
    """There may be as many documents as slots, or slots as cu_seqlens: what tells documents is never cut."""
    metadata = po.PackedMetadata.from_lengths(lengths)
    beside = {"packed_seq_lengths": metadata.lengths, "num_items_in_batch": torch.tensor([sum(lengths)])}
    batch = batch_of(lengths, "transformers") | {"cu_seqlens": metadata.cu_seqlens.long(), **beside}
    for rank in range(2):
        shard = shard_of(batch, ranks=2, rank=rank)
        assert shard["input_ids"].shape == (1, -(-sum(lengths) // 2))
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", *beside):
            assert torch.equal(shard[name], batch[name])


def test_visible_end_of_a_padded_row():
    visible_end = torch.tensor([2, 2, 3, 3, 3], dtype=torch.int32)
    metadata = dataclasses.replace(po.PackedMetadata.from_lengths([2, 3]), visible_end=visible_end)
    shard = shard_of({"input_ids": torch.arange(5), "metadata": metadata}, ranks=2, rank=1)
    assert shard["metadata"].visible_end.tolist() == [2, 2, 3, 3, 3, 0]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("labels", (1, 7)),
        ("shift_labels", (7,)),
        ("position_ids", (3, 1, 8)),  # of multimodal RoPE
        ("attention_mask", (1, 1, 8, 8)),
        ("loss_mask", (1, 7)),
    ],
)
def test_tensors_that_do_not_have_the_row_s_slots(name, shape):
    batch = {"input_ids": torch.arange(8)[None], "documents": po.PackedMetadata.from_lengths([5, 3])}
    with pytest.raises(ValueError, match=rf"^{name}: expected \[total=8\] or \[1, total\] of the row, got"):
        shard_of(batch | {name: torch.ones(shape, dtype=torch.int64)}, ranks=2, rank=0)


def test_bad_batches():
    with pytest.raises(ValueError, match="batch: expected a PackedMetadata, cu_seq_lens_q or position_ids, got none"):
        shard_of({"input_ids": torch.arange(4)}, ranks=2, rank=0)
    with pytest.raises(ValueError, match=r"input_ids: expected one packed row \[total\] or \[1, total\]"):
        shard_of({"input_ids": torch.zeros(2, 4)}, ranks=2, rank=0)
    with pytest.raises(ValueError, match="batch: expected input_ids, inputs_embeds, labels or position_ids, got"):
        shard_of({}, ranks=2, rank=0)
    with pytest.raises(ValueError, match="scheme: expected 'contiguous' or 'zigzag', got 'ring'"):
        shard_of(batch_of([4], "metadata"), ranks=2, rank=0, scheme="ring")
    with pytest.raises(ValueError, match="rank: expected 0 to ranks - 1 = 1, got 2"):
        shard_of(batch_of([4], "metadata"), ranks=2, rank=2)
    with pytest.raises(ValueError, match="total: expected a multiple of the 2 ranks, got 5"):
        shard_indices(cu_seqlens_of([5]), 2, 0, total=5)


def test_int64_documents_are_cast_once():
    """Layouts are kept with the int32 tensor: a new one in each layer would be a synchronisation in each."""
    cu_seqlens = torch.tensor([0, 3, 8])
    assert whole_row(cu_seqlens, 4, 2).dtype == torch.int32
    assert whole_row(cu_seqlens, 4, 2) is whole_row(cu_seqlens, 4, 2)


def test_loss_of_shards():
    losses, labels = torch.rand(6, dtype=torch.float64), torch.tensor([3, -100, 4, 5, -100, 6])
    shares = [sharded_loss(losses[s], labels[s], num_items_in_batch=4) for s in (slice(0, 2), slice(2, 6))]
    torch.testing.assert_close(sum(shares), losses[labels != -100].mean())
    with pytest.raises(ValueError, match="group: expected a process group, got None before"):
        count_targets(labels)


HEADS = {"num_heads": 32, "num_kv_heads": 8, "ranks": 4}
UNEVEN = {**HEADS, "num_heads": 30, "num_kv_heads": 30}
BOTH_SIDES = {"causal": False, "window_size": (3, 3)}


@pytest.mark.parametrize("lengths", [[65_536], [64] * 1024], ids=["long", "short"])
def test_choice_by_heads_and_masks(lengths):
    documents = po.PackedMetadata.from_lengths(lengths)
    chosen = choose_attention(documents, **HEADS, scheme="zigzag")
    assert chosen == ("ulysses", "the 4 ranks divide 32 and 8 heads")
    assert choose_attention(documents.cu_seqlens, **HEADS, scheme="zigzag") == chosen
    refused = choose_attention(documents, **UNEVEN)
    assert refused == ("gathered", "num_q_heads: expected a multiple of the 4 ranks, got 30")
    chosen = choose_attention(documents, **HEADS, **BOTH_SIDES)
    assert (chosen.name, chosen.why.split(":")[0]) == ("ulysses", "window_size")
    with pytest.raises(ValueError, match="num_q_heads: expected a multiple of the 4 ranks, got 30, and window_size"):
        choose_attention(documents, **UNEVEN, **BOTH_SIDES)


CHOSEN = {
    "one document": ([65_536], {}, "ulysses"),
    "a window of one document": ([65_536], {"window_size": (127, 0)}, "gathered"),
    "16 documents": ([4096] * 16, {}, "gathered"),
    "a causal document over two ranks": ([128] * 384 + [16_384], {}, "ulysses"),
    "short ones without a mask": ([64] * 1024, {"causal": False}, "gathered"),
    "nothing": ([0, 0], {}, "gathered"),
}


@pytest.mark.parametrize(("lengths", "mask", "name"), CHOSEN.values(), ids=CHOSEN)
def test_choice_by_lengths(lengths, mask, name):
    documents = po.PackedMetadata.from_lengths(lengths)
    assert choose_attention(documents, **HEADS, **mask).name == name
    assert choose_attention(documents.cu_seqlens.long(), **HEADS, **mask).name == name
    with po.invariant():  # gradients of gathered keys are sums over ranks
        assert choose_attention(documents, **HEADS, **mask).name == "ulysses"


def test_choice_counts_padding():
    """Its slots are among those of the ranks: here rank 0 would have all of the work."""
    row = po.PackedMetadata.from_lengths([8192] * 4)
    assert choose_attention(row, **HEADS).name == "gathered"
    padded = po.PackedMetadata.from_lengths([8192] * 4, total=4 * row.total)
    assert choose_attention(padded, **HEADS).name == "ulysses"


NOT_VALID = {
    "ranks": (0, -1, 2.0, None),
    "num_heads": (-1, "8"),
    "num_kv_heads": (-1, None),
    "scheme": ("zag", None),
    "window_size": (3, (3,), (1.5, 0)),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in NOT_VALID for value in NOT_VALID[name]])
@pytest.mark.parametrize("heads", [HEADS, UNEVEN, {**HEADS, "ranks": 1}], ids=["even", "uneven", "one rank"])
def test_choice_names_what_is_not_valid(heads, name, value):
    with pytest.raises((TypeError, ValueError), match=f"^{name}"):
        choose_attention(torch.tensor([0, 64]), **{**heads, name: value})


@pytest.mark.parametrize("values", [[0, 50, 30, 64], [2, 64], [0, -4, 64]], ids=str)
def test_choice_reads_no_wrong_lengths(values):
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        choose_attention(torch.tensor(values, dtype=torch.int32), **HEADS)


@given(rows, st.integers(0, 9), st.integers(1, 4), st.sampled_from([None, 1, 3]), st.booleans())
def test_costs_are_those_of_the_slowest_rank(lengths, padding, ranks, window, causal):
    """A loop over queries; the heads and the transfers are set so that both parts of a cost can be told apart."""
    edges, window = [0, *itertools.accumulate(lengths)], window if causal else None
    total = edges[-1] + padding
    rows, keys, sent = max(-(-total // ranks), 1), Counter(), Counter()
    for start, end in itertools.pairwise(edges):
        for query in range(start, end):
            seen = query + 1 - start if causal else end - start
            keys[query // rows] += seen if window is None else min(seen, window)
        for rank in {query // rows for query in range(start, end)}:
            first = max(start, rank * rows)
            begin = start if window is None else max(start, first - window + 1)
            sent[rank] += first - begin if causal else sum(key // rows != rank for key in range(start, end))
    with patch.object(choose, "_KEYS_OF_A_TRANSFER", 10**6):
        by_ulysses, by_gathered = choose._costs(edges, total if padding else 0, ranks, 2, 1, causal, (window or 0) - 1)
    assert by_ulysses == 2 * sum(keys.values()) / ranks + 3e6 * rows
    assert by_gathered == max(2 * keys[rank] + 10**6 * sent[rank] for rank in range(ranks))


def test_choice_for_a_visible_end():
    metadata = dataclasses.replace(po.PackedMetadata.from_lengths([64]), visible_end=torch.full((64,), 64).int())
    heads = {"num_kv_heads": 4, "ranks": 4}
    chosen = choose_attention(metadata, num_heads=8, **heads)
    assert (chosen.name, chosen.why) == ("ulysses", "cu_seqlens: expected no visible_end for gathered keys")
    with pytest.raises(ValueError, match="num_q_heads: expected a multiple of the 4 ranks, got 6, and cu_seqlens:"):
        choose_attention(metadata, num_heads=6, **heads)
