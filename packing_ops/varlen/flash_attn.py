"""flash_attn_func, flash_attn_varlen_func and flash_attn_with_kvcache: varlen_attention by flash-attn's names and
rules.

Where flash-attn and varlen_attention differ, flash-attn's rule holds here: with ``causal`` a window's right side is 0,
whatever was asked for (transformers asks for ``(w - 1, w - 1)``).
"""

from typing import Literal, TypedDict, overload

import torch
from typing_extensions import Unpack

from packing_ops._runtime import batch_cache
from packing_ops._runtime.arguments import check_cu_seqlens, check_tensor, described, integer, sides_of_flash_attn
from packing_ops.keys import KeyPages, lengths_of, lengths_with
from packing_ops.varlen.attention import attend
from packing_ops.varlen.call import refuse_heads_first
from packing_ops.varlen.options import checked_options


class FlashAttnKeywords(TypedDict, total=False):
    """Names the options of flash-attn's functions that their overloads take only by name."""

    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: torch.Tensor | None
    deterministic: bool
    s_aux: torch.Tensor | None


class FlashAttnVarlenKeywords(FlashAttnKeywords, total=False):
    """Adds what only flash_attn_varlen_func takes."""

    block_table: torch.Tensor | None


class KvCacheKeywords(TypedDict, total=False):
    """Names the options of flash_attn_with_kvcache."""

    cache_batch_idx: torch.Tensor | None
    cache_leftpad: torch.Tensor | None
    block_table: torch.Tensor | None
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    rotary_interleaved: bool
    alibi_slopes: torch.Tensor | None
    num_splits: int
    s_aux: torch.Tensor | None


@overload
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, *, return_attn_probs: Literal[False] = False, **options: Unpack[FlashAttnVarlenKeywords],
) -> torch.Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, *, return_attn_probs: Literal[True], **options: Unpack[FlashAttnVarlenKeywords],
) -> tuple[torch.Tensor, torch.Tensor, None]: ...  # fmt: skip
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """Call varlen_attention under flash-attn's name and signature, for code written for it.

    Args:
        q, k, v: ``[total, num_heads, head_dim]``; v may have another head_dim, which out then has.
        max_seqlen_q, max_seqlen_k: not needed, any upper bound will do.
        deterministic: accepted; the backward always is.
        block_table: int32 ``[num_documents, pages]``: k and v are pages, as in varlen_attention, and cu_seqlens_k tell
            how many keys each document has. Forward only.
        s_aux: varlen_attention's ``sinks``, under the name that transformers gives to Hub kernels.
        window_size: (left, right); with ``causal`` the right side is 0, whatever is given.
        Others: as varlen_attention. ``causal`` is False unless given, as in flash-attn.

    Returns:
        out, or with ``return_attn_probs`` (out, lse ``[num_q_heads, total_q]``, None).

    Example:
        >>> q, k, v = torch.randn(3, 5, 2, 8)
        >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 3, 3, causal=True).shape
        torch.Size([5, 2, 8])

    Raises:
        NotImplementedError: dropout_p > 0 or alibi_slopes; a gradient with block_table.
        ValueError: as varlen_attention.

    Determinism: as varlen_attention, with or without ``deterministic``.
    Synchronises: never.
    Memory: as varlen_attention.
    Gradients: as varlen_attention.
    """
    if dropout_p > 0:
        raise NotImplementedError(f"dropout_p: expected 0.0, dropout is not supported, got {dropout_p}")
    if alibi_slopes is not None:
        raise NotImplementedError("alibi_slopes: expected None, ALiBi is not supported")
    refuse_heads_first(q)
    window_size = sides_of_flash_attn(window_size, causal)
    options = checked_options(causal, softmax_scale, window_size, softcap, sinks=s_aux)
    if block_table is None:
        out, lse = attend(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    else:
        check_tensor(block_table, "block_table")
        check_cu_seqlens(cu_seqlens_k, "cu_seqlens_k")
        if cu_seqlens_k.is_cpu and batch_cache.is_real(cu_seqlens_k) and cu_seqlens_k[0] != 0:
            raise ValueError(f"cu_seqlens_k: expected to start at 0, got {int(cu_seqlens_k[0])}")
        out, lse = attend(q, k, v, cu_seqlens_q, KeyPages(block_table, lengths_of(cu_seqlens_k)), options)
    return (out, lse, None) if return_attn_probs else out


@overload
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, *, return_attn_probs: Literal[False] = False, **options: Unpack[FlashAttnKeywords],
) -> torch.Tensor: ...  # fmt: skip
@overload
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, *, return_attn_probs: Literal[True], **options: Unpack[FlashAttnKeywords],
) -> tuple[torch.Tensor, torch.Tensor, None]: ...  # fmt: skip
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """Call flash_attn_varlen_func for a dense batch, each row of it a document: the same op, the same bits.

    Args:
        q: ``[batch, seqlen_q, num_q_heads, head_dim]``. No copy where the rows follow each other in memory
            (``stride(0) == seqlen_q * stride(1)``), as in a fused QKV projection.
        k, v: ``[batch, seqlen_k, num_kv_heads, head_dim]``; v may have another head_dim, which out then has.
        Others: as flash_attn_varlen_func.

    Returns:
        out like q, or with ``return_attn_probs`` (out, lse ``[batch, num_q_heads, seqlen_q]``, None).

    Example:
        >>> flash_attn_func(*torch.zeros(2, 5, 3, 4, 64).unbind(2), causal=True).shape
        torch.Size([2, 5, 4, 64])

    Raises:
        NotImplementedError: dropout_p > 0 or alibi_slopes.
        ValueError: as varlen_attention, and for batch * seqlen of 2**31 or more.

    Determinism: as varlen_attention, with or without ``deterministic``.
    Synchronises: never.
    Memory: as varlen_attention.
    Gradients: as varlen_attention.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(tensor, name)
        if tensor.dim() != 4:
            raise ValueError(f"{name}: expected [batch, seqlen, num_heads, head_dim], got {list(tensor.shape)}")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k: expected a batch of {q.shape[0]} like q, got {list(k.shape)}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v: expected {list(k.shape)} like k (but for head_dim), got {list(v.shape)}")
    cu_seqlens = (batch_cache.dense_cu_seqlens(t.shape[0], t.shape[1], t, name) for t, name in ((q, "q"), (k, "k")))
    seqlens_args = *cu_seqlens, q.shape[1], k.shape[1]
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, True, None, s_aux
    out, lse, _ = flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), *seqlens_args, *options)  # type: ignore[call-overload]
    out, lse = out.view(*q.shape[:3], v.shape[3]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return (out, lse, None) if return_attn_probs else out


@overload
def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = None,
    v: torch.Tensor | None = None, rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None, *, return_softmax_lse: Literal[False] = False,
    **options: Unpack[KvCacheKeywords],
) -> torch.Tensor: ...  # fmt: skip
@overload
def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = None,
    v: torch.Tensor | None = None, rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None, *, return_softmax_lse: Literal[True],
    **options: Unpack[KvCacheKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend with new queries over a cache of keys and values, into which new keys may be written first. Forward only.

    Args:
        q: ``[batch, seqlen_q, num_q_heads, head_dim]``: the last queries of each sequence.
        k_cache, v_cache: ``[batch, seqlen_cache, num_kv_heads, head_dim]``, or with ``block_table`` pages,
            ``[num_pages, page_size, num_kv_heads, head_dim]``, page_size a multiple of 128.
        k, v: ``[batch, seqlen_new, num_kv_heads, head_dim]``, written into the caches, in place, after the keys that
            cache_seqlens counts. Those beyond the end of the cache are not written, and the call raises.
        cache_seqlens: keys in the cache before this call: a number, or int32 ``[batch]``. Layers that pass the same
            tensor share a plan. Without it, and without k, the whole cache.
        cache_batch_idx: int32 ``[batch]``, each sequence's row of a cache without pages; without it they are in order.
        block_table: int32 ``[batch, pages]``, the pages of each sequence.
        num_splits: 0 or 1: keys are never split over blocks, which would change bits.
        s_aux: varlen_attention's ``sinks``.
        rotary_interleaved: not read, since rotary_cos and rotary_sin are refused.
        softmax_scale, causal, window_size, softcap: as flash_attn_varlen_func.

    Returns:
        out like q with v's head_dim, or with ``return_softmax_lse`` (out, lse ``[batch, num_q_heads, seqlen_q]``). Its
        bits are those of varlen_attention over the same keys end to end.

    Example:
        >>> cache, lengths = torch.zeros(2, 2, 256, 1, 64), torch.tensor([5, 0], dtype=torch.int32)
        >>> q, k, v = torch.ones(3, 2, 1, 1, 64)  # a token of each sequence
        >>> flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=lengths, causal=True)[:, 0, 0, 0]
        tensor([0.9983, 1.0000])
        >>> cache[0, :, :6, 0, 0]
        tensor([[0., 0., 0., 0., 0., 1.],
                [1., 0., 0., 0., 0., 0.]])

    Raises:
        NotImplementedError: rotary_cos, rotary_sin, cache_leftpad or alibi_slopes, num_splits over 1; a gradient.
        ValueError: shapes, dtypes or devices that do not fit; the message names the argument. A cache that is too short
            or a wrong page: seqused_k (cache_seqlens and the new keys) or block_table, on CUDA in a later call. After
            an error new keys may be in the cache.

    Determinism: the same bits in every call: those of varlen_attention over the same keys end to end.
    Synchronises: never; a wrong page or length on CUDA raises in a later call.
    Memory: out and lse, and a plan that layers share.
    Gradients: none: a tensor that requires one raises.
    """
    for name, given in {
        "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_leftpad": cache_leftpad, "alibi_slopes": alibi_slopes
    }.items():  # fmt: skip
        if given is not None:
            raise NotImplementedError(f"{name}: expected None, it is not supported")
    if num_splits not in (0, 1):
        raise NotImplementedError(
            f"num_splits: expected 0 or 1, splits of the keys are not supported, got {num_splits}"
        )
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(tensor, name)
        if tensor.dim() != 4:
            raise ValueError(f"{name}: expected four dimensions, as flash-attn has them, got {described(tensor)}")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"v_cache: expected {list(k_cache.shape)} like k_cache (but for head_dim), got {described(v_cache)}"
        )
    window_size = sides_of_flash_attn(window_size, causal)
    options = checked_options(causal, softmax_scale, window_size, softcap, sinks=s_aux)
    block_table = _cache_table(q, k_cache, cache_batch_idx, block_table)
    lengths = _cache_lengths(q, cache_seqlens, block_table.shape[1] * k_cache.shape[1], k)
    seqused_k = lengths
    if k is not None or v is not None:
        check_tensor(k, "k")
        check_tensor(v, "v")
        assert k is not None
        assert v is not None
        for name, tensor in {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}.items():
            if torch.is_grad_enabled() and tensor.requires_grad:
                raise NotImplementedError(
                    f"{name}: expected a tensor without requires_grad, keys in a cache get no gradient"
                )
        seqused_k = lengths_with(lengths, k.shape[1:2].numel())
        _write_keys(k_cache, v_cache, k, v, block_table, lengths)
    cu_seqlens_q = batch_cache.dense_cu_seqlens(q.shape[0], q.shape[1], q, "q")
    pages = KeyPages(block_table, seqused_k)
    out, lse = attend(q.flatten(0, 1), k_cache, v_cache, cu_seqlens_q, pages, options)
    out, lse = out.view(*q.shape[:3], out.shape[-1]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return (out, lse) if return_softmax_lse else out


def _write_keys(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """Write k and v ``[num_documents, new, num_kv_heads, head_dim]`` into pages, after the first ``lengths`` keys.

    Rows that have no place in their document's pages are left out: what is wrong, attention then says.
    """
    documents, new = block_table.shape[0], k.shape[1:2].numel()
    for rows, name, cache in ((k, "k", k_cache), (v, "v", v_cache)):
        if rows.dtype != cache.dtype or rows.shape != (documents, new, *cache.shape[2:]):
            wanted = f"[batch={documents}, seqlen_new={new}, num_kv_heads, head_dim] like its cache, {described(cache)}"
            raise ValueError(f"{name}: expected {wanted}, got {described(rows)}")
    num_pages, page_size = k_cache.shape[:2]
    if block_table.numel() == 0 or num_pages * page_size == 0:
        return
    keys = lengths.long()[:, None] + torch.arange(new, device=lengths.device)
    column = keys.div(page_size, rounding_mode="floor")
    page = block_table.gather(1, column.clamp(0, block_table.shape[1] - 1))
    fits = ((lengths >= 0)[:, None] & (column < block_table.shape[1]) & (page >= 0) & (page < num_pages)).flatten()
    if fits.numel() == 0:
        return
    # A row without a place writes what the first one that has a place writes: nothing waits to count them.
    first, row = fits.byte().argmax(), torch.arange(fits.numel(), device=fits.device)
    row = row.where(fits, first)
    some = fits.index_select(0, first.view(1))
    at = page.flatten().long()[row].where(some, 0), (keys % page_size).flatten()[row].where(some, 0)
    with torch.no_grad():
        for cache, rows in ((k_cache, k), (v_cache, v)):
            cache.index_put_(at, rows.flatten(0, 1)[row].where(some, cache[at]))


def _cache_table(
    q: torch.Tensor, k_cache: torch.Tensor, cache_batch_idx: torch.Tensor | None, block_table: torch.Tensor | None
) -> torch.Tensor:
    """Return a block_table; a row of a cache without pages is one page."""
    batch = q.shape[0]
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx: expected None beside block_table, got both")
        check_tensor(block_table, "block_table")
        if block_table.dim() != 2 or block_table.shape[0] != batch:
            raise ValueError(f"block_table: expected int32 [batch={batch}, pages], got {described(block_table)}")
        return block_table
    if cache_batch_idx is not None:
        check_tensor(cache_batch_idx, "cache_batch_idx")
        if cache_batch_idx.shape != (batch,) or cache_batch_idx.dtype != torch.int32:
            raise ValueError(f"cache_batch_idx: expected int32 [batch={batch}], got {described(cache_batch_idx)}")
        return cache_batch_idx[:, None]
    if k_cache.shape[0] != batch:
        raise ValueError(f"k_cache: expected a batch of {batch} like q, got {described(k_cache)}")
    return batch_cache.dense_cu_seqlens(batch, 1, q, "q")[:batch, None]


def _cache_lengths(
    q: torch.Tensor, cache_seqlens: int | torch.Tensor | None, max_keys: int, k: torch.Tensor | None
) -> torch.Tensor:
    """Return the keys of each sequence that are in the cache before the call, int32 ``[batch]``."""
    batch = q.shape[0]
    if cache_seqlens is None:
        if k is not None:
            raise ValueError(
                "cache_seqlens: expected a number or int32 [batch] beside k, which is written there, got None"
            )
        cache_seqlens = max_keys
    if not isinstance(cache_seqlens, torch.Tensor):
        if not 0 <= (number := integer(cache_seqlens, "cache_seqlens")) <= max_keys:
            raise ValueError(f"cache_seqlens: expected 0 to the cache's {max_keys} keys, got {number}")
        cache_seqlens = torch.full((batch,), number, dtype=torch.int32, device=q.device)
    if cache_seqlens.shape != (batch,) or cache_seqlens.dtype != torch.int32:
        raise ValueError(f"cache_seqlens: expected a number or int32 [batch={batch}], got {described(cache_seqlens)}")
    if cache_seqlens.device != q.device:
        raise ValueError(f"cache_seqlens: expected on {q.device} like q, got {described(cache_seqlens)} elsewhere")
    if cache_seqlens.is_cpu and batch_cache.is_real(cache_seqlens) and (cache_seqlens < 0).any():
        raise ValueError(f"cache_seqlens: expected numbers of keys, 0 or more, got {int(cache_seqlens.min())}")
    return cache_seqlens
