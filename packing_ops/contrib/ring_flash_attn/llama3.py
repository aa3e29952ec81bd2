"""ring_flash_attn's llama3 functions: contiguous rows on the ranks of a group, keys gathered."""

import itertools
from typing import Any

import torch
import torch.distributed as dist

from packing_ops.integrations.adapters import (
    KeyLayout,
    attention_over_keys,
    check_agreement,
    check_cu_seqlens,
    check_cumulated,
    checked_options,
    int32_cu_seqlens,
    kept_with,
    process_group,
    refuse_window,
    sides_of_flash_attn,
)


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: torch.Tensor, causal: bool, rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, int, int, slice]:
    """Return this rank's part of a contiguous row: its queries' documents, and the documents of the keys that they see.

    Args:
        cu_seqlens: int32 ``[num_documents + 1]`` of the whole row, whose end is a multiple of world_size.
        causal: of the attention that will be called.
        rank, world_size: of the group.

    Returns:
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice): local_k_slice are the slots of the
        whole row that cu_seqlens_k counts from. One synchronisation on CUDA.

    Example:
        >>> cu_seqlens = torch.tensor([0, 5, 8], dtype=torch.int32)
        >>> llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, 1, 2)
        (tensor([0, 1, 4], dtype=torch.int32), tensor([0, 5, 8], dtype=torch.int32), 3, 5, slice(0, 8, None))

    Raises:
        ValueError: a row that the ranks do not divide, cu_seqlens that do not start at 0 or decrease.

    Determinism: the same integers in every call.
    Synchronises: once on CUDA.
    Memory: some integers per document.
    Gradients: none: integers.
    """
    check_cu_seqlens(cu_seqlens)
    ends = cu_seqlens.cpu()
    check_cumulated(ends)
    total = int(ends[-1])
    if total % world_size:
        raise ValueError(
            f"cu_seqlens: expected to end at a multiple of world_size={world_size}, got {total}; pad the row's end, as "
            "a document of its own"
        )
    first, last = rank * total // world_size, (rank + 1) * total // world_size
    spans = itertools.pairwise(ends.tolist())
    mine = [(start, end) for start, end in spans if start < last and end > first]
    queries = [min(end, last) - max(start, first) for start, end in mine]
    keys = [(min(end, last) if causal else end) - start for start, end in mine]
    of_queries, of_keys = (
        torch.tensor([0, *each], dtype=torch.int32, device="cpu").cumsum(0).int().to(cu_seqlens.device)
        for each in (queries, keys)
    )
    begin = mine[0][0] if mine else first
    longest = max(queries, default=0), max(keys, default=0)
    return of_queries, of_keys, *longest, slice(begin, begin + sum(keys))


def llama3_flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: dist.ProcessGroup | None = None,
    *,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> Any:
    """Attend with this rank's queries over the keys of all ranks. Differentiable.

    Args:
        q: ``[rows, num_heads, head_dim]``, this rank's part of the row.
        k, v: ``[rows, num_kv_heads, head_dim]``, of the same slots.
        cu_seqlens_q, cu_seqlens_k, local_k_slice: from llama3_flash_attn_prepare_cu_seqlens.
        max_seqlen_q, max_seqlen_k, heads_k_stride: not needed; all heads are gathered at once.
        softmax_scale, causal: as flash_attn.
        window_size: under a causal mask (left, any); nothing is visible to the right.
        dropout_p, alibi_slopes: 0 and None.
        deterministic: either; it is.
        return_attn_probs: return (out, lse, None), lse ``[num_heads, rows]``.
        group: the ranks; None for all.
        softcap, sinks: as varlen_attention.

    Returns:
        out like q.

    Example:
        ``documents`` are the five that llama3_flash_attn_prepare_cu_seqlens gives, heads_k_stride in front of the last.

        >>> out = llama3_flash_attn_varlen_func(q, k, v, *documents, causal=True)  # needs processes # doctest: +SKIP

    Raises:
        NotImplementedError: dropout, ALiBi, a window without a causal mask.
        ValueError: cu_seqlens or a slice that do not fit the rows; as varlen_attention.

    Determinism: the same bits in every call, on the same ranks.
    Synchronises: at most once per row on a GPU, in the first layer.
    Memory: as packing_ops.parallel.gathered_attention.
    Gradients: of q, k and v. No second derivative, no forward mode.
    """
    if dropout_p:
        raise NotImplementedError(f"dropout_p: expected 0.0, dropout in attention is not supported, got {dropout_p}")
    if alibi_slopes is not None:
        raise NotImplementedError("alibi_slopes: expected None, ALiBi is not supported")
    window_size = sides_of_flash_attn(window_size, causal)
    options = checked_options(causal, softmax_scale, window_size, softcap, sinks=sinks)
    refuse_window(options)
    group = process_group(group)
    if group.size() > 1:
        check_agreement("llama3_flash_attn_varlen_func", "contiguous", q, k, v, None, group, options)
    total = group.size() * len(k)
    documents = cu_seqlens_q, cu_seqlens_k
    layout = kept_with(
        documents, ("keys of a slice", local_k_slice.start, local_k_slice.stop, len(q), total),
        lambda: _layout(*documents, local_k_slice, len(q), total),
    )  # fmt: skip
    out, lse = attention_over_keys(q, k, v, layout, group, options)
    return (out, lse, None) if return_attn_probs else out


def _layout(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, keys: slice, rows: int, total: int) -> KeyLayout:
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_cu_seqlens(cu_seqlens, name)
    count = keys.stop - keys.start
    if not 0 <= keys.start <= keys.stop <= total:
        raise ValueError(f"local_k_slice: expected slots of the {total} of all ranks, got {keys.start}:{keys.stop}")
    if cu_seqlens_q[-1] != rows:  # of the whole row, say, on every rank
        raise ValueError(
            f"cu_seqlens_q: expected to end at the {rows} rows of q, a rank's part, got {cu_seqlens_q[-1]}"
        )
    if cu_seqlens_k[-1] != count:
        raise ValueError(f"cu_seqlens_k: expected to end at the {count} keys of local_k_slice, got {cu_seqlens_k[-1]}")
    slots = torch.arange(total, device=cu_seqlens_k.device)
    inside = (slots >= keys.start) & (slots < keys.stop)
    # No document contains the key at `count`.
    positions = (slots - keys.start).where(inside, count)
    key_index = torch.cat([slots[keys], slots[:1]])
    q, k = (int32_cu_seqlens(each).detach() for each in (cu_seqlens_q, cu_seqlens_k))
    return KeyLayout(q, k, key_index, positions[None], total - rows)


def llama3_flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call llama3_flash_attn_varlen_func with k and v in one tensor.

    Args:
        q: ``[rows, num_heads, head_dim]``.
        kv: ``[rows, 2, num_kv_heads, head_dim]``; not copied.
        args, kwargs: what follows v there.

    Returns:
        As llama3_flash_attn_varlen_func.

    Example:
        >>> out = llama3_flash_attn_varlen_kvpacked_func(q, kv, *prepared)  # needs several processes # doctest: +SKIP

    Raises:
        ValueError: as llama3_flash_attn_varlen_func.

    Determinism: as llama3_flash_attn_varlen_func.
    Synchronises: as llama3_flash_attn_varlen_func.
    Memory: as llama3_flash_attn_varlen_func.
    Gradients: of q and kv.
    """
    return llama3_flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], *args, **kwargs)


def llama3_flash_attn_varlen_qkvpacked_func(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call llama3_flash_attn_varlen_func with q, k and v in one tensor.

    Args:
        qkv: ``[rows, 3, num_heads, head_dim]``; not copied.
        args, kwargs: what follows v there.

    Returns:
        As llama3_flash_attn_varlen_func.

    Example:
        >>> out = llama3_flash_attn_varlen_qkvpacked_func(qkv, *prepared)  # needs several processes # doctest: +SKIP

    Raises:
        ValueError: as llama3_flash_attn_varlen_func.

    Determinism: as llama3_flash_attn_varlen_func.
    Synchronises: as llama3_flash_attn_varlen_func.
    Memory: as llama3_flash_attn_varlen_func.
    Gradients: of qkv.
    """
    return llama3_flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], *args, **kwargs)
