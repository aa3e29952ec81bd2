"""flash_attn_func and flash_attn_varlen_func: varlen_attention under flash-attn's names and signatures."""

from typing import Literal, overload

import torch

from packing_ops import _batch_cache
from packing_ops._arguments import check_tensor
from packing_ops.attention import attend, checked_options, refuse_heads_first


@overload
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
    return_attn_probs: Literal[False] = False,
    block_table: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor: ...
@overload
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
    *,
    return_attn_probs: Literal[True],
    block_table: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, None]: ...
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
    """varlen_attention under flash-attn's name and signature, for code written for it.

    Args:
        q, k, v: ``[total, num_heads, head_dim]``; v may have another head_dim, which out then has.
        max_seqlen_q, max_seqlen_k: not needed, any upper bound will do.
        deterministic: accepted; the backward always is.
        s_aux: varlen_attention's ``sinks``, under the name that transformers gives to Hub kernels.
        Others: as varlen_attention. ``causal`` is False unless given, as in flash-attn.

    Returns:
        out, or with ``return_attn_probs`` (out, lse ``[num_q_heads, total_q]``, None).

    Example:
        >>> q, k, v = torch.randn(3, 5, 2, 8)
        >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 3, 3, causal=True).shape
        torch.Size([5, 2, 8])

    Raises:
        NotImplementedError: dropout_p > 0, alibi_slopes or block_table.
        ValueError: as varlen_attention.
    """
    if dropout_p > 0:
        raise NotImplementedError(f"dropout_p: expected 0.0, dropout is not supported, got {dropout_p}")
    if alibi_slopes is not None:
        raise NotImplementedError("alibi_slopes: expected None, ALiBi is not supported")
    if block_table is not None:
        raise NotImplementedError("block_table: expected None, paged keys and values are not supported")
    refuse_heads_first(q)
    options = checked_options(causal, softmax_scale, window_size, softcap, sinks=s_aux)
    out, lse = attend(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    return (out, lse, None) if return_attn_probs else out


@overload
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
    return_attn_probs: Literal[False] = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor: ...
@overload
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
    *,
    return_attn_probs: Literal[True],
    s_aux: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, None]: ...
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
    """flash_attn_varlen_func for a dense batch, each row of it a document: the same op, the same bits.

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
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(tensor, name)
        if tensor.dim() != 4:
            raise ValueError(f"{name}: expected [batch, seqlen, num_heads, head_dim], got {list(tensor.shape)}")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k: expected a batch of {q.shape[0]} like q, got {list(k.shape)}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v: expected {list(k.shape)} like k (but for head_dim), got {list(v.shape)}")
    cu_seqlens = (_batch_cache.dense_cu_seqlens(t.shape[0], t.shape[1], t, name) for t, name in ((q, "q"), (k, "k")))
    seqlens_args = *cu_seqlens, q.shape[1], k.shape[1]
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, True, None, s_aux
    out, lse, _ = flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), *seqlens_args, *options)  # type: ignore[call-overload]
    out, lse = out.view(*q.shape[:3], v.shape[3]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return (out, lse, None) if return_attn_probs else out
