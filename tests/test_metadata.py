"""PackedMetadata: one layout, however it is told."""

import pytest
import torch
from helpers import assert_same, cu_seqlens_of, lengths_strategy
from hypothesis import given

import packing_ops as po
from packing_ops import PackedMetadata


def assert_layout(metadata, lengths, total):
    assert_same(metadata.cu_seqlens.cpu(), cu_seqlens_of(lengths))
    assert (metadata.total, metadata.max_seqlen) == (total, max(lengths, default=0))
    assert metadata.num_documents == len(lengths)
    assert metadata.lengths.tolist() == lengths
    assert metadata.position_ids.shape == metadata.seq_idx.shape == (total,)


@given(lengths=lengths_strategy)
def test_every_constructor_agrees(device, lengths):
    total = sum(lengths)
    assert_layout(PackedMetadata.from_lengths(lengths, device=device), lengths, total)
    assert_layout(PackedMetadata.from_lengths(torch.tensor(lengths, dtype=torch.int64, device=device)), lengths, total)
    assert_layout(PackedMetadata.from_lengths(lengths, total=total + 5, device=device), lengths, total + 5)
    cu_seqlens = cu_seqlens_of(lengths, device)
    assert_layout(PackedMetadata.from_cu_seqlens(cu_seqlens), lengths, total)
    assert_layout(PackedMetadata.from_cu_seqlens(cu_seqlens, total=total + 1), lengths, total + 1)
    real = [length for length in lengths if length > 0]
    position_ids = PackedMetadata.from_lengths(real, device=device).position_ids[None]
    assert_layout(PackedMetadata.from_position_ids(position_ids), real, total)


def test_from_attention_mask(device):
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]], device=device)
    metadata = PackedMetadata.from_attention_mask(mask)
    assert_layout(metadata, [2, 4, 0, 2], 8)
    assert metadata.indices.tolist() == [1, 2, 4, 5, 6, 7, 12, 14]


def test_given_sizes_are_taken_as_they_are(device):
    cu_seqlens = cu_seqlens_of([3, 4], device)
    metadata = PackedMetadata.from_cu_seqlens(cu_seqlens, total=9, max_seqlen=16)
    assert (metadata.total, metadata.max_seqlen) == (9, 16)
    assert metadata.cu_seqlens is cu_seqlens


def test_derived_tensors_are_made_once(device):
    metadata = PackedMetadata.from_lengths([2, 1], device=device)
    assert metadata.position_ids is metadata.position_ids
    assert metadata.seq_idx is metadata.seq_idx


def test_attention_plan_is_made_once_per_geometry(device):
    metadata = PackedMetadata.from_lengths([20, 0, 7], device=device)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    plan = metadata.attention_plan(**sizes)
    assert metadata.attention_plan(**sizes) is plan
    assert metadata.attention_plan(**sizes, causal=False) is not plan
    q, k = torch.randn(27, 4, 64, device=device), torch.randn(27, 2, 64, device=device)
    planned = po.varlen_attention(q, k, k, metadata.cu_seqlens, plan=plan)
    assert_same(planned, po.varlen_attention(q, k, k, metadata.cu_seqlens))


def test_what_hosts_get():
    metadata = PackedMetadata.from_lengths([2, 1, 3])
    transformers = metadata.to_transformers()
    assert transformers["cu_seq_lens_q"] is transformers["cu_seq_lens_k"] is metadata.cu_seqlens
    assert transformers["max_length_q"] == transformers["max_length_k"] == 3
    packed = metadata.to_unsloth()["packed_seq_lengths"]
    assert (packed.dtype, packed.tolist()) == (torch.int32, [2, 1, 3])
    megatron = metadata.to_megatron()
    assert megatron["qkv_format"] == "thd"
    assert megatron["cu_seqlens_kv"] is metadata.cu_seqlens
    assert megatron["max_seqlen_q"] == 3


def test_total_shorter_than_the_documents_is_named():
    with pytest.raises(ValueError, match="total: expected at least the 3 tokens of the documents, got 2"):
        PackedMetadata.from_lengths([3], total=2)


def test_negative_length_is_named():
    with pytest.raises(ValueError, match=r"lengths: .*-1 at index 1"):
        PackedMetadata.from_lengths([3, -1])
