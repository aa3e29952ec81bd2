"""Rows to one thd row of megatron-core and back: alignment, zigzag, targets, log-probs."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from helpers import cu_seqlens_of, drawn_mask, masks
from helpers.megatron_case import spawn

import packing_ops as po
from packing_ops.data.context_parallel import aligned, packed_alignment, thd_inverse_indices, thd_partition_indices
from packing_ops.integrations.megatron import data
from packing_ops.integrations.megatron.data import (
    next_token_targets,
    packed_seq_params,
    postprocess_packed_seqs,
    preprocess_packed_seqs,
)

sizes = st.fixed_dictionaries(
    {"tp_size": st.sampled_from([1, 2, 3]), "cp_size": st.sampled_from([1, 2, 4]), "fp8": st.booleans()}
)


def ids_for(mask):
    """Every token another one, none 0."""
    return torch.arange(1, mask.numel() + 1, device=mask.device).reshape(mask.shape)


def packed_rows(rows, alignment, device):
    """ids and mask of rows of documents, each at a multiple of the alignment, and two slots after the last."""
    slots = [[-(-length // alignment) * alignment for length in row] for row in rows]
    mask = torch.zeros(len(rows), max(map(sum, slots), default=0) + 2, dtype=torch.int64, device=device)
    for number, row in enumerate(rows):
        start = 0
        for length, taken in zip(row, slots[number], strict=True):
            mask[number, start : start + length] = 1
            start += taken
    return ids_for(mask), mask


def all_ranks(ids, mask, cp_size, **more):
    """preprocess_packed_seqs of every rank, their parts gathered in the order of the whole row."""
    parts, params = zip(
        *(preprocess_packed_seqs(ids, mask, cp_size=cp_size, cp_rank=r, **more) for r in range(cp_size)), strict=True
    )
    whole = torch.cat([part[0] for part in parts])[thd_inverse_indices(params[0].cu_seqlens_q, cp_size)]
    return whole, parts, params[0]


# --- worked values ---


def test_alignment():
    assert packed_alignment(4, 1) == packed_alignment(1, 2) == 4
    assert packed_alignment(4, 1, fp8=True) == 16
    assert packed_alignment(3, 2, fp8=True) == math.lcm(12, 32)
    with pytest.raises(ValueError, match="cp_size: expected at least 1, got 0"):
        packed_alignment(1, 0)
    with pytest.raises(TypeError, match=r"tp_size: expected an integer, got 2.0 \(float\)"):
        packed_alignment(2.0, 1)


@given(st.integers(0, 2**40), st.integers(1, 64))
def test_a_document_s_slots(length, alignment):
    slots = aligned(length, alignment)
    assert slots % alignment == 0
    assert length <= slots < length + alignment


def test_lengths_aligned(device):
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]], device=device)
    ids = ids_for(mask)
    packed, params = preprocess_packed_seqs(ids, mask, tp_size=4)
    assert packed.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0, 8, 9, 10, 0]]
    fields = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    for name in fields:
        assert getattr(params, name).tolist() == [0, 8, 12]
        assert getattr(params, name).dtype == torch.int32
    assert (params.qkv_format, params.max_seqlen_q, params.max_seqlen_kv) == ("thd", 8, 8)
    assert postprocess_packed_seqs(packed, params, mask).tolist() == (ids * mask).tolist()


def test_zigzag(device):
    cu_seqlens = torch.tensor([0, 8], dtype=torch.int32, device=device)
    assert thd_partition_indices(cu_seqlens, 2, 0).tolist() == [0, 1, 6, 7]
    assert thd_partition_indices(cu_seqlens, 2, 1, total=8).tolist() == [2, 3, 4, 5]


def test_packed_seq_params(device):
    metadata = po.PackedMetadata.from_lengths([2, 1, 3], device=device)
    params = packed_seq_params(metadata)
    assert (params.qkv_format, params.max_seqlen_q, params.max_seqlen_kv) == ("thd", 3, 3)
    assert params.cu_seqlens_q is params.cu_seqlens_kv is metadata.cu_seqlens


# --- index maps ---


@given(st.lists(st.integers(0, 5), max_size=6), st.sampled_from([1, 2, 3, 4]), st.integers(0, 3), st.data())
def test_ranks_share_every_document_evenly(device, chunks, cp_size, tail, drawn):
    """Against the definition, chunk by chunk; together the ranks hold every token once."""
    lengths = [2 * cp_size * chunk for chunk in chunks]
    total = sum(lengths) + 2 * cp_size * tail
    cu_seqlens = cu_seqlens_of(lengths, device)
    rank = drawn.draw(st.integers(0, cp_size - 1))
    expected, start = [], 0
    for length in [*lengths, total - sum(lengths)]:
        pieces = torch.arange(start, start + length).chunk(2 * cp_size) if length else [torch.arange(0)] * 2 * cp_size
        expected += [*pieces[rank].tolist(), *pieces[2 * cp_size - 1 - rank].tolist()]
        start += length
    assert thd_partition_indices(cu_seqlens, cp_size, rank, total=total).tolist() == expected

    row = torch.randn(total, device=device)
    parts = [row[thd_partition_indices(cu_seqlens, cp_size, r, total=total)] for r in range(cp_size)]
    assert torch.equal(torch.cat(parts)[thd_inverse_indices(cu_seqlens, cp_size, total=total)], row)


def test_partition_refuses(device):
    cu_seqlens = torch.tensor([0, 8, 14], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"cu_seqlens: expected multiples of 2 \* cp_size = 4 .*, got \[0, 8, 14\]"):
        thd_partition_indices(cu_seqlens, 2, 0)
    with pytest.raises(ValueError, match="cp_rank: expected 0 to cp_size - 1 = 1, got 2"):
        thd_partition_indices(cu_seqlens, 2, 2)
    with pytest.raises(ValueError, match=r"total: expected a multiple of 2 \* cp_size = 4, got 10"):
        thd_partition_indices(cu_seqlens[:2], 2, 0, total=10)


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("wrong", [None, [0, 8], [], [[0, 8]], [0.0, 8.0]])
def test_partition_refuses_what_is_no_cu_seqlens(wrong, cp_size):
    cu_seqlens = wrong if wrong in (None, [0, 8]) else torch.tensor(wrong)
    for index in (
        lambda **more: thd_partition_indices(cu_seqlens, cp_size, 0, **more),
        lambda **more: thd_inverse_indices(cu_seqlens, cp_size, **more),
    ):
        for more in ({}, {"total": 8}):
            with pytest.raises(ValueError, match=r"cu_seqlens: expected int32 or int64 \[num_documents \+ 1\], got"):
                index(**more)


def test_partition_loses_no_tokens():
    cu_seqlens = cu_seqlens_of([8, 8])
    for cp_size in (1, 2):
        with pytest.raises(ValueError, match="expected to end at most at total=8, got 16"):
            thd_partition_indices(cu_seqlens, cp_size, 0, total=8)


@given(masks, sizes)
def test_rows_come_back(device, drawn, sizes):
    """Left, right, both sides, holes; every document its tokens, then padding to the alignment."""
    mask = drawn_mask(drawn, device)
    ids = ids_for(mask)
    whole, parts, params = all_ranks(ids, mask, **sizes)
    alignment = packed_alignment(**sizes)
    expected = []
    for row, kept in zip(ids, mask.bool(), strict=True):
        tokens = row[kept].tolist()
        expected += tokens + [0] * (-len(tokens) % alignment)
    assert whole.tolist() == expected
    assert params.max_seqlen_q == max(params.cu_seqlens_q.diff().tolist(), default=0)
    assert len({part.shape for part in parts}) == 1
    assert torch.equal(postprocess_packed_seqs(whole[None], params, mask), ids * mask)


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4), sizes)
def test_rows_of_several_documents(device, rows, sizes):
    alignment = packed_alignment(**sizes)
    ids, mask = packed_rows(rows, alignment, device)
    whole, _, params = all_ranks(ids, mask, sub_seq_lengths=rows, **sizes)
    lengths = [length for row in rows for length in row]
    assert params.cu_seqlens_q.diff().tolist() == [-(-length // alignment) * alignment for length in lengths]
    assert torch.equal(whole[whole > 0], ids[mask > 0])  # each once, in their order
    assert torch.equal(postprocess_packed_seqs(whole[None], params, mask, sub_seq_lengths=rows), ids * mask)


def test_more_dimensions_and_gradients(device):
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]], device=device)
    hidden = torch.randn(2, 4, 3, dtype=torch.float64, device=device, requires_grad=True)
    packed, params = preprocess_packed_seqs(hidden, mask, tp_size=2)
    assert packed.shape == (1, 6, 3)
    assert torch.equal(postprocess_packed_seqs(packed, params, mask), hidden * mask[..., None])
    torch.autograd.gradcheck(lambda x: preprocess_packed_seqs(x, mask, tp_size=2)[0], hidden)
    values = packed.detach().requires_grad_()
    torch.autograd.gradcheck(lambda x: postprocess_packed_seqs(x, params, mask), values)


# --- targets ---


def plain_targets(labels, lengths, starts, slots):
    """Next tokens of each document, one by one; None without one."""
    targets = []
    for (row, start), length, taken in zip(starts, lengths, slots, strict=True):
        own = labels[row, start : start + length].tolist()
        targets += [None if target == -100 else target for target in own[1:]] + [None] * (taken - max(0, length - 1))
    return targets


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4), sizes, st.integers(0, 99))
def test_targets_never_cross_a_document(device, rows, sizes, seed):
    alignment = packed_alignment(**sizes)
    ids, mask = packed_rows(rows, alignment, device)
    torch.manual_seed(seed)
    labels = ids.masked_fill((torch.rand(ids.shape) < 0.3).to(device), -100)
    starts, lengths, slots = [], [], []
    for number, row in enumerate(rows):
        start = 0
        for length in row:
            starts.append((number, start))
            lengths.append(length)
            slots.append(-(-length // alignment) * alignment)
            start += slots[-1]
    expected = plain_targets(labels, lengths, starts, slots)
    cp_size = sizes["cp_size"]
    _, parts, params = all_ranks(ids, mask, sub_seq_lengths=rows, **sizes)
    for rank in range(cp_size):
        own = [expected[i] for i in thd_partition_indices(params.cu_seqlens_q, cp_size, rank).tolist()]
        targets, loss_mask = next_token_targets(
            labels, params, mask, sub_seq_lengths=rows, cp_size=cp_size, cp_rank=rank, total=sum(slots)
        )
        assert targets.shape == loss_mask.shape == parts[rank].shape
        assert loss_mask.dtype == torch.float32
        assert loss_mask[0].tolist() == [float(target is not None) for target in own]
        assert targets[0].tolist() == [target or 0 for target in own]


@given(masks, sizes)
def test_log_probs_stand_where_their_query_stood(device, drawn, sizes):
    """A made-up log-prob, minus the target itself: column s has the one of token s + 1, and 0 after the last one."""
    mask = drawn_mask(drawn, device)
    ids = ids_for(mask)
    _, params = preprocess_packed_seqs(ids, mask, **{**sizes, "cp_size": 1})
    targets, loss_mask = next_token_targets(ids, params, mask)
    scattered = postprocess_packed_seqs(-targets * loss_mask, params, mask)
    expected = torch.zeros_like(scattered)
    for row in range(mask.shape[0]):
        kept = mask[row].nonzero().flatten()
        expected[row, kept[:-1]] = -ids[row, kept[1:]].float()
    assert torch.equal(scattered, expected)


# --- context-parallel ranks ---


def rows_on_two_ranks():
    """Each rank's tokens weigh a table; both compute the same loss over all rows, and the gradients add up to it
    once.
    """
    group = torch.distributed.group.WORLD
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    ids = ids_for(mask)
    table, weight = torch.randn(13, 2, dtype=torch.float64), torch.randn(2, 6, 2, dtype=torch.float64)
    torch.distributed.broadcast(table, 0)
    torch.distributed.broadcast(weight, 0)
    table.requires_grad_()
    own, params = preprocess_packed_seqs(ids, mask, cp_size=2, cp_rank=group.rank())
    rows = postprocess_packed_seqs(table[own], params, mask, cp_group=group)
    assert torch.equal(rows, table[ids] * mask[..., None])
    (rows * weight).sum().backward()
    torch.distributed.all_reduce(table.grad)
    wanted = torch.zeros_like(table.grad).index_put((ids[mask > 0],), weight[mask > 0], accumulate=True)
    torch.testing.assert_close(table.grad, wanted)


def test_ranks_gather_their_parts(tmp_path):
    spawn(rows_on_two_ranks, 2, tmp_path)


# --- bad input ---


def test_refuses(device):
    mask = torch.ones(2, 6, dtype=torch.int64, device=device)
    ids = ids_for(mask)
    with pytest.raises(ValueError, match=r"input_ids: expected \[batch, seqlen, ...\] = \[2, 6\] like attention_mask"):
        preprocess_packed_seqs(ids[:, :5], mask)
    with pytest.raises(ValueError, match="cp_rank: expected 0 to cp_size - 1 = 0, got 1"):
        preprocess_packed_seqs(ids, mask, cp_rank=1)
    with pytest.raises(ValueError, match="sub_seq_lengths: expected one list per row = 2, got 1"):
        preprocess_packed_seqs(ids, mask, sub_seq_lengths=[[6]])
    packed, params = preprocess_packed_seqs(ids, mask)
    with pytest.raises(ValueError, match=r"labels: expected \[batch, seqlen, ...\] = \[2, 6\] like attention_mask"):
        next_token_targets(ids[:1], params, mask)
    with pytest.raises(ValueError, match=r"values: expected \[1, total / cp_size, ...\], got \[12\]"):
        postprocess_packed_seqs(packed[0], params, mask)


@pytest.mark.parametrize("wrong", [[[3, 2], [6]], [[7], [6]], [[2, 4], [6]], [[6], []]])
def test_documents_that_the_mask_does_not_have(device, wrong):
    """Lengths that do not fit, that are over padding, that leave tokens out: nothing is read wrong or lost."""
    mask = torch.ones(2, 6, dtype=torch.int64, device=device)
    mask[0, 4] = wrong[0] != [3, 2]
    with pytest.raises(ValueError, match=r"sub_seq_lengths|indices"):
        preprocess_packed_seqs(ids_for(mask), mask, sub_seq_lengths=wrong, tp_size=4)


@pytest.mark.parametrize("lengths", [[[3.7, 2.3], [6]], [["6"], [6]]])
def test_lengths_are_integers(lengths):
    mask = torch.ones(2, 6, dtype=torch.int64)
    with pytest.raises(TypeError, match="sub_seq_lengths: expected an integer, got"):
        preprocess_packed_seqs(ids_for(mask), mask, sub_seq_lengths=lengths)


def test_params_of_another_batch(device):
    """Rows that the packed row has no slots for are not dropped, those that it has more of are not invented."""
    mask = torch.ones(2, 6, dtype=torch.int64, device=device)
    mask[0, 3:] = 0
    row, params = preprocess_packed_seqs(ids_for(mask), mask)
    for other, more, message in (
        (mask[:1], {}, "attention_mask: expected the 2 documents of packed_seq_params, got 1"),
        (mask.repeat(2, 1), {}, "attention_mask: expected the 2 documents of packed_seq_params, got 4"),
        (mask, {"sub_seq_lengths": [[2, 1], [6]]}, "sub_seq_lengths: expected the 2 documents of packed_seq_p.* got 3"),
        (torch.ones_like(mask), {}, "attention_mask: expected at most the 3 slots of document 0 .* got 6|indices"),
        (
            torch.ones_like(mask),
            {"sub_seq_lengths": [[6], [6]]},
            "sub_seq_lengths: expected at most the 3 slots .* got 6|ind",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            next_token_targets(ids_for(other), params, other, **more)
        with pytest.raises(ValueError, match=message):
            postprocess_packed_seqs(row, params, other, **more)
    next_token_targets(ids_for(mask), params, mask, sub_seq_lengths=[[3], [6]])


def test_targets_of_another_total():
    mask = torch.ones(2, 6, dtype=torch.int64)
    _, params = preprocess_packed_seqs(ids_for(mask), mask)
    for total in (8, 16):
        with pytest.raises(ValueError, match=f"total: expected 12 slots as packed, got {total}"):
            next_token_targets(ids_for(mask), params, mask, total=total)


def test_params_without_cu_seqlens():
    mask = torch.ones(2, 6, dtype=torch.int64)
    row, params = preprocess_packed_seqs(ids_for(mask), mask)
    for missing in ("cu_seqlens_q", "cu_seqlens_kv"):
        lacking = dataclasses.replace(params, cu_seqlens_q_padded=None, **{missing: None})
        with pytest.raises(ValueError, match=rf"packed_seq_params.{missing}: expected int32 .* got None"):
            next_token_targets(ids_for(mask), lacking, mask)
        with pytest.raises(ValueError, match=rf"packed_seq_params.{missing}: expected int32 .* got None"):
            postprocess_packed_seqs(row, lacking, mask)


def test_short_values_are_refused():
    mask = torch.ones(1, 6, dtype=torch.int64)
    packed, params = preprocess_packed_seqs(ids_for(mask), mask, tp_size=4)
    with pytest.raises(ValueError, match=r"values: expected \[1, 8, ...\] as packed, got \[1, 6\]"):
        postprocess_packed_seqs(packed[:, :6], params, mask)


def test_fields_of_other_versions(monkeypatch):
    """A newer PackedSeqParams gets its total_tokens and seq_idx, one without a field that is needed is named."""
    from dataclasses import make_dataclass

    needed = [(name, object, None) for name in data._NEEDED]
    monkeypatch.setattr(data, "PackedSeqParams", make_dataclass("Newer", [*needed, ("total_tokens", int, None)]))
    assert packed_seq_params(po.PackedMetadata.from_lengths([2, 1])).total_tokens == 3
    newer = [*needed, ("total_tokens", int, None), ("seq_idx", object, None)]
    monkeypatch.setattr(data, "PackedSeqParams", make_dataclass("Newest", newer))
    params = packed_seq_params(po.PackedMetadata.from_lengths([2, 1], total=5))
    assert (params.total_tokens, params.seq_idx.tolist(), params.seq_idx.dtype) == (5, [[0, 0, 1, 2, 2]], torch.int32)
    monkeypatch.setattr(data, "PackedSeqParams", make_dataclass("Older", needed))  # nothing of padding
    ids = torch.tensor([[1, 2, 3], [4, 0, 0]])
    packed, params = preprocess_packed_seqs(ids, ids != 0, tp_size=2)
    assert params.cu_seqlens_q.tolist() == [0, 4, 6]
    assert next_token_targets(ids, params, ids != 0)[0].tolist() == [[2, 3, 0, 0, 0, 0]]
    assert torch.equal(postprocess_packed_seqs(packed, params, ids != 0), ids)
    monkeypatch.setattr(data, "PackedSeqParams", make_dataclass("Older", needed[:-1]))
    with pytest.raises(ImportError, match=r"lacks \['max_seqlen_kv'\]"):
        packed_seq_params(po.PackedMetadata.from_lengths([2, 1]))
