"""flash-attn's functions under their names: each against a plain torch formula, values and gradients."""

import functools
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, cu_seqlens_of, mask_of

import packing_ops
from packing_ops.integrations import flash_attn
from packing_ops.integrations.flash_attn import bert_padding
from packing_ops.integrations.flash_attn.layers import rotary
from packing_ops.reference import attention as oracle

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
transformers_installed = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)


def with_gradients(function, *leaves):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = function(*leaves)
    torch.manual_seed(7)
    return [out, *torch.autograd.grad(out, leaves, torch.randn_like(out))]


def assert_close(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


# --- attention ---


def by_oracle(q, k, v, causal, left=-1):
    """Dense attention with heads in dimension 2, ``left`` keys seen before the query's place, in float64."""
    places = [cu_seqlens_of([t.shape[1]] * t.shape[0], t.device) for t in (q, k)]
    rows = (t.double().flatten(0, 1) for t in (q, k, v))
    out, _ = oracle.varlen_attention(*rows, *places, causal=causal, window_size=(left, -1))
    return out.view(q.shape).to(q.dtype)


def qkv(device, *shape):
    return [torch.randn(*shape, heads, 8, device=device) for heads in (4, 2, 2)]


@pytest.mark.parametrize("causal", [True, False])
def test_flash_attn_func(device, causal):
    ours = with_gradients(lambda *t: flash_attn.flash_attn_func(*t, causal=causal), *qkv(device, 2, 11))
    torch.manual_seed(0)
    assert_close(ours, with_gradients(lambda *t: by_oracle(*t, causal), *qkv(device, 2, 11)))


@pytest.mark.parametrize("window_size", [(3, 3), (3, -1), (3, 100), (-1, 3)], ids=str)
def test_causal_windows_lose_their_right_side(device, window_size):
    """transformers asks for (w - 1, w - 1) with causal=True, Unsloth for (w, w); flash-attn looks at nothing to the
    right.
    """
    leaves = qkv(device, 2, 11)
    options = {"causal": True, "window_size": window_size}
    expected = with_gradients(lambda *t: by_oracle(*t, True, left=window_size[0]), *leaves)
    assert_close(with_gradients(lambda *t: flash_attn.flash_attn_func(*t, **options), *leaves), expected)
    cu_seqlens = cu_seqlens_of([11, 11], device)

    def packed(*tensors):
        rows = (t.flatten(0, 1) for t in tensors)
        return flash_attn.flash_attn_varlen_func(*rows, cu_seqlens, cu_seqlens, 11, 11, **options).view(2, 11, 4, 8)

    assert_close(with_gradients(packed, *leaves), expected)
    symmetric = flash_attn.flash_attn_func(*leaves, window_size=(3, 3))
    assert (symmetric - expected[0]).abs().max() > 1e-2
    q, k, v = leaves
    of_cache = flash_attn.flash_attn_with_kvcache(q, k, v, **options)
    assert_close([of_cache], expected[:1])


def test_flash_attn_varlen_func_keeps_documents_apart(device):
    (q, *_), (_, k, v) = qkv(device, 9), qkv(device, 11)
    cu_seqlens_q, cu_seqlens_k = cu_seqlens_of([4, 5], device), cu_seqlens_of([6, 5], device)
    out, lse, nothing = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, 5, 6, causal=True, return_attn_probs=True
    )
    documents = [[t[None] for t in (q[:4], k[:6], v[:6])], [t[None] for t in (q[4:], k[6:], v[6:])]]
    torch.testing.assert_close(out, torch.cat([by_oracle(*d, True)[0] for d in documents]), **CLOSE)
    assert (lse.shape, nothing) == ((4, 9), None)


def test_s_aux_is_sinks(device):
    """transformers hands a model's sinks to what takes them under this name."""
    q, k, v = qkv(device, 1, 9)
    sinks, cu_seqlens = torch.randn(4, device=device), cu_seqlens_of([9], device)
    rows = [tensor[0] for tensor in (q, k, v)]

    def ours(sinks):
        return flash_attn.flash_attn_func(q, k, v, causal=True, s_aux=sinks)[0]

    def theirs(sinks):
        out, _ = oracle.varlen_attention(*(row.double() for row in rows), cu_seqlens, sinks=sinks.double())
        return out.float()

    assert_close(with_gradients(ours, sinks), with_gradients(theirs, sinks))
    packed = flash_attn.flash_attn_varlen_func(*rows, cu_seqlens, cu_seqlens, 9, 9, causal=True, s_aux=sinks)
    assert_same(packed, ours(sinks))


def test_packed_projections(device):
    both = torch.randn(2, 7, 3, 2, 8, device=device)
    expected = flash_attn.flash_attn_func(*both.unbind(2), causal=True)
    assert_same(flash_attn.flash_attn_qkvpacked_func(both, 0.0, None, True), expected)
    assert_same(flash_attn.flash_attn_kvpacked_func(both[:, :, 0], both[:, :, 1:], causal=True), expected)
    cu_seqlens, rows = cu_seqlens_of([7, 7], device), both.flatten(0, 1)
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(rows, cu_seqlens, 7, causal=True)
    assert_same(packed.view(expected.shape), expected)
    places = cu_seqlens, cu_seqlens, 7, 7
    packed = flash_attn.flash_attn_varlen_kvpacked_func(rows[:, 0], rows[:, 1:], *places, causal=True)
    assert_same(packed.view(expected.shape), expected)
    with pytest.raises(ValueError, match=r"qkv: expected 5 dimensions with 3 at 2, got \[2, 7, 2, 2, 8\]"):
        flash_attn.flash_attn_qkvpacked_func(both[:, :, 1:])


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"])
def test_functions_are_those_of_packing_ops(name):
    assert getattr(flash_attn, name) is getattr(packing_ops, name)


def test_what_is_not_supported_is_said(device):
    q, k, v = qkv(device, 1, 3)
    with pytest.raises(NotImplementedError, match="cache_leftpad: expected None"):
        flash_attn.flash_attn_with_kvcache(q, k, v, cache_leftpad=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="dropout_p"):
        flash_attn.flash_attn_func(q, k, v, 0.1)
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        flash_attn.flash_attn_func(q, k, v, alibi_slopes=torch.ones(4))


# --- bert_padding ---


@pytest.mark.parametrize("kind", ["right", "left", "both", "holes"])
def test_unpad_and_pad_input(device, kind):
    mask, hidden = mask_of(kind, 3, 6, device), torch.randn(3, 6, 2, 5, device=device)
    kept = mask.bool()
    packed, indices, cu_seqlens, max_seqlen, seqused = bert_padding.unpad_input(hidden, mask)
    assert_same(packed, hidden[kept])
    assert_same(indices, mask.flatten().nonzero().flatten())
    assert cu_seqlens.tolist() == cu_seqlens_of(mask.sum(1).tolist()).tolist()
    assert (cu_seqlens.dtype, max_seqlen, seqused.tolist()) == (torch.int32, mask.sum(1).max(), mask.sum(1).tolist())
    pad = bert_padding.pad_input
    by_mask = functools.partial(hidden.new_zeros(hidden.shape).masked_scatter, kept[..., None, None])
    expected = with_gradients(by_mask, packed)
    assert_close(with_gradients(lambda t: pad(t, indices, 3, 6), packed), expected)
    assert_close(with_gradients(lambda t: pad(t, indices.int(), 3, 6), packed), expected)


def test_unpad_input_counts_unused_slots_apart(device):
    mask, unused = torch.tensor([[1, 0, 0]], device=device), torch.tensor([[0, 1, 0]], device=device)
    packed, _, cu_seqlens, max_seqlen, seqused = bert_padding.unpad_input(
        torch.arange(3.0, device=device)[None], mask, unused
    )
    assert (packed.tolist(), cu_seqlens.tolist(), max_seqlen, seqused.tolist()) == ([0.0, 1.0], [0, 2], 2, [1])


@transformers_installed
@pytest.mark.parametrize("kind", ["right", "left", "holes"])
def test_padding_helpers_of_transformers(device, kind):
    from transformers import modeling_flash_attention_utils as host

    mask, hidden = mask_of(kind, 3, 6, device), torch.randn(3, 6, 2, 5, device=device)
    mask[:, 2] = 1  # transformers has no empty batch
    ours, theirs = bert_padding.unpad_input(hidden, mask), host._unpad_input(hidden, mask)
    for left, right in zip(ours, theirs, strict=True):
        assert torch.equal(torch.as_tensor(left), torch.as_tensor(right))
    assert_same(bert_padding.pad_input(ours[0], ours[1], 3, 6), host._pad_input(theirs[0], theirs[1], 3, 6))
    query, *_, indices, (cu_seqlens, _), _ = host._upad_input(hidden, hidden, hidden, mask, 6, bert_padding.unpad_input)
    assert_same(query, hidden[mask.bool()])
    assert (indices.tolist(), cu_seqlens.tolist()) == (ours[1].tolist(), ours[2].tolist())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_index_first_axis(device, dtype):
    rows, indices = torch.randn(6, 2, 3, device=device), torch.tensor([4, 0, 4, 5], device=device)
    ours = with_gradients(lambda t: bert_padding.index_first_axis(t, indices.to(dtype)), rows)
    taken = F.one_hot(indices, 6).float()
    assert_close(ours, with_gradients(lambda t: torch.einsum("ij,jkl->ikl", taken, t), rows))


def test_index_put_first_axis(device):
    values, indices = torch.randn(3, 2, device=device), torch.tensor([4, 0, 2], device=device)
    ours = with_gradients(lambda t: bert_padding.index_put_first_axis(t, indices, 6), values)
    put = F.one_hot(indices, 6).float()
    assert_close(ours, with_gradients(lambda t: put.T @ t, values))
    with pytest.raises(ValueError, match="indices: expected one per row of values = 3, got 2"):
        bert_padding.index_put_first_axis(values, indices[:2], 6)
    with pytest.raises(ValueError, match=r"indices: expected int32 or int64 \[total\], got float32 \[3\]"):
        bert_padding.index_first_axis(values, indices.float())


# --- rotary ---


def rotated(x, cos, sin, positions, interleaved):
    """x ``[..., num_heads, head_dim]`` turned by rows ``positions [...]`` of the tables."""
    cos, sin = cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2)
    dim = 2 * cos.shape[-1]
    turning, rest = x[..., :dim], x[..., dim:]
    first, second = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat([torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1), rest], -1)


def tables(device, rotary_dim, rows=20):
    angles = torch.randn(rows, rotary_dim // 2, device=device)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 4], ids=["whole", "part"])
@pytest.mark.parametrize("offsets", [0, 3, [2, 9]], ids=str)
def test_apply_rotary_emb(device, interleaved, rotary_dim, offsets):
    x, (cos, sin) = torch.randn(2, 5, 3, 8, device=device), tables(device, rotary_dim)
    offsets = torch.tensor(offsets, device=device) if isinstance(offsets, list) else offsets
    first = torch.as_tensor(offsets, device=device).expand(2)
    positions = first[:, None] + torch.arange(5, device=device)
    apply = functools.partial(rotary.apply_rotary_emb, interleaved=interleaved, seqlen_offsets=offsets)
    expected = with_gradients(lambda t: rotated(t, cos, sin, positions, interleaved), x)
    assert_close(with_gradients(lambda t: apply(t, cos, sin), x), expected)

    cu_seqlens = cu_seqlens_of([5, 5], device)
    packed = with_gradients(
        lambda t: apply(t.flatten(0, 1), cos, sin, cu_seqlens=cu_seqlens, max_seqlen=5).view_as(t), x
    )
    assert_close(packed, expected)
    conjugate = rotary.apply_rotary(expected[0], cos, sin, offsets, interleaved=interleaved, conjugate=True)
    torch.testing.assert_close(conjugate, x, **CLOSE)


def test_packed_sequences_of_many_lengths(device):
    x, (cos, sin) = torch.randn(9, 2, 8, device=device), tables(device, 8)
    offsets = torch.tensor([4, 0, 7], dtype=torch.int32, device=device)
    out = rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets, cu_seqlens=cu_seqlens_of([2, 0, 5], device))
    positions = torch.tensor([4, 5, 7, 8, 9, 10, 11, 0, 1], device=device)
    torch.testing.assert_close(out, rotated(x, cos, sin, positions, False), **CLOSE)


def test_in_place_with_and_without_gradients(device):
    x, (cos, sin) = torch.randn(2, 5, 3, 8, device=device), tables(device, 8)
    positions = torch.arange(5, device=device)
    expected = with_gradients(lambda t: rotated(t, cos, sin, positions, False), x)

    def in_place(leaf):
        own = leaf * 1
        assert rotary.apply_rotary_emb(own, cos, sin, inplace=True) is own
        return own

    assert_close(with_gradients(in_place, x), expected)
    with torch.no_grad():
        assert_close([in_place(x)], expected[:1])


def test_rotary_names_what_does_not_fit(device):
    x, (cos, sin) = torch.randn(2, 5, 3, 8, device=device), tables(device, 8, rows=6)
    with pytest.raises(ValueError, match=r"cos: expected rows for positions 2 to 6, got \[6, 4\]"):
        rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=2)
    with pytest.raises(ValueError, match=r"position_ids: expected .* index 9"):
        rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=torch.tensor([0, 2], device=device))
    with pytest.raises(ValueError, match=r"seqlen_offsets: expected an int or \[batch=2\], got \[3\]"):
        rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=torch.zeros(3, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match=r"x: expected \[total, num_heads, head_dim\] with cu_seqlens"):
        rotary.apply_rotary_emb(x, cos, sin, cu_seqlens=cu_seqlens_of([10], device))
    with pytest.raises(ValueError, match=r"cos: expected \[seqlen_rotary, rotary_dim / 2\], got \[1, 6, 4\]"):
        rotary.apply_rotary_emb(x, cos[None], sin[None])


# --- together ---


def test_compiles_whole(device, fresh_compile):
    """Without a graph break, forward and backward, as transformers and remote code call them in one layer."""
    cu_seqlens, (cos, sin) = cu_seqlens_of([4, 5], device), tables(device, 8)
    order = torch.randperm(9, device=device)

    def layer(x):
        q = rotary.apply_rotary_emb(x, cos, sin, cu_seqlens=cu_seqlens, max_seqlen=5)
        k = rotary.apply_rotary_emb(x[None], cos, sin, seqlen_offsets=1)[0]
        options = {"causal": True, "window_size": (2, 2)}
        out = flash_attn.flash_attn_varlen_func(q, k, x, cu_seqlens, cu_seqlens, 5, 5, **options)
        out = flash_attn.flash_attn_func(out[None], k[None], x[None])[0]
        out = bert_padding.index_put_first_axis(bert_padding.index_first_axis(out, order), order, 12)
        return out.reshape(3, 4, 16)

    x = torch.randn(9, 2, 8, device=device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_close(with_gradients(compiled, x), with_gradients(layer, x))
