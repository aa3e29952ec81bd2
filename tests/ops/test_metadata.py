"""PackedMetadata: one layout, however it is given."""

import pytest
import torch
from helpers import assert_same, cu_seqlens_of, drawn_mask, lengths_strategy, masks
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize("name", ["position_ids", "seq_idx", "lengths"])
def test_a_write_into_a_derived_tensor_changes_no_later_answer(name):
    """Not one that torch does not see either."""
    metadata = PackedMetadata.from_lengths([2, 1])
    first = getattr(metadata, name).clone()
    getattr(metadata, name).numpy()[:] = 7
    assert_same(getattr(metadata, name), first)
    getattr(metadata, name).data.add_(7)
    assert_same(getattr(metadata, name), first)


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


PADDED = {
    "from_lengths": lambda cu, total: PackedMetadata.from_lengths(cu.diff().cpu(), total=total, device=cu.device),
    "from_lengths on the device": lambda cu, total: PackedMetadata.from_lengths(cu.diff(), total=total),
    "from_cu_seqlens": lambda cu, total: PackedMetadata.from_cu_seqlens(cu, total=total),
    "from_cu_seqlens, all told": lambda cu, total: PackedMetadata.from_cu_seqlens(
        cu, total=total, max_seqlen=3, num_tokens=6
    ),
    "by itself": lambda cu, total: PackedMetadata(cu, total, 3, num_tokens=6),
}


@pytest.mark.parametrize("made", PADDED)
@pytest.mark.parametrize("padding", [0, 1, 4])
def test_hosts_get_documents_that_end_with_the_row(device, made, padding):
    """They want every slot in a document: what pads the row is the last one."""
    metadata = PADDED[made](cu_seqlens_of([2, 1, 3], device), 6 + padding)
    assert metadata.num_tokens == 6
    expected = cu_seqlens_of([2, 1, 3] + [padding] * (padding > 0), device)
    told = metadata.to_transformers()
    assert told["cu_seq_lens_q"] is told["cu_seq_lens_k"]
    assert_same(told["cu_seq_lens_q"], expected)
    assert told["max_length_q"] == told["max_length_k"] == max(3, padding)
    megatron = metadata.to_megatron()
    assert megatron["cu_seqlens_q"] is megatron["cu_seqlens_kv"]
    assert_same(megatron["cu_seqlens_kv"], expected)
    assert megatron["max_seqlen_q"] == megatron["max_seqlen_kv"] == max(3, padding)
    assert metadata.to_unsloth()["packed_seq_lengths"].tolist() == [2, 1, 3]
    assert metadata.lengths.tolist() == [2, 1, 3]
    assert_same(metadata.position_ids, po.position_ids_from_cu_seqlens(expected))


def test_what_the_host_does_not_know_is_read_where_that_is_free():
    cu_seqlens = cu_seqlens_of([2, 1, 3])
    metadata = PackedMetadata.from_cu_seqlens(cu_seqlens, total=8, max_seqlen=3)
    assert metadata.num_tokens is None
    assert metadata.to_transformers()["cu_seq_lens_q"].tolist() == [0, 2, 3, 6, 8]
    assert PackedMetadata.from_cu_seqlens(cu_seqlens, max_seqlen=3, num_tokens=6).total == 6
    with pytest.raises(ValueError, match="total: expected at least the 6 tokens of the documents, got 5"):
        PackedMetadata.from_cu_seqlens(cu_seqlens, total=5, max_seqlen=3, num_tokens=6)


def test_a_padded_row_in_a_transformers_model(device):
    pytest.importorskip("transformers")
    from helpers.hf_models import tiny_model

    from packing_ops.integrations.transformers import apply_packing_ops

    model = tiny_model("llama", device=device)
    lengths, padding = [7, 1, 12], 5
    ids = torch.randint(3, 61, (1, sum(lengths) + padding), device=device)
    with torch.no_grad():
        alone = torch.cat([model(row).logits for row in ids[:, : sum(lengths)].split(lengths, dim=1)], dim=1)
        assert apply_packing_ops(model)
        metadata = PackedMetadata.from_lengths(lengths, total=ids.shape[1], device=device)
        logits = model(ids, position_ids=metadata.position_ids[None], **metadata.to_transformers()).logits
    torch.testing.assert_close(logits[:, : sum(lengths)], alone, rtol=1e-5, atol=1e-5)
    assert logits[:, sum(lengths) :].isfinite().all()


def test_two_of_them_are_compared_as_objects():
    """A comparison of what they hold would wait for the GPU."""
    metadata, other = PackedMetadata.from_lengths([2, 1]), PackedMetadata.from_lengths([2, 1])
    assert metadata == metadata
    assert metadata != other
    assert {metadata: 1, other: 2}[metadata] == 1
    assert metadata in [other, metadata]


def test_total_shorter_than_the_documents_is_named():
    with pytest.raises(ValueError, match="total: expected at least the 3 tokens of the documents, got 2"):
        PackedMetadata.from_lengths([3], total=2)


def test_negative_length_is_named():
    with pytest.raises(ValueError, match=r"lengths: .*-1 at index 1"):
        PackedMetadata.from_lengths([3, -1])


# --- unpad and pad ---


@given(drawn=masks, features=st.sampled_from([(), (3,), (2, 2)]))
def test_unpad_and_pad_are_those_of_the_mask(device, drawn, features):
    mask = drawn_mask(drawn, device)
    x = torch.randn(*mask.shape, *features, device=device)
    metadata = PackedMetadata.from_attention_mask(mask)
    packed, indices, _, _, _ = po.unpad_input(x, mask)
    assert_same(metadata.unpad(x), packed)
    assert_same(metadata.pad(packed), po.pad_input(packed, indices, *mask.shape))
    assert_same(metadata.unpad(metadata.pad(packed)), packed)


@given(lengths=lengths_strategy, tail=st.integers(0, 3), wider=st.integers(0, 2))
def test_unpad_and_pad_of_lengths(device, lengths, tail, wider):
    """A row for each document, padded on the right."""
    total, longest = sum(lengths) + tail, max(lengths, default=0)
    metadata = PackedMetadata.from_lengths(lengths, total=total, device=device)
    packed = torch.arange(1, total + 1, device=device)
    padded = metadata.pad(packed)
    assert padded.shape == (len(lengths), longest)
    mask = torch.arange(longest, device=device) < metadata.lengths[:, None]
    assert_same(padded[mask], packed[: sum(lengths)])
    assert not padded[~mask].any()
    wide = torch.nn.functional.pad(padded, (0, wider), value=99)
    assert_same(metadata.unpad(wide), torch.cat([packed[: sum(lengths)], packed.new_zeros(tail)]))


def test_gradients_of_unpad_and_pad(device):
    for metadata in (
        PackedMetadata.from_attention_mask(torch.tensor([[0, 1, 1], [1, 0, 0]], device=device)),
        PackedMetadata.from_lengths([2, 1], total=5, device=device),
    ):
        shape = (2, 3 if metadata.indices is not None else 2, 2)
        padded = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
        packed = torch.randn(metadata.total, 2, dtype=torch.float64, device=device, requires_grad=True)
        assert torch.autograd.gradcheck(metadata.unpad, padded)
        assert torch.autograd.gradcheck(metadata.pad, packed)


def test_where_tokens_go_is_worked_out_once(device):
    metadata = PackedMetadata.from_lengths([2, 1], device=device)
    assert metadata._slots(2) is metadata._slots(2)
    assert metadata._slots(3).tolist() == [0, 1, 3]


@pytest.mark.parametrize("name", ["unpad", "pad"])
def test_what_is_no_tensor_is_named(name):
    metadata = PackedMetadata.from_lengths([2, 1])
    with pytest.raises(TypeError, match=r"x: expected a tensor, got \[1, 2, 3\] \(list\)"):
        getattr(metadata, name)([1, 2, 3])


@pytest.mark.parametrize("layout", ["mask", "lengths"])
def test_batches_of_another_shape_are_named(device, layout):
    mask = torch.tensor([[1, 1, 0], [0, 1, 0]], device=device)
    of_mask = layout == "mask"
    metadata = (
        PackedMetadata.from_attention_mask(mask) if of_mask else PackedMetadata.from_lengths([3, 1], device=device)
    )
    wanted = r"\[batch=2, seqlen=3, \.\.\.\]" if of_mask else r"\[batch=2, seqlen=at least 3, \.\.\.\]"
    for shape in ((2, 2), (3, 3), (6,), (), (2,), *([(2, 4)] if of_mask else [])):
        x = torch.ones(shape, device=device)
        with pytest.raises(ValueError, match=rf"x: expected {wanted}, got \[[\d, ]*\]"):
            metadata.unpad(x)
    total = metadata.total
    for x in (mask, torch.ones((), device=device), torch.ones(total + 1, device=device)):
        with pytest.raises(ValueError, match=rf"x: expected \[total={total}, \.\.\.\], got"):
            metadata.pad(x)


@pytest.mark.parametrize(
    ("values", "told", "message"),
    [
        ([2, 5], {}, "cu_seqlens: expected to start at 0, got 2"),
        ([0, 5, 3], {}, "cu_seqlens: expected never to decrease, got 3 after 5 at index 2"),
        ([0, 2, 5], {"max_seqlen": 2, "total": 5}, "max_seqlen: expected at least 3, the longest of cu_seqlens, got 2"),
        ([0, 2, 5], {"max_seqlen": 3, "num_tokens": 4}, "num_tokens: expected 5, the last of cu_seqlens, got 4"),
        ([0, 2, 5], {"max_seqlen": 3, "total": 4}, "total: .*got 4"),
    ],
)
def test_what_is_told_of_cu_seqlens_on_the_cpu_is_checked(values, told, message):
    for dtype in (torch.int32, torch.int64):
        with pytest.raises(ValueError, match=message):
            PackedMetadata.from_cu_seqlens(torch.tensor(values, dtype=dtype), **told)
