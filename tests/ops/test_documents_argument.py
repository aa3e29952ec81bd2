"""A PackedMetadata where functions take cu_seqlens or position_ids: the same bits, and what is kept in it."""

import copy
import dataclasses
import pickle

import pytest
import torch
from helpers import assert_same, cu_seqlens_of

import packing_ops as po
from packing_ops._runtime import batch_cache
from packing_ops.data import masked_loss, sequence_logps

LENGTHS, TOTAL = [3, 0, 4], 9


def rows(*shape, device="cpu"):
    return torch.randn(TOTAL, *shape, device=device)


def calls(device):
    """{function: call with what represents the documents}"""
    labels, values = torch.arange(TOTAL, device=device), rows(device=device)
    q, k, v = (rows(2, 16, device=device) for _ in range(3))
    hidden, weight = rows(4, device=device), torch.randn(11, 4, device=device)
    return {
        "varlen_attention": lambda docs: po.varlen_attention(q, k, v, docs),
        "varlen_attention, k": lambda docs: po.varlen_attention(q, k, v, docs, docs, causal=False, return_lse=True),
        "varlen_attention, heads first": lambda docs: po.varlen_attention(
            *(t.transpose(0, 1)[None] for t in (q, k, v)), docs, layout="bhsd"
        ),
        "attention": lambda docs: po.attention(q, k, v, docs),
        "sdpa": lambda docs: po.attention(q, k, v, docs, backend="sdpa"),
        "mask_boundary_labels": lambda docs: po.mask_boundary_labels(labels, docs),
        "mask_boundary_labels_shifted_": lambda docs: po.mask_boundary_labels_shifted_(labels.clone(), docs),
        "shift_labels": lambda docs: po.shift_labels(labels[None], docs),
        "shift_values": lambda docs: po.shift_values(values, docs),
        "count_target_tokens": lambda docs: po.count_target_tokens(labels, docs),
        "block_causal_mask": lambda docs: po.block_causal_mask(docs, TOTAL),
        "segment_sum": lambda docs: po.segment_sum(q, docs),
        "segment_mean": lambda docs: po.segment_mean(values, docs),
        "segment_std": lambda docs: po.segment_std(values, docs),
        "segment_broadcast": lambda docs: po.segment_broadcast(values[:3], docs, TOTAL),
        "gae": lambda docs: po.gae(values, values, docs, gamma=0.9, lam=0.8),
        "router_statistics": lambda docs: po.router_statistics(hidden, docs, top_k=2),
        "load_balancing_loss": lambda docs: po.load_balancing_loss(hidden, docs, top_k=2, by_document=True),
        "token_kl": lambda docs: po.token_kl(hidden, weight, hidden + 0.1, weight, labels, docs),
        "token_logps": lambda docs: po.token_logps(hidden, weight, labels, docs),
        "chunked_cross_entropy": lambda docs: po.chunked_cross_entropy(hidden, weight, labels, docs),
        "sequence_logps": lambda docs: sequence_logps(rows(11, device=device).exp(), labels, docs),
        "masked_loss": lambda docs: masked_loss(values, labels > 3, num_items_in_batch=5, cu_seqlens=docs),
    }


@pytest.mark.parametrize("name", calls("cpu"))
def test_the_same_bits(device, name):
    metadata = po.PackedMetadata.from_lengths(LENGTHS, total=TOTAL, device=device)
    call = calls(device)[name]
    results = []
    for documents in (metadata, metadata.cu_seqlens):
        torch.manual_seed(0)
        results.append(call(documents))
    for with_metadata, with_cu_seqlens in zip(*(r if isinstance(r, tuple) else (r,) for r in results), strict=True):
        assert_same(with_metadata, with_cu_seqlens)


@pytest.mark.parametrize("name", [name for name in calls("cpu") if name != "block_causal_mask"])
def test_another_total_is_named(name):
    with pytest.raises(ValueError, match=r": expected total=9 like \w+, got PackedMetadata with total=7"):
        calls("cpu")[name](po.PackedMetadata.from_lengths(LENGTHS))


def test_rotary_positions(device):
    metadata = po.PackedMetadata.from_lengths(LENGTHS, total=TOTAL, device=device)
    q, k, cos, sin = (rows(*shape, device=device) for shape in ((2, 16), (2, 16), (8,), (8,)))
    with_metadata = po.apply_rotary_qk(q, k, cos, sin, metadata)
    for rotated, expected in zip(with_metadata, po.apply_rotary_qk(q, k, cos, sin, metadata.position_ids), strict=True):
        assert_same(rotated, expected)


@pytest.mark.parametrize(
    ("shape", "unsqueeze_dim"), [((9, 2, 16), 1), ((1, 2, 9, 16), 1), ((1, 9, 2, 16), 2), ((1, 9, 7, 16), 2)]
)
def test_rotary_positions_of_another_total_are_named(shape, unsqueeze_dim, device):
    metadata = po.PackedMetadata.from_lengths([3, 4], device=device)
    (q,), (table,) = (torch.zeros(1, *size, device=device) for size in (shape, (16, 8)))
    with pytest.raises(ValueError, match="position_ids: expected total=9 like q, got PackedMetadata with total=7"):
        po.apply_rotary_qk(q, None, table, table, metadata, unsqueeze_dim=unsqueeze_dim)
    with pytest.raises(ValueError, match="position_ids: expected 3 or 4 rows of positions with sections, got Packed"):
        po.apply_rotary_qk(q, None, table, table, metadata, unsqueeze_dim=unsqueeze_dim, sections=[2, 3, 3])


@pytest.mark.parametrize("inplace", [False, True])
def test_rotary_with_cu_seqlens_for_positions_says_what_to_pass(inplace, device):
    (q,), (table,) = (torch.zeros(1, *size, device=device) for size in ((7, 2, 16), (16, 8)))
    cu_seqlens = cu_seqlens_of([3, 4], device)
    message = (
        r"position_ids: expected \[seqlen=7\] or .*, got int32 \[3\] on .*; where these are cu_seqlens, pass "
        r"PackedMetadata.from_cu_seqlens\(cu_seqlens\) or position_ids_from_cu_seqlens\(cu_seqlens\)$"
    )
    with pytest.raises(ValueError, match=message):
        po.apply_rotary_qk(q, None, table, table, cu_seqlens, inplace=inplace)
    for passed in (po.PackedMetadata.from_cu_seqlens(cu_seqlens), po.position_ids_from_cu_seqlens(cu_seqlens)):
        po.apply_rotary_qk(q, None, table, table, passed, inplace=inplace)
    with pytest.raises(ValueError, match=r"position_ids: expected \[seqlen=7\] or .*, got int64 \[2, 7\] on \S*$"):
        po.apply_rotary_qk(q, None, table, table, torch.zeros(2, 7, dtype=torch.int64, device=device), inplace=inplace)


@pytest.mark.parametrize("q", [None, torch.zeros(7), torch.zeros(1, 1, 7, 2, 16)])
def test_what_is_no_q_is_named_before_its_positions(q):
    table = torch.zeros(16, 8)
    with pytest.raises((TypeError, ValueError), match=r"^q: expected"):
        po.apply_rotary_qk(q, None, table, table, po.PackedMetadata.from_lengths([3, 4]))


def test_what_is_neither_is_named():
    labels = torch.arange(3)
    for documents in ([0, 3], None, "0 3"):
        with pytest.raises(TypeError, match="cu_seqlens: expected PackedMetadata or its cu_seqlens, got"):
            po.shift_labels(labels, documents)
        with pytest.raises(TypeError, match="cu_seqlens_q: expected PackedMetadata or its cu_seqlens, got"):
            po.varlen_attention(*torch.ones(3, 3, 1, 8).unbind(0), documents)


def test_total_comes_with_the_metadata():
    metadata = po.PackedMetadata.from_lengths([1, 2], total=4)
    assert po.block_causal_mask(metadata).shape == (4, 4)
    assert po.segment_broadcast(torch.tensor([5.0, 7.0]), metadata).tolist() == [5, 7, 7, 0]
    with pytest.raises(TypeError, match="total: expected the slots of the row"):
        po.block_causal_mask(metadata.cu_seqlens)


def test_kept_in_the_metadata():
    """And nothing by the tensor, so that a batch's results go with its metadata."""
    metadata = po.PackedMetadata.from_lengths(LENGTHS)
    kept = len(batch_cache._tensor_caches)
    first = metadata._slots(9)
    assert metadata._slots(9) is first
    assert len(metadata._cache.entries) == 1
    assert len(batch_cache._tensor_caches) == kept
    metadata.cu_seqlens[2] += 1  # torch counts this write
    assert metadata._slots(9).tolist() == [0, 1, 2, 9, 18, 19, 20]
    metadata.cu_seqlens.data[2] -= 1  # and not this one
    assert_same(metadata._slots(9), first)


def test_forgotten_after_a_fault():
    metadata = po.PackedMetadata.from_lengths(LENGTHS)
    first = metadata._slots(9)
    batch_cache.forget()
    assert metadata._slots(9) is not first


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(copied):
    metadata = po.PackedMetadata.from_lengths(LENGTHS)
    slots = metadata._slots(9)
    assert_same(copied(metadata)._slots(9), slots)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_plan_of_the_metadata():
    metadata = po.PackedMetadata.from_lengths([70, 5], device="cuda")
    q = torch.randn(75, 2, 64, device="cuda", dtype=torch.bfloat16)
    plan = metadata.attention_plan(num_heads=2, num_kv_heads=2, head_dim=64)
    kept = len(batch_cache._tensor_caches)
    assert_same(po.varlen_attention(q, q, q, metadata), po.varlen_attention(q, q, q, metadata.cu_seqlens, plan=plan))
    assert [key[0] for key in metadata._cache.entries] == ["plan"]
    assert len(batch_cache._tensor_caches) == kept


def test_compiles(fresh_compile):
    metadata = po.PackedMetadata.from_lengths(LENGTHS, total=TOTAL)
    q = rows(2, 16)

    def layer(q, metadata):
        q, _ = po.apply_rotary_qk(q, None, q[:, 0, :8], q[:, 1, :8], metadata)
        return po.varlen_attention(q, q, q, metadata)

    assert_same(torch.compile(layer, fullgraph=True, backend="aot_eager")(q, metadata), layer(q, metadata))


@pytest.mark.parametrize("kind", ["from_cu_seqlens", "its own fields", "replace"])
def test_made_inside_a_compiled_function(fresh_compile, kind):
    q, cu_seqlens = rows(2, 16), po.cu_seqlens_from_lengths(LENGTHS)
    outside = po.PackedMetadata.from_lengths(LENGTHS, total=TOTAL)

    def layer(q, cu_seqlens):
        if kind == "from_cu_seqlens":
            metadata = po.PackedMetadata.from_cu_seqlens(cu_seqlens, total=len(q), max_seqlen=4)
        elif kind == "replace":
            metadata = dataclasses.replace(outside, cu_seqlens=cu_seqlens, max_seqlen=4)
        else:
            metadata = po.PackedMetadata(cu_seqlens, len(q), 4)
        return po.varlen_attention(q, q, q, metadata), metadata.position_ids

    assert_same(torch.compile(layer, fullgraph=True, backend="aot_eager")(q, cu_seqlens), layer(q, cu_seqlens))


def test_fields_are_those_of_the_constructor():
    """FullyShardedDataParallel makes dataclasses among a module's arguments anew from all their fields."""
    metadata = po.PackedMetadata.from_lengths(LENGTHS, total=TOTAL)
    slots = metadata._slots(9)
    again = dataclasses.replace(metadata, **{f.name: getattr(metadata, f.name) for f in dataclasses.fields(metadata)})
    assert_same(again._slots(9), slots)
    assert again._slots(9) is not slots
