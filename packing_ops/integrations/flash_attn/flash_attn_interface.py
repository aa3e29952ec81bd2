"""flash_attn.flash_attn_interface: the attention functions under flash-attn's names, signatures and rules.

Where flash-attn and packing_ops differ, flash-attn's rule holds here: with ``causal`` a window's right side is 0,
whatever was asked for (transformers asks for ``(w - 1, w - 1)``).
"""

from typing import Any

import torch

from packing_ops import flash_attn

Attended = torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]


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
) -> Attended:
    """packing_ops.flash_attn_func. q ``[batch, seqlen_q, num_q_heads, head_dim]``, k and v with seqlen_k and kv heads.

    Example:
        >>> flash_attn_func(*torch.zeros(2, 5, 3, 4, 64).unbind(2), causal=True, window_size=(2, 2)).shape
        torch.Size([2, 5, 4, 64])

    Raises:
        NotImplementedError, ValueError: as packing_ops.flash_attn_func.
    """
    window_size = _window(window_size, causal)
    options: tuple[Any, ...] = (
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    return flash_attn.flash_attn_func(q, k, v, *options, s_aux)  # type: ignore[call-overload]


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
) -> Attended:
    """packing_ops.flash_attn_varlen_func. q ``[total_q, num_q_heads, head_dim]``, cu_seqlens int32.

    Example:
        >>> q, k, v = torch.randn(3, 5, 2, 8)
        >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 3, 3, causal=True, window_size=(1, 1)).shape
        torch.Size([5, 2, 8])

    Raises:
        NotImplementedError, ValueError: as packing_ops.flash_attn_varlen_func.
    """
    window_size = _window(window_size, causal)
    seqlens_args = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    options: tuple[Any, ...] = (
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    return flash_attn.flash_attn_varlen_func(q, k, v, *seqlens_args, *options, block_table, s_aux)  # type: ignore[call-overload]


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> Attended:
    """flash_attn_func of ``qkv[:, :, 0 to 2]``, qkv ``[batch, seqlen, 3, num_heads, head_dim]``. Nothing is copied.

    Example:
        >>> flash_attn_qkvpacked_func(torch.zeros(2, 5, 3, 4, 64), causal=True).shape
        torch.Size([2, 5, 4, 64])
    """
    q, k, v = _parts("qkv", qkv, 5, 2, 3)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> Attended:
    """flash_attn_func of q and ``kv[:, :, 0 to 1]``, kv ``[batch, seqlen_k, 2, num_kv_heads, head_dim]``.

    Example:
        >>> flash_attn_kvpacked_func(torch.zeros(2, 5, 4, 64), torch.zeros(2, 7, 2, 1, 64)).shape
        torch.Size([2, 5, 4, 64])
    """
    k, v = _parts("kv", kv, 5, 2, 2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Attended:
    """flash_attn_varlen_func of ``qkv[:, 0 to 2]``, qkv ``[total, 3, num_heads, head_dim]``. Nothing is copied.

    Example:
        >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> flash_attn_varlen_qkvpacked_func(torch.zeros(5, 3, 4, 64), cu_seqlens, 3, causal=True).shape
        torch.Size([5, 4, 64])
    """
    q, k, v = _parts("qkv", qkv, 4, 1, 3)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)


def flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> Attended:
    """flash_attn_varlen_func of q and ``kv[:, 0 to 1]``, kv ``[total_k, 2, num_kv_heads, head_dim]``.

    Example:
        >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> q, kv = torch.zeros(5, 4, 64), torch.zeros(5, 2, 1, 64)
        >>> flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, cu_seqlens, 3, 3).shape
        torch.Size([5, 4, 64])
    """
    k, v = _parts("kv", kv, 4, 1, 2)
    return flash_attn_varlen_func(q, k, v, *args, **kwargs)


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
    """packing_ops.flash_attn_with_kvcache. q ``[batch, seqlen_q, num_q_heads, head_dim]``, caches in rows or in pages.

    Example:
        >>> q, cache = torch.zeros(2, 1, 4, 64), torch.zeros(2, 100, 1, 64)
        >>> flash_attn_with_kvcache(q, cache, cache, cache_seqlens=7, causal=True, window_size=(3, 3)).shape
        torch.Size([2, 1, 4, 64])

    Raises:
        NotImplementedError, ValueError: as packing_ops.flash_attn_with_kvcache.
    """
    places = rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table
    options: tuple[Any, ...] = (
        softmax_scale,
        causal,
        _window(window_size, causal),
        softcap,
        rotary_interleaved,
        alibi_slopes,
        num_splits,
        return_softmax_lse,
        s_aux,
    )
    return flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, *places, *options)


def _window(window_size: tuple[int, int], causal: bool) -> tuple[int, int]:
    left, right = window_size
    return (left, 0) if causal else (left, right)


def _parts(name: str, packed: torch.Tensor, dims: int, dim: int, parts: int) -> tuple[torch.Tensor, ...]:
    if packed.dim() != dims or packed.shape[dim] != parts:
        raise ValueError(f"{name}: expected {dims} dimensions with {parts} at {dim}, got {list(packed.shape)}")
    return packed.unbind(dim)
